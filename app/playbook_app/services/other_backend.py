"""The best plan of the backend that was not asked for, set against the first of an answer, and which trainers run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from playbook.errors import ConfigError
from playbook.planner.choice.anchored import anchored
from playbook.planner.choice.plain_data import words
from playbook.planner.choice.search import Answer, Choice, half_widths_apart, plan_layouts
from playbook.planner.memory import GIB, at_the_limit
from playbook.planner.options import FRAMEWORKS
from playbook.planner.plan import Plan
from playbook.text import key_of
from playbook_trainer.export.plans import launchable

_OTHER = {"megatron": "torch", "torch": "megatron"}
_SYSTEM = {"torch": "FSDP2", "megatron": "megatron-core"}
_TRAINERS = {"torch": ("torchtitan", "accelerate", "deepspeed"), "megatron": ("megatron-lm", "megatron-bridge")}
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")


def other_backend(answer: Answer, *, with_published: bool) -> dict[str, Any] | None:
    """The comparison as plain data with a `sentence`; None where the answer has no plan by speed, or its fixed settings mean nothing there.

    `faster` is a share of the first plan's speed, negative where the other is slower; `tied` says that the two cannot be told apart.
    """
    question = answer.question
    if not answer.choices or question.goal != "tokens/s":
        return None
    kept = tuple(word for word in question.fixed if key_of(word) != "loss")  # each backend has losses of its own
    other = replace(question, backend=_OTHER[question.backend], fixed=kept)
    try:
        found = plan_layouts(other, 1)
    except ConfigError:
        return None
    found = anchored(found) if with_published else found
    name = f"{other.backend} ({_SYSTEM[other.backend]}, --backend {other.backend})"
    if not found.choices:
        return {"backend": other.backend, "plan": None, "sentence": f"{name}: nothing fits"}
    first, best = answer.choices[0], found.choices[0]
    faster, tied = best.speed / first.speed - 1, abs(half_widths_apart(first, best)) < 1
    runs_it = run_by(best.plan, other.cluster.name)
    speed = best.time.tokens_per_s_per_gpu
    tokens = f"{speed.value:,.0f} tokens/s/GPU [{speed.low:,.0f} to {speed.high:,.0f}]"
    sentence = f"{name}: {tokens}, {_apart(faster, tied=tied)}: {_layout(best, other.capacity)}; {_run_by(runs_it)}"
    return {
        "backend": other.backend,
        "plan": {
            "settings": words(best.plan),
            "memory_gib": best.peak / GIB,
            "tokens_per_s_per_gpu": {"value": speed.value, "low": speed.low, "high": speed.high},
        },
        "faster": faster,
        "tied": tied,
        "trainers": runs_it,
        "sentence": sentence,
    }


def run_by(plan: Plan, hardware: str) -> list[str]:
    """The trainers that a plan can be exported to, this playbook's own last."""
    return [trainer for trainer in (*_TRAINERS[plan.options.backend], "playbook") if _is_run_by(plan, trainer, hardware)]


def _is_run_by(plan: Plan, trainer: str, hardware: str) -> bool:
    if plan.options.compiled and "compiled=false" in FRAMEWORKS[trainer].implied:
        return False  # it would start, and be slower than this plan
    try:
        launchable(plan, trainer, hardware)
    except ConfigError:
        return False
    return True


def _apart(faster: float, *, tied: bool) -> str:
    far = f"{abs(faster):.0%} {'faster' if faster > 0 else 'slower'} than plan 1"
    return f"{far}, which cannot be told apart" if tied else far


def _layout(best: Choice, capacity: float) -> str:
    plan, recompute = best.plan, "+".join(best.plan.options.recompute)
    degrees = [f"{k} {getattr(plan, k)}" for k in _DEGREES if getattr(plan, k) > 1]
    held = f"{best.peak / GIB:.0f} GiB{' (at the limit)' if at_the_limit(best.peak, capacity) else ''}"
    return ", ".join([" ".join([*degrees, f"mbs {plan.mbs}"]), *([f"recompute {recompute}"] if recompute else []), held])


def _run_by(trainers: list[str]) -> str:
    """Which trainers it is exported to."""
    others = [t for t in trainers if t != "playbook"]
    if not trainers:
        return "no trainer that plans are exported to can run it"
    return f"exports to {' and '.join(others)}" if others else "only this playbook's own trainer can run it"
