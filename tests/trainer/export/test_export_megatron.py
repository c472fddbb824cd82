"""`playbook config export` for Megatron: flags that its own checks refuse together are never printed together."""

from __future__ import annotations

import pytest

from playbook.paths import data_root
from playbook_trainer.config.tree import load
from playbook_trainer.export.render import export

CONFIGS = data_root("configs")
LARGE = CONFIGS / "qwen3_30b_a3b_24l_megatron.yaml"
SMALL = CONFIGS / "qwen3_moe_tiny.yaml"
MEGATRON = ("megatron-lm", "megatron-bridge")
OFFLOADED = {"megatron.precision_aware_optimizer": False, "optimizer.moments_dtype": "fp32", "offload.optimizer": True}


def settings(path, words, target="megatron-lm"):
    """The fields of the other trainer, the lines that say them, and the keys that cannot be said."""
    found = export(load(path, words), target)
    return {s.field: s.value for s in found.settings}, set(found.lines), {r.key for r in found.missing}


def test_weights_keep_their_rows_where_megatron_lm_would_round_the_vocabulary_up():
    words = {"parallel.tp": 2, "parallel.sequence_parallel": True, "data.tokenizer": "tokenizer.json"}
    assert "--padded-vocab-size 151936" in settings(LARGE, words)[1]
    assert "padded_vocab_size" not in settings(LARGE, words, "megatron-bridge")[0]


@pytest.mark.parametrize("target", MEGATRON)
def test_a_rotary_base_that_is_no_whole_number_is_not_cut_to_one(target):
    fields, _, missing = settings(LARGE, {"model.rope_theta": 10000.5}, target)
    assert "rotary_base" not in fields
    assert "model.rope_theta" in missing


@pytest.mark.parametrize("grads", ["fp32", "bf16"])
@pytest.mark.parametrize("target", MEGATRON)
def test_an_offloaded_optimizer_is_the_precision_aware_one(target, grads):
    fields, lines, missing = settings(LARGE, {**OFFLOADED, "megatron.grad_reduce_dtype": grads}, target)
    assert fields["optimizer_cpu_offload"]
    assert fields["use_precision_aware_optimizer"]
    assert "offload.optimizer" not in missing
    assert target != "megatron-lm" or {"--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--exp-avg-dtype fp32"} <= lines


@pytest.mark.parametrize("grads", ["fp32", "bf16"])
def test_megatron_fsdp_is_told_the_precision_of_gradients_by_its_own_field(grads):
    words = {"megatron.data_parallel": "megatron_fsdp", "megatron.grad_reduce_dtype": grads, "parallel.pp": 1, "parallel.vpp": 1}
    _, lines, _ = settings(LARGE, words)
    assert f"--megatron-fsdp-main-grads-dtype {grads}" in lines
    fields, _, _ = settings(LARGE, {**words, "megatron.data_parallel": "distributed_optimizer"})
    assert "megatron_fsdp_main_grads_dtype" not in fields


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"precision.fp8": "delayed"}, True),
        ({"precision.fp8": "tensorwise"}, True),
        ({"precision.fp8": "delayed", **OFFLOADED}, True),
        ({"precision.fp8": "tensorwise", **OFFLOADED}, False),
        ({"precision.fp8": "tensorwise", "megatron.data_parallel": "ddp"}, False),
    ],
)
def test_weights_are_gathered_in_8_bits_where_it_can_be_said(words, said):
    fields, lines, missing = settings(LARGE, {"megatron.fp8_param": True, **words})
    assert fields["fp8_param"] == said
    assert ("--fp8-param-gather" in lines) == said
    assert ("megatron.fp8_param" in missing) != said


