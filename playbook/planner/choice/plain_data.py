"""An answer as plain data, as words of settings, and as settings of the trainer; why one plan lost to another, and which two to run where
times alone cannot tell.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

from playbook.planner import pipeline
from playbook.planner.choice import space
from playbook.planner.choice.routing import routing_share
from playbook.planner.choice.search import Answer, Choice
from playbook.planner.memory import GIB
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan, idle
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.step import network_share

PARTS = {
    "products": "matrix products", "grouped": "experts' products", "attention": "attention", "elementwise": "elementwise kernels",
    "host": "waiting for the host", "tp": "tensor-parallel transfers", "ep": "expert transfers", "cp": "context-parallel transfers",
    "pp": "transfers between stages", "bubble": "waiting for the pipeline", "dp": "gradients and weights", "optimizer": "the optimizer",
    "offload": "transfers to the host", "stragglers": "waiting for the slowest rank",
}  # fmt: skip
"""Words for the parts of a step's time."""


def lost(best: Choice, other: Choice, most: int = 2) -> str:
    """Where the slower plan spends more, by parts, in the share of a step."""
    whole = other.time.seconds.value
    more = {k: other.time.parts.get(k, 0.0) - best.time.parts.get(k, 0.0) for k in PARTS}
    worst = sorted((k for k in more if more[k] > 0.005 * whole), key=lambda k: -more[k])[:most]
    slower = other.time.seconds.value / best.time.seconds.value - 1
    differences = " and ".join(f"{PARTS[k]} (+{more[k] / whole:.0%} of its step)" for k in worst)
    return f"{slower:.1%} slower: more {differences}" if differences else f"{slower:.1%} slower"


def next_run(answer: Answer) -> tuple[Choice, Choice, str] | None:
    """Two plans among the ties that differ most in what decides, and the part that does; None where nothing ties."""
    if len(answer.tied_indices) < 2:
        return None
    best, *others = (answer.choices[i] for i in answer.tied_indices)
    other, part = max(product(others, PARTS), key=lambda each: abs(_share(best, each[1]) - _share(each[0], each[1])))
    return best, other, part


def _share(choice: Choice, part: str) -> float:
    return choice.time.parts.get(part, 0.0) / choice.time.seconds.value


SCHEMA = "plan/1"
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs", "gbs", "seq_len")
_WIDTHS = ("grad_bytes", "master_bytes", "moment_bytes", "loss")


def words(plan: Plan) -> list[str]:
    """The words that make `playbook layout` judge the plan: every setting with an effect that is not its default, and chunks where others
    would be taken for none.
    """
    plain = {f.name: f.default for f in fields(Plan)}
    whole = MODELS.get(plan.model, plan.shape)
    cut = [f"{k}={getattr(plan.shape, k)}" for k in ("layers", "experts") if getattr(plan.shape, k) != getattr(whole, k)]
    shown = {k for k in (*_DEGREES, *_WIDTHS) if getattr(plan, k) != plain[k]} | ({"vpp"} if space.chunks(plan)[0] > 1 else set())
    settings = [f"gpus={plan.gpus}", *cut, *(f"{k}={getattr(plan, k)}" for k in (*_DEGREES, *_WIDTHS) if k in shown)]
    settings += [f"imbalance={plan.imbalance:.4g}"] if plan.imbalance != 1 else []
    usual = Options()
    for f in fields(Options):
        value = getattr(plan.options, f.name)
        if value != getattr(usual, f.name):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)
            settings.append(f"{f.name}={text}")
    return [word for word in settings if not idle(plan, [word.partition("=")[0]])]


def layout(plan: Plan) -> dict[str, Any]:
    """Degrees, batch and options by name, derived degrees included."""
    keys = ("model", "gpus", *_DEGREES[:7], "dp", "edp", "seq_len", "microbatches", "grad_bytes", "master_bytes", "moment_bytes")
    return {k: getattr(plan, k) for k in keys} | {"gbs": plan.global_batch} | _options(plan.options)


def _options(options: Options) -> dict[str, Any]:
    usual = Options()
    chosen = {f.name: getattr(options, f.name) for f in fields(Options)}
    always = ("backend", "sharding", "dispatcher", "recompute")
    return {k: list(v) if isinstance(v, tuple) else v for k, v in chosen.items() if k in always or v != getattr(usual, k)}


def split(plan: Plan) -> list[list[int]] | None:
    """Decoder layers of each stage, chunk by chunk, where they are not alike; None where they are."""
    sizes = pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return [sizes[stage :: plan.pp] for stage in range(plan.pp)] if len(set(sizes)) > 1 else None


def pipeline_string(plan: Plan) -> str | None:
    """The chunks of an uneven pipeline as megatron-core's `--pipeline-model-parallel-layout` takes them; None where they are alike."""
    sizes = pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return pipeline.string(sizes, plan.shape.mtp) if len(set(sizes)) > 1 else None


def document(answer: Answer, published: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of `playbook plan --json` and of the tool `plan_layout`, with the nearest published runs.

    Units: GiB, tokens per second and GPU, seconds; `network_share` is what of a step the network between nodes costs, `routing_share` what
    uneven routing does.
    """
    assumed = [*dict.fromkeys(a for c in answer.choices for a in c.time.assumptions)]
    assumed += [f"anchored: {answer.anchored}"] if answer.anchored else []
    measure = next_run(answer)
    question = answer.question
    return {
        "schema": SCHEMA,
        "question": {
            "model": question.model, "hardware": question.cluster.name, "gpus": question.gpus, "seq_len": question.seq_len,
            "gbs": question.global_batch, "goal": question.goal, "backend": question.backend, "allow": sorted(question.allow),
            "fix": list(question.fixed), "memory_gib": question.capacity / GIB,
        },
        "published": published,
        "plans": [_row(c, question.cluster) for c in answer.choices],
        "ties": [i + 1 for i in answer.tied_indices],
        "runner_up": lost(answer.choices[0], answer.choices[1]) if len(answer.choices) > 1 else None,
        "measure_next": measure and {"plans": [words(measure[0].plan), words(measure[1].plan)], "decides": measure[2]},
        "counts": vars(answer.counts),
        "nearest": answer.obstacle
        and {
            "layout": layout(answer.obstacle.plan), "memory_gib": answer.obstacle.stage.peak / GIB, "stage": answer.obstacle.stage.row(),
            "ways": list(answer.obstacle.ways),
        },
        "broken": list(answer.broken_rules),
        "assumptions": [*assumed, "memory is the estimated peak of allocated bytes; the driver and the allocator take more"],
    }  # fmt: skip


def _row(choice: Choice, cluster: Cluster) -> dict[str, Any]:
    """One plan as plain data. Units: GiB, tokens per second and GPU, seconds; shares are of a step."""
    speed = choice.time.tokens_per_s_per_gpu
    return {
        "layout": layout(choice.plan),
        "fits": True,
        "memory_gib": choice.peak / GIB,
        "tokens_per_s_per_gpu": {"value": speed.value, "low": speed.low, "high": speed.high},
        "mfu": choice.time.mfu,
        "tflops_per_gpu": choice.time.tflops_per_gpu,
        "seconds": choice.time.seconds.value,
        "parts": dict(choice.time.parts),
        "network_share": network_share(choice.plan, cluster),
        "routing_share": routing_share(choice.plan, cluster),
        "stages": [{"stage": s.number, "layers": s.layers, "peak_gib": s.peak / GIB} for s in choice.stages],
        "uneven": split(choice.plan),
        "pipeline_layout": pipeline_string(choice.plan),
        "settings": words(choice.plan),
    }
