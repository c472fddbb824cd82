"""Derives the verdict from what was measured. `derive` is a pure function, so a replay gives the same answer.

A pair, a sweep and an interaction take one path: blocks of launches, a rule about contrasts among the variants, an interval for each.
`STATES` says which state follows from what; where several apply, the first in that order.
"""

from __future__ import annotations

import math
import statistics as plain
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from playbook.cards.model import Expect, in_words
from playbook.errors import ConfigError
from playbook.records.case import Case
from playbook.records.evidence import Check, Condition, Curve, Derived, Measured, Plan, Reason, Run, Variant, Verdict
from playbook_bench import metrics
from playbook_bench.judge import effects, guards, receipt, statistics, verdict_rules
from playbook_bench.judge.guards import Block, Pair
from playbook_bench.judge.verdict_rules import VERSION, Rules
from playbook_bench.metrics import METRICS, OUTSIDE, WALL_STEP, Metric

RULES: dict[int, Rules] = {2: verdict_rules.RulesV2(), VERSION: Rules()}
"""The rules of judging, by version; a record's plan names its version."""

STATES: dict[Reason, tuple[str, str]] = {
    "scope": ("not applicable", "the claim's scope excludes this machine"),
    "package": ("not applicable", "a package that the case needs is missing"),
    "profile": ("not applicable", "the case has no profile for this machine"),
    "no_case": ("not applicable", "no case tests the claim"),
    "kind": ("not applicable", "the claim is of a kind that cannot be tested here"),
    "run_error": ("error", "a launch crashed, hung, was killed, gave NaN or too few steps, or reports no value of the metric"),
    "oom": ("inconclusive", "a launch was out of memory or refused, and the claim is not about fitting"),
    "not_activated": ("error", "a path under test did not run"),
    "invalid_pair": (
        "inconclusive",
        "the variants differ in more than the case declares: settings, environment, data, parameters, work, loss",
    ),
    "environment": (
        "inconclusive",
        "launches of one configuration differ more than this machine's noise, or an exact metric does not repeat",
    ),
    "not_steady": ("inconclusive", "step time changes inside the timed steps, after one extension of the warm-up too"),
    "no_claim": ("measured", "the case was run and no claim asks about it"),
    "exact": ("confirmed or refuted", "an exact metric, an arithmetic statement or an invariant meets the claim, or does not"),
    "margin": ("confirmed or refuted", "at a look, the intervals imply the claim, or its negation"),
    "budget": ("inconclusive", "time or `--pairs` ended the series before its last look, and nothing is settled"),
    "power": (
        "inconclusive",
        "the last look is taken, the claim is out of reach, or peak memory was compared, and an interval contains the margin",
    ),
}
"""By reason: the state that follows, and when. In the order in which they are asked."""


Statement = tuple[bool, str, dict[str, Any]]
"""What the function of a case that launches nothing gives: whether its claim holds, one sentence that says why, and the figures behind
it."""


def derive(measured: Measured, statement: Statement | None = None) -> Derived:
    """The verdict and its figures.

    `statement` is what the function of an arithmetic or invariant case gave.

    Raises:
        ConfigError: the claim's metric or margin cannot be applied, or the record is of rules that are not known.
    """
    if measured.missing:
        text = "; ".join(m.detail for m in measured.missing)
        return Derived(verdict=_verdict(measured.missing[0].reason, f"not applicable: {text}"))
    if measured.case is None:
        raise ConfigError("a record without a case must say what is missing")
    case = measured.case.content
    if case.kind in ("arithmetic", "invariant"):
        if statement is None:
            raise ConfigError(f"case '{case.id}' is of kind {case.kind}: its verdict needs what its function gave")
        holds, sentence, figures = statement
        return Derived(figures=figures, verdict=_verdict("exact", sentence, holds))
    if measured.plan is None:
        raise ConfigError("a record of runs must hold the plan that was fixed before them")
    derived = _JudgedSeries(measured, case, measured.plan).derive()
    if measured.sharing:
        shared = f"{derived.verdict.sentence}; {measured.sharing} ranks took turns on one GPU"
        return derived.model_copy(update={"verdict": derived.verdict.model_copy(update={"sentence": shared})})
    return derived


