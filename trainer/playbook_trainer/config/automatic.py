"""Resolves the value `auto` of configuration keys for a machine, from the machine's description. Torch-free."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from playbook_trainer.config.neutral import torch_only
from playbook_trainer.config.switches import RANKS, SWITCHES, At, has_vision
from playbook_trainer.config.tree import TrainerConfig, dump, flatten

_HOPPER_OR_LATER = re.compile(r"\bG?[HB][1-9][0-9]{1,2}", re.IGNORECASE)
"""H100, H200, H20, B200, GB200 and their kin, in the driver's name of a GPU or in that of a profile such as h200x4."""
_CUDNN_WIDTH = 128
"""The largest head for which cuDNN over packed documents has been held against flash."""
_CUDNN_TOKENS = {"text": 8_192, "images": 16_384}
"""The smallest micro-batch in which it has not been the slower one; smaller ones wait for their host, and Transformer Engine's calls take more of it."""
_KERNEL_VALUES = 2**20
"""The smallest layer's input, in values, for which the kernels are taken: reading fewer takes an H200 less than a microsecond, and starting a Triton
kernel takes the host longer than starting an operator of torch's own. At 2**14 values kernels have not shortened a step, at 2**23 to a third."""
_Part = TypeVar("_Part", bound=BaseModel)
_EITHER = "cudnn or flash"
"""No value of the key: it differs between micro-batches."""


@dataclass(frozen=True)
class Target:
    """What resolving `auto` needs to know about the machine that a configuration is for."""

    gpu: str | None = None
    """Name of its GPU, such as `NVIDIA H200`; None where ranks have no GPU."""
    transformer_engine: bool = False
    """Whether Transformer Engine is installed."""
    triton: bool = True
    """Whether Triton is installed; torch brings it wherever it is built for GPUs."""
    ranks: int | None = None
    """How many ranks train, if that is known: one alone reduces no gradients."""


def here(gpu: str | None, ranks: int) -> Target:
    """This machine, with that GPU for each of so many ranks."""
    return Target(gpu, _is_installed("transformer_engine"), _is_installed("triton"), ranks)


def meant_for(profile: str, ranks: int | None = None) -> Target:
    """The machine of a case's profile, such as `h200x4`: Triton comes with its torch, whatever there is here."""
    return Target(None if profile == "cpu" else profile, _is_installed("transformer_engine"), ranks=ranks)


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


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
        "train.attention": attention(flat, target) if has_gpu else "plain",
    }
    found = {**flat, **{key: value for key, value in chosen.items() if flat[key] == "auto"}}
    can = has_gpu and target.triton and flat["backend"] == "torch" and _values(flat) >= _KERNEL_VALUES
    for key, switch in SWITCHES.items():
        if found[key] == "auto":
            at = {**found, RANKS: target.ranks}
            takes = can and switch.chosen(at) and not any(switch.refusals(key, at))
            found[key] = switch.fast if takes else switch.plain
    return found


def resolved(config: TrainerConfig, target: Target) -> TrainerConfig:
    """The configuration as it is run there: switches, attention and expert products have a value instead of `auto`, as far as one value says it."""
    return _with(config, decided(config), target)


def switched(config: TrainerConfig, target: Target) -> TrainerConfig:
    """The configuration in which every switch has its value for that machine; with `Target()`, the plain one."""
    return _with(config, SWITCHES, target)


def _with(config: TrainerConfig, keys: Iterable[str], target: Target) -> TrainerConfig:
    flat = flatten(dump(config))
    found = resolve(flat, target)
    for key in keys:
        if found[key] not in (_EITHER, flat[key]):
            config = _replaced(config, key.split("."), found[key])
    return config


def _replaced(part: _Part, path: Sequence[str], value: Any) -> _Part:
    name, *rest = path
    return part.model_copy(update={name: _replaced(getattr(part, name), rest, value) if rest else value})


def decided(config: TrainerConfig) -> list[str]:
    """Keys at `auto` that this configuration's backend and model read, and whose choice is this trainer's."""
    flat = flatten(dump(config))
    own = [*SWITCHES, "train.attention", *(["moe.experts"] if config.model.num_experts else [])]
    keys = own if config.backend == "torch" else [key for key in SWITCHES if key not in torch_only()]
    return [key for key in keys if flat[key] == "auto"]


def told(config: TrainerConfig, target: Target) -> str:
    """One line on what `auto` stands for there; empty where nothing is left to it."""
    flat, keys = resolve(flatten(dump(config)), target), decided(config) if config.backend == "torch" else []
    idle = () if config.model.num_experts else ("moe.",)
    idle = idle if config.model.vision is not None else (*idle, "train.compile.vision")
    keys = [key for key in keys if not key.startswith(idle)]
    fast = [key for key in keys if key in SWITCHES and flat[key] == SWITCHES[key].fast]
    slow = [key for key in keys if key in SWITCHES and key not in fast]
    parts = [f"{key} {flat[key]}" for key in keys if key not in SWITCHES]
    parts += [f"fast {', '.join(fast)}"] if fast else []
    parts += [f"plain {', '.join(slow) if fast else 'all switches'}"] if slow else []
    return f"auto on {target.gpu or 'the CPU'}: {'; '.join(parts)}" if parts else ""


def grouped_experts(backend: str, layers: str, dtype: str, *, has_gpu: bool) -> bool:
    """Whether `moe.experts: auto` is one grouped product: with Transformer Engine's layers, or for the torch backend on a GPU in 16 bits."""
    return layers == "transformer_engine" if backend == "megatron" else has_gpu and dtype == "bf16"


def attention(at: At, target: Target) -> str:
    """What `train.attention: auto` is on a GPU.

    On a Hopper or later cuDNN; where documents of a large micro-batch have unequal lengths, through Transformer Engine, and flash for those elsewhere.
    """
    if at["train.dtype"] != "bf16":
        return "plain"
    if not _HOPPER_OR_LATER.search(target.gpu or ""):
        return "flash"
    unequal = at["data.pack"] or at["data.pad"] or has_vision(at)
    serves = at["backend"] == "torch" and target.transformer_engine and not at["train.deterministic"]
    across = at["parallel.cp"] > 1 and at["parallel.cp_comm"] != "ulysses"
    large = at["train.micro_batch_size"] * at["data.seq_len"] >= _CUDNN_TOKENS["images" if has_vision(at) else "text"]
    return "cudnn" if unequal and serves and large and not across and _widest_head(at) <= _CUDNN_WIDTH else _EITHER


def _values(at: At) -> int:
    """Of a micro-batch's hidden states on one rank."""
    return int(at["train.micro_batch_size"] * at["data.seq_len"] * at["model.hidden_size"] // at["parallel.cp"])


def _widest_head(at: At) -> int:
    tower = at["model.vision.hidden_size"] // at["model.vision.num_heads"] if has_vision(at) else 0
    return max(at["model.head_dim"], tower)
