"""The Triton kernels compile for a Hopper GPU; that needs Triton, but no GPU. What they compute is tested in tests/gpu/test_switches_gpu.py."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from playbook_trainer.models.kernels import adamw, cross_entropy, norm, permute, swiglu  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
LOSS = {"logits": "*bf16", "target": "*i64", "width": "i32"}
FACTORS = dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps", "keep", "rate", "root"), "fp32")
NORM = {**dict.fromkeys(("x", "scale", "grad", "grad_x", "out", "cos", "sin"), "*bf16"), "grad_scale": "*fp32", "eps": "fp32"}
COUNTS = dict.fromkeys(("width", "rows", "tokens", "heads"), "i32")
ROWS = {"x": "*bf16", "rows": "*bf16", "grad": "*bf16", "place": "*i64", "width": "i32"}


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (cross_entropy._stats, {**LOSS, "top": "*fp32", "total": "*fp32", "aimed": "*fp32"}, {"BLOCK": 4096}),
        (cross_entropy._gradient, {**LOSS, "lse": "*fp32", "valid": "*i1"}, {"BLOCK": 4096}),
        (permute._spread, ROWS, {"K": 8, "BLOCK": 2048}),
        (permute._collect, {**ROWS, "weight": "*fp32", "out": "*bf16"}, {"K": 8, "WEIGHED": True, "BLOCK": 2048}),
        (permute._collect, {**ROWS, "weight": "*bf16", "out": "*bf16"}, {"K": 8, "WEIGHED": False, "BLOCK": 2048}),
        (
            permute._unweigh,
            {**ROWS, "weight": "*fp32", "out": "*bf16", "grad_weight": "*fp32"},
            {"K": 8, "CHOICES": 8, "BLOCK": 512},
        ),
        (swiglu._forward, {"h": "*bf16", "out": "*bf16", "rows": "i32", "width": "i32"}, {"ROWS": 8, "COLS": 256}),
        (swiglu._backward, {"h": "*bf16", "grad": "*bf16", "out": "*bf16", "rows": "i32", "width": "i32"}, {"ROWS": 8, "COLS": 256}),
        (norm._norm, {**NORM, **COUNTS}, {"BLOCK": 2048}),
        (norm._norm_backward, {**NORM, **COUNTS}, {"BLOCK": 2048}),
        (norm._rotate, {**NORM, **COUNTS}, {"HEADS": 32, "HALF": 64}),
        (norm._rotate_backward, {**NORM, **COUNTS}, {"HEADS": 32, "HALF": 64}),
        (
            adamw._adamw,
            {**dict.fromkeys("pg", "*fp32"), **dict.fromkeys("mv", "*bf16"), "low": "*fp32", "scale": "*fp32", "count": "i32", **FACTORS},
            {"SPLIT": False, "BLOCK": 2048},
        ),
        (
            adamw._adamw,
            {**dict.fromkeys("gmv", "*bf16"), "p": "*i16", "low": "*i16", "scale": "*fp32", "count": "i32", **FACTORS},
            {"SPLIT": True, "BLOCK": 2048},
        ),
    ],
)
def test_kernel_compiles_for_a_hopper(kernel, types, constants):
    names = kernel.arg_names
    source = ASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names}, constexprs={(names.index(k),): v for k, v in constants.items()}
    )
    assert triton.compile(source, target=HOPPER).asm["cubin"]
