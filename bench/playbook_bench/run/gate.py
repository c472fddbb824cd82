"""The regression gate: a case's baseline configuration at two commits, run as matched pairs. It fails closed.

The commit that is compared with runs again in the same series: figures of another day are no baseline. Each tree resolves the trainer's
file and the case's overrides with its own code. Where the case has an anchor, an older commit whose speed was accepted, the tree is
compared with that too, so that small slowdowns add up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from playbook.errors import ConfigError, ExitCode, LaunchError
from playbook.paths import data_root
from playbook.records.case import LAUNCHED_KINDS, Activation, Case, Delta, Guardrails, Loss, case_file, load_case
from playbook.records.evidence import Comparison, Condition, Run, canonical, digest
from playbook_bench import metrics
from playbook_bench.judge import design, effects, guards, receipt, slowdown, verdict
from playbook_bench.launch import local
from playbook_bench.machine import detect, requirements
from playbook_bench.metrics import Metric
from playbook_bench.run import schedule, series
from playbook_bench.run.journal import Journal
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.run.series import Series
from playbook_bench.variants import checkout
from playbook_bench.variants.command import CommandVariant
from playbook_bench.variants.resolve import Runnable, differing, overrides, resolve, resolve_variant, trainer_path
from playbook_trainer import revision
from playbook_trainer.config.tree import flatten

EXIT_CODES = {
    "pass": ExitCode.DONE,
    "regression": ExitCode.REFUTED,
    "undecided": ExitCode.UNDECIDED,
    "too_noisy": ExitCode.UNDECIDED,
    "error": ExitCode.FAILED,
}
Status = Literal["pass", "regression", "undecided", "too_noisy", "error"]
_WORST_FIRST: tuple[Status, ...] = ("error", "regression", "too_noisy", "undecided", "pass")


@dataclass(frozen=True)
class Limits:
    """What two commits may differ by.

    Raises:
        ConfigError: it is no share, or of something that has no allowance.
    """

    limit: float = slowdown.LIMIT
    """A slowdown above it is a regression, as a share of the step's time."""
    allowed: Mapping[str, float] = field(default_factory=dict)
    """Stated allowances, as shares: of an exact metric, of memory, of losses and gradient norms, of the process's time."""

    def __post_init__(self) -> None:
        for name, value in {"--limit": self.limit, **self.allowed}.items():
            if not 0 <= value < 10 or (name == "--limit" and value == 0):
                raise ConfigError(f"{name} is {100 * value:g} %; expected more than 0 and less than 1000 %")
        if unknown := [n for n in self.allowed if n not in slowdown.ALLOWABLE]:
            raise ConfigError(f"--allow {unknown[0]} is not known; expected one of {', '.join(slowdown.ALLOWABLE)}")


@dataclass(frozen=True)
class GateResult:
    """What the gate says, and on what grounds."""

    status: Status
    sentence: str
    case: str
    reference: str
    profile: str
    limit: float
    comparison: Comparison | None = None
    gates: list[Condition] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    pairs_needed: int | None = None
    """About how many pairs would settle what is undecided; None where no sensible number does."""
    differences: list[str] = field(default_factory=list)
    """Configuration keys that the two trees resolve to different values, with both."""
    revision: str = ""
    """Advice to raise a performance revision, where older verdicts should go stale and would not; else ""."""
    anchor: GateResult | None = None
    """The result against the anchor, the oldest accepted commit, if the case has one."""

    @property
    def exit_code(self) -> int:
        """0 passed, 1 regression, 3 undecided or too noisy, 5 error."""
        return EXIT_CODES[self.status]


