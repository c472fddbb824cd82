"""The Triton kernels compile for a Hopper GPU; that needs Triton, but no GPU. What they compute is tested in tests/gpu, and here where the
interpreter is quick enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from playbook_trainer.torch.kernels import adamw, dense, experts  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
LOSS = {"logits": "*bf16", "target": "*i64", "width": "i32"}
FACTORS = dict.fromkeys(("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "keep", "rate", "root"), "fp32")
NORM = {**dict.fromkeys(("x", "scale", "grad", "grad_x", "out", "cos", "sin"), "*bf16"), "grad_scale": "*fp32", "eps": "fp32"}
COUNTS = dict.fromkeys(("width", "rows", "tokens", "heads"), "i32")
SCORES = {"expert": "*i64", **dict.fromkeys(("scores", "prob", "grad", "out"), "*fp32"), "tokens": "i32", "experts": "i32"}
ROWS = {"x": "*bf16", "rows": "*bf16", "grad": "*bf16", "place": "*i64", "width": "i32"}


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (dense._stats, {**LOSS, "row_max": "*fp32", "exp_sum": "*fp32", "target_logit": "*fp32"}, {"BLOCK": 4096}),
        (dense._gradient, {**LOSS, "lse": "*fp32", "valid": "*i1"}, {"BLOCK": 4096}),
        (experts._spread, ROWS, {"K": 8, "BLOCK": 2048}),
        (experts._collect, {**ROWS, "weight": "*fp32", "out": "*bf16"}, {"K": 8, "WEIGHED": True, "BLOCK": 2048}),
        (experts._collect, {**ROWS, "weight": "*bf16", "out": "*bf16"}, {"K": 8, "WEIGHED": False, "BLOCK": 2048}),
        (
            experts._unweigh,
            {**ROWS, "weight": "*fp32", "out": "*bf16", "grad_weight": "*fp32"},
            {"K": 8, "CHOICES": 8, "BLOCK": 512},
        ),
        (dense._swiglu, {"h": "*bf16", "out": "*bf16", "rows": "i32", "width": "i32"}, {"ROWS": 8, "COLS": 256}),
        (dense._swiglu_backward, {"h": "*bf16", "grad": "*bf16", "out": "*bf16", "rows": "i32", "width": "i32"}, {"ROWS": 8, "COLS": 256}),
        (experts._choose, SCORES, {"K": 8, "NORMALIZE": True, "ROWS": 16, "COLS": 128}),
        (experts._choose, SCORES, {"K": 16, "NORMALIZE": False, "ROWS": 4, "COLS": 512}),
        (experts._choose_backward, SCORES, {"K": 8, "CHOICES": 8, "NORMALIZE": True, "ROWS": 16, "COLS": 128}),
        (experts._choose_backward, SCORES, {"K": 6, "CHOICES": 8, "NORMALIZE": False, "ROWS": 32, "COLS": 64}),
        (dense._norm, {**NORM, **COUNTS}, {"BLOCK": 2048}),
        (dense._norm_backward, {**NORM, **COUNTS}, {"BLOCK": 2048}),
        (dense._rotate, {**NORM, **COUNTS}, {"HEADS": 32, "HALF": 64}),
        (dense._rotate_backward, {**NORM, **COUNTS}, {"HEADS": 32, "HALF": 64}),
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


@pytest.mark.parametrize("cases", ["router_cases.py", "permute_cases.py", "loss_cases.py"])
def test_kernels_compute_what_the_plain_path_does(cases):
    """Under Triton's interpreter, which has to be chosen before Triton is imported."""
    program = Path(__file__).parents[3] / "support" / "examples" / cases
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=2400)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("all cases passed\n")
