"""The megatron backend's wiring on a CPU: each layout, schedule and switch computes what the torch backend computes on one rank.

A shim stands in for CUDA (`megatron_shim.py`), so nothing here speaks of speed, and what needs Transformer Engine is in tests/gpu/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import Job, Runs, assert_near, good, train_all
from parity import random_state
from ranks import ROOT, steps, summary

from playbook_bench.trace import kineto
from playbook_bench.trace.table import build
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.huggingface import weights

MOE, DENSE, VISION = (f"trainer/configs/{name}.yaml" for name in ("qwen3_moe_tiny", "qwen3_tiny", "qwen3_vl_moe_tiny"))
COMMON = ("train.steps=4", "train.warmup_steps=1", "data.seq_len=64", "model.num_layers=4", "train.receipt=false")
SP = ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.etp=1")
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "rows of one document": (MOE, 2, ("data.pack=false",)),
    "tp 2": (DENSE, 2, ("parallel.tp=2",)),
    "tp 2 with sequence parallelism": (DENSE, 2, SP[:2]),
    "ep 2": (MOE, 2, ("parallel.ep=2",)),
    "ep 2, allgather": (MOE, 2, ("parallel.ep=2", "moe.dispatcher=allgather")),
    "pp 2 of 1 and 3 layers": (MOE, 2, ("parallel.pp=2", "parallel.pipeline_layout=[1,3]")),
    "pp 2, vpp 2": (MOE, 2, ("parallel.pp=2", "parallel.vpp=2")),
    "copies": (MOE, 2, ("megatron.data_parallel=ddp",)),
    "no overlap": (MOE, 2, ("megatron.overlap_grad_reduce=false", "megatron.overlap_param_gather=false")),
    "copies of experts: tp 2 with ep 1, etp 1": (MOE, 2, SP),
    "folding: tp 2 with ep 4, etp 1": (MOE, 4, (*SP, "parallel.ep=4")),
    "pp 2 with ep 2": (MOE, 4, ("parallel.pp=2", "parallel.ep=2")),
}


NEEDED: dict[str, Callable[..., Iterable[Job]]] = {}
"""By the name of a test, the runs that it looks at, of the folder and its parameters."""


def looks_at(jobs: Callable[..., Iterable[Job]]) -> Callable[[Any], Any]:
    """Marks a test with its runs."""

    def marked(test: Any) -> Any:
        NEEDED[test.__name__] = jobs
        return pytest.mark.timeout(7000)(test)

    return marked


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of all tests that are selected, by the forks of one process: importing megatron-core takes longer than most of them."""
    root = tmp_path_factory.mktemp("megatron")
    tests = [item for item in request.session.items if item.module is request.module and item.originalname in NEEDED]
    asked = [
        job
        for item in tests
        for job in NEEDED[item.originalname](root, *(item.callspec.params.values() if hasattr(item, "callspec") else ()))
    ]
    jobs = {job.name: job for job in asked}
    return root, train_all([*jobs.values()], root, timeout=6000, script=ROOT / "tests/support/megatron/megatron_many.py")


def tiny(name: str, config: str, ranks: int, *words: str) -> Job:
    """A run of a few steps."""
    return Job(name, ranks, (config, *COMMON, *words))


def reference(config: str, words: tuple[str, ...]) -> Job:
    """The torch backend on one rank, on the same rows."""
    rows = tuple(w for w in words if w.startswith("data."))
    return tiny(f"torch {Path(config).stem} {' '.join(rows)}".strip(), config, 1, *rows, "eval.every=2")


def layout(root: Path, name: str) -> list[Job]:
    """The layout and its reference."""
    config, ranks, words = RUNS[name]
    return [reference(config, words), tiny(name, config, ranks, "backend=megatron", "eval.every=2", *words)]


@looks_at(layout)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.sample("ep 2")
def test_equals_the_torch_backend_on_one_rank(name: str, trained: Runs) -> None:
    config, _, words = RUNS[name]
    mine, theirs = (good(trained, x) for x in (name, reference(config, words).name))
    assert_near(mine, theirs, 2e-5, 2e-4)
    found, expected = summary(mine), summary(theirs)
    assert [row["loss"] for row in found["eval"]] == pytest.approx([row["loss"] for row in expected["eval"]], rel=1e-4)
    assert found["num_parameters"] == expected["num_parameters"]


