"""The regression gate: a case's baseline configuration at two commits, run as matched pairs. It fails closed."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from playbook.errors import ConfigError, LaunchError
from playbook.paths import repo_root
from playbook.records.case import LAUNCHED_KINDS, Activation, Case, Delta, Guardrails, Loss, load_case
from playbook.records.evidence import Comparison, Curve, Gate, Plan, Run, canonical
from playbook_bench.judge import effects, metrics, statistics, verdict
from playbook_bench.judge import guards as gates
from playbook_bench.judge.metrics import Metric
from playbook_bench.launch import local
from playbook_bench.launch.local import LocalLauncher, Result, Spec
from playbook_bench.machine import detect, requirements
from playbook_bench.machine.telemetry import Telemetry
from playbook_bench.run import aa, schedule, series, store
from playbook_bench.run.series import Progress, Series, Silent
from playbook_bench.run.variants import resolve_variant

EXIT_CODES = {"pass": 0, "regression": 1, "undecided": 3, "error": 5}
LEAST = 0.01
"""A slowdown below 1 % is never called a regression."""
NOISE_FACTOR = 2.0
MOST_PAIRS = 100
"""More are never asked for: a slowdown that so many cannot tell from the limit lies at the limit."""
_GIT_TIMEOUT_S = 120


@dataclass(frozen=True)
class GateResult:
    """What the gate says, and on what grounds."""

    status: Literal["pass", "regression", "undecided", "error"]
    sentence: str
    case: str
    reference: str
    profile: str
    limit: float | None
    """A slowdown above it is a regression, one below it passes, each for certain, as a share; what is neither is undecided."""
    comparison: Comparison | None
    gates: list[Gate]
    runs: list[Run]
    pairs_needed: int | None = None
    """About how many pairs would settle what is undecided; None where no sensible number does."""

    @property
    def exit_code(self) -> int:
        """0 passed, 1 regression, 3 undecided, 5 error."""
        return EXIT_CODES[self.status]


@dataclass(frozen=True)
class _TwoTrees:
    """A launcher that runs each variant from its own tree; the folder's name tells the variant."""

    trees: Mapping[str, Path]
    inner: LocalLauncher

    def run(self, spec: Spec, on_step: Any = None) -> Result:
        """Run it with the variant's sources first on the path."""
        variant = "baseline" if "-baseline-" in spec.folder.name else "candidate"
        path = os.pathsep.join([*_sources(self.trees[variant]), *self._others()])
        return self.inner.run(replace(spec, environment={**spec.environment, "PYTHONPATH": path}), on_step)

    def _others(self) -> list[str]:
        """What else is on this process's path, such as a checkout of megatron-core; not the sources of either tree, or of the one that runs this."""
        ours = {path for tree in (*self.trees.values(), repo_root()) for path in _sources(tree)}
        given = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        return [p for p in given if p not in ours]


def _sources(tree: Path) -> list[str]:
    """Where a tree's packages lie."""
    return [str((tree / part).resolve()) for part in (".", "bench", "trainer")]


