"""Matrix products on 8-bit floating-point operands, for linear layers and for experts.

Forward and input gradient multiply e4m3 operands that are scaled as they come; the weight gradient, whose sum runs over tokens, is computed
from the unrounded operands in their own precision. Gradients are e4m3 too: with a scale of their own for every row, the larger range of
e5m2 is not needed, and a bit of precision is worth more.

    rowwise     one scale per row of both operands (a token, an output feature)
    blockwise   one scale per 128 values of a row, and per 128 x 128 values of a weight

Off the GPU the operands are rounded to the same values and multiplied in float32: that path defines the numerics.

Suffixes: M rows, K contracted, N output features, E experts, b blocks of 128.
Source: recipe rowwise_with_gw_hp of torchao (torchao/float8/README.md); 1 x 128 tiles and 128 x 128 blocks:
DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from playbook_trainer.observe.ranges import tally

FORMAT = torch.float8_e4m3fn
TOP = 448.0
"""The largest value of e4m3."""
_SMALLEST_TOP = 1e-30
"""A row of zeros, or nearly, is scaled as if this were its largest value: its scale must stay a normal number."""
BLOCK = 128

Quantised = tuple[Tensor, Tensor]
"""Values in e4m3, and what they are to be multiplied by, float32."""


def _rounded(x: Tensor, top: Tensor) -> Quantised:
    scale = top.float().clamp(min=_SMALLEST_TOP) / TOP
    return (x.float() / scale).clamp(-TOP, TOP).to(FORMAT), scale


def rows(x_MK: Tensor) -> Quantised:
    """Values and scales (..., M, 1): one for each row."""
    return _rounded(x_MK, x_MK.abs().amax(-1, keepdim=True))


def columns(x_KM: Tensor) -> Quantised:
    """`rows` of the transpose, laid out as rows."""
    return rows(x_KM.transpose(-1, -2).contiguous())


def _tiles(x_MK: Tensor) -> Quantised:
    """Values and scales (M, b): one for every 128 values of a row."""
    x_MbB = x_MK.unflatten(1, (-1, BLOCK))
    values, scale = _rounded(x_MbB, x_MbB.abs().amax(2, keepdim=True))
    return values.flatten(1), scale.squeeze(2)


def blocks(w_NK: Tensor) -> Quantised:
    """Values and scales (b, b): one for every 128 x 128 values."""
    w_bBbB = w_NK.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    values, scale = _rounded(w_bBbB, w_bBbB.abs().amax((1, 3), keepdim=True))
    return values.flatten(2).flatten(0, 1), scale.squeeze(3).squeeze(1)


def _transposed_blocks(w_KN: Tensor) -> Quantised:
    """`blocks` of the transpose, laid out as rows."""
    return blocks(w_KN.t().contiguous())


@dataclass(frozen=True)
class Recipe:
    """How operands are rounded; compiled on a GPU, where each would otherwise be read and written several times."""

    left: Callable[[Tensor], Quantised]
    right: Callable[[Tensor], Quantised]
    right_transposed: Callable[[Tensor], Quantised]
    product: Callable[[Quantised, Quantised, torch.dtype], Tensor]


def recipe(name: str, device: torch.device) -> Recipe:
    """The recipe `rowwise` or `blockwise` on a device."""
    cuda = device.type == "cuda"
    if name == "rowwise":
        out = Recipe(rows, rows, columns, _scaled_rows if cuda else _plain_rows)
    else:
        out = Recipe(_tiles, blocks, _transposed_blocks, _scaled_blocks if cuda else _plain_blocks)
    if not cuda:
        return out
    compiled = (torch.compile(f, dynamic=True) for f in (out.left, out.right, out.right_transposed))
    return replace(out, **dict(zip(("left", "right", "right_transposed"), compiled, strict=True)))


def linear(how: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """`torch.nn.functional.linear` without bias, by a recipe."""
    return lambda x_MK, w_NK: _Linear.apply(x_MK, w_NK, how)


def grouped(how: Recipe) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Each group of rows (M, K), the last of which `ends` gives, with its own matrix of (E, N, K): (M, N), rowwise."""
    return lambda x_MK, w_ENK, ends_E: _Grouped.apply(x_MK, w_ENK, ends_E, how)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, how: Recipe) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.how = how
        tally("fp8_linear_products")
        # Detached, parameters and activations are one kind of tensor for the compiled casts.
        return how.product(how.left(x_MK.detach().contiguous()), how.right(w_NK.detach()), x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        (x_MK, w_NK), how, grad_MN = ctx.saved_tensors, ctx.how, grads[0].contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            tally("fp8_linear_products")
            grad_x = how.product(how.left(grad_MN), how.right_transposed(w_NK.detach()), x_MK.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = grad_MN.t() @ x_MK
        return grad_x, grad_w, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_ENK: Tensor, ends_E: Tensor, how: Recipe) -> Tensor:
        ctx.save_for_backward(x_MK, w_ENK, ends_E)
        ctx.how = how
        tally("fp8_expert_products")
        return _grouped(how.left(x_MK.detach().contiguous()), how.right(w_ENK.detach()), ends_E, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x_MK, w_ENK, ends_E), how, grad_MN = ctx.saved_tensors, ctx.how, grads[0].contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            tally("fp8_expert_products")
            grad_x = _grouped(how.left(grad_MN), how.right_transposed(w_ENK.detach()), ends_E, x_MK.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = _per_group(grad_MN, x_MK, ends_E)
        return grad_x, grad_w, None, None


def _scaled_rows(x: Quantised, w: Quantised, dtype: torch.dtype) -> Tensor:
    if not x[0].numel():
        return _plain_rows(x, w, dtype)
    return torch._scaled_mm(x[0], w[0].t(), scale_a=x[1], scale_b=w[1].t(), out_dtype=dtype, use_fast_accum=True)


def _plain_rows(x: Quantised, w: Quantised, dtype: torch.dtype) -> Tensor:
    return ((x[0].float() * x[1]) @ (w[0].float() * w[1]).t()).to(dtype)


def _scaled_blocks(x: Quantised, w: Quantised, dtype: torch.dtype) -> Tensor:
    if not x[0].numel():
        return _plain_blocks(x, w, dtype)
    # cuBLAS wants the scales of tiles token by token, for a multiple of 4 tokens, and those of blocks for a multiple of 4 blocks of K.
    # Source: cuBLAS documentation, 1D and 2D block scaling for FP8 data types.
    extra, missing = -x[0].shape[0] % 4, -w[1].shape[1] % 4
    values = functional.pad(x[0].view(torch.uint8), (0, 0, 0, extra)).view(FORMAT) if extra else x[0]
    scale_a = functional.pad(x[1], (0, 0, 0, extra)).t().contiguous().t()
    scale_b = functional.pad(w[1], (0, missing)).t()
    kind = functional.ScalingType  # torch 2.10 and later
    out = functional.scaled_mm(values, w[0].t(), scale_a, kind.BlockWise1x128, scale_b, kind.BlockWise128x128, output_dtype=dtype)
    return out[: x[0].shape[0]]


def _plain_blocks(x: Quantised, w: Quantised, dtype: torch.dtype) -> Tensor:
    wide_x = x[0].float() * x[1].repeat_interleave(BLOCK, 1)
    return (wide_x @ (w[0].float() * w[1].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)).t()).to(dtype)


def _grouped(x: Quantised, w: Quantised, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    if x[0].is_cuda and x[0].numel():
        a, b = x[1].squeeze(1), w[1].squeeze(2)
        return torch._scaled_grouped_mm(x[0], w[0].transpose(1, 2), a, b, offs=ends_E, out_dtype=dtype, use_fast_accum=True)
    parts = (x[0].float() * x[1]).tensor_split(ends_E[:-1].tolist())
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, w[0].float() * w[1], strict=True)]).to(dtype)


def _per_group(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of each group's matrix (E, N, K), from operands that were not rounded."""
    if x_MK.is_cuda:
        return functional.grouped_mm(grad_MN.t(), x_MK, offs=ends_E)
    pairs = zip(*(t.tensor_split(ends_E[:-1].tolist()) for t in (grad_MN, x_MK)), strict=True)
    return torch.stack([g.t() @ x for g, x in pairs])


def products(name: str, modules: list[str], device: torch.device) -> tuple[Any, Any]:
    """What multiplies in linear layers and in experts; None where that stays as it is."""
    if name == "none":
        return None, None
    how = recipe(name, device)
    return linear(how) if "linear" in modules else None, grouped(how) if "experts" in modules else None