LOSS = {("loss", "forward"), ("loss", "backward")}
INNER = LOSS | {("decoder/attention", "backward"), ("embedding", "forward"), ("embedding", "backward")}
DENSE_PARTS = INNER | {("decoder/mlp", "forward"), ("decoder/mlp", "backward")}
AGAIN = "train.recompute=full"
TRACED: dict[str, tuple[str, int, tuple[str, ...], set[tuple[str, str]]]] = {
    "traced, dense": (DENSE, 1, (), DENSE_PARTS),
    "traced, dense, recomputed": (DENSE, 1, (AGAIN,), DENSE_PARTS | {("decoder/mlp", "recompute")}),
    "traced, experts, recomputed": (MOE, 1, (AGAIN,), INNER),
    # The first one is traced, which has no head.
    "traced, stages": (DENSE, 2, ("parallel.pp=2", "train.global_batch_size=4"), {("embedding", "backward")}),
    "traced, images": (VISION, 1, ("train.global_batch_size=4", "data.num_workers=0"), INNER),
    "traced, torch": (DENSE, 1, (AGAIN, "backend=torch"), DENSE_PARTS | {("decoder/mlp", "recompute")}),
    "traced, predictions": (MOE, 1, ("model.mtp_layers=2",), INNER),
}
"""The parts and phases that the traces must have."""
PROFILED = (
    "train.steps=3",
    "train.warmup_steps=1",
    "data.seq_len=64",
    "backend=megatron",
    "profile.kineto=true",
    "profile.steps=1",
    "train.receipt=false",
)


