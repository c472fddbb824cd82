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
LINK_START = Constant(
    15e-6, 0.4, "assumed", "small messages within a node take 5 to 20 us; where links were measured, a gather takes what they show"
)
NIC_RING = Constant(0.8, 0.15, "assumed", "rings between nodes reach 75 to 90 % of the adapters; not measured here")
NIC_ALL_TO_ALL = Constant(0.7, 0.25, "assumed", "all-to-all between nodes reaches 50 to 90 % of the adapters; not measured here")
LINK_DISPATCH = Constant(
    0.7,
    0.1,
    "published",
    "DeepEP, docs/legacy.md and README: 153 to 158 GB/s on H800s of 200, 726 to 740 on Blackwell of 900, 8 ranks, a rank's own eighth "
    "counted",
)
NIC_DISPATCH = Constant(
    0.88, 0.1, "published", "DeepEP, docs/legacy.md: 58 and 51 GB/s at 32 and 64 ranks, own node counted: 44 and 45 of 50 GB/s sent"
)
NIC_START = Constant(35e-6, 0.4, "assumed", "small messages between nodes take 15 to 50 us; not measured here")
EP_HIDDEN = Constant(
    0.6,
    0.3,
    "assumed",
    "chosen in sight of the published runs between 37 % (Megatron Bridge, expert overlap on 16 H100) and nearly all (DeepSeek-V3 report, "
    "DualPipe), of what compute covers",
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
    "1 x H200, record 01M81X74KHAEM6KTWH9NC400MT (megatron-fp8-blockwise-one-gpu), 8 rows a micro-batch: its BF16 step against its "
    "products alone",
)

# Host seconds of one layer on the calibrated machine, megatron-core with Transformer Engine. With them, and kernels beside the host as the
# root of
# the sum of squares, 14 one-GPU runs of 4 layers and 8 runs of 24 layers on 4 H200s come out right; records megatron-*-one-gpu.
_ONE_GPU = (
    "1 x H200, records 01M83P8QZ9QY72GFSPMCMM1ZWE (megatron-graphs-one-gpu) and 01M80XDY4HM4JPAGXC65N7GV41 (megatron-recompute-one-gpu):"
    " 17 to 20 ms for a layer with 32 experts"
)
_DENSE = (
    "solved from vTrain's table, which judges the planner too: 3.4 ms a layer of Megatron-DeepSpeed with its forward pass twice, "
    "micro-batches of"
    " 1,024 tokens, stragglers included; how it splits between attention and MLP, forward and backward pass is assumed"
)
HOST_ATTENTION = (Constant(0.55e-3, 0.4, "published", _DENSE), Constant(0.8e-3, 0.4, "published", _DENSE))
HOST_MLP = (Constant(0.36e-3, 0.4, "published", _DENSE), Constant(0.54e-3, 0.4, "published", _DENSE))
HOST_MOE = (Constant(4.0e-3, 0.4, "measured", _ONE_GPU), Constant(5.0e-3, 0.4, "measured", _ONE_GPU))
HOST_EXPERT = (
    Constant(0.04e-3, 0.3, "measured", "h200.json, megatron_grouped: every expert has equally many rows"),
    Constant(0.11e-3, 0.3, "measured", "h200.json, megatron_grouped: every expert has equally many rows"),
)
_UNEVEN = (
    "fitted to runs of text with experts, megatron-core on 2 and 4 H200s and on 4 H100s whose host was calibrated, "
    "docs/parity/planned-layouts-runs.jsonl"
    " (15 % off in the root of the mean square): cuBLAS looks for a kernel for each product of a size that it does not remember; a trace "
    "of 24 layers on"
    " 2 H200s splits it between the passes"
)
HOST_SEARCH = (Constant(0.2e-3, 0.3, "measured", _UNEVEN), Constant(0.45e-3, 0.3, "measured", _UNEVEN))
SIZES_REMEMBERED = Constant(
    6.5, 0.5, "measured", f"{_UNEVEN}: products of a step over the mean rows of one, at which every other search is spared"
)
HOST_MLA = Constant(
    1.6, 0.3, "assumed", "launches of compressed attention over those of plain: two products, a norm and a concatenation more for each side"
)
HOST_TORCH = Constant(0.5, 0.4, "assumed", "FSDP2 with compiled layers launches about half of megatron-core's kernels")
HOST_GRAPHED = Constant(
    0.75, 0.3, "measured", "1 x H200, record 01M83P8QZ9QY72GFSPMCMM1ZWE (megatron-graphs-one-gpu): 12 % faster; 4 x H200: 4 %"
)

CPU_ADAM = Constant(16e9, 0.4, "published", "Megatron Bridge, optimizer offload on 16 H100: 3.2 s for 1.9 billion parameters per GPU")
DP_OVERLAP = Constant(0.8, 0.2, "assumed", "share of the backward pass that gradients can travel beside")
HOST_STEP = Constant(5e-3, 0.5, "assumed", "data, logging and the optimizer's launches")
HOST_FP8 = Constant(1.4, 0.3, "assumed", "launches that scale and cast each operand block by block; of other recipes no run shows it")
STRAGGLERS = Constant(
    0.07, 0.4, "measured", "4 x H200, six runs of 24 layers: 6 to 10 % longer than one GPU's figures and their communication"
)
FLASH_1 = Constant(
    1.7,
    0.2,
    "assumed",
    "a little less than what flash-attention's own page says of its version 2.0, a complete rewrite: 2x faster",
)
