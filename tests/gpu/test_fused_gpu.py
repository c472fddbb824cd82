"""Fused kernels of the optimizer, the activation and the combine, and the router's product, against float64 and the plain path; times are printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measures import milliseconds, relative
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.profiler import ProfilerActivity, profile

from playbook_trainer.torch import optimizer
from playbook_trainer.torch.model import ops

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda"
GROUP: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-3, "weight_decay": 0.1}


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
    from playbook_trainer.torch.kernels import adamw as kernel

    fused, plain, before = (state(size, moments, grads) for _ in range(3))
    scale = torch.tensor(0.37, device=DEVICE)
    for step in (5, 6):
        kernel.update(*fused, scale, GROUP, step)
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


def test_fused_update_is_timed() -> None:
    from playbook_trainer.torch.kernels import adamw as kernel

    tensors, scale = state(1 << 28, torch.bfloat16, torch.float32), torch.ones((), device=DEVICE)
    fused = milliseconds(lambda: kernel.update(*tensors, scale, GROUP, 5))
    plain = milliseconds(lambda: optimizer.update(*tensors, GROUP, 5), 3)
    print(f"AdamW, 2^28 values, 16-bit moments: plain {plain:.2f} ms, fused {fused:.2f} ms, {20 * 2**28 / fused / 1e9:.2f} TB/s")


def in_halves(tensors: list[Tensor]) -> list[Tensor]:
    """The state of `state` with weights in two halves, and gradients in 16 bits: upper half, gradient, moments, lower half."""
    p, g, m, v = (t.clone() for t in tensors)
    high, low = torch.empty_like(p, dtype=torch.bfloat16), torch.empty_like(p, dtype=torch.int16)
    optimizer.split(p, high, low, v)
    return [high, g.bfloat16(), m, v, low]


@pytest.mark.parametrize("size", [1, 2047, 2049, 1_000_003])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32])
def test_fused_update_of_halves_equals_that_of_whole_weights_to_the_last_bit(size: int, moments: torch.dtype) -> None:
    from playbook_trainer.torch.kernels import adamw as kernel

    whole = state(size, moments, torch.bfloat16)
    # Weights between two of 16 bits, of both signs, which an update of zero leaves there.
    whole[0].view(torch.int32)[::5] &= -65536
    whole[0].view(torch.int32)[::5] |= 0x8000
    whole[1][::5] = whole[2][::5] = whole[3][::5] = 0
    split, group = in_halves(whole), {**GROUP, "weight_decay": 0.0}
    whole[1] = whole[1].float()
    scale = torch.tensor(0.37, device=DEVICE)
    for step in (5, 6, 7):
        kernel.update(*whole, scale, group, step)
        kernel.update(*split[:4], scale, group, step, split[4])
        high, _, m, v, low = split
        apart = int((optimizer.join(high, low, v).view(torch.int32) != whole[0].view(torch.int32)).sum())
        ties = int(v.signbit().sum())
        print(f"{size} {moments} step {step}: {apart} weights differ, {ties} ties were rounded down")
        assert apart == 0
        assert torch.equal(high, whole[0].bfloat16())
        assert torch.equal(m, whole[2])
        assert torch.equal(v.abs(), whole[3])
        assert ties or size == 1


def test_fused_update_of_halves_is_timed() -> None:
    from playbook_trainer.torch.kernels import adamw as kernel

    tensors, scale = state(1 << 28, torch.bfloat16, torch.float32), torch.ones((), device=DEVICE)
    *four, low = in_halves(tensors)
    whole = milliseconds(lambda: kernel.update(*tensors, scale, GROUP, 5))
    split = milliseconds(lambda: kernel.update(*four, scale, GROUP, 5, low))
    print(f"AdamW, 2^28 values, 16-bit moments: whole {whole:.2f} ms, split {split:.2f} ms, {18 * 2**28 / split / 1e9:.2f} TB/s")


@pytest.mark.parametrize(("rows", "width"), [(1, 768), (1000, 768), (33, 100), (7, 1536), (0, 128)])
def test_fused_activation_against_float64(rows: int, width: int) -> None:
    from playbook_trainer.torch.kernels.dense import swiglu

    torch.manual_seed(0)
    h = torch.randn(rows, 2 * width, device=DEVICE).to(torch.bfloat16)
    grad = torch.randn(rows, width, device=DEVICE).to(torch.bfloat16)
    exact = h.double().requires_grad_()
    ops.swiglu(exact).backward(grad.double())
    for f in (swiglu, ops.swiglu):
        ours = h.clone().requires_grad_()
        out = f(ours)
        out.backward(grad)
        errors = relative(out, ops.swiglu(h.double())), relative(ours.grad, exact.grad)
        print(f.__module__, rows, width, *(f"{e:.1e}" for e in errors))
        assert max(errors) < 1e-2
        assert ours.grad is not None
        assert ours.grad.shape == h.shape


def test_fused_activation_is_timed() -> None:
    from playbook_trainer.torch.kernels.dense import swiglu

    h = torch.randn(262_144, 1536, device=DEVICE).to(torch.bfloat16).requires_grad_()
    grad = torch.randn(262_144, 768, device=DEVICE).to(torch.bfloat16)
    for f in (ops.swiglu, swiglu):
        forward = milliseconds(lambda f=f: f(h))
        both = milliseconds(lambda f=f: f(h).backward(grad))
        print(f"SwiGLU {f.__module__}, 262,144 x 768: forward {forward:.2f} ms, with backward {both:.2f} ms")


@pytest.mark.parametrize("shape", [(50, 8, 256), (1, 4, 96), (129, 2, 2048), (64, 1, 33), (300, 6, 640)])
def test_gradients_of_a_weighted_sum_against_float64(shape: tuple[int, int, int]) -> None:
    from playbook_trainer.torch.kernels import experts

    torch.manual_seed(0)
    n, k, width = shape
    rows = torch.randn(n * k, width, device=DEVICE).to(torch.bfloat16)
    place = torch.randperm(n * k, device=DEVICE)
    prob = torch.rand(n, k, device=DEVICE)
    grad = torch.randn(n, width, device=DEVICE).to(torch.bfloat16)
    exact = [rows.double().requires_grad_(), prob.double().requires_grad_()]
    total = (exact[0][place].view(n, k, width) * exact[1].unsqueeze(2)).sum(1)
    total.backward(grad.double())
    ours = [rows.clone().requires_grad_(), prob.clone().requires_grad_()]
    out = experts.weigh(ours[0], place, ours[1])
    out.backward(grad)
    errors = [relative(out, total), *(relative(a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    print(shape, *(f"{e:.1e}" for e in errors))
    assert max(errors) < 1e-2


def test_router_product_on_tensor_cores_against_float64() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 2048, device=DEVICE).to(torch.bfloat16).requires_grad_()
    w = (0.02 * torch.randn(128, 2048, device=DEVICE)).to(torch.bfloat16).requires_grad_()
    grad = torch.randn(4096, 128, device=DEVICE)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    (exact[0] @ exact[1].t()).backward(grad.double())
    scores = ops.wide_linear(x, w)
    scores.backward(grad)
    errors = [relative(scores, exact[0] @ exact[1].t()), *(relative(a.grad, b.grad) for a, b in zip((x, w), exact, strict=True))]
    wide = milliseconds(lambda: torch.nn.functional.linear(x.float(), w.float())) if DEVICE == "cuda" else 0.0
    quick = milliseconds(lambda: ops.wide_linear(x, w)) if DEVICE == "cuda" else 0.0
    print("scores, gradients of x and w:", *(f"{e:.1e}" for e in errors), f"forward {wide:.3f} ms plain, {quick:.3f} ms")
    assert scores.dtype == torch.float32
    assert errors[0] < 1e-5
    assert max(errors[1:]) < 1e-2


@pytest.mark.parametrize(("rows", "width"), [(1, 768), (1000, 768), (33, 100), (7, 1536), (0, 128)])
def test_weighted_activation_against_float64(rows: int, width: int) -> None:
    from playbook_trainer.torch.kernels.dense import weighted_swiglu

    torch.manual_seed(0)
    h = torch.randn(rows, 2 * width, device=DEVICE).to(torch.bfloat16)
    weight = torch.rand(rows, device=DEVICE)
    grad = torch.randn(rows, width, device=DEVICE).to(torch.bfloat16)
    exact = [h.double().requires_grad_(), weight.double().requires_grad_()]
    expected = ops.swiglu(exact[0]) * exact[1].unsqueeze(1)
    expected.backward(grad.double())
    ours = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = weighted_swiglu(*ours)
    out.backward(grad)
    errors = [relative(out, expected), *(relative(a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    print(rows, width, *(f"{e:.1e}" for e in errors))
    assert max(errors) < 1e-2


@pytest.mark.parametrize("shape", [(50, 8, 256), (1, 4, 96), (64, 1, 33)])
def test_joined_rows_against_float64(shape: tuple[int, int, int]) -> None:
    from playbook_trainer.torch.kernels import experts

    torch.manual_seed(0)
    n, k, width = shape
    rows = torch.randn(n * k, width, device=DEVICE).to(torch.bfloat16)
    place, grad = torch.randperm(n * k, device=DEVICE), torch.randn(n, width, device=DEVICE).to(torch.bfloat16)
    ours = rows.clone().requires_grad_()
    out = experts.join(ours, place, k)
    out.backward(grad)
    assert relative(out, rows.double()[place].view(n, k, width).sum(1)) < 1e-2
    assert ours.grad is not None
    assert torch.equal(ours.grad[place].view(n, k, width), grad.unsqueeze(1).expand(n, k, width))


@pytest.mark.parametrize("shape", [(1, 2048), (1000, 2048), (33, 1152), (3, 5, 128), (0, 64)])
def test_fused_norm_against_float64(shape: tuple[int, ...]) -> None:
    from playbook_trainer.torch.kernels.dense import norm

    torch.manual_seed(0)
    x, grad = (torch.randn(shape, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[-1], device=DEVICE)).to(torch.bfloat16)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    expected = ops.norm(*exact, 1e-6)
    expected.backward(grad.double())
    ours = [t.clone().requires_grad_() for t in (x, weight)]
    out = norm(*ours, 1e-6)
    out.backward(grad)
    errors = [relative(out, expected), *(relative(a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    print(shape, *(f"{e:.1e}" for e in errors))
    assert max(errors) < 1e-2


@pytest.mark.parametrize("shape", [(1, 32, 128), (700, 4, 128), (33, 6, 64), (0, 8, 64)])
def test_fused_norm_with_rotation_against_float64(shape: tuple[int, int, int]) -> None:
    from playbook_trainer.torch.kernels.dense import norm_rotate

    torch.manual_seed(0)
    n, _, size = shape
    x, grad = (torch.randn(shape, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(size, device=DEVICE)).to(torch.bfloat16)
    angle = torch.randn(n, size, device=DEVICE)
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    expected = ops.norm_rotate(*exact, cos.double(), sin.double(), 1e-6)
    expected.backward(grad.double())
    ours = [t.clone().requires_grad_() for t in (x, weight)]
    out = norm_rotate(*ours, cos, sin, 1e-6)
    out.backward(grad)
    errors = [relative(out, expected), *(relative(a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    print(shape, *(f"{e:.1e}" for e in errors))
    assert max(errors) < 1e-2


def test_fused_norms_are_timed() -> None:
    from playbook_trainer.torch.kernels.dense import norm, norm_rotate

    x, grad = (torch.randn(32_768, 2048, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    weight = torch.ones(2048, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    q, grad_q = (torch.randn(32_768, 32, 128, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    scale = torch.ones(128, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    table = torch.randn(32_768, 128, device=DEVICE).to(torch.bfloat16)
    x.requires_grad_()
    q.requires_grad_()
    for name, f, g in (("plain", ops.norm, ops.norm_rotate), ("fused", norm, norm_rotate)):
        times = [
            milliseconds(lambda f=f: f(x, weight, 1e-6)),
            milliseconds(lambda f=f: f(x, weight, 1e-6).backward(grad)),
            milliseconds(lambda g=g: g(q, scale, table, table, 1e-6)),
            milliseconds(lambda g=g: g(q, scale, table, table, 1e-6).backward(grad_q)),
        ]
        print(
            f"{name}: norm of 32,768 x 2048 {times[0]:.3f} ms, with backward {times[1]:.3f}; with rotation, 32 heads {times[2]:.3f}, {times[3]:.3f}"
        )


@pytest.mark.parametrize(
    ("shape", "width"), [((50, 16, 72), 128), ((50, 16, 72), 72), ((7, 12, 64), 64), ((1, 3, 20), 64), ((0, 16, 72), 128)]
)
def test_turned_queries_and_keys_against_the_plain_path(shape: tuple[int, int, int], width: int) -> None:
    from playbook_trainer.torch.kernels.rotary import split_turned
    from playbook_trainer.torch.model.vision import rotate

    torch.manual_seed(0)
    patches, heads, size = shape
    qkv = torch.randn(patches, 3, heads, size, device=DEVICE).to(torch.bfloat16)
    angle = torch.randn(patches, size // 2, device=DEVICE)
    grads = [torch.randn(patches, heads, width, device=DEVICE).to(torch.bfloat16) for _ in range(3)]
    plain, ours = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    q, k, v = plain.unbind(1)
    expected = rotate(q, angle.cos(), angle.sin()), rotate(k, angle.cos(), angle.sin()), v
    found = split_turned(ours, angle.cos(), angle.sin(), width)
    torch.autograd.backward(expected, [g[..., :size] for g in grads])
    torch.autograd.backward(found, grads)
    for a, b in zip(found, expected, strict=True):
        assert relative(a[..., :size], b) < 5e-3
        assert not a[..., size:].any()
    assert relative(ours.grad, plain.grad) < 5e-3


def test_attention_of_filled_heads_is_that_of_the_heads() -> None:
    """Heads of 72, which cuDNN gets filled up to 128: by `attend`, or by the vision tower beforehand; flash takes them as they are. With times."""
    from playbook_trainer.torch.model.attention import attend

    torch.manual_seed(0)
    # A last document of another length keeps the call on the packed path.
    ends = torch.tensor([*range(0, 65_536, 512), 65_436, 65_536], device=DEVICE, dtype=torch.int32)
    narrow = [torch.randn(65_536, 16, 72, device=DEVICE).to(torch.bfloat16) for _ in range(3)]
    wide = [torch.nn.functional.pad(t, (0, 56)) for t in narrow]
    grad = torch.randn(65_536, 16, 72, device=DEVICE).to(torch.bfloat16)

    def step(tensors: list[Tensor], scale: float | None, backend: str) -> list[Tensor]:
        ours = [t.clone().requires_grad_() for t in tensors]
        out = attend(*ours, ends, ends, 512, 512, causal=False, backend=backend, scale=scale)[..., :72]
        out.backward(grad)
        return [out, *(t.grad[..., :72] for t in ours if t.grad is not None)]

    runs = {"flash": (narrow, None, "flash"), "filled by attend": (narrow, None, "cudnn"), "filled before": (wide, 72**-0.5, "cudnn")}
    results = {}
    for name, how in runs.items():
        results[name] = step(*how)
        print(f"{name}: {milliseconds(lambda how=how: step(*how)):.2f} ms forward and backward")
    errors = {n: [relative(a, b) for a, b in zip(results[n], results["flash"], strict=True)] for n in runs}
    print({n: [f"{e:.1e}" for e in errors[n]] for n in errors})
    assert max(map(max, errors.values())) < 1e-2


def test_grouped_products_leave_multiprocessors_to_collectives(tmp_path: Path) -> None:
    """Fewer blocks, the same values to the last bit."""
    from playbook_trainer.torch.build import leave_multiprocessors

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
    import router_cases

    for shape in [*router_cases.SHAPES, (4099, 128, 8)]:
        print(router_cases.random_scores(shape, normalize, DEVICE))
    router_cases.ties(normalize, DEVICE)
    router_cases.not_finite(normalize, DEVICE)


def test_fused_router_keeps_what_it_needs_and_serves_a_layer() -> None:
    import router_cases

    router_cases.strides(DEVICE)
    router_cases.kept(DEVICE)
    print(router_cases.inside_a_layer(DEVICE))


def test_fused_router_in_a_graph() -> None:
    """Captured with the product before it, as `train.cuda_graphs: [moe_router]` does: each replay chooses anew."""
    from playbook_trainer.torch.kernels.experts import route

    torch.manual_seed(0)

    def choose(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return route(ops.wide_linear(x, weight), 8, True)

    weight = (0.05 * torch.randn(128, 256, device=DEVICE)).to(torch.bfloat16).requires_grad_()
    sample = torch.randn(512, 256, device=DEVICE).to(torch.bfloat16).requires_grad_()
    graph = torch.cuda.make_graphed_callables(choose, (sample, weight))
    for _ in range(3):
        x, results = torch.randn(512, 256, device=DEVICE).to(torch.bfloat16), []
        grad = torch.randn(512, 8, device=DEVICE)
        for f in (graph, choose):
            leaf, weight.grad = x.clone().requires_grad_(), None
            expert, prob = f(leaf, weight)
            prob.backward(grad)
            results.append([t.clone() for t in (expert, prob.detach(), leaf.grad, weight.grad) if t is not None])
        assert len(results[0]) == 4
        assert torch.equal(results[0][0], results[1][0])
        errors = [relative(a, b) for a, b in zip(*results, strict=True)]
        assert errors[1] < 1e-6
        assert max(errors) < 1e-2


def test_fused_router_is_timed() -> None:
    """By the kernels' own time: launching them takes longer than running the fused ones."""
    from playbook_trainer.torch.kernels.experts import route

    torch.manual_seed(0)
    scores, grad = torch.randn(32_768, 128, device=DEVICE), torch.randn(32_768, 8, device=DEVICE)
    for name, f in (("plain", ops.route), ("fused", route)):
        leaf = scores.clone().requires_grad_()
        forward = _kernel_milliseconds(lambda f=f, x=leaf: f(x, 8, True))
        both = _kernel_milliseconds(lambda f=f, x=leaf: torch.autograd.grad(f(x, 8, True)[1], x, grad))
        print(f"router {name}, 8 of 128 experts for 32,768 tokens: forward {forward:.3f} ms, with backward {both:.3f} ms")


def _kernel_milliseconds(f: Callable[[], Any], repeats: int = 10) -> float:
    """The mean time of a call's kernels, as CUPTI reports them."""
    f()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            f()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    return sum(e.time_range.elapsed_us() for e in seen.events() or [] if e.device_type == gpu) / 1000 / repeats
