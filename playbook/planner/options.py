"""What is chosen beside the degrees of a layout, the names that each choice takes, and which choices a training framework implies."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

FLEX = frozenset({"flex", "deepep", "hybridep", "ncclep"})
DISPATCHERS = frozenset({"allgather", "alltoall"}) | FLEX
BACKENDS = frozenset({"megatron", "torch"})
ATTENTION = frozenset({"cudnn", "flash1", "flash2", "unfused"})
RECOMPUTE = frozenset(
    {"full", "selective", "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"}
)
GRAPH_MODULES = frozenset({"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"})
CP_COMM = frozenset({"p2p", "all_gather", "a2a", "a2a+p2p"})


class Sharded(NamedTuple):
    """What the ranks of data parallelism share out instead of each having it whole."""

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False


SHARDING: Mapping[str, Sharded] = {
    "none": Sharded(),
    "optimizer": Sharded(optimizer=True),
    "zero1": Sharded(optimizer=True),
    "zero2": Sharded(optimizer=True, gradients=True),
    "zero3": Sharded(True, True, True),
    "fsdp": Sharded(True, True, True),
    "fsdp2": Sharded(True, True, True),
}
"""Source of the stages: ZeRO, arXiv 1910.02054, section 5."""
DEEPSPEED = frozenset({"zero1", "zero2", "zero3"})
"""With the torch backend, those of DeepSpeed: bf16 weights, and float32 ones that belong to the optimizer."""
SHARDING_WORDS: Mapping[str, Mapping[str, str]] = {
    "megatron": {"ddp": "none", "zero1": "optimizer", "zero3": "fsdp", "hsdp": "fsdp"},
    "torch": {"ddp": "none", "fsdp": "fsdp2", "hsdp": "fsdp2"},
}
"""By backend, what other words for sharding stand for. `hsdp` shards within a node, and nodes have copies (`optimizer_instances`)."""
HYBRID = "hsdp"
NODE = 8
"""Ranks that `hsdp` shards over, where `optimizer_instances` does not say how many copies there are."""
LORA_TARGETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
    "experts": (),
}
"""Groups of matrices that adapters stand beside, with the single ones of each: dense and shared MLPs have those of `mlp`."""
BASES = frozenset({"nf4"})
OFFLOAD_MODULES = frozenset({"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"})
FP8 = frozenset({"blockwise", "mxfp8", "tensorwise", "delayed"})
LABELS: Mapping[str, frozenset[str]] = {
    "backend": BACKENDS,
    "lora_targets": frozenset(LORA_TARGETS) | {name for group in LORA_TARGETS.values() for name in group},
    "base": BASES,
    "frozen": frozenset({"decoder", "vision"}),
    "dispatcher": DISPATCHERS,
    "cp_comm": CP_COMM,
    "sharding": frozenset(SHARDING) | SHARDING_WORDS["torch"].keys(),
    "attention": ATTENTION,
    "recompute": RECOMPUTE,
    "graphs": GRAPH_MODULES | {"full_iteration"},
    "fp8": FP8,
    "offload_modules": OFFLOAD_MODULES,
}
"""The names that each option takes."""


@dataclass(frozen=True)
class Options:
    """What is chosen beside the degrees. The defaults are silent: a rule about something that nobody chose is not checked.

    `sharding` says what data parallelism shards: `none`, the `optimizer` state, its gradients too (`zero2`), or everything by Megatron-FSDP
    (`fsdp`) or torch's
    `fsdp2`; with the torch backend `zero1` to `zero3` are DeepSpeed's. `uneven` is a pipeline layout that lists the layers of each
    stage; unless it is refused, one is found where the layers do not divide. `graphs` are modules; `full_iteration` stands alone.
    The backend `torch` is FSDP2 as torchtitan has it: float32 weights, gathered in bf16; recompute `selective` keeps the outputs of
    attention and
    of every second matrix product. Its layers are `compiled`, or as transformers has them, one kernel for each operation. `offload` sends
    activations of whole layers to the host, `offload_percent` says of how many; of the optimizer's
    state `optimizer_offload` percent live there. `fp8_params` leaves no bf16 copy of 8-bit weights. `lora` is the rank of adapters beside
    frozen weights, `lora_targets` the matrices that have one (none named: attention and MLPs, and with Megatron the experts, which share
    one); a frozen
    `base` is stored in 4 bits (`nf4`); `frozen` parts are not trained at all. `attention` is that of the
    backend unless an older kernel is named; `unfused` writes its scores to memory.
    """

    backend: str = "megatron"
    compiled: bool = True
    sp: bool | None = None
    uneven: bool | None = None
    overlap_p2p: bool = True
    rank_order: str = "tp-cp-ep-dp-pp"
    dispatcher: str = ""
    cp_comm: str = ""
    cp_sizes: tuple[int, ...] = ()
    optimizer_instances: int = 1
    sharding: str = "optimizer"
    precision_aware: bool = False
    recompute: tuple[str, ...] = ()
    attention: str = ""
    graphs: tuple[str, ...] = ()
    capacity: bool = False
    ep_overlap: bool = False
    delay_wgrad: bool = False
    shared_overlap: bool = False
    fp8: str = ""
    fp8_params: bool = False
    lora: int = 0
    lora_targets: tuple[str, ...] = ()
    base: str = ""
    frozen: tuple[str, ...] = ()
    optimizer_offload: int = 0
    offload: bool = False
    offload_percent: int = 100
    offload_modules: tuple[str, ...] = ()

    def heads_apart(self, cp: int) -> int:
        """Ranks of `cp` that share out heads; the others share out the sequence in a ring."""
        return cp if self.cp_comm == "a2a" else self.cp_sizes[0] if self.cp_comm == "a2a+p2p" and self.cp_sizes else 1


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
