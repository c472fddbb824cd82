"""Switches of memory and speed that need a GPU, against the plain path and float64; figures are printed (pytest -s)."""

from __future__ import annotations

from pathlib import Path

import loss_cases
import pytest
import torch
from measures import errors, relative
from ranks import run, steps, summary

from playbook_trainer.axes import Axis
from playbook_trainer.config.automatic import SWITCHES
from playbook_trainer.data.batch import IGNORE
from playbook_trainer.torch.kernels.dense import fused_rows
from playbook_trainer.torch.model import attention
from playbook_trainer.torch.parallel import dispatch
from playbook_trainer.torch.parallel.tensor import linear_cross_entropy, plain_rows

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def test_fused_loss_of_rows_that_begin_with_words_ruled_out() -> None:
    for first, width in loss_cases.SHAPES:
        print(loss_cases.ruled_out(first, width, DEVICE))


@pytest.mark.parametrize("shape", [(33, 1000, 64), (256, 151_936, 64), (7, 4097, 32)])
def test_fused_loss_against_float64(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    n, width, size = shape
    x, w = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16) * 0.5 for s in ((n, size), (width, size)))
    labels = torch.randint(0, width, (n,), device=DEVICE)
    labels[::5] = IGNORE

    def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ w.t(), labels, reduction="sum", ignore_index=IGNORE)

    for rows in (plain_rows, fused_rows):
        loss, *gradients = errors(
            lambda x, w, rows=rows: linear_cross_entropy(x, w, labels, Axis("tp"), 20, rows), exact, [x, w], torch.ones((), device=DEVICE)
        )
        assert loss < 1e-3
        assert max(gradients) < 2e-2


