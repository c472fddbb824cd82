"""Conditions that two variants must meet before their figures are compared."""

from __future__ import annotations

import itertools
import math
import statistics as plain
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from playbook.records.case import Case
from playbook.records.commands import fill
from playbook.records.evidence import Baseline, Condition, Run, Variant
from playbook_bench import metrics
from playbook_bench.judge import statistics
from playbook_bench.metrics import Metric, timed
from playbook_bench.variants.resolve import undeclared
from playbook_trainer.config.tree import flatten

WORK_TOLERANCE = 1e-9
SOURCE_KEYS = ("trainer.source_sha", "trainer.performance_revision")
"""What two commits may differ in; the regression gate allows these."""
_INTERPRETER = ("python", "packages")
"""What a Python brings along."""
_LOGGED = {
    "peak_memory_bytes": "memory_bytes",
    "useful_tokens_per_s_per_gpu": "tokens",
    "raw_tokens_per_s_per_gpu": "tokens",
}
"""By metric, the field of a command's log that it is made of. A log without it leaves zeros."""

Pair = tuple[Run, Run]
Block = Mapping[Variant, Run]
"""Neighbouring launches, one of each variant; two of them are a pair."""


def blocks_of(runs: Sequence[Run], names: Sequence[Variant], failed: bool = False) -> list[Block]:
    """Blocks in which each of `names` ran, or was launched where `failed` launches count too, in the order in which they were numbered."""
    by_number: dict[int, dict[Variant, Run]] = {}
    for run in runs:
        if run.role == "measure" and run.pair is not None and (failed or run.outcome == "ok"):
            by_number.setdefault(run.pair, {})[run.variant] = run
    return [{v: b[v] for v in names} for _, b in sorted(by_number.items()) if names and all(v in b for v in names)]


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    """Launched pairs as (baseline, candidate), in the order in which they were numbered."""
    return [(b["baseline"], b["candidate"]) for b in blocks_of(runs, ("baseline", "candidate"), failed=True)]


def aa_differences(runs: Sequence[Run], metric: Metric) -> list[float]:
    """The difference of each A/A pair on the metric's scale. Signs alternate (second less first, then first less second), so that a drift
    over the launches cancels.
    """
    by_number: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda r: r.position):
        if run.role == "aa" and run.pair is not None and run.outcome == "ok":
            by_number.setdefault(run.pair, []).append(run)
    values = [[metric.value(r) for r in pair] for _, pair in sorted(by_number.items()) if len(pair) == 2]
    differences = [compare(metric, a, b) for a, b in values if a is not None and b is not None]
    return [-d if i % 2 else d for i, d in enumerate(differences)]


def odd_pair(runs: Sequence[Run], metric: Metric) -> int | None:
    """Number of the A/A pair that holds the one launch unlike all others; None if there is no such launch, or its pair differs by too
    little for any claim.
    """
    launches = [r for r in runs if r.role == "aa" and r.pair is not None and r.outcome == "ok"]
    if metric.deterministic or any(complete(r, metric) for r in launches):
        return None
    values = [v for r in launches if (v := metric.value(r)) is not None]
    odd = statistics.stands_out([compare(metric, values[0], v) for v in values])
    if odd is None:
        return None
    number = launches[odd].pair
    difference = aa_differences([r for r in launches if r.pair == number], metric)
    return number if any(abs(d) > statistics.CONTAMINATION_LEAST for d in difference) else None


def compare(metric: Metric, baseline: float, candidate: float) -> float:
    """How much better the candidate is, on the metric's scale.

    Raises:
        ValueError: the values cannot be compared on that scale.
    """
    if not (math.isfinite(baseline) and math.isfinite(candidate)):
        raise ValueError(f"{metric.name} is not finite")
    if metric.scale == "difference":
        return statistics.difference(baseline, candidate, metric.better == "higher")
    return statistics.log_ratio(baseline, candidate, metric.better == "higher")


def configurations(case: Case, configs: Mapping[str, Mapping[str, Any]], pairs: Sequence[Pair]) -> Condition:
    """The resolved configurations differ only in declared keys, and each variant has one."""
    name = "configuration"
    shas = [{r.config_sha for r in side} for side in zip(*pairs, strict=True)]
    if any(len(s) != 1 for s in shas):
        return Condition(name=name, ok=False, detail="a variant ran with more than one configuration")
    a, b = (next(iter(s)) for s in shas)
    if a not in configs or b not in configs:
        return Condition(name=name, ok=False, detail="a resolved configuration is missing from the record")
    keys = undeclared(case, configs[a], configs[b])
    return Condition(name=name, ok=not keys, detail=f"undeclared difference in {', '.join(keys)}" if keys else "")