def run(
    case_id: str | Case,
    baseline_ref: str,
    *,
    profile: str | None = None,
    results: Path | str | None = None,
    pairs: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
    root: Path | None = None,
    seed: int | None = None,
) -> GateResult:
    """Compare `baseline_ref` with the working tree on the case's baseline configuration.

    The baseline commit runs again in the same series: stored figures of another day are no baseline. Both trees get the same
    resolved configuration; a commit that cannot read it is an error, not a pass. `pairs` above the case's last look adds looks.

    Raises:
        ConfigError: the reference or the case does not fit.
        LaunchError: the worktree cannot be made.
    """
    schedule.check_limits(pairs, budget_s)
    if pairs is not None and pairs > MOST_PAIRS:
        raise ConfigError(f"--pairs is {pairs}; expected at most {MOST_PAIRS}")
    case = _as_gate_case(case_id if isinstance(case_id, Case) else load_case(case_id))
    metric = metrics.get(case.metric or "")
    machine = detect.detect()
    chosen = requirements.require_profile(case, machine, profile)
    folder = (Path(results) if results is not None else store.DEFAULT_RESULTS).resolve()
    tree = checkout(root)
    work = local.new_folder(folder / "work", f"{case.id}-gate")
    shared = resolve_variant(case, "baseline", chosen)
    with local.interruptible(), worktree(tree, baseline_ref) as other, Telemetry(machine, chosen, work) as telemetry:
        inner = LocalLauncher() if command is None else LocalLauncher(tuple(command))
        running = Series(
            case=case,
            profile=chosen,
            machine=requirements.restrict(machine, chosen),
            variants={"baseline": shared, "candidate": replace(shared, variant="candidate")},
            plan=_plan(case, secrets.randbelow(2**31) if seed is None else seed, pairs, budget_s),
            launcher=_TwoTrees({"baseline": other, "candidate": tree}, inner),
            work=work,
            cache=folder / "cache",
            progress=progress or Silent(),
            deadline=time.monotonic() + (budget_s or 60 * case.budget.minutes),
            telemetry=telemetry,
        )
        _measure(running, metric)
    return _judge(running, metric, baseline_ref, chosen)


def _as_gate_case(case: Case) -> Case:
    """The case as a pair with its first variant, its environment and its activation rules in both places; losses within the case's band."""
    if case.kind not in LAUNCHED_KINDS:
        raise ConfigError(f"case '{case.id}' is of kind {case.kind} and launches nothing; the gate needs runs")
    band = case.guardrails.loss.relative or Loss().relative
    first, delta = next(iter(case.variants.items()))
    receipt, environment = case.activation.of(first), case.delta.environment.get(first, {})
    own = {p: {"baseline": v[first], "candidate": v[first]} for p, v in case.variant_profiles.items() if first in v}
    return case.model_copy(
        update={
            "kind": "pair",
            "knob": None,
            "values": [],
            "factors": [],
            "baseline": dict(delta),
            "candidate": dict(delta),
            "variant_profiles": own,
            "delta": Delta(environment={"baseline": environment, "candidate": environment}),
            "activation": Activation(baseline=receipt, candidate=receipt),
            "guardrails": Guardrails(loss=Loss(relative=band)),
        }
    )


def _plan(case: Case, seed: int, pairs: int | None, budget_s: float | None) -> Plan:
    """The case's looks, and further ones at the same distance where more pairs were asked for; fixed before the data, like the others."""
    plan = schedule.plan(case, seed, pairs, budget_s)
    step = plan.looks[-1] - plan.looks[-2] if len(plan.looks) > 1 else plan.looks[0]
    return plan.model_copy(update={"looks": [*plan.looks, *range(plan.looks[-1] + step, (pairs or 0) + 1, step)]})


def _measure(running: Series, metric: Metric) -> None:
    looks, limit = running.plan.looks, running.plan.pairs_limit
    aa_pairs = 0 if metric.deterministic else schedule.AA_PAIRS
    running.expected = schedule.launches(looks, limit, aa_pairs)
    running.progress.series(f"gate {running.case.id}", running.expected)
    if metric.deterministic:
        series.measure_pairs(running, lambda s, n: True)
        return
    if any(running.run(spec).outcome != "ok" for spec in schedule.burn_in()):
        return
    # The A/A is this series' own, of the reference commit: noise is what the two trees have in common.
    noise = aa.measure(running, metric, aa_pairs)
    if len(noise) < 2 * aa_pairs or noise[-1].outcome != "ok":
        return
    series.measure_pairs(running, lambda s, n: n in looks and _settled(s, metric))


def _settled(running: Series, metric: Metric) -> bool:
    slowdown, limit = _slowdown(running, metric)
    return slowdown is None or slowdown[0] > limit or slowdown[1] < limit


