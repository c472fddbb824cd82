"""Two commits of one trainer: whether the newer one is slower by more than a limit, and whether it still trains the same way at the same
cost; and the search for the first commit with a trouble, which passes over those that cannot be judged.

The limit is the user's and nothing raises it: noise makes an answer undecided, never a pass. Both errors are spent across the looks:
a slowdown as large as the limit passes at most once in a thousand series, and is called a regression at most in 25 of a thousand.
"""

from __future__ import annotations

import math
import operator
import statistics as plain
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from playbook.errors import ExitCode
from playbook.records.evidence import Comparison, Condition, Run, Sample
from playbook_bench.judge import design, effects, guards, receipt, statistics
from playbook_bench.judge.verdict_rules import Rules
from playbook_bench.metrics import EXACT, Metric, timed

LIMIT = 0.03
"""A slowdown above 3 % is a regression, where nothing else is said."""
_PASS_ERROR = 0.001
_REGRESSION_ERROR = 0.025
_SPENT = {_PASS_ERROR: 0.4, _REGRESSION_ERROR: Rules.spent}
"""The part of each that the looks spend. Where one commit is noisier, the degrees of freedom are estimated, and the far tail is reached
more than twice as often (`tools/simulate/gate.py`)."""
MOST_PAIRS = 100
"""The largest number of pairs that the gate suggests or takes."""
ALLOWABLE = ("metric", "memory", "loss", "grad_norm", "process")
"""What `--allow NAME=SHARE` may name."""
_REPEATS = 4.0
"""Two commits may differ by this many times what launches of one commit do."""
_ROUNDING: Mapping[str, tuple[float, float]] = {"loss": (1e-5, 0.01), "grad_norm": (1e-3, 0.1)}
"""Least relative difference of a step that counts: where launches of one commit show their rounding, and where there is only one launch."""
_REPORTED = ("loss", "grad_norm", "useful_tokens", "images", "peak_memory_bytes")
MEMORY = 0.02
"""Share by which peak memory may grow, where nothing else is said."""
_MOVED = 0.01
"""A change of speed above it, in either direction, makes verdicts from before it stale."""

_Answer = Literal["pass", "regression", "undecided", "too_noisy"]


@dataclass(frozen=True)
class Slowdown:
    """How much slower the newer commit is, on a log scale for ratios, and what follows at this look."""

    answer: _Answer
    mean: float
    low: float
    """Lower bound of the slowdown; the true one lies below it in at most 2.5 % of series, over all looks."""
    high: float
    """Upper bound of the slowdown; the true one lies above it in at most 0.1 % of series, over all looks."""
    deviation: float
    """Of a pair of launches."""
    pairs_needed: int | None = None
    """About how many pairs would settle what is undecided; None where no number up to MOST_PAIRS does."""


def judge_slowdown(worse: design.Estimate, pairs: int, limit: float, looks: Sequence[int]) -> Slowdown:
    """Judge at one look whether the newer commit is slower by more than the limit. `worse` is positive where it is slower, after so many
    pairs: at least two, of finite values, which `design.contrast` sees to.

    Raises:
        ValueError: the values are so large that their error is not finite.
    """
    mean, error, freedom = float(worse.value), float(worse.standard_error), float(worse.degrees_of_freedom)
    if not (math.isfinite(mean) and math.isfinite(error)):
        raise ValueError("a difference is not finite")
    low = mean - statistics.t_quantile(2 * _rate(_REGRESSION_ERROR, looks, pairs), freedom) * error
    high = mean + statistics.t_quantile(2 * _rate(_PASS_ERROR, looks, pairs), freedom) * error
    deviation = error * math.sqrt(pairs)
    if low > limit:
        return Slowdown("regression", mean, low, high, deviation)
    if high < limit:
        return Slowdown("pass", mean, low, high, deviation)
    need = _pairs_needed(mean, worse, pairs, limit, looks)
    hopeless = _pairs_needed(0.0, worse, pairs, limit, looks) is None
    return Slowdown("too_noisy" if hopeless else "undecided", mean, low, high, deviation, need)


def _rate(error: float, looks: Sequence[int], pairs: int) -> float:
    """One-sided error rate of the bound after so many pairs: that of the look there, or of the next one."""
    rates = statistics.levels(tuple(looks), 2 * _SPENT[error] * error)
    return next((rate for look, rate in zip(looks, rates, strict=True) if look >= pairs), rates[-1]) / 2


