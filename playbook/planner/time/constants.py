"""Constants of step time that no calibration of one GPU holds, each with its spread and its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A figure; `spread` is the standard deviation of its logarithm, `kind` one of measured, published, data sheet, assumed."""

    value: float
    spread: float
    kind: str
    source: str


_FOUR_H200 = "4 x H200, NVLink all to all, torch 2.11: 1 GiB per GPU"

LINK_RING = Constant(328 / 450, 0.1, "measured", f"{_FOUR_H200}, all-gather 328 GB/s of 450")
LINK_ALL_TO_ALL = Constant(334 / 450, 0.15, "measured", f"{_FOUR_H200}, all-to-all 334 GB/s of 450")
LINK_START = Constant(15e-6, 0.4, "published", "NCCL tests on DGX H100: 10 to 20 us for small messages within a node")
NIC_RING = Constant(0.8, 0.15, "published", "NCCL tests between DGX nodes: 75 to 90 % of the adapters' rate in rings")
NIC_ALL_TO_ALL = Constant(0.7, 0.25, "published", "DeepEP, README: 43 to 47 of 50 GB/s; NCCL all-to-all between nodes: 50 to 70 %")
NIC_START = Constant(35e-6, 0.4, "published", "NCCL tests between DGX nodes: 20 to 50 us for small messages")
EP_HIDDEN = Constant(
    0.3655, 0.3, "published", "Megatron Bridge, expert overlap on 16 H100: 36.55 % of communication hidden, 0.11 % without"
)

IN_STEP = Constant(
    0.92, 0.06, "measured", "4 x H200, megatron-core 0.19.2: products inside a step against the same products alone, at lower clocks"
)

# Host seconds of one layer on the calibrated machine, megatron-core with Transformer Engine.
HOST_ATTENTION = (Constant(0.6e-3, 0.4, "measured", "4 x H200"), Constant(0.9e-3, 0.4, "measured", "4 x H200"))
HOST_MLP = (Constant(0.4e-3, 0.4, "measured", "4 x H200"), Constant(0.6e-3, 0.4, "measured", "4 x H200"))
HOST_MOE = (Constant(2.0e-3, 0.4, "measured", "4 x H200"), Constant(2.5e-3, 0.4, "measured", "4 x H200"))
HOST_EXPERT = (
    Constant(0.04e-3, 0.3, "measured", "h200.json, megatron_grouped"),
    Constant(0.11e-3, 0.3, "measured", "h200.json, megatron_grouped"),
)
HOST_COMPILED = Constant(0.4, 0.4, "assumed", "share of the launches that torch.compile leaves")
HOST_GRAPHED = Constant(0.35, 0.3, "assumed", "share of a layer's launches outside the graphs of attention, router and preprocessing")

CPU_ADAM = Constant(16e9, 0.4, "published", "Megatron Bridge, optimizer offload on 16 H100: 3.2 s for 1.9 billion parameters per GPU")
DP_OVERLAP = Constant(0.8, 0.2, "assumed", "share of the backward pass that gradients can travel beside")
HOST_STEP = Constant(5e-3, 0.5, "assumed", "data, logging and the optimizer's launches")