def _slowdown(running: Series, metric: Metric) -> tuple[tuple[float, float] | None, float]:
    """The interval of the slowdown on the metric's scale, and the limit."""
    pairs = gates.pairs_of(running.runs)
    noise = gates.aa_differences(running.runs, metric)
    floor = statistics.aa_deviation(noise) if noise else math.inf
    limit = max(LEAST, NOISE_FACTOR * floor)
    values = [(metric.value(a), metric.value(b)) for a, b in pairs]
    if len(values) < 2 or not math.isfinite(floor) or any(x is None for pair in values for x in pair):
        return None, limit
    low, high = effects.bounds(_effect(running, metric))[0]
    return (-high, -low), limit


def _effect(running: Series, metric: Metric) -> Curve:
    blocks = gates.blocks_of(running.runs, schedule.PAIR)
    noise = gates.aa_differences(running.runs, metric)
    return effects.measure(verdict.rules_of(running.plan), running.runs, running.case, metric, None, running.plan, blocks, noise)


def _judge(running: Series, metric: Metric, reference: str, profile: str) -> GateResult:
    def result(status: Any, sentence: str, limit: float | None = None, found: Comparison | None = None, conditions: Any = ()) -> GateResult:
        return GateResult(status, sentence, running.case.id, reference, profile, limit, found, list(conditions), list(running.runs))

    measured = running.measured()
    problem = _problem(running, metric)
    if problem:
        return result("error", problem)
    pairs, first = gates.pairs_of(running.runs), running.plan.looks[0]
    cut = f"stopped after {len(pairs)} of the {first} pairs that the gate needs, without a failure; raise --budget (or --pairs)"
    if not pairs:
        return result("undecided", cut)
    conditions = verdict.pair_gates(measured, running.case, metric, pairs, allowed=gates.SOURCE_KEYS)
    broken = [f"{g.name}: {g.detail}" for g in conditions if not g.ok]
    if broken:
        return result("error", f"the two commits cannot be compared: {'; '.join(broken)}", conditions=conditions)
    if metric.deterministic:
        curve = _effect(running, metric)
        found = effects.as_pair(curve, verdict.rules_of(running.plan), metric, None)
        worse = effects.as_effect(metric, effects.bounds(curve)[0][0]) < -LEAST
        return result("regression" if worse else "pass", f"{metric.name} {effects.show_effect(found)}", LEAST, found, conditions)
    slowdown, limit = _slowdown(running, metric)
    curve = _effect(running, metric)
    found = effects.as_pair(curve, verdict.rules_of(running.plan), metric, None)
    if slowdown is None or found.pairs < first:
        return result("undecided", cut, limit, found, conditions)
    shown, above = f"{metric.name} {effects.show_effect(found, between=True)}", f"a slowdown above {100 * limit:.1f} %"
    if slowdown[0] > limit:
        return result("regression", f"{shown}: {above} is certain", limit, found, conditions)
    if slowdown[1] < limit:
        return result("pass", f"{shown}: {above} is ruled out", limit, found, conditions)
    need = _pairs_needed(running.plan, curve, limit)
    more = f"about {need} pairs would settle it (--pairs {need}, and a --budget for them)" if need else "it lies about there"
    open_ = result(
        "undecided", f"{shown}: {above} is neither shown nor ruled out after {found.pairs} pairs; {more}", limit, found, conditions
    )
    return replace(open_, pairs_needed=need)


def _pairs_needed(plan: Plan, curve: Curve, limit: float) -> int | None:
    """The first look, beyond those taken, that would probably settle a slowdown as large as the one that was seen."""
    c = curve.contrasts[0]
    if c.mean is None or c.used is None or curve.alpha_contrast is None:
        return None
    need = statistics.pairs_needed(-c.mean - limit, c.used, curve.alpha_contrast)
    step = plan.looks[-1] - plan.looks[-2] if len(plan.looks) > 1 else plan.looks[0]
    if need is None:
        return None
    whole = math.ceil(need / step) * step
    return whole if whole <= MOST_PAIRS else None