def _pairs_needed(mean: float, worse: design.Estimate, measured: int, limit: float, looks: Sequence[int]) -> int | None:
    """The first look, beyond those planned, that would probably settle a slowdown of `mean`. Further looks get the rate of the last one."""
    step = looks[-1] - looks[-2] if len(looks) > 1 else looks[0]
    error = _PASS_ERROR if mean < limit else _REGRESSION_ERROR
    likely = plain.NormalDist().inv_cdf(statistics.POWER)
    for pairs in range(looks[0], MOST_PAIRS + 1, step):
        # Two launches of each variant, or one where only one of them is noisy, pay for the terms of the model.
        freedom = float(worse.degrees_of_freedom) * max(1, pairs - 2) / max(1, measured - 2)
        reach = statistics.t_quantile(2 * _rate(error, looks, pairs), freedom) + likely
        if reach * float(worse.standard_error) * math.sqrt(measured / pairs) <= abs(limit - mean):
            return pairs
    return None


def cause_of_noise(runs: Sequence[Run], deviation: float) -> str:
    """Why launches differ, as far as the runs tell. `deviation` is that of a pair."""
    causes = [f"launches of one commit differ by {100 * deviation:.1f} %"]
    shares = [s for v in ("baseline", "candidate") if (s := receipt.computing(runs, v)) is not None]
    if shares and min(shares) < 80:
        causes.append(f"the GPU computes in only {min(shares):.0f} % of the step, so the host is what is timed")
    stolen = [float(s) for r in runs if isinstance(s := r.telemetry.get("stolen_percent"), int | float)]
    if stolen and plain.median(stolen) >= 2:
        causes.append(f"other machines on this hardware had {plain.median(stolen):.0f} % of its processor time")
    return "; ".join(causes)


def unraised(comparison: Comparison, runs: Sequence[Run], strict: Mapping[str, Mapping[str, Any]], paths: Sequence[str]) -> str:
    """Advice to raise a performance revision, if the newer commit's trainer is faster or slower for certain and has the older one's
    revisions; else "".

    An effect is certain where all of its interval lies beyond MOVED. `strict` holds the environments that the runs name, `paths` are those
    that may have moved it.
    """
    sources = {strict.get(r.strict_sha, {}).get("trainer", {}).get("source_sha") for r in runs}
    revisions = {(r.performance_revision, *sorted(r.raised.items())) for r in runs}
    if (
        len(sources) < 2
        or len(revisions) > 1
        or runs[0].performance_revision is None
        or comparison.design == "deterministic"
        or comparison.scale != "log_ratio"
    ):
        return ""
    if comparison.low is None or comparison.high is None or (comparison.low <= _MOVED and comparison.high >= -_MOVED):
        return ""
    shown = effects.show_effect(comparison, between=True)
    return (
        f"{comparison.metric} moved by {shown}; if that is meant, raise the revision of {' and '.join(paths)} "
        "in playbook_trainer/revision.py, so that older verdicts go stale"
    )


def exact_worse(metric: Metric, baseline: float, candidate: float, allowed: float) -> bool:
    """Whether an exact metric got worse by more than the allowance that was stated, as a share of the baseline."""
    loss = baseline - candidate if metric.better == "higher" else candidate - baseline
    return loss > allowed * abs(baseline) + EXACT * max(abs(baseline), abs(candidate))


def same_training(pairs: Sequence[guards.Pair], runs: Sequence[Run], allowed: Mapping[str, float]) -> list[Condition]:
    """Two commits with one seed train alike: no step more is skipped, and losses and gradient norms agree step by step."""
    return [_skipped(pairs), *(_step_by_step(name, pairs, runs, allowed.get(name)) for name in _ROUNDING)]


def overhead_rows(blocks: Sequence[guards.Block], reference: str, strict: Mapping[str, Mapping[str, Any]]) -> list[list[float]]:
    """What each launch takes beside its timed steps, as a share of the mean launch of the older commit, `reference`. Shape: [blocks,
    variants].

    That is start-up, warm-up, what lies between steps, and the end: work that moved there saves nothing. `strict` holds the environments,
    of which those of commands say how many steps a line of the log covers.
    """
    whole = plain.fmean(block[reference].wall_s for block in blocks)
    return [[_overhead_s(run, strict) / whole for run in block.values()] for block in blocks]