class _JudgedSeries:
    """The runs of one record with what they are to show."""

    def __init__(self, measured: Measured, case: Case, plan: Plan) -> None:
        self.measured, self.case, self.plan = measured, case, plan
        self.rules = rules_of(plan)
        claim = measured.claim
        name = claim.metric if claim else case.metric or ""
        # Where memory was measured beside times, there is an A/A, and the intervals say the same.
        row = metrics.get(name) if measured.aa else metrics.on(name, gpus=bool(measured.machine.gpus))
        self.metric = metrics.as_measured(row, case, measured.runs)
        self.expect = claim.expect if claim else Expect(op="inside") if case.kind == "prediction" else None
        excused = effects.variant_names(self.expect.infeasible) if self.expect else []
        self.dead = {r.variant for r in measured.runs if r.variant in excused and r.outcome in ("oom", "refused")}
        self.names = [v for v in case.variants if v not in self.dead]
        self.checks = receipt.judge_case(case, measured.runs)
        self.unit = "pair" if case.kind == "pair" else "block"

    def derive(self) -> Derived:
        """In the order of `STATES`."""
        runs = [r for r in self.measured.runs if r.variant not in self.dead]
        if bad := failure(runs, self.metric) or _faulty([r for r in runs if r.outcome == "ok"], self.metric, self.checks):
            return Derived(receipts=self.checks, verdict=bad)
        fits = self.metric.name == "fits"
        blocks = guards.blocks_of(runs, self.names, failed=fits)
        if not (blocks or self.dead):
            none = _verdict("budget", f"the budget ended before the first {self.unit} of runs")
            return self._from_the_start() or Derived(receipts=self.checks, verdict=none)
        if self.expect is not None and self.expect.op == "excludes":
            return self._excludes(self.expect, blocks)
        if lost := _lost(self.case, self.expect, self.names) or (None if blocks else _verdict("budget", "no block is complete")):
            return Derived(receipts=self.checks, verdict=lost)
        return self._judged(blocks, [], None, []) if fits else self._compare(blocks)

    def _from_the_start(self) -> Derived | None:
        """The verdict where the first, discarded run of each variant shows that a path did not run or that runs cannot be compared; else
        None.

        Their speed is not looked at, for they warm up caches and machine. What is looked at would end the series at its first look anyway.
        """
        ran = {r.variant: r for r in self.measured.runs if r.role == "burn_in" and r.outcome == "ok"}
        if ran.keys() != set(self.case.variants):
            return None
        first = {v: ran[v] for v in self.case.variants}
        self.checks = receipt.judge_runs(self.case.activation, list(first.values()))
        self.checks += receipt.alike(self.case, list(first.values()), self.checks)
        # A command's first launches are timed like the others, and may show already that its log lacks what is compared.
        launches = [r.model_copy(update={"role": "measure"}) for r in first.values()] if self.case.command else []
        if unusable := _faulty(launches, self.metric, self.checks):
            return Derived(receipts=self.checks, verdict=unusable)
        return self._incomparable(
            _block_conditions(self.measured, self.case, self.metric, [first]), "the first run of each shows that they"
        )

    def _incomparable(self, conditions: list[Condition], what: str = "the runs") -> Derived | None:
        """The answer where a condition is not met: the runs cannot be compared. None where all are met."""
        broken = "; ".join(f"{g.name}: {g.detail}" for g in conditions if not g.ok)
        verdict = _verdict("invalid_pair", f"{what} cannot be compared: {broken}")
        return Derived(receipts=self.checks, gates=conditions, verdict=verdict) if broken else None

    def _compare(self, blocks: list[Block]) -> Derived:
        """The verdict where blocks of launches are complete: first whether they can be compared, repeat and are steady, then the effect."""
        conditions = _block_conditions(self.measured, self.case, self.metric, blocks)
        if unlike := self._incomparable(conditions):
            return unlike
        if self.metric.deterministic:
            if few := self._launched_once():
                return Derived(receipts=self.checks, gates=conditions, verdict=_verdict("budget", few))
            moved = next((s for v in self.names if (s := spread(self.metric, [b[v] for b in blocks]))), "")
            conditions.append(Condition(name="repeatable", ok=not moved, detail=moved))
            return self._judged(blocks, conditions, _verdict("environment", moved) if moved else None, [])
        aa = self.measured.aa
        quiet, noise = guards.noise(self.metric, self.measured.runs, aa) if self.rules.has_aa else (None, [])
        # Of the blocks to the first look, at which an unsteady series starts over: a test at each look would reject more often than it
        # promises.
        first = blocks[: self.plan.looks[0]]
        steady = guards.steady(first, guards.step_deviation(aa) if self.rules.has_aa else guards.launch_deviation(first))
        if self.measured.sharing:
            steady = Condition(name=steady.name, ok=True, detail="not asked: step time says nothing where ranks take turns on one GPU")
        elif self.case.command and self.metric.is_counted:
            steady = Condition(name=steady.name, ok=True, detail=f"not asked: no time goes into {self.metric.name}")
        conditions += [quiet, steady] if quiet else [steady]
        bad = None
        if quiet and not quiet.ok:
            bad = _verdict("environment", f"this machine is too noisy for a verdict now: {quiet.detail}")
        elif not steady.ok:
            bad = _verdict("not_steady", f"step time is not steady: {steady.detail}")
        return self._judged(blocks, conditions, bad, noise)

    def _launched_once(self) -> str:
        """In words, which variant of a command was launched once alone: nothing says that its count would repeat. Empty where there is
        none.
        """
        launched = Counter(r.variant for r in self.measured.runs if r.outcome == "ok")
        few = next((v for v in self.names if launched[v] < 2), None) if self.case.command else None
        return f"{few} was launched once; a command's {self.metric.name} counts where two launches of each variant repeat it" if few else ""

    def _judged(self, blocks: list[Block], conditions: list[Condition], bad: Verdict | None, noise: Sequence[float]) -> Derived:
        """The measured effect with its verdict, which is `bad` if the runs decide nothing. A pair's record holds a `Comparison`, others a
        `Curve`.
        """
        curve = effects.measure(self.rules, self.measured.runs, self.case, self.metric, self.expect, self.plan, blocks, noise)
        pair = effects.as_pair(curve) if self.case.kind == "pair" else None
        shown = effects.show_effect(pair) if pair else effects.show(curve)
        verdict = bad or self._verdict(curve, shown)
        if curve.design != "deterministic" and not self.rules.has_aa:
            margin = effects.threshold(self.metric, self.expect.margin) if self.expect else 0.0
            carried, remark = effects.carry_over(self.measured.runs, self.metric, blocks, margin)
            conditions += [carried] if carried else []
            verdict = verdict.model_copy(update={"sentence": f"{verdict.sentence}; {remark}"}) if remark else verdict
        if self.case.command:
            verdict = verdict.model_copy(update={"sentence": f"{verdict.sentence}; {self._not_vouched_for(conditions)}"})
        return Derived(
            comparison=pair,
            curve=None if pair else curve,
            receipts=self.checks,
            gates=conditions,
            verdict=verdict,
        )

    def _not_vouched_for(self, conditions: Sequence[Condition]) -> str:
        """In words, what a command's launches do not show, such as equal work or an activated path; the verdict is about time alone."""
        words = {"work": "equal work", "clock": "the log's clock", "whole_launch": "whole launches"}
        names = [words.get(g.name, g.name) for g in conditions if g.ok and g.detail.startswith("not compared")]
        every = max((strict.get("trainer", {}).get("log_every", 1) for strict in self.measured.strict.values()), default=1)
        missing = ", ".join([*names, *([f"single steps (a line covers {every})"] if every > 1 else [])])
        return "; ".join(filter(None, (f"not vouched for: {missing}" if missing else "", "" if self.checks else "activation not proven")))

    def _verdict(self, curve: Curve, shown: str) -> Verdict:
        """What the intervals of a curve, `shown` in words, say of the claim."""
        expect, looks, n = self.expect, self.plan.looks, curve.blocks
        if expect is None:
            return _verdict("no_claim", shown)
        margin = effects.threshold(self.metric, expect.margin)
        ran = [p.variant for p in curve.points if p.outcome == "ok"]
        rule = effects.claim_rule(expect, ran, margin, effects.bands(self.case, self.metric))
        claimed = f"claimed {in_words(expect, self.case.kind)}"
        if expect.op == "inside":
            claimed = f"predicted {effects.show_predicted(self.case, self.metric)}"
        bounds = effects.bounds(curve)
        if curve.design == "deterministic":
            holds = effects.decide(rule, _allowing(self.metric.within, curve, bounds, margin))
            if holds is None and self.metric.within > metrics.EXACT:
                return _verdict("power", f"{shown}; {claimed}; too near to it for launches that repeat to {100 * self.metric.within:g} %")
            return _verdict("exact", f"{shown}; {claimed}", bool(holds))
        if curve.look is None or n < 2:
            need = next((look for look in looks if look > n), looks[-1])
            return _verdict("budget", f"{shown}; stopped after {n} {self.unit}s, a verdict needs {need}; {claimed}")
        holds = effects.decide(rule, bounds)
        if holds is not None:
            return _verdict("margin", f"{shown}; {claimed}", holds)
        more = "" if curve.blocks_needed is None else f"; about {curve.blocks_needed} {self.unit}s would settle it"
        if self.plan.stopped == "out_of_reach":
            return _verdict("power", f"{shown}; {claimed}; out of reach after {n} of {looks[-1]} {self.unit}s{more}")
        if n < looks[-1]:
            return _verdict("budget", f"{shown}; {claimed}; undecided after {n} of {looks[-1]} {self.unit}s{more}")
        return _verdict("power", f"{shown}; {claimed}; undecided after all {n} {self.unit}s{more}")

    def _excludes(self, expect: Expect, blocks: Sequence[Block]) -> Derived:
        """The verdict of a claim with op `excludes`: the variants that it names cannot run, and all others can."""
        infeasible = set(effects.variant_names(expect.infeasible))
        launched = [r for r in self.measured.runs if r.role == "measure"]
        ran = sorted({r.variant for r in launched if r.outcome == "ok"})
        out = {r.variant: r for r in launched if r.variant in infeasible and r.outcome != "ok"}
        contradicted = sorted(infeasible & set(ran))
        others = [r.variant for r in launched if r.outcome != "ok" and r.variant not in infeasible]
        missing = [v for v in self.case.variants if v not in ran and v not in out]
        claimed = f"claimed {in_words(expect, self.case.kind)}"
        if contradicted:
            verdict = _verdict("exact", f"{', '.join(contradicted)} ran; {claimed}", holds=False)
        elif others:
            verdict = _verdict("oom", f"{', '.join(others)} did not fit either; {claimed}")
        elif missing:
            verdict = _verdict("budget", f"the budget ended before {', '.join(missing)} ran")
        else:
            words = {v: "was refused" if r.outcome == "refused" else "was out of memory" for v, r in out.items()}
            failures = "; ".join(f"{v} {words[v]}: {_first_line(r.message)}" for v, r in out.items())
            verdict = _verdict("exact", f"{failures}; {', '.join(ran)} ran", holds=True)
        curve = Curve(
            metric=self.metric.name,
            unit=self.metric.unit,
            better=self.metric.better,
            design="deterministic",
            scale=self.metric.scale,
            points=effects.points(self.measured.runs, self.case, self.metric, blocks),
            contrasts=[],
            blocks=len(blocks),
        )
        return Derived(curve=curve, receipts=self.checks, verdict=verdict)


