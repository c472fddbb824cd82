"""The tools that plan: which layouts are legal, what they hold, and which are fastest. Each is the function behind a command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from playbook.errors import PlaybookError
from playbook.mcp.answers import LayoutAnswer, MemoryAnswer, NearLayout, PlanAnswer, PlannedLayout, StageMemory
from playbook.planner import layout, memory
from playbook.planner.choice import document, explain
from playbook.planner.choice.space import Question
from playbook.planner.models import MODELS, from_huggingface, from_preset, named
from playbook.planner.options import Options
from playbook.planner.plan import Plan
from playbook.planner.search import nearest
from playbook.planner.shapes import Shape
from playbook.planner.time.cluster import cluster
from playbook.yaml_files import did_you_mean

_MOST_TEXT = 100_000
Fp8 = Literal["", "blockwise", "mxfp8", "tensorwise", "delayed"]
Sharding = Literal["none", "optimizer", "fsdp", "fsdp2"]
Allowed = Literal["fp8", "bf16-moments", "bf16-gradients", "offload", "graphs"]
Module = Literal["full", "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
Model = Annotated[str, Field(max_length=_MOST_TEXT, description="A preset, such as qwen3_30b_a3b, or a config.json's text.")]
Hardware = Annotated[str | None, Field(max_length=64, description="Kind of GPU, such as h100.")]


def shape_of(model: str, *, instead: str = "") -> Shape:
    """The shape of a preset or a published name, or of the text of a `config.json`.

    Raises:
        PlaybookError: no such model; `instead` says what else could be given.
    """
    if model.lstrip().startswith("{"):
        try:
            data: Any = json.loads(model)
        except ValueError as e:
            raise PlaybookError(f"the model's text is no JSON: {str(e)[:100]}; give a preset's name or a whole config.json") from e
        return from_huggingface(data, "given") if "model_type" in data else from_preset(data, "given")
    name = named(model)
    if not name:
        raise PlaybookError(
            f"model '{model[:80]}' is not known{did_you_mean(model[:80], MODELS)}{instead or '; or give the text of a config.json'}"
        )
    return MODELS[name]


def layout_answer(
    gpus: int, counts: Mapping[str, int], degrees: dict[str, Any], *, vpp: int, batch: Mapping[str, int], shape: Shape | None = None
) -> LayoutAnswer:
    """The rules that a layout breaks, as `playbook layout check` finds them, what follows from the degrees, and the nearest legal layouts.

    Widths and offers need the whole model's `shape`.
    """
    numbers: dict[str, Any] = {**counts, **degrees, **batch}
    broken = layout.check(gpus=gpus, vpp=vpp, options=Options(sp=degrees["tp"] > 1), shape=shape, **numbers)
    attention = degrees["tp"] * degrees["pp"] * degrees["cp"]
    expert = degrees["etp"] * degrees["ep"] * degrees["pp"]
    asked = shape and Plan(
        shape, gpus=gpus, vpp=vpp, mbs=batch["micro_batch_size"], gbs=batch["global_batch_size"], seq_len=batch["seq_len"], **degrees
    )
    return LayoutAnswer(
        legal=not broken,
        broken=broken,
        dp=None if gpus % attention else gpus // attention,
        edp=None if gpus % expert else gpus // expert,
        min_gpus=layout.min_gpus(**degrees),
        uneven=document.split(asked) if asked and not broken else None,
        nearest=[NearLayout(changes=n.changes) for n in nearest(asked)] if asked and broken else [],
    )


def memory_answer(plan: Plan, hardware: str | None) -> MemoryAnswer:
    """What `playbook layout memory` says, with a verdict where the GPU is named.

    Raises:
        PlaybookError: the plan breaks a rule, or no such GPU is known.
    """
    stages = [StageMemory(**s.row()) for s in memory.estimate(plan)]
    most = max(stages, key=lambda s: s.peak)
    gib = cluster(hardware).memory_gib if hardware else None
    said = memory.verdict(most.peak, gib) if gib else "no GPU is named: give hardware for a verdict"
    return MemoryAnswer(verdict=said, gpu_gib=gib, peak=most.peak, stage=most.stage, stages=stages)


def plan_answer(
    model: str,
    gpus: int,
    hardware: str,
    *,
    seq_len: int,
    global_batch_size: int,
    goal: str,
    backend: str,
    allow: list[str],
    fix: list[str],
    top: int,
) -> PlanAnswer:
    """What `playbook plan` says.

    Raises:
        PlaybookError: the question cannot be asked.
    """
    name = named(model) or "given"
    question = Question(
        shape_of(model),
        name,
        cluster(hardware),
        gpus,
        seq_len,
        global_batch_size,
        goal,
        backend=backend,
        fixed=tuple(fix),
        allow=frozenset(allow),
    )
    found = document.document(explain.answer(question, top))
    kept = ("memory_gib", "tokens_per_s_per_gpu", "mfu", "settings")
    near = found["nearest"]
    return PlanAnswer(
        plans=[PlannedLayout(**{k: p[k] for k in kept}) for p in found["plans"]],
        ties=found["ties"],
        runner_up=found["runner_up"],
        nearest=near and {"settings": near["layout"], "memory_gib": near["memory_gib"], "ways": near["ways"]},
        assumptions=found["assumptions"],
    )