def _overhead_s(run: Run, strict: Mapping[str, Mapping[str, Any]]) -> float:
    every = int(strict.get(run.strict_sha, {}).get("trainer", {}).get("log_every", 1))
    return run.wall_s - every * math.fsum(s.seconds for s in timed(run))


def same_fields(pairs: Sequence[guards.Pair]) -> Condition:
    """What every launch of the older commit tells, the newer one tells too: a figure that is no longer logged is not one that stayed as it
    was.
    """
    before, after = (set.intersection(*(_fields(run) for run in side)) for side in zip(*pairs, strict=True))
    lost = sorted(before - after)
    return Condition(name="fields", ok=not lost, detail=f"no longer told: {', '.join(lost)}" if lost else "")


def _fields(run: Run) -> set[str]:
    """The figures that a launch tells; a log without one leaves None, or zeros."""
    names = {name for name in _REPORTED if any(getattr(s, name) for s in timed(run))}
    return names | {name for name, value in run.metrics.items() if value is not None}


def _skipped(pairs: Sequence[guards.Pair]) -> Condition:
    most = [max(sum(s.nan or s.loss is None for s in run.samples) for run in side) for side in zip(*pairs, strict=True)]
    ok = most[1] <= most[0]
    return Condition(name="skipped_steps", ok=ok, detail="" if ok else f"{most[1]} steps without a finite loss, {most[0]} before")


def _step_by_step(name: str, pairs: Sequence[guards.Pair], runs: Sequence[Run], allowed: float | None) -> Condition:
    """Whether a quantity agrees at every step, within a multiple of what launches of the older commit differed by up to that step."""
    read: Callable[[Sample], float | None] = operator.attrgetter(name)
    repeats = [r for r in runs if r.variant == "baseline" and r.outcome == "ok"]
    least, alone = _ROUNDING[name]
    spread, worst, where = 0.0, 0.0, 0
    for step in range(min(len(r.samples) for pair in pairs for r in pair)):
        values = [v for r in repeats if len(r.samples) > step and (v := read(r.samples[step])) is not None]
        spread = max(spread, (max(values) - min(values)) / max(abs(v) for v in values) if any(values) else 0.0)
        limit = allowed if allowed is not None else max(least, _REPEATS * spread) if len(repeats) > 1 else alone
        for a, b in pairs:
            older, newer = read(a.samples[step]), read(b.samples[step])
            if older is None or newer is None:
                continue
            over = abs(older - newer) / max(abs(older), abs(newer), 1e-30) / max(limit, 1e-30)
            if over > max(1.0, worst):
                worst, where = over, step
    if worst <= 1:
        return Condition(name=name, ok=True)
    compared = ([read(run.samples[where]) for run in pair] for pair in pairs)
    before, after = next(values for values in compared if values[0] != values[1])
    return Condition(
        name=name,
        ok=False,
        detail=f"{name} of step {where + 1} is {after:.6g}, and {before:.6g} before: {worst:.3g} times more than is explained by rounding",
    )


def same_memory(pairs: Sequence[guards.Pair], runs: Sequence[Run], allowed: float) -> Condition:
    """A cost that a step's time does not show: whether the median peak memory exceeds the highest of any launch of the older commit by more
    than the allowance.
    """
    before = [max((s.peak_memory_bytes for s in timed(r)), default=0) for r in runs if r.variant == "baseline" and r.outcome == "ok"]
    after = [max((s.peak_memory_bytes for s in timed(b)), default=0) for _, b in pairs]
    if not before or not max(before):
        return Condition(name="memory", ok=True, detail="" if not max(after, default=0) else "not compared: the older commit reports none")
    grown = plain.median(after) / max(before) - 1
    return Condition(name="memory", ok=grown <= allowed, detail="" if grown <= allowed else f"peak memory {100 * grown:+.1f} %")


