"""What an answer says beside its plans: which cannot be told apart, why the second lost, what to measure, and what stands in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from playbook.planner.choice import space
from playbook.planner.choice.search import Choice, Counts, Found, fits, leanest, search
from playbook.planner.choice.space import Question
from playbook.planner.memory import StageBytes, stages
from playbook.planner.plan import Plan
from playbook.planner.time import spread

_MOST_GPUS = 16384
_LEAST_GPUS = 8
_COMPARED = 10
"""Plans that ties are looked for among."""

PARTS = {
    "products": "matrix products", "grouped": "experts' products", "attention": "attention", "elementwise": "elementwise kernels",
    "host": "waiting for the host", "tp": "tensor-parallel transfers", "ep": "expert transfers", "cp": "context-parallel transfers",
    "pp": "transfers between stages", "bubble": "waiting for the pipeline", "dp": "gradients and weights", "optimizer": "the optimizer",
    "offload": "transfers to the host", "stragglers": "waiting for the slowest rank",
}  # fmt: skip
"""Words for the parts of a step's time."""


@dataclass(frozen=True)
class Obstacle:
    """The plan that comes nearest where none fits, what it holds, and what would make one fit."""

    plan: Plan
    stage: StageBytes
    ways: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """Plans for a question, best first. `ties` are places in `choices` that cannot be told from the first.

    `broken` is what most layouts break where none is legal, `anchored` how many runs scaled the speeds, and by what.
    """

    question: Question
    choices: list[Choice]
    counts: Counts
    ties: list[int]
    obstacle: Obstacle | None
    broken: tuple[str, ...] = ()
    anchored: str = ""


def answer(question: Question, count: int = 5) -> Answer:
    """The best plans for a question.

    Raises:
        ConfigError: the question cannot be asked.
    """
    space.check(question)
    if question.goal == "gpus":
        question = replace(question, gpus=_fewest(question) or question.gpus, goal="tokens/s")
    found = search(question, max(count, _COMPARED))
    obstacle = None if found.choices else _obstacle(question)
    broken = () if found.choices or obstacle else space.most_broken(question)
    return Answer(question, found.choices[:count], found.counts, [i for i in ties(question, found) if i < count], obstacle, broken)


def ties(question: Question, found: Found) -> list[int]:
    """Places of plans whose lead over each other lies within what the times may be off; the first is one of them."""
    if question.goal == "memory" or not found.choices:
        return [0] if found.choices else []
    best = found.choices[0]
    return [i for i, c in enumerate(found.choices) if c is best or _told(best, c) < 1]


def _told(best: Choice, other: Choice) -> float:
    """By how many of an 80 % interval's half widths two plans are apart."""
    return log(best.speed / other.speed) / (spread.QUANTILE * spread.between(best.time.parts, other.time.parts))


def lost(best: Choice, other: Choice, most: int = 2) -> str:
    """Where the slower plan spends more, by parts, in the share of a step."""
    whole = other.time.seconds.value
    more = {k: other.time.parts.get(k, 0.0) - best.time.parts.get(k, 0.0) for k in PARTS}
    worst = sorted((k for k in more if more[k] > 0.005 * whole), key=lambda k: -more[k])[:most]
    slower = other.time.seconds.value / best.time.seconds.value - 1
    said = " and ".join(f"{PARTS[k]} (+{more[k] / whole:.0%} of its step)" for k in worst)
    return f"{slower:.1%} slower: more {said}" if said else f"{slower:.1%} slower"


def next_run(found: Answer) -> tuple[Choice, Choice, str] | None:
    """Two plans among the ties that differ most in what decides, and the part that does; None where nothing ties."""
    if len(found.ties) < 2:
        return None
    best = found.choices[0]
    shares = [(other, part, abs(_share(best, part) - _share(other, part))) for other in _tied(found)[1:] for part in PARTS]
    other, part, _ = max(shares, key=lambda s: s[2])
    return best, other, part


def _tied(found: Answer) -> Sequence[Choice]:
    return [found.choices[i] for i in found.ties]


def _share(choice: Choice, part: str) -> float:
    return choice.time.parts.get(part, 0.0) / choice.time.seconds.value


def _fewest(question: Question) -> int | None:
    """The smallest number of GPUs, in nodes of eight, that holds any plan; a batch that is not given grows with them."""
    gpus = _LEAST_GPUS
    while gpus <= _MOST_GPUS:
        if fits(_widened(question, gpus)):
            return _between(question, gpus // 2, gpus)
        gpus *= 2
    return None


def _between(question: Question, least: int, most: int) -> int:
    """Between two powers of two, multiples of an eighth of the larger."""
    step = max(_LEAST_GPUS, most // 8)
    return next((n for n in range(least + step, most, step) if fits(_widened(question, n))), most)


def _widened(question: Question, gpus: int) -> Question:
    """The question on other GPUs, with a batch that divides over them."""
    batch = question.global_batch
    return replace(question, gpus=gpus, gbs=batch if batch % gpus == 0 or question.gbs else -(-batch // gpus) * gpus)


def _obstacle(question: Question) -> Obstacle | None:
    plan = leanest(question)
    if plan is None:
        return None
    held = max(stages(plan), key=lambda s: s.peak)
    return Obstacle(plan, held, tuple(_ways(question)))


def _ways(question: Question) -> list[str]:
    """What would let a plan fit: permissions that are not given, full sharding, more GPUs."""
    found = []
    left = [a for a in ("bf16-moments", "bf16-gradients", "offload") if a not in question.allow and question.backend == "megatron"]
    for wanted in (*((a,) for a in left), tuple(left)):
        if wanted and fits(replace(question, allow=question.allow | set(wanted))):
            found.append(f"--allow {','.join((*sorted(question.allow), *wanted))}")
            break
    if (
        question.backend == "megatron"
        and "sharding" not in question.kept
        and fits(replace(question, fixed=(*question.fixed, "sharding=fsdp")))
    ):
        found.append("--fix sharding=fsdp")
    more = next((n for n in (2, 4, 8, 16, 32) if fits(_widened(question, n * question.gpus))), None)
    return [*found, *([f"--gpus {more * question.gpus}"] if more else [])]