def run(
    case_id: str | Case,
    baseline: str,
    options: Options | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    *,
    root: Path | None = None,
    judged: str | Path | None = None,
    anchor: str | None = None,
) -> GateResult:
    """Compare the commit `baseline`, and the case's anchor, with the working tree, or with what is `judged` instead, a commit or a folder
    of files, on the case's baseline configuration.

    A case named by its file is that of the baseline: a change that edits its case too is judged by both, and the worse answer counts.
    A case that launches a command is judged in the repository around the working folder, any other in that of this code, unless `root`
    names one.

    Raises:
        ConfigError: a reference or the case does not fit.
        LaunchError: git cannot write a commit's files.
    """
    options, limits, progress = options or Options(), limits or Limits(), progress or Progress()
    if options.pairs is not None and options.pairs > slowdown.MOST_PAIRS:
        raise ConfigError(f"--pairs is {options.pairs}; expected at most {slowdown.MOST_PAIRS}")
    case = case_id if isinstance(case_id, Case) else load_case(case_id)
    repository = repository_of(case, root)
    before = None if isinstance(case_id, Case) else checkout.case_at(repository, baseline, case_file(case_id))
    if before is None or before == case:
        return _run(case, baseline, options, limits, progress, root, judged, anchor)
    progress.note(f"the case {case.id} has changed since {baseline}: it is judged as it was, and as it is")
    was, now = (_run(each, baseline, options, limits, progress, root, judged, anchor) for each in (before, case))
    worse = was if _WORST_FIRST.index(was.status) <= _WORST_FIRST.index(now.status) else now
    sentence = f"the case has changed since {baseline}; as it was: {was.sentence}; as it is now: {now.sentence}"
    return replace(worse, sentence=sentence, runs=[*was.runs, *now.runs])


def _run(
    case: Case,
    baseline: str,
    options: Options,
    limits: Limits,
    progress: Progress,
    root: Path | None,
    judged: str | Path | None,
    anchor: str | None,
) -> GateResult:
    """The gate on one case: both commits, and the anchor, launched in one series, and the answer that follows."""
    case = _as_gate_case(case)
    metric = metrics.get(case.metric or "")
    machine = detect.detect()
    profile = requirements.require_profile(case, machine, options.profile)
    repository = repository_of(case, root)
    anchor = anchor or (checkout.anchor_of(case.id, repository, baseline) if root is None or case.command else None)
    if anchor and checkout.commit_of(repository, anchor) == checkout.commit_of(repository, baseline):
        anchor = None
    references = {"baseline": baseline, **({"anchor": anchor} if anchor else {})}
    with local.interruptible(resumes=judged is None), contextlib.ExitStack() as stack:
        blank = GateResult("error", "", case.id, baseline, profile, limits.limit)
        states: dict[str, str | Path | None] = {**references, "candidate": judged}
        try:
            folders = {} if case.command else _files(stack, repository, states)
            variants = _commands(case, profile, repository, states) if case.command else _resolve(case, profile, folders)
            changed = {v: checkout.changed(folders[v], folders["candidate"]) for v in references if folders}
        except LaunchError as e:
            return replace(blank, sentence=str(e))
        blank = replace(blank, differences=_differences(variants))
        if blank.differences:
            progress.note(f"the commits resolve the configuration differently: {'; '.join(blank.differences)}")
        if warning := detect.claim(requirements.restrict(machine, profile)):
            progress.note(warning)
        journal = options.journal or (None if judged else _default_journal(case, repository, variants, references, options))
        deadline = options.began + 60 * case.budget.minutes if options.deadline is None else options.deadline
        name, looks = f"{case.id}-gate", _looks(case, options.pairs)
        with Series.open(
            name, case, profile, machine, variants, options, progress, journal=journal, deadline=deadline, looks=looks
        ) as running:
            _measure(running, metric, limits)
    if journal and options.journal is None and running.plan.stopped != "budget":
        journal.remove()
    result = _judge_all(running, metric, limits, blank, anchor, changed)
    if not _changed(repository, baseline, judged):
        result = replace(result, sentence=f"nothing changed since {baseline}, and any difference is noise; {result.sentence}")
    return result


def _changed(repository: Path, baseline: str, judged: str | Path | None) -> bool:
    """Whether the files that git knows of differ from those of the baseline; what a folder of files holds is not asked."""
    if isinstance(judged, Path):
        return True
    state = checkout.tree_of(repository, judged) if judged else checkout.working_tree(repository)
    return state != checkout.tree_of(repository, baseline)


def repository_of(case: Case, root: Path | None) -> Path:
    """The repository whose commits are compared: the one given, else that around the working folder for a command, and that of this code
    for our trainer.

    Raises:
        ConfigError: there is none.
    """
    if not case.command:
        return checkout.repository(root)
    return (root or checkout.around(Path.cwd())).resolve()


