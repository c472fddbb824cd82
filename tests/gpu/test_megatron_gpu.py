"""The megatron backend on GPUs, with Transformer Engine: layouts, schedules and switches against one rank and against the torch backend.

Five steps of a small mixture of experts, the same rows and the same first weights everywhere. What BF16 and 8 bits round away is bounded by
the limits below; every test prints what it found.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiproc"))
from layout_runs import Job, difference, train_all
from ranks import run, steps, summary

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
MODEL = (
    "model.hidden_size=256",
    "model.head_dim=64",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.num_experts=8",
    "model.top_k=2",
    "model.expert_ffn_size=256",
    "model.num_layers=4",
)
COMMON = (*MODEL, "data.seq_len=256", "train.steps=5", "train.warmup_steps=1", "train.global_batch_size=8", "train.receipt=false")
BF16, ROWS = "train.dtype=bf16", "data.pack=false"
MEGATRON = (TEXT, *COMMON, "backend=megatron")
SP = ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.etp=1")
SELECTIVE = "train.recompute=selective"

ALONE: dict[str, tuple[str, ...]] = {
    "torch": (TEXT, *COMMON, BF16),
    "torch rows": (TEXT, *COMMON, BF16, ROWS),
    "one": (*MEGATRON, BF16),
    "one rows": (*MEGATRON, BF16, ROWS),
    "one aux": (*MEGATRON, BF16, "megatron.aux_loss_coeff=0.01"),
}
"""References on one rank."""

ONE_GPU: dict[str, tuple[str, tuple[str, ...], float]] = {
    "packed": ("torch", (BF16,), 0.01),
    "rows": ("torch rows", (BF16, ROWS), 0.01),
    "local kernels": ("torch", (BF16, "megatron.kernels=local"), 0.01),
    "fp32 local": ("torch", ("megatron.kernels=local",), 0.01),
    "without fusions": ("one", (BF16, "megatron.fused=false"), 0.01),
    "attention flash": ("one rows", (BF16, ROWS, "train.attention=flash"), 0.01),
    "attention cudnn": ("one rows", (BF16, ROWS, "train.attention=cudnn"), 0.01),
    "attention plain": ("one rows", (BF16, ROWS, "train.attention=plain"), 0.01),
    "loop over experts": ("one", (BF16, "moe.experts=loop"), 0.01),
    "router bf16": ("one", (BF16, "moe.router_dtype=bf16"), 0.02),
    "copies": ("one", (BF16, "megatron.data_parallel=ddp"), 0.01),
    "bf16 moments": (
        "one",
        (BF16, "megatron.precision_aware_optimizer=true", "megatron.grad_reduce_dtype=bf16", "optimizer.moments_dtype=bf16"),
        0.02,
    ),
    "precision-aware, fp32": ("one", (BF16, "megatron.precision_aware_optimizer=true"), 0.01),
    "recompute full": ("one", (BF16, "train.recompute=full"), 0.01),
    "recompute block": ("one", (BF16, "train.recompute=full", "megatron.recompute_method=block", "megatron.recompute_layers=2"), 0.01),
    "recompute layernorm": ("one", (BF16, SELECTIVE, "train.recompute_modules=[layernorm]"), 0.01),
    "recompute moe_act": ("one", (BF16, SELECTIVE, "train.recompute_modules=[moe_act]"), 0.01),
    "recompute core_attn": ("one", (BF16, SELECTIVE, "train.recompute_modules=[core_attn]"), 0.01),
    "recompute moe": ("one", (BF16, SELECTIVE, "train.recompute_modules=[moe]"), 0.01),
    "offload of modules": ("one rows", (BF16, ROWS, "megatron.offload_modules=[core_attn,attn_proj,expert_fc1,moe_act]"), 0.01),
    "offload of layers": ("one rows", (BF16, ROWS, "offload.activations=true"), 0.01),
    "offload of the optimizer": ("one", (BF16, "offload.optimizer=true"), 0.01),
    "offload of half the optimizer": ("one", (BF16, "megatron.optimizer_offload_fraction=0.5"), 0.01),
    "capacity 8": ("one", (BF16, "moe.capacity_factor=8.0"), 0.01),
    "graph of attention": ("one rows", (BF16, ROWS, "train.cuda_graphs=[attn]", "train.warmup_steps=4"), 0.01),
    "graphs of attention and router": (
        "one rows",
        (BF16, ROWS, "train.cuda_graphs=[attn,moe_router,moe_preprocess]", "train.warmup_steps=4"),
        0.01,
    ),
    "local graphs": (
        "one rows",
        (BF16, ROWS, "train.cuda_graphs=[attn]", "megatron.cuda_graph_impl=local", "train.warmup_steps=4"),
        0.01,
    ),
    "graph of the iteration": (
        "one rows",
        (BF16, ROWS, "megatron.cuda_graph_impl=full_iteration", "moe.capacity_factor=4.0", "train.warmup_steps=4"),
        0.01,
    ),
    "fp8 tensorwise": ("one", (BF16, "precision.fp8=tensorwise"), 0.03),
    "fp8 delayed": ("one", (BF16, "precision.fp8=delayed"), 0.03),
    "fp8 blockwise": ("one", (BF16, "precision.fp8=blockwise"), 0.03),
    "fp8 blockwise weights": ("one", (BF16, "precision.fp8=blockwise", "megatron.fp8_param=true"), 0.03),
    "fp8 with wide ends": ("one", (BF16, "precision.fp8=tensorwise", "megatron.first_last_layers_bf16=true"), 0.03),
    "megatron fsdp": ("one", (BF16, "megatron.data_parallel=megatron_fsdp"), 0.01),
    "fsdp2": ("one", (BF16, "megatron.data_parallel=fsdp2"), 0.01),
}
"""Name to its reference, what it sets, and how far the loss may be off."""

FOUR_GPUS: dict[str, tuple[str, tuple[str, ...], float]] = {
    "ep 4": ("one", (BF16, "parallel.ep=4"), 0.01),
    "ep 4 against torch": ("torch", (BF16, "parallel.ep=4"), 0.01),
    "ep 4, allgather": ("one", (BF16, "parallel.ep=4", "moe.dispatcher=allgather"), 0.01),
    "ep 4, balanced": ("one aux", (BF16, "parallel.ep=4", "megatron.aux_loss_coeff=0.01"), 0.02),
    "ep 4, overlapped": ("one rows", (BF16, ROWS, "parallel.ep=4", "megatron.overlap_expert_parallel=true"), 0.01),
    "ep 4, overlapped, late weight gradients": (
        "one rows",
        (BF16, ROWS, "parallel.ep=4", "megatron.overlap_expert_parallel=true", "megatron.delay_wgrad=true"),
        0.01,
    ),
    "folding: tp 2, cp 2, ep 4, etp 1": ("one rows", (BF16, ROWS, *SP, "parallel.cp=2", "parallel.ep=4"), 0.01),
    "tp 4": ("one", (BF16, "parallel.tp=4", "parallel.sequence_parallel=true"), 0.01),
    "tp 2 with etp 2": ("one", (BF16, *SP[:2], "parallel.ep=2"), 0.01),
    "cp 2": ("one rows", (BF16, ROWS, "parallel.cp=2"), 0.01),
    "cp 4": ("one rows", (BF16, ROWS, "parallel.cp=4"), 0.01),
    "cp 4, packed": ("one", (BF16, "parallel.cp=4"), 0.01),
    "cp 4, all_gather": ("one rows", (BF16, ROWS, "parallel.cp=4", "megatron.cp_comm_type=all_gather"), 0.01),
    "cp 4, a2a": ("one rows", (BF16, ROWS, "parallel.cp=4", "megatron.cp_comm_type=a2a"), 0.01),
    "cp 4, a2a+p2p": ("one rows", (BF16, ROWS, "parallel.cp=4", "megatron.cp_comm_type=a2a+p2p", "megatron.cp_sizes=[2,2]"), 0.01),
    "pp 2": ("one", (BF16, "parallel.pp=2"), 0.01),
    "pp 4": ("one", (BF16, "parallel.pp=4"), 0.01),
    "pp 2 of 1 and 3 layers": ("one", (BF16, "parallel.pp=2", "parallel.pipeline_layout=[1,3]"), 0.01),
    "pp 2, vpp 2": ("one", (BF16, "parallel.pp=2", "parallel.vpp=2"), 0.01),
    "pp 2, ep 2": ("one", (BF16, "parallel.pp=2", "parallel.ep=2"), 0.01),
    "copies": ("one", (BF16, "megatron.data_parallel=ddp"), 0.01),
    "no overlap": ("one", (BF16, "megatron.overlap_grad_reduce=false", "megatron.overlap_param_gather=false"), 0.01),
    "two copies of the optimizer's shards": ("one", (BF16, "parallel.dp_replicate=2"), 0.01),
    "fsdp2": ("one", (BF16, "megatron.data_parallel=fsdp2"), 0.01),
    **{
        f"megatron fsdp, {strategy}": (
            "one",
            (BF16, "megatron.data_parallel=megatron_fsdp", f"megatron.sharding_strategy={strategy}"),
            0.01,
        )
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    },
    "megatron fsdp, ep 2": ("one", (BF16, "megatron.data_parallel=megatron_fsdp", "parallel.ep=2"), 0.01),
    "megatron fsdp, two buffers": ("one", (BF16, "megatron.data_parallel=megatron_fsdp", "megatron.fsdp_double_buffer=true"), 0.01),
    "recompute and ep 4": ("one", (BF16, "parallel.ep=4", SELECTIVE, "train.recompute_modules=[layernorm,moe_act]"), 0.01),
    "fp8 blockwise, ep 4": ("one", (BF16, "parallel.ep=4", "precision.fp8=blockwise"), 0.03),
}


def _trained(
    request: pytest.FixtureRequest, folder: Path, table: dict[str, tuple[str, tuple[str, ...], float]], ranks: int
) -> tuple[Path, dict[str, str | None]]:
    wanted = {
        item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec") and item.module is request.module
    }
    chosen = {name: run_ for name, run_ in table.items() if name in wanted}
    alone = sorted({reference for reference, _, _ in chosen.values()})
    jobs = [Job(f"alone {name}", 1, ALONE[name]) for name in alone]
    jobs += [Job(name, ranks, (*MEGATRON, *words)) for name, (_, words, _) in chosen.items()]
    return folder, train_all(jobs, folder, timeout=60 + 40 * len(jobs), stall=100)


@pytest.fixture(scope="module")
def one_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    return _trained(request, tmp_path_factory.mktemp("one"), ONE_GPU, 1)


@pytest.fixture(scope="module")
def four_gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    return _trained(request, tmp_path_factory.mktemp("four"), FOUR_GPUS, 4)


def compare(name: str, expected: tuple[str, tuple[str, ...], float], trained: tuple[Path, dict[str, str | None]]) -> None:
    """The losses of every step, and the gradient norm, beside those of the reference."""
    root, errors = trained
    reference, _, limit = expected
    if name == "attention flash" and "needs the package flash-attn" in str(errors[name]):
        pytest.skip("flash-attn is not installed")
    assert errors[f"alone {reference}"] is None, errors[f"alone {reference}"]
    assert errors[name] is None, errors[name]
    far = difference(root / name, root / f"alone {reference}")
    rows = steps(root / name)
    print(
        f"{name} against {reference}: loss {far['loss']:.1e}, gradient norm {far['grad_norm']:.1e}; losses {[round(r['loss'], 4) for r in rows]}"
    )
    assert far["loss"] < limit
    assert far["grad_norm"] < 15 * limit
    assert math.isfinite(rows[-1]["grad_norm"])


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ONE_GPU)
def test_on_one_gpu(name: str, one_gpu: tuple[Path, dict[str, str | None]]) -> None:
    compare(name, ONE_GPU[name], one_gpu)


@pytest.mark.multigpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FOUR_GPUS)
def test_on_four_gpus(name: str, four_gpus: tuple[Path, dict[str, str | None]]) -> None:
    compare(name, FOUR_GPUS[name], four_gpus)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recipes_of_blackwell_are_refused_on_hopper(recipe: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has them")
    code, _, err = run([*MEGATRON, BF16, f"precision.fp8={recipe}", f"output={tmp_path / 'out'}"])[0]
    print(err.strip())
    assert code == 2
    assert "from Blackwell on" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_missing_dispatcher_is_one_line(tmp_path: Path) -> None:
    try:
        import deep_ep
    except ImportError:
        deep_ep = None
    if deep_ep is not None:
        pytest.skip("deep_ep is here")
    code, _, err = run([*MEGATRON, BF16, "moe.dispatcher=deepep", "parallel.ep=2", f"output={tmp_path / 'out'}"], ranks=2)[0]
    assert code == 2
    assert "needs the package deep_ep" in err


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_receipt_ranges_and_trace(tmp_path: Path) -> None:
    """The observed step names ranges and groups, and a traced run has the ranges on its timeline."""
    words = [*MEGATRON, BF16, "train.receipt=true"]
    code, out, err = run([*words, f"output={tmp_path / 'observed'}"])[0]
    assert code == 0, out + err
    receipt = summary(tmp_path / "observed")["receipt"]
    print({name: count for name, count in receipt["ranges"].items() if not name.endswith(".bwd")}, receipt["counters"])
    assert receipt["ranges"]["attention"] == receipt["ranges"]["attention.bwd"] == 4 * 8
    assert {"router", "dispatch", "experts", "combine", "loss", "backward", "optimizer"} <= set(receipt["ranges"])
    code, out, err = run([*words, "profile.kineto=true", "profile.steps=1", f"output={tmp_path / 'traced'}"])[0]
    assert code == 0, out + err
    trace = (tmp_path / "traced" / "trace.json").read_text()
    assert all(f'"name": "{name}"' in trace for name in ("step", "attention", "experts", "attention.bwd", "optimizer"))


def resumes(folder: Path, ranks: int, words: tuple[str, ...]) -> None:
    """A run cut in two goes on as the whole one."""
    common = (*MEGATRON, BF16, "optimizer.schedule=constant", *words)
    saved = (f"checkpoint.dir={folder / 'saved'}", "checkpoint.every=2", "checkpoint.keep=1")
    jobs = [
        Job("whole", ranks, (*common, "train.steps=4")),
        Job("first", ranks, (*common, "train.steps=2", *saved)),
        Job("rest", ranks, (*common, "train.steps=4", *saved)),
    ]
    errors = train_all(jobs, folder, timeout=200, stall=100)
    assert {name: error for name, error in errors.items() if error} == {}
    whole, first, rest = ([r["loss"] for r in steps(folder / name)] for name in ("whole", "first", "rest"))
    print(f"whole {whole}, cut {first + rest}; {[p.name for p in (folder / 'saved').iterdir()]}")
    assert first + rest == pytest.approx(whole, rel=1e-3)
    assert [p.name for p in (folder / "saved").iterdir()] == ["step_00000004"]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("megatron.precision_aware_optimizer=true", "megatron.grad_reduce_dtype=bf16", "optimizer.moments_dtype=bf16"),
        ("megatron.data_parallel=ddp",),
        ("megatron.data_parallel=megatron_fsdp",),
        ("megatron.optimizer_offload_fraction=0.5",),
    ],
)
def test_a_resumed_run_goes_on_on_one_gpu(words: tuple[str, ...], tmp_path: Path) -> None:
    resumes(tmp_path, 1, words)


@pytest.mark.multigpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        ("parallel.ep=4",),
        ("parallel.pp=2", "parallel.vpp=2", "parallel.ep=2"),
        ("megatron.data_parallel=megatron_fsdp",),
        ("megatron.data_parallel=megatron_fsdp", "parallel.ep=2"),
    ],
)
def test_a_resumed_run_goes_on_on_four_gpus(words: tuple[str, ...], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    resumes(tmp_path, 4, words)
