"""Bisecting a small repository in which one commit is slower, or fails."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from test_gate import case, options, repo, worktrees  # noqa: F401

from playbook.errors import ConfigError, LaunchError
from playbook_bench.judge import slowdown
from playbook_bench.launch import local
from playbook_bench.run import bisect, gate
from playbook_bench.statements.rules import bisect_finds_the_commit

EXACT = "dispatch_bytes_per_token_layer"
"""A metric that takes one pair for each commit."""


def run(repo: Any, tmp_path: Path, good: str) -> slowdown.BisectResult:  # noqa: F811
    return bisect.run(case(EXACT), good, "HEAD", options(tmp_path), root=repo.root)


@pytest.mark.parametrize(("plant", "trouble"), [({"fault": "oom"}, "oom"), ({"fault": "crash"}, "crash")])
@pytest.mark.full
def test_the_planted_commit_is_found(repo: Any, tmp_path: Path, plant: dict[str, Any], trouble: str) -> None:  # noqa: F811
    repo({"n": 1})
    repo(plant)
    history = bisect.commits(repo.root, "HEAD~2", "HEAD")
    found = run(repo, tmp_path, "HEAD~2")
    assert (found.status, found.trouble, found.suspects) == ("found", trouble, [history[1]]), found
    assert found.exit_code == 0
    assert len(worktrees(repo.root)) == 1, "the worktrees are gone"
    assert json.loads(json.dumps(bisect.as_json(found)))["suspects"] == [history[1]]


@pytest.mark.full
def test_what_cannot_be_judged_leaves_suspects_and_what_is_well_leaves_none(repo: Any, tmp_path: Path) -> None:  # noqa: F811
    repo({"fault": "refused"})
    repo({"fault": "crash"})
    found = run(repo, tmp_path, "HEAD~2")
    assert (found.status, len(found.suspects), found.exit_code) == ("suspects", 2, 3)
    repo({})
    found = run(repo, tmp_path, "HEAD~3")
    assert (found.status, found.suspects, found.exit_code) == ("no_trouble", [], 3)


def test_a_commit_that_the_gate_leaves_undecided_is_passed_over() -> None:
    open_ = gate.GateResult("undecided", "s", "c", "r", "cpu", 0.01)
    assert bisect.trouble_of(open_) == slowdown.UNKNOWN
    assert bisect.trouble_of(dataclasses.replace(open_, status="pass")) == slowdown.NONE


def test_a_signal_between_two_gates_leaves_no_files(repo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    repo({"n": 1})

    def ended(*_: Any, **__: Any) -> gate.GateResult:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr(gate, "run", ended)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or without a handler of bisect's own it would end this process
    try:
        with pytest.raises(local.Interrupted):
            run(repo, tmp_path, "HEAD~1")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.glob("playbook-gate-*"))


def test_a_good_commit_that_fails_is_an_error(repo: Any, tmp_path: Path) -> None:  # noqa: F811
    repo({"fault": "crash"})
    repo({"fault": "crash", "again": 1})
    with pytest.raises(LaunchError, match="good commit fails itself"):
        run(repo, tmp_path, "HEAD~1")


@pytest.mark.full
def test_a_good_commit_that_fails_once_by_chance_costs_that_judgement_alone(
    repo: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo({"n": 1})
    repo({"fault": "crash"})
    repo({"fault": "crash", "n": 2})
    history = bisect.commits(repo.root, "HEAD~3", "HEAD")
    real, calls = gate.run, []

    def unlucky(*words: Any, **options: Any) -> gate.GateResult:
        found = real(*words, **options)
        calls.append(found)
        broken = found.runs[0].model_copy(update={"variant": "baseline", "outcome": "crash"})
        return dataclasses.replace(found, status="error", runs=[broken]) if len(calls) == 2 else found

    monkeypatch.setattr(gate, "run", unlucky)
    found = run(repo, tmp_path, "HEAD~3")
    assert [j.trouble for j in found.judged].count(slowdown.UNKNOWN) == 1
    assert history[1] in found.suspects


@pytest.mark.parametrize(
    ("good", "bad", "says"), [("HEAD", "HEAD~1", "does not follow"), ("HEAD", "HEAD", "does not follow"), ("-x", "HEAD", "no commit")]
)
def test_commits_that_do_not_follow_each_other(repo: Any, good: str, bad: str, says: str) -> None:  # noqa: F811
    repo({"n": 1})
    with pytest.raises(ConfigError, match=says):
        bisect.commits(repo.root, good, bad)


def test_the_invariant_holds_and_notices_a_search_that_errs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bisect_finds_the_commit()[0]
    real = slowdown.search

    def late(history: Any, judge: Any, told: Any = None) -> slowdown.BisectResult:
        found = real(history, judge, told)
        return slowdown.BisectResult(found.suspects[-1:], found.trouble, found.judged)

    monkeypatch.setattr(slowdown, "search", late)
    holds, sentence, _ = bisect_finds_the_commit()
    assert not holds
    assert "wrong" in sentence