@looks_at(lambda root: [Job(name, ranks, (config, *PROFILED, *words)) for name, (config, ranks, words, _) in TRACED.items()])
@pytest.mark.full
def test_every_matrix_product_of_a_trace_lies_in_a_named_part(trained: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playbook_bench.trace.table._WORST_LISTED", 10_000)
    for name, (*_, wanted) in TRACED.items():
        tables = [build(kineto.read(path)) for path in sorted(good(trained, name).rglob("trace*.json"))]
        assert not [o for t in tables for o in t.unattributed if re.search(r"matmul|mm|linear", o.name)], name
        assert wanted <= {(r.path, r.phase) for t in tables for r in t.rows}, name
        assert not [r.path for t in tables for r in t.rows if r.path.startswith("embedding/")], name


OBSERVED = (MOE, *COMMON[:3], "model.num_layers=2", "backend=megatron", "parallel.ep=2", "train.global_batch_size=4")


@looks_at(lambda root: [Job("observed", 2, OBSERVED)])
@pytest.mark.full
def test_the_receipt_names_groups_and_ranges(trained: Runs) -> None:
    found = summary(good(trained, "observed"))
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


def resumed(root: Path) -> Iterable[Job]:
    """Of each layout the whole run and its two parts, then runs that go on from the second part with other ranks and settings."""
    common = (MOE, *COMMON[1:], "backend=megatron", "optimizer.schedule=constant")
    for name, (ranks, words) in RESUMED.items():
        saved = (f"checkpoint.dir={root / 'saved' / name}", "checkpoint.every=2", "checkpoint.keep=1")
        yield Job(f"whole {name}", ranks, (*common, *words, "train.steps=4"))
        yield Job(f"first {name}", ranks, (*common, *words, "train.steps=2", *saved))
        yield Job(f"rest {name}", ranks, (*common, *words, "train.steps=4", *saved))
    on = (*common, "train.steps=6", f"checkpoint.dir={root / 'saved' / 'ep 2'}")
    yield Job("other rate", 2, (*on, "parallel.ep=2", "optimizer.lr=1e-5"))
    yield Job("other betas", 2, (*on, "parallel.ep=2", "optimizer.betas=[0.1,0.2]"))
    yield Job("more ranks", 4, (*on, "parallel.ep=2"))
    yield Job("other layout", 4, (*on, "parallel.ep=4"))


@looks_at(resumed)
@pytest.mark.full
def test_a_resumed_run_goes_on_as_the_whole_one(trained: Runs) -> None:
    root, every = trained
    errors = {job.name: every[job.name] for job in resumed(root)}
    assert "was saved with ep 2 where this run has 4" in str(errors.pop("other layout"))
    assert {name: error for name, error in errors.items() if error} == {}
    for name in RESUMED:
        whole, first, rest = (steps(root / f"{part} {name}") for part in ("whole", "first", "rest"))
        assert [r["loss"] for r in first + rest] == pytest.approx([r["loss"] for r in whole], rel=1e-6)
        assert [r["grad_norm"] for r in first + rest] == pytest.approx([r["grad_norm"] for r in whole], rel=1e-5)
        assert [p.name for p in (root / "saved" / name).iterdir()] == ["step_00000004"]
    same, rate, betas = (steps(root / name) for name in ("more ranks", "other rate", "other betas"))
    assert [r["step"] for r in same] == [5, 6]
    # The first loss is of the weights that were saved, the second of an update by this run's own settings.
    for other in (rate, betas):
        assert other[0]["loss"] == pytest.approx(same[0]["loss"], rel=1e-6)
        assert other[1]["loss"] != pytest.approx(same[1]["loss"], rel=1e-4)


ROUTED = ("model=deepseek_v3_tiny", *COMMON[1:], "model.num_layers=2", "backend=megatron", "train.dtype=bf16", "train.steps=2")
ROUTED_MODEL = load(ROOT / MOE, parse_overrides(list(ROUTED))).model
BIASES = 8 + torch.arange(ROUTED_MODEL.num_experts) / 100


def with_biases(root: Path) -> list[Job]:
    """A run from weights whose routers have these biases."""
    state = {k: BIASES if k.endswith("router.bias") else v for k, v in random_state(ROUTED_MODEL).items()}
    weights.save_safetensors(ROUTED_MODEL, state, root / "given")
    return [Job("read", 1, (MOE, *ROUTED, f"init.weights={root / 'given'}", f"checkpoint.export={root / 'left'}"))]


@looks_at(with_biases)
@pytest.mark.full
def test_biases_of_routers_are_not_rounded_with_the_weights(trained: Runs) -> None:
    """Each of two steps moves them by a thousandth; in BF16 they would be 0.03 off from the first one on."""
    left = good(trained, "read").with_name("left")
    found = [v for k, v in weights.load_safetensors(ROUTED_MODEL, left).items() if k.endswith("router.bias")]
    assert len(found) == 2
    assert all((bias - BIASES).abs().max() < 2.1e-3 for bias in found)


BALANCED = ("moe.aux_loss_coeff=0.5", "model.num_layers=2", "train.micro_batch_size=2", "train.global_batch_size=4")
PADDED: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "balanced, packed": (MOE, 1, ()),
    "balanced, rows": (MOE, 1, ("data.pack=false",)),
    "balanced, packed, sequence parallel": (MOE, 2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "balanced, rows, stages, recomputed": (MOE, 2, ("data.pack=false", "parallel.pp=2", "train.recompute=full")),
    "balanced, images": (VISION, 1, ("data.seq_len=512",)),
}


def balanced(root: Path) -> Iterable[Job]:
    """Each run on megatron-core, and on one rank of the torch backend."""
    for name, (config, ranks, words) in PADDED.items():
        yield tiny(f"torch {name}", config, 1, *BALANCED, *(w for w in words if w.startswith("data.")))
        yield tiny(name, config, ranks, *BALANCED, "backend=megatron", *words)


@looks_at(balanced)
@pytest.mark.full
def test_balancing_losses_leave_padding_out_on_both_backends(trained: Runs) -> None:
    for name in PADDED:
        assert_near(good(trained, name), good(trained, f"torch {name}"), 2e-5, 2e-4)


DEEPER = {
    "packed": (),
    "rows": ("train.recompute=full",),
    "packed, again": ("train.recompute=selective", "train.recompute_modules=[moe]"),
}
"""What is run again in the backward pass."""


def predicting(root: Path) -> Iterable[Job]:
    """Each run, and the same rows without padding."""
    for name, more in DEEPER.items():
        words = (*BALANCED, "backend=megatron", "model.mtp_layers=2", f"data.pack={str('packed' in name).lower()}")
        yield tiny(f"deeper, {name}", MOE, 1, *words, *more)
        yield tiny(f"bare, {name.split(',')[0]}", MOE, 1, *words, "data.pad=false")


@looks_at(predicting)
@pytest.mark.full
def test_depths_of_multi_token_prediction_leave_padding_out(trained: Runs) -> None:
    """Padded rows train as the same rows without padding, whatever is run again in the backward pass."""
    for name in DEEPER:
        rows, bare = steps(good(trained, f"deeper, {name}")), steps(good(trained, f"bare, {name.split(',')[0]}"))
        assert sum(row["raw_tokens"] for row in rows) > sum(row["raw_tokens"] for row in bare)
        # In rows, the last token of a document sees the embedding of padding at its first depth, and none in a stream of documents.
        for key, most in (("loss", 2e-5), ("grad_norm", 2e-3 if name == "rows" else 2e-4)):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in bare], rel=most), name