def _problem(running: Series, metric: Metric) -> str:
    """Why the figures cannot be used, or nothing."""
    bad = next((r for r in running.runs if r.outcome != "ok"), None)
    if bad is not None:
        return f"a {bad.variant} run ended as {bad.outcome}: {bad.message[:500]}"
    for run in running.runs:
        problem = None if run.role == "burn_in" else gates.complete(run, metric)
        if problem:
            return f"a run cannot be used: {problem}"
    from playbook_bench.judge import receipt

    dead = next((c for c in receipt.judge_runs(running.case.activation, running.runs) if not c.ok), None)
    return f"the {dead.variant} did not run as configured: {dead.rule}, expected {dead.expected}, found {dead.observed}" if dead else ""


@contextlib.contextmanager
def worktree(root: Path, reference: str) -> Iterator[Path]:
    """The commit's files in a temporary folder, gone afterwards.

    Raises:
        ConfigError: the reference is no commit of this repository.
        LaunchError: git cannot make the worktree.
    """
    commit = resolve(root, reference)
    folder = Path(tempfile.mkdtemp(prefix="playbook-gate-"))
    tree = folder / "tree"
    try:
        made = git(root, ["worktree", "add", "--detach", "--quiet", str(tree), commit])
        if made.returncode:
            raise LaunchError(f"git cannot make a worktree of {reference}: {made.stderr.strip()[:500]}")
        yield tree
    finally:
        git(root, ["worktree", "remove", "--force", str(tree)])
        shutil.rmtree(folder, ignore_errors=True)


def checkout(root: Path | None) -> Path:
    """The tree that is judged: the one given, or that of this code.

    Raises:
        ConfigError: it is no repository of its own, or this command was started in another one, whose changes it would not see.
    """
    tree = (root or repo_root()).resolve()
    top, here = _top(tree), None if root else _top(Path.cwd())
    if top not in (None, tree):
        raise ConfigError(
            f"playbook runs from {tree}, which is no checkout of its own but a folder in {top}; both commits would run what is "
            "installed. Install it from the checkout that is to be judged: pip install -e"
        )
    if here not in (None, tree):
        raise ConfigError(
            f"this folder belongs to the repository {here}, and playbook runs from {tree}, whose commits it would compare; "
            "start it there, or install it from this checkout: pip install -e"
        )
    return tree


def _top(folder: Path) -> Path | None:
    """The top folder of the repository that a folder lies in; None where git knows of none."""
    found = git(folder, ["rev-parse", "--show-toplevel"])
    return Path(found.stdout.removesuffix("\n")).resolve() if found.returncode == 0 else None


def resolve(root: Path, reference: str) -> str:
    """The hash of a commit.

    Raises:
        ConfigError: git cannot read the repository, or the reference is no commit of it, or of what a shallow clone has of it.
    """
    found = None if reference.startswith("-") else git(root, ["rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}"])
    if found is not None and found.returncode == 0:
        return found.stdout.strip()
    if found is not None and found.stderr.strip():  # no repository, or one of another user, as is usual in a container of CI
        raise ConfigError(f"git cannot read {root}: {' '.join(found.stderr.split())[:500]}")
    shallow = git(root, ["rev-parse", "--is-shallow-repository"]).stdout.strip() == "true"
    advice = (
        "this clone is shallow, get the rest of its history with git fetch --unshallow" if shallow else "name a branch, a tag or a hash"
    )
    raise ConfigError(f"'{reference}' is no commit of {root}; {advice}")


def git(root: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What git says of a repository, whatever its exit code.

    Raises:
        LaunchError: git cannot be run, or does not end.
    """
    try:
        return subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            start_new_session=True,
            env=detect.git_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LaunchError(f"git cannot be run: {e}") from e


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
        "comparison": result.comparison.model_dump(mode="json") if result.comparison else None,
        "gates": [g.model_dump(mode="json") for g in result.gates],
        "launches": len(result.runs),
    }
    canonical(data)  # no NaN leaves the gate
    return data
