"""The megatron backend on GPUs, with Transformer Engine: layouts, schedules and switches against one rank and against the torch backend.

A few steps of a small mixture of experts, the same rows and the same first weights everywhere. What BF16 and 8 bits round away is bounded by
the limits below; every test prints what it found. Where launching kernels takes all the time, more processes per GPU take less: hence workers.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from layout_runs import Job, assert_near, train_all
from nodes import four_or_two
from ranks import start, steps, summary

from playbook.files import LOCK

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
MODEL = (
    "model.hidden_size=256",
    "model.head_dim=64",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.num_experts=8",
    "model.top_k=2",
    "model.expert_ffn_size=256",
)
COMMON = (*MODEL, "data.seq_len=256", "data.num_workers=0", "train.warmup_steps=1", "train.receipt=false")
# Five steps, since graphs are captured after three; three layers, since the first and the last are special to some switches.
ONE = ("model.num_layers=3", "train.steps=5", "train.micro_batch_size=2", "train.global_batch_size=4")
# Four layers and four micro-batches, since there are up to four stages.
SEVERAL = ("model.num_layers=4", "train.steps=3", "train.global_batch_size=8")
BF16, ROWS = "train.dtype=bf16", "data.pack=false"
MEGATRON = (TEXT, *COMMON, "backend=megatron")
SP = ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.etp=1")
SELECTIVE = "train.recompute=selective"
DENSE = ("model.num_experts=0", "model.top_k=0", "model.expert_ffn_size=0", "model.ffn_size=512")

ALONE: dict[str, tuple[str, ...]] = {
    "torch": (TEXT, *COMMON, BF16),
    "torch rows": (TEXT, *COMMON, BF16, ROWS),
    "one": (*MEGATRON, BF16),
    "one rows": (*MEGATRON, BF16, ROWS),
    "one rows dense": (*MEGATRON, *DENSE, BF16, ROWS),
    "one aux": (*MEGATRON, BF16, "moe.aux_loss_coeff=0.01"),
}
"""References on one rank."""

ONE_GPU: dict[str, tuple[str, tuple[str, ...], float]] = {
    "packed": ("torch", (BF16,), 0.01),
    "rows": ("torch rows", (BF16, ROWS), 0.01),
    "local kernels": ("torch", (BF16, "megatron.kernels=local"), 0.01),
    "fp32 local": ("torch", ("megatron.kernels=local",), 0.01),
    "attention flash": ("one rows", (BF16, ROWS, "train.attention=flash"), 0.01),
    "attention cudnn": ("one rows", (BF16, ROWS, "train.attention=cudnn"), 0.01),
    "attention plain": ("one rows", (BF16, ROWS, "train.attention=plain"), 0.01),
    "loop over experts": ("one", (BF16, "moe.experts=loop"), 0.01),
    "experts by CUTLASS": ("one", (BF16, "megatron.grouped_gemm=cutlass"), 0.01),
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
        "one rows dense",
        (*DENSE, BF16, ROWS, "train.cuda_graphs=[attn]", "megatron.cuda_graph_impl=local", "train.warmup_steps=4"),
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
    "fp8 blockwise weights, precision-aware": (
        "one",
        (BF16, "precision.fp8=blockwise", "megatron.fp8_param=true", "megatron.precision_aware_optimizer=true"),
        0.03,
    ),
    "megatron fsdp": ("one", (BF16, "megatron.data_parallel=megatron_fsdp"), 0.01),
    "megatron fsdp, precision-aware": (
        "one",
        (BF16, "megatron.data_parallel=megatron_fsdp", "megatron.precision_aware_optimizer=true"),
        0.01,
    ),
    "fsdp2": ("one", (BF16, "megatron.data_parallel=fsdp2"), 0.01),
}
"""Name to its reference, what it sets, and how far the loss may be off."""

# Layouts of one configuration in BF16 were within 5e-5 of each other in loss. With 0.01, gradients of experts that lacked a half went unseen (4e-4).
SAME = 2e-4
# On {n} GPUs, of which {half} is a half.
SEVERAL_GPUS: dict[str, tuple[str, tuple[str, ...], float]] = {
    "ep": ("one", (BF16, "parallel.ep={n}"), SAME),
    "ep against torch": ("torch", (BF16, "parallel.ep={n}"), 0.01),
    "ep, allgather": ("one", (BF16, "parallel.ep={n}", "moe.dispatcher=allgather"), SAME),
    "ep, balanced": ("one aux", (BF16, "parallel.ep={n}", "moe.aux_loss_coeff=0.01"), SAME),
    "ep, overlapped": ("one rows", (BF16, ROWS, "parallel.ep={n}", "megatron.overlap_expert_parallel=true"), SAME),
    "folding: tp 2, ep, etp 1": ("one rows", (BF16, ROWS, *SP, "parallel.ep={n}"), SAME),
    "folding: cp 2, ep": ("one rows", (BF16, ROWS, "parallel.cp=2", "parallel.ep={n}"), SAME),
    "folding: tp 2, cp 2, ep 4, etp 1": ("one rows", (BF16, ROWS, *SP, "parallel.cp=2", "parallel.ep=4"), SAME),
    "tp": ("one", (BF16, "parallel.tp={n}", "parallel.sequence_parallel=true"), SAME),
    "tp 2 with etp 2, ep 2": ("one", (BF16, *SP[:2], "parallel.ep=2"), SAME),
    "cp 2": ("one rows", (BF16, ROWS, "parallel.cp=2"), SAME),
    "cp 4": ("one rows", (BF16, ROWS, "parallel.cp=4"), SAME),
    "cp, packed": ("one", (BF16, "parallel.cp={n}"), SAME),
    "cp, all_gather": ("one rows", (BF16, ROWS, "parallel.cp={n}", "megatron.cp_comm_type=all_gather"), SAME),
    "cp, a2a": ("one rows", (BF16, ROWS, "parallel.cp={n}", "megatron.cp_comm_type=a2a"), SAME),
    "cp 4, a2a+p2p": ("one rows", (BF16, ROWS, "parallel.cp=4", "megatron.cp_comm_type=a2a+p2p", "megatron.cp_sizes=[2,2]"), SAME),
    "pp 2": ("one", (BF16, "parallel.pp=2"), SAME),
    "pp 4": ("one", (BF16, "parallel.pp=4"), SAME),
    "pp 2 of 1 and 3 layers": ("one", (BF16, "parallel.pp=2", "parallel.pipeline_layout=[1,3]"), SAME),
    "pp 2, vpp 2": ("one", (BF16, "parallel.pp=2", "parallel.vpp=2"), SAME),
    "pp 2, ep 2": ("one", (BF16, "parallel.pp=2", "parallel.ep=2"), SAME),
    "copies": ("one", (BF16, "megatron.data_parallel=ddp"), SAME),
    "no overlap": ("one", (BF16, "megatron.overlap_grad_reduce=false", "megatron.overlap_param_gather=false"), SAME),
    "two copies of the optimizer's shards": ("one", (BF16, "parallel.dp_replicate=2"), SAME),
    "fsdp2": ("one", (BF16, "megatron.data_parallel=fsdp2"), SAME),
    **{
        f"megatron fsdp, {strategy}": (
            "one",
            (BF16, "megatron.data_parallel=megatron_fsdp", f"megatron.sharding_strategy={strategy}"),
            SAME,
        )
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    },
    "megatron fsdp, ep 2": ("one", (BF16, "megatron.data_parallel=megatron_fsdp", "parallel.ep=2"), SAME),
    "megatron fsdp, precision-aware": (
        "one",
        (BF16, "megatron.data_parallel=megatron_fsdp", "megatron.precision_aware_optimizer=true"),
        SAME,
    ),
    "megatron fsdp, tp 2": ("one rows", (BF16, ROWS, "megatron.data_parallel=megatron_fsdp", *SP), SAME),
    "recompute and ep": ("one", (BF16, "parallel.ep={n}", SELECTIVE, "train.recompute_modules=[layernorm,moe_act]"), SAME),
    "fp8 blockwise, ep": ("one", (BF16, "parallel.ep={n}", "precision.fp8=blockwise"), 0.03),
}
NEED_FOUR = {
    "folding: tp 2, cp 2, ep 4, etp 1",
    "tp 2 with etp 2, ep 2",
    "cp 4",
    "cp 4, a2a+p2p",
    "pp 4",
    "pp 2, ep 2",
    "two copies of the optimizer's shards",
    "pp 2, vpp 2, ep 2",
}
"""Layouts that two GPUs have no room for."""


RESUMED_ON_ONE: dict[str, tuple[str, ...]] = {
    "distributed optimizer": (),
    "bf16 moments": ("megatron.precision_aware_optimizer=true", "megatron.grad_reduce_dtype=bf16", "optimizer.moments_dtype=bf16"),
    "copies": ("megatron.data_parallel=ddp",),
    "megatron fsdp": ("megatron.data_parallel=megatron_fsdp",),
    "8-bit weights of one scale": ("precision.fp8=tensorwise", "megatron.fp8_param=true"),
    "8-bit weights in blocks": ("precision.fp8=blockwise", "megatron.fp8_param=true"),
}
RESUMED_ON_SEVERAL: dict[str, tuple[str, ...]] = {
    "ep": ("parallel.ep={n}",),
    "pp 2, vpp 2": ("parallel.pp=2", "parallel.vpp=2"),
    "pp 2, vpp 2, ep 2": ("parallel.pp=2", "parallel.vpp=2", "parallel.ep=2"),
    "megatron fsdp": ("megatron.data_parallel=megatron_fsdp",),
    "megatron fsdp, ep 2": ("megatron.data_parallel=megatron_fsdp", "parallel.ep=2"),
}
PARTS = {"whole": 4, "first": 2, "rest": 4}
"""Runs of each, with the step of their end; the rest resumes what the first has saved."""
WATCHED: dict[str, tuple[str, ...]] = {
    "observed": ("train.receipt=true",),
    "traced": ("train.receipt=true", "profile.kineto=true", "profile.steps=1"),
}
MISSING: set[str] = set() if any(importlib.util.find_spec(m) for m in ("flash_attn", "flash_attn_interface")) else {"attention flash"}


def _trained(
    request: pytest.FixtureRequest, folder: Path, table: dict[str, tuple[str, tuple[str, ...], float]], size: tuple[str, ...], ranks: int
) -> tuple[Path, dict[str, str | None]]:
    """All that the selected tests of so many GPUs look at."""
    lacking = MISSING | (NEED_FOUR if ranks == 2 else set())
    items = [item for item in request.session.items if item.module is request.module]
    asked = [item.callspec.params for item in items if hasattr(item, "callspec")]
    chosen = {name: run_ for name, run_ in table.items() if name in {params.get("name") for params in asked} - lacking}
    alone = sorted({reference for reference, _, _ in chosen.values()})
    jobs = [Job(f"alone {name}", 1, (*ALONE[name], *size)) for name in alone]

    def filled(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(w.format(n=ranks, half=ranks // 2) for w in words)

    jobs += [Job(name, ranks, (*MEGATRON, *size, *filled(words))) for name, (_, words, _) in chosen.items()]
    if ranks == 1 and test_receipt_ranges_and_trace.__name__ in {item.name for item in items}:
        jobs += [Job(name, 1, (*MEGATRON, *size, BF16, *words)) for name, words in WATCHED.items()]
    resumed = RESUMED_ON_ONE if ranks == 1 else RESUMED_ON_SEVERAL
    for name in [name for name in resumed if name in {params.get("resumed") for params in asked} - lacking]:
        for part, last in PARTS.items():
            saved = (f"checkpoint.dir={folder / 'saved' / name}", "checkpoint.every=2", "checkpoint.keep=1") if part != "whole" else ()
            words = (*MEGATRON, *size, BF16, "optimizer.schedule=constant", *filled(resumed[name]), *saved, f"train.steps={last}")
            jobs.append(Job(f"{part} {name}", ranks, words, chain=f"resumed {name}"))
    return folder, train_all(jobs, folder, timeout=60 + 40 * len(jobs), stall=100, workers=4)


@pytest.fixture(scope="module")
def one_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    return _trained(request, tmp_path_factory.mktemp("one"), ONE_GPU, ONE, 1)


@pytest.fixture(scope="module")
def several_gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    return _trained(request, tmp_path_factory.mktemp("several"), SEVERAL_GPUS, SEVERAL, four_or_two())


def compare(name: str, expected: tuple[str, tuple[str, ...], float], trained: tuple[Path, dict[str, str | None]]) -> None:
    """The losses of every step, and the gradient norm, beside those of the reference."""
    root, errors = trained
    reference, _, limit = expected
    if name in MISSING:
        pytest.skip("flash-attn is not installed")
    if name in NEED_FOUR and name not in errors:
        pytest.skip("needs 4 GPUs")
    assert errors[f"alone {reference}"] is None, errors[f"alone {reference}"]
    assert errors[name] is None, errors[name]
    assert_near(root / name, root / f"alone {reference}", limit, 15 * limit)
    assert math.isfinite(steps(root / name)[-1]["grad_norm"])


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ONE_GPU)
def test_on_one_gpu(name: str, one_gpu: tuple[Path, dict[str, str | None]]) -> None:
    compare(name, ONE_GPU[name], one_gpu)


@pytest.mark.multigpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_on_several_gpus(name: str, several_gpus: tuple[Path, dict[str, str | None]]) -> None:
    compare(name, SEVERAL_GPUS[name], several_gpus)


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_what_the_machine_lacks_is_refused(tmp_path: Path) -> None:
    """Formats of a later GPU and a package that is not installed: one line, and nothing written."""
    asked: dict[str, tuple[list[str], int, str]] = {}
    if torch.cuda.get_device_capability() < (10, 0):
        asked |= {recipe: ([f"precision.fp8={recipe}"], 1, "from Blackwell on") for recipe in ("mxfp8", "nvfp4")}
    if importlib.util.find_spec("deep_ep") is None:
        asked["deepep"] = (["moe.dispatcher=deepep", "parallel.ep=2"], 2, "needs the package deep_ep")
    if not asked:
        pytest.skip("this machine has all of it")
    started = {name: start([*MEGATRON, *ONE, BF16, *words, f"output={tmp_path / name}"], n) for name, (words, n, _) in asked.items()}
    for name, processes in started.items():
        said = [p.communicate(timeout=100)[1] for p in processes]
        print(f"{name}: {said[0].strip()}")
        assert [p.returncode for p in processes] == [2] * len(processes)
        assert asked[name][2] in said[0]
        assert {path.name for path in (tmp_path / name).rglob("*")} <= {LOCK}


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_receipt_ranges_and_trace(one_gpu: tuple[Path, dict[str, str | None]]) -> None:
    """The observed step names ranges and groups, and a traced run has the ranges on its timeline."""
    root, errors = one_gpu
    assert errors["observed"] is errors["traced"] is None, (errors["observed"], errors["traced"])
    receipt = summary(root / "observed")["receipt"]
    print({name: count for name, count in receipt["ranges"].items() if not name.endswith(".bwd")}, receipt["counters"])
    assert receipt["ranges"]["attention"] == receipt["ranges"]["attention.bwd"] == 3 * 2
    assert {"router", "dispatch", "experts", "combine", "loss", "backward", "optimizer"} <= set(receipt["ranges"])
    trace = (root / "traced" / "trace.json").read_text()
    assert all(f'"name": "{name}"' in trace for name in ("step", "attention", "experts", "attention.bwd", "optimizer"))


def resumes(name: str, trained: tuple[Path, dict[str, str | None]]) -> None:
    """A run cut in two goes on as the whole one."""
    root, errors = trained
    assert {part: errors[f"{part} {name}"] for part in PARTS} == dict.fromkeys(PARTS)
    whole, first, rest = ([r["loss"] for r in steps(root / f"{part} {name}")] for part in PARTS)
    left = [p.name for p in (root / "saved" / name).iterdir()]
    print(f"{name}: whole {whole}, cut {first + rest}; {left}")
    assert first + rest == pytest.approx(whole, rel=1e-3)
    assert left == ["step_00000004"]


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("resumed", RESUMED_ON_ONE)
def test_a_resumed_run_goes_on_on_one_gpu(resumed: str, one_gpu: tuple[Path, dict[str, str | None]]) -> None:
    resumes(resumed, one_gpu)


@pytest.mark.multigpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("resumed", RESUMED_ON_SEVERAL)
def test_a_resumed_run_goes_on_on_several_gpus(resumed: str, several_gpus: tuple[Path, dict[str, str | None]]) -> None:
    if resumed in NEED_FOUR and f"whole {resumed}" not in several_gpus[1]:
        pytest.skip("needs 4 GPUs")
    resumes(resumed, several_gpus)
