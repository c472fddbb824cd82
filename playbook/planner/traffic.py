"""What a plan computes and sends, as one table: FLOPs per token, bubble, bytes per layer, per boundary and per step."""

from __future__ import annotations

from typing import Any

from playbook.planner import communication, flops, memory, pipeline
from playbook.planner.plan import Plan


def traffic(plan: Plan) -> dict[str, Any]:
    """FLOPs per token, bubble, and what a rank sends; data-parallel bytes are those of the first stage.

    Raises:
        ConfigError: the plan breaks a rule.
    """
    plan.require()
    kinds = {"MLP layer": 0, "MoE layer": plan.shape.layers - 1}
    if plan.shape.dense_layers in (0, plan.shape.layers):
        kinds = {"layer": 0}
    sent = [
        {"what": kind, "per": f"{name} and microbatch", "forward": found.forward, "backward": found.backward}
        for name, index in kinds.items()
        for kind, found in communication.per_layer(plan, index).items()
    ]
    if plan.pp > 1:
        found = communication.boundary(plan)
        sent.append({"what": "pp", "per": "chunk boundary and microbatch", "forward": found.forward, "backward": found.backward})
    chunks = pipeline.indices(pipeline.split(plan.shape.layers, plan.pp, plan.vpp), plan.pp, 0)
    step = communication.data_parallel(plan, memory.weights(plan, 0, chunks))
    sent.append({"what": "dp", "per": "step", "forward": step["parameters"], "backward": step["gradients"]})
    return {
        "flops_per_token": flops.per_token(plan.shape, plan.seq_len),
        "bubble": pipeline.bubble(pp=plan.pp, microbatches=plan.microbatches, vpp=plan.vpp),
        "unit": "bytes",
        "sent": sent,
    }
