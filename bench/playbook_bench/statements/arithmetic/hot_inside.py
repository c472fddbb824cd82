"""Which axis of parallelism belongs inside the fast interconnect."""

from __future__ import annotations

from dataclasses import replace

from playbook.errors import ConfigError
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan
from playbook.planner.traffic import Sent, boundaries_outside, boundary, outside, per_layer
from playbook_bench.judge.verdict import Statement

_AXES = ("tp", "cp", "ep")


def hot_inside(
    *,
    model: str,
    axis: str,
    degree: int,
    pp: int,
    domain: int,
    fast_bytes_per_s: float,
    slow_bytes_per_s: float,
    seq_len: int = 4096,
    micro_batch_size: int = 1,
) -> Statement:
    """Whether the axis that sends more should have the fast domain: bytes over bandwidth of one microbatch, both ways round.

    Either `axis` (tp, cp or ep) takes consecutive ranks and the pipeline strides over them, or the other way round. Every rank sends its
    pipeline boundary to one neighbour, the axis's bytes evenly to its peers; nothing overlaps.

    Raises:
        ConfigError: an axis, model or layout that is not possible.
    """
    if axis not in _AXES or model not in MODELS:
        raise ConfigError(f"axis '{axis}' of model '{model}': expected an axis of {', '.join(_AXES)} and a model of {', '.join(MODELS)}")
    if domain < 1 or fast_bytes_per_s <= 0 or slow_bytes_per_s <= 0:
        raise ConfigError("a domain and its bandwidths must be positive; change domain or the two bandwidths")
    plan = Plan(MODELS[model], gpus=degree * pp, pp=pp, mbs=micro_batch_size, seq_len=seq_len, options=Options(uneven=True))
    if axis == "tp":
        plan = replace(plan, tp=degree)
    else:
        plan = replace(plan, cp=degree) if axis == "cp" else replace(plan, ep=degree)
    layers = range(plan.require().shape.layers)
    nothing = Sent(0, 0)
    of_axis = sum(per_layer(plan, i).get(axis, nothing).total for i in layers) / pp
    of_pp = boundary(plan).total

    def seconds(axis_stride: int, pp_stride: int) -> float:
        leaves = outside(degree=degree, stride=axis_stride, domain=domain)
        crosses = boundaries_outside(pp=pp, stride=pp_stride, domain=domain)
        out = of_axis * leaves + of_pp * crosses
        return out / slow_bytes_per_s + (of_axis + of_pp - out) / fast_bytes_per_s

    inner, outer = seconds(1, degree), seconds(pp, 1)
    hot_first, cold_first = (inner, outer) if of_axis >= of_pp else (outer, inner)
    figures = {"axis_bytes": of_axis, "pp_bytes": of_pp, "axis_inside_s": inner, "pp_inside_s": outer}
    name = axis if of_axis >= of_pp else "pp"
    sentence = (
        f"{model}, {axis} {degree} x pp {pp}, domains of {domain}: a microbatch sends {of_axis / 1e6:.0f} MB on {axis} and {of_pp / 1e6:.0f} MB"
        f" on pp; with {name} inside the domain that takes {hot_first * 1e3:.2f} ms, with the other one {cold_first * 1e3:.2f} ms"
    )
    return hot_first < cold_first, sentence, figures
