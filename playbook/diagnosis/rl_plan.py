"""What a step of reinforcement learning should take before it runs: rollout and weight transfer by bandwidth, the rest by the planner.

All of it is arithmetic. A decode step reads an engine's weights once, and each token the keys and values of its response (Pope et al.,
Efficiently Scaling Transformer Inference, MLSys 2023); the longest response says how many steps there are at least. Launches, prefill and
requests are not counted, so a measured rollout takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playbook.diagnosis.rl_step import Engine, Step, engine
from playbook.errors import ConfigError
from playbook.planner.memory import GIB
from playbook.planner.shapes import Shape
from playbook.planner.time.cluster import Cluster

_ENGINE = 0.9
"""Share of a GPU's memory that an engine takes, as vLLM's `gpu_memory_utilization` does by itself."""
_WEIGHTS = 0.5
"""Share that weights may have of it before tensor parallelism is assumed."""
_FORWARD = 3
"""A pass for log-probabilities is a third of a training pass."""


@dataclass(frozen=True)
class Rollouts:
    """What a step generates: `responses` of `mean` and at most `longest` tokens behind prompts of `prompt` tokens."""

    responses: int
    prompt: int
    mean: int
    longest: int

    @property
    def tokens(self) -> int:
        """Of prompts and responses, which the trainer computes."""
        return self.responses * (self.prompt + self.mean)


@dataclass(frozen=True)
class Placed:
    """Engines of `tp` GPUs each, and how many responses one decodes at once."""

    tp: int
    engines: int
    stored: Engine
    at_once: float


def smallest(shape: Shape, gpu_gib: float, gpus: int) -> tuple[int, Engine, float]:
    """The engine of the fewest of `gpus` GPUs whose weights leave half of its memory to keys and values: its GPUs, what one of them stores,
    and the bytes that the engine takes of it.
    """
    room = gpu_gib * GIB * _ENGINE
    sizes = [2**i for i in range(gpus.bit_length())]
    tp = next((n for n in sizes if engine(shape, n).weights <= room * _WEIGHTS), sizes[-1])
    return tp, engine(shape, tp), room


def memory(trainer_bytes: float, gpu_gib: float, tp: int, stored: Engine, kv_tokens: int | None) -> dict[str, Any]:
    """What trainer and engine store on a GPU, as plain data."""
    held = {"tp": tp, "weights_gib": stored.weights / GIB, "kv_bytes_per_token": stored.kv_per_token, "kv_tokens": kv_tokens}
    return {"trainer_gib": trainer_bytes / GIB, "gpu_gib": gpu_gib, "engine": held}


def placed(shape: Shape, cluster: Cluster, gpus: int, rollouts: Rollouts) -> Placed:
    """The smallest engines that `gpus` GPUs hold.

    Raises:
        ConfigError: not even an engine of all GPUs has room for one response.
    """
    tp, stored, room = smallest(shape, cluster.memory_gib, gpus)
    context = (rollouts.prompt + rollouts.mean) * stored.kv_per_token
    if stored.weights + context > room:
        raise ConfigError(
            f"an engine of {tp} GPUs stores {stored.weights / GIB:.0f} GiB of weights on each of {room / GIB:.0f} and has no room for a "
            "response; expected more or larger GPUs (--gpus, --gpu)"
        )
    engines = gpus // tp
    fits = (room - stored.weights) / context if context else float("inf")
    return Placed(tp, engines, stored, min(fits, rollouts.responses / engines))


def step(shape: Shape, cluster: Cluster, gpus: int, rollouts: Rollouts, train_tokens_per_s_per_gpu: float, passes: int) -> Step:
    """The step by phases: `passes` forward passes for log-probabilities; rewards are not known and left out. Units: seconds."""
    at = placed(shape, cluster, gpus, rollouts)
    steps = max(rollouts.longest, rollouts.responses / at.engines * rollouts.mean / at.at_once)
    kept = rollouts.responses / at.engines * rollouts.mean * (rollouts.prompt + rollouts.mean / 2) * at.stored.kv_per_token
    update = rollouts.tokens / gpus / train_tokens_per_s_per_gpu
    link = cluster.link_bytes_per_s if gpus <= cluster.node else cluster.nic_bytes_per_s
    phases = {
        "rollout": (steps * at.stored.weights + kept) / cluster.memory_bytes_per_s,
        "log-probabilities": passes * update / _FORWARD,
        "update": update,
        "weight transfer": at.stored.weights / link,
    }
    return Step(None, {name: seconds for name, seconds in phases.items() if seconds}, float(rollouts.mean), float(rollouts.longest))
