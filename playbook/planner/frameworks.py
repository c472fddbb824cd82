"""What a training framework implies for a plan: its backend, words that hold unless the layout says otherwise, and the target that its
exports take.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

_ALONE = ("tp=1", "pp=1", "ep=1", "etp=1")
_LAYERS = ("compiled=false", "loss=torch")
"""Layers and loss of transformers as they are: one kernel for each operation, and float32 logits."""


@dataclass(frozen=True)
class Framework:
    """One framework. `implied` are words of a layout; `exports_as` is a target of `playbook plan --export`."""

    backend: str
    exports_as: str
    implied: tuple[str, ...] = ()

    def beside(self, named: Container[str]) -> tuple[str, ...]:
        """The words that it implies where a layout does not name the setting."""
        return tuple(word for word in self.implied if word.partition("=")[0] not in named)


_ZERO = Framework("torch", "deepspeed", ("sharding=zero3", *_LAYERS, *_ALONE))
_FSDP = Framework("torch", "accelerate", ("sharding=fsdp2", *_LAYERS, *_ALONE))
FRAMEWORKS: Mapping[str, Framework] = {
    "megatron-lm": Framework("megatron", "megatron-lm"),
    "megatron-bridge": Framework("megatron", "megatron-bridge"),
    "nemo": Framework("megatron", "megatron-bridge"),
    "torchtitan": Framework("torch", "torchtitan", ("loss=compiled",)),
    "playbook": Framework("megatron", "playbook"),
    "accelerate": _FSDP,
    "deepspeed": _ZERO,
    "swift": _ZERO,
    "axolotl": _ZERO,
    "llamafactory": _ZERO,
    "verl": _FSDP,
}
"""Sources: NeMo Framework trains by Megatron Bridge (github.com/NVIDIA-NeMo/Megatron-Bridge); ms-swift, axolotl and LLaMA-Factory start
transformers' Trainer with
a file of DeepSpeed; verl's actor is FSDP of transformers' layers (`verl/workers/fsdp_workers.py`)."""


def column(word: str) -> Framework:
    """The framework that a table's column `backend` names: `torch` stands for torchtitan, `megatron` or nothing for Megatron-LM."""
    return FRAMEWORKS.get({"torch": "torchtitan"}.get(word, word), FRAMEWORKS["megatron-lm"])