def rules_of(plan: Plan) -> Rules:
    """The rules that a plan names.

    Raises:
        ConfigError: a newer playbook made it.
    """
    if plan.rules not in RULES:
        known = " and ".join(map(str, RULES))
        raise ConfigError(f"this record was judged by rules of version {plan.rules}; this playbook knows {known}: run it again, or upgrade")
    return RULES[plan.rules]


def steady(plan: Plan, runs: Sequence[Run], names: Sequence[Variant]) -> bool:
    """Whether no variant's step time changes inside its timed window. True where steps cannot be used: `derive` has a verdict for that."""
    blocks, times = guards.blocks_of(runs, names), metrics.get("step_seconds")
    if any(guards.complete(run, times) for block in blocks for run in block.values()):
        return True
    return guards.steady(blocks, guards.launch_deviation(blocks)).ok


def pair_conditions(
    measured: Measured, case: Case, metric: Metric, pairs: Sequence[Pair], allowed: Collection[str] = ()
) -> list[Condition]:
    """The conditions that make two runs a pair, each met or not."""
    return [
        guards.configurations(case, measured.configs, pairs),
        guards.environment(case, measured.strict, [r for pair in pairs for r in pair], allowed),
        guards.data(case, pairs),
        guards.parameters(case, pairs),
        guards.work(case, metric, pairs),
        guards.loss(case, pairs),
        *conditions(metric, pairs),
    ]