def environment(case: Case, strict: Mapping[str, Mapping[str, Any]], runs: Sequence[Run], allowed: Collection[str] = ()) -> Condition:
    """The strict environment is equal in all runs but for declared variables, and the whole series, A/A included, started its ranks in one
    way.

    Variants that name different programs, such as the Python of two virtual environments, compare what these have installed.
    """
    name = "environment"
    ways = {str(s.get("launch", "fresh processes")) for s in strict.values()}
    if len(ways) > 1 or "mixed" in ways:
        return Condition(name=name, ok=False, detail=f"differs in launch: {', '.join(sorted(ways))}")
    free = {f"env.{v}" for per_variant in case.delta.environment.values() for v in per_variant} | set(allowed)
    for delta in case.variants.values() if case.command else ():
        free |= {f"env.{name}" for name in delta.get("environment", {})}
        free |= set(SOURCE_KEYS) if delta.keys() & {"revision", "files"} else set()
    packages = len({fill(case.command[0], delta) for delta in case.variants.values()}) > 1 if case.command else False
    if case.delta.ranks:
        free |= {"env.OMP_NUM_THREADS", "trainer.world_size", "trainer.threads", "trainer.collectives"}
    if silent := [run.run_id for run in runs if run.strict_sha not in strict]:
        return Condition(name=name, ok=False, detail=f"run {silent[0]} does not say in which environment it ran")

    def counts(key: str) -> bool:
        return key not in free and not (packages and key.split(".")[0] in _INTERPRETER)

    views = [{k: v for k, v in flatten(strict[run.strict_sha]).items() if counts(k)} for run in runs]
    keys = sorted({k for view in views[1:] for k in view.keys() | views[0].keys() if view.get(k) != views[0].get(k)})
    return Condition(name=name, ok=not keys, detail=f"differs in {', '.join(keys)}" if keys else "")


def data(case: Case, pairs: Sequence[Pair]) -> Condition:
    """Both variants read the same data in the same order."""
    if case.delta.data:
        return Condition(name="data", ok=True, detail=f"declared different: {case.delta.reason}")
    shas = {r.data_sha for pair in pairs for r in pair}
    if case.command and shas == {None}:
        return Condition(name="data", ok=True, detail="not compared: a command's log does not tell it")
    ok = len(shas) == 1 and None not in shas
    return Condition(name="data", ok=ok, detail="" if ok else f"data hashes {', '.join(sorted(str(s) for s in shas))}")


def parameters(case: Case, pairs: Sequence[Pair]) -> Condition:
    """Both variants train the same parameters.

    Counts of the whole model must be equal. Records from before the trainer gave those hold what rank 0 keeps, which differs between
    tensor- and pipeline-parallel layouts of one model; there, the share that is trained must be equal (the configuration gate has
    already seen to it that the model is the same).
    """
    if case.delta.parameters:
        return Condition(name="parameters", ok=True, detail=f"declared different: {case.delta.reason}")
    counts = {(r.num_parameters, r.trained_parameters) for pair in pairs for r in pair}
    if len(counts) == 1:
        return Condition(name="parameters", ok=True, detail="")
    runs = [r for pair in pairs for r in pair]
    shares = {r.trained_parameters / r.num_parameters for r in runs if r.num_parameters and r.trained_parameters is not None}
    if len(shares) == 1 and all(r.num_parameters and r.parameters_of == "rank" for r in runs):
        return Condition(name="parameters", ok=True, detail=f"counted per rank; every layout trains {shares.pop():.0%} of what it holds")
    return Condition(name="parameters", ok=False, detail="parameter counts differ between runs")


def work(case: Case, metric: Metric, pairs: Sequence[Pair]) -> Condition:
    """Both variants do equal work per step, unless the case declares otherwise and the metric is per unit of work."""
    tokens = [(tokens_per_step(a), tokens_per_step(b)) for a, b in pairs]
    worst = max((abs(before - after) / max(before, after, 1.0) for before, after in tokens), default=0.0)
    if case.command and not any(before or after for before, after in tokens):
        return Condition(name="work", ok=True, detail="not compared: the log tells no tokens")
    equal = worst <= WORK_TOLERANCE
    if equal and case.command and any("step_tokens" in variant for variant in (case.baseline, case.candidate)):
        return Condition(name="work", ok=True, detail="not compared: the tokens are those that were named, for the log tells none")
    if equal or (not metric.per_step and (case.delta.work or case.delta.data)):
        return Condition(name="work", ok=True, detail="" if equal else f"declared different: {case.delta.reason}")
    advice = "compare useful tokens per second instead" if metric.per_step else "declare delta.work with a reason"
    return Condition(name="work", ok=False, detail=f"useful tokens per step differ by {100 * worst:.1f} %; {advice}")


