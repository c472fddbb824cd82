"""The FLOPs ledger against PyTorch's own counter, on models of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from playbook.planner import flops, parameters
from playbook.planner.models import MODELS
from playbook_trainer.axes import Axes
from playbook_trainer.config.sections import shape_of
from playbook_trainer.config.tree import TrainerConfig, load
from playbook_trainer.data.batch import Batch
from playbook_trainer.data.loader import build_loader
from playbook_trainer.observe.totals import Ledger, StepTotals, counts
from playbook_trainer.torch import build

CONFIGS = Path("trainer/configs")


def read(config: str, changes: dict[str, Any]) -> tuple[TrainerConfig, list[Batch], StepTotals[float]]:
    """A small configuration, the batches of its first step, and what stands in them."""
    small = {"data.num_workers": 0, "train.device": "cpu", "model.num_layers": 2, "train.micro_batch_size": 1, "train.global_batch_size": 1}
    tree = load(CONFIGS / f"{config}.yaml", small | {key.replace("__", "."): value for key, value in changes.items()})
    batches = next(iter(build_loader(tree, dp_rank=0, dp_size=1)))
    return tree, batches, StepTotals(squared_grad_norm=0.0, loss=0.0, **counts(batches))


def one_step(config: str, **changes: Any) -> tuple[Ledger, StepTotals[float], float]:
    """The ledger, what it counts in one step of real data, and what PyTorch counts in the same step."""
    tree, batches, totals = read(config, changes)
    model = build.build(tree, Axes(), torch.device("cpu"))
    counter = FlopCounterMode(display=False)
    # The mathematical path multiplies whole squares and shows them as matrix products.
    with counter, sdpa_kernel(SDPBackend.MATH):
        for batch in batches:
            model(batch).backward()
    return Ledger(tree), totals, counter.get_total_flops()


def squared(found: dict[str, float]) -> float:
    """All classes, with attention over whole squares as the counter sees it."""
    return sum(found.values()) + found["attention"]


DENSE = {"model": "qwen3_tiny"}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("qwen3_moe_tiny", DENSE),
        ("qwen3_moe_tiny", {}),
        ("qwen3_vl_moe_tiny", {}),
        ("qwen3_vl_moe_tiny", {"train__freeze": ["vision"]}),
        ("qwen3_vl_moe_tiny", {"train__freeze": ["vision", "projector"]}),
        ("qwen3_moe_tiny", {"train__recompute": "selective", "train__recompute_modules": ["core_attn"]}),
    ],
    ids=["dense", "moe", "vision", "frozen tower", "frozen tower and projector", "core_attn again"],
)
@pytest.mark.sample("moe")
def test_the_ledger_agrees_with_pytorch(config: str, changes: dict[str, Any]) -> None:
    book, totals, counted = one_step(config, **changes)
    found = book.hardware(totals)
    print({name: f"{value:.4g}" for name, value in found.items()}, f"{squared(found) / counted - 1:+.4%}")
    assert squared(found) == pytest.approx(counted, rel=0.02)


@pytest.mark.full
def test_whole_layers_again_cost_at_most_what_the_ledger_says() -> None:
    """PyTorch stops a recomputation once it has what it needs, before the last product; the convention totals whole forward passes."""
    book, totals, counted = one_step("qwen3_moe_tiny", train__recompute="full")
    plain, _, less = one_step("qwen3_moe_tiny")
    assert less < counted <= squared(book.hardware(totals)) < 1.06 * counted
    assert book.model(totals) == plain.model(totals), "recomputed passes are no model FLOPs"


def test_padding_is_hardware_and_not_model() -> None:
    tree, _, totals = read("qwen3_vl_moe_tiny", {})
    book = Ledger(tree)
    assert totals.useful_tokens < totals.raw_tokens
    model, hardware = book.model(totals), book.hardware(totals)
    assert model["head"] / hardware["head"] == pytest.approx(totals.useful_tokens / totals.raw_tokens)
    assert model["vision"] == hardware["vision"], "images have no padding"


def test_documents_bound_attention() -> None:
    tree, _, totals = read("qwen3_moe_tiny", {"train__global_batch_size": 4})
    book = Ledger(tree)
    whole = totals._replace(raw_tokens=totals.useful_tokens, pairs=totals.useful_tokens**2, padded_pairs=totals.useful_tokens**2)
    assert book.model(totals)["attention"] < 0.7 * book.model(whole)["attention"]
    assert book.model(totals)["linear"] == book.model(whole)["linear"]


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "qwen3_vl_30b_a3b", "qwen3_vl_2b_a300m", "qwen3_0_6b", "deepseek_v3"])
def test_configurations_become_the_published_shapes(name: str) -> None:
    tree = load(CONFIGS / "qwen3_moe_tiny.yaml", {"model": name, "data.tokenizer": "byte"})
    mine, published = shape_of(tree.model), MODELS[name]
    assert flops.forward(mine, 4096) == flops.forward(published, 4096)
    assert parameters.total(mine) == parameters.total(published)
    assert (mine.vision is None) == (published.vision is None)
    if mine.vision is not None and published.vision is not None:
        assert flops.vision_forward(mine.vision, mine.hidden, 1000, 1e6) == flops.vision_forward(
            published.vision, published.hidden, 1000, 1e6
        )


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", ("H200 SXM dense BF16", 989.5e12)),
        ("NVIDIA H100 80GB HBM3", ("H100 SXM dense BF16", 989.5e12)),
        ("NVIDIA H100 PCIe", ("H100 PCIe dense BF16", 756.5e12)),
        ("NVIDIA GB200", ("GB200 dense BF16", 2500e12)),
        ("NVIDIA A100-SXM4-80GB", ("A100 dense BF16", 312e12)),
        ("Some other GPU", None),
    ],
)
def test_peaks_go_by_the_name_of_the_device(device: str, expected: tuple[str, float] | None) -> None:
    found = flops.dense_bf16(device)
    assert (None if found is None else (found.name, found.flops_per_s)) == expected
