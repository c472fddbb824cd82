"""The router's kernel against the plain path and float64: tests/gpu calls this on a GPU, tests/trainer runs it as a program under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from measures import relative
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from playbook.paths import data_root
from playbook_trainer.config.tree import load
from playbook_trainer.torch.build import operators
from playbook_trainer.torch.kernels.experts import route
from playbook_trainer.torch.model import ops
from playbook_trainer.torch.model.decoder import Moe, Options

Route = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
# Tokens, experts, experts per token.
SHAPES = [
    (37, 128, 8), (1, 128, 8), (0, 128, 8), (130, 100, 5), (19, 60, 4), (9, 33, 16), (7, 512, 16), (2, 300, 1), (5, 6, 6), (301, 8, 2), (3, 1, 1),
]  # fmt: skip


def run(f: Route, scores: Tensor, k: int, normalize: bool, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, probabilities and the scores' gradient."""
    leaf = scores.clone().requires_grad_()
    expert, prob = f(leaf, k, normalize)
    prob.backward(grad.to(prob.dtype))
    assert leaf.grad is not None
    return expert, prob.detach(), leaf.grad


def random_scores(shape: tuple[int, int, int], normalize: bool, device: str) -> str:
    """Values, choices and gradients where no two scores are alike; returns the errors."""
    tokens, experts, k = shape
    torch.manual_seed(0)
    scores, grad = (3 * torch.randn(tokens, experts)).to(device), torch.randn(tokens, k).to(device)
    exact = run(ops.route, scores.double(), k, normalize, grad)
    line = f"{shape} {'normalized' if normalize else 'as they are'}:"
    for name, f in (("plain", ops.route), ("fused", route)):
        expert, prob, found = run(f, scores, k, normalize, grad)
        assert expert.dtype == torch.int64
        assert prob.dtype == found.dtype == torch.float32
        assert torch.equal(expert, exact[0])
        # With all experts chosen, or one, normalized probabilities are constant in a direction or altogether: compare with what is summed up.
        errors = relative(prob, exact[1]), float((found.double() - exact[2]).norm() / grad.double().norm().clamp(min=1e-30))
        line += f" {name} {errors[0]:.1e}, gradient {errors[1]:.1e}"
        assert max(errors) < 2e-6, line
    return line


def ties(normalize: bool, device: str) -> None:
    """Of equal scores, the lower number first; zeros of both signs are equal, and so are infinities."""
    torch.manual_seed(0)
    scores = torch.randint(-2, 3, (40, 70)).float()
    scores[1] = 5.0
    scores[2, 3:] = -float("inf")
    scores[4] = torch.where(torch.arange(70) % 2 == 0, 0.0, -0.0)
    grad = torch.randn(40, 6)
    expected = scores.sort(dim=1, descending=True, stable=True)[1][:, :6]

    def in_order(x: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        prob = x.softmax(1).gather(1, expected.to(device))
        return expected, prob / prob.sum(1, keepdim=True) if normalize else prob

    expert, prob, found = run(route, scores.to(device), 6, normalize, grad.to(device))
    exact = run(in_order, scores.double().to(device), 6, normalize, grad.to(device))
    assert torch.equal(expert.cpu(), expected)
    assert relative(prob, exact[1]) < 2e-6
    assert relative(found, exact[2]) < 2e-6


def not_finite(normalize: bool, device: str) -> None:
    """NaN wherever the plain path has it and nowhere else, with distinct experts that exist."""
    torch.manual_seed(0)
    scores, nan, inf = torch.randn(9, 20), float("nan"), float("inf")
    scores[0] = nan
    scores[1, 17] = nan
    # The other sign of NaN, which as an integer is the lowest of all.
    scores[2, 4] = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32)
    assert scores[2, 4].isnan()
    scores[3, 5] = inf
    scores[4, 5:9] = inf
    scores[5] = -inf
    scores[6, 2:] = -inf
    scores[7, 19] = -inf
    scores, grad = scores.to(device), torch.randn(9, 4).to(device)
    plain, ours = (run(f, scores, 4, normalize, grad) for f in (ops.route, route))
    expert = ours[0].sort(1)[0]
    assert int(expert.min()) >= 0
    assert int(expert.max()) < 20
    assert bool((expert[:, 1:] > expert[:, :-1]).all())
    for a, b in zip(ours[1:], plain[1:], strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert bool(a[:6].isnan().all())
        assert torch.allclose(a, b, atol=1e-6, equal_nan=True)


def strides(device: str) -> None:
    """Scores and gradients may lie in memory in another order, or be one number repeated."""
    torch.manual_seed(0)
    scores = torch.randn(12, 30).to(device)
    grad = torch.randn(4, 30).to(device)
    for normalize in (True, False):
        one = run(route, scores.t().contiguous().t(), 4, normalize, grad[:, :12].t())
        two = run(route, scores, 4, normalize, grad[:, :12].t().contiguous())
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        leaf = scores.clone().requires_grad_()
        route(leaf, 4, normalize)[1].sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, run(route, scores, 4, normalize, torch.ones(12, 4, device=device))[2])


def kept(device: str) -> None:
    """Normalized, what waits for the backward pass is what was chosen, not the scores."""
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    scores = torch.randn(10, 64, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        expert, prob = route(scores, 4, True)
    assert sizes == [40, 40]
    assert not expert.requires_grad
    assert prob.requires_grad


def chosen_by_the_configuration() -> None:
    """The kernel takes the place of the plain function, compiled or not."""
    path = data_root("configs") / "qwen3_moe_tiny.yaml"
    for compiled in (False, True):
        on, off = (operators(load(path, {"moe.fused_router": f, "train.compile.decoder": compiled})) for f in (True, False))
        assert on.route is route
        assert off.route is not route
        assert (on.norm is ops.norm) is not compiled


def inside_a_layer(device: str) -> str:
    """An MoE layer with either router has the same output and gradients; run again in the backward pass, to the last bit."""
    config = load(data_root("configs") / "qwen3_moe_tiny.yaml").model
    torch.manual_seed(0)
    x = torch.randn(33, config.hidden_size)
    results: dict[str, list[Tensor]] = {}
    for name in ("plain", "fused", "again"):
        torch.manual_seed(1)
        moe = Moe(config, Options(ops=ops.Ops() if name == "plain" else ops.Ops(route=route)))
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        moe.to(device)
        leaf = x.to(device).requires_grad_()
        out = checkpoint(moe, leaf, use_reentrant=False) if name == "again" else moe(leaf)
        out.square().sum().backward()
        results[name] = [out.detach(), leaf.grad, *(p.grad for p in moe.parameters())]  # type: ignore[list-item]
    errors = [relative(a, b) for a, b in zip(results["fused"], results["plain"], strict=True)]
    assert max(errors) < 1e-5, errors
    assert all(torch.equal(a, b) for a, b in zip(results["again"], results["fused"], strict=True))
    return f"in a layer: {max(errors):.1e}"


def main() -> None:
    """Everything, on the CPU."""
    for normalize in (True, False):
        for shape in SHAPES:
            print(random_scores(shape, normalize, "cpu"))
        ties(normalize, "cpu")
        not_finite(normalize, "cpu")
    strides("cpu")
    kept("cpu")
    chosen_by_the_configuration()
    print(inside_a_layer("cpu"))
    print("all cases passed")


if __name__ == "__main__":
    main()
