"""Resolves the value `auto` of configuration keys for a machine, from the machine's description. Torch-free."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_HOPPER_OR_LATER = re.compile(r"\bG?[HB][1-9][0-9]{1,2}", re.IGNORECASE)
"""H100, H200, H20, B200, GB200 and their kin, in the driver's name of a GPU or in that of a profile such as h200x4."""


@dataclass(frozen=True)
class Target:
    """What resolving `auto` needs to know about the machine that a configuration is for."""

    gpu: str | None = None
    """Name of its GPU, such as `NVIDIA H200`; None where ranks have no GPU."""
    transformer_engine: bool = False
    """Whether Transformer Engine is installed."""


def here(gpu: str | None) -> Target:
    """This machine, with that GPU."""
    return Target(gpu, importlib.util.find_spec("transformer_engine") is not None)


def resolve(flat: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The configuration (dotted keys) with each `auto` replaced by what it stands for.

    Two keys keep theirs: `data.source`, since the hash of the data speaks for what lies there, and `train.compile.dynamic`, where auto is a mode of torch.
    """
    has_gpu = target.gpu is not None and flat["train.device"] != "cpu"
    layers = "transformer_engine" if has_gpu and target.transformer_engine else "local"
    layers = layers if flat["megatron.kernels"] == "auto" else flat["megatron.kernels"]
    grouped = grouped_experts(flat["backend"], layers, flat["train.dtype"], has_gpu=has_gpu)
    chosen = {
        "train.device": "cuda" if has_gpu else "cpu",
        "megatron.kernels": layers,
        "moe.experts": "grouped" if grouped else "loop",
        "train.attention": attention(flat["train.dtype"], target.gpu if has_gpu else None),
    }
    return {**flat, **{key: value for key, value in chosen.items() if flat[key] == "auto"}}


def grouped_experts(backend: str, layers: str, dtype: str, *, has_gpu: bool) -> bool:
    """Whether `moe.experts: auto` is one grouped product: with Transformer Engine's layers, or for the torch backend on a GPU in 16 bits."""
    return layers == "transformer_engine" if backend == "megatron" else has_gpu and dtype == "bf16"


def attention(dtype: str, gpu: str | None) -> str:
    """What `train.attention: auto` is. On a Hopper or later it differs between micro-batches: cuDNN where all documents have one length, else flash."""
    if gpu is None or dtype != "bf16":
        return "plain"
    return "cudnn or flash" if _HOPPER_OR_LATER.search(gpu) else "flash"
