"""From a case and a profile to resolved configurations that differ only in what the case declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.records.case import Case
from playbook.records.evidence import Machine, Missing, Variant, digest
from playbook.yaml_files import did_you_mean
from playbook_bench import metrics
from playbook_bench.launch.outcome import Result
from playbook_bench.machine import requirements
from playbook_trainer.config import automatic
from playbook_trainer.config import tree as trainer_config
from playbook_trainer.config.automatic import Target, config_sha
from playbook_trainer.config.tree import TrainerConfig, flatten, torch_only

if TYPE_CHECKING:
    from playbook_bench.launch.local import Launcher
    from playbook_bench.variants.command import CommandVariant

_CONFIG_PREFIX = "trainer/configs/"
_NOT_COMPARED = frozenset({"output"})
Runnable: TypeAlias = "Resolved | CommandVariant"
"""One variant, ready to launch: a configuration of our trainer, or a command. Both have the same methods."""


@dataclass(frozen=True)
class Resolved:
    """One variant of our trainer, ready to launch."""

    variant: Variant
    config: TrainerConfig
    ranks: int
    environment: dict[str, str]
    target: Target = field(default_factory=Target)
    resolved: Mapping[str, Any] | None = None
    """The configuration as another commit's code resolved it; the gate launches that."""
    shared: bool = False
    """Whether all ranks take turns on one GPU."""

    @property
    def dump(self) -> Mapping[str, Any]:
        """The configuration as plain data."""
        return trainer_config.dump(self.config) if self.resolved is None else self.resolved

    @property
    def sha(self) -> str:
        """The configuration's hash on the machine that it is meant for."""
        return config_sha(self.config, self.target) if self.resolved is None else digest(self.resolved, 16)

    @property
    def steps(self) -> int:
        """Steps of a launch, warm-up included."""
        return self.config.train.steps

    def timed_steps(self, first: int = 0) -> int:
        """Steps after the warm-up."""
        return self.config.train.steps - self.config.train.warmup_steps

    @property
    def host_works(self) -> bool:
        """Whether the host updates weights."""
        return bool(self.config.offload.optimizer or self.config.megatron.optimizer_offload_fraction)

    def settings(self, threads: int, cache: Path) -> dict[str, str]:
        """Threads of a rank, and the folders of compiled kernels. Triton keeps there which form of a kernel was the fastest, too."""
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        # Trying the forms of Transformer Engine's permutation takes 4 s, and each launch might choose another one.
        return {"OMP_NUM_THREADS": str(threads), "TRITON_CACHE_AUTOTUNING": "1", **caches}

    def facts(self, machine: Machine) -> dict[str, Any]:
        """The machine, and the layout and model of the configuration."""
        return requirements.facts(machine, self.config, self.ranks)

    def missing(self) -> list[Missing]:
        """The packages of its backend and its dispatcher that are not here."""
        return requirements.unmet_by(self.config)

    def extended(self) -> Resolved:
        """The variant with its former timed window added to the warm-up, and a new window of the same length after it."""
        train, window = self.config.train, self.timed_steps()
        longer = train.model_copy(update={"warmup_steps": train.steps, "steps": train.steps + window})
        return replace(self, config=self.config.model_copy(update={"train": longer}))

    def ready(self, cache: Path, proves: bool) -> Resolved:
        """Itself: every launch of our trainer has a receipt."""
        return self

    def launch(
        self,
        launcher: Launcher,
        folder: Path,
        environment: Mapping[str, str],
        timeout_s: float,
        on_step: Callable[[int], None] | None = None,
    ) -> Result:
        """Run it once by the launcher."""
        from playbook_bench.launch.local import Spec  # commands that only read records start nothing

        return launcher.run(
            Spec(self.config, self.ranks, folder, environment, timeout_s, resolved=self.resolved, shared=self.shared), on_step
        )


def trainer_path(case: Case) -> Path:
    """The case's trainer configuration, inside `trainer/configs`.

    Raises:
        ConfigError: none is named, it lies elsewhere, or it does not exist.
    """
    if not case.trainer:
        raise ConfigError(f"case '{case.id}': 'trainer' is missing; name a file in {_CONFIG_PREFIX}")
    root = data_root("configs").resolve()
    inside = case.trainer.removeprefix(_CONFIG_PREFIX)
    path = (root / inside.replace("\0", "")).resolve()
    if inside == case.trainer or "\0" in inside or not path.is_relative_to(root):
        raise ConfigError(f"case '{case.id}': trainer {case.trainer!r} is not a path below {_CONFIG_PREFIX}")
    if not path.is_file():
        have = [_CONFIG_PREFIX + str(p.relative_to(root)) for p in root.glob("*.yaml")]
        raise ConfigError(f"case '{case.id}': trainer '{case.trainer}' does not exist{did_you_mean(case.trainer, have)}")
    return path


