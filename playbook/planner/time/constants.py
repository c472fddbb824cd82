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
LINK_START = Constant(15e-6, 0.4, "assumed", "small messages within a node take 5 to 20 us; not measured here")
NIC_RING = Constant(0.8, 0.15, "assumed", "rings between nodes reach 75 to 90 % of the adapters; not measured here")
NIC_ALL_TO_ALL = Constant(0.7, 0.25, "assumed", "all-to-all between nodes reaches 50 to 90 % of the adapters; not measured here")
LINK_DISPATCH = Constant(0.9, 0.1, "published", "DeepEP, README: 153 to 158 GB/s within a node, of 160 that NVLink reaches there")
NIC_DISPATCH = Constant(
    0.88, 0.1, "published", "DeepEP, README: 58 and 51 GB/s at 32 and 64 ranks, own node counted: 44 and 45 of 50 GB/s sent"
)
NIC_START = Constant(35e-6, 0.4, "assumed", "small messages between nodes take 15 to 50 us; not measured here")
EP_HIDDEN = Constant(
    0.6,
    0.3,
    "assumed",
    "between 37 % (Megatron Bridge, expert overlap on 16 H100) and nearly all (DeepSeek-V3 report, DualPipe), of what compute covers",
)
SCAN_RATE = Constant(
    78e12,
    0.5,
    "assumed",
    "a quarter of an A100's peak, on every GPU: Triton kernels of small products that use nothing that later GPUs added",
)

IN_STEP = Constant(
    0.97,
    0.04,
    "measured",
    "1 x H200, record megatron-fp8-blockwise-one-gpu, 8 rows a micro-batch: its BF16 step against its products alone",
)

# Host seconds of one layer on the calibrated machine, megatron-core with Transformer Engine. With them, and kernels beside the host as the root of
# the sum of squares, 14 one-GPU runs of 4 layers and 8 runs of 24 layers on 4 H200s come out right; records megatron-*-one-gpu.
_ONE_GPU = "1 x H200, records megatron-graphs-one-gpu and megatron-recompute-one-gpu: 17 to 20 ms for a layer with 32 experts"
_DENSE = (
    "vTrain, iterations of one micro-batch of 1,024 tokens: 3.4 ms a layer of Megatron-LM with its forward pass twice, stragglers included"
)
HOST_ATTENTION = (Constant(0.55e-3, 0.4, "published", _DENSE), Constant(0.8e-3, 0.4, "published", _DENSE))
HOST_MLP = (Constant(0.36e-3, 0.4, "published", _DENSE), Constant(0.54e-3, 0.4, "published", _DENSE))
HOST_MOE = (Constant(4.0e-3, 0.4, "measured", _ONE_GPU), Constant(5.0e-3, 0.4, "measured", _ONE_GPU))
HOST_EXPERT = (
    Constant(0.04e-3, 0.3, "measured", "h200.json, megatron_grouped"),
    Constant(0.11e-3, 0.3, "measured", "h200.json, megatron_grouped"),
)
HOST_MLA = Constant(
    1.6, 0.3, "assumed", "launches of compressed attention over those of plain: two products, a norm and a concatenation more for each side"
)
HOST_TORCH = Constant(0.5, 0.4, "assumed", "FSDP2 with compiled layers launches about half of megatron-core's kernels")
HOST_GRAPHED = Constant(0.75, 0.3, "measured", "1 x H200, record megatron-graphs-one-gpu: 10 % faster; 4 x H200: 4 %")

CPU_ADAM = Constant(16e9, 0.4, "published", "Megatron Bridge, optimizer offload on 16 H100: 3.2 s for 1.9 billion parameters per GPU")
DP_OVERLAP = Constant(0.8, 0.2, "assumed", "share of the backward pass that gradients can travel beside")
HOST_SEND = Constant(
    0.5e-3,
    0.5,
    "assumed",
    "Megatron-LM, p2p_communication.py: the host waits for the GPU after each message of the plain schedule, then fills its queue again",
)
HOST_STEP = Constant(5e-3, 0.5, "assumed", "data, logging and the optimizer's launches")
HOST_FP8 = Constant(1.4, 0.3, "assumed", "launches that scale and cast each operand, where no fused kernel does")
STRAGGLERS = Constant(
    0.07, 0.4, "measured", "4 x H200, six runs of 24 layers: 6 to 10 % longer than one GPU's figures and their communication"
)
FLASH_1 = Constant(
    1.7,
    0.2,
    "published",
    "FlashAttention-2, arXiv 2307.08691: about twice as fast as the first version, less beside Triton's",
)
