"""How far a predicted time may be off: the spread of each part's constants, weighted by what the part takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot

from playbook.planner.options import FLEX
from playbook.planner.plan import Plan
from playbook.planner.time import constants as c
from playbook.planner.time.cluster import Cluster

QUANTILE = 1.2816
"""Standard deviations of a normal distribution that 80 % lie within."""

_LAW = 0.05
"""Of a product's law beside its calibration's rows; of attention and of grouped products, whose shapes are fewer, twice and three times as
much."""
_BYTES = 0.25
"""Of counted bytes: which kernels a backend fuses is not known."""
_RESTS_ON = {
    "products": (_LAW, c.IN_STEP.spread),
    "grouped": (2 * _LAW, c.IN_STEP.spread),
    "attention": (3 * _LAW, c.IN_STEP.spread),
    "elementwise": (_BYTES,),
    "host": (c.HOST_MOE[0].spread, c.HOST_GRAPHED.spread),
    "tp": (c.LINK_RING.spread, c.LINK_START.spread / 2),
    "ep": (c.NIC_ALL_TO_ALL.spread, c.EP_HIDDEN.spread / 2),
    "cp": (c.NIC_RING.spread, _BYTES),
    "pp": (c.NIC_RING.spread, c.LINK_START.spread / 2),
    "bubble": (2 * _LAW, c.IN_STEP.spread),
    "offload": (_BYTES,),
    "dp": (c.NIC_RING.spread, c.DP_OVERLAP.spread, _BYTES),
    "optimizer": (_BYTES, c.HOST_STEP.spread / 2),
    "stragglers": (c.STRAGGLERS.spread,),
}
"""Standard deviations of the logarithms of what each part rests on: the constants of a part are off together, those of different parts by
themselves."""
_PART = {name: hypot(*spreads) for name, spreads in _RESTS_ON.items()}
_HOST_KNOWN = 0.5
"""What is left of the host's spread where its speed was measured or published."""
_COMMON = 0.05
_COMMON_EXPERTS = 0.18
"""What all parts share: clocks and versions of software, whose ways with experts differ more."""
_ORDER = 0.02
"""What two runs of one kind differ by at least."""


def deviation(parts: Mapping[str, float], plan: Plan, cluster: Cluster) -> float:
    """Standard deviation of the logarithm of the sum."""
    total = sum(parts.values())
    sure = {"host": _HOST_KNOWN} if cluster.host_known else {}
    of_parts = hypot(*(_PART[name] * sure.get(name, 1.0) * seconds / total for name, seconds in parts.items()))
    return hypot(of_parts, _COMMON_EXPERTS if plan.shape.experts else _COMMON, cluster.transferred)


def between(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Standard deviation of the logarithm of the ratio of two plans' times on one cluster: what both have in the same share cancels."""
    all_of, all_of_other = sum(one.values()), sum(other.values())
    apart = (_PART[n] * (one.get(n, 0.0) / all_of - other.get(n, 0.0) / all_of_other) for n in _PART)
    return hypot(*apart, _ORDER)


def weights(parts: Mapping[str, float]) -> tuple[float, ...]:
    """What each part's constants contribute to the spread, in one order for all plans."""
    total = sum(parts.values())
    return tuple(spread * parts.get(name, 0.0) / total for name, spread in _PART.items())


def has_experts(weighted: Sequence[float]) -> bool:
    """Whether a step of these `weights` multiplies experts' matrices."""
    return weighted[tuple(_PART).index("grouped")] > 0


def crossing(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The kinds of parallelism that send in every layer and reach beyond one NVLink domain, such as `EP 16`."""
    reach = {"TP": (plan.tp, plan.tp), "EP": (plan.ep, plan.ep * plan.etp)}
    return tuple(f"{name} {degree}" for name, (degree, ranks) in reach.items() if degree > 1 and ranks > cluster.domain)


def _crossing(plan: Plan, cluster: Cluster) -> list[str]:
    """At which share of an adapter's rate they are taken to send, and who measured it."""
    names = crossing(plan, cluster)
    if not names:
        return []
    rate = c.NIC_DISPATCH if names[-1].startswith("EP") and plan.options.dispatcher in FLEX else c.NIC_ALL_TO_ALL
    return [
        f"{' and '.join(names)} cross{'es' if len(names) == 1 else ''} NVLink domains of {cluster.domain}: {rate.value:.0%} of an "
        f"adapter's rate, {rate.kind};"
        " no run here had several nodes"
    ]


def assumptions(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What the prediction takes for granted."""
    sentences = (
        [f"{cluster.name}: efficiencies measured on an H200, scaled to what this GPU's products reach"] if cluster.transferred else []
    )
    sentences += [*cluster.notes, *cluster.about_network(plan.gpus), *_crossing(plan, cluster)]
    sentences.append("gradients and parameters travel beside the passes")
    searches = plan.options.backend == "megatron" and plan.options.sharding != "fsdp2" and not plan.options.fp8
    if plan.shape.experts and plan.even_rows and searches:
        more = sum(x.value for x in c.HOST_SEARCH)
        cost = f"cuBLAS looks for kernels, up to {1e3 * more:.1f} ms a layer for each expert on a GPU"
        sentences.append(f"every expert gets equally many tokens; where they differ, {cost}")
    if not plan.options.graphs:
        sentences.append("no CUDA graphs: each layer costs the host time")
    if plan.options.backend == "torch" and not plan.options.compiled:
        sentences.append("layers as transformers has them, one kernel for each operation: no run has checked their time")
    if not cluster.host_known:
        speed = "" if cluster.host_speed == 1 else f"{cluster.host_speed:g} times "
        sentences.append(f"{cluster.name}: a host {speed}as fast as the calibrated one, which nobody measured")
    if plan.shape.vision is not None:
        sentences.append("text alone: the vision tower's time is left out")
    return tuple(sentences)
