"""A step of reinforcement learning: which phase is the wall, what its long tail and its placement leave idle, and what both engines store.

All of it is arithmetic on the seconds and lengths of a log: no run of ours stands behind it. An engine that decodes a whole batch at once
ends with its longest
response, so the mean over the longest is the share of its places that work (Gao et al., RollPacker, NSDI 2026, on the long tail).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from playbook.planner import parameters
from playbook.planner.shapes import Shape

PHASES = ("rollout", "reward", "log-probabilities", "update", "weight transfer")
BETWEEN = "between the phases"
_NOTABLE_IDLE_SHARE = 0.5
"""Idle share of a rollout's places from which on its long tail is named as the reason."""
_CARD = "rl-step"
_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "rollout": (
        "raise the memory of the engine (its KV cache bounds how many responses decode at once), and prefer more engines over more tensor "
        "parallelism",
        "place engines and trainer apart and let the rollout of the next step overlap the update",
    ),
    "long tail": (
        "cut or carry over the longest responses (partial rollout), or take more prompts than are needed and stop at the batch",
        "place engines and trainer apart, so that the tail of one rollout overlaps the update before it",
    ),
    "reward": ("score responses as they end, in several processes, beside the rollout: none of it needs a GPU that waits",),
    "log-probabilities": (
        "pack these passes by tokens and not by samples, and raise their micro-batch: they keep no activations",
        "leave out the reference model where its weight in the loss is 0, and old log-probabilities where one update follows a rollout",
    ),
    "update": (
        "balance micro-batches by tokens, remove padding, and try each memory saving that is on (offload, recompute) without it",
        "`playbook diagnose` with the tokens and the seconds of the update says how far it is from what the layout should reach",
    ),
    "weight transfer": (
        "send weights in buckets of a gigabyte and not tensor by tensor, and do not let requests drain before",
        "the bytes over the slowest link are the floor: seconds far above it are calls, not the network",
    ),
    BETWEEN: ("find what the log does not name: validation, checkpoints, sleep and wake-up of the engine, data in one process",),
}


@dataclass(frozen=True)
class Step:
    """One step by its log. Units: seconds; tokens, or seconds, of the mean and the longest response."""

    total: float | None
    phases: Mapping[str, float]
    """By names of `PHASES`; those that the log does not name are not there."""
    mean: float | None = None
    longest: float | None = None


def middle(steps: Sequence[Step]) -> Step:
    """The step of medians; its phases are those that most steps have."""
    names = [n for n in PHASES if 2 * sum(n in s.phases for s in steps) > len(steps)]
    return Step(
        _median([s.total for s in steps]),
        {n: median([s.phases[n] for s in steps if n in s.phases]) for n in names},
        _median([s.mean for s in steps]),
        _median([s.longest for s in steps]),
    )


def diagnose(step: Step) -> dict[str, Any]:
    """The diagnosis of a step, `rl-step/1`, as plain data.

    - `step_s`: seconds of the step, or of its phases where those are more; None where the log has neither.
    - `phases`: each phase with its seconds and its share of the step, the longest first; what no phase covers is `BETWEEN`.
    - `wall`: the longest phase, the bottleneck; None where the log names no phase.
    - `long_tail`: mean and longest response, and the share of the rollout's places that are idle; None where the log lacks either length.
    - `idle`: shares of the step in which GPUs wait, by placement; None without a rollout and another phase.
    - `actions`: what to try, the first first; `card`: the card that says why.
    """
    named = sum(step.phases.values())
    step_s = max(step.total or 0.0, named)
    seconds = {n: step.phases[n] for n in PHASES if n in step.phases} | ({BETWEEN: step_s - named} if named and step_s > named else {})
    bottleneck = max(seconds, key=lambda n: seconds[n]) if seconds else None
    idle_share = 1 - step.mean / step.longest if step.mean and step.longest and step.longest >= step.mean else None
    long_tail = bottleneck == "rollout" and idle_share is not None and idle_share >= _NOTABLE_IDLE_SHARE
    return {
        "schema": "rl-step/1",
        "label": "arithmetic",
        "step_s": step_s or None,
        "phases": [{"phase": n, "seconds": s, "share": s / step_s} for n, s in sorted(seconds.items(), key=lambda item: -item[1])],
        "wall": bottleneck,
        "long_tail": None if idle_share is None else {"mean": step.mean, "longest": step.longest, "idle_share_of_rollout": idle_share},
        "idle": _idle(step.phases, step_s, idle_share) if "rollout" in step.phases and len(step.phases) > 1 else None,
        "actions": [*(_ACTIONS["long tail"] if long_tail else ()), *_ACTIONS[bottleneck]] if bottleneck else [],
        "card": _CARD,
    }


def _idle(phases: Mapping[str, float], step_s: float, idle_share: float | None) -> dict[str, float]:
    """Shares of the step in which GPUs wait: those that do both in turn, or trainers and engines each where they stand apart and take
    turns. `overlapped` is the
    most that a step apart can gain, as a ratio, where the rollout goes on beside all else at the same number of GPUs for each.
    """
    rollout, reward = phases["rollout"], phases.get("reward", 0.0)
    busy = rollout * (1 - (idle_share or 0.0)) + sum(s for n, s in phases.items() if n not in ("rollout", "reward"))
    return {
        "together": 1 - busy / step_s,
        "trainers_apart": (rollout + reward) / step_s,
        "engines_apart": 1 - rollout / step_s,
        "overlapped": step_s / max(rollout, step_s - rollout),
    }


@dataclass(frozen=True)
class Engine:
    """Bytes on each GPU of a rollout engine."""

    weights: float
    kv_per_token: float


def engine(shape: Shape, tp: int) -> Engine:
    """What an engine of `tp` GPUs stores in 16 bits: all parameters over them, and keys and values of a token, whose heads are split as far
    as there are any.

    Compressed keys and values (MLA) are whole on each GPU. Layers with a window, with linear attention or Mamba are counted as far as they
    keep keys of all
    tokens: those with a window do up to its length, the others not. Source: vLLM, `vllm/v1/kv_cache_interface.py`.
    """
    if shape.blocks:
        layers = shape.blocks.count("*")
    elif shape.linear:
        layers = shape.layers // shape.linear.full_every
    else:
        layers = shape.layers
    if shape.mla:
        values = float(shape.mla.kv_rank + shape.mla.rope_dim)
    else:
        values = 2.0 * shape.head_dim * max(1.0, shape.kv_heads / tp)
    return Engine(2.0 * parameters.total(shape) / tp, 2.0 * layers * values)


def _median(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return median(present) if 2 * len(present) > len(values) else None
