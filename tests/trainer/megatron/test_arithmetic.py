"""What a rank of the megatron backend would hold: measured peaks, and sums that follow from the layout."""

from __future__ import annotations

import pytest

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner import memory
from playbook_trainer.config.dry_run import dry_run, plan_of, stages
from playbook_trainer.config.tree import load

LARGE = data_root("configs") / "qwen3_30b_a3b_24l.yaml"
TINY = data_root("configs") / "qwen3_moe_tiny.yaml"
IMAGES = data_root("configs") / "qwen3_vl_moe_tiny.yaml"
GIB = 1 << 30
LEAN = {"megatron.precision_aware_optimizer": True, "optimizer.moments_dtype": "bf16", "megatron.grad_reduce_dtype": "bf16"}
AGAIN = {"train.recompute": "selective", "train.recompute_modules": ["moe_act", "layernorm"]}
FSDP = {"megatron.data_parallel": "megatron_fsdp", "megatron.grad_reduce_dtype": "bf16"}
DEEPSEEK = {
    "model": "deepseek_v3", "train.recompute": "none", "moe.dispatcher": "deepep", "parallel.ep": 32, "parallel.pp": 8, "parallel.vpp": 4,
    "parallel.cp": 32, "data.seq_len": 131072, "train.micro_batch_size": 1, "train.global_batch_size": 8, "data.pack": False,
    "parallel.pipeline_layout": [1, *[2] * 30, 0],
}  # fmt: skip


def report(world=4, file=LARGE, **overrides):
    batch = {"train.micro_batch_size": 4, "train.global_batch_size": 16}
    return dry_run(load(file, {"backend": "megatron", "data.pack": False, **batch, **overrides}), world)


# Peak allocated GiB on four H200s, megatron-core 0.19.2: tests/fixtures/memory_runs.yaml, as configurations.
@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        (LEAN, 88),
        ({**LEAN, "train.micro_batch_size": 2, "train.global_batch_size": 8}, 65),
        ({**LEAN, **AGAIN, "train.micro_batch_size": 6, "train.global_batch_size": 24}, 102),
        ({**LEAN, "precision.fp8": "blockwise"}, 87),
        ({**FSDP, "parallel.ep": 1}, 108),
    ],
)
def test_measured_peaks_are_estimated_within_eight_percent(overrides, measured):
    stage = report(**overrides).stages[0]
    assert stage.peak / GIB == pytest.approx(measured, rel=0.08)


def test_each_strategy_shards_what_its_name_says():
    def state(strategy):
        return report(**FSDP, **{"parallel.ep": 1, "megatron.sharding_strategy": strategy}).stages[0].states

    held = report(**{"parallel.ep": 1}).stages[0].held
    per_parameter = {"no_shard": 2 + 2 + 12, "optim": 2 + 2 + 12 / 4, "optim_grads": 2 + 2 / 4 + 12 / 4, "optim_grads_params": 16 / 4}
    for strategy, expected in per_parameter.items():
        assert state(strategy) / held == pytest.approx(expected), strategy
    lean = report(**{**FSDP, **LEAN, "parallel.ep": 1}).stages[0]
    assert lean.states / held == pytest.approx((2 + 2 + 4 + 4) / 4), "16-bit moments beside a whole master copy"
    copies = report(**FSDP, **{"parallel.ep": 1, "parallel.dp_replicate": 2}).stages[0]
    assert copies.states / held == pytest.approx(16 / 2), "two copies, each over two ranks"


def test_the_distributed_optimizer_keeps_weights_and_gradients_whole():
    plain, spread = report(**{"megatron.data_parallel": "ddp"}).stages[0], report().stages[0]
    dense = plain.held - 24 * 128 // 4 * 3 * 2048 * 768
    assert plain.states == pytest.approx(18 * plain.held)
    assert plain.states - spread.states == pytest.approx(12 * dense * 3 / 4), "experts are spread over ep already"


def test_uneven_stages_hold_the_layers_that_the_layout_lists():
    stages = report(world=256, **DEEPSEEK).stages
    assert [s.layers for s in stages] == [7, *[8] * 6, 6]
    total = report(world=256, **DEEPSEEK).num_parameters
    assert total == pytest.approx((671.03 + 11.61) * 1e9, rel=1e-3)
    with pytest.raises(ConfigError, match="expected 32"):
        report(world=256, **{**DEEPSEEK, "parallel.pipeline_layout": [8, *[7] * 7]})


