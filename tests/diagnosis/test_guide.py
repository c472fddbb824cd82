"""The guide to diagnosis: its console blocks run, and the answer that it shows is today's."""

import re
import sys

import pytest

from playbook.paths import repo_root
from playbook_app.cli.app import app, run_command

sys.path.insert(0, str(repo_root() / "tools"))
from plan_page import ANSWERED, DIAGNOSIS, diagnosis

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.mark.full
def test_the_console_blocks_run_and_the_answer_is_todays(tmp_path, monkeypatch, capsys):
    page = DIAGNOSIS.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ran = 0
    for language, title, text in BLOCK.findall(page):
        if title:
            (tmp_path / title).write_text(text, encoding="utf-8")
        elif language == "console":
            for line in text.splitlines():
                code = run_command(app, line.split()[1:])
                assert code == 0, capsys.readouterr().err
                ran += 1
    assert ran == 2
    capsys.readouterr()
    assert f"{ANSWERED}\n\n```text\n{diagnosis()}\n```\n" in page
