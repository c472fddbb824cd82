"""The megatron backend's wiring on a CPU: each layout, schedule and switch computes what the torch backend computes on one rank.

A shim stands in for CUDA (`megatron_shim.py`), so nothing here speaks of speed, and what needs Transformer Engine is in tests/gpu/.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from layout_runs import Job, difference, train_all
from parity import random_state
from ranks import ROOT, steps, summary

from playbook_bench.trace import kineto
from playbook_bench.trace.table import build
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.huggingface import weights

MOE, DENSE, VISION = (f"trainer/configs/{name}.yaml" for name in ("qwen3_moe_tiny", "qwen3_tiny", "qwen3_vl_moe_tiny"))
MCORE = tuple(int(n) for n in version("megatron-core").split(".")[:2])
COMMON = ("train.steps=4", "train.warmup_steps=1", "data.seq_len=64", "model.num_layers=4", "train.receipt=false")
SP = ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.etp=1")
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "one rank": (MOE, 1, ()),
    "rows of one document": (MOE, 2, ("data.pack=false",)),
    "full recompute": (MOE, 1, ("train.recompute=full",)),
    "tp 2": (DENSE, 2, ("parallel.tp=2",)),
    "tp 2 with sequence parallelism": (DENSE, 2, SP[:2]),
    "ep 2": (MOE, 2, ("parallel.ep=2",)),
    "ep 2, allgather": (MOE, 2, ("parallel.ep=2", "moe.dispatcher=allgather")),
    "pp 2": (MOE, 2, ("parallel.pp=2",)),
    "pp 2 of 1 and 3 layers": (MOE, 2, ("parallel.pp=2", "parallel.pipeline_layout=[1,3]")),
    "pp 2, vpp 2": (MOE, 2, ("parallel.pp=2", "parallel.vpp=2")),
    "copies": (MOE, 2, ("megatron.data_parallel=ddp",)),
    "no overlap": (MOE, 2, ("megatron.overlap_grad_reduce=false", "megatron.overlap_param_gather=false")),
    "copies of experts: tp 2 with ep 1, etp 1": (MOE, 2, SP),
    "folding: tp 2 with ep 4, etp 1": (MOE, 4, (*SP, "parallel.ep=4")),
    "pp 2 with ep 2": (MOE, 4, ("parallel.pp=2", "parallel.ep=2")),
}


def reference(config: str, words: tuple[str, ...]) -> Job:
    """The torch backend on one rank, on the same rows."""
    rows = tuple(w for w in words if w.startswith("data."))
    return Job(f"torch {Path(config).stem} {' '.join(rows)}".strip(), 1, (config, *COMMON, *rows, "eval.every=2"))


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    """Every run that is asked for, with its reference."""
    root = tmp_path_factory.mktemp("megatron")
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    runs = {name: run for name, run in RUNS.items() if name in wanted}
    jobs = {job.name: job for config, _, words in runs.values() if (job := reference(config, words))}
    for name, (config, ranks, words) in runs.items():
        jobs[name] = Job(name, ranks, (config, *COMMON, "backend=megatron", "eval.every=2", *words))
    return root, train_all(list(jobs.values()), root, timeout=6000, script=ROOT / "tests/support/megatron/megatron_many.py")


@pytest.mark.timeout(7000)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.sample("ep 2")
def test_equals_the_torch_backend_on_one_rank(name: str, trained: tuple[Path, dict[str, str | None]]) -> None:
    root, errors = trained
    config, _, words = RUNS[name]
    expected = reference(config, words).name
    assert errors[expected] is None, errors[expected]
    assert errors[name] is None, errors[name]
    far = difference(root / name, root / expected)
    assert far["loss"] < 2e-5, far
    assert far["grad_norm"] < 2e-4, far
    mine, theirs = ([row["loss"] for row in summary(root / x)["eval"]] for x in (name, expected))
    assert mine == pytest.approx(theirs, rel=1e-4)
    assert summary(root / name)["num_parameters"] == summary(root / expected)["num_parameters"]


@pytest.mark.timeout(2000)
@pytest.mark.full
def test_every_matrix_product_of_a_trace_lies_in_a_named_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playbook_bench.trace.table._WORST_LISTED", 10_000)
    common = ("train.steps=3", "train.warmup_steps=1", "data.seq_len=64", "backend=megatron", "profile.kineto=true", "train.receipt=false")
    jobs = [
        Job("dense", 1, (DENSE, *common)),
        Job("dense, recomputed", 1, (DENSE, *common, "train.recompute=full")),
        Job("experts, recomputed", 1, (MOE, *common, "train.recompute=full")),
        Job("stages", 2, (DENSE, *common, "parallel.pp=2", "train.global_batch_size=4")),
        Job("images", 1, (VISION, *common, "train.global_batch_size=4", "data.num_workers=0")),
        Job("torch", 1, (DENSE, *common, "train.recompute=full", "backend=torch")),
        Job("predictions", 1, (MOE, *common, "model.mtp_layers=2")),
    ]
    loss, inner = (
        {("loss", "forward"), ("loss", "backward")},
        {("decoder/attention", "backward"), ("embedding", "forward"), ("embedding", "backward")},
    )
    dense = {("decoder/mlp", "forward"), ("decoder/mlp", "backward")}
    wanted = {
        "dense": loss | inner | dense,
        "dense, recomputed": loss | inner | dense | {("decoder/mlp", "recompute")},
        "experts, recomputed": loss | inner,
        "stages": {("embedding", "backward")},  # the first one is traced, which has no head
        "images": loss | inner,
        "torch": loss | inner | dense | {("decoder/mlp", "recompute")},
        "predictions": loss | inner,
    }
    ended = train_all(jobs, tmp_path, timeout=1800, script=ROOT / "tests/support/megatron/megatron_many.py")
    assert not any(ended.values()), ended
    for job in jobs:
        traces = sorted((tmp_path / job.name).rglob("trace*.json"))
        tables = [build(kineto.read(path)) for path in traces]
        assert not [o for t in tables for o in t.unattributed if re.search(r"matmul|mm|linear", o.name)], job.name
        assert wanted[job.name] <= {(r.path, r.phase) for t in tables for r in t.rows}, job.name
        assert not [r.path for t in tables for r in t.rows if r.path.startswith("embedding/")], job.name


@pytest.mark.timeout(2000)
@pytest.mark.full
def test_the_receipt_names_groups_and_ranges(tmp_path: Path) -> None:
    words = (MOE, *COMMON[:3], "model.num_layers=2", "backend=megatron", "parallel.ep=2", "train.global_batch_size=4")
    job = Job("observed", 2, words)
    assert train_all([job], tmp_path, timeout=1800, script=ROOT / "tests/support/megatron/megatron_many.py") == {"observed": None}
    found = summary(tmp_path / "observed")
    receipt = found["receipt"]
    layers, microbatches = 2, 2
    assert receipt["numbers"]["moe_layers"] == layers
    for name in ("attention", "router", "experts"):
        assert receipt["ranges"][name] == receipt["ranges"][f"{name}.bwd"] == layers * microbatches
    assert receipt["ranges"]["embedding"] == receipt["ranges"]["embedding.bwd"] == microbatches
    assert {"step", "data", "forward", "backward", "decoder", "dispatch", "combine", "loss", "optimizer"} <= set(receipt["ranges"])
    exchanged = {(r["inside"], r["phase"]) for r in receipt["collectives"] if r["op"] == "all_to_all" and r["group"] == "ep"}
    assert exchanged == {(inside, phase) for inside in ("dispatch", "combine") for phase in ("forward", "backward")}
    assert any(r["op"] == "reduce_scatter" and r["group"] == "dp_cp" and r["bytes"] for r in receipt["collectives"])
    held = found["metrics"]
    assert held["optimizer_bytes_per_rank"] > held["param_bytes_per_rank"] > 0
    assert held["dispatch_bytes_per_token_layer"] > 0


RESUMED = {"ep 2": (2, ("parallel.ep=2",)), "pp 2, vpp 2": (2, ("parallel.pp=2", "parallel.vpp=2"))}


@pytest.mark.timeout(4000)
@pytest.mark.full
def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path: Path) -> None:
    jobs = []
    for name, (ranks, layout) in RESUMED.items():
        words = (MOE, *COMMON[1:], "backend=megatron", "optimizer.schedule=constant", *layout)
        saved = (f"checkpoint.dir={tmp_path / 'saved' / name}", "checkpoint.every=2", "checkpoint.keep=1")
        jobs += [
            Job(f"{name}: whole", ranks, (*words, "train.steps=4")),
            Job(f"{name}: first", ranks, (*words, "train.steps=2", *saved)),
            Job(f"{name}: rest", ranks, (*words, "train.steps=4", *saved)),
        ]
    ep = (
        MOE,
        *COMMON[1:],
        "backend=megatron",
        "optimizer.schedule=constant",
        "train.steps=6",
        f"checkpoint.dir={tmp_path / 'saved' / 'ep 2'}",
    )
    jobs += [Job("more ranks", 4, (*ep, "parallel.ep=2")), Job("other layout", 4, (*ep, "parallel.ep=4"))]
    ep = (*ep, "parallel.ep=2")
    jobs += [Job("other rate", 2, (*ep, "optimizer.lr=1e-5")), Job("other betas", 2, (*ep, "optimizer.betas=[0.1,0.2]"))]
    errors = train_all(jobs, tmp_path, timeout=3800, script=ROOT / "tests/support/megatron/megatron_many.py")
    assert "was saved with ep 2 where this run has 4" in str(errors.pop("other layout"))
    assert {name: error for name, error in errors.items() if error} == {}
    for name in RESUMED:
        whole, first, rest = (steps(tmp_path / f"{name}: {part}") for part in ("whole", "first", "rest"))
        assert [r["loss"] for r in first + rest] == pytest.approx([r["loss"] for r in whole], rel=1e-6)
        assert [r["grad_norm"] for r in first + rest] == pytest.approx([r["grad_norm"] for r in whole], rel=1e-5)
        assert [p.name for p in (tmp_path / "saved" / name).iterdir()] == ["step_00000004"]
    same, rate, betas = (steps(tmp_path / name) for name in ("more ranks", "other rate", "other betas"))
    assert [r["step"] for r in same] == [5, 6]
    # The first loss is of the weights that were saved, the second of an update by this run's own settings.
    for other in (rate, betas):
        assert other[0]["loss"] == pytest.approx(same[0]["loss"], rel=1e-6)
        assert other[1]["loss"] != pytest.approx(same[1]["loss"], rel=1e-4)


@pytest.mark.timeout(2000)
@pytest.mark.full
def test_biases_of_routers_are_not_rounded_with_the_weights(tmp_path: Path) -> None:
    """Each of two steps moves them by a thousandth; in BF16 they would be 0.03 off from the first one on."""
    given, left = tmp_path / "given", tmp_path / "left"
    words = ("model=deepseek_v3_tiny", *COMMON[1:], "model.num_layers=2", "backend=megatron", "train.dtype=bf16", "train.steps=2")
    config = load(ROOT / MOE, parse_overrides(list(words)))
    biases = 8 + torch.arange(config.model.num_experts) / 100
    state = random_state(config.model)
    weights.save_safetensors(config.model, {k: biases if k.endswith("router.bias") else v for k, v in state.items()}, given)
    job = Job("read", 1, (MOE, *words, f"init.weights={given}", f"checkpoint.export={left}"))
    assert train_all([job], tmp_path, timeout=1800, script=ROOT / "tests/support/megatron/megatron_many.py") == {"read": None}
    found = [v for k, v in weights.load_safetensors(config.model, left).items() if k.endswith("router.bias")]
    assert len(found) == 2
    assert all((bias - biases).abs().max() < 2.1e-3 for bias in found)


BALANCED = ("moe.aux_loss_coeff=0.5", "model.num_layers=2", "train.micro_batch_size=2", "train.global_batch_size=4")
PADDED: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "packed": (MOE, 1, ()),
    "rows": (MOE, 1, ("data.pack=false",)),
    "packed, sequence parallel": (MOE, 2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "rows, stages, recomputed": (MOE, 2, ("data.pack=false", "parallel.pp=2", "train.recompute=full")),
    "images": (VISION, 1, ("data.seq_len=512",)),
}


@pytest.mark.full
@pytest.mark.timeout(4000)
def test_balancing_losses_leave_padding_out_on_both_backends(tmp_path: Path) -> None:
    jobs, equal = [], {}
    for name, (path, ranks, words) in PADDED.items():
        alone = tuple(word for word in words if not word.startswith(("parallel", "train.recompute")))
        equal[name] = f"torch {path} {alone}".replace("/", " ")
        if equal[name] not in {job.name for job in jobs}:
            jobs.append(Job(equal[name], 1, (path, *COMMON, *BALANCED, *alone)))
        jobs.append(Job(name, ranks, (path, *COMMON, *BALANCED, "backend=megatron", *words)))
    errors = train_all(jobs, tmp_path, timeout=3800, script=ROOT / "tests/support/megatron/megatron_many.py")
    assert not any(errors.values()), errors
    for name, expected in equal.items():
        far = difference(tmp_path / name, tmp_path / expected)
        assert far["loss"] < 2e-5, (name, far)
        assert far["grad_norm"] < 2e-4, (name, far)


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_depths_of_multi_token_prediction_leave_padding_out(tmp_path: Path) -> None:
    """Padded rows train as the same rows without padding, whatever is run again in the backward pass."""
    words = (MOE, *COMMON, *BALANCED, "backend=megatron", "model.mtp_layers=2")
    again = {
        "packed": (),
        "rows": ("train.recompute=full",),
        "packed, again": ("train.recompute=selective", "train.recompute_modules=[moe]"),
    }
    pack = {name: f"data.pack={str('packed' in name).lower()}" for name in again}
    jobs = [Job(f"{name}, bare", 1, (*words, pack[name], "data.pad=false")) for name in ("packed", "rows")]
    jobs += [Job(name, 1, (*words, pack[name], *more)) for name, more in again.items()]
    errors = train_all(jobs, tmp_path, timeout=1800, script=ROOT / "tests/support/megatron/megatron_many.py")
    assert not any(errors.values()), errors
    for name in again:
        rows, bare = steps(tmp_path / name), steps(tmp_path / f"{name.split(',')[0]}, bare")
        assert sum(row["raw_tokens"] for row in rows) > sum(row["raw_tokens"] for row in bare)
        # In rows, the last token of a document sees the embedding of padding at its first depth, and none in a stream of documents.
        for key, most in (("loss", 2e-5), ("grad_norm", 2e-3 if name == "rows" else 2e-4)):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in bare], rel=most), name


FSDP = ("megatron.data_parallel=megatron_fsdp",)
SHARDED: dict[str, tuple[int, tuple[str, ...], tuple[int, int]]] = {
    "dp 2": (2, (*FSDP, "train.receipt=true"), (0, 16)),
    "dp 2, gradients and optimizer": (2, (*FSDP, "train.receipt=true", "megatron.sharding_strategy=optim_grads"), (0, 16)),
    "dp 2, balanced": (2, (*FSDP, "moe.aux_loss_coeff=0.1"), (0, 16)),
    "dp 4, ep 2": (4, (*FSDP, "parallel.ep=2"), (0, 16)),
    # A data-parallel group of one rank, which megatron-core has right from 0.19 on.
    "dp 1": (1, FSDP, (0, 19)),
    "dp 2, optimizer": (2, (*FSDP, "megatron.sharding_strategy=optim"), (0, 19)),
    "dp 2, ep 2": (2, (*FSDP, "parallel.ep=2"), (0, 19)),
    "dp 2, ep 2, gradients and optimizer": (2, (*FSDP, "parallel.ep=2", "megatron.sharding_strategy=optim_grads"), (0, 19)),
    "images, dp 2": (2, (*FSDP, "data.seq_len=256"), (0, 19)),
    "images, dp 2, ep 2": (2, (*FSDP, "data.seq_len=256", "parallel.ep=2"), (0, 19)),
}
"""Layouts of Megatron-FSDP, with the ranks of each and the megatron-core from which on its gradients are right."""


def sharded_job(name: str, ranks: int, words: tuple[str, ...]) -> Job:
    """A run over several micro-batches."""
    config = VISION if name.startswith("images") else MOE
    return Job(name, ranks, (config, *COMMON, "train.global_batch_size=8", "train.dtype=bf16", "backend=megatron", *words))


def beside(name: str) -> Job:
    """The same layout with the distributed optimizer; one job for all that differ in what they shard alone."""
    ranks, words, _ = SHARDED[name]
    plain = tuple(w for w in words if not w.startswith(("megatron.data_parallel", "megatron.sharding_strategy", "train.receipt")))
    return sharded_job(" ".join(("images" * name.startswith("images"), str(ranks), *plain)).strip(), ranks, plain)


@pytest.mark.parametrize(("words", "refused"), [(("parallel.ep=2",), True), ((), False)])
def test_experts_that_the_norm_counts_too_little_are_refused(words: tuple[str, ...], refused: bool) -> None:
    from playbook_trainer.megatron.wrap import gradient_problems

    path, *overrides = sharded_job("no_shard", 2, (*FSDP, "megatron.sharding_strategy=no_shard", *words)).words
    problems = gradient_problems(load(ROOT / path, parse_overrides(overrides)), 2, "0.19.2")
    assert (problems == []) == (not refused)
    assert all("no_shard with parallel.ep 2" in p and "set optim_grads_params" in p for p in problems)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    """The layouts that the installed version has right, each beside the distributed optimizer."""
    root = tmp_path_factory.mktemp("sharded")
    jobs = {name: sharded_job(name, ranks, words) for name, (ranks, words, since) in SHARDED.items() if since <= MCORE}
    jobs |= {plain.name: plain for plain in map(beside, list(jobs))}
    return root, train_all(list(jobs.values()), root, timeout=3800, script=ROOT / "tests/support/megatron/megatron_many.py")


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.full
def test_megatron_fsdp_adds_gradients_up_over_micro_batches(name: str, sharded: tuple[Path, dict[str, str | None]]) -> None:
    root, errors = sharded
    ranks, words, since = SHARDED[name]
    if since > MCORE:
        from playbook_trainer.megatron.wrap import gradient_problems

        path, *overrides = sharded_job(name, ranks, words).words
        config = load(ROOT / path, parse_overrides(overrides))
        assert all("install 0.19 or later" in p for p in gradient_problems(config, ranks, version("megatron-core")) or [""])
        assert not gradient_problems(config, ranks, "0.19.2")
        return
    assert errors[name] is None, errors[name]
    far = difference(root / name, root / beside(name).name)
    print(name, far)
    assert far["loss"] < 5e-5, far
    assert far["grad_norm"] < 5e-4, far


@pytest.mark.timeout(4000)
@pytest.mark.full
@pytest.mark.parametrize(("name", "sizes"), [("dp 2", (2 / 2, 4 / 2, 12 / 2)), ("dp 2, gradients and optimizer", (2, 4 / 2, 12 / 2))])
def test_what_a_rank_of_megatron_fsdp_holds_is_counted_once_and_all_of_it(
    name: str, sizes: tuple[float, ...], sharded: tuple[Path, dict[str, str | None]]
) -> None:
    """Bytes per parameter over two ranks: 16-bit weights, float32 gradients, and float32 master weights and moments."""
    found = summary(sharded[0] / name)
    held = [found["metrics"][f"{what}_bytes_per_rank"] / found["num_parameters"] for what in ("param", "grad", "optimizer")]
    assert held == pytest.approx(sizes, rel=0.02)