def test_full_recompute_keeps_inputs_and_brings_back_what_it_runs_again():
    def stage(**overrides):
        return report(**{"train.recompute": "full", **overrides}).stages[0]

    entry = 4 * 4096 * 2048 * 2
    assert stage().activations == 24 * entry
    assert stage(**{"megatron.recompute_layers": 4}).activations == 6 * entry
    assert stage(**{"megatron.recompute_layers": 4}).replayed > 3.9 * stage().replayed
    assert stage(**{"megatron.recompute_layers": 99}) == stage(**{"megatron.recompute_layers": 24})
    half = stage(**{"megatron.recompute_method": "block", "megatron.recompute_layers": 12}).activations
    assert half == pytest.approx((report().stages[0].activations + 24 * entry) / 2)


def test_block_recompute_leaves_multi_token_prediction_as_it_is():
    def last(method):
        small = {"model": "deepseek_v3_tiny", "parallel.pp": 2, "parallel.pipeline_layout": [3, 1], "model.mtp_layers": 1}
        return report(file=TINY, world=2, **small, **{"train.recompute": "full", "megatron.recompute_method": method}).stages[1]

    assert last("block").activations > 2 * last("uniform").activations


def test_offload_moves_bytes_to_the_host():
    plain = report().stages[0]
    away = report(**{"megatron.offload_modules": ["expert_fc1", "moe_act"]}).stages[0]
    layer = away.host / 23  # all but one of 24
    assert away.activations + away.host == pytest.approx(plain.activations)
    assert layer == pytest.approx(4 * 4096 * 8 * (2048 + 2 * 768) * 2)
    half = report(**{"megatron.optimizer_offload_fraction": 0.5}).stages[0]
    states = 12 * (plain.held - 24 * 32 * 3 * 2048 * 768) / 4 + 12 * 24 * 32 * 3 * 2048 * 768
    # The host updates float32 copies that stay on the GPU, or with the precision-aware optimizer the weights; what stays there is in float32.
    assert plain.states - half.states == pytest.approx(states / 2 * 8 / 12)
    assert half.host == pytest.approx(states / 12 * 16 / 2)
    lean = report(**{"megatron.optimizer_offload_fraction": 0.5, "megatron.precision_aware_optimizer": True}).stages[0]
    assert plain.states - lean.states == pytest.approx(states / 2)


def test_8_bit_weights_have_whole_master_weights():
    narrow = {"precision.fp8": "blockwise", "megatron.fp8_param": True}
    plain, lean = report(**narrow).stages[0], report(**narrow, **{"megatron.precision_aware_optimizer": True}).stages[0]
    assert lean.states == plain.states


def test_images_are_bounded_by_rows_that_hold_nothing_else():
    def stage(**overrides):
        batch = {"train.micro_batch_size": 1, "train.global_batch_size": 4, "parallel.ep": 4, "train.dtype": "bf16"}
        return report(file=IMAGES, **{**batch, **overrides}).stages[0]

    config = load(IMAGES)
    tower, patches = config.model.vision, config.data.seq_len * config.model.vision.spatial_merge_size**2
    block = patches * (10 * tower.hidden_size + 2 * tower.ffn_size) * 2
    assert stage().vision == tower.depth * block
    assert stage(**{"parallel.cp": 2}).vision == stage().vision, "every context rank encodes all images of its rows"
    assert dry_run(load(IMAGES, {"parallel.cp": 2}), 2).stages[0].vision == dry_run(load(IMAGES), 1).stages[0].vision
    assert stage(**{"train.freeze": ["vision"]}).vision == 0
    again = stage(**{"train.recompute": "selective", "train.recompute_modules": ["vision"]}).vision
    assert again == block + tower.depth * patches * tower.hidden_size * 2
    assert stage(**{"data.kind": "text"}).vision == 0


@pytest.mark.parametrize(
    "overrides",
    [
        {"megatron.grad_reduce_dtype": "fp32"},
        {"precision.fp8": "blockwise", "megatron.offload_modules": ["moe_act"], **AGAIN},
        {
            "model": "deepseek_v3",
            "model.num_layers": 8,
            "model.router_groups": 0,
            "model.router_group_top_k": 0,
            "parallel.pp": 2,
            "parallel.ep": 2,
        },
    ],
)
def test_a_dry_run_and_the_planner_hold_the_same_bytes(overrides):
    config = load(
        LARGE, {"backend": "megatron", "data.pack": False, "train.micro_batch_size": 4, "train.global_batch_size": 16, **overrides}
    )
    assert stages(config, plan_of(config, 4)) == memory.estimate(plan_of(config, 4))
