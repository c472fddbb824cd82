"""CUDA graphs for the parts of a decoder layer whose shapes never change: one launch for a part instead of one for each of its kernels.

A part is a function of tensors alone. Weights are among them, since FSDP gathers them to another address each time: a replay copies what it
is given into the memory of its graph, then runs. Graphs hold inputs and outputs of every layer for ever, so what they cost is memory.

Suffixes: N tokens, D hidden size, d head size.
Source: torch.cuda.make_graphed_callables; scopes `attn`, `moe_router` and `moe_preprocess` are megatron-core's names, here without
attention itself, whose documents have other borders in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from playbook_trainer.config.tree import ModelConfig
from playbook_trainer.observe.ranges import tally


class Part:
    """A function of tensors, and once it is captured, its graph."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f
        self.graph: Callable[..., Any] | None = None
        self.shapes: list[torch.Size] = []

    def __call__(self, *args: Tensor) -> Any:
        """Replay where the shapes are those of the capture and gradients are wanted; call the function elsewhere."""
        if self.graph is None or not torch.is_grad_enabled() or [t.shape for t in args] != self.shapes:
            return self.f(*args)
        tally("graph_replays")
        return self.graph(*args)


def capture(layers: Iterable[Any], config: ModelConfig, dtype: torch.dtype, tokens: int, device: torch.device) -> int:
    """Capture every `Part` of these decoder layers, in the order in which they run, for micro-batches of `tokens` tokens;
    returns the number of parts.
    """
    parts: list[Part] = []
    samples: list[tuple[Tensor, ...]] = []

    def like(shape: Any, grad: bool) -> Tensor:
        return (torch.randn(tuple(shape), device=device, dtype=dtype) * 0.02).requires_grad_(grad)

    table_Nd = tuple(like((tokens, config.head_dim), grad=False) for _ in range(2))
    for layer in layers:
        moe = getattr(layer, "moe", None)
        for module in (layer.attn, moe and moe.router):
            if module is not None and isinstance(module.part, Part):
                weights = [like(w.shape, w.requires_grad) for w in module.part_weights()]
                tables = table_Nd if module is layer.attn else ()
                parts.append(module.part)
                samples.append((like((tokens, config.hidden_size), grad=True), *tables, *weights))
        sort = moe and getattr(moe.dispatcher, "sort", None)
        if isinstance(sort, Part):
            parts.append(sort)
            samples.append((torch.zeros(tokens, config.top_k, dtype=torch.int64, device=device),))
    graphs = torch.cuda.make_graphed_callables(tuple(p.f for p in parts), tuple(samples))
    for part, graph, sample in zip(parts, graphs, samples, strict=True):
        part.graph, part.shapes = graph, [t.shape for t in sample]
    return len(parts)
