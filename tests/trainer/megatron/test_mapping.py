"""From the configuration to megatron-core's fields: what is set, under which name, and what a version without it is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_trainer.config.tree import TrainerConfig, load
from playbook_trainer.export.megatron import sheet_of
from playbook_trainer.megatron import settings

pytestmark = pytest.mark.full

BF16 = {"train.dtype": "bf16"}


def config(name: str = "qwen3_moe_tiny", **overrides: Any) -> TrainerConfig:
    return load(data_root("configs") / f"{name}.yaml", {"backend": "megatron", **{k.replace("__", "."): v for k, v in overrides.items()}})


def made(c: TrainerConfig, cls: type = TransformerConfig) -> dict[str, Any]:
    return settings.transformer(c, cls)


def test_a_configuration_that_asks_for_nothing_special_is_accepted_by_megatron_core() -> None:
    fields = made(config())
    built = TransformerConfig(**fields)
    assert (built.num_layers, built.num_moe_experts, built.moe_router_topk) == (fields["num_layers"], 8, 2)
    assert not any(fields[k] for k in ("apply_rope_fusion", "moe_permute_fusion", "cross_entropy_loss_fusion")), (
        "there are no such kernels here"
    )


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen3_moe_tiny"])
def test_megatron_core_takes_packed_rows_that_both_pipeline_and_context_ranks_share(name: str) -> None:
    fields = made(config(name, parallel__pp=2, parallel__cp=2, data__pack=True))
    assert TransformerConfig(**fields).variable_seq_lengths


def test_hybridep_is_told_where_ranks_hold_unlike_numbers_of_tokens() -> None:
    """It takes as many from each, and would not fill them up unasked."""
    name = "moe_hybridep_pad_uneven_dispatch_inputs"
    words = {"moe__dispatcher": "hybridep", "parallel__ep": 4}
    later = version(TransformerConfig, more=(name, "moe_flex_dispatcher_backend"))
    assert made(config(parallel__cp=2, **words), later)[name]
    assert made(config(data__pad=False, data__pack=False, **words), later)[name]
    assert name not in made(config(**words), later)
    with pytest.raises(ConfigError, match=f"moe.dispatcher hybridep needs TransformerConfig.{name}"):
        made(config(parallel__cp=2, **words), version(later, less=(name,)))


def test_fusions_come_with_transformer_engine() -> None:
    on = made(config(megatron__kernels="transformer_engine", **BF16))
    off = made(config(megatron__kernels="local", **BF16))
    names = (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "moe_permute_fusion",
        "moe_router_fusion",
        "cross_entropy_loss_fusion",
    )
    assert [on[n] for n in names] == [True] * len(names)
    assert [off[n] for n in names] == [False] * len(names)
    assert (on["moe_grouped_gemm"], off["moe_grouped_gemm"]) == (True, False)
    assert on["cross_entropy_fusion_impl"] == "te"


@pytest.mark.parametrize("dispatcher", ["deepep", "hybridep"])
def test_fused_dispatchers_go_through_flex(dispatcher: str) -> None:
    fields = made(config(moe__dispatcher=dispatcher, parallel__ep=2))
    assert (fields["moe_token_dispatcher_type"], fields["moe_flex_dispatcher_backend"]) == ("flex", dispatcher)


def test_recompute_leaves_the_vision_tower_to_the_tower() -> None:
    fields = made(config(train__recompute="selective", train__recompute_modules=["layernorm", "vision"]))
    assert (fields["recompute_granularity"], fields["recompute_modules"]) == ("selective", ["layernorm"])
    whole = made(config(train__recompute="full"))
    assert (whole["recompute_granularity"], whole["recompute_method"], whole["recompute_num_layers"]) == ("full", "uniform", 1)


@pytest.mark.parametrize(("layout", "layers"), [([0, 1, 1, 0], 1), ([0, 2, 1, 1], 2), (None, 1)])
def test_block_recompute_of_all_layers_means_those_of_the_longest_chunk(layout: list[int] | None, layers: int) -> None:
    c = config(
        model__num_layers=sum(layout or [4]),
        parallel__pp=2,
        parallel__vpp=2,
        parallel__pipeline_layout=layout,
        train__recompute="full",
        megatron__recompute_method="block",
    )
    assert made(c)["recompute_num_layers"] == layers
    said = [s.value for s in sheet_of(c, "megatron-lm").settings if s.field == "recompute_num_layers"]
    assert said == [layers], "the export says what the run does"


def test_pipeline_layout_has_the_ends_in_the_first_and_last_chunk() -> None:
    fields = made(config(parallel__pp=2, parallel__pipeline_layout=[0, 4], model__num_layers=4))
    assert fields["pipeline_model_parallel_layout"] == [["embedding"], ["decoder"] * 4 + ["loss"]]
    assert TransformerConfig(**fields).pipeline_model_parallel_layout.pipeline_model_parallel_size == 2


def test_fp8_recipes() -> None:
    blockwise = made(config(precision__fp8="blockwise", **BF16))
    assert (blockwise["fp8"], blockwise["fp8_recipe"]) == ("e4m3", "blockwise")
    delayed = made(config(precision__fp8="delayed", **BF16))
    assert (delayed["fp8"], delayed["fp8_recipe"]) == ("hybrid", "delayed")
    four = made(config(precision__fp8="nvfp4", **BF16))
    assert (four["fp4"], four["fp4_recipe"]) == ("e2m1", "nvfp4")
    assert "fp8" not in four


def test_compressed_attention_and_the_router_of_deepseek() -> None:
    c = config("qwen3_moe_tiny", model="deepseek_v3_tiny")
    fields = settings.transformer(c, MLATransformerConfig)
    assert fields["kv_lora_rank"] == c.model.kv_lora_rank > 0
    assert fields["moe_router_score_function"] == "sigmoid"
    assert fields["moe_layer_freq"] == [int(i >= c.model.first_dense_layers) for i in range(c.model.num_layers)]
    assert fields["mtp_num_layers"] == c.model.mtp_layers
    assert MLATransformerConfig(**fields).multi_latent_attention


def version(cls: type, *, less: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> type:
    """The dataclass as a version has it that lacks some fields, or has more."""
    names = {f.name for f in dataclasses.fields(cls)} - {*less} | {*more}
    return dataclasses.make_dataclass(cls.__name__, [(name, Any, dataclasses.field(default=None)) for name in names])


def test_graph_parts_have_the_name_of_the_installed_version() -> None:
    c = config(train__cuda_graphs=["attn"], train__warmup_steps=4)
    names = ("cuda_graph_modules", "cuda_graph_scope")
    for name in names:
        found = settings.transformer(c, version(TransformerConfig, less=names, more=(name,)))
        assert (found["cuda_graph_impl"], found[name]) == ("transformer_engine", ["attn"])


def test_a_field_that_the_version_lacks_is_an_error_where_it_is_asked_for() -> None:
    old = version(TransformerConfig, less=("fine_grained_activation_offloading", "offload_modules", "moe_router_fusion"))
    assert "moe_router_fusion" not in settings.transformer(config(), old), "a default that the version lacks is left out"
    with pytest.raises(
        ConfigError, match=r"megatron-core .* megatron.offload_modules needs TransformerConfig.offload_modules, which it does not have"
    ):
        settings.transformer(config(megatron__offload_modules=["moe_act"]), old)


def test_optimizer_and_data_parallel_fields() -> None:
    c = config(
        megatron__precision_aware_optimizer=True,
        megatron__grad_reduce_dtype="bf16",
        optimizer__moments_dtype="bf16",
        parallel__dp_replicate=2,
        **BF16,
    )
    optimizer = settings.optimizer(c, OptimizerConfig)
    assert {optimizer[k] for k in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")} == {torch.bfloat16}
    wrapper = settings.data_parallel(c, DistributedDataParallelConfig)
    assert wrapper["use_distributed_optimizer"]
    assert not wrapper["grad_reduce_in_fp32"]
    assert wrapper["num_distributed_optimizer_instances"] == 2
    sharded = settings.data_parallel(
        config(megatron__data_parallel="megatron_fsdp", megatron__sharding_strategy="optim", **BF16), DistributedDataParallelConfig
    )
    assert (sharded["use_megatron_fsdp"], sharded["data_parallel_sharding_strategy"]) == (True, "optim")
    assert settings.optimizer(config(offload__optimizer=True), OptimizerConfig)["optimizer_offload_fraction"] == 1.0


@pytest.mark.parametrize(("dtype", "found"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_megatron_fsdp_takes_gradients_as_asked_and_leaves_them_where_the_optimizer_looks(dtype: str, found: torch.dtype) -> None:
    """megatron-core 0.19 reads neither from `grad_reduce_in_fp32` nor from the optimizer's configuration."""
    names = ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_use_decoupled_grad")
    later = version(DistributedDataParallelConfig, more=names)
    words = {"megatron__data_parallel": "megatron_fsdp", "megatron__grad_reduce_dtype": dtype, **BF16}
    assert [settings.data_parallel(config(**words), later)[name] for name in names] == [found, False]
    assert settings.data_parallel(config(megatron__precision_aware_optimizer=True, **words), later)[names[1]]
    assert not set(names) & set(settings.data_parallel(config(**BF16), later))