def _default_journal(
    case: Case, repository: Path, variants: Mapping[str, Runnable], references: Mapping[str, str], options: Options
) -> Journal | None:
    """What an earlier gate of the same commits and the same working tree has left when it was stopped; bisecting goes on by commits, not by
    launches.
    """
    candidate = variants["candidate"]
    state = candidate.files.tree if isinstance(candidate, CommandVariant) and candidate.files else checkout.state_of(repository)
    commits = [checkout.commit_of(repository, reference) for reference in references.values()]
    words = ["gate", digest(case.model_dump(mode="json"), 16), str(options.pairs), str(options.seed)]
    return options.journal_of(words, [*commits, state])


def _files(stack: contextlib.ExitStack, root: Path, states: Mapping[str, str | Path | None]) -> dict[str, Path]:
    """Folder with the files of each variant. A commit's are written to a temporary folder, which is removed when the stack closes."""
    return {
        v: stack.enter_context(checkout.files_of(root, state)) if isinstance(state, str) else state or root for v, state in states.items()
    }


def _commands(case: Case, profile: str, repository: Path, states: Mapping[str, str | Path | None]) -> dict[str, Runnable]:
    """The command in the files of each state of the repository, in the folder that the gate was started in."""
    started_in = Path.cwd().resolve() if Path.cwd().resolve().is_relative_to(repository) else repository
    variants: dict[str, Runnable] = {}
    for variant in (v for v in ("baseline", "candidate", "anchor") if v in states):
        state = states[variant]
        tree = checkout.tree_of(repository, str(state)) if state else checkout.working_tree(repository)
        command = resolve(case, "baseline", profile, started_in, tree)
        variants[variant] = replace(command, variant=variant) if isinstance(command, CommandVariant) else command
    return variants


def _as_gate_case(case: Case) -> Case:
    """The case as a pair with its first variant, its environment and its activation rules in both places; losses within the case's band."""
    if case.kind not in LAUNCHED_KINDS:
        raise ConfigError(f"case '{case.id}' is of kind {case.kind} and launches nothing; the gate needs runs")
    band = case.guardrails.loss.relative or Loss().relative
    first, delta = next(iter(case.variants.items()))
    activation, environment = case.activation.of(first), case.delta.environment.get(first, {})
    profile_deltas = {p: {"baseline": v[first], "candidate": v[first]} for p, v in case.variant_profiles.items() if first in v}
    return case.model_copy(
        update={
            "kind": "pair",
            "knob": None,
            "values": [],
            "factors": [],
            "baseline": dict(delta),
            "candidate": dict(delta),
            "variant_profiles": profile_deltas,
            "delta": Delta(environment={"baseline": environment, "candidate": environment}),
            "activation": Activation(baseline=activation, candidate=activation),
            "guardrails": Guardrails(loss=Loss(relative=band)),
        }
    )


def _resolve(case: Case, profile: str, folders: Mapping[str, Path]) -> dict[str, Runnable]:
    """Each variant's configuration, resolved by its own tree's code from its own trainer file and the case's overrides.

    Raises:
        LaunchError: a tree does not read them, or trains another number of steps.
    """
    shared = resolve_variant(case, "baseline", profile)
    trainer = trainer_path(case).relative_to(data_root("configs").resolve())
    paths = {v: checkout.import_path(t, list(folders.values())) for v, t in folders.items()}
    resolved = {}
    for variant in sorted(folders, reverse=True):  # candidate, baseline, anchor: the order of the launches is the schedule's own
        try:
            dump = checkout.resolve_in(folders[variant], paths[variant], trainer, overrides(case, "baseline", profile)[0])
        except LaunchError as e:
            raise LaunchError(f"the {variant} cannot be run: {e}") from e
        train, expected = dump.get("train", {}), shared.config.train
        if (train.get("steps"), train.get("warmup_steps")) != (expected.steps, expected.warmup_steps):
            raise LaunchError(f"the {variant} trains {train.get('steps')} steps and not {expected.steps}; name them in the case's profile")
        environment = {**shared.environment, "PYTHONPATH": paths[variant]}
        resolved[variant] = replace(shared, variant=variant, environment=environment, resolved=dump)
    return {v: resolved[v] for v in ("baseline", "candidate", "anchor") if v in resolved}


