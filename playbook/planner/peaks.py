"""Peak arithmetic rates of GPUs: what utilisation is a share of."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """A rate that the data sheet names, without sparsity."""

    name: str
    flops_per_s: float
    source: str


_HOPPER = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_AMPERE = "https://www.nvidia.com/en-us/data-center/a100/"
_BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture"
_ADA = "https://www.nvidia.com/en-us/data-center/l40s/"

# The first whose words all occur in the device's name; data sheets give twice these figures where they count sparsity.
_DENSE_BF16: tuple[tuple[tuple[str, ...], Peak], ...] = (
    (("GB300",), Peak("GB300 dense BF16", 2500e12, _BLACKWELL)),
    (("GB200",), Peak("GB200 dense BF16", 2500e12, _BLACKWELL)),
    (("B300",), Peak("B300 dense BF16", 2250e12, _BLACKWELL)),
    (("B200",), Peak("B200 dense BF16", 2250e12, _BLACKWELL)),
    (("H200", "NVL"), Peak("H200 NVL dense BF16", 835.5e12, _H200)),
    (("GH200",), Peak("GH200 dense BF16", 989.5e12, _HOPPER)),
    (("H200",), Peak("H200 SXM dense BF16", 989.5e12, _H200)),
    (("H100", "PCIe"), Peak("H100 PCIe dense BF16", 756.5e12, _HOPPER)),
    (("H100", "NVL"), Peak("H100 NVL dense BF16", 835.5e12, _HOPPER)),
    (("H100",), Peak("H100 SXM dense BF16", 989.5e12, _HOPPER)),
    (("H800",), Peak("H800 dense BF16", 989.5e12, _HOPPER)),
    (("A100",), Peak("A100 dense BF16", 312e12, _AMPERE)),
    (("A800",), Peak("A800 dense BF16", 312e12, _AMPERE)),
    (("L40S",), Peak("L40S dense BF16", 362e12, _ADA)),
)


def dense_bf16(device_name: str) -> Peak | None:
    """The dense BF16 peak of a GPU by the name that its driver gives; None where it is not known.

    Units: floating-point operations per second; one multiply-add is two.
    """
    words_of_name = re.findall("[A-Za-z0-9]+", device_name)  # whole words: an RTX A1000 is no A100
    return next((peak for words, peak in _DENSE_BF16 if all(w in words_of_name for w in words)), None)