def _block_conditions(measured: Measured, case: Case, metric: Metric, blocks: Sequence[Block]) -> list[Condition]:
    """The conditions that make launches comparable, each met or not; every variant is held against the first."""
    first, *others = blocks[0]
    by_name: dict[str, Condition] = {}
    for other in others or [first]:  # a single run that is predicted is held against itself
        for g in pair_conditions(measured, case, metric, [(b[first], b[other]) for b in blocks]):
            if g.name not in by_name or (by_name[g.name].ok and not g.ok):
                plain = g.ok or case.kind == "pair"
                by_name[g.name] = g if plain else g.model_copy(update={"detail": f"{other} against {first}: {g.detail}"})
    return list(by_name.values())


def failure(runs: Sequence[Run], metric: Metric) -> Verdict | None:
    """The verdict if a launch failed, else None. Out of memory counts only where nothing else failed: after another failure the remaining
    figures may be wrong too.
    """
    bad = [r for r in runs if r.outcome != "ok" and not (metric.name == "fits" and r.outcome == "oom")]
    other = next((r for r in bad if r.outcome != "oom"), None)
    if other is not None:
        text = {
            "nan": "printed a NaN loss",
            "hang": "stopped making progress",
            "crash": "crashed",
            "killed": "was killed",
            "refused": "was refused",
        }[other.outcome]
        text = "ended well, and its figures cannot be had" if (other.outcome, other.returncode) == ("crash", 0) else text
        return _verdict("run_error", f"a {other.variant} run {text}: {_first_line(other.message)}")
    if bad:
        return _verdict("oom", f"a {bad[0].variant} run was out of memory: {_first_line(bad[0].message)}")
    return None