def _differences(variants: Mapping[str, Runnable]) -> list[str]:
    """`key: before -> now` for what the baseline and the tree resolve differently."""
    before, now = variants["baseline"].dump, variants["candidate"].dump
    old, new = flatten(before), flatten(now)
    return [f"{k}: {old.get(k, 'no such key')} -> {new.get(k, 'no such key')}" for k in differing(before, now)]


def _looks(case: Case, pairs: int | None) -> list[int]:
    """The case's looks, and further ones at the same distance where more pairs were asked for; fixed before the data, like the others."""
    looks = case.budget.looks
    step = looks[-1] - looks[-2] if len(looks) > 1 else looks[0]
    return [*looks, *range(looks[-1] + step, (pairs or 0) + 1, step)]


def _measure(running: Series, metric: Metric, limits: Limits) -> None:
    """One discarded launch of each commit, then pairs. What cannot be used ends it at the first launch that shows it."""
    looks, count = running.plan.looks, len(running.variants)
    twice = metric.deterministic and bool(running.case.command)  # a command's count is one only where launches repeat it
    running.expected = count * (1 + twice) if metric.deterministic else schedule.launches(looks, running.plan.pairs_limit, count)
    running.progress.series(f"gate {running.case.id}", running.expected)
    for spec in schedule.burn_in(running.variants) if twice or not metric.deterministic else ():
        ended = running.run(spec)
        if ended.outcome != "ok" or guards.complete(ended, metric):
            return
    if _unlike(running, metric):
        return
    if metric.deterministic:
        series.measure_pairs(running, lambda s, n: "decided", schedule.once(list(running.variants)))
        return
    others = [v for v in running.variants if v != "candidate"]
    series.measure_pairs(running, lambda s, n: "decided" if n in looks and all(_settled(s, metric, limits, v) for v in others) else "")


def _unlike(running: Series, metric: Metric) -> bool:
    """Whether the discarded launches show already that the tree cannot be compared with the baseline."""
    runs = _against(running.runs, "baseline")
    first = _discarded(runs)
    return bool(first) and any(not g.ok for g in _comparable(running, runs, metric, first, "baseline"))


def _discarded(runs: Sequence[Run]) -> list[guards.Pair]:
    """The discarded launches of both commits as a pair, whose speed counts for nothing; none where one is missing."""
    ran = {r.variant: r for r in runs if r.role == "burn_in" and r.outcome == "ok"}
    return [(ran["baseline"], ran["candidate"])] if ran.keys() >= {"baseline", "candidate"} else []


def _settled(running: Series, metric: Metric, limits: Limits, reference: str) -> bool:
    judged = _slowdowns(running, metric, limits, reference)
    return judged is None or _worst(*(each.answer for each in judged)) != "undecided"


def _against(runs: Sequence[Run], reference: str) -> list[Run]:
    """The runs of a comparison with one older commit, named `baseline` in them."""
    other = "anchor" if reference == "baseline" else "baseline"
    return [r.model_copy(update={"variant": "baseline"}) if r.variant == reference else r for r in runs if r.variant != other]


def _slowdowns(running: Series, metric: Metric, limits: Limits, reference: str) -> tuple[slowdown.Slowdown, slowdown.Slowdown] | None:
    """How much slower the newer commit is than an older one, by all launches of the series, and what launches take beside their timed
    steps, by the same rule: its share of the launch may grow by the limit, or by what is allowed. None before the second pair, or where a
    value is missing.
    """
    blocks = guards.blocks_of(running.runs, list(running.variants))
    if len(blocks) < 2 or any(metric.value(run) is None for block in blocks for run in block.values()):
        return None
    steps = [[-value for value in row] for row in effects.rows_of(metric, blocks)]
    beside = slowdown.overhead_rows(blocks, reference, running.strict)
    return (
        _judged_rows(running, blocks, steps, reference, _limit(metric, limits)),
        _judged_rows(running, blocks, beside, reference, _allowed_overhead(limits)),
    )