def test_a_precision_aware_optimizer_knows_of_8_bit_weights() -> None:
    """megatron-core would give it None for each of them if it did not know the recipe, and remainders are of 16-bit weights."""
    words = {"precision__fp8": "blockwise", "megatron__precision_aware_optimizer": True, **BF16}
    narrow = settings.optimizer(config(megatron__fp8_param=True, **words), OptimizerConfig)
    assert (narrow["fp8_recipe"], narrow["store_param_remainders"]) == ("blockwise", False)
    assert "fp8_recipe" not in settings.optimizer(config(**words), OptimizerConfig), "16-bit weights keep their remainders"


def test_experts_that_an_old_version_adds_up_wrongly_are_refused() -> None:
    old, layers = version(TransformerConfig, less=("cuda_graph_modules",)), {"parallel__tp": 2, "megatron__kernels": "transformer_engine"}
    with pytest.raises(ConfigError, match=r"raise parallel\.ep, or leave parallel\.etp out"):
        settings.refuse_lone_experts(config(**layers, parallel__etp=1), old)
    settings.refuse_lone_experts(config(**layers, parallel__ep=2, parallel__etp=1), old)
    settings.refuse_lone_experts(config(**layers), old)
    settings.refuse_lone_experts(config(parallel__tp=2, parallel__etp=1), old)
