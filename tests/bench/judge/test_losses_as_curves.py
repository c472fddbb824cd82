"""Losses as curves: a mean can stay while training does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from test_verdict import make_case, make_run

from playbook.records.evidence import Run, Sample
from playbook_bench.judge import guards

STEPS = 20


def falling(step: int) -> float:
    return 2.2 - 0.4 * step / (STEPS - 1)


def pairs(candidate: Callable[[int], float | None], noise: float = 0.0, count: int = 4, steps: int = STEPS) -> list[tuple[Run, Run]]:
    """Pairs of runs with these losses; `noise` is the deviation of a step's loss between launches, as a share."""
    draw = random.Random(1)

    def run(variant: str, loss: Callable[[int], float | None]) -> Run:
        told = [loss(i) for i in range(steps)]
        losses = [None if v is None else v * (1 + draw.gauss(0, noise)) for v in told]
        samples = [Sample(step=i, timed=True, loss=v, seconds=1.0, useful_tokens=1, raw_tokens=1) for i, v in enumerate(losses)]
        return make_run(variant, samples=samples)

    return [(run("baseline", falling), run("candidate", candidate)) for _ in range(count)]


MEAN = sum(map(falling, range(STEPS))) / STEPS


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 0.005])
@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (lambda i: falling(STEPS - 1 - i), "the losses end at"),
        (lambda i: MEAN, "the losses end at"),
        (lambda i: falling(i) - (0.1 if i < STEPS - 1 else -0.1 * (STEPS - 1)), "the losses end at"),
        (lambda i: None if i == STEPS - 1 else falling(i), "the other none at 1 of them, such as the 20th"),
    ],
    ids=["rises", "constant", "explodes", "hides its end"],
)
def test_a_loss_of_the_same_mean_and_another_course_is_refused(candidate, said: str, noise: float, count: int) -> None:
    found = guards.loss(make_case(), pairs(candidate, noise, count))
    assert not found.ok
    assert said in found.detail


def test_a_loss_that_stops_falling_is_refused_within_the_band() -> None:
    """It falls by less than the band: the ends alone say nothing."""
    flat = [(slow, still) for slow, still in zip(pairs(lambda i: 2.0 - 0.015 * i / STEPS), pairs(lambda i: 1.9925), strict=True)]
    found = guards.loss(make_case(), [(a[1].model_copy(update={"variant": "baseline"}), b[1]) for a, b in flat])
    assert (found.ok, found.detail) == (False, "the loss falls by 0 over the timed steps, and by 0.012 in the baseline")


def test_a_step_of_its_own_is_refused_where_launches_repeat_theirs() -> None:
    """Three steps in the middle move the mean, the ends and the fall by less than the band."""
    found = guards.loss(make_case(), pairs(lambda i: falling(i) * (1.05 if i == 8 else 1)))
    assert (found.ok, "the loss of timed step 9 is 2.133, and 2.032" in found.detail) == (False, True)
    assert guards.loss(make_case(), pairs(lambda i: falling(i) * (1.05 if i == 8 else 1), noise=0.003)).ok, "one step of noise is none"


@pytest.mark.parametrize("steps", [1, 4, 5, STEPS])
@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.005])
def test_the_same_course_is_the_same(noise: float, steps: int) -> None:
    assert guards.loss(make_case(guardrails={"loss": {"relative": 0.05}}), pairs(falling, noise, steps=steps)).ok
    assert guards.loss(make_case(guardrails={"loss": {"relative": 0.05}}), pairs(lambda i: 1.001 * falling(i), noise, steps=steps)).ok


def test_equal_curves_are_seldom_told_apart() -> None:
    """At a noise that the comparison of means lets pass."""
    wrong = 0
    for seed in range(400):
        draw = random.Random(seed)
        same = pairs(lambda i, draw=draw: falling(i) * (1 + draw.gauss(0, 0.01)), 0.01, steps=8)
        wrong += bool(guards.difference(same, 0.01))
    assert wrong <= 8
