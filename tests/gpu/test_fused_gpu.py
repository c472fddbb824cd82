"""Fused kernels of the optimizer, the activation and the combine, and the router's product, against float64 and the plain path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from measures import errors, relative
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")
import router_cases

from playbook_trainer.torch import optimizer
from playbook_trainer.torch.build import leave_multiprocessors
from playbook_trainer.torch.kernels import adamw, dense, experts
from playbook_trainer.torch.kernels.rotary import split_turned
from playbook_trainer.torch.model import ops
from playbook_trainer.torch.model.attention import attend
from playbook_trainer.torch.model.vision import rotate, rotation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda"
GROUP: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-3, "weight_decay": 0.1}


def bf16(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def exactly(p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: tuple[int, ...]) -> Tensor:
    """AdamW in float64, from its definition (arXiv 1711.05101, algorithm 2)."""
    p, g, m, v = (t.double() for t in (p, g, m, v))
    beta1, beta2 = GROUP["betas"]
    for t in steps:
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        root = (v / (1 - beta2**t)).sqrt() + GROUP["eps"]
        p = p - GROUP["lr"] * GROUP["weight_decay"] * p - GROUP["lr"] * m / (1 - beta1**t) / root
    return p


def state(size: int, moments: torch.dtype, grads: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    p, g, m, v = (torch.randn(size, device=DEVICE) for _ in range(4))
    return [p, g.to(grads), (0.1 * m).to(moments), (0.01 * v.square()).to(moments)]


@pytest.mark.parametrize("size", [1, 2047, 2049, 100_003])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
def test_fused_update_equals_the_plain_one(size: int, moments: torch.dtype, grads: torch.dtype) -> None:
    fused, plain, before = (state(size, moments, grads) for _ in range(3))
    scale = torch.tensor(0.37, device=DEVICE)
    for step in (5, 6):
        adamw.update(*fused, scale, GROUP, step)
        optimizer.update(plain[0], plain[1].float() * scale, plain[2], plain[3], GROUP, step)
    exact = exactly(before[0], before[1].double() * 0.37, *before[2:], (5, 6))
    moves = [(t.double() - before[0].double()) for t in (fused[0], plain[0], exact)]
    print(
        f"{size} {moments}: the move against the plain update's {relative(moves[0], moves[1]):.1e}, in float64 {relative(moves[0], moves[2]):.1e}"
    )
    assert relative(moves[0], moves[1]) < (1e-2 if moments == torch.bfloat16 else 1e-4)
    assert relative(moves[0], moves[2]) < (1e-2 if moments == torch.bfloat16 else 1e-3)
    # Rounding to 16 bits may fall the other way where the float32 sums differ in their last place.
    for a, b in zip(fused[2:], plain[2:], strict=True):
        assert relative(a, b) < (4e-3 if moments == torch.bfloat16 else 1e-6)
    assert torch.equal(fused[1], plain[1])


def in_halves(tensors: list[Tensor]) -> list[Tensor]:
    """The state of `state` with weights in two halves, and gradients in 16 bits: upper half, gradient, moments, lower half."""
    p, g, m, v = (t.clone() for t in tensors)
    high, low = torch.empty_like(p, dtype=torch.bfloat16), torch.empty_like(p, dtype=torch.int16)
    optimizer.split(p, high, low, v)
    return [high, g.bfloat16(), m, v, low]


@pytest.mark.parametrize("size", [1, 2047, 2049, 1_000_003])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32])
def test_fused_update_of_halves_equals_that_of_whole_weights_to_the_last_bit(size: int, moments: torch.dtype) -> None:
    whole = state(size, moments, torch.bfloat16)
    # Weights between two of 16 bits, of both signs, which an update of zero leaves there.
    whole[0].view(torch.int32)[::5] &= -65536
    whole[0].view(torch.int32)[::5] |= 0x8000
    whole[1][::5] = whole[2][::5] = whole[3][::5] = 0
    split, group = in_halves(whole), {**GROUP, "weight_decay": 0.0}
    whole[1] = whole[1].float()
    scale = torch.tensor(0.37, device=DEVICE)
    for step in (5, 6, 7):
        adamw.update(*whole, scale, group, step)
        adamw.update(*split[:4], scale, group, step, split[4])
        high, _, m, v, low = split
        apart = int((optimizer.join(high, low, v).view(torch.int32) != whole[0].view(torch.int32)).sum())
        ties = int(v.signbit().sum())
        print(f"{size} {moments} step {step}: {apart} weights differ, {ties} ties were rounded down")
        assert apart == 0
        assert torch.equal(high, whole[0].bfloat16())
        assert torch.equal(m, whole[2])
        assert torch.equal(v.abs(), whole[3])
        assert ties or size == 1


@pytest.mark.parametrize(("rows", "width"), [(1, 768), (1000, 768), (33, 100), (7, 1536), (0, 128)])
def test_fused_activations_against_float64(rows: int, width: int) -> None:
    torch.manual_seed(0)
    h, grad, weight = bf16(rows, 2 * width), bf16(rows, width), torch.rand(rows, device=DEVICE)
    for f in (dense.swiglu, ops.swiglu):
        assert max(errors(f, ops.swiglu, [h], grad)) < 1e-2
    assert max(errors(dense.weighted_swiglu, lambda h, weight: ops.swiglu(h) * weight.unsqueeze(1), [h, weight], grad)) < 1e-2


@pytest.mark.parametrize("shape", [(50, 8, 256), (1, 4, 96), (129, 2, 2048), (64, 1, 33), (300, 6, 640)])
def test_sums_of_rows_against_float64(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    n, k, width = shape
    rows, grad, prob = bf16(n * k, width), bf16(n, width), torch.rand(n, k, device=DEVICE)
    place = torch.randperm(n * k, device=DEVICE)

    def weighed(rows: Tensor, prob: Tensor) -> Tensor:
        return (rows[place].view(n, k, width) * prob.unsqueeze(2)).sum(1)

    assert max(errors(lambda rows, prob: experts.weigh(rows, place, prob), weighed, [rows, prob], grad)) < 1e-2
    value, gradient = errors(lambda rows: experts.join(rows, place, k), lambda rows: weighed(rows, torch.ones_like(prob)), [rows], grad)
    assert value < 1e-2
    assert gradient == 0


def test_router_product_on_tensor_cores_against_float64() -> None:
    torch.manual_seed(0)
    x, w = bf16(4096, 2048), (0.02 * torch.randn(128, 2048, device=DEVICE)).to(torch.bfloat16)
    assert ops.wide_linear(x, w).dtype == torch.float32
    scores, *gradients = errors(ops.wide_linear, lambda x, w: x @ w.t(), [x, w], torch.randn(4096, 128, device=DEVICE))
    assert scores < 1e-5
    assert max(gradients) < 1e-2


@pytest.mark.parametrize("shape", [(1, 2048), (1000, 2048), (33, 1152), (3, 5, 128), (0, 64)])
def test_fused_norm_against_float64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, grad = bf16(*shape), bf16(*shape)
    weight = (1 + 0.1 * torch.randn(shape[-1], device=DEVICE)).to(torch.bfloat16)
    assert max(errors(lambda x, w: dense.norm(x, w, 1e-6), lambda x, w: ops.norm(x, w, 1e-6), [x, weight], grad)) < 1e-2


@pytest.mark.parametrize("shape", [(1, 32, 128), (700, 4, 128), (33, 6, 64), (0, 8, 64)])
def test_fused_norm_with_rotation_against_float64(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    n, _, size = shape
    x, grad = bf16(*shape), bf16(*shape)
    weight = (1 + 0.1 * torch.randn(size, device=DEVICE)).to(torch.bfloat16)
    angle = torch.randn(n, size, device=DEVICE)
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return dense.norm_rotate(x, weight, cos, sin, 1e-6)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return ops.norm_rotate(x, weight, cos.double(), sin.double(), 1e-6)

    assert max(errors(fused, plain, [x, weight], grad)) < 1e-2


@pytest.mark.parametrize(
    ("shape", "width"), [((50, 16, 72), 128), ((50, 16, 72), 72), ((7, 12, 64), 64), ((1, 3, 20), 64), ((0, 16, 72), 128)]
)
def test_turned_queries_and_keys_against_the_plain_path(shape: tuple[int, int, int], width: int) -> None:
    torch.manual_seed(0)
    patches, heads, size = shape
    qkv = bf16(patches, 3, heads, size)
    cos, sin = rotation(torch.randint(0, 50, (patches, 2), device=DEVICE), size)
    grads = [bf16(patches, heads, width) for _ in range(3)]
    plain, ours = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    q, k, v = plain.unbind(1)
    expected = rotate(q, cos, sin), rotate(k, cos, sin), v
    found = split_turned(ours, cos, sin, width)
    torch.autograd.backward(expected, [g[..., :size] for g in grads])
    torch.autograd.backward(found, grads)
    for a, b in zip(found, expected, strict=True):
        assert relative(a[..., :size], b) < 5e-3
        assert not a[..., size:].any()
    assert relative(ours.grad, plain.grad) < 5e-3


def test_attention_of_filled_heads_is_that_of_the_heads() -> None:
    """Heads of 72, which cuDNN gets filled up to 128: by `attend`, or by the vision tower beforehand; flash takes them as they are."""
    torch.manual_seed(0)
    # A last document of another length keeps the call on the packed path.
    ends = torch.tensor([*range(0, 65_536, 512), 65_436, 65_536], device=DEVICE, dtype=torch.int32)
    narrow, grad = [bf16(65_536, 16, 72) for _ in range(3)], bf16(65_536, 16, 72)
    wide = [torch.nn.functional.pad(t, (0, 56)) for t in narrow]

    def step(tensors: list[Tensor], scale: float | None, backend: str) -> list[Tensor]:
        ours = [t.clone().requires_grad_() for t in tensors]
        out = attend(*ours, ends, ends, 512, 512, causal=False, backend=backend, scale=scale)[..., :72]
        out.backward(grad)
        return [out, *(t.grad[..., :72] for t in ours if t.grad is not None)]

    flash = step(narrow, None, "flash")
    for filled in (step(narrow, None, "cudnn"), step(wide, 72**-0.5, "cudnn")):
        far = [relative(a, b) for a, b in zip(filled, flash, strict=True)]
        print(*(f"{e:.1e}" for e in far))
        assert max(far) < 1e-2


def test_grouped_products_leave_multiprocessors_to_collectives(tmp_path: Path) -> None:
    """Fewer blocks, the same values to the last bit."""
    torch.manual_seed(0)
    x, w = torch.randn(4096, 512, device=DEVICE).bfloat16(), torch.randn(8, 512, 1024, device=DEVICE).bfloat16()
    ends = torch.tensor([0, 700, 1024, 1536, 2048, 3000, 4000, 4096], device=DEVICE, dtype=torch.int32)
    results = []
    for left in (0, 20):
        leave_multiprocessors(left)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            results.append(grouped_mm(x, w, offs=ends))
            torch.cuda.synchronize()
        blocks, sms = _blocks(seen, tmp_path / "trace.json"), torch.cuda.get_device_properties(DEVICE).multi_processor_count
        print(f"{left} left: {blocks} blocks of {sms}")
        assert blocks <= sms - left
    leave_multiprocessors(0)
    assert torch.equal(*results)


def _blocks(seen: profile, path: Path) -> int:
    """Blocks of the largest grouped product on the profile's timeline."""
    seen.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    grids = [e["args"]["grid"] for e in events if e.get("cat") == "kernel" and "GroupProblem" in e["name"]]
    return max(x * y * z for x, y, z in grids)