@pytest.mark.parametrize("target", MEGATRON)
@pytest.mark.parametrize(
    ("path", "words", "key"),
    [
        (SMALL, {"parallel.fsdp": False, "optimizer.moments_dtype": "bf16", "train.dtype": "bf16"}, "optimizer.moments_dtype"),
        (SMALL, {"parallel.fsdp": False, "optimizer.master_weights": "remainder", "train.dtype": "bf16"}, "optimizer.master_weights"),
        (SMALL, {"parallel.fsdp": False, "offload.optimizer": True}, "offload.optimizer"),
        (LARGE, {"megatron.data_parallel": "ddp"}, "megatron.precision_aware_optimizer"),
    ],
)
def test_what_needs_a_sharded_optimizer_cannot_be_said_without_one(path, words, key, target):
    if key == "megatron.precision_aware_optimizer":
        words = {**words, key: True}
    fields, _, missing = settings(path, words, target)
    assert not fields["use_distributed_optimizer"]
    assert not fields["use_precision_aware_optimizer"]
    assert not fields["optimizer_cpu_offload"]
    assert key in missing


def test_a_folder_for_checkpoints_comes_with_an_interval():
    assert {"--save saved", "--save-interval 16"} <= settings(LARGE, {"checkpoint.dir": "saved", "checkpoint.every": 0})[1]
    assert {"--save saved", "--save-interval 5"} <= settings(LARGE, {"checkpoint.dir": "saved", "checkpoint.every": 5})[1]
    assert settings(LARGE, {})[0]["save_interval"] is None


@pytest.mark.parametrize("target", MEGATRON)
def test_gathers_are_overlapped_with_reductions_alone(target):
    fields, lines, missing = settings(LARGE, {"megatron.overlap_grad_reduce": False}, target)
    assert not fields["overlap_param_gather"]
    assert "--overlap-param-gather" not in lines
    assert "megatron.overlap_param_gather" in missing
    assert settings(LARGE, {}, target)[0]["overlap_param_gather"]


@pytest.mark.parametrize("target", MEGATRON)
@pytest.mark.parametrize("graphs", [{"megatron.cuda_graph_impl": "full_iteration"}, {"train.cuda_graphs": ["moe"]}])
def test_graphs_that_hold_experts_pad_them(target, graphs):
    fields, _, _ = settings(LARGE, {**graphs, "moe.capacity_factor": 1.0}, target)
    assert fields["moe_pad_expert_input_to_capacity"]
    assert "moe_pad_expert_input_to_capacity" not in settings(LARGE, {"moe.capacity_factor": 1.0}, target)[0]


@pytest.mark.parametrize("target", MEGATRON)
def test_plain_frequencies_of_latent_attention_are_not_fused(target):
    for words, fused in (({}, True), ({"model.yarn": None}, False)):
        fields, lines, _ = settings(LARGE, {"model": "deepseek_v3", **words}, target)
        assert fields["apply_rope_fusion"] == fused
        assert target != "megatron-lm" or ("--no-rope-fusion" in lines) != fused


@pytest.mark.parametrize("target", MEGATRON)
@pytest.mark.parametrize("on_nan", ["stop", "skip", "continue"])
def test_a_loss_inside_a_graph_is_not_looked_at(target, on_nan):
    words = {"megatron.cuda_graph_impl": "full_iteration", "moe.capacity_factor": 1.0, "train.on_nan": on_nan}
    fields, lines, missing = settings(LARGE, words, target)
    assert fields["check_for_nan_in_loss"] is False
    assert target != "megatron-lm" or "--no-check-for-nan-in-loss-and-grad" in lines
    assert ("train.on_nan" in missing) == (on_nan != "continue")


@pytest.mark.parametrize("target", MEGATRON)
@pytest.mark.parametrize(("warmup", "decay"), [(2, 16), (15, 16), (16, 17), (40, 41)])
def test_the_warm_up_ends_before_the_decay(target, warmup, decay):
    fields, _, _ = settings(LARGE, {"optimizer.warmup_steps": warmup}, target)
    assert (fields["lr_warmup_iters"], fields["lr_decay_iters"], fields["train_iters"]) == (warmup, decay, 16)
