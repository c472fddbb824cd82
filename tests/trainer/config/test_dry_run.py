"""The dry run: without torch, for any number of ranks, and right about what a real run holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from in_process import refused, run

from playbook.errors import ConfigError
from playbook.paths import data_root, repo_root, sources
from playbook.planner.time.cluster import cluster
from playbook.records.case import load_case
from playbook_bench import statements
from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config.dry_run import dry_run, predicted
from playbook_trainer.config.tree import load
from playbook_trainer.export.render import TARGETS
from playbook_trainer.torch.model.decoder import Decoder, Options
from playbook_trainer.torch.parallel.sharding import initial_value

TEXT = data_root("configs") / "qwen3_moe_tiny.yaml"
LARGE = data_root("configs") / "qwen3_30b_a3b_24l.yaml"
WIDE = ["parallel.pp=4", "parallel.vpp=2", "parallel.cp=4", "parallel.ep=8", "train.global_batch_size=1024", "data.seq_len=32768"]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(repo_root()))}


@pytest.mark.parametrize("name", ["qwen3_moe_tiny", "qwen3_tiny", "qwen3_vl_moe_tiny", "qwen3_vl_tiny"])
def test_the_parameters_are_those_of_the_model(name):
    config = load(data_root("configs") / f"{name}.yaml")
    with torch.device("meta"):
        model = Decoder(config.model, Options())
    held = sum(p.numel() for p in model.parameters())
    report = dry_run(config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": 4})}), 1)
    assert report.num_parameters == held
    assert report.stages[0].held == held
    assert report.stages[0].states == 16 * held  # parameter, gradient and two moments in float32


@pytest.mark.parametrize("name", ["qwen3_moe_tiny", "qwen3_tiny", "qwen3_vl_moe_tiny", "qwen3_vl_tiny"])
def test_tensor_parallel_ranks_hold_their_share_of_the_decoder_and_the_whole_tower(name):
    config = load(data_root("configs") / f"{name}.yaml", {"parallel.tp": 2})
    for rank in range(2):
        with torch.device("meta"):
            axes = Axes(tp=Axis("tp", 2, rank), etp=Axis("etp", 2, rank))
            model = Decoder(config.model, Options(axes=axes))
        assert dry_run(config, 2).stages[0].held == sum(p.numel() for p in model.parameters())


def test_offload_moves_bytes_to_the_host_and_loses_none():
    def stage(**overrides):
        return dry_run(load(TEXT, {"model.num_layers": 8, **overrides}), 1).stages[0]

    plain, sent = stage(), stage(**{"offload.activations": True, "offload.optimizer": True})
    assert plain.host == sent.states == 0
    assert sent.activations == pytest.approx(plain.activations * 3 / 8)
    assert sent.host + sent.activations == pytest.approx(plain.states + plain.activations)


SPLIT = {
    "optimizer.master_weights": "remainder",
    "train.dtype": "bf16",
    "parallel.reduce_dtype": "bf16",
    "optimizer.moments_dtype": "bf16",
}


@pytest.mark.parametrize(
    ("world", "words", "share"),
    [
        (4, {}, 1 / 4),
        (4, {"parallel.fsdp": False}, 1),
        (4, {"parallel.dp_replicate": 2}, 1 / 2),
        (4, {"parallel.ep": 2, "parallel.etp": 2}, 1 / 4),
        (4, {"parallel.ep": 4}, 1 / 4),
        (4, {"parallel.dp_replicate": 2, "parallel.ep": 4}, 0.3),  # experts, four fifths of it, span the copies and have one
        (1, {"optimizer.moments_dtype": "bf16", "optimizer.betas": [0.9, 0.95]}, 12 / 16),
        (8, SPLIT, 10 / 16 / 8),  # 2 weight, 2 remainder, 2 gradient, 4 moments
        (4, SPLIT, 12 / 16 / 4),  # two micro-batches add to a gradient in float32
    ],
)
def test_sharding_divides_the_state_and_16_bit_moments_lower_it(world, words, share):
    whole, found = (
        dry_run(load(TEXT, {"train.global_batch_size": 8, **w}), ranks).stages[0].states for ranks, w in ((1, {}), (world, words))
    )
    assert found == pytest.approx(share * whole, rel=0.01 if "parallel.ep" in words else 1e-6)


CAST = {"train.dtype": "bf16", "optimizer.master_weights": "fp32"}


@pytest.mark.parametrize(
    ("world", "words", "bytes_each"),
    [
        (1, CAST, 2),
        (2, {**CAST, "parallel.fsdp": False}, 2),
        (2, {**CAST, "parallel.reshard_after_forward": False}, 2),
        (2, {**CAST, "parallel.tp": 2}, 2),
        (1, {"train.dtype": "bf16", "optimizer.master_weights": "remainder"}, 0),  # weights in two halves are read where they lie
        (1, {"offload.optimizer": True}, 4),
        (1, {}, 0),
        (2, {"parallel.tp": 2}, 0),
    ],
)
def test_copies_of_weights_that_stay_until_the_backward_pass_count(world, words, bytes_each):
    """As measured on one and two ranks: what FSDP has handed out at the end of a forward pass is every weight, unless it is shared out."""
    stage = dry_run(load(TEXT, words), world).stages[0]
    assert stage.gathered == bytes_each * stage.held


def test_weights_that_are_shared_out_pass_by_but_for_those_of_experts_that_no_other_rank_has():
    passing, spread = (dry_run(load(TEXT, {"train.dtype": "bf16", **words}), 2).stages[0] for words in ({}, {"parallel.ep": 2}))
    assert passing.gathered < passing.held, "two layers of four, at most"
    assert spread.gathered > 2 * 4 * 4 * 3 * 64 * 64, "bytes, of four of eight experts in each of four layers"


@pytest.mark.parametrize(
    ("words", "ranks", "holds"),
    [
        ({"train.dtype": "fp32"}, (1, 1), False),
        ({"train.dtype": "fp32"}, (2, 1), True),
        ({"train.dtype": "fp32"}, (1, 2), True),
        ({"train.dtype": "bf16"}, (1, 1), True),
        ({"train.dtype": "bf16", "optimizer.master_weights": "remainder"}, (1, 1), False),
        ({"train.dtype": "bf16", "optimizer.master_weights": "remainder", "train.freeze": ["vision"]}, (1, 1), False),
        ({"train.dtype": "fp32", "offload.optimizer": True}, (1, 1), True),
    ],
)
def test_weights_are_held_by_fsdp_where_they_are_shared_cast_or_on_the_host(words, ranks, holds):
    assert load(TEXT, words).wants_fsdp(*ranks) is holds


def test_experts_of_their_own_width_and_cut_tokens_count():
    def stage(**overrides):
        return dry_run(load(TEXT, {"parallel.tp": 2, "parallel.fsdp": False, **overrides}), 2).stages[0]

    assert stage(**{"parallel.etp": 1, "parallel.ep": 2}).states == stage().states
    assert stage(**{"parallel.etp": 1}).states > stage().states
    assert stage(**{"parallel.sequence_parallel": True}).activations < stage().activations


def test_recompute_and_context_parallelism_lower_the_activations():
    def kept(world=4, **overrides):
        return dry_run(load(TEXT, {"train.global_batch_size": 8, "data.seq_len": 1024, **overrides}), world).stages[0].activations

    selective = {"train.recompute": "selective", "train.recompute_modules": ["layernorm", "moe_act"]}
    assert kept(**{"train.recompute": "full"}) < kept(**selective) < kept()
    ring = {"parallel.cp": 4, "parallel.cp_comm": "ring"}
    assert kept(**ring) == pytest.approx(kept() / 4)
    assert kept(**{**ring, "parallel.cp_comm": "allgather"}) > kept(**ring), "gathered keys stay"
    assert kept(**{**ring, "train.recompute": "full"}) == kept(**{"parallel.cp": 4, "train.recompute": "full"})
    first, *_, last = dry_run(load(TEXT, {"train.global_batch_size": 8, "parallel.pp": 4}), 4).stages
    assert first.activations == pytest.approx(4 * last.activations)  # microbatches in flight


def test_a_thousand_ranks_are_judged_without_torch():
    code = (
        "import sys\nfrom playbook_app.cli import app as cli\ntry:\n    cli.main(sys.argv[1:])\nfinally:\n"
        "    assert not {m.split('.')[0] for m in sys.modules} & {'torch', 'playbook_bench'}"
    )
    words = [sys.executable, "-c", code, "train", "--dry-run", "--json", "--gpus", "1024", str(LARGE), *WIDE]
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["legal"]
    assert (found["layout"]["dp"], found["layout"]["edp"], found["layout"]["microbatches"]) == (64, 32, 8)
    assert len(found["stages"]) == 4
    assert found["peak"] == max(s["peak"] for s in found["stages"])


@pytest.mark.parametrize(
    ("words", "says"), [(["moe.dispatcher=dedup"], True), (["moe.dispatcher=dedup", "parallel.ep=2"], False), ([], False)]
)
def test_a_dispatcher_that_never_runs_is_said(words, says, capsys):
    code, out, err = run(capsys, "train", "--dry-run", str(TEXT), "--gpus", "2", *words)
    assert (code, err) == (0, "")
    assert ("moe.dispatcher dedup has no effect at parallel.ep 1" in out) == says


def test_the_table_names_the_fullest_stage(capsys):
    code, out, _ = run(capsys, "train", "--dry-run", "--gpus", "1024", str(LARGE), *WIDE)
    assert code == 0
    assert out.startswith("can run: model qwen3_30b_a3b  gpus 1024")
    assert "a rank of stage 1 holds" in out


RUN = ["--dry-run", "--gpus", "1024", str(LARGE)]
ODD = "model={preset: deepseek_v3_tiny, qk_rope_head_dim: 7, head_dim: 23}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*RUN, "parallel.pp=5"], "24 layers do not divide into pp 5"),
        ([*RUN, "parallel.ep=3"], "128 experts do not divide over ep 3"),
        ([*RUN, "train.recompute=selective"], "names no modules"),
        ([*RUN, "train.global_batch_size=7"], "global batch 7 is not a multiple"),
        ([*RUN, "train.stpes=3"], "did you mean 'steps'"),
        (["--dry-run", str(TEXT), ODD], "qk_rope_head_dim 7 is odd"),
        (["--dry-run", "--build", "--gpus", "4", str(LARGE)], "--build builds models of the megatron backend"),
        (["--build", str(LARGE)], "say --dry-run too"),
    ],
)
def test_what_cannot_run_or_be_built_is_one_line_and_exit_code_2(capsys, words, says):
    assert says in refused(capsys, "train", *words)


@pytest.mark.parametrize(
    "word",
    [
        "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9,0.95,0.99]",
        "optimizer.betas=[0.9,1]",
        "optimizer.betas=[-0.1,0.9]",
        "model.rope_theta=1",
        "model.rope_theta=-5",
        "model.rms_norm_eps=0",
        "model.init_std=-1",
        "model.mtp_layers=100000",
        "model.num_layers=1001",
        "model.head_dim=15",
        "seed=-1",
        "seed=4294967296",
        *(f"model.vision.{size}=0" for size in ("in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size")),
        "model.vision.num_position_embeddings=-4",
        "model.vision.depth=1001",
    ],
)
def test_a_number_that_means_nothing_is_one_line_wherever_the_configuration_is_read(capsys, word):
    key = word.partition("=")[0].rpartition(".")[2]
    file = str(data_root("configs") / "qwen3_vl_tiny.yaml")
    for words in (["train", "--dry-run", file, word], *(["config", "export", file, word, "--to", target] for target in TARGETS)):
        assert key in refused(capsys, *words)


def test_the_largest_seed_draws_weights():
    config = load(TEXT, {"seed": 2**32 - 1})
    value = initial_value(config.model, config.seed)("embed.weight", [3], torch.device("cpu"))
    assert value.isfinite().all()


def test_the_other_backend_is_counted_by_its_own_rules():
    torch_state = dry_run(load(LARGE), 4).stages[0].states
    found = dry_run(load(LARGE, {"backend": "megatron"}), 4).stages[0]
    assert found.states > torch_state, "the distributed optimizer shards neither weights nor gradients"
    with pytest.raises(ConfigError, match="belongs to the torch backend"):
        dry_run(load(LARGE, {"backend": "megatron", "train.fused_loss": True}), 4)


def test_the_claim_fails_where_a_fault_is_none():
    case = load_case("dry-run-of-1024-gpus")
    holds, sentence, figures = statements.run(case)
    assert holds, sentence
    assert len(figures["refused"]) == len(case.arguments["illegal"])
    wrong = case.model_copy(update={"arguments": {**case.arguments, "illegal": [{"train.steps": 30}]}})
    assert not statements.run(wrong)[0]


def test_the_speed_of_attention_is_that_of_the_kernel_that_runs():
    """Rows that are one document each take cuDNN; documents of unequal lengths, and a configuration that says so, take flash."""
    told = {"train.dtype": "bf16", "parallel.ep": 1, "model.num_layers": 4}
    whole, packed, flash = (
        predicted(load(LARGE, told | more), 1, cluster("h200"))
        for more in (
            {"data.kind": "mock", "data.pack": False},
            {"data.pack": True, "train.attention": "flash"},
            {"data.kind": "mock", "data.pack": False, "train.attention": "flash"},
        )
    )
    assert whole.seconds.value < 0.95 * flash.seconds.value
    assert packed.seconds.value == flash.seconds.value


SIX_LAYERS = {"model.num_layers": 6, "parallel.ep": 1}
ONE_DOCUMENT = {"data.kind": "mock", "data.pack": False}


@pytest.mark.parametrize(
    ("name", "words", "gib", "speed"),
    [
        ("qwen3_30b_a3b_24l", SIX_LAYERS | ONE_DOCUMENT | {"train.micro_batch_size": 4, "train.global_batch_size": 4}, 62.9, 94_624),
        ("qwen3_30b_a3b_24l", SIX_LAYERS | ONE_DOCUMENT | {"train.micro_batch_size": 8}, 73.5, 106_600),
        ("qwen3_30b_a3b_24l", SIX_LAYERS, 73.9, 82_859),  # four micro-batches add to gradients that stay
        ("planned", {"model": "qwen3_1_7b", "data.seq_len": 4096, "train.micro_batch_size": 4, "train.global_batch_size": 4}, 53.6, 45_946),
    ],
)
def test_what_one_h200_was_seen_to_hold_and_to_do(name, words, gib, speed):
    """Runs of docs/experiments/fast-by-default.md and torch-beside-megatron.md, images left out."""
    config = load(data_root("configs") / f"{name}.yaml", words)
    assert dry_run(config, 1).stages[0].peak / 2**30 == pytest.approx(gib, rel=0.01)
    said = predicted(config, 1, cluster("h200")).tokens_per_s_per_gpu
    assert said.low <= speed <= said.high


FUSED = {
    "train.fused_activation": True, "train.fused_norms": True, "train.fused_loss": True, "train.compile.decoder": True, "optimizer.fused": True,
}  # fmt: skip
FUSED_EXPERTS = FUSED | {"moe.apply_probs_on": "activation", "moe.fused_permutation": True, "moe.fused_router": True}
TWELVE = {"model": "qwen3_30b_a3b", "model.num_layers": 12, "data.seq_len": 4096, "train.micro_batch_size": 2}


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        (FUSED_EXPERTS | TWELVE | {"train.global_batch_size": 8}, 39.1),
        (FUSED_EXPERTS | TWELVE | {"train.global_batch_size": 8, "parallel.ep": 4}, 41.8),
        (FUSED | TWELVE | {"model": "qwen3_8b", "model.num_layers": 18, "train.global_batch_size": 8}, 39.6),
    ],
)
def test_what_four_h200s_were_seen_to_hold_of_one_micro_batch(words, gib):
    """Gradients of one micro-batch come as activations go; the loss has the output layer's in float32."""
    assert dry_run(load(data_root("configs") / "planned.yaml", words), 4).stages[0].peak / 2**30 == pytest.approx(gib, rel=0.04)