def loss(case: Case, pairs: Sequence[Pair]) -> Condition:
    """The losses of the timed steps are one curve within the case's band, and the means of each pair agree."""
    band = case.guardrails.loss.relative
    if band is None:
        return Condition(name="loss", ok=True, detail=f"not compared: {case.guardrails.loss.reason}")
    if case.command and all(mean_loss(r) is None for pair in pairs for r in pair):
        return Condition(name="loss", ok=True, detail="not compared: the log tells no loss")
    worst = 0.0
    for a, b in pairs:
        baseline, candidate = mean_loss(a), mean_loss(b)
        if baseline is None or candidate is None:
            return Condition(name="loss", ok=False, detail="a run reported no loss in its timed window")
        worst = max(worst, abs(baseline - candidate) / max(abs(baseline), abs(candidate), 1e-12))
    if worst <= band and (other := difference(pairs, band)):
        return Condition(name="loss", ok=False, detail=other)
    return Condition(
        name="loss", ok=worst <= band, detail=f"mean losses differ by {100 * worst:.2g} %, at most {100 * band:g} % is allowed"
    )


def noise(metric: Metric, runs: Sequence[Run], aa: Baseline | None) -> tuple[Condition, list[float]]:
    """The A/A condition, and the differences of the stored A/A pairs."""
    name = "a_a"
    fresh = aa_differences(runs, metric)
    stored = aa_differences(aa.runs, metric) if aa is not None else []
    if len(stored) < 2:
        return Condition(name=name, ok=False, detail="no A/A pairs of this machine are on record for this case"), []
    deviation = statistics.aa_deviation(stored)
    shown = fresh or stored
    bad = statistics.contaminated(fresh, deviation, len(stored)) if fresh else statistics.contaminated(stored, None)
    mean = math.fsum(shown) / len(shown)
    text = f"same configuration against itself: {100 * mean:+.2f} % over {len(shown)} pairs, deviation {100 * deviation:.2f} %"
    if aa is not None and runs and not {r.config_sha for r in aa.runs} & {r.config_sha for r in runs}:
        text += f"; measured for {aa.case}, in the same place shortly before"
    return Condition(name=name, ok=not bad, detail=text), stored


def step_deviation(aa: Baseline | None) -> float:
    """Deviation of step time between runs of one configuration; 0 where nothing is stored."""
    differences = aa_differences(aa.runs, metrics.get("step_seconds")) if aa else []
    return statistics.aa_deviation(differences)


def launch_deviation(blocks: Sequence[Block]) -> float:
    """Deviation of the difference between two launches of one variant in step time, as a share, pooled over the variants; 0 for a single
    block.
    """
    times = metrics.get("step_seconds")
    values = [[math.log(v) for b in blocks if (v := times.value(b[name])) and v > 0] for name in (blocks[0] if blocks else ())]
    means = [math.fsum(x) / max(1, len(x)) for x in values]
    squares = math.fsum((v - mean) ** 2 for x, mean in zip(values, means, strict=True) for v in x)
    return math.sqrt(2 * squares / max(1, sum(len(x) - 1 for x in values)))


def steady(blocks: Sequence[Block], tolerance: float) -> Condition:
    """Step time is steady inside the timed window, in every variant; each test spends its part of the error rate."""
    names = list(blocks[0]) if blocks else []
    alpha = statistics.STEADY_ALPHA / max(1, len(names))
    changes = {v: statistics.change([[s.seconds for s in timed(b[v])] for b in blocks], alpha) for v in names}
    texts = [f"{v} {c}" for v, c in changes.items() if c and c.certain and abs(c.size) > tolerance]
    return Condition(name="steady", ok=not texts, detail="; ".join(texts))


def complete(run: Run, metric: Metric) -> str | None:
    """Why the run's figures cannot be used: too few steps, a step time that is not positive and finite, or no value of the metric. None if
    they can.
    """
    steps = timed(run)
    if len(steps) != run.steps_wanted:
        return f"{run.variant} timed {len(steps)} of {run.steps_wanted} steps"
    if any(not (math.isfinite(s.seconds) and s.seconds > 0) for s in steps):
        return f"{run.variant} reported a step time that is not a positive number"
    value = metric.value(run)
    if value is None or not math.isfinite(value):
        return f"{run.variant} reported no {metric.name}"
    if value == 0 and run.num_parameters is None and (field := _LOGGED.get(metric.name)):  # our own trainer reports its parameters
        return f"the log of the {run.variant} holds no such figure for {metric.name}; log '{field}' in each step"
    if metric.scale == "log_ratio" and not metric.deterministic and value <= 0:
        return f"{run.variant} reported {metric.name} of {value:g}; it does not apply on this device"
    return None


