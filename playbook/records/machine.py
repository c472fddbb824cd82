"""What a machine is, from which figures on a reader is told of its condition, and what has moved on since it was measured.

A machine's kind decides for whom a verdict speaks; its name is a label.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from playbook.records.evidence import FIRST_REVISION, Machine, Measured

CPU = "cpu"

Kind = tuple[int, str | None, str, int | None, int, str, int | None, int | None]
"""Number of GPUs, their name, their links, their memory in GiB, number of nodes, CPU model, cores (None if there are GPUs), host memory
in GiB."""


def kind(machine: Machine) -> Kind:
    """What makes two machines alike. Beside GPUs, the number of cores is that of a container and says little.

    The host's memory is taken to the nearest power of two, for firmware and kernel keep some of it.
    """
    memory = None if machine.gpu_memory_gib is None else round(machine.gpu_memory_gib)
    cores = None if machine.gpus else machine.cores
    host = 2 ** round(math.log2(machine.memory_gib)) if machine.memory_gib and machine.memory_gib >= 1 else None
    return machine.gpus, machine.gpu, machine.interconnect, memory, machine.nodes, machine.cpu, cores, host


def label(gpu: str | None, gpus: int) -> str:
    """The name of a machine: `h200x4`, or `cpu` without GPUs."""
    return f"{short_gpu(gpu or '')}x{gpus}" if gpus else CPU


def short_gpu(name: str) -> str:
    """`NVIDIA H200` as `h200`: the first word that has a digit, else the last word."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((w for w in words if any(c.isdigit() for c in w) and any(c.isalpha() for c in w)), words[-1] if words else "gpu")


def told_apart(name: str, machine_kind: tuple[Any, ...], others: Collection[tuple[Any, ...]]) -> str:
    """A machine's name, with what sets its kind `own` apart where `others` of that name are of another kind: `cpu-amd-epyc-2-cores`."""
    memory = "unknown-memory" if machine_kind[3] is None else f"{machine_kind[3]}-gib"
    host = "unknown-host-memory" if machine_kind[7] is None else f"{machine_kind[7]}-gib-host"
    words = (
        f"{machine_kind[0]}-gpus",
        _slug(machine_kind[1] or "no-gpu"),
        machine_kind[2],
        memory,
        f"{machine_kind[4]}-nodes",
        _slug(machine_kind[5]),
        f"{machine_kind[6]}-cores",
        host,
    )
    differing = [word for i, word in enumerate(words) if any(other[i] != machine_kind[i] for other in others)]
    return "-".join([name, *differing])


def _slug(text: str) -> str:
    """`Intel(R) Xeon(R) Processor` as `intel-xeon`."""
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(r"\((?:r|tm)\)|\b(?:processor|cpu)\b|@.*", " ", text.lower()))) or "unknown"


NOTABLE_DATA = 0.03
"""Share of the step spent on data."""
NOTABLE_STOLEN = 2.0
"""Percent of a run's processor time that other machines on the same hardware had."""
_NOTABLE_NOISE = 0.03
"""Deviation of A/A pairs, about a share: from here on the host is what keeps a series from seeing more."""
_NOTABLE_LIMITED = 10.0
"""Percent of the GPUs' readings in timed steps with clocks held down."""
TIMED_STEPS = "timed steps"
"""Value of `over` in telemetry that was read in the timed steps. Older records have readings of whole launches, most of which may be
start-up."""


def host_limit(figures: Mapping[str, Any]) -> str:
    """A clause where launches differ so much that this host is the limit of what a series can see; else nothing. `found`: a comparison or
    curve.

    By the A/A, or since rules of version 3, which have none, by the launches that are compared.
    """
    first = next(iter(figures.get("contrasts") or ()), figures)
    noise = figures.get("floor") if figures.get("floor") is not None else first.get("deviation")
    if not isinstance(noise, int | float) or figures.get("scale") != "log_ratio" or noise < _NOTABLE_NOISE:
        return ""
    return f"this host is the limit: pairs of launches differ by {100 * noise:.1f} %"


