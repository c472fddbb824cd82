"""What commands print of results, without a launch."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.text import Text
from stored import MACHINE, record, shipped

from playbook.records.evidence import Missing
from playbook_bench.run import aa, gate, report, store
from playbook_bench.run.store import Outcome


def printed_by(show: Callable[..., None], *what: object) -> str:
    """What a function of reports prints."""
    out = report.console(io.StringIO())
    show(*what, out)
    return out.file.getvalue()


LACKS = ("scope", "scope", "package", "no_case", "profile", "kind")


def outcomes(gpus: int) -> list[Outcome]:
    """A confirmed claim, and those that this machine cannot test."""
    machine = MACHINE.model_copy(update={"gpus": gpus})
    found = [Outcome(record("confirmed", claim="W0"), Path("r"))]
    for number, reason in enumerate(LACKS, start=1):
        evidence = record("not_applicable", claim=f"W{number}")
        measured = evidence.measured.model_copy(update={"machine": machine, "missing": [Missing(reason=reason, detail="d")]})
        found.append(Outcome(evidence.model_copy(update={"measured": measured}), Path("r")))
    return found


def test_two_rules_on_one_count_are_said_once() -> None:
    """A lower and an upper bound read alike."""
    path = shipped(lambda e: (c := e.derived.comparison) and c.design != "deterministic" and "all_to_all" in str(e.derived.receipts))
    evidence = store.load(path)
    twice = evidence.derived.model_copy(update={"receipts": [c for c in evidence.derived.receipts for _ in range(2)]})
    once = printed_by(report.print_outcome, Outcome(evidence, path))
    assert " all_to_all" in once
    assert printed_by(report.print_outcome, Outcome(evidence.model_copy(update={"derived": twice}), path)) == once


@pytest.mark.parametrize(
    ("metric", "figures"),
    [
        ("step_seconds", "mean +1.25 %, deviation 2.50 %"),
        ("recompiles_per_step", "mean +0.0125 count, deviation 0.025 count"),
        ("data_time_share", "mean +0.0125 share, deviation 0.025 share"),
    ],
)
def test_the_noise_of_a_difference_is_in_the_metrics_unit(metric: str, figures: str) -> None:
    """Only of a ratio is it a percentage."""
    noise = aa.Noise("c", "m", [], metric, rms_difference=0.025, mean_difference=0.0125, contaminated=False)
    assert figures in printed_by(report.print_noise, noise)


def printed(told: list[Outcome], counts: bool) -> list[str]:
    """The lines of `confirm --all`, as they are printed while it runs and at its end."""
    out = report.console(io.StringIO())
    progress = report.TerminalProgress(out, counts)
    for outcome in told:
        progress.finished(outcome)
    report.print_table(told, out, counts)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("gpus", "parts"),
    [
        (0, "3 need GPUs, 1 need a package, 1 have no case, 1 for other reasons"),
        (8, "2 have another scope, 1 need a package, 1 have no case, 1 have no profile for it, 1 for other reasons"),
    ],
)
def test_what_does_not_apply_is_one_line_that_says_what_is_lacking(gpus: int, parts: str) -> None:
    lines = printed(outcomes(gpus), counts=True)
    assert lines[-1] == f"not applicable here: 6 claims ({parts}); --json lists them"
    assert not any(f"W{number}" in line for line in lines for number in range(1, 7))
    assert any("W0" in line for line in lines)


def test_each_is_listed_where_that_is_asked_for() -> None:
    lines = printed(outcomes(0), counts=False)
    assert all(any(f"W{number}" in line for line in lines) for number in range(7))
    assert not any("not applicable here" in line for line in lines)


def test_where_all_apply_nothing_is_counted() -> None:
    assert not any("not applicable" in line for line in printed(outcomes(0)[:1], counts=True))


@pytest.mark.parametrize("place", ["baseline", "anchor"])
def test_the_gate_says_in_a_line_of_its_own_that_a_revision_is_to_be_raised(place: str) -> None:
    plain = gate.GateResult("pass", "all is well", "case", "HEAD", "cpu", 0.03)
    advised = gate.GateResult("pass", "all is well", "case", "v1", "cpu", 0.03, revision="raise it")
    result = advised if place == "baseline" else gate.GateResult(**{**vars(plain), "anchor": advised})
    assert [line.strip() for line in printed_by(report.print_gate, result).splitlines()][1:] == ["raise it"]
    told = gate.as_json(result)
    assert (told if place == "baseline" else told["anchor"])["revision"] == "raise it"
    assert "raise it" not in printed_by(report.print_gate, plain)


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_has_lines_folded_between_words_and_commands_whole(width: int) -> None:
    sentence, command = f"      faster  {'+3.1 % [2.0, 4.2]; ' * 9}end", f"replay   playbook bench replay /{'results/' * 20}one.json"
    said = {}
    for terminal in (True, False):
        out = report.Lines(file=io.StringIO(), force_terminal=terminal, width=width, soft_wrap=True, color_system=None)
        for line in (sentence, command):
            out.print(Text(line))
        said[terminal] = out.file.getvalue().splitlines()
    assert said[False] == [sentence, command]
    *folded, last = said[True]
    assert last == command
    assert len(folded) > 1
    assert all(len(line) <= width and line.startswith("      ") for line in folded)
    assert " ".join(" ".join(folded).split()) == " ".join(sentence.split())
