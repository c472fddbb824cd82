"""What weighs most on two platforms: communication, or launching kernels."""

from __future__ import annotations

from collections.abc import Mapping

from playbook.errors import ConfigError
from playbook.planner import flops, traffic
from playbook.planner.activations import tokens
from playbook.planner.plan import Plan
from playbook_bench.judge.verdict import Statement
from playbook_bench.statements.presets import shape


def platform_walls(
    *, model: str, ep: int, seq_len: int, kernels_per_layer: int, launch_s: float, platforms: Mapping[str, Mapping[str, float]]
) -> Statement:
    """Whether expert communication weighs more against computation on the first platform, and kernel launches more on the second.

    A platform has `peak_flops_per_s`, `domain` (GPUs of one fast interconnect), `fast_bytes_per_s` and `slow_bytes_per_s`. Every rank
    sends to its peers evenly, nothing overlaps, and a launch takes `launch_s` everywhere: only the order of the ratios is of interest.

    Raises:
        ConfigError: not two platforms, or a model or layout that is not possible.
    """
    if len(platforms) != 2:
        raise ConfigError(f"{len(platforms)} platforms; expected two, the one with dearer communication first")
    plan = Plan(shape(model), model, gpus=ep, ep=ep, seq_len=seq_len).require()
    layers = range(plan.shape.layers)
    sent = sum(traffic.per_layer(plan, i).get("ep", traffic.Sent(0, 0)).total for i in layers)
    work = flops.per_token(plan.shape, seq_len) * tokens(plan)
    launches = kernels_per_layer * plan.shape.layers * launch_s
    weights: dict[str, tuple[float, float]] = {}
    for name, p in platforms.items():
        leaves = traffic.outside(degree=ep, stride=1, domain=int(p["domain"]))
        compute = work / p["peak_flops_per_s"]
        moved = sent * (leaves / p["slow_bytes_per_s"] + (1 - leaves) / p["fast_bytes_per_s"])
        weights[name] = (moved / compute, launches / compute)
    first, second = weights.values()
    parts = [f"{name} {moved:.2f} and {launched:.2f}" for name, (moved, launched) in weights.items()]
    sentence = (
        f"{model}, ep {ep}: seconds of expert communication and of kernel launches per second of computation at peak: {'; '.join(parts)}"
    )
    figures = {name: {"communication": moved, "host": launched} for name, (moved, launched) in weights.items()}
    return first[0] > second[0] and first[1] < second[1], sentence, {"platforms": figures}
