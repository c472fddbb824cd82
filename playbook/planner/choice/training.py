"""What a whole training takes by a plan (days, GPU hours, energy, money), and the fastest plan for each of several numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from playbook.planner.choice.anchored import anchored
from playbook.planner.choice.search import Answer, Choice, plan_layouts
from playbook.planner.choice.space import Question
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.step import Estimate

_HOUR_S, _DAY_H, _MEGA = 3600, 24, 1e6


@dataclass(frozen=True)
class Training:
    """What training on so many tokens takes, each figure with the 80 % interval of the plan's speed.

    `energy_mwh` counts every GPU at the most that its board may draw, and neither hosts, network nor cooling; None where no source says
    what that is.
    `price` is in the currency in which a GPU hour is priced; None where no price is given.
    """

    tokens: float
    days: Estimate
    gpu_hours: Estimate
    energy_mwh: Estimate | None
    price: Estimate | None


def training(choice: Choice, cluster: Cluster, tokens: float, hourly: float | None = None) -> Training:
    """What training on `tokens` takes by a plan, without restarts and evaluations. `hourly` is the price of a GPU hour."""
    speed = choice.time.tokens_per_s_per_gpu
    hours = Estimate(*(tokens / rate / _HOUR_S for rate in (speed.value, speed.high, speed.low)))
    return Training(
        tokens=tokens,
        days=_times(hours, 1 / choice.plan.gpus / _DAY_H),
        gpu_hours=hours,
        energy_mwh=_times(hours, cluster.board_w / _MEGA) if cluster.board_w else None,
        price=_times(hours, hourly) if hourly is not None else None,
    )


def _times(figure: Estimate, factor: float) -> Estimate:
    return Estimate(figure.value * factor, figure.low * factor, figure.high * factor)


def by_gpus(question: Question, numbers: Sequence[int], anchor: Path | None = None, *, with_published: bool = True) -> Iterator[Answer]:
    """The fastest plan for each number of GPUs, of one global batch; an answer without choices where nothing fits.

    Raises:
        ConfigError: the question cannot be asked.
    """
    for gpus in numbers:
        answer = plan_layouts(replace(question, gpus=gpus), 1)
        yield anchored(answer, anchor, with_published=with_published) if anchor or with_published else answer