def _judged_rows(
    running: Series, blocks: Sequence[guards.Block], rows: Sequence[Sequence[float]], reference: str, limit: float
) -> slowdown.Slowdown:
    """How much larger the candidate's values are than those of an older commit. Shape: rows [blocks, variants]."""
    weights = [float(v == "candidate") - float(v == reference) for v in running.variants]
    worse = design.contrast(rows, effects.launches(running.runs, blocks), weights)
    return slowdown.judge_slowdown(worse, len(blocks), limit, running.plan.looks)


def _limit(metric: Metric, limits: Limits) -> float:
    return math.log1p(limits.limit) if metric.scale == "log_ratio" else limits.limit


def _allowed_overhead(limits: Limits) -> float:
    return limits.allowed.get("process", limits.limit)


def _worst(*answers: Status) -> Status:
    return min(answers, key=_WORST_FIRST.index)


def _judge_all(
    running: Series, metric: Metric, limits: Limits, blank: GateResult, anchor: str | None, changed: Mapping[str, Sequence[str]]
) -> GateResult:
    """The answer against the baseline, and against the anchor; the worse of the two counts. `changed` are the trainer's files that differ
    from each.
    """
    result = _judge(running, metric, limits, blank, "baseline", changed.get("baseline", ()))
    if anchor is None or result.status == "error":
        return result
    since = _judge(running, metric, limits, replace(blank, reference=anchor, differences=[]), "anchor", changed.get("anchor", ()))
    status = _worst(result.status, since.status)
    needed = [r.pairs_needed for r in (result, since) if r.status == "undecided"]
    more = None if not needed or None in needed else max(n for n in needed if n is not None)
    return replace(
        result,
        status=status,
        sentence=f"{result.sentence}; since the anchor {anchor[:12]}: {since.sentence}",
        anchor=since,
        pairs_needed=more,
    )


def _judge(running: Series, metric: Metric, limits: Limits, blank: GateResult, reference: str, changed: Sequence[str]) -> GateResult:
    """The answer against one older commit, `reference`. In this order: what cannot be used or compared, costs, then steps and the time
    beside them.
    """
    runs = _against(running.runs, reference)
    blank = replace(blank, runs=list(running.runs))
    if problem := _problem(running, runs, metric):
        return replace(blank, sentence=problem)
    pairs, first = guards.pairs_of(runs), running.plan.looks[0]
    cut = f"stopped after {len(pairs)} of the {first} pairs that the gate needs, without a failure; raise --budget (or --pairs)"
    compared = pairs or _discarded(runs)
    if not compared:
        return replace(blank, status="undecided", sentence=cut)
    if metric.deterministic and not metrics.as_measured(metric, running.case, runs).deterministic:
        text = f"{metric.name} differs between launches of one commit, so that a pair of them tells nothing; fix its seed, or gate a time"
        return replace(blank, status="undecided", sentence=text)
    alike = _comparable(running, runs, metric, compared, reference)
    if pairs and reference == "baseline":
        alike += slowdown.same_training(pairs, runs, limits.allowed)
    if broken := [f"{g.name}: {g.detail}" for g in alike if not g.ok]:
        return replace(blank, gates=alike, sentence=f"the two commits cannot be compared: {'; '.join(broken)}")
    if not pairs:
        return replace(blank, gates=alike, status="undecided", sentence=cut)
    memory = slowdown.same_memory(pairs, runs, limits.allowed.get("memory", slowdown.MEMORY))
    blank = replace(blank, gates=[*alike, memory])
    dearer = "" if memory.ok else memory.detail
    if metric.deterministic:
        return _judge_exact(metric, limits, blank, _effect(running, metric, runs), dearer)
    judged = _slowdowns(running, metric, limits, reference)
    effect, candidate = _effect(running, metric, runs), running.variants["candidate"]
    paths = revision.touched(changed, candidate.dump, candidate.ranks)
    blank = replace(blank, comparison=effect, revision=slowdown.unraised(effect, runs, running.strict, paths))
    if dearer:
        return replace(blank, status="regression", sentence=dearer)
    if judged is None or len(pairs) < first:
        return replace(blank, status="undecided", sentence=cut)
    steps, overhead = judged
    sentence, needed = slowdown.in_words(steps, metric, limits.limit, runs, len(pairs))
    overhead_text = slowdown.overhead_in_words(overhead, _allowed_overhead(limits), is_slower=steps.answer == "regression")
    if overhead.answer != "pass":
        sentence = f"{sentence}; {overhead_text}"
        needed = max(needed or 0, overhead.pairs_needed or 0) or None
    blocks = guards.blocks_of(running.runs, list(running.variants))
    carried, remark = effects.carry_over(running.runs, metric, blocks, _limit(metric, limits))
    gates = [*blank.gates, Condition(name="process", ok=overhead.answer == "pass", detail=overhead_text), *([carried] if carried else [])]
    sentence = "; ".join(filter(None, (sentence, remark)))
    return replace(blank, status=_worst(steps.answer, overhead.answer), sentence=sentence, pairs_needed=needed, gates=gates)