def _faulty(runs: Sequence[Run], metric: Metric, checks: Sequence[Check]) -> Verdict | None:
    """The verdict if a launch's figures cannot be used or its receipt breaks a rule, else None."""
    problems = (guards.complete(run, metric) for run in runs if run.role != "burn_in")
    if problem := next(filter(None, problems), None):
        return _verdict("run_error", f"a run cannot be used: {problem}")
    if dead := next((c for c in checks if not c.ok), None):
        return _verdict("not_activated", receipt.in_words(dead, f"the {dead.variant} did not run as configured: "))
    return None


def spread(metric: Metric, runs: Sequence[Run]) -> str:
    """How a metric that should repeat differs between launches of one variant; empty where it repeats."""
    values = [effects.required(metric, r) for r in runs]
    if max(values) - min(values) > metric.within * max(abs(v) for v in values):
        gave = f"the {runs[0].variant}'s launches gave {min(values):g} to {max(values):g}"
        return f"{metric.name} should repeat to {100 * metric.within:g} %, but {gave}"
    return ""


def _allowing(within: float, curve: Curve, bounds: Sequence[tuple[float, float]], margin: float) -> list[tuple[float, float]]:
    """Figures that one launch of each variant told, as intervals: as wide as launches differ.

    Exact ones have no width; one that equals the margin but for rounding is set to it, so that `>=` and `<=` both hold there.
    """
    if within > metrics.EXACT:
        wide = [within * math.fsum(map(abs, c.weights.values())) for c in curve.contrasts]
        return [(low - w, high + w) for (low, high), w in zip(bounds, wide, strict=True)]
    slack = metrics.EXACT * max(1.0, abs(margin))
    near = [next((m for m in (margin, -margin) if abs(value - m) <= slack), value) for value, _ in bounds]
    return [(value, value) for value in near]


