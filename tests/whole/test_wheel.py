"""The wheel in an environment of its own, far from the repository: what a user has after `pip install`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from playbook.paths import KINDS, repo_root

pytestmark = [pytest.mark.full, pytest.mark.timeout(6000)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of commands of an environment with the wheel; the packages that it needs are lent by the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, repo_root()], check=True)
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", home / "bin" / "python", "install", "--no-compile", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # Only folders are added, no .pth files in them are read: an editable install of the repository stays out.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return home / "bin"


@pytest.fixture
def run(installed, tmp_path):
    """Run a command of the wheel in an empty folder."""

    def call(*words):
        return subprocess.run(words_of(installed, words), env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=3000)

    return call


def words_of(installed, words):
    return [str(installed / words[0]), *words[1:]]


def environment():
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def test_every_file_that_is_shipped_is_in_the_wheel(run):
    for kind, folder in KINDS.items():
        listing = (
            f"from playbook.paths import data_root, in_package; root = data_root('{kind}'); assert in_package(root)\n"
            "print(*sorted(str(f.relative_to(root)) for f in root.rglob('*') if f.is_file()))"
        )
        shown = run("python", "-c", listing).stdout.split()
        tracked = subprocess.run(["git", "ls-files", folder], cwd=repo_root(), capture_output=True, text=True, check=True).stdout.split()
        assert shown == sorted(name.removeprefix(f"{folder}/") for name in tracked), kind


def test_cards_are_found_read_and_checked(run):
    found = run("playbook", "search", "all-to-all takes a third of the step", "--json")
    assert "moe-dispatcher-choice" in {hit["id"] for hit in json.loads(found.stdout)["hits"]}
    assert run("playbook", "cards", "show", "moe-dispatcher-choice").returncode == 0
    checked = run("playbook", "cards", "check")
    assert checked.returncode == 0, checked.stderr
    records = json.loads(run("playbook", "evidence", "list", "--json").stdout)
    assert len(records) > 50


def test_a_layout_is_judged(run):
    done = run("playbook", "layout", "memory", "--model", "qwen3_30b_a3b", "--gpus", "8", "ep=8", "mbs=1", "seq_len=4096", "--json")
    assert json.loads(done.stdout)["peak"] > 1 << 30


def test_a_run_is_diagnosed(run):
    done = run("playbook", "diagnose", "--model", "Qwen/Qwen3-8B", "--gpus", "8", "--gpu", "h100", "--gbs", "64", "--mfu", "40", "--json")
    answer = json.loads(done.stdout)
    assert answer["position"]["where"] != "unknown"
    assert all(action["test"] for action in answer["actions"])


def test_an_agent_is_answered_over_stdio(installed, tmp_path):
    command, *arguments = words_of(installed, ["playbook", "mcp"])
    server = StdioServerParameters(command=command, args=arguments, env=environment(), cwd=str(tmp_path))

    async def ask():
        async with Client(stdio_client(server)) as client:
            with anyio.fail_after(600):
                return await client.call_tool("get_card", {"card_id": "moe-dispatcher-choice"})

    assert "W9" in json.dumps(anyio.run(ask).model_dump(mode="json"))


def test_a_claim_gets_its_verdict(run, tmp_path):
    done = run("playbook", "demo", "moe-dispatcher-choice/W9.m")
    assert done.returncode == 0, done.stderr
    assert "refuted" in done.stdout
    assert list((tmp_path / ".playbook" / "results" / "cpu").glob("*.json"))
