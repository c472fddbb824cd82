"""Commands run inside the test's own process, which saves each test an interpreter's start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from playbook_app.cli import app


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as stop:
        app.main(list(words))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def refused(capsys: pytest.CaptureFixture[str], *words: str, listed: bool = False) -> str:
    """The line with which a command refuses, which prints nothing else and ends with code 2; with `listed`, indented lines below it have
    one problem each.
    """
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, ""), words
    below = err.strip().splitlines()[1:]
    assert err.strip()
    assert bool(below) is listed, err
    assert all(each.startswith("  ") for each in below), err
    return err


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints that succeeds."""
    code, out, err = run(capsys, *words)
    assert code == 0, err
    return out


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON document of a command that succeeds."""
    return json.loads(printed(capsys, *words, "--json"))