def _lost(case: Case, expect: Expect | None, names: Sequence[Variant]) -> Verdict | None:
    """The verdict if variants that the claim's rule needs did not run, else None. A sweep may lose other values."""
    if len(names) == len(case.variants) or expect is None:
        return None
    first, *_, last = case.variants
    text = f"{', '.join(v for v in case.variants if v not in names)} did not fit or was refused"
    at = set(effects.variant_names(expect.at)) & set(names)
    words = in_words(expect, case.kind)
    if expect.op in ("best", "reaches") and not at and names:
        return _verdict("exact", f"{text}, while {', '.join(names)} ran; claimed {words}", holds=False)
    broken = {
        "best": at == set(names),
        "not_best": not at or at == set(names),
        "band": first not in names,
        "knee": len(names) < 3 or bool(expect.at and not at & set(names[1:-1])),
        "reaches": len(names) < 3 or last not in names,
        "rising": False,
    }
    if len(names) < 2 or broken.get(expect.op, True):
        return _verdict("oom", f"{text}; the rest does not settle: {words}")
    return None


def _verdict(reason: Reason, sentence: str, holds: bool | None = None) -> Verdict:
    """A verdict for a reason, with the state that `STATES` has for it; reasons that confirm or refute need `holds`."""
    named = STATES[reason][0]
    status: Any = named.replace(" ", "_") if holds is None else "confirmed" if holds else "refuted"
    return Verdict(status=status, reason=reason, sentence=sentence)


def _first_line(text: str) -> str:
    """The first line of a message that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:300]


# Whether a command's launches say by other clocks what its log says: by the arrival of their lines, and as whole launches.

_MARGIN = 0.02
"""Share by which two clocks may differ."""
_DOUBT = 0.01
"""Two-sided error rate of the interval that calls a difference certain."""
_BY_CHANCE = 0.015
"""One-sided error rate of the rank test of what is outside of steps: four launches of each that do not overlap are as rare."""
_UNSYNCHRONISED = 0.5
_TAKEN_BACK = 0.5
"""Share of what steps save by the log that may be lost by another clock, where its noise hides more."""
_BY_STEPS = ("step_seconds", "useful_tokens_per_s_per_gpu", "raw_tokens_per_s_per_gpu", "images_per_s")
"""Metrics that are made of the log's seconds."""


def conditions(metric: Metric, pairs: Sequence[Pair]) -> list[Condition]:
    """The conditions on clocks; none for a metric that no clock goes into, a single pair, or launches of which other clocks are not
    known.
    """
    runs = [run for pair in pairs for run in pair]
    if metric.name not in _BY_STEPS or len(pairs) < 2:
        return []
    checks = [_arrival(pairs)] if all(run.metrics.get(WALL_STEP) for run in runs) else []
    if all(c.ok for c in checks) and all(run.metrics.get(OUTSIDE) is not None for run in runs):
        checks.append(_whole(pairs))  # where lines arrive otherwise, whole launches say the same once more
    return checks


