"""Whether a case's activation proofs hold: one short launch of each variant, before a series is spent on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from playbook.errors import ConfigError
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import Check, Observed, Variant
from playbook_bench.judge.receipt import alike, judge_run
from playbook_bench.launch.local import TRAINER, LocalLauncher, interruptible
from playbook_bench.launch.outcome import read_run
from playbook_bench.machine import detect, requirements
from playbook_bench.run.series import threads_per_rank
from playbook_bench.variants.resolve import Resolved, Runnable, resolve, resolve_all

TIMED_STEPS = 1
_WARMUP_STEPS = 4
"""Enough for compilation and for the capture of graphs, which takes three; the observed step comes after the timed ones."""


@dataclass(frozen=True)
class Proof:
    """What one launch of a variant showed."""

    case: str
    variant: Variant
    outcome: str
    """`ok`, or how the launch ended instead (`oom`, `crash`, ...)."""
    message: str
    checks: list[Check]
    observed: Observed | None

    @property
    def ok(self) -> bool:
        """Whether the launch ended well and met every rule."""
        return self.outcome == "ok" and all(c.ok for c in self.checks)


def prove(
    case_ids: Sequence[str],
    *,
    profile: str | None = None,
    full_length: bool = False,
    command: Sequence[str] | None = None,
    say: Callable[[Proof], None] = lambda proof: None,
) -> list[Proof]:
    """Launch each variant of each case once, in short, and judge its receipt by the case's rules; nothing is timed and nothing is stored.

    Of a gate's case, which names no candidate, the baseline alone is launched.

    `full_length` keeps the case's own steps, for metrics that only they show.

    Raises:
        ConfigError: a case launches nothing, or cannot run on this machine.
        FileError: there is no such case, or its file is invalid.
    """
    whole_machine = detect.detect()
    todo: list[tuple[Case, str, Runnable]] = []
    for case in map(load_case, case_ids):
        if case.kind not in LAUNCHED_KINDS:
            raise ConfigError(f"case '{case.id}' is of kind '{case.kind}' and launches nothing; it has no proofs to check")
        chosen = requirements.require_profile(case, whole_machine, profile)
        variants = {"baseline": resolve(case, "baseline", chosen)} if case.is_one_sided else resolve_all(case, chosen)
        todo += [(case, chosen, r) for r in variants.values()]
    proofs: list[Proof] = []
    with interruptible(), TemporaryDirectory(prefix="playbook-prove-") as folder:
        for i, (case, chosen, resolved) in enumerate(todo):
            machine = requirements.restrict(whole_machine, chosen)
            environment = {**detect.visible_devices(machine, chosen), **resolved.environment}
            threads = threads_per_rank(machine, [resolved])
            proof = _launch(case, resolved, environment, threads, Path(folder) / str(i), command or TRAINER, full_length)
            proofs.append(_compared(case, proof, proofs))
            say(proofs[-1])
    return proofs


def _launch(
    case: Case, run: Runnable, environment: dict[str, str], threads: int, folder: Path, command: Sequence[str], full_length: bool
) -> Proof:
    """Launch a variant once, shortened unless `full_length`, and judge its receipt."""
    folder.mkdir()
    if isinstance(run, Resolved):
        environment = {"OMP_NUM_THREADS": str(threads), **environment}
        run = run if full_length else _shortened(run)
    launched = run.ready(folder.parent / "cache", proves=True)
    ended = launched.launch(LocalLauncher(command), folder, environment, case.budget.launch_timeout_s, lambda step: None)
    if ended.outcome != "ok":
        return Proof(case.id, run.variant, ended.outcome, ended.message, [], None)
    try:
        observed = read_run(folder).fields.get("observed")
    except ValueError as e:
        return Proof(case.id, run.variant, "crash", f"the run's files cannot be read: {e}", [], None)
    checks = judge_run(case.activation, _LaunchReceipt(run.variant, observed))
    return Proof(case.id, run.variant, "ok", "", checks, observed)


def _compared(case: Case, proof: Proof, before: Sequence[Proof]) -> Proof:
    """The proof, with a failed check if the case's launches so far meet each other's rules too."""
    ended = [p for p in (*before, proof) if p.case == case.id and p.outcome == "ok"]
    more = alike(case, [_LaunchReceipt(p.variant, p.observed) for p in ended], [c for p in ended for c in p.checks])
    return replace(proof, checks=[*proof.checks, *more])


def _shortened(resolved: Resolved) -> Resolved:
    train = resolved.config.train
    warmup = min(train.warmup_steps, _WARMUP_STEPS)
    train = train.model_copy(update={"warmup_steps": warmup, "steps": min(train.steps, warmup + TIMED_STEPS)})
    return replace(resolved, config=resolved.config.model_copy(update={"train": train}))


@dataclass(frozen=True)
class _LaunchReceipt:
    """A launch, as far as its receipt goes."""

    variant: Variant
    observed: Observed | None