def _effect(running: Series, metric: Metric, runs: Sequence[Run]) -> Comparison:
    """The effect of the working tree, as a `Comparison` like that of a pair's record."""
    rules, blocks = verdict.rules_of(running.plan), guards.blocks_of(runs, schedule.PAIR)
    curve = effects.measure(rules, runs, running.case, metric, None, running.plan, blocks, [])
    return effects.as_pair(curve)


def _judge_exact(metric: Metric, limits: Limits, blank: GateResult, effect: Comparison, dearer: str) -> GateResult:
    allowed = limits.allowed.get("metric", 0.0)
    worse = slowdown.exact_worse(metric, effect.baseline, effect.candidate, allowed)
    shown = f"{metric.name} {effects.show_effect(effect)}" + (f", {100 * allowed:g} % is allowed" if allowed else "")
    status: Status = "regression" if worse or dearer else "pass"
    return replace(blank, status=status, sentence="; ".join(filter(None, (shown, dearer))), comparison=effect)


def _comparable(running: Series, runs: Sequence[Run], metric: Metric, pairs: Sequence[guards.Pair], reference: str) -> list[Condition]:
    """The conditions that make runs of two commits comparable, which one pair can show. Configurations may differ, since the difference is
    printed first; against the anchor, so may losses.
    """
    if reference == "anchor":
        return [guards.work(running.case, metric, pairs)]
    measured = running.measured().model_copy(update={"runs": list(runs)})
    conditions = verdict.pair_conditions(measured, running.case, metric, pairs, allowed=guards.SOURCE_KEYS)
    # What is outside of steps has its own limit here (`_rest`), and steps that slow down are a regression whatever it does.
    return [*(g for g in conditions if g.name not in ("configuration", "whole_launch")), slowdown.same_fields(pairs)]


def _problem(running: Series, runs: Sequence[Run], metric: Metric) -> str:
    """Why the figures cannot be used, or nothing."""
    if bad := next((r for r in runs if r.outcome != "ok"), None):
        return f"a {bad.variant} run ended as {bad.outcome}: {bad.message[:500]}"
    if problem := next(filter(None, (guards.complete(each, metric) for each in runs)), None):
        return f"a run cannot be used: {problem}"
    dead = next((c for c in receipt.judge_case(running.case, runs, ("burn_in", "measure")) if not c.ok), None)
    return f"the {dead.variant} did not run as configured: {dead.rule}, expected {dead.expected}, found {dead.observed}" if dead else ""


def as_json(result: GateResult) -> dict[str, Any]:
    """The result as plain data, runs left out."""
    data = {
        "schema": "gate/1",
        "status": result.status,
        "exit_code": result.exit_code,
        "sentence": result.sentence,
        "case": result.case,
        "baseline": result.reference,
        "profile": result.profile,
        "limit": result.limit,
        "pairs_needed": result.pairs_needed,
        "differences": result.differences,
        "revision": result.revision,
        "comparison": result.comparison.model_dump(mode="json") if result.comparison else None,
        "gates": [g.model_dump(mode="json") for g in result.gates],
        "launches": len(result.runs),
        "anchor": as_json(result.anchor) if result.anchor else None,
    }
    canonical(data)  # no NaN leaves the gate
    return data
