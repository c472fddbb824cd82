"""Switches of memory and speed that need a GPU, against the plain path and float64; figures are printed (pytest -s)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from measures import errors, relative
from ranks import steps, summary, trained

pytest.importorskip("triton")
import loss_cases

from playbook_trainer.axes import Axis
from playbook_trainer.config.automatic import SWITCHES
from playbook_trainer.data.batch import IGNORE
from playbook_trainer.torch.kernels.dense import fused_rows
from playbook_trainer.torch.model import attention, fp8
from playbook_trainer.torch.model.offload import Trip
from playbook_trainer.torch.parallel import dispatch
from playbook_trainer.torch.parallel.tensor import linear_cross_entropy, plain_rows

# What torch.compile warns about is not what is tested here.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

DEVICE = torch.device("cuda", 0)


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
    rows, s = steps(trained(out, 1, *COMMON, *ROWS[name])), summary(out)
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


CPU = torch.device("cpu")


# -- 8 bits ------------------------------------------------------------------------------------------------------------------


def on(quantised: fp8.Quantised, device: torch.device) -> fp8.Quantised:
    return quantised[0].to(device), quantised[1].to(device)


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_rounding_on_the_gpu_is_that_of_the_reference(name: str) -> None:
    """The compiled casts against the plain ones: same values, but for last places where a scale is rounded another way."""
    torch.manual_seed(0)
    x = (torch.randn(384, 256, device=DEVICE) * torch.exp(torch.randn(384, 1, device=DEVICE))).bfloat16()
    x[7] = 0
    ours, plain = fp8.recipe(name, DEVICE), fp8.recipe(name, CPU)
    for cast in ("left", "right", "right_transposed"):
        values, scale = getattr(ours, cast)(x)
        expected, expected_scale = on(getattr(plain, cast)(x.cpu()), DEVICE)
        apart = float((values.float() != expected.float()).float().mean())
        print(f"{name} {cast}: {100 * apart:.4f} % of values differ, scales by {relative(scale, expected_scale):.1e}")
        assert values.dtype == fp8.FORMAT
        assert relative(scale, expected_scale) < 1e-6
        assert apart < 1e-3
        assert torch.isfinite(values.float()).all()


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
@pytest.mark.parametrize("shape", [(1024, 2048, 4096), (333, 256, 512), (1, 256, 128), (5, 512, 2048)])
def test_linear_in_8_bits_against_the_reference(name: str, shape: tuple[int, int, int]) -> None:
    """The same rounded operands, multiplied by the tensor cores and in float32; then forward and gradients of the whole function, in float64."""
    torch.manual_seed(0)
    m, k, n = shape
    x, w = torch.randn(m, k, device=DEVICE).bfloat16(), (torch.randn(n, k, device=DEVICE) * 0.05).bfloat16()
    how, plain = fp8.recipe(name, DEVICE), fp8.recipe(name, CPU)
    left, right = how.left(x), how.right(w)
    cores = relative(how.product(left, right, torch.bfloat16), plain.product(left, right, torch.float32))
    print(f"{name} {shape}: tensor cores {cores:.1e}")
    assert cores < 6e-3
    grad = torch.randn(m, n, device=DEVICE).bfloat16() * 1e-6
    found = errors(fp8.linear(how), lambda x, w: x @ w.t(), [x, w], grad)
    assert max(found[:2]) < 0.06
    assert found[2] < 1e-2


@pytest.mark.parametrize(
    "counts",
    [[112, 16, 0, 64, 16, 0, 0, 96], [100, 3, 0, 57, 1, 0, 7, 88], [0, 0, 0, 0, 0, 0, 0, 5], [128] * 8],
    ids=["of16", "ragged", "one", "even"],
)
def test_experts_in_8_bits_against_the_reference(counts: list[int]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(sum(counts), 256, device=DEVICE).bfloat16(), (torch.randn(8, 384, 256, device=DEVICE) * 0.05).bfloat16()
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
    grad = torch.randn(sum(counts), 384, device=DEVICE).bfloat16()
    found = []
    for device in (DEVICE, CPU):
        a, b = (t.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).detach().requires_grad_() for t in (x, w))
        out = fp8.grouped(fp8.recipe("rowwise", device))(a, b, ends.to(device))
        out.backward(grad.to(device, out.dtype))
        found.append([t.to(DEVICE) for t in (out.detach(), a.grad, b.grad)])
    far = [relative(a, b) for a, b in zip(*found, strict=True)]
    print(f"{counts}: output {far[0]:.1e}, x {far[1]:.1e}, w {far[2]:.1e}")
    assert max(far) < 1e-2


# -- offload -----------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Two products and an activation around a residual: what is saved is several times the input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(size, 4 * size, bias=False), torch.nn.Linear(4 * size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def test_offloaded_activations_equal_kept_ones_to_the_last_bit() -> None:
    """Eight blocks, ten times over, so that memory is reused while copies are under way."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Block(1024) for _ in range(8)).to(DEVICE, torch.bfloat16)
    x = torch.randn(8192, 1024, device=DEVICE, dtype=torch.bfloat16)

    def step(offload: bool) -> tuple[list[torch.Tensor], int, float]:
        for p in blocks.parameters():
            p.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base, began = torch.cuda.memory_allocated(), time.perf_counter()
        y, trip = x.detach().requires_grad_(), Trip(DEVICE, keep=())
        for i, block in enumerate(blocks):
            y = trip.through(block, block, y, stays=i == 7) if offload else block(y)
        trip.end(y)
        peak = torch.cuda.max_memory_allocated() - base
        y.float().square().mean().backward()
        torch.cuda.synchronize()
        return [p.grad.clone() for p in blocks.parameters()], peak, time.perf_counter() - began

    step(True)
    kept, high, plain_s = step(False)
    for _ in range(10):
        found, low, offload_s = step(True)
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    print(
        f"forward peak {high / 2**20:.0f} MiB kept, {low / 2**20:.0f} MiB offloaded; step {1000 * plain_s:.1f} ms and {1000 * offload_s:.1f} ms"
    )
    assert low < 0.6 * high


