"""The search: `plan_layouts` answers a question with every layout that fits, fastest first. Bounds spare most of the work and change no
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from math import log

from playbook.planner import memory
from playbook.planner.choice import space
from playbook.planner.choice.space import Question
from playbook.planner.options import Options
from playbook.planner.plan import Plan
from playbook.planner.time import spread
from playbook.planner.time.step import StepTime, least_seconds, step_time

_GPUS = tuple(2**i for i in range(3, 15))
"""Numbers of GPUs among which the smallest that holds any plan is looked for: nodes of eight, doubled."""
_COMPARED = 10
"""Plans that ties are looked for among."""
_OVER = 1 + 1e-6
"""So that the order of sums keeps no layout out."""


@dataclass(frozen=True)
class Choice:
    """A plan with what it takes and holds."""

    plan: Plan
    time: StepTime
    stages: tuple[memory.StageBytes, ...]

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(stage.peak for stage in self.stages)

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.time.tokens_per_s_per_gpu.value


@dataclass(frozen=True)
class Counts:
    """How much was looked at: combinations, layouts that break no rule, those with options that fit, and plans that were timed."""

    enumerated: int
    legal: int
    fitting: int
    timed: int


@dataclass(frozen=True)
class Found:
    """The best plans, best first, one for each layout; none where nothing fits."""

    choices: list[Choice]
    counts: Counts


@dataclass(frozen=True)
class Obstacle:
    """The plan that comes nearest where none fits, what it holds, and what would make one fit."""

    plan: Plan
    stage: memory.StageBytes
    ways: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """Plans for a question, best first.

    For the goal `gpus`, `question` is the one at the fewest GPUs that fit, with the goal `tokens/s`. `obstacle` is there where layouts are
    legal and none fits; `broken_rules` are those that most layouts break, where none is legal. `anchored` says how many runs scaled the
    speeds, and by what.
    """

    question: Question
    choices: list[Choice]
    counts: Counts
    tied_indices: list[int]
    """Indices of plans whose lead over the best is within the error of their times; for goal `memory` only the first."""
    obstacle: Obstacle | None
    broken_rules: tuple[str, ...] = ()
    anchored: str = ""


def plan_layouts(question: Question, count: int = 5) -> Answer:
    """The best plans for a question: of the legal layouts those that fit, by the goal; with those that tie with the best, or where nothing
    fits the obstacle or the broken rules.

    The goal `gpus` is answered at the fewest GPUs that fit, by tokens/s; where no number fits, at those that were asked for.

    Raises:
        ConfigError: the question cannot be asked.
    """
    space.check(question)
    if question.goal == "gpus":
        question = replace(question, gpus=_fewest_gpus(question) or question.gpus, goal="tokens/s")
    found_layouts = search(question, max(count, _COMPARED))
    choices = found_layouts.choices
    obstacle = None if choices else _obstacle(question)
    broken_rules = () if choices or obstacle else space.most_broken(question)
    tied = [i for i in tied_indices(question, found_layouts) if i < count]
    return Answer(question, choices[:count], found_layouts.counts, tied, obstacle, broken_rules)


def search(question: Question, count: int = 5, *, prune: bool = True) -> Found:
    """The best `count` plans by the question's goal.

    For each layout the best options that fit are taken. Without `prune` every option of every layout is timed and weighed.
    """
    legal = list(space.layouts(question))
    timer = _Timer(question)
    if question.goal == "memory":
        plans = sorted((_lean(question, layout) for layout in legal), key=space.held)
        choices = [Choice(plan, timer(plan), tuple(memory.stages(plan))) for plan in plans if space.held(plan) <= question.capacity]
        return Found(choices[:count], Counts(space.enumerated(question), len(legal), len(choices), timer.timed))
    if prune:
        fitting = list(_fitting(question, legal))
        choices, number = _pruned(timer, fitting, count), len(fitting)
    else:
        choices = [best for best in (_best(timer, layout) for layout in legal) if best]
        number = len(choices)
    choices.sort(key=_order)
    return Found(choices[:count], Counts(space.enumerated(question), len(legal), number, timer.timed))


def tied_indices(question: Question, timed: Found) -> list[int]:
    """Indices of plans whose lead over the best is within the error of their times, the best included; for goal `memory` only the first."""
    if question.goal == "memory" or not timed.choices:
        return [0] if timed.choices else []
    best = timed.choices[0]
    return [i for i, c in enumerate(timed.choices) if c is best or half_widths_apart(best, c) < 1]


def half_widths_apart(best: Choice, other: Choice) -> float:
    """By how many of an 80 % interval's half widths two plans are apart; negative where the other is faster."""
    return log(best.speed / other.speed) / (spread.QUANTILE * spread.between(best.time.parts, other.time.parts))


