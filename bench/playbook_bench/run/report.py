"""What a person and a program read: lines on a terminal, one JSON document, and the exit code behind both."""

from __future__ import annotations

import io
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.live import Live
from rich.text import Text

from playbook import files
from playbook.errors import ConfigError, tables_wanted
from playbook.records.case import Case
from playbook.records.evidence import Check, Comparison, Curve, Evidence, Machine, Measured, Run
from playbook.records.machine import NOTABLE_DATA, NOTABLE_STOLEN, host_limit, limited
from playbook.records.trace import TraceResult, waterfall
from playbook.text import count, in_markdown, plain
from playbook_bench import metrics
from playbook_bench.judge import effects, receipt
from playbook_bench.run import schedule
from playbook_bench.run.progress import Progress
from playbook_bench.run.store import Outcome

if TYPE_CHECKING:
    import pandas as pd

    from playbook_bench.run.aa import Noise
    from playbook_bench.run.gate import GateResult

_COLOURS = {
    "confirmed": "green",
    "refuted": "red",
    "inconclusive": "yellow",
    "not_applicable": "dim",
    "error": "bold red",
    "measured": "cyan",
}
WORDS = {"not_applicable": "not applicable", "error": "run error"}
_NAME = 6
_COPIED = frozenset({"evidence", "replay", "record", "run", "claims", "stored"})
"""First words of lines with a path or a command."""
_INDENT = " " * _NAME
_BAR = 15
_PLOT = 24
_PARTS, _LEAST_PART = 8, 0.02
"""Parts of a waterfall that are printed at most, and the share of the largest from which one is."""
_NOT_AT_A_LOOK = " between looks"
_CONTAMINATED = ": contaminated, the pairs differ more than noise explains; run it again on a quiet machine"


class Lines(Console):  # type: ignore[misc]
    """On a terminal, lines that are longer than it are folded between words, with an indent; what is there to be copied stays whole."""

    def print(self, *objects: Any, **how: Any) -> None:
        """As rich prints."""
        super().print(*[self._folded(each) if isinstance(each, Text) else each for each in objects], **how)

    def _folded(self, text: Text) -> Text:
        if not self.is_terminal or text.cell_len <= self.width or text.plain.strip().partition(" ")[0] in _COPIED:
            return text
        first, *others = text.wrap(self, max(20, self.width - len(_INDENT)))
        return Text("\n").join([first, *(Text(_INDENT).append(line) for line in others)])


def console(stream: TextIO | None = None) -> Console:
    """Where lines go; colour only on a terminal. Evidence and errors go to stderr when stdout carries JSON."""
    return Lines(file=stream or sys.stdout, highlight=False, soft_wrap=True)


