"""Who reads the exports of each target back. `SOURCE` says by what: the target's own code, or the syntax tree of its pinned release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from playbook.errors import ConfigError
from playbook.planner.plan import Plan
from playbook_trainer.export.plans import launchable
from tests.support.targets import bridge, megatron, ours
from tests.support.targets.megatron import Export
from tests.support.targets.plans import BACKEND, expected, random_plans

CHECKERS: Mapping[str, Callable[[Sequence[Export]], list[dict[str, Any]]]] = {
    "megatron-lm": megatron.read_back,
    "megatron-bridge": bridge.read_back,
    "playbook": ours.read_back,
}
"""By target, the function that reads exports back: a layout each, as `expected` has it, or `error`."""
SOURCE = {
    "megatron-lm": "its parser, TransformerConfig and layer counts",
    "megatron-bridge": "fields and choices from its syntax tree, model and layer counts by megatron-core's code",
    "playbook": "its dry run",
}


def exportable(plans: Iterable[tuple[Plan, str]], target: str, refused: list[str]) -> Iterable[Export]:
    """The exports of those plans that the target can express; what it says of the others goes into `refused`."""
    for plan, hardware in plans:
        try:
            yield plan, hardware, launchable(plan, target, hardware)
        except ConfigError as e:
            refused.append(str(e))


def drawn(target: str, count: int, seed: int, refused: list[str]) -> list[Export]:
    """So many exports of random plans."""
    return list(islice(exportable(random_plans(seed, BACKEND[target]), target, refused), count))


def differences(target: str, exports: Sequence[Export]) -> list[str]:
    """What the target refuses, or reads otherwise than it was planned."""
    found = []
    for (plan, _, _), seen in zip(exports, CHECKERS[target](exports), strict=True):
        wanted = expected(plan)
        if seen != wanted:
            other = {k: (wanted.get(k), seen.get(k)) for k in wanted | seen if wanted.get(k) != seen.get(k)}
            found.append(f"{plan.model}: {seen.get('error') or other}")
    return found