def fits(question: Question) -> bool:
    """Whether any plan fits."""
    return any(True for _ in _fitting(question, space.layouts(question, lean=True)))


class _Timer:
    """Times plans and counts them."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.timed = 0

    def __call__(self, plan: Plan) -> StepTime:
        self.timed += 1
        return step_time(plan, self.question.cluster)


def _pruned(timer: _Timer, fitting: Iterable[Plan], count: int) -> list[Choice]:
    """The best of the layouts, those with the best bound first; a layout whose bound is under the worst of the best is not looked into.

    Each layout comes with the least recompute, and the least on the host, that fits. More of either is slower, so the layers alone with its
    fastest
    switches bound the layout, and its time with them does so closer; they are its best options where they fit too.
    """
    question, bounds = timer.question, []
    for i, layout in enumerate(fitting):
        o = layout.options
        plans = [replace(layout, options=_held(s, o.recompute, o.optimizer_offload)) for s in space.switches(question, layout)]
        least = min(least_seconds(plan, question.cluster) for plan in plans)
        bounds.append((layout.global_batch * layout.seq_len / layout.gpus / least, i, layout, plans))
    choices: list[Choice] = []
    for bound, _, layout, plans in sorted(bounds, key=lambda b: (-b[0], b[1])):
        worst = _rounded(choices[count - 1].speed) if len(choices) >= count else 0.0
        if bound * _OVER < worst:
            break
        fastest = next(_timed(timer, plans), None)
        if fastest and _rounded(fastest[0].tokens_per_s_per_gpu.value) < worst:
            continue
        best = _first_fit(question, [fastest] if fastest else []) or _best(timer, layout)
        if best:
            choices = sorted([*choices, best], key=_order)[: count + 1]
    return choices


@lru_cache(maxsize=4096)
def _held(options: Options, recompute: tuple[str, ...], host: int) -> Options:
    """Options with another recompute, and so many percent of the optimizer on the host."""
    return replace(options, recompute=recompute, optimizer_offload=host)


def _best(timer: _Timer, layout: Plan) -> Choice | None:
    """The fastest options of a layout that fit."""
    q = timer.question
    options = (_held(*each) for each in product(space.switches(q, layout), space.ladder(q), space.hosts(q)))
    return _first_fit(q, _timed(timer, [replace(layout, options=o) for o in options]))


def _timed(timer: _Timer, plans: list[Plan]) -> Iterator[tuple[StepTime, Plan]]:
    """Legal plans with their times, the fastest first. Rules are checked last: they take as long as a time does, and the first is often all
    that is asked for.
    """
    timed = sorted(((timer(plan), plan) for plan in plans), key=lambda t: -_rounded(t[0].tokens_per_s_per_gpu.value))
    return ((time, plan) for time, plan in timed if not plan.broken())


def _first_fit(question: Question, timed: Iterable[tuple[StepTime, Plan]]) -> Choice | None:
    for time, plan in timed:
        stages = _fitting_stages(plan, question.capacity)
        if stages:
            return Choice(plan, time, stages)
    return None


def _fitting_stages(plan: Plan, capacity: float) -> tuple[memory.StageBytes, ...]:
    """The stages of a plan that fits; none of one that does not."""
    stages = []
    for stage in memory.each_stage(plan):
        if stage.peak > capacity:
            return ()
        stages.append(stage)
    return tuple(stages)


def _fits(plan: Plan, capacity: float) -> bool:
    return all(stage.peak <= capacity for stage in memory.each_stage(plan, fullest=True))


def _rungs(question: Question, layout: Plan, first: int = 0) -> Iterator[Plan]:
    """A layout with the optimizer where it may be and each kind of recompute, the fastest first; without so many of the `first`."""
    for host, rung in islice(product(space.hosts(question), space.ladder(question)), first, None):
        yield replace(layout, options=_held(layout.options, rung, host))


def _fitting(question: Question, legal: Iterable[Plan]) -> Iterator[Plan]:
    """The layouts that fit, each with the least recompute that does.

    Where states alone do not fit, no batch does; with the recompute with which a micro-batch does not, no larger one does. Legal layouts
    come with micro-batches rising, before anything that makes them faster: 8-bit weights and a second micro-batch for overlap only add.
    """
    grid: tuple[int, ...] = ()
    too_full = 0
    for layout in legal:
        degrees = (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp)
        if degrees != grid:
            grid = degrees
            *others, most = _rungs(question, layout)
            too_full = len(others) + 1 if memory.least(most) > question.capacity else 0
        for plan in _rungs(question, layout, too_full):
            if _fits(plan, question.capacity):
                yield plan
                break
            too_full += 1


def _lean(question: Question, layout: Plan) -> Plan:
    """A layout with the options that need the least memory."""
    plans = [plan for plan in _rungs(question, layout) if not plan.broken()]
    return min(plans or [layout], key=space.held)


def _order(choice: Choice) -> tuple[float, float, tuple[int, ...]]:
    """Faster first; of equals the leaner, then the plainer."""
    p = choice.plan
    return -_rounded(choice.speed), choice.peak, (p.tp, p.cp, p.pp, p.vpp, p.ep, p.etp, p.mbs)


def _rounded(speed: float) -> float:
    """A speed to nine digits, so that the order of sums decides nothing."""
    return float(f"{speed:.9g}")


def _fewest_gpus(question: Question) -> int | None:
    """The smallest number of GPUs, in nodes of eight, that holds any plan; a batch that is not given grows with them."""
    most = next((n for n in _GPUS if fits(_widened(question, n))), None)
    if most is None:
        return None
    step = max(_GPUS[0], most // 8)  # between two powers of two, multiples of an eighth of the larger
    return next((n for n in range(most // 2 + step, most, step) if fits(_widened(question, n))), most)


def _widened(question: Question, gpus: int) -> Question:
    """The question on other GPUs, with a batch that divides over them."""
    batch = question.global_batch
    return replace(question, gpus=gpus, gbs=batch if batch % gpus == 0 or question.gbs else -(-batch // gpus) * gpus)


def _obstacle(question: Question) -> Obstacle | None:
    """The plan that needs the least memory, though it does not fit; None where no layout is legal."""
    plan = min((_lean(question, layout) for layout in space.layouts(question, lean=True)), key=space.held, default=None)
    if plan is None:
        return None
    fullest = max(memory.stages(plan), key=lambda s: s.peak)
    return Obstacle(plan, fullest, tuple(_ways(question)))


_ADAPTERS = "lora=16"
"""A usual rank; what adapters hold is small beside the weights at any."""


def _ways(question: Question) -> list[str]:
    """What would let a plan fit: permissions that are not given, full sharding, adapters in place of all weights, more GPUs."""
    ways = []
    not_allowed = [a for a in ("bf16-moments", "bf16-gradients", "offload") if a not in question.allow and question.backend == "megatron"]
    for added in (*((a,) for a in not_allowed), tuple(not_allowed)):
        if added and fits(replace(question, allow=question.allow | set(added))):
            ways.append(f"--allow {','.join((*sorted(question.allow), *added))}")
            break
    if (
        question.backend == "megatron"
        and "sharding" not in question.kept
        and fits(replace(question, fixed=(*question.fixed, "sharding=fsdp")))
    ):
        ways.append("--fix sharding=fsdp")
    if "lora" not in question.kept and fits(replace(question, fixed=(*question.fixed, _ADAPTERS))):
        ways.append(f"--fix {_ADAPTERS} to train adapters alone")
    more = next((n for n in (2, 4, 8, 16, 32) if fits(_widened(question, n * question.gpus))), None)
    return [*ways, *([f"--gpus {more * question.gpus}"] if more else [])]