class TerminalProgress(Progress):
    """One line that is redrawn while a series runs; without a terminal nothing is drawn, and verdicts alone are printed."""

    def __init__(self, out: Console | None = None, counts: bool = False) -> None:
        self.out = out or console()
        self._counts = counts
        """Whether what does not apply here is counted at the end, and not printed."""
        self._live: Live | None = None
        self._label = ""
        self._began = time.monotonic()
        self._number = self._total = 0
        self._text = ""

    def machine(self, machine: Machine) -> None:
        """Print the machine."""
        self.out.print(Text(f"machine  {machine.description}"))

    def series(self, label: str, launches: int) -> None:
        """Begin the line."""
        self._label, self._total, self._number, self._began = label, launches, 0, time.monotonic()
        if self.out.is_terminal and self._live is None:
            self._live = Live(Text(label), console=self.out, refresh_per_second=4, transient=True, auto_refresh=False)
            self._live.start()

    def launch(self, number: int, total: int, spec: schedule.RunSpec) -> None:
        """Show the launch."""
        self._number, self._total = number, total
        unit = "pair" if spec.variant in schedule.PAIR else "block"
        measured = "" if spec.pair is None else f"{unit} {spec.pair + 1}"
        role = {"burn_in": "burn-in", "aa": "A/A", "measure": measured}[spec.role]
        self._text = f"{role} {spec.variant}".strip()
        self._draw("")

    def step(self, step: int, steps: int) -> None:
        """Show the step."""
        self._draw(f"step {step}/{steps}" if steps else f"{step} lines")

    def note(self, text: str) -> None:
        """Print a remark."""
        self.out.print(Text(_INDENT + text))

    def finished(self, outcome: Outcome) -> None:
        """End the line and print the verdict."""
        self.close()
        if not (self._counts and outcome.status == "not_applicable"):
            print_outcome(outcome, self.out)

    def traced(self, trace: TraceResult) -> None:
        """Print what the difference between the variants' steps is made of."""
        self.close()
        print_waterfall(trace, self.out)

    def close(self) -> None:
        """Take the line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, step: str) -> None:
        if self._live is None:
            return
        done = max(0, self._number - 1)
        spent = time.monotonic() - self._began
        remaining = f"{_clock(spent / done * (self._total - done))} left" if done else ""
        bar = "#" * (_BAR * done // max(1, self._total))
        line = f"{self._label}  launch {self._number} of {self._total}  {self._text}  {step}  {_clock(spent)}  {bar:<{_BAR}}  {remaining}"
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


class LaunchLines(TerminalProgress):
    """One line that is redrawn; without a terminal, a line for each launch. The answer is printed by the command."""

    def launch(self, number: int, total: int, spec: schedule.RunSpec) -> None:
        """Show the launch."""
        super().launch(number, total, spec)
        if not self.out.is_terminal:
            self.note(f"launch {number} of {total}: {spec.role.replace('_', '-')} {spec.variant}")

    def finished(self, outcome: Outcome) -> None:
        """End the line."""
        self.close()


def print_outcome(outcome: Outcome, out: Console, displayed_status: str = "") -> None:
    """A verdict: one line where nothing was timed; a line for each point of a curve; else the comparison, its effect, a line for each
    remark, and the verdict.

    `displayed_status` replaces the status's word; the colour stays the status's.
    """
    evidence, status = outcome.evidence, outcome.status
    sentence = _sentence(outcome)
    word = Text(displayed_status or WORDS.get(status, status), style=_COLOURS[status])
    comparison, curve = evidence.derived.comparison, evidence.derived.curve
    if curve is not None and evidence.measured.case is not None:
        _print_curve(outcome, curve, evidence.measured.case.content, out)
        out.print(Text(_INDENT).append(word).append(f"  {sentence}"))
        return
    if comparison is None or comparison.design == "deterministic":
        how = (
            ""
            if comparison is None
            else f"{comparison.metric}  {_value(comparison.baseline)} -> {_value(comparison.candidate)} {comparison.unit}  "
        )
        out.print(Text(f"{outcome.name:<{_NAME - 1}} {how}").append(word).append(f"  {sentence}"))
        return
    pairs = f"{comparison.pairs} pairs{_aa_suffix(comparison)}"
    out.print(Text(f"{outcome.name:<{_NAME - 1}} {_changed_setting(evidence)}  {pairs}, {_clock(evidence.seconds.total)}"))
    stopped = _NOT_AT_A_LOOK if comparison.look is None and comparison.low is not None else ""
    shown = effects.show_effect(comparison, between=True) + stopped
    out.print(
        Text(f"{_INDENT}{comparison.metric}  {_value(comparison.baseline)} -> {_value(comparison.candidate)} {comparison.unit}  {shown}")
    )
    remarks = [
        schedule.order_matters(comparison),
        _receipts(evidence.derived.receipts),
        _said("the GPU computes {}", _gpu_compute_shares(evidence)),
        *(
            f"the GPU's clock was held down by {limit}"
            for limit in limited((r.variant, r.telemetry) for r in evidence.measured.runs if r.role == "measure")
        ),
        host_limit(comparison.model_dump()),
        _said("the host spends {} on data", _data_wait_shares(evidence)),
        _said("of the processor time the hypervisor kept {}", _steal_shares(evidence)),
        _failed_before(evidence),
    ]
    _print_remarks(remarks, out)
    out.print(Text(_INDENT).append(word).append(f"  {sentence}"))


def _aa_suffix(figures: Comparison | Curve) -> str:
    """What a record of rules before version 3 has besides its pairs."""
    return "" if figures.floor is None else " + A/A"


def print_waterfall(trace: TraceResult, out: Console) -> None:
    """The parts of the difference between the first variant's step and each other's, with a bar for each; they add up to it."""
    tables = {name: v.table.model_dump() for name, v in trace.variants.items() if v.table}
    if not tables:
        return
    first, *others = tables
    for other in others:
        parts = waterfall(tables[first], tables[other])
        most = max((abs(ms) for _, ms in parts), default=1.0)
        spans = [tables[v]["span_ms"] for v in (first, other)]
        out.print(
            Text(f"{_INDENT}traced step of {other}: {spans[0]:.1f} -> {spans[1]:.1f} ms, {spans[1] - spans[0]:+.1f} ms ({trace.collector})")
        )
        for name, ms in [p for p in parts if abs(p[1]) >= _LEAST_PART * most][:_PARTS]:
            out.print(Text(f"{_INDENT}  {name[:24]:<24} {ms:>+9.2f} ms  {('+' if ms > 0 else '-') * round(_PLOT * abs(ms) / most)}"))


def _print_curve(outcome: Outcome, curve: Curve, case: Case, out: Console) -> None:
    """One line per value with a bar: its length is the metric's mean, over the largest."""
    evidence = outcome.evidence
    spent = "exact" if curve.design == "deterministic" else f"{curve.blocks} blocks{_aa_suffix(curve)}, {_clock(evidence.seconds.total)}"
    subject = case.knob or " x ".join(f.name for f in case.factors) or "what was predicted"
    out.print(Text(f"{outcome.name:<{_NAME - 1}} {curve.metric} over {subject}  {spent}"))
    most = max((p.value for p in curve.points if p.value is not None), default=0.0)
    width = max(len(p.variant) for p in curve.points)
    for p in curve.points:
        if p.value is None:
            out.print(Text(f"{_INDENT}{p.variant:<{width}}  {'out of memory' if p.outcome == 'oom' else p.outcome}"))
            continue
        bar = "#" * round(_PLOT * p.value / most) if most > 0 else ""
        change = "" if p.effect is None else f"{100 * p.effect:+.1f} %" if curve.scale == "log_ratio" else f"{p.effect:+.4g}"
        out.print(Text(f"{_INDENT}{p.variant:<{width}}  {_value(p.value):>10} {curve.unit}  {bar:<{_PLOT}}  {change}"))
    between_looks = curve.look is None and any(c.low is not None for c in curve.contrasts)
    checks = evidence.derived.receipts
    remarks = [
        f"{effects.show(curve, between=True)}{_NOT_AT_A_LOOK}" if between_looks else "",
        host_limit(curve.model_dump()),
        f"receipt  {sum(c.ok for c in checks)} of {len(checks)} rules hold in every launch" if checks else "",
        _failed_before(evidence),
    ]
    _print_remarks(remarks, out)


