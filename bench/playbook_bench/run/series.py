"""Runs a series: starts the launches in their planned order, and makes a `Run` of each."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from playbook.records import commands
from playbook.records.case import Case
from playbook.records.evidence import (
    CaseRef,
    Machine,
    Measured,
    Plan,
    Run,
    Seconds,
    Variant,
    digest,
)
from playbook_bench.judge.verdict_rules import VERSION
from playbook_bench.launch import local, outcome
from playbook_bench.machine import detect, requirements
from playbook_bench.machine.telemetry import Telemetry, Ticks, stolen_percent, ticks
from playbook_bench.run import schedule
from playbook_bench.run.journal import EarlierRun, Journal, SeriesJournal
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.run.schedule import RunSpec
from playbook_bench.variants.resolve import Runnable


@dataclass
class Series:
    """One case on one machine under one profile, while it runs. The caller decides when there are enough pairs."""

    case: Case
    profile: str
    machine: Machine
    variants: Mapping[Variant, Runnable]
    plan: Plan
    launcher: local.Launcher
    work: Path
    cache: Path
    progress: Progress
    telemetry: Telemetry
    deadline: float | None = None
    own_time: bool = False
    """Whether the case's `budget.minutes` sets the deadline, instead of `--budget`. A command that continues a journal gets no new
    minutes."""
    runs: list[Run] = field(default_factory=list)
    strict: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Strict environments of the runs, by hash; they must be equal within a series."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Resolved configurations of the runs, by hash."""
    expected: int = 0
    """Launches that the progress line counts up to."""
    infeasible: frozenset[Variant] = frozenset()
    """Variants that may be out of memory or refused, because the claims say so."""
    oom_is_data: bool = False
    """Whether any variant may be out of memory, because a claim asks which of them fit."""
    launched: list[Run] = field(default_factory=list)
    """Every run so far, those that `extend` discards included."""
    journal: SeriesJournal | None = None
    _took: dict[Variant, float] = field(default_factory=dict)
    """Seconds of each variant's last launch."""

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        name: str,
        case: Case,
        profile: str,
        machine: Machine,
        variants: Mapping[Variant, Runnable],
        options: Options,
        progress: Progress,
        *,
        journal: Journal | None = None,
        deadline: float | None = None,
        own_s: float | None = None,
        looks: Sequence[int] = (),
    ) -> Iterator[Self]:
        """A series with its folder, journal, plan and telemetry. Its folder goes when it ends, unless launches that failed left their logs
        there.

        Args:
            name: of its folder, below `<results>/work/`.
            case: whose budget and activation count.
            profile: under which it runs.
            machine: the whole machine, of which the profile may use a part.
            variants: what is launched, by name.
            options: those of the command.
            progress: hears of each launch.
            journal: where launches of the same command, stopped before, are kept.
            deadline: when the command's time is spent, on the monotonic clock.
            own_s: seconds for all launches of the series, those of a command that was stopped included; None where only the deadline ends
                it.
            looks: after how many pairs to look at the results; those of the case, where there are none. A limit never changes them, nor how
                the error rate is spent.

        Raises:
            StoreError: the folder or the journal cannot be written.
        """
        seed = secrets.randbelow(2**31) if options.seed is None else options.seed
        kept = journal.series(case, profile, seed, len(variants)) if journal else None
        own_deadline = None if own_s is None else time.monotonic() + own_s - (kept.spent_s if kept else 0.0)
        ends = min((moment for moment in (own_deadline, deadline) if moment is not None), default=None)
        left_s = None if ends is None else max(0.0, ends - time.monotonic())
        work = local.new_folder(options.results / "work", name)
        try:
            with Telemetry(machine, profile, work) as telemetry:
                yield cls(
                    case=case,
                    profile=profile,
                    machine=requirements.restrict(machine, profile),
                    variants=variants,
                    plan=Plan(
                        rules=VERSION,
                        seed=kept.seed if kept else seed,
                        looks=list(looks) or case.budget.looks,
                        pairs_limit=options.pairs,
                        budget_s=left_s,
                    ),
                    launcher=options.launcher,
                    work=work,
                    cache=options.results / "cache",
                    progress=progress,
                    telemetry=telemetry,
                    deadline=ends,
                    own_time=own_deadline is not None and ends == own_deadline,
                    journal=kept,
                )
        finally:
            (work / "telemetry.csv").unlink(missing_ok=True)
            if not any(work.iterdir()):
                shutil.rmtree(work, ignore_errors=True)

    def run(self, spec: RunSpec, words: str = "") -> Run:
        """Launch once and add the run to the series; a run that the journal has from an earlier command is not launched again. `words` say
        to whoever watches what it tries, if its variant's name does not.
        """
        resolved = self.variants[spec.variant]
        if self.journal and (earlier := self.journal.take(spec, resolved.sha)):
            return self._again(earlier, resolved)
        folder = local.new_folder(self.work, f"{len(self.launched):03d}-{spec.variant}")
        settings = resolved.settings(threads_per_rank(self.machine, list(self.variants.values())), self.cache)
        environment = {**detect.visible_devices(self.machine, self.profile), **settings, **resolved.environment}
        number = len(self.launched) + 1
        self.progress.launch(number, max(self.expected, number), replace(spec, variant=words or spec.variant))
        before = ticks()
        result = resolved.ready(self.cache, proves=spec.role == "burn_in").launch(
            self.launcher, folder, environment, self.case.budget.launch_timeout_s, lambda step: self.progress.step(step, resolved.steps)
        )
        self._took[spec.variant] = result.wall_s
        run = self._record(spec, resolved, folder, result, environment, self._meanwhile(result, folder, before))
        self.runs.append(run)
        self.launched.append(run)
        if self.journal and (run.outcome == "ok" or self.tolerates(run)):
            self.journal.add(run, self.strict.get(run.strict_sha, {}))
        elif self.journal:
            self.journal.note_failure(run)  # it is launched again once its cause is mended
        if run.outcome == "ok":
            shutil.rmtree(folder, ignore_errors=True)
        return run

    def _again(self, earlier: EarlierRun, resolved: Runnable) -> Run:
        """Take over a run of an earlier command, at its place in this series."""
        run = earlier.run.model_copy(update={"position": len(self.runs)})
        self.configs[resolved.sha] = {**resolved.dump, "output": ""}
        if run.strict_sha:
            self.strict[run.strict_sha] = earlier.strict
        self._took[run.variant] = run.wall_s
        self.runs.append(run)
        self.launched.append(run)
        return run

    @property
    def alive(self) -> list[Variant]:
        """The variants that are still launched: all but those that may fail and did."""
        dead = {r.variant for r in self.runs if self.tolerates(r)}
        return [v for v in self.variants if v not in dead]

    def tolerates(self, run: Run) -> bool:
        """Whether a launch failed as the claims say that it may."""
        return (self.oom_is_data and run.outcome == "oom") or (run.variant in self.infeasible and run.outcome in ("oom", "refused"))

    def to_come(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The launches that are still to be made: those for which the journal has no earlier run."""
        return self.journal.lacking([(s, self.variants[s.variant].sha) for s in specs]) if self.journal else list(specs)

    def has_time_for(self, specs: Sequence[RunSpec]) -> bool:
        """Whether these launches fit into the budget."""
        due = self.to_come(specs)
        return self.deadline is None or not due or time.monotonic() + self.seconds_for(due) <= self.deadline

    def seconds_for(self, specs: Sequence[RunSpec]) -> float:
        """How long these launches will take: each as long as its variant's last one; a variant's first, as long as the longest of the
        others.
        """
        longest = max(self._took.values(), default=0.0)
        return sum(self._took.get(s.variant, longest) for s in specs)

    def extend(self) -> None:
        """Start over with a longer warm-up, which takes in the former timed steps. The measured runs are discarded, whatever they show."""
        self.variants = {v: r.extended() for v, r in self.variants.items()}
        self.runs = [r for r in self.runs if r.role != "measure" or self.tolerates(r)]
        self.plan = self.plan.model_copy(update={"extended": True, "order": []})

    def measured(self) -> Measured:
        """The record so far, without a claim."""
        *_, candidate = self.variants.values()
        return Measured(
            case=CaseRef(id=self.case.id, sha=digest(self.case.model_dump(mode="json"), 16), content=self.case),
            machine=self.machine,
            profile=self.profile,
            facts=candidate.facts(self.machine),
            plan=self.plan,
            strict=dict(self.strict),
            context=detect.context(),
            configs=dict(self.configs),
            runs=list(self.runs),
            failed_before=dict(self.journal.failed) if self.journal else {},
        )

    def _meanwhile(self, result: outcome.Result, folder: Path, before: Ticks | None) -> dict[str, Any]:
        """Telemetry of a launch that has just ended. GPU readings are those of the timed steps: in the rest of a short launch the GPUs
        mostly idle.
        """
        stolen = stolen_percent(before, ticks()) if self.machine.nodes == 1 else None
        over, begin, end = outcome.window(result, folder)
        readings = self.telemetry.between(begin, end)
        return (readings | {"over": over} if readings else {}) | ({} if stolen is None else {"stolen_percent": stolen})

    def _record(
        self,
        spec: RunSpec,
        resolved: Runnable,
        folder: Path,
        result: outcome.Result,
        environment: Mapping[str, str],
        meanwhile: Mapping[str, Any],
    ) -> Run:
        """The `Run` of a launch that has ended, from the files in its folder; files that cannot be read make it a crash."""
        self.configs[resolved.sha] = {**resolved.dump, "output": ""}
        base: dict[str, Any] = {
            "run_id": folder.name,
            "variant": spec.variant,
            "role": spec.role,
            "pair": spec.pair,
            "position": len(self.runs),
            "started": datetime.fromtimestamp(result.started, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "wall_s": result.wall_s,
            "ranks": resolved.ranks,
            "steps_wanted": resolved.timed_steps(next((r.steps_wanted for r in self.launched if r.outcome == "ok"), 0)),
            "config_sha": resolved.sha,
            "telemetry": meanwhile,
        }
        try:
            files = outcome.read_run(folder)
        except ValueError as e:
            text = commands.hidden(f"the run's files cannot be read: {e}")
            return Run(**base, outcome="crash" if result.outcome == "ok" else result.outcome, returncode=result.returncode, message=text)
        if not base["steps_wanted"]:  # the first launch of a command that does not say how many steps it has
            base["steps_wanted"] = sum(s.timed for s in files.fields["samples"])
        trainer = dict(files.fingerprint.strict)
        strict = detect.strict_environment(self.machine, environment)
        strict |= {"packages": trainer.pop("packages")} if "packages" in trainer else {}  # those of the command's own interpreter
        strict |= {"trainer": trainer}
        # As it was, not as it was asked for; fresh processes have no entry, as in records from before there was a choice.
        strict |= {"launch": result.launched} if result.launched else {}
        sha = digest(strict, 16)
        self.strict[sha] = strict
        return Run(
            **base,
            outcome=result.outcome,
            returncode=result.returncode,
            message=commands.hidden(result.message),
            strict_sha=sha,
            **files.fields,
        )


def threads_per_rank(machine: Machine, variants: Sequence[Runnable]) -> int:
    """Threads of each rank for operators on the host, the same for all variants.

    With GPUs it is 1, as torchrun sets, unless the host updates weights; else a rank's share of the node's cores.
    """
    if machine.gpus and not any(r.host_works for r in variants):
        return 1
    per_node = -(-max(r.ranks for r in variants) // machine.nodes)
    return max(1, machine.cores // per_node)


def measure_aa(series: Series, pairs: int, first: int = 0, variant: Variant = "baseline") -> list[Run]:
    """Launch `pairs` pairs of one variant, numbered from `first`. Stops at the first launch that fails, or when the budget has no room for
    a further pair.
    """
    runs: list[Run] = []
    for pair in range(first, first + pairs):
        both = [RunSpec(variant, "aa", pair)] * 2
        if not series.has_time_for(both):
            break
        for spec in both:
            runs.append(series.run(spec))
            if runs[-1].outcome != "ok":
                return runs
    return runs


def blocks(series: Series) -> Iterator[tuple[str, list[RunSpec]]]:
    """The launches of a series in the order that the seed gives, in labelled groups: two of a pair, or a block of all variants."""
    return schedule.series(series.plan.seed, list(series.variants), series.plan.looks)


def measure_pairs(series: Series, enough: Callable[[Series, int], str], groups: Iterable[tuple[str, list[RunSpec]]] | None = None) -> None:
    """Launch pairs, or blocks of all variants, until `enough` says why to stop where they are complete, a run fails, the limit is reached
    or the budget is spent.

    `enough` gets the complete pairs, and says "" to go on; `groups` are those of `blocks` unless given.
    """
    last = schedule.last_pair(series.plan.looks, series.plan.pairs_limit)
    series.plan = series.plan.model_copy(update={"order": []})
    launched = Counter[Variant]()
    for label, specs in blocks(series) if groups is None else groups:
        due = [s for s in specs if s.variant in series.alive]
        if not series.alive:
            return _stop(series, "failed")
        if not series.has_time_for(due):
            return _stop(series, "budget")
        series.plan = series.plan.model_copy(update={"order": [*series.plan.order, label]})
        for spec in due:
            run = series.run(spec)
            if run.outcome != "ok" and not series.tolerates(run):
                return _stop(series, "failed")
        launched.update(spec.variant for spec in due)
        each = [launched[v] for v in series.alive]
        if len(set(each)) == 1 and (why := enough(series, each[0])):
            return _stop(series, why)
        if each and min(each) >= last:
            return _stop(series, "complete" if last == series.plan.looks[-1] else "pairs")


def note_if_short(running: Series) -> None:
    """Warn before the first pair if the budget does not hold the launches up to the first look."""
    look = schedule.last_pair(running.plan.looks[:1], running.plan.pairs_limit)
    specs = [s for _, group in itertools.islice(blocks(running), look) for s in group if s.variant in running.alive]
    if not running.has_time_for(specs):
        launches = f"the {len(running.to_come(specs))} launches to the first look"
        text = (
            f"the {running.case.budget.minutes:g} minutes of the case do not hold {launches}; its budget.minutes says how many it has"
            if running.own_time
            else f"the budget does not hold {launches}; {_later(running, specs[: len(running.alive)])}"
        )
        running.progress.note(f"{running.case.id}: {text}")


def _later(running: Series, pair: Sequence[RunSpec]) -> str:
    """What a second command would go on from. Half a pair is never kept, so one whose budget holds no pair would come no further."""
    if running.journal is None and running.case.command:
        return (
            "a second command starts again, for without git nothing tells whether the files are as they were; give more time, or begin "
            "in a git repository"
        )
    if running.journal is None:
        return "with `playbook confirm --journal FOLDER` a second one goes on"
    least = (
        ""
        if running.has_time_for(pair)
        else f", with a budget that holds a pair of launches (about {math.ceil(running.seconds_for(pair))} s)"
    )
    return f"the same command goes on where this one stops{least}"


def _stop(series: Series, why: Any) -> None:
    series.plan = series.plan.model_copy(update={"stopped": why})


def totals(every: Sequence[Run]) -> Seconds:
    """Seconds over all launches of a series; `total` is their wall time."""
    return Seconds(
        start_up=round(sum(r.seconds.start_up for r in every), 3),
        warm_up=round(sum(r.seconds.warm_up for r in every), 3),
        timed=round(sum(r.seconds.timed for r in every), 3),
        receipt=round(sum(r.seconds.receipt for r in every), 3),
        total=round(sum(r.wall_s for r in every), 3),
    )
