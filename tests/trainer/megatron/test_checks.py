"""What the megatron backend refuses before anything starts, and that the other backend refuses its settings."""

from __future__ import annotations

from typing import Any

import pytest

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_trainer.config import checks
from playbook_trainer.config import megatron_checks as megatron
from playbook_trainer.config.tree import TrainerConfig, load

MOE, DENSE = "qwen3_moe_tiny", "qwen3_tiny"
VL = "qwen3_vl_moe_tiny"
"""Four layers, DeepStack in the first two."""


def config(
    name: str = MOE, backend: str = "megatron", model: str | dict[str, Any] | None = None, **sections: dict[str, Any]
) -> TrainerConfig:
    """One of the small configurations with other settings; `model` takes the name of another model, or settings of this one."""
    named = {"model": model} if isinstance(model, str) else {}
    sections |= {"model": model} if isinstance(model, dict) else {}
    overrides = {f"{section}.{key}": value for section, fields in sections.items() for key, value in fields.items()}
    return load(data_root("configs") / f"{name}.yaml", {"backend": backend, **named, **overrides})


def problems(c: TrainerConfig, world: int) -> str:
    return "\n".join(checks.layout_problems(c, world) + checks.feature_problems(c) + checks.switch_problems(c, world))


BF16 = {"dtype": "bf16"}
DEEPSEEK = {"preset": "deepseek_v3_tiny"}
LEGAL = [
    (1, config()),
    (4, config(parallel={"ep": 4}, train={"global_batch_size": 8})),
    (4, config(parallel={"tp": 2, "cp": 2, "ep": 4, "etp": 1, "sequence_parallel": True})),
    (2, config(parallel={"pp": 2, "pipeline_layout": [1, 1]}, model={"num_layers": 2})),
    (2, config(parallel={"pp": 2, "pipeline_layout": [0, 2]}, model={"num_layers": 2})),
    (4, config(parallel={"pp": 2, "cp": 2}, moe={"dispatcher": "allgather"}, data={"pack": False})),
    (2, config(parallel={"cp": 2}, moe={"dispatcher": "allgather"}, data={"pack": True})),
    (1, config(checkpoint={"dir": "saved"})),
    (1, config(model={**DEEPSEEK, "router_group_top_k": 4, "top_k": 3})),  # all groups are kept, however they are scored
    (1, config(model={**DEEPSEEK, "norm_topk_prob": False, "top_k": 1, "router_groups": 0, "router_group_top_k": 0})),
    (1, config(megatron={"optimizer_offload_fraction": 0.5})),
    (4, config(parallel={"cp": 2, "ep": 2}, moe={"dispatcher": "allgather"})),  # ranks of one exchange read the same rows
    (1, config(train=BF16, precision={"fp8": "blockwise"})),
    (1, config(train=BF16, precision={"fp8": "nvfp4"})),
    (1, config(train=BF16, megatron={"precision_aware_optimizer": True}, optimizer={"moments_dtype": "bf16"})),
    (2, config(train={**BF16, "global_batch_size": 8}, megatron={"data_parallel": "megatron_fsdp", "sharding_strategy": "optim"})),
    (1, config(train={**BF16, "cuda_graphs": ["attn"], "warmup_steps": 4}, data={"pack": False})),
    (
        1,
        config(
            train={"warmup_steps": 4}, data={"pack": False}, moe={"capacity_factor": 4.0}, megatron={"cuda_graph_impl": "full_iteration"}
        ),
    ),
    (2, config(VL)),
    (2, config(VL, parallel={"pp": 2})),
    (2, config(VL, parallel={"pp": 2, "pipeline_layout": [3, 1]})),
    (2, config(VL, train={"freeze": ["vision"], "recompute": "full"})),
]


@pytest.mark.parametrize(("world", "c"), LEGAL)
def test_what_megatron_can_run_is_not_refused(world: int, c: TrainerConfig) -> None:
    assert problems(c, world) == ""