def _print_remarks(remarks: Sequence[str], out: Console) -> None:
    """A line for each that is not empty."""
    for remark in filter(None, remarks):
        out.print(Text(f"{_INDENT}{remark}"))


def _said(sentence: str, parts: Iterable[str]) -> str:
    """The sentence with the parts in place of `{}`; empty where there are none."""
    listed = ", ".join(parts)
    return sentence.format(listed) if listed else ""


def _failed_before(evidence: Evidence) -> str:
    """What went wrong under earlier commands on the series' journal."""
    failed = (f"{number} {outcome}" for outcome, number in evidence.measured.failed_before.items())
    return _said("launches that failed before and were repeated: {}", failed)


def print_summary(outcomes: Sequence[Outcome], out: Console) -> None:
    """Where the evidence lies and how to replay it."""
    if outcomes:
        path = outcomes[-1].path
        out.print(Text(f"evidence {path.parent}  ({count(len(outcomes), 'record')})"))
        out.print(Text(f"replay   playbook bench replay {path}"))


def print_table(outcomes: Sequence[Outcome], out: Console, counts: bool = False) -> None:
    """All verdicts below each other, one line each. What does not apply was printed when that was found, or is counted now: how many claims
    this machine cannot test, by what it lacks.
    """
    tested = [o for o in outcomes if o.status != "not_applicable"]
    if len(tested) > 1:
        out.print()
    for outcome in tested if len(tested) > 1 else []:
        evidence = outcome.evidence
        card = evidence.measured.claim.card if evidence.measured.claim else ""
        word = Text(f"{WORDS.get(outcome.status, outcome.status):<16}", style=_COLOURS[outcome.status])
        out.print(Text(f"{card:<26}{outcome.name:<{_NAME - 1}} ").append(word).append(_sentence(outcome)))
    lacks = Counter(_lack(o.evidence.measured) for o in outcomes if o.status == "not_applicable")
    if counts and lacks:
        parts = ", ".join(f"{number} {what}" for what, number in lacks.most_common())
        out.print(Text(f"not applicable here: {count(lacks.total(), 'claim')} ({parts}); --json lists them"))


