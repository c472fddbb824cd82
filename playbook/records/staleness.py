"""What has moved on since a verdict was measured: the trainer, and the software of a reader's machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from playbook.records.evidence import FIRST_REVISION, Measured

Paths = Callable[[Mapping[str, Any], int], Collection[str]]
"""The paths through the trainer that a run takes, by its resolved configuration and its ranks."""


@dataclass(frozen=True)
class Here:
    """The reader's machine, as far as verdicts depend on it."""

    gpu: str | None
    """The name of its GPUs; None where it has none."""
    packages: Mapping[str, str]
    """Versions of what can move a step time, by name of package."""
    driver: str | None = None


def updates_since(strict: Mapping[str, Any], here: Here) -> list[str]:
    """Libraries of another minor version and the driver, each as `then -> now`, where the reader's GPUs are those of the record or neither has any.

    `strict` is a record's strict environment. Other machines say nothing: a laptop's libraries are not those that a GPU's verdict depends on.
    """
    machine, packages = _part(strict, "machine"), _part(strict, "packages")
    if not machine or machine.get("gpu") != here.gpu:
        return []
    then = {name: packages[name] for name in here.packages if isinstance(packages.get(name), str)}
    out = [f"{name} {was} -> {here.packages[name]}" for name, was in then.items() if _minor(was) != _minor(here.packages[name])]
    driver = machine.get("driver")
    return out + ([f"driver {driver} -> {here.driver}"] if here.driver and driver not in (None, here.driver) else [])


def revised(measured: Measured, today: Mapping[str, int], paths: Paths) -> list[str]:
    """A line for each path of the trainer that has another performance revision today than a run that took it; a path that `today` lacks has none.

    A run has the paths that it names and those that its configuration takes today. An older record has the number of its backend alone.
    """
    then: dict[str, set[int]] = {}
    taken: dict[tuple[str, int], Collection[str]] = {}
    for run in measured.runs:
        if run.performance_revision is None:
            continue
        config, key = measured.configs.get(run.config_sha, {}), (run.config_sha, run.ranks)
        if key not in taken:
            taken[key] = paths(config, run.ranks)
        backend = {str(config.get("backend", "torch")): run.performance_revision}
        for path, number in {**dict.fromkeys(taken[key], FIRST_REVISION), **run.revisions, **backend}.items():
            if number != today.get(path, number):
                then.setdefault(path, set()).add(number)
    return [
        f"the trainer's path {path} is at performance revision {today[path]}, the runs at {', '.join(map(str, sorted(found)))}"
        for path, found in sorted(then.items())
    ]


def _part(strict: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = strict.get(name)
    return part if isinstance(part, Mapping) else {}


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