def overrides(case: Case, variant: Variant, profile: str) -> tuple[dict[str, Any], int]:
    """A variant's overrides of the trainer's file, and its number of ranks. The profile comes first, then the variant's delta, then its
    delta for this profile; later ones win.

    Raises:
        ConfigError: the case has no such profile, `ranks` is not a positive whole number, or ranks share a GPU and time is judged.
    """
    if profile not in case.profiles:
        raise ConfigError(f"case '{case.id}' has no profile '{profile}'{did_you_mean(profile, case.profiles)}")
    profile_delta = case.variant_profiles.get(profile, {}).get(variant, {})
    merged: dict[str, Any] = {**case.profiles[profile], **case.variants[variant], **profile_delta}
    ranks = merged.pop("ranks", 1)
    if type(ranks) is not int or ranks < 1:
        raise ConfigError(f"case '{case.id}', profile '{profile}': ranks is {ranks!r}; expected a whole number of at least 1")
    timed = [name for name in (case.metric, *case.also) if name and not metrics.get(name).is_counted]
    if timed and requirements.shares_a_gpu(profile, ranks):
        raise ConfigError(
            f"case '{case.id}', profile '{profile}': {ranks} ranks take turns on one GPU, where time says nothing, and "
            f"{', '.join(timed)} rests on it; "
            "name counted metrics alone, such as state_bytes_per_rank or peak_memory_bytes, or as many GPUs as ranks"
        )
    if profile == "cpu" and not case.command:
        merged.setdefault("train.device", "cpu")
    return merged, ranks


def resolve(case: Case, variant: Variant, profile: str, started_in: Path | None = None, tree: str | None = None) -> Runnable:
    """The variant's configuration, or its command; a command runs in `started_in`, and may be of another commit, by the hash of its files.

    Raises:
        ConfigError, FileError: as `resolve_variant`, or the command's template cannot be filled.
    """
    if not case.command:
        return resolve_variant(case, variant, profile)
    merged, ranks = overrides(case, variant, profile)
    # It brings readers of logs and traces: a tenth of a second for who launches no command.
    from playbook_bench.variants import command

    return command.CommandVariant.of(case, variant, merged, ranks, started_in or Path.cwd(), tree)


def resolve_variant(case: Case, variant: Variant, profile: str) -> Resolved:
    """The variant's configuration: the trainer's file with its overrides.

    Raises:
        ConfigError: as `overrides`, or the case launches a command.
        FileError: the configuration does not fit the trainer's tree.
    """
    merged, ranks = overrides(case, variant, profile)
    target = automatic.meant_for(profile, ranks)
    # What is compared, kept and launched says which switches were on.
    config = automatic.switched(trainer_config.load(trainer_path(case), merged), target)
    if config.train.epochs is not None:
        raise ConfigError(f"case '{case.id}', profile '{profile}': train.epochs leaves open how many steps are compared; set train.steps")
    shared = requirements.shares_a_gpu(profile, ranks)
    return Resolved(variant, config, ranks, dict(case.delta.environment.get(variant, {})), target, shared=shared)


def resolve_all(case: Case, profile: str) -> dict[Variant, Runnable]:
    """Every variant, refused where two differ in anything that the case does not declare.

    Raises:
        ConfigError: no candidate, or an undeclared difference, with the keys.
    """
    if case.is_one_sided:
        raise ConfigError(
            f"case '{case.id}' names no candidate to compare its baseline with; playbook gate --baseline REF --case FILE compares two"
            " commits by it; or add a candidate"
        )
    variants = {v: resolve(case, v, profile) for v in case.variants}
    place = f"case '{case.id}', profile '{profile}'"
    (_, first), *others = variants.items()
    for other in others:
        keys = undeclared(case, first.dump, other[1].dump)
        if keys:
            raise ConfigError(f"{place}: the variants differ in {', '.join(keys)}, which neither variant declares")
        if first.ranks != other[1].ranks and not case.delta.ranks:
            raise ConfigError(f"{place}: {first.ranks} and {other[1].ranks} ranks; declare delta.ranks with a reason")
    runs = {(r.sha, r.ranks, tuple(sorted(r.environment.items()))) for r in variants.values()}
    if len(runs) < len(variants):
        both = "both variants resolve" if len(variants) == 2 else "two of the variants resolve"
        raise ConfigError(f"{place}: {both} to the same run; nothing would be compared")
    return variants


def configurations(case: Case, profile: str) -> dict[Variant, Resolved]:
    """As `resolve_all`, for a case that runs our trainer.

    Raises:
        ConfigError: as `resolve_all`, or the case launches a command.
    """
    if case.command:
        raise ConfigError(
            f"case '{case.id}' launches a command and has no configuration of our trainer; trace it with playbook ab --trace, "
            "or read a trace that it left: playbook bench trace --file FILE"
        )
    return {v: run for v, run in resolve_all(case, profile).items() if isinstance(run, Resolved)}


def undeclared(case: Case, baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which two resolved configurations differ without the case saying so."""
    declared = {key for delta in case.variants.values() for key in delta}
    if baseline.get("backend") != candidate.get("backend"):
        declared |= set(torch_only())
    return [k for k in differing(baseline, candidate) if not any(k == d or k.startswith(d + ".") for d in declared)]


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which two resolved configurations differ; where results are written does not count."""
    first, second = flatten(a), flatten(b)
    keys = sorted(first.keys() | second.keys())
    return [k for k in keys if k.split(".")[0] not in _NOT_COMPARED and first.get(k, _Absent) != second.get(k, _Absent)]


class _Absent:
    """Stands for a key that is not there."""
