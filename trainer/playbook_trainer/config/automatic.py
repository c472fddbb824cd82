"""Resolves the value `auto` of configuration keys for a machine, from the machine's description. Torch-free."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from playbook_trainer.config.tree import TrainerConfig, dump, flatten, neutral, torch_only

# The switches that take a fast path of the torch backend: their values, and the rules by which a fast one is refused. Torch-free.
# `checks` refuses a fast value that breaks a rule; `automatic` takes the fast value where it breaks none. Both ask a configuration by
# dotted keys.

At = Mapping[str, Any]
"""A configuration by dotted keys, and the number of its ranks under `RANKS`, where that is known."""
RANKS = "ranks"


@dataclass(frozen=True)
class Rule:
    """What must not be for a switch to have its fast value."""

    advice: str
    """What is wrong and what to set; `{key}` in it is that key's value."""
    broken: Callable[[At], bool]


@dataclass(frozen=True)
class Switch:
    """A key with a fast and a plain value."""

    fast: Any
    plain: Any
    rules: tuple[Rule, ...] = ()
    chosen: Callable[[At], bool] = lambda at: True
    """Whether `auto` takes the fast value where no rule refuses it, given what the switches before it have become."""

    def refusals(self, key: str, at: At) -> Iterator[str]:
        """A line for each rule that the fast value breaks."""
        for rule in self.rules:
            if rule.broken(at):
                line = rule.advice
                for name in _NAMED:
                    line = line.replace(f"{{{name}}}", str(at[name]))
                yield line.replace("{switch}", key)


_NAMED = ("model.head_dim", "model.num_experts", "model.top_k", "moe.dispatcher")
_TRITON = Rule("{switch} needs a GPU: its kernel is Triton's", lambda at: at["train.device"] == "cpu")
_EXPERTS = Rule("{switch} is about experts, and the model is dense: leave it out", lambda at: not at["model.num_experts"])


def _sent_by(at: At, *dispatchers: str) -> bool:
    return at["parallel.ep"] == 1 or at["moe.dispatcher"] in dispatchers


def _never(at: At) -> bool:
    return False


SWITCHES: Mapping[str, Switch] = {
    # The compiler adds seconds to a start (13.5 for a vision tower, 2 from its cache) and has not shortened a step beside the kernels below
    # (T5: -0.6 % [-9.4, 9.0]); see docs/experiments/claims-on-one-gpu.md.
    "train.compile.vision": Switch(
        True, False, (Rule("{switch}: the model has no vision tower: set it to false", lambda at: not _has_vision(at)),), _never
    ),
    "train.compile.decoder": Switch(True, False, chosen=_never),
    "train.compile.loss": Switch(
        True,
        False,
        (Rule("{switch} compiles no collectives: set it to false where parallel.tp is above 1", lambda at: at["parallel.tp"] > 1),),
        _never,
    ),
    "train.fused_activation": Switch(True, False, (_TRITON,)),
    "train.fused_norms": Switch(
        True,
        False,
        (
            Rule(
                "{switch} takes heads of a power of two, not model.head_dim {model.head_dim}: set it to false",
                lambda at: bool(at["model.head_dim"] & (at["model.head_dim"] - 1)),
            ),
            _TRITON,
        ),
    ),
    "train.fused_loss": Switch(
        True,
        False,
        (
            Rule(
                "train.compile.loss and {switch} are two ways to do one thing: choose one of them",
                lambda at: at["train.compile.loss"] is True,
            ),
            Rule("{switch} works in place on 16-bit logits: set train.dtype: bf16", lambda at: at["train.dtype"] == "fp32"),
            _TRITON,
        ),
    ),
    "moe.fused_permutation": Switch(
        True,
        False,
        (
            _EXPERTS,
            Rule("{switch} serves the dispatcher alltoall, not {moe.dispatcher}", lambda at: not _sent_by(at, "alltoall")),
            _TRITON,
        ),
    ),
    "moe.fused_router": Switch(
        True,
        False,
        (
            Rule("{switch} is a kernel of the router, and the model is dense: set it to false", lambda at: not at["model.num_experts"]),
            Rule(
                "{switch} chooses by score alone: set it to false, or moe.bias_update_rate to 0", lambda at: at["moe.bias_update_rate"] > 0
            ),
            Rule(
                "{switch} reads scores in float32: set moe.router_dtype: fp32, or fused_router: false",
                lambda at: at["moe.router_dtype"] == "bf16",
            ),
            Rule(
                "{switch} chooses up to 16 of 512 experts, not {model.top_k} of {model.num_experts}: set it to false",
                lambda at: at["model.num_experts"] > 512 or at["model.top_k"] > 16,
            ),
            _TRITON,
        ),
    ),
    # Without the kernel, weights in the activation are one more pass over its rows.
    "moe.apply_probs_on": Switch(
        "activation",
        "output",
        (
            _EXPERTS,
            Rule(
                "{switch} activation serves the dispatchers alltoall and allgather, not {moe.dispatcher}",
                lambda at: not _sent_by(at, "alltoall", "allgather"),
            ),
        ),
        lambda at: at["train.fused_activation"] is True,
    ),
    "optimizer.fused": Switch(
        True,
        False,
        (
            Rule(
                "{switch} is a kernel of the GPU, and offload.optimizer keeps the state on the host: choose one of them",
                lambda at: at["offload.optimizer"],
            ),
            _TRITON,
        ),
    ),
    # The plain update of two halves makes the whole weights in memory, piece by piece.
    "optimizer.master_weights": Switch(
        "remainder",
        "fp32",
        (
            Rule(
                "{switch} remainder: its upper halves are the 16-bit weights of the computation: set train.dtype: bf16",
                lambda at: at["train.dtype"] != "bf16",
            ),
            Rule(
                "{switch} remainder: gradients are kept as FSDP reduces them: set parallel.reduce_dtype: bf16",
                lambda at: at["parallel.reduce_dtype"] != "bf16" and at.get(RANKS) != 1,
            ),
            Rule("{switch} remainder: halves are of FSDP's shards: set parallel.fsdp: true", lambda at: not at["parallel.fsdp"]),
            Rule(
                "{switch} remainder: the state on the host is in float32: set offload.optimizer: false", lambda at: at["offload.optimizer"]
            ),
        ),
        lambda at: at["optimizer.fused"] is True,
    ),
}
"""By dotted key, in the order in which `auto` is decided."""