def _lack(measured: Measured) -> str:
    reasons = {m.reason for m in measured.missing}
    if not measured.machine.gpus and reasons & {"scope", "profile"}:
        return "need GPUs"
    words = {"package": "need a package", "scope": "have another scope", "profile": "have no profile for it", "no_case": "have no case"}
    return next((text for reason, text in words.items() if reason in reasons), "for other reasons")


def print_noise(noise: Noise, out: Console) -> None:
    """An A/A in one line."""
    pairs_excluded = sum(r.pair is None for r in noise.runs) // 2
    pairs = len(noise.runs) // 2 - pairs_excluded
    metric = metrics.get(noise.metric)
    if metric.scale == "log_ratio":
        mean, deviation = f"{100 * noise.mean_difference:+.2f} %", f"{100 * noise.rms_difference:.2f} %"
    else:
        mean, deviation = f"{noise.mean_difference:+.4g} {metric.unit}", f"{noise.rms_difference:.4g} {metric.unit}"
    text = f"A/A {noise.case} on {noise.machine}: {noise.metric}, {pairs} pairs, mean {mean}, deviation {deviation}"
    text += "; one pair was set aside, since a launch of it stood out" if pairs_excluded else ""
    out.print(Text(text + (_CONTAMINATED if noise.contaminated else "")))


def print_gate(result: GateResult, out: Console) -> None:
    """The gate's answer in one line, and in another one that older verdicts should go stale, where they would not."""
    style = {"pass": "green", "regression": "red", "undecided": "yellow", "too_noisy": "yellow", "error": "bold red"}[result.status]
    out.print(
        Text(f"gate {result.case} against {result.reference} ({result.profile})  ")
        .append(Text(result.status, style=style))
        .append(f"  {result.sentence}")
    )
    if advice := result.revision or (result.anchor.revision if result.anchor else ""):
        out.print(Text(_INDENT + advice))


