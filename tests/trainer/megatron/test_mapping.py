"""From the configuration to megatron-core's fields: what is set, under which name, and what a version without it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
ABSENT = "absent"


def config(name: str = "qwen3_moe_tiny", **overrides: Any) -> TrainerConfig:
    return load(data_root("configs") / f"{name}.yaml", {"backend": "megatron", **{k.replace("__", "."): v for k, v in overrides.items()}})


def version(cls: type, *, less: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> type:
    """The dataclass as a version has it that lacks some fields, or has more."""
    names = {f.name for f in dataclasses.fields(cls)} - {*less} | {*more}
    return dataclasses.make_dataclass(cls.__name__, [(name, Any, dataclasses.field(default=None)) for name in names])


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen3_moe_tiny"])
def test_megatron_core_takes_packed_rows_that_both_pipeline_and_context_ranks_share(name: str) -> None:
    fields = settings.transformer(config(name, parallel__pp=2, parallel__cp=2, data__pack=True), TransformerConfig)
    assert TransformerConfig(**fields).variable_seq_lengths


FUSED = (
    "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion", "cross_entropy_loss_fusion",
)  # fmt: skip
UNEVEN = "moe_hybridep_pad_uneven_dispatch_inputs"
WITH_HYBRIDEP = version(TransformerConfig, more=(UNEVEN, "moe_flex_dispatcher_backend"))
HYBRIDEP = {"moe__dispatcher": "hybridep", "parallel__ep": 4}
TYPE, DECOUPLED = "megatron_fsdp_main_grads_dtype", "megatron_fsdp_use_decoupled_grad"
LATER = version(DistributedDataParallelConfig, more=(TYPE, DECOUPLED))
FSDP = {"megatron__data_parallel": "megatron_fsdp", **BF16}
NARROW = {"precision__fp8": "blockwise", "megatron__precision_aware_optimizer": True, **BF16}
LEAN = {"megatron__precision_aware_optimizer": True, "megatron__grad_reduce_dtype": "bf16", "optimizer__moments_dtype": "bf16", **BF16}
GRAPHED = {"train__cuda_graphs": ["attn"], "train__warmup_steps": 4}
PARTS = ("cuda_graph_modules", "cuda_graph_scope")
OLD = version(TransformerConfig, less=("fine_grained_activation_offloading", "offload_modules", "moe_router_fusion"))
TRANSFORMER, OPTIMIZER, WRAPPER = settings.transformer, settings.optimizer, settings.data_parallel


@pytest.mark.parametrize(
    ("function", "cls", "words", "expected"),
    [
        # No kernels are here that fuse.
        (TRANSFORMER, TransformerConfig, {}, {"apply_rope_fusion": False, "moe_permute_fusion": False, "cross_entropy_loss_fusion": False}),
        (
            TRANSFORMER,
            TransformerConfig,
            {"megatron__kernels": "transformer_engine", **BF16},
            {**dict.fromkeys(FUSED, True), "moe_grouped_gemm": True, "cross_entropy_fusion_impl": "te"},
        ),
        (
            TRANSFORMER,
            TransformerConfig,
            {"megatron__kernels": "local", **BF16},
            {**dict.fromkeys(FUSED, False), "moe_grouped_gemm": False},
        ),
        # It takes as many tokens from each rank, and would not fill them up unasked.
        (TRANSFORMER, WITH_HYBRIDEP, {"parallel__cp": 2, **HYBRIDEP}, {UNEVEN: True}),
        (TRANSFORMER, WITH_HYBRIDEP, {"data__pad": False, "data__pack": False, **HYBRIDEP}, {UNEVEN: True}),
        (TRANSFORMER, WITH_HYBRIDEP, HYBRIDEP, {UNEVEN: ABSENT}),
        *(
            (
                TRANSFORMER,
                TransformerConfig,
                {"moe__dispatcher": dispatcher, "parallel__ep": 2},
                {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": dispatcher},
            )
            for dispatcher in ("deepep", "hybridep")
        ),
        # The tower runs its own part again.
        (
            TRANSFORMER,
            TransformerConfig,
            {"train__recompute": "selective", "train__recompute_modules": ["layernorm", "vision"]},
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        ),
        (
            TRANSFORMER,
            TransformerConfig,
            {"train__recompute": "full"},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        (TRANSFORMER, TransformerConfig, {"precision__fp8": "blockwise", **BF16}, {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
        (TRANSFORMER, TransformerConfig, {"precision__fp8": "delayed", **BF16}, {"fp8": "hybrid", "fp8_recipe": "delayed"}),
        (TRANSFORMER, TransformerConfig, {"precision__fp8": "nvfp4", **BF16}, {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8": ABSENT}),
        # Graphs by part have the name of the installed version, and a default that it lacks is left out.
        *(
            (
                TRANSFORMER,
                version(TransformerConfig, less=PARTS, more=(name,)),
                GRAPHED,
                {"cuda_graph_impl": "transformer_engine", name: ["attn"]},
            )
            for name in PARTS
        ),
        (TRANSFORMER, OLD, {}, {"moe_router_fusion": ABSENT}),
        (OPTIMIZER, OptimizerConfig, LEAN, dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16)),
        (OPTIMIZER, OptimizerConfig, {"offload__optimizer": True}, {"optimizer_offload_fraction": 1.0}),
        # megatron-core would give a precision-aware optimizer None for each 8-bit weight without the recipe; 16-bit ones keep their remainders.
        (OPTIMIZER, OptimizerConfig, {"megatron__fp8_param": True, **NARROW}, {"fp8_recipe": "blockwise", "store_param_remainders": False}),
        (OPTIMIZER, OptimizerConfig, NARROW, {"fp8_recipe": ABSENT}),
        (
            WRAPPER,
            DistributedDataParallelConfig,
            {"parallel__dp_replicate": 2, **LEAN},
            {"use_distributed_optimizer": True, "grad_reduce_in_fp32": False, "num_distributed_optimizer_instances": 2},
        ),
        (
            WRAPPER,
            DistributedDataParallelConfig,
            {"megatron__sharding_strategy": "optim", **FSDP},
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"},
        ),
        # megatron-core 0.19 reads neither from `grad_reduce_in_fp32` nor from the optimizer's configuration.
        (WRAPPER, LATER, {"megatron__grad_reduce_dtype": "fp32", **FSDP}, {TYPE: torch.float32, DECOUPLED: False}),
        (WRAPPER, LATER, {"megatron__grad_reduce_dtype": "bf16", **FSDP}, {TYPE: torch.bfloat16, DECOUPLED: False}),
        (WRAPPER, LATER, {"megatron__grad_reduce_dtype": "fp32", "megatron__precision_aware_optimizer": True, **FSDP}, {DECOUPLED: True}),
        (WRAPPER, LATER, {"megatron__grad_reduce_dtype": "bf16", "megatron__precision_aware_optimizer": True, **FSDP}, {DECOUPLED: True}),
        (WRAPPER, LATER, BF16, {TYPE: ABSENT, DECOUPLED: ABSENT}),
    ],
)
def test_fields_that_are_set(function: Callable[..., dict[str, Any]], cls: type, words: dict[str, Any], expected: dict[str, Any]) -> None:
    found = function(config(**words), cls)
    assert {field: found.get(field, ABSENT) for field in expected} == expected


@pytest.mark.parametrize(
    ("cls", "words", "said"),
    [
        (
            version(WITH_HYBRIDEP, less=(UNEVEN,)),
            {"parallel__cp": 2, **HYBRIDEP},
            rf"moe\.dispatcher hybridep needs TransformerConfig\.{UNEVEN}",
        ),
        (
            OLD,
            {"megatron__offload_modules": ["moe_act"]},
            r"megatron-core .* megatron\.offload_modules needs TransformerConfig\.offload_modules, which it does not have",
        ),
    ],
)
def test_a_field_that_the_version_lacks_is_an_error_where_it_is_asked_for(cls: type, words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings.transformer(config(**words), cls)


def test_a_configuration_that_asks_for_nothing_special_is_accepted_by_megatron_core() -> None:
    built = TransformerConfig(**settings.transformer(config(), TransformerConfig))
    assert (built.num_layers, built.num_moe_experts, built.moe_router_topk) == (config().model.num_layers, 8, 2)


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
    assert settings.transformer(c, TransformerConfig)["recompute_num_layers"] == layers
    said = [s.value for s in sheet_of(c, "megatron-lm").settings if s.field == "recompute_num_layers"]
    assert said == [layers], "the export says what the run does"


def test_pipeline_layout_has_the_ends_in_the_first_and_last_chunk() -> None:
    fields = settings.transformer(config(parallel__pp=2, parallel__pipeline_layout=[0, 4], model__num_layers=4), TransformerConfig)
    assert fields["pipeline_model_parallel_layout"] == [["embedding"], ["decoder"] * 4 + ["loss"]]
    assert TransformerConfig(**fields).pipeline_model_parallel_layout.pipeline_model_parallel_size == 2


def test_compressed_attention_and_the_router_of_deepseek() -> None:
    c = config("qwen3_moe_tiny", model="deepseek_v3_tiny")
    fields = settings.transformer(c, MLATransformerConfig)
    assert fields["kv_lora_rank"] == c.model.kv_lora_rank > 0
    assert fields["moe_router_score_function"] == "sigmoid"
    assert fields["moe_layer_freq"] == [int(i >= c.model.first_dense_layers) for i in range(c.model.num_layers)]
    assert fields["mtp_num_layers"] == c.model.mtp_layers
    assert MLATransformerConfig(**fields).multi_latent_attention


def test_experts_that_an_old_version_adds_up_wrongly_are_refused() -> None:
    old, layers = version(TransformerConfig, less=("cuda_graph_modules",)), {"parallel__tp": 2, "megatron__kernels": "transformer_engine"}
    with pytest.raises(ConfigError, match=r"raise parallel\.ep, or leave parallel\.etp out"):
        settings.refuse_lone_experts(config(**layers, parallel__etp=1), old)
    settings.refuse_lone_experts(config(**layers, parallel__ep=2, parallel__etp=1), old)
    settings.refuse_lone_experts(config(**layers), old)
    settings.refuse_lone_experts(config(parallel__tp=2, parallel__etp=1), old)