def _has_vision(at: At) -> bool:
    """Whether the model has a vision tower; its size is no key that has a value of its own."""
    return "model.vision.hidden_size" in at


def problems(at: At) -> list[str]:
    """A line for each rule that a fast value in this configuration breaks."""
    return [line for key, switch in SWITCHES.items() if at[key] == switch.fast for line in switch.refusals(key, at)]


_HOPPER_OR_LATER = re.compile(r"\bG?[HB][1-9][0-9]{1,2}", re.IGNORECASE)
"""H100, H200, H20, B200, GB200 and their kin, in the driver's name of a GPU or in that of a profile such as h200x4."""
_CUDNN_WIDTH = 128
"""The largest head for which cuDNN over packed documents has been held against flash."""
_CUDNN_TOKENS = {"text": 8_192, "images": 16_384}
"""The smallest micro-batch in which it has not been the slower one; smaller ones wait for their host,
and Transformer Engine's calls take more of it."""
_KERNEL_VALUES = 2**20
"""The smallest layer's input, in values, for which the kernels are taken: reading fewer takes an H200 less than a microsecond, and starting
a Triton kernel takes the host longer than starting an operator of torch's own.
At 2**14 values kernels have not shortened a step, at 2**23 to a third."""
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
    return Target(gpu, is_installed("transformer_engine"), is_installed("triton"), ranks)


def meant_for(profile: str, ranks: int | None = None) -> Target:
    """The machine of a case's profile, such as `h200x4`: Triton comes with its torch, whatever there is here."""
    return Target(None if profile == "cpu" else profile, is_installed("transformer_engine"), ranks=ranks)


@cache
def is_installed(package: str) -> bool:
    """Whether a package is here, asked without importing it."""
    return importlib.util.find_spec(package) is not None