FSDP = ("megatron.data_parallel=megatron_fsdp",)
SHARDED: dict[str, tuple[int, tuple[str, ...]]] = {
    "sharded dp 2": (2, (*FSDP, "train.receipt=true")),
    "sharded dp 2, gradients and optimizer": (2, (*FSDP, "train.receipt=true", "megatron.sharding_strategy=optim_grads")),
    "sharded dp 2, balanced": (2, (*FSDP, "moe.aux_loss_coeff=0.1")),
    "sharded dp 4, ep 2": (4, (*FSDP, "parallel.ep=2")),
}
LATER: dict[str, tuple[int, tuple[str, ...]]] = {
    "sharded dp 1": (1, FSDP),  # a data-parallel group of one rank
    "sharded dp 2, optimizer": (2, (*FSDP, "megatron.sharding_strategy=optim")),
    "sharded dp 2, ep 2": (2, (*FSDP, "parallel.ep=2")),
    "sharded dp 2, ep 2, gradients and optimizer": (2, (*FSDP, "parallel.ep=2", "megatron.sharding_strategy=optim_grads")),
    "sharded images, dp 2": (2, (*FSDP, "data.seq_len=256")),
    "sharded images, dp 2, ep 2": (2, (*FSDP, "data.seq_len=256", "parallel.ep=2")),
}
"""Layouts of Megatron-FSDP whose gradients megatron-core has right, and those that it has right from 0.19 on, which needs a GPU."""


def sharded_job(name: str, ranks: int, words: tuple[str, ...]) -> Job:
    """A run of two steps, each over two micro-batches of a rank."""
    size = ("train.steps=2", f"train.global_batch_size={2 * ranks}", "train.dtype=bf16", "backend=megatron")
    return tiny(name, VISION if "images" in name else MOE, ranks, *size, *words)


def beside(name: str) -> Job:
    """The same layout with the distributed optimizer; one job for all that differ in what they shard alone."""
    ranks, words = SHARDED[name]
    plain = tuple(w for w in words if not w.startswith(("megatron.data_parallel", "megatron.sharding_strategy", "train.receipt")))
    return sharded_job(" ".join(("plain", str(ranks), *plain)), ranks, plain)


def problems(name: str, ranks: int, words: tuple[str, ...], core: str) -> list[str]:
    """What is wrong with the gradients of a version of megatron-core."""
    from playbook_trainer.megatron.wrap import gradient_problems

    path, *overrides = sharded_job(name, ranks, words).words
    return gradient_problems(load(ROOT / path, parse_overrides(overrides)), ranks, core)


@pytest.mark.parametrize(("words", "refused"), [(("parallel.ep=2",), True), ((), False)])
def test_experts_that_the_norm_counts_too_little_are_refused(words: tuple[str, ...], refused: bool) -> None:
    found = problems("no_shard", 2, (*FSDP, "megatron.sharding_strategy=no_shard", *words), "0.19.2")
    assert (found == []) == (not refused)
    assert all("no_shard with parallel.ep 2" in p and "set optim_grads_params" in p for p in found)


@pytest.mark.parametrize("name", LATER)
def test_layouts_whose_gradients_are_right_in_a_later_version_are_refused(name: str) -> None:
    assert all("install 0.19 or later" in p for p in problems(name, *LATER[name], "0.16.1") or [""])
    assert not problems(name, *LATER[name], "0.19.2")


def both(_: Path, name: str, *__: Any) -> list[Job]:
    """The layout beside the distributed optimizer."""
    return [sharded_job(name, *SHARDED[name]), beside(name)]


@looks_at(both)
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.full
def test_megatron_fsdp_adds_gradients_up_over_micro_batches(name: str, trained: Runs) -> None:
    assert_near(good(trained, name), good(trained, beside(name).name), 5e-5, 5e-4)


@looks_at(both)
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes"), [("sharded dp 2", (2 / 2, 4 / 2, 12 / 2)), ("sharded dp 2, gradients and optimizer", (2, 4 / 2, 12 / 2))]
)
def test_what_a_rank_of_megatron_fsdp_holds_is_counted_once_and_all_of_it(name: str, sizes: tuple[float, ...], trained: Runs) -> None:
    """Bytes per parameter over two ranks: 16-bit weights, float32 gradients, and float32 master weights and moments."""
    found = summary(good(trained, name))
    held = [found["metrics"][f"{what}_bytes_per_rank"] / found["num_parameters"] for what in ("param", "grad", "optimizer")]
    assert held == pytest.approx(sizes, rel=0.02)