SIX_LAYERS = [
    "trainer/configs/qwen3_30b_a3b_24l.yaml",
    *PLAIN,
    "model.num_layers=6",
    "model.num_experts=32",
    "parallel.ep=1",
    "train.steps=8",
    "train.warmup_steps=3",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
    "train.log_every=1",
    "optimizer.lr=1e-5",
]
RUNS: dict[str, list[str]] = {
    "plain": [],
    "recompute full": ["train.recompute=full"],
    "offload activations": ["offload.activations=true"],
    "offload activations, recompute full": ["offload.activations=true", "train.recompute=full"],
    "offload optimizer": ["offload.optimizer=true"],
    "fp8 rowwise": ["precision.fp8=rowwise"],
    "no graphs": ["train.steps=10", "train.micro_batch_size=1"],
    "graphs": ["train.steps=10", "train.micro_batch_size=1", "train.cuda_graphs=[attn,moe_router,moe_preprocess]"],
    "graphs, fused router": [
        "train.steps=10",
        "train.micro_batch_size=1",
        "train.cuda_graphs=[attn,moe_router,moe_preprocess]",
        "moe.fused_router=true",
    ],
    "fp8 blockwise linear": ["precision.fp8=blockwise", "precision.fp8_modules=[linear]"],
}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of the trainer by the name it has in `RUNS`: steps and summary; each is made once."""
    root, made = tmp_path_factory.mktemp("runs"), {}

    def get(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if name not in made:
            out = trained(root / name.replace(" ", "_").replace(",", ""), 1, *SIX_LAYERS, *RUNS[name])
            rows, s = steps(out), summary(out)
            seconds = sorted(r["seconds"] for r in rows if r["timed"])
            print(
                f"\n{name:36s} {1000 * seconds[len(seconds) // 2]:7.1f} ms  peak {s['metrics']['peak_memory_bytes'] / 2**30:5.1f} GiB"
                f"  saved {s['metrics']['saved_activation_bytes_per_rank'] / 2**30:5.2f} GiB  loss {rows[-1]['loss']:.4f}"
                f"  first norm {rows[0]['grad_norm']:.4f}  recompiles {s['metrics']['recompiles']}  {s['receipt']['counters']}"
            )
            made[name] = rows, s
        return made[name]

    return get


def apart(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    return max(abs(x["loss"] / y["loss"] - 1) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("name", "beside"), [("offload activations", "plain"), ("offload activations, recompute full", "recompute full")])
def test_trainer_with_offloaded_activations(known: Any, name: str, beside: str) -> None:
    (rows, s), (plain_rows, plain) = known(name), known(beside)
    print(f"losses differ by {apart(rows, plain_rows):.1e} at most")
    assert apart(rows, plain_rows) < 2e-3
    assert s["receipt"]["ranges"]["offload"] == s["receipt"]["ranges"]["prefetch"] == 5
    assert s["receipt"]["counters"]["offloaded_activation_bytes"] >= 5 * 2 * 4096 * 2048 * 2
    assert s["metrics"]["saved_activation_bytes_per_rank"] < plain["metrics"]["saved_activation_bytes_per_rank"]
    if beside == "plain":
        assert s["metrics"]["peak_memory_bytes"] < plain["metrics"]["peak_memory_bytes"] - 2**30


def test_trainer_with_offloaded_optimizer(known: Any) -> None:
    (rows, s), (plain_rows, plain) = known("offload optimizer"), known("plain")
    print(f"losses differ by {apart(rows, plain_rows):.1e} at most")
    assert apart(rows, plain_rows) < 2e-3
    assert s["receipt"]["counters"]["offloaded_gradient_bytes"] == s["metrics"]["grad_bytes_per_rank"]
    # Weights, moments and gradients in float32 leave the GPU, and copies in 16 bits come and go.
    assert s["metrics"]["peak_memory_bytes"] < plain["metrics"]["peak_memory_bytes"] - s["metrics"]["optimizer_bytes_per_rank"]


def test_offloaded_optimizer_in_float32_is_the_plain_one(tmp_path: Path) -> None:
    """Six steps of the tiny model in float32: gradients, clipping and AdamW on the host against all of it on the GPU."""
    curves = {}
    for on in ("false", "true"):
        words = ["trainer/configs/qwen3_moe_tiny.yaml", "train.device=cuda", "train.steps=6", "train.warmup_steps=1"]
        curves[on] = steps(trained(tmp_path / on, 1, *words, f"offload.optimizer={on}"))
    norms = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(curves["true"], curves["false"], strict=True))
    print(f"losses differ by {apart(curves['true'], curves['false']):.1e} at most, gradient norms by {norms:.1e}")
    assert apart(curves["true"], curves["false"]) < 1e-5
    assert norms < 1e-4


@pytest.mark.parametrize("words", [[], ["optimizer.moments_dtype=bf16"], ["optimizer.moments_dtype=bf16", "optimizer.fused=true"]])
@pytest.mark.parametrize("batch", [1, 2])
def test_weights_in_two_halves_train_as_whole_ones_do(words: list[str], batch: int, tmp_path: Path) -> None:
    """Five steps of the tiny model, of one micro-batch or two: losses and gradient norms to the last bit, if whole weights repeat their own."""
    common = ["trainer/configs/qwen3_moe_tiny.yaml", "train.device=cuda", "train.dtype=bf16", "parallel.reduce_dtype=bf16", "train.steps=5"]
    common += ["train.warmup_steps=1", "train.receipt=false", f"train.global_batch_size={batch}", "train.attention=plain", *PLAIN, *words]

    def curve(name: str) -> list[dict[str, Any]]:
        master = "remainder" if name == "split" else "fp32"
        return steps(trained(tmp_path / name, 1, *common, f"optimizer.master_weights={master}"))

    names = ("whole", "again", "split")
    with ThreadPoolExecutor(len(names)) as pool:
        curves = dict(zip(names, pool.map(curve, names), strict=True))
    repeats, same = (
        [(r["loss"], r["grad_norm"]) for r in curves[n]] == [(r["loss"], r["grad_norm"]) for r in curves["whole"]]
        for n in ("again", "split")
    )
    print(
        f"whole repeats itself: {repeats}; split equals whole: {same}; losses differ by {apart(curves['split'], curves['whole']):.1e} at most"
    )
    assert same or (not repeats and apart(curves["split"], curves["whole"]) < 1e-4)


@pytest.mark.parametrize(
    ("name", "linear", "experts"),
    [("fp8 rowwise", 48, 24), ("fp8 blockwise linear", 48, 0)],
)
def test_trainer_in_8_bits(known: Any, name: str, linear: int, experts: int) -> None:
    (rows, s), (plain_rows, _) = known(name), known("plain")
    print(
        f"losses differ by {apart(rows, plain_rows):.1e} at most, first norm by {abs(rows[0]['grad_norm'] / plain_rows[0]['grad_norm'] - 1):.1e}"
    )
    assert apart(rows, plain_rows) < 1e-2
    assert abs(rows[0]["grad_norm"] / plain_rows[0]["grad_norm"] - 1) < 0.1
    assert s["receipt"]["counters"].get("fp8_linear_products", 0) == linear
    assert s["receipt"]["counters"].get("fp8_expert_products", 0) == experts
    assert s["receipt"]["counters"]["scaled_products"] == linear
    assert s["receipt"]["counters"]["scaled_grouped_products"] == experts
    assert s["metrics"]["recompiles"] == 0


# -- CUDA graphs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["graphs", "graphs, fused router"])
def test_trainer_with_cuda_graphs(known: Any, name: str) -> None:
    """Ten steps with and without; the receipt counts the replays of the three parts in all six layers."""
    (rows, s), (plain_rows, plain) = known(name), known("no graphs")
    print(f"losses differ by {apart(rows, plain_rows):.1e} at most")
    assert len(rows) == 10
    assert apart(rows, plain_rows) < 2e-3
    assert rows[0]["grad_norm"] == pytest.approx(plain_rows[0]["grad_norm"], rel=1e-2)
    assert s["receipt"]["counters"]["graph_replays"] == 3 * 6 * 2
    assert plain["receipt"]["counters"]["graph_replays"] == 0