def resolve(flat: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The configuration (dotted keys) with each `auto` replaced by what it stands for.

    Two keys keep theirs: `data.source`, since the hash of the data speaks for what lies there, and `train.compile.dynamic`,
    where auto is a mode of torch.
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
    resolved = {**flat, **{key: value for key, value in chosen.items() if flat[key] == "auto"}}
    can = has_gpu and target.triton and flat["backend"] == "torch" and _values(flat) >= _KERNEL_VALUES
    for key, switch in SWITCHES.items():
        if resolved[key] == "auto":
            at = {**resolved, RANKS: target.ranks}
            takes = can and switch.chosen(at) and not any(switch.refusals(key, at))
            resolved[key] = switch.fast if takes else switch.plain
    return resolved


def resolved(config: TrainerConfig, target: Target) -> TrainerConfig:
    """The configuration as it is run there: switches, attention and expert products have a value instead of `auto`,
    as far as one value says it.
    """
    return _with(config, decided(config), target)


def switched(config: TrainerConfig, target: Target) -> TrainerConfig:
    """The configuration in which every switch has its value for that machine; with `Target()`, the plain one."""
    return _with(config, SWITCHES, target)


def _with(config: TrainerConfig, keys: Iterable[str], target: Target) -> TrainerConfig:
    flat = flatten(dump(config))
    resolved = resolve(flat, target)
    for key in keys:
        if resolved[key] not in (_EITHER, flat[key]):
            config = _replaced(config, key.split("."), resolved[key])
    return config


def _replaced(part: _Part, path: Sequence[str], value: Any) -> _Part:
    name, *rest = path
    return part.model_copy(update={name: _replaced(getattr(part, name), rest, value) if rest else value})


def decided(config: TrainerConfig) -> list[str]:
    """Keys at `auto` that this configuration's backend and model read, and whose choice is this trainer's."""
    flat = flatten(dump(config))
    keys = [*SWITCHES, "train.attention", *(["moe.experts"] if config.model.num_experts else [])]
    read = keys if config.backend == "torch" else [key for key in SWITCHES if key not in torch_only()]
    return [key for key in read if flat[key] == "auto"]


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
    """Whether `moe.experts: auto` is one grouped product: with Transformer Engine's layers,
    or for the torch backend on a GPU in 16 bits.
    """
    return layers == "transformer_engine" if backend == "megatron" else has_gpu and dtype == "bf16"


def attention(at: At, target: Target) -> str:
    """What `train.attention: auto` is on a GPU.

    On a Hopper or later cuDNN; where documents of a large micro-batch have unequal lengths, through Transformer Engine,
    and flash for those elsewhere.
    """
    if at["train.dtype"] != "bf16":
        return "plain"
    if not _HOPPER_OR_LATER.search(target.gpu or ""):
        return "flash"
    unequal = at["data.pack"] or at["data.pad"] or _has_vision(at)
    serves = at["backend"] == "torch" and target.transformer_engine and not at["train.deterministic"]
    across = at["parallel.cp"] > 1 and at["parallel.cp_comm"] != "ulysses"
    large = at["train.micro_batch_size"] * at["data.seq_len"] >= _CUDNN_TOKENS["images" if _has_vision(at) else "text"]
    return "cudnn" if unequal and serves and large and not across and _widest_head(at) <= _CUDNN_WIDTH else _EITHER


def _values(at: At) -> int:
    """Of a micro-batch's hidden states on one rank."""
    return int(at["train.micro_batch_size"] * at["data.seq_len"] * at["model.hidden_size"] // at["parallel.cp"])


def _widest_head(at: At) -> int:
    tower = at["model.vision.hidden_size"] // at["model.vision.num_heads"] if _has_vision(at) else 0
    return max(at["model.head_dim"], tower)


# The hash of a configuration: equal where the same is computed, whatever the version of the tree. Torch-free.

_WATCHING = ("output", "checkpoint", "tracker", "profile", "train.hang_timeout_s")
"""Keys that the hash leaves out: they say where results go and what observes the run, and change nothing that is computed."""
_SAVING = ("checkpoint.every", "checkpoint.async_save")
"""Keys that count all the same where checkpoints are saved: how often, and whether training waits."""


def config_sha(config: TrainerConfig, target: Target) -> str:
    """A hash of the resolved value of every key that is not neutral, for a run on the machine `target`."""
    line = json.dumps(covered(dump(config), target), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def covered(data: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The keys that the hash covers, dotted, with their values, of a resolved configuration as plain data."""
    plain = neutral()
    whole = {**plain, **flatten(data)}
    resolved = resolve(whole, target)
    watched = {key for key in resolved if any(key == name or key.startswith(f"{name}.") for name in _WATCHING)}
    watched -= set(_SAVING) if resolved["checkpoint.dir"] else set()
    return {key: value for key, value in resolved.items() if key not in watched and (key not in plain or value != plain[key])}
