"""The guide to diagnosis: its console blocks run, and the answer that it shows is today's."""

import pytest
from guide_blocks import consoles
from in_process import printed
from plan_page import ANSWERED, DIAGNOSIS, diagnosis


@pytest.mark.full
def test_the_console_blocks_run_and_the_answer_is_todays(tmp_path, monkeypatch, capsys):
    page = DIAGNOSIS.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ran = 0
    for text in consoles(DIAGNOSIS, tmp_path):
        for line in text.splitlines():
            printed(capsys, *line.split()[1:])
            ran += 1
    assert ran == 2
    assert f"{ANSWERED}\n\n```text\n{diagnosis()}\n```\n" in page