@pytest.mark.parametrize(
    ("c", "world", "expected"),
    [
        (config(parallel={"tp": 2, "ep": 2, "etp": 1}), 2, "set parallel.sequence_parallel=true"),
        (config(DENSE, parallel={"tp": 2}, model={"vocab_size": 323}), 2, "a vocabulary of 323 does not divide over tp 2; pad model.voc"),
        (config(parallel={"pp": 2, "cp": 2}, moe={"dispatcher": "allgather"}, data={"pack": True}), 4, "set moe.dispatcher: alltoall"),
        (config(VL, parallel={"pp": 2, "cp": 2}, moe={"dispatcher": "allgather"}), 4, "set moe.dispatcher: alltoall"),
        (config(parallel={"cp": 2, "ep": 4}, moe={"dispatcher": "allgather"}), 4, "as many tokens on every rank"),
        (
            config(parallel={"ep": 2}, moe={"dispatcher": "allgather"}, data={"pad": False, "pack": False}),
            2,
            "set moe.dispatcher: alltoall",
        ),
        (config(DENSE, train={**BF16, "cuda_graphs": ["moe_router"]}), 1, "graphs moe_router on a model without experts"),
        (
            config(train={**BF16, "cuda_graphs": ["moe_router", "moe_preprocess"]}, moe={"capacity_factor": 2.0}),
            1,
            "leave out moe_preprocess or moe.capacity_factor",
        ),
        (
            config(model="deepseek_v3_tiny", train={"recompute": "full"}, megatron={"recompute_layers": 2}),
            1,
            "leave megatron.recompute_layers out",
        ),
        (config(parallel={"cp": 2}, megatron={"cp_comm_type": "a2a+p2p", "cp_sizes": [-1, -2]}), 2, "set each to 1 or more"),
        (config(parallel={"fsdp": False}), 1, "parallel.fsdp false belongs to the torch backend; leave it at true"),
        (config(parallel={"ep": 4, "dp_replicate": 2}), 4, "set parallel.dp_replicate=1"),
        (config(DENSE, megatron={"data_parallel": "fsdp2"}), 2, "set model.tie_word_embeddings: false"),
        (config(parallel={"ep": 3}), 3, "do not divide over ep 3"),
        (config(parallel={"tp": 3}), 3, "4 attention heads do not divide over tp 3"),
        (config(parallel={"pp": 3}), 3, "do not divide into pp 3"),
        (config(parallel={"pp": 2, "pipeline_layout": [1, 2]}), 2, "expected 2 (pp 2 x vpp 1) and"),
        (
            config(parallel={"pp": 2, "vpp": 2}, train={"global_batch_size": 6, "micro_batch_size": 2}),
            2,
            "micro-batches in a multiple of pp 2",
        ),
        (config(parallel={"ep": 2}, train={"cuda_graphs": ["moe_preprocess"]}), 2, "needs 'moe_router' beside it"),
        (config(train={"recompute": "full", "cuda_graphs": ["attn"]}), 1, "excludes per-layer CUDA graphs"),
        (config(DENSE, train={"recompute": "selective", "recompute_modules": ["moe"]}), 1, "on a model without experts"),
        (config(parallel={"cp": 2}, megatron={"cp_comm_type": "a2a+p2p"}), 2, "such as megatron.cp_sizes=[2,4]"),
        (config(parallel={"cp": 2}, megatron={"cp_sizes": [2, 2]}), 2, "is not cp 2; change megatron.cp_sizes"),
        (config(parallel={"dp_replicate": 3}), 2, "; change parallel.dp_replicate"),
        (config(train={"recompute": "selective", "recompute_modules": ["mla_up_proj"]}), 1, "compressed attention; change train.recompute"),
        (config(train={**BF16, "cuda_graphs": ["moe"]}), 1, "set train.cuda_graphs=[moe_router,moe_preprocess]"),
        (
            config(train={**BF16, "recompute": "full", "cuda_graphs": ["attn"]}),
            1,
            "recompute selected modules, or capture the full iteration",
        ),
        (config(DENSE, moe={"router_dtype": "bf16"}), 1, "moe.router_dtype is about experts"),
        (config(DENSE, moe={"capacity_factor": 1.0}), 1, "moe.capacity_factor is about experts"),
        (config(megatron={"data_parallel": "fsdp2"}, parallel={"ep": 2}), 2, "set megatron.data_parallel=megatron_fsdp"),
        (config(moe={"dispatcher": "deepep"}), 1, "dispatcher deepep needs etp x ep > 1"),
        (config(moe={"dispatcher": "dedup"}), 1, "belongs to the torch backend"),
        (config(moe={"fused_permutation": True}), 1, "moe.fused_permutation true belongs to the torch backend"),
        (config(moe={"fused_router": True}), 1, "moe.fused_router true belongs to the torch backend"),
        (config(train={"loss_chunk": 512}), 1, "train.loss_chunk 512 belongs to the torch backend"),
        (config(train={"device": "cpu"}), 1, "megatron-core needs a GPU"),
        (config(train=BF16, precision={"fp8": "rowwise"}), 1, "belongs to the torch backend"),
        (config(precision={"fp8": "tensorwise"}), 1, "set train.dtype: bf16"),
        (config(optimizer={"moments_dtype": "bf16"}), 1, "set megatron.precision_aware_optimizer: true"),
        (
            config(
                train=BF16,
                optimizer={"moments_dtype": "bf16"},
                offload={"optimizer": True},
                megatron={"precision_aware_optimizer": True},
            ),
            1,
            "float32 moments in an optimizer on the host",
        ),
        (
            config(train=BF16, precision={"fp8": "blockwise"}, megatron={"fp8_param": True, "data_parallel": "ddp"}),
            1,
            "needs sharded optimizers, found ddp",
        ),
        (
            config(
                train=BF16,
                precision={"fp8": "blockwise"},
                megatron={"fp8_param": True, "precision_aware_optimizer": True, "optimizer_offload_fraction": 0.5},
            ),
            1,
            "excludes a precision-aware optimizer on the host",
        ),
        (config(megatron={"sharding_strategy": "optim"}), 1, "belongs to megatron_fsdp"),
        (config(train=BF16, parallel={"pp": 2}, megatron={"data_parallel": "megatron_fsdp"}), 2, "has no stages in it"),
        (config(megatron={"offload_modules": ["attn_proj"]}), 1, "needs 'core_attn' beside it"),
        (config(checkpoint={"dir": "saved"}, megatron={"optimizer_offload_fraction": 0.5}), 1, "does not restore the copies"),
        (config(checkpoint={"dir": "saved"}, offload={"optimizer": True}), 1, "does not restore the copies"),
        (config(train={"cuda_graphs": ["attn"]}), 1, "set data.pack: false"),
        (config(megatron={"cuda_graph_impl": "full_iteration"}, data={"pack": False}), 1, "set moe.capacity_factor"),
        (config(megatron={"cuda_graph_impl": "local"}, train={"cuda_graphs": ["attn"]}), 1, "set it to transformer_engine"),
        (config(train={"cuda_graphs": ["attn"]}), 1, "set train.dtype: bf16"),
        (config(train={**BF16, "cuda_graphs": ["attn"]}, megatron={"data_parallel": "megatron_fsdp"}), 1, "gathers them anew"),
        (
            config(megatron={"cuda_graph_impl": "full_iteration"}, data={"pack": False}, moe={"capacity_factor": 9.0}),
            1,
            "at most num_experts",
        ),
        (config(train={"cuda_graphs": ["attn"], "warmup_steps": 3}, data={"pack": False}), 1, "set train.warmup_steps to at least 4"),
        (config(train=BF16, megatron={"grouped_gemm": "cutlass"}), 1, "needs model.hidden_size in a multiple of 128, found 64"),
        (config(DENSE, train=BF16, megatron={"grouped_gemm": "cutlass"}), 1, "this model is dense"),
        (config(megatron={"grouped_gemm": "cutlass"}), 1, "multiplies 16-bit numbers"),
        (config(train=BF16, precision={"fp8": "blockwise"}, megatron={"grouped_gemm": "cutlass"}), 1, "multiplies 16-bit numbers"),
        (config(train=BF16, moe={"experts": "loop"}, megatron={"grouped_gemm": "cutlass"}), 1, "is for grouped experts"),
        (config(optimizer={"fused": True}), 1, "optimizer.fused true belongs to the torch backend"),
        # What megatron-core's router computes otherwise than DeepSeek-V3's own.
        (config(model={**DEEPSEEK, "top_k": 2}), 1, "set model.top_k to 4 or model.router_group_top_k to 1"),
        (config(model={**DEEPSEEK, "top_k": 6}), 1, "model.top_k 6 over model.router_group_top_k 2"),
        (config(model={**DEEPSEEK, "norm_topk_prob": False}), 1, "divides the probabilities of the chosen experts by their sum"),
        (
            config(model={**DEEPSEEK, "top_k": 1, "router_groups": 0, "router_group_top_k": 0}),
            1,
            "leaves the probability of a single expert",
        ),
        (config(optimizer={"master_weights": "remainder"}), 1, "optimizer.master_weights remainder belongs to the torch backend"),
        # What DeepStack excludes, each with a way out.
        (config(VL, parallel={"pp": 4}), 4, "first 2 decoder layers"),
        (config(VL, parallel={"pp": 2, "vpp": 2}), 4, "that has 1"),
        (config(VL, parallel={"pp": 2, "pipeline_layout": [1, 3]}), 4, "that has 1"),
        (config(VL, train={"cuda_graphs": ["attn"]}), 4, "set train.cuda_graphs: []"),
        (config(VL, megatron={"cuda_graph_impl": "full_iteration"}), 4, "set train.cuda_graphs: []"),
        (config(VL, megatron={"overlap_expert_parallel": True}), 4, "DeepStack's features enter whole ones"),
        (config(VL, model={"mtp_layers": 1}), 4, "set it to 0"),
        (
            config(VL, parallel={"tp": 2, "cp": 2, "sequence_parallel": True}, data={"pack": False}, megatron={"tp_comm_overlap": True}),
            4,
            "buffers of one size",
        ),
        # What is megatron's, on the torch backend.
        (config(backend="torch", megatron={"kernels": "local"}), 2, "the section megatron belongs to the megatron backend"),
        (
            config(backend="torch", parallel={"pp": 2, "pipeline_layout": [1, 1]}),
            2,
            "parallel.pipeline_layout belongs to the megatron backend",
        ),
        (config(backend="torch", moe={"capacity_factor": 1.5}), 2, "moe.capacity_factor belongs to the megatron backend"),
    ],
)
def test_refused_with_the_rule_that_is_broken(c: TrainerConfig, world: int, expected: str) -> None:
    assert expected in problems(c, world)


def test_missing_packages_are_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "installed", lambda module: False)
    c = config(parallel={"ep": 2}, train=BF16, precision={"fp8": "blockwise"}, moe={"dispatcher": "hybridep"})
    found = megatron.package_problems(c)
    assert len(found) == 3
    assert "megatron-core, which is not installed" in found[0]
    assert found[1].startswith("precision.fp8 blockwise, moe.dispatcher hybridep: of Transformer Engine, which is not installed")
    assert "needs the package deep_ep" in found[2]
    with pytest.raises(ConfigError, match="needs megatron-core"):
        checks.check(c, 2)


def test_what_needs_transformer_engine_excludes_local_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "installed", lambda module: True)
    c = config(train=BF16, precision={"fp8": "blockwise"}, megatron={"kernels": "local"})
    assert megatron.package_problems(c) == ["precision.fp8 blockwise: of Transformer Engine, and megatron.kernels is local; set it to auto"]
    assert megatron.package_problems(config()) == []
