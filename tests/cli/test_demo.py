"""`playbook demo`: what it runs, and how it ends."""

from __future__ import annotations

import io
import re

import pytest
from in_process import run

from playbook.cards.load import load_all
from playbook.paths import data_root, repo_root
from playbook.skills.model import load_skills
from playbook_app.cli.app import app, run_command
from playbook_app.cli.commands import confirm
from playbook_app.cli.output import print_table
from playbook_bench.run import targets

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_four_claims_can_be_tested_on_a_cpu():
    cards = load_all()
    for target in confirm.DEMO:
        card, _, claim = target.partition("/")
        (found,) = [c for c in cards[card].claims if claim in (c.id, c.mechanism_check and c.mechanism_check.id)]
        assert claim == found.mechanism_check.id if claim.endswith(".m") else found.cpu_scope


def test_a_block_for_each_claim_then_what_to_do_next(capsys, elsewhere):
    code, out, _ = run(capsys, "demo", "long-context-cp-sizing/L2")
    statement = next(c.statement for c in load_all()["long-context-cp-sizing"].claims if c.id == "L2")
    assert code == 0
    assert f"long-context-cp-sizing/L2: {statement}\nL2 " in out
    lacking, known = targets.count_inapplicable("cpu")
    assert 0 < lacking < known
    assert out.count(f"{lacking} of {known} claims need") == 1
    commands = [line for line in out.partition("to do next:")[2].splitlines() if line]
    assert len(commands) == 3
    assert (elsewhere / commands[-1].split()[3]).is_file()


@pytest.mark.parametrize(("claim", "verdict", "code", "demo"), [("T8", "refuted", 1, 0), ("T5", "not applicable", 4, 4)])
@pytest.mark.sample("T8-refuted-1-0")
def test_a_verdict_of_any_kind_is_a_success_and_none_is_not(capsys, claim, verdict, code, demo):
    assert run(capsys, "confirm", f"vlm-real-data/{claim}", "--profile", "cpu")[0] == code
    ended, out, _ = run(capsys, "demo", f"vlm-real-data/{claim}")
    assert ended == demo
    assert verdict in out


def on(monkeypatch, terminal, printing):
    """What is printed to a terminal, or elsewhere, by something that succeeds."""
    monkeypatch.setattr("sys.stdout", stream := io.StringIO())
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    assert not printing()
    return stream.getvalue()


def test_on_a_terminal_the_last_column_of_a_table_is_folded_and_elsewhere_no_line_is(monkeypatch):
    rows = [{"id": "a-long-name-of-a-claim", "statement": "words " * 30}, {"id": "b", "statement": "\x1b[2J"}]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    shown = {
        terminal: re.sub(r"\x1b\[\d*m", "", on(monkeypatch, terminal, lambda: print_table(rows, ("id", "statement")))).splitlines()
        for terminal in (True, False)
    }
    assert [line.split()[0] for line in shown[False]] == ["id", "a-long-name-of-a-claim", "b"]
    assert len(shown[True]) > 3
    assert max(map(len, shown[True])) <= 80
    assert shown[True][1].startswith("a-long-name-of-a-claim  words")
    assert "\x1b" not in "".join(shown[True] + shown[False])


@pytest.mark.parametrize(
    "command",
    [("skills", "list"), ("bench", "list"), ("cards", "list"), ("cards", "list", "--claims"), ("config", "list"), ("evidence", "list")],
)
@pytest.mark.sample("command0", "command2")
def test_a_list_fits_80_columns_without_breaking_a_word_and_shows_all_when_it_is_to_be_wide(monkeypatch, command):
    monkeypatch.chdir(repo_root())
    monkeypatch.setenv("COLUMNS", "80")
    narrow, wide = (on(monkeypatch, True, lambda more=more: run_command(app, [*command, *more])) for more in ((), ("--wide",)))
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    names = [(word[: mark.end()], word[mark.end() :]) for word in wide.split() for mark in re.finditer("_", word)]
    whole = {*wide.split(), *(part for name in names for part in name)}
    assert not set(narrow.partition("left out")[0].split()) - whole, "no part of a word alone, unless it ends in an underscore"
    if command[0] == "skills":
        assert len(narrow.splitlines()) <= 2 + 2 * len(load_skills(data_root("skills"))), "two lines a skill"
    assert ("--wide shows all" in narrow) == (len(narrow.split("\n")[0].split()) < len(wide.split("\n")[0].split()))


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "llama3_8b", "--gpus", "8", "--seq", "8192", "--gbs", "128"),
        ("diagnose", "--model", "qwen3_30b_a3b", "--gpus", "64", "--gpu", "h100", "--mfu", "12", "--layout", "tp=2,ep=8,recompute=full"),
    ],
)
@pytest.mark.parametrize("columns", [80, 100])
def test_an_answer_fits_its_terminal_and_a_folded_command_reads_as_the_one_in_a_pipe(monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = {terminal: on(monkeypatch, terminal, lambda: run_command(app, list(command))) for terminal in (True, False)}
    assert [line for line in shown[True].splitlines() if len(line) > columns and "https://" not in line] == []
    assert [line for line in shown[True].splitlines() if line.startswith("start ") and line.endswith("\\")] == [], "no command"
    words = set(shown[False].split())
    assert not set(shown[True].split()) - words - {word.rstrip(";") for word in words} - {"\\"}, "no part of a word alone"
    pasted = re.sub(r" \\\n +", " ", shown[True])
    commands = [part.strip() for line in re.findall(r"(?<= )playbook [a-z].*$", shown[False], re.MULTILINE) for part in line.split("; ")]
    assert commands
    assert [c for c in commands if c not in pasted] == []