def in_words(slowdown: Slowdown, metric: Metric, limit: float, runs: Sequence[Run], pairs: int) -> tuple[str, int | None]:
    """The answer as a sentence, and how many pairs would settle it; `limit` is a share."""
    log = metric.scale == "log_ratio"
    mean, low, high = (100 * (math.expm1(v) if log else v) for v in (slowdown.mean, slowdown.low, slowdown.high))
    unit = "%" if log else "points"
    direction, least, most = ("faster", -high, -low) if mean < 0 else ("slower", low, high)
    shown = f"{metric.name}: {direction} by {abs(mean):.1f} {unit} [{least:+.1f}, {most:+.1f}]"
    above = f"a slowdown above {100 * limit:g} {unit}"
    refresh = "; it is faster by more than that: compare the next commits with this one, or one that loses it all passes"
    cause, need = cause_of_noise(runs, slowdown.deviation), slowdown.pairs_needed
    excluded = f"one above {math.ceil(high)} {unit} is ruled out" if log and math.isfinite(high) else ""
    settles = f"about {need} pairs would settle it at this noise (--pairs {need}, and a --budget for them)"
    at_the_limit = "it lies so near that no number of pairs tells: a person decides, or another --limit"
    rest = "; ".join(filter(None, (excluded, settles if need else at_the_limit)))
    words = {
        "regression": f"{above} is certain",
        "pass": f"{above} is ruled out{refresh if high < -100 * limit else ''}",
        "undecided": f"{above} is neither shown nor ruled out after {pairs} pairs; {rest}",
        "too_noisy": f"too noisy to see {above} even with {MOST_PAIRS} pairs: {cause}; quieten the machine, or raise --limit",
    }
    return f"{shown}: {words[slowdown.answer]}", need if slowdown.answer == "undecided" else None


def overhead_in_words(overhead: Slowdown, allowed: float, *, is_slower: bool = False) -> str:
    """The answer about what launches take beside their timed steps, as a sentence; `allowed` is a share of the older commit's launch. Where
    the steps are slower for certain, what is open here needs no further launch.
    """
    mean, low, high, limit = (100 * v for v in (overhead.mean, overhead.low, overhead.high, allowed))
    takes = f"beside its timed steps a launch is longer by {mean:.1f} % of the older one's time [{low:+.1f}, {high:+.1f}]"
    if is_slower and overhead.answer in ("undecided", "too_noisy"):
        return f"{takes}: too few launches to judge that, and the answer does not need it"
    shown = f"{takes}: more than {limit:g} %"
    enough = f"state --allow process={max(1, math.ceil(high))}%"
    words = {
        "pass": "is ruled out",
        "regression": "is certain",
        "undecided": f"is neither shown nor ruled out; run more pairs or longer launches, or {enough}",
        "too_noisy": f"cannot be seen through its noise; let launches last longer, or {enough}",
    }
    return f"{shown} {words[overhead.answer]}"


NONE, SLOWER, UNKNOWN = "none", "slower", "unknown"
"""What a commit suffers from, besides the outcomes of runs that fail (oom, crash, hang, nan)."""


@dataclass(frozen=True)
class Judged:
    """One commit and what the gate says of it."""

    commit: str
    trouble: str
    sentence: str


@dataclass(frozen=True)
class BisectResult:
    """The first commit with the trouble, or the few among which it is."""

    suspects: list[str]
    """Oldest first; one where the commit is found, none where the bad commit shows no trouble."""
    trouble: str
    judged: list[Judged]

    @property
    def status(self) -> str:
        """found, suspects or no_trouble."""
        return "no_trouble" if not self.suspects else "found" if len(self.suspects) == 1 else "suspects"

    @property
    def exit_code(self) -> int:
        """0 found; 3 otherwise."""
        return ExitCode.DONE if self.status == "found" else ExitCode.UNDECIDED


def search(history: Sequence[str], judge: Callable[[str], Judged], on_judged: Callable[[Judged, int], None] | None = None) -> BisectResult:
    """The first commit of `history` (oldest first, all after the good one) whose trouble is that of the last; about log2(n) + 1
    judgements.
    """
    judged: dict[int, Judged] = {}

    def look(i: int, remaining: int) -> str:
        judged[i] = judge(history[i])
        if on_judged is not None:
            on_judged(judged[i], remaining)
        return judged[i].trouble

    last = len(history) - 1
    bad_trouble = look(last, last)
    low, high = -1, last  # low is good, high has the trouble
    while bad_trouble not in (NONE, UNKNOWN):
        middle = (low + high) // 2
        open_ = sorted((i for i in range(low + 1, high) if i not in judged), key=lambda i: abs(i - middle))
        if not open_:
            break
        trouble = look(open_[0], len(open_) - 1)
        low, high = (open_[0], high) if trouble == NONE else (low, open_[0]) if trouble == bad_trouble else (low, high)
    suspects = [] if bad_trouble in (NONE, UNKNOWN) else list(history[low + 1 : high + 1])
    return BisectResult(suspects, bad_trouble, list(judged.values()))