def limited(runs: Iterable[tuple[str, Any]]) -> list[str]:
    """For each limit that held GPUs' clocks down in the timed steps, a clause with its share of the readings and the clock.

    `runs`: (variant, telemetry) of the measured runs.
    """
    shares: dict[str, dict[str, list[float]]] = {}
    clocks: dict[str, list[float]] = {}
    for variant, telemetry in runs:
        if not isinstance(telemetry, Mapping) or telemetry.get("over") != TIMED_STEPS:
            continue
        clock = mapping_of(telemetry.get("clock_sm_mhz")).get("p50")
        if _finite(clock):
            clocks.setdefault(variant, []).append(float(clock))
        for limit, share in mapping_of(telemetry.get("limited_percent")).items():
            if _finite(share):
                shares.setdefault(str(limit), {}).setdefault(variant, []).append(float(share))
    clauses = []
    for limit, each in shares.items():
        medians = {variant: statistics.median(values) for variant, values in sorted(each.items())}
        if max(medians.values()) >= _NOTABLE_LIMITED:
            at = {v: f" ({statistics.median(clocks[v]):,.0f} MHz)" if v in clocks else "" for v in medians}
            clauses.append(f"{limit} in {', '.join(f'{round(m)} % of {v}{at[v]}' for v, m in medians.items())}")
    return clauses


def mapping_of(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one: records of others may hold anything."""
    return value if isinstance(value, Mapping) else {}


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


TrainerPathsOf = Callable[[Mapping[str, Any], int], Collection[str]]
"""The paths through the trainer that a run takes, by its resolved configuration and its ranks."""


@dataclass(frozen=True)
class Here:
    """The reader's machine, as far as verdicts depend on it."""

    gpu: str | None
    """The name of its GPUs; None where it has none."""
    packages: Mapping[str, str]
    """Versions of what can move a step time, by name of package."""
    driver: str | None = None


def updates_since(strict: Mapping[str, Any], reader: Here) -> list[str]:
    """Libraries of another minor version and the driver, each as `then -> now`, where the reader's GPUs are those of the record or
    neither has any.

    `strict` is a record's strict environment. Other machines say nothing: a laptop's libraries are not those that a GPU's verdict depends
    on.
    """
    machine, packages = mapping_of(strict.get("machine")), mapping_of(strict.get("packages"))
    if not machine or machine.get("gpu") != reader.gpu:
        return []
    then = {name: packages[name] for name in reader.packages if isinstance(packages.get(name), str)}
    out = [f"{name} {was} -> {reader.packages[name]}" for name, was in then.items() if _minor(was) != _minor(reader.packages[name])]
    driver = machine.get("driver")
    return out + ([f"driver {driver} -> {reader.driver}"] if reader.driver and driver not in (None, reader.driver) else [])


def revision_changes(measured: Measured, current_revisions: Mapping[str, int], trainer_paths_of: TrainerPathsOf) -> list[str]:
    """One message per trainer code path whose performance revision now differs from that of a run that took it.

    Runs without a revision, and paths that `current_revisions` lacks, are skipped. A run's revision of a path: its backend's, else the one
    it recorded, else FIRST_REVISION.
    """
    old_revisions: dict[str, set[int]] = {}
    paths_of_configs: dict[tuple[str, int], Collection[str]] = {}
    for run in measured.runs:
        if run.performance_revision is None:
            continue
        config, key = measured.configs.get(run.config_sha, {}), (run.config_sha, run.ranks)
        if key not in paths_of_configs:
            paths_of_configs[key] = trainer_paths_of(config, run.ranks)
        backend = {str(config.get("backend", "torch")): run.performance_revision}
        for path, revision in {**dict.fromkeys(paths_of_configs[key], FIRST_REVISION), **run.revisions, **backend}.items():
            if revision != current_revisions.get(path, revision):
                old_revisions.setdefault(path, set()).add(revision)
    return [
        f"the trainer's path {path} is at performance revision {current_revisions[path]}, the runs at {', '.join(map(str, sorted(old)))}"
        for path, old in sorted(old_revisions.items())
    ]


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