def test_fsdp2_holds_what_registered_layouts_were_seen_to_hold():
    """Text on two and four H200s and on four H100s, four micro-batches a step."""
    folder = repo_root() / "docs" / "parity"
    registered, runs = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("planned-layouts.jsonl", "planned-layouts-runs.jsonl")
    )
    peaks = {r["name"]: r["peak_memory_bytes"] for r in runs if r["outcome"] == "ok"}
    compared = 0
    for row in registered:
        hardware = "" if row.get("hardware", "h200") == "h200" else f"{row['hardware']}x"
        name = f"{hardware}{row['gpus']}/{row['model']}/{row['layout']}"
        if row["layout"] == "fsdp2" and row["model"] != "vision" and name in peaks:
            held = dry_run(load(data_root("configs") / "planned.yaml", row["settings"]), row["gpus"]).stages[0]
            assert held.peak == pytest.approx(peaks[name], rel=0.01), name
            compared += 1
    assert compared >= 8


def test_sliced_attention_runs_through_flash_and_that_of_shared_heads_through_cudnn():
    """Masks of a slice that sees more keys than it has queries are flash's."""
    words = FUSED_EXPERTS | {"model": "qwen3_30b_a3b", "model.num_layers": 8, "data.seq_len": 65536, "parallel.cp": 4, "parallel.ep": 4, "train.global_batch_size": 1}  # fmt: skip
    sliced, shared = (
        predicted(load(data_root("configs") / "planned.yaml", words | {"parallel.cp_comm": comm}), 4, cluster("h200"))
        for comm in ("allgather", "ulysses")
    )
    assert sliced.parts["attention"] > 1.5 * shared.parts["attention"]
    assert sliced.tokens_per_s_per_gpu.low <= 15_661 <= sliced.tokens_per_s_per_gpu.high


def test_a_pipeline_keeps_the_vision_tower_of_each_micro_batch_in_flight() -> None:
    """Each forward pass of the first stage keeps the tower's activations until its backward pass."""
    tiny = data_root("configs") / "qwen3_vl_moe_tiny.yaml"
    alone, in_two = (dry_run(load(tiny, {"train.global_batch_size": 16, "parallel.pp": pp}), 4).stages[0] for pp in (1, 2))
    assert in_two.in_flight[0] > 1
    assert in_two.vision == in_two.in_flight[0] * alone.vision


def test_weights_that_are_bf16_already_are_predicted_without_casts_under_fsdp_too():
    steps = {}
    for master in ("fp32", "remainder"):
        config = load(LARGE, {"parallel.ep": 1, "train.global_batch_size": 64, "optimizer.master_weights": master})
        steps[master] = predicted(config, 4, cluster("h200")).parts["optimizer"]
    assert steps["remainder"] < 0.6 * steps["fp32"]