def tokens_per_step(run: Run) -> float:
    """Useful tokens of a timed step; 0 where nothing tells them."""
    steps = timed(run)
    return math.fsum(s.useful_tokens for s in steps) / max(len(steps), 1)


def mean_loss(run: Run) -> float | None:
    """Of the timed steps that tell one."""
    losses = [s.loss for s in timed(run) if s.loss is not None]
    return math.fsum(losses) / len(losses) if losses else None


# Whether the losses of two variants are one curve: where they end, how far they fall, and step by step where launches repeat theirs.

_FEWEST = 5
"""Steps from which on the noise of a curve is known well enough."""
_DEVIATIONS = 6.0
"""Differences below so many standard errors are noise: a deviation of few steps is known badly, so that equal curves of normal losses
exceed it in at most half a percent of series."""
_TREND = 0.5
"""Share of its fall that a loss may lose."""
_LEAST_TREND = 0.25
"""Share of the band below which a fall is not told from none."""
_STEP = 4.0
"""One step may differ by this many times the band, where launches repeat their losses."""
_REPEATS = 0.1
"""Launches repeat their losses where they differ by less than this share of the band, at every step."""
_MEDIAN_SQUARE = 0.4549
"""Median of the square of a standard normal deviate."""


def difference(pairs: Sequence[tuple[Run, Run]], band: float) -> str:
    """What tells the curves of pairs apart by more than the band, a share, and the noise of their steps; empty where nothing does.

    Curves are means over the pairs of the timed steps' losses, where every launch of the baseline tells one. Of fewer than five such steps
    only the mean is compared.
    """
    before, after = ([_losses(run) for run in side] for side in zip(*pairs, strict=True))
    reported = [i for i in range(min(map(len, before))) if all(curve[i] is not None for curve in before)]
    if missing := [i for i in reported if any(i >= len(curve) or curve[i] is None for curve in after)]:
        first = missing[0] + 1
        return (
            f"the baseline tells a loss at {len(reported)} timed steps, and the other none at {len(missing)} of them, such as the {first}th"
        )
    if len(reported) < _FEWEST:
        return ""
    a, b = ([plain.fmean(curve[i] or 0.0 for curve in side) for i in reported] for side in (before, after))
    noise, part = _noise([y - x for x, y in zip(a, b, strict=True)]), max(1, len(a) // 5)
    scale, error = plain.fmean(map(abs, a)), noise / math.sqrt(part)
    ends = plain.fmean(a[-part:]), plain.fmean(b[-part:])
    if abs(ends[1] - ends[0]) > band * max(map(abs, ends)) + _DEVIATIONS * error:
        return f"the losses end at {ends[1]:.4g} and not at {ends[0]:.4g}, by their last {part} steps; at most {100 * band:g} % is allowed"
    falls = [plain.fmean(curve[:part]) - end for curve, end in zip((a, b), ends, strict=True)]
    if abs(falls[1] - falls[0]) > max(_TREND * abs(falls[0]), _LEAST_TREND * band * scale, _DEVIATIONS * math.sqrt(2) * error):
        return f"the loss falls by {falls[1]:.3g} over the timed steps, and by {falls[0]:.3g} in the baseline"
    if len(before) > 1 and all(_repeats([curve[i] or 0.0 for curve in before], band) for i in reported):
        for i, x, y in zip(reported, a, b, strict=True):
            if abs(y - x) > _STEP * band * max(abs(x), abs(y)):
                return f"the loss of timed step {i + 1} is {y:.4g}, and {x:.4g} in every launch of the baseline"
    return ""


def _losses(run: Run) -> tuple[float | None, ...]:
    return tuple(s.loss for s in timed(run))


def _repeats(values: Sequence[float], band: float) -> bool:
    return max(values) - min(values) <= _REPEATS * band * max(map(abs, values))


def _noise(differences: Sequence[float]) -> float:
    """Standard deviation of one step's difference, from differences of neighbours: a slow divergence of the curves is none of it.

    Source: J. von Neumann, Distribution of the ratio of the mean square successive difference to the variance, 1941; the median in place of
    the mean lets single steps count for nothing.
    """
    squares = [(y - x) ** 2 for x, y in itertools.pairwise(differences)]
    return math.sqrt(plain.median(squares) / (2 * _MEDIAN_SQUARE))
