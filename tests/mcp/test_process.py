"""`playbook mcp` as a process: over stdio, interrupted, and without its package."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial

import anyio
import pytest
from guide_blocks import script
from in_process import refused
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from playbook.paths import data_root, repo_root, sources
from playbook_app.mcp.server import server


def test_over_stdio_the_same_answers_come_and_nothing_else_is_printed(tmp_path, library):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(repo_root()))}
    command = StdioServerParameters(command=sys.executable, args=["-m", "playbook", "mcp"], env=env, cwd=str(tmp_path))

    async def talk(errors):
        async with Client(stdio_client(command, errlog=errors)) as client:
            with anyio.fail_after(600):
                names = {t.name for t in (await client.list_tools()).tools}
                result = await client.call_tool("get_card", {"card_id": "moe-dispatcher-choice"})
                broken = await client.call_tool("get_card", {"card_id": "/etc/passwd"})
                skill = await client.read_resource("skill://confirm-claim/SKILL.md")
                return names, result, broken, skill.contents[0].text

    async def here():
        async with Client(server(library)) as client:
            names = {t.name for t in (await client.list_tools()).tools}
            return names, (await client.call_tool("get_card", {"card_id": "moe-dispatcher-choice"})).structured_content

    with (tmp_path / "stderr").open("w+", encoding="utf-8") as errors:
        names, result, broken, skill = anyio.run(partial(talk, errors))
        errors.seek(0)
        assert errors.read() == ""
    assert (names, result.structured_content) == anyio.run(here)
    assert broken.is_error
    assert skill.startswith("---\nname: confirm-claim\n")


@pytest.mark.full
def test_an_interrupt_ends_the_server_though_its_client_keeps_the_pipe_open(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(repo_root()))}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    command = [sys.executable, "-m", "playbook", "mcp"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=env) as serving:
        try:
            serving.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}).encode() + b"\n")
            serving.stdin.flush()
            assert json.loads(serving.stdout.readline())["result"]["serverInfo"]["name"] == "playbook"
            serving.send_signal(signal.SIGINT)
            assert serving.wait(timeout=600) == -signal.SIGINT
        finally:
            serving.kill()


def test_without_the_package_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "playbook_app.mcp.server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert "pip install '.[mcp]'" in refused(capsys, "mcp")


@pytest.mark.full
def test_the_client_of_the_guide_plans_and_exports(tmp_path):
    """As the page shows it, with a `playbook` on PATH."""
    page = (data_root("guide") / "agents.md").read_text(encoding="utf-8")
    (text,) = re.findall(r'^```python title="client.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    (tmp_path / "client.py").write_text(text, encoding="utf-8")
    paths = os.pathsep.join(sources(repo_root()))
    script(tmp_path / "playbook", f'PYTHONPATH={paths} exec {sys.executable} -m playbook "$@"')
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "client.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("8,192 tokens, global batch 512, at most 73.2 GiB")
    assert any(re.match(r"(fits|tight): [\d.]+ of 79.6 GiB$", line) for line in rest)
    assert any("pretrain_gpt.py" in line for line in rest)