def junit(result: GateResult) -> str:
    """The gate's answer as a JUnit file of one test: what is neither a pass nor a regression is an error, since it must not look green."""
    suite = ET.Element("testsuite", name="playbook gate", tests="1", failures="0", errors="0")
    test = ET.SubElement(suite, "testcase", classname="playbook.gate", name=f"{result.case} against {result.reference}")
    if result.status != "pass":
        kind = "failure" if result.status == "regression" else "error"
        suite.set(f"{kind}s", "1")
        ET.SubElement(test, kind, type=result.status, message=plain(result.sentence))
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def markdown(result: GateResult) -> str:
    """The gate's answer as a table for the summary of a CI job."""
    comparison = result.comparison
    rows = [
        ("answer", f"**{result.status}**"),
        ("why", in_markdown(plain(result.sentence))),
        ("profile", in_markdown(result.profile)),
        ("launches", str(len(result.runs))),
    ]
    if comparison is not None:
        rows += [(comparison.metric, f"{_value(comparison.baseline)} to {_value(comparison.candidate)} {comparison.unit}")]
    lines = [f"| {name} | {text} |" for name, text in rows]
    title = f"### playbook gate: {in_markdown(result.case)} against {in_markdown(plain(result.reference))}"
    return "\n".join([title, "", "| | |", "|---|---|", *lines, ""])


_HISTORY = ("created", "case", "profile", "baseline", "commit", "strict_sha", "status", "exit_code", "metric", "baseline_value",
            "candidate_value", "effect", "low", "high", "scale", "limit", "pairs", "launches", "sentence")  # fmt: skip
"""Columns of the gate's history; effects are positive where the tree is better."""


def history(path: Path) -> pd.DataFrame:
    """The gates so far, a row for each; none where there is no file.

    Raises:
        ConfigError: the file is something else, or its folder is not there.
    """
    with tables_wanted():
        import pandas as pd  # a third of a second, which no other answer needs
        import pyarrow as pa  # noqa: F401  pandas reads Parquet by it

    if not path.exists() and path.parent.is_dir():
        return pd.DataFrame(columns=list(_HISTORY))
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--history {path} cannot be read as Parquet: {str(e).splitlines()[0]}; name another file") from e
    if missing := [name for name in _HISTORY if name not in table.columns]:
        raise ConfigError(f"--history {path} is no history of the gate: it has no column {missing[0]}; name another file")
    return table


def add_to_history(path: Path, result: GateResult, commit: str) -> None:
    """Append the gate's answer about the tree at `commit` to its history.

    Raises:
        ConfigError: as `history`, or the file cannot be written.
    """
    import pandas as pd

    comparison, run = result.comparison, result.runs[0] if result.runs else None
    row = {
        **{name: getattr(result, name) for name in ("case", "profile", "status", "exit_code", "limit", "sentence")},
        **{name: getattr(comparison, name, None) for name in ("metric", "effect", "low", "high", "scale", "pairs")},
        "created": datetime.now(UTC),
        "baseline": result.reference,
        "commit": commit,
        "strict_sha": run.strict_sha if run else None,
        "baseline_value": comparison.baseline if comparison else None,
        "candidate_value": comparison.candidate if comparison else None,
        "launches": len(result.runs),
    }
    before, content = history(path), io.BytesIO()
    new = pd.DataFrame([row], columns=list(_HISTORY))
    (new if before.empty else pd.concat([before, new], ignore_index=True)).to_parquet(content, index=False)
    try:
        files.replace(path, content.getvalue())
    except OSError as e:
        raise ConfigError(f"--history {path} cannot be written: {e.strerror or e}; name another file") from e


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All verdicts as one document of plain data."""
    from playbook_bench.run import confirm  # who shows a record launches nothing

    return {"schema": "confirm/1", "exit_code": confirm.exit_code(outcomes), "claims": [_claim_json(o) for o in outcomes]}


def _claim_json(outcome: Outcome) -> dict[str, Any]:
    """One verdict as plain data, with its figures and the path of its record."""
    evidence = outcome.evidence
    measured, derived = evidence.measured, evidence.derived
    claim, comparison = measured.claim, derived.comparison
    return {
        "claim": claim.id if claim else None,
        "card": claim.card if claim else None,
        "statement": claim.statement if claim else None,
        "mechanism_of": claim.mechanism_of if claim else None,
        "case": measured.case.id if measured.case else None,
        "machine": measured.machine.name,
        "profile": measured.profile,
        "status": derived.verdict.status,
        "reason": derived.verdict.reason,
        "sentence": derived.verdict.sentence,
        "comparison": comparison.model_dump(mode="json") if comparison else None,
        "curve": derived.curve.model_dump(mode="json") if derived.curve else None,
        "receipts": [c.model_dump(mode="json") for c in derived.receipts],
        "gates": [g.model_dump(mode="json") for g in derived.gates],
        "figures": derived.figures,
        "seconds": evidence.seconds.model_dump(mode="json"),
        "launches": len(measured.runs),
        "evidence": str(outcome.path),
        "command": evidence.command,
    }


def _sentence(outcome: Outcome) -> str:
    """The verdict's sentence, without repeating its first words."""
    return plain(outcome.evidence.derived.verdict.sentence.removeprefix("not applicable: "))