@pytest.mark.parametrize("shape", [(50, 8, 16, 256), (1, 4, 8, 96), (129, 2, 128, 2048), (64, 1, 4, 33), (300, 8, 8, 640)])
@pytest.mark.parametrize("skew", [False, True])
def test_fused_permutation_against_the_plain_path(shape: tuple[int, int, int, int], skew: bool) -> None:
    """Random routing, and routing that leaves half of the experts empty; odd widths."""
    torch.manual_seed(0)
    n, k, experts, size = shape
    scores = torch.rand(n, experts, device=DEVICE)
    if skew and experts >= 2 * k:
        scores[:, experts // 2 :] = -1
    prob, expert = scores.topk(k, dim=1)
    x = torch.randn(n, size, device=DEVICE, dtype=torch.bfloat16)
    gain = torch.randn(n * k, size, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(n, size, device=DEVICE, dtype=torch.bfloat16)
    found = {}
    for name, fused, dtype in (("plain", False, torch.bfloat16), ("fused", True, torch.bfloat16), ("exact", False, torch.float64)):
        local = dispatch.make("alltoall", experts, Axis("ep"), fused=fused)
        x_ = x.detach().to(dtype).clone().requires_grad_()
        p_ = prob.detach().to(torch.float64 if dtype == torch.float64 else torch.float32).clone().requires_grad_()
        rows, counts, route = local.dispatch(x_, expert, p_)
        assert counts.tolist() == torch.bincount(expert.flatten(), minlength=experts).tolist()
        out = local.combine(rows * gain.to(dtype), route)
        out.backward(grad.to(dtype))
        found[name] = (rows, out, x_.grad, p_.grad)
    assert torch.equal(found["fused"][0], found["plain"][0])
    for what, plain, fused, exact in zip(("out", "x", "prob"), *(found[m][1:] for m in ("plain", "fused", "exact")), strict=True):
        print(what, shape, f"plain {relative(plain, exact):.2e} fused {relative(fused, exact):.2e}")
        assert relative(fused, exact) < max(4e-3, 1.1 * relative(plain, exact))


BACKENDS = ("flash", "cudnn", "cudnn_packed")


def call(name: str, q, k, v, cu, top: int):
    if name == "flash":
        return attention._flash(q, k, v, cu, cu, top, top, True, None)
    if name == "cudnn":
        return attention._cudnn_dense(q, k, v, top, True, None)
    return attention._cudnn_packed(q, k, v, cu, cu, top, top, True, None)


# cuDNN's dense call takes documents of one length.
@pytest.mark.parametrize(
    ("name", "lengths"), [(n, row) for n in BACKENDS for row in ([512], [256] * 4, [1, 700, 3, 320]) if n != "cudnn" or len({*row}) == 1]
)
def test_attention_backends_against_float64(name: str, lengths: list[int]) -> None:
    if name == "cudnn_packed":
        pytest.importorskip("transformer_engine")
    torch.manual_seed(0)
    n = sum(lengths)
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    given = [torch.randn(n, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    grad = torch.randn(n, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    found = errors(lambda *t: call(name, *t, cu, max(lengths)), lambda *t: attention._plain(*t, cu, cu, True, None), given, grad)
    assert max(found) < 2e-2


PLAIN = [f"{key}={str(switch.plain).lower()}" for key, switch in SWITCHES.items()]
"""What is not named in a row stays plain."""
COMMON = [
    "trainer/configs/qwen3_30b_a3b_24l.yaml",
    *PLAIN,
    "model.num_layers=4",
    "parallel.ep=1",
    "train.steps=9",
    "train.warmup_steps=4",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
    "train.log_every=1",
    "optimizer.lr=1e-5",
]
SELECTIVE = ["train.recompute=selective"]
ROWS: dict[str, list[str]] = {
    "plain": ["train.attention=flash"],
    "attention auto": [],
    "attention cudnn": ["train.attention=cudnn"],
    "recompute layernorm": [*SELECTIVE, "train.recompute_modules=[layernorm]"],
    "recompute moe_act": [*SELECTIVE, "train.recompute_modules=[moe_act]"],
    "recompute both": [*SELECTIVE, "train.recompute_modules=[layernorm,moe_act]"],
    "recompute core_attn": [*SELECTIVE, "train.recompute_modules=[core_attn]"],
    "recompute moe": [*SELECTIVE, "train.recompute_modules=[moe]"],
    "recompute full": ["train.recompute=full"],
    "bf16 moments": ["optimizer.moments_dtype=bf16"],
    "narrow router": ["moe.router_dtype=bf16"],
    "auto": [f"{key}=auto" for key in SWITCHES],
    "fused permutation": ["moe.fused_permutation=true"],
    "fused router": ["moe.fused_router=true"],
    "fused loss": ["train.fused_loss=true"],
    "loss in chunks of 1024": ["train.loss_chunk=1024"],
    "compiled loss": ["train.compile.loss=true", "train.compile.dynamic=marked"],
    "compiled decoder, fused router": ["train.compile.decoder=true", "train.compile.dynamic=marked", "moe.fused_router=true"],
    "compiled decoder": ["train.compile.decoder=true", "train.compile.dynamic=marked"],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return measured("plain", tmp_path_factory.mktemp("plain"))


def measured(name: str, out: Path) -> dict[str, float]:
    """Last loss, first gradient norm and recompiles of a run; its row of the table is printed."""
    code, _, errors = run([*COMMON, *ROWS[name], f"output={out}"], timeout=230)[0]
    assert code == 0, errors[-2000:]
    rows, s = steps(out), summary(out)
    seconds = sorted(r["seconds"] for r in rows if r["timed"])[2]
    print(
        f"\n{name:24s} {1000 * seconds:7.1f} ms  {s['metrics']['peak_memory_bytes'] / 2**30:6.1f} GiB"
        f"  saved {s['metrics']['saved_activation_bytes_per_rank'] / 2**30:5.2f} GiB  recompiles {s['metrics']['recompiles']}"
        f"  loss {rows[-1]['loss']:.4f}  first norm {rows[0]['grad_norm']:.4f}"
    )
    return {"loss": rows[-1]["loss"], "norm": rows[0]["grad_norm"], "recompiles": s["metrics"]["recompiles"]}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [n for n in ROWS if n != "plain"])
def test_table_of_switches(name: str, plain: dict[str, float], tmp_path: Path) -> None:
    """Each switch on four layers of Qwen3-30B-A3B: step time, peak memory, saved activations, recompiles, and loss and norm beside the plain run's."""
    found = measured(name, tmp_path)
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert found["norm"] == pytest.approx(plain["norm"], rel=0.02)
    if name.startswith("compiled"):
        assert found["recompiles"] == 0
