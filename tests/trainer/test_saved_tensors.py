"""What autograd keeps of layers of transformers, with and without adapters, counted through torch's hooks, beside the planner's tensors: byte for byte."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from playbook.planner import activations, memory
from playbook.planner.options import Options
from playbook.planner.parameters import adapter_parameters
from playbook.planner.plan import Plan
from playbook.planner.shapes import Shape

transformers = pytest.importorskip("transformers")
LENGTH, RANK = 96, 4
SHAPE = Shape(4, 8, 2, 0, "", 64, 1000, head_dim=8, ffn=224, dense_layers=4)
ALL = ("q", "k", "v", "o", "gate", "up", "down")


class Beside(nn.Module):
    """A low-rank pair beside a frozen product, as LoRA, arXiv 2106.09685, has it, with the input in the type of the pair."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.b = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return result + self.b(self.a(x.to(self.a.weight.dtype))).to(result.dtype)


def by_hand(model: nn.Module, targets: tuple[str, ...], dtype: torch.dtype) -> nn.Module:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in [m for m in model.named_modules() if re.search(rf"\.({'|'.join(targets)})_proj$", m[0])]:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Beside(module, dtype))
    return model


def by_peft(model: nn.Module, targets: tuple[str, ...], dtype: torch.dtype) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=RANK, target_modules=[f"{t}_proj" for t in targets])
    return peft.get_peft_model(model, config, autocast_adapter_dtype=dtype == torch.float32)


def model_of(layers: int, kind: str, dtype: torch.dtype) -> nn.Module:
    make = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
    config = make(
        vocab_size=SHAPE.vocab, hidden_size=SHAPE.hidden, intermediate_size=SHAPE.ffn, num_hidden_layers=layers, num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads, head_dim=SHAPE.head_dim, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def kept(model: nn.Module, *, autocast: bool) -> int:
    """Bytes of what a forward pass keeps, each storage once, without weights and what is cast from them."""
    weights = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids=torch.randint(SHAPE.vocab, (1, LENGTH)))
    assert out.logits.requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("way", ["sharded", "autocast"])
@pytest.mark.parametrize(
    ("make", "targets"),
    [(by_hand, ()), *((make, targets) for make in (by_hand, by_peft) for targets in (ALL, ("q", "v"), ("up", "down")))],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value) or "full",
)
def test_a_layer_keeps_what_the_planner_says(kind: str, way: str, targets: tuple[str, ...], make) -> None:  # type: ignore[no-untyped-def]
    autocast = way == "autocast"
    whole = torch.float32 if autocast and not targets else torch.bfloat16
    counts = []
    for layers in (2, 4):  # their difference has neither embedding nor head
        model = model_of(layers, kind, whole)
        model = make(model, targets, torch.float32 if autocast else torch.bfloat16) if targets else model
        counts.append(kept(model, autocast=autocast))
    options = Options(
        backend="torch", compiled=False, sharding="none" if autocast else "fsdp2", lora=RANK if targets else 0, lora_targets=targets
    )
    plan = Plan(replace(SHAPE, qk_norm=kind == "qwen3"), seq_len=LENGTH, options=options)
    assert sum(activations.saved(plan, 1).values()) == (counts[1] - counts[0]) / 2


@pytest.mark.parametrize("targets", [(), ALL, ("q", "v")], ids=lambda t: "-".join(t) or "full")
def test_parameters_gradients_and_moments_are_those_of_a_real_step(targets: tuple[str, ...]) -> None:
    model = model_of(SHAPE.layers, "llama", torch.bfloat16 if targets else torch.float32)
    model = by_hand(model, targets, torch.float32) if targets else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(SHAPE.vocab, (1, LENGTH))
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
    found = (sum(p.nbytes for p in model.parameters()), sum(p.grad.nbytes for p in trained if p.grad is not None), moments)
    options = Options(backend="torch", compiled=False, sharding="none", lora=RANK if targets else 0, lora_targets=targets)
    (stage,) = memory.stages(Plan(SHAPE, seq_len=LENGTH, options=options))
    assert (stage.parameters, stage.gradients, stage.optimizer) == found
    if targets:
        assert sum(p.numel() for p in trained) == sum(adapter_parameters(SHAPE, i, options) for i in range(SHAPE.layers))
