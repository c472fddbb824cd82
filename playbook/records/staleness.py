"""What has moved on, on a reader's machine, since a verdict from such a machine was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


def _part(strict: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = strict.get(name)
    return part if isinstance(part, Mapping) else {}


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
