"""The switches that take a fast path of the torch backend: their values, and the rules by which a fast one is refused. Torch-free.

`checks` refuses a fast value that breaks a rule; `automatic` takes the fast value where it breaks none. Both ask a configuration by dotted keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    # (T5: -0.6 % [-13.2, 13.8]); see docs/experiments/claims-on-one-gpu.md.
    "train.compile.vision": Switch(
        True, False, (Rule("{switch}: the model has no vision tower: set it to false", lambda at: not has_vision(at)),), _never
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


def has_vision(at: At) -> bool:
    """Whether the model has a vision tower; its size is no key that has a value of its own."""
    return "model.vision.hidden_size" in at


def problems(at: At) -> list[str]:
    """A line for each rule that a fast value in this configuration breaks."""
    return [line for key, switch in SWITCHES.items() if at[key] == switch.fast for line in switch.refusals(key, at)]