def _changed_setting(evidence: Evidence) -> str:
    case = evidence.measured.case
    if case is None:
        return ""
    content = case.content
    keys = list(dict.fromkeys([*content.baseline, *content.candidate]))
    one = f"{keys[0]} {_words(content.baseline.get(keys[0]))} -> {_words(content.candidate.get(keys[0]))}" if len(keys) == 1 else case.id
    return one if len(one) <= 60 else case.id


def _words(value: Any) -> str:
    """A setting as a person writes it."""
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _gpu_compute_shares(evidence: Evidence) -> list[str]:
    """How much of a step each variant's GPU computes, where that is known."""
    shares = {v: receipt.computing(evidence.measured.runs, v) for v in schedule.PAIR}
    return [f"{share:.0f} % of the step in {variant}" for variant, share in shares.items() if share is not None]


def _data_wait_shares(evidence: Evidence) -> list[str]:
    """Share of the step spent fetching data, for variants where it is large enough to matter."""
    shares = _medians(evidence, metrics.get("data_time_share").value)
    return [f"{100 * share:.0f} % of the step in {variant}" for variant, share in shares.items() if share >= NOTABLE_DATA]


def _steal_shares(evidence: Evidence) -> list[str]:
    """Share of processor time that other virtual machines on the host took, for variants where it is large enough to matter."""
    shares = _medians(evidence, lambda run: run.telemetry.get("stolen_percent"))
    return [f"{share:.0f} % from {variant}" for variant, share in shares.items() if share >= NOTABLE_STOLEN]


def _medians(evidence: Evidence, value: Callable[[Run], float | None]) -> dict[str, float]:
    """The median of a figure over the matched runs of each variant that have it."""
    measured = [run for run in evidence.measured.runs if run.role == "measure"]
    values = {variant: [value(run) for run in measured if run.variant == variant] for variant in schedule.PAIR}
    known = {variant: [v for v in each if v is not None] for variant, each in values.items()}
    return {variant: statistics.median(each) for variant, each in known.items() if each}


def _receipts(checks: Sequence[Check]) -> str:
    """What each variant's launches showed; empty where nothing was asked."""
    parts = []
    for variant in schedule.PAIR:
        lines = [c for c in checks if c.variant == variant]
        # A lower and an upper bound of one count are two rules that read alike.
        shown = ", ".join(dict.fromkeys(f"{'no ' if c.rule.startswith('forbid') and c.ok else ''}{_observed_count(c)}" for c in lines))
        parts.append(f"{variant}: {shown or 'nothing declared'}")
    return f"receipt  {'   '.join(parts)}" if checks else ""


def _observed_count(check: Check) -> str:
    subject = check.rule.split(" ", 1)[1]
    if check.rule.startswith("forbid") and check.ok:
        return subject
    observed = "?" if check.observed is None else f"{check.observed:g}"
    mark = "" if check.ok else f" (expected {check.expected})"
    return f"{observed} {subject}{mark}"


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
