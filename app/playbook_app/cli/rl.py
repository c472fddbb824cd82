"""What `playbook diagnose` says of a step of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.diagnosis import rl_step
from playbook.errors import ConfigError
from playbook.planner import memory
from playbook.planner.hardware.named import machine
from playbook.planner.models import find
from playbook.planner.plan import parse
from playbook_app.cli.output import print_table, say

_WARM_UP = 5
"""One of so many steps, the first ones, is not counted."""
_ENGINE = 0.9
"""Share of a GPU's memory that an engine takes, as vLLM's `gpu_memory_utilization` does by itself."""
_WEIGHTS = 0.5
"""Share that weights may have of it before tensor parallelism is assumed."""
_MOST_TP = 64


def answer(
    steps: Sequence[rl_step.Step], model: str | None, gpus: int | None, hardware: str | None, layout: Sequence[str], seq: int | None
) -> dict[str, Any]:
    """The answer for a log's steps; with a model and GPUs, the memory of the trainer and of the engine too.

    Raises:
        ConfigError: the model, the GPUs or the layout is not known, or only a part of them is named.
    """
    counted = steps[len(steps) // _WARM_UP :]
    found = rl_step.diagnose(rl_step.middle(counted)) | {"steps": len(counted)}
    if model is None:
        return found
    if hardware is None:
        raise ConfigError("the memory of both engines depends on the GPUs; give --gpus N and --gpu KIND, such as --gpus 8 --gpu h200")
    return found | {"memory": _memory(model, gpus, hardware, [*layout, *([f"seq_len={seq}"] if seq else [])])}


def _memory(model: str, gpus: int | None, hardware: str, layout: Sequence[str]) -> dict[str, Any]:
    shape, room = find(model), machine(hardware).memory_gib * _ENGINE
    sizes = (2**i for i in range(_MOST_TP.bit_length()))
    tp = next((n for n in sizes if rl_step.engine(shape, n).weights / memory.GIB <= room * _WEIGHTS), _MOST_TP)
    engine = rl_step.engine(shape, tp)
    left = room - engine.weights / memory.GIB
    return {
        "trainer_gib": memory.peak(parse(model, layout, gpus=gpus, shape=shape)) / memory.GIB,
        "gpu_gib": machine(hardware).memory_gib,
        "engine": {
            "tp": tp,
            "weights_gib": engine.weights / memory.GIB,
            "kv_bytes_per_token": engine.kv_per_token,
            "kv_tokens": max(0, int(left * memory.GIB / engine.kv_per_token)) if engine.kv_per_token else None,
        },
    }


def show(found: Mapping[str, Any]) -> None:
    """The answer as lines."""
    step = "of unknown length" if found["step_s"] is None else f"{found['step_s']:.4g} s a step"
    say(f"a step of reinforcement learning, {step}, median of {found['steps']}; what follows is arithmetic on the log")
    say(f"wall       {found['wall'] or 'not known: the log names no phases, and its lengths alone do not tell'}")
    rows = [{"phase": p["phase"], "seconds": f"{p['seconds']:.4g}", "share": f"{p['share']:.0%}"} for p in found["phases"]]
    if rows:
        print_table(rows, ("phase", "seconds", "share"))
    if tail := found["long_tail"]:
        say(
            f"long tail  the longest response is {tail['longest'] / tail['mean']:.1f} times the mean: where a batch decodes at once,"
            f" {tail['idle_share_of_rollout']:.0%} of the rollout waits for it"
        )
    if idle := found["idle"]:
        say(f"together   GPUs that do both in turn wait in {idle['together']:.0%} of the step, if all responses begin at once")
        say(f"apart      in turns, trainers wait in {idle['trainers_apart']:.0%} and engines in {idle['engines_apart']:.0%} of the step")
        say(f"overlapped a step of the same GPUs for each takes at least the longer part: at most {idle['overlapped']:.2f} times as fast")
    if both := found.get("memory"):
        engine = both["engine"]
        tokens = "" if engine["kv_tokens"] is None else f", and room for {engine['kv_tokens']:,} tokens of keys and values"
        say(
            f"memory     of {both['gpu_gib']:.0f} GiB: the trainer's peak {both['trainer_gib']:.0f} GiB; an engine alone on {engine['tp']} GPU,"
            f" {engine['weights_gib']:.0f} GiB of weights on each{tokens}"
        )
    for place, action in enumerate(found["actions"], 1):
        say(f"{place}  {action}")
    say(f"card       playbook cards show {found['card']}")