@pytest.mark.parametrize("normalize", [True, False])
def test_fused_router_against_the_plain_path_and_float64(normalize: bool) -> None:
    for shape in [*router_cases.SHAPES, (4099, 128, 8)]:
        print(router_cases.random_scores(shape, normalize, DEVICE))
    router_cases.ties(normalize, DEVICE)
    router_cases.not_finite(normalize, DEVICE)


def test_fused_router_keeps_what_it_needs_and_serves_a_layer() -> None:
    router_cases.strides(DEVICE)
    router_cases.kept(DEVICE)
    print(router_cases.inside_a_layer(DEVICE))


def test_fused_router_in_a_graph() -> None:
    """Captured with the product before it, as `train.cuda_graphs: [moe_router]` does: each replay chooses anew."""
    torch.manual_seed(0)

    def choose(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return experts.route(ops.wide_linear(x, weight), 8, True)

    weight = (0.05 * torch.randn(128, 256, device=DEVICE)).to(torch.bfloat16).requires_grad_()
    sample = bf16(512, 256).requires_grad_()
    graph = torch.cuda.make_graphed_callables(choose, (sample, weight))
    for _ in range(3):
        x, results = bf16(512, 256), []
        grad = torch.randn(512, 8, device=DEVICE)
        for f in (graph, choose):
            leaf, weight.grad = x.clone().requires_grad_(), None
            expert, prob = f(leaf, weight)
            prob.backward(grad)
            results.append([t.clone() for t in (expert, prob.detach(), leaf.grad, weight.grad) if t is not None])
        assert len(results[0]) == 4
        assert torch.equal(results[0][0], results[1][0])
        far = [relative(a, b) for a, b in zip(*results, strict=True)]
        assert far[1] < 1e-6
        assert max(far) < 1e-2