def _arrival(pairs: Sequence[Pair]) -> Condition:
    """The effect by the log's seconds is that by the arrival of lines."""
    name = "clock"
    by_log = [math.log(_step(a) / _step(b)) for a, b in pairs]
    by_arrival = [math.log(_wall_step(a) / _wall_step(b)) for a, b in pairs]
    low, high = _certain([x - y for x, y in zip(by_log, by_arrival, strict=True)])
    by_lines, by_seconds = plain.fmean(by_arrival), plain.fmean(by_log)
    # Where lines arrive too irregularly for certainty, they have to bear out half of what the log says.
    unseen = abs(by_seconds) > _MARGIN and math.copysign(by_lines, by_lines * by_seconds) < (1 - _TAKEN_BACK) * abs(by_seconds)
    if low > _MARGIN or high < -_MARGIN or unseen:
        return Condition(
            name=name,
            ok=False,
            detail=f"the candidate is {_effect(by_log)} by the seconds of its log, "
            f"and {_effect(by_arrival)} {_interval(by_arrival)} by the arrival of its lines. "
            "The log leaves out time between steps, or its timer does not wait for the device. "
            f"Log what a step takes until its device is done, or compare by the metric {WALL_STEP}",
        )
    share = plain.median(_step(run) / _wall_step(run) for pair in pairs for run in pair)
    if share < _UNSYNCHRONISED:
        return Condition(
            name=name,
            ok=True,
            detail=f"not compared: steps take {100 * share:.0f} % of the time between their lines, "
            "so the log's timer may not wait for the device",
        )
    return Condition(name=name, ok=True)


def _whole(pairs: Sequence[Pair]) -> Condition:
    """What steps save is not spent before the first line, after the last, or between them where lines have no arrival."""
    from scipy import stats as sps  # start-up time: reports of all commands import this module

    name = "whole_launch"
    saved = plain.fmean(_inside(a) - _inside(b) for a, b in pairs)
    # What is outside of steps has outliers, such as a slow disk, so that ranks decide and not means.
    quick, slow = ([_outside(run) for run in side] for side in zip(*pairs, strict=True))
    quick, slow = (quick, slow) if saved > 0 else (slow, quick)
    more = plain.fmean(slow) - plain.fmean(quick)
    if abs(saved) <= _MARGIN * plain.fmean(_inside(a) for a, _ in pairs) or more < _TAKEN_BACK * abs(saved):
        return Condition(name=name, ok=True)
    if float(sps.mannwhitneyu(slow, quick, alternative="greater", method="exact").pvalue) > _BY_CHANCE:
        return Condition(name=name, ok=True, detail="not compared: what is outside of steps varies by more than they save")
    faster = "candidate" if saved > 0 else "baseline"
    whole = [math.log(a.wall_s / b.wall_s) for a, b in pairs]
    return Condition(
        name=name,
        ok=False,
        detail=f"the {faster}'s steps save {abs(saved):.3g} s of a launch, and what lies outside of them takes {more:.3g} s more: "
        f"as whole launches the candidate is {_effect(whole)} {_interval(whole)}. "
        "Time all that a step does, or let a launch make more steps",
    )


def _step(run: Run) -> float:
    return METRICS["step_seconds"].value(run) or math.nan


def _wall_step(run: Run) -> float:
    return run.metrics.get(WALL_STEP) or math.nan


def _outside(run: Run) -> float:
    return run.metrics.get(OUTSIDE) or 0.0


def _inside(run: Run) -> float:
    return run.wall_s - _outside(run)


def _certain(values: Sequence[float]) -> tuple[float, float]:
    """The interval of a mean that holds it in all but `_DOUBT` of series."""
    half = statistics.t_quantile(_DOUBT, len(values) - 1) * plain.stdev(values) / math.sqrt(len(values))
    return plain.fmean(values) - half, plain.fmean(values) + half


def _effect(logs: Sequence[float]) -> str:
    """The mean as verdicts say it, such as `faster +2.0 %`."""
    effect = 100 * math.expm1(plain.fmean(logs))
    return f"{'faster' if effect > 0 else 'slower'} {effect:+.1f} %"


def _interval(logs: Sequence[float]) -> str:
    low, high = (100 * math.expm1(v) for v in _certain(logs))
    return f"[{low:+.1f}, {high:+.1f}]"
