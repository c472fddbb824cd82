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
ABSENT, PRINTED, UNSAYABLE = "absent", "printed", "cannot be said"

OFFLOADED = {"megatron.precision_aware_optimizer": False, "optimizer.moments_dtype": "fp32", "offload.optimizer": True}
ON_THE_HOST = {
    "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "offload.optimizer": ABSENT,
    "--optimizer-cpu-offload": PRINTED, "--use-precision-aware-optimizer": PRINTED, "--exp-avg-dtype fp32": PRINTED,
}  # fmt: skip
WHOLE_OPTIMIZER = {"use_distributed_optimizer": False, "use_precision_aware_optimizer": False, "optimizer_cpu_offload": False}
NO_FSDP = {"parallel.fsdp": False, "train.dtype": "bf16"}
FULL_SIZE = {"moe.capacity_factor": 1.0}
WHOLE_STEP = {"megatron.cuda_graph_impl": "full_iteration", **FULL_SIZE}
UNSEEN = {"check_for_nan_in_loss": False, "--no-check-for-nan-in-loss-and-grad": PRINTED}
BOTH = {
    "a rotary base that is no whole number is not cut to one": [
        (LARGE, {"model.rope_theta": 10000.5}, {"rotary_base": ABSENT, "model.rope_theta": UNSAYABLE}),
    ],
    "an offloaded optimizer is the precision-aware one": [
        (LARGE, {**OFFLOADED, "megatron.grad_reduce_dtype": "fp32"}, ON_THE_HOST),
        (LARGE, {**OFFLOADED, "megatron.grad_reduce_dtype": "bf16"}, ON_THE_HOST),
    ],
    "what needs a sharded optimizer cannot be said without one": [
        (SMALL, {**NO_FSDP, "optimizer.moments_dtype": "bf16"}, {**WHOLE_OPTIMIZER, "optimizer.moments_dtype": UNSAYABLE}),
        (SMALL, {**NO_FSDP, "optimizer.master_weights": "remainder"}, {**WHOLE_OPTIMIZER, "optimizer.master_weights": UNSAYABLE}),
        (SMALL, {"parallel.fsdp": False, "offload.optimizer": True}, {**WHOLE_OPTIMIZER, "offload.optimizer": UNSAYABLE}),
        (
            LARGE,
            {"megatron.data_parallel": "ddp", "megatron.precision_aware_optimizer": True},
            {**WHOLE_OPTIMIZER, "megatron.precision_aware_optimizer": UNSAYABLE},
        ),
    ],
    "gathers are overlapped with reductions alone": [
        (
            LARGE,
            {"megatron.overlap_grad_reduce": False},
            {"overlap_param_gather": False, "--overlap-param-gather": ABSENT, "megatron.overlap_param_gather": UNSAYABLE},
        ),
        (LARGE, {}, {"overlap_param_gather": True}),
    ],
    "graphs that hold experts pad them": [
        (LARGE, WHOLE_STEP, {"moe_pad_expert_input_to_capacity": True}),
        (LARGE, {"train.cuda_graphs": ["moe"], **FULL_SIZE}, {"moe_pad_expert_input_to_capacity": True}),
        (LARGE, FULL_SIZE, {"moe_pad_expert_input_to_capacity": ABSENT}),
    ],
    "plain frequencies of latent attention are not fused": [
        (LARGE, {"model": "deepseek_v3"}, {"apply_rope_fusion": True, "--no-rope-fusion": ABSENT}),
        (LARGE, {"model": "deepseek_v3", "model.yarn": None}, {"apply_rope_fusion": False, "--no-rope-fusion": PRINTED}),
    ],
    "a loss inside a graph is not looked at": [
        (LARGE, {**WHOLE_STEP, "train.on_nan": "stop"}, {**UNSEEN, "train.on_nan": UNSAYABLE}),
        (LARGE, {**WHOLE_STEP, "train.on_nan": "skip"}, {**UNSEEN, "train.on_nan": UNSAYABLE}),
        (LARGE, {**WHOLE_STEP, "train.on_nan": "continue"}, {**UNSEEN, "train.on_nan": ABSENT}),
    ],
    "the warm-up ends before the decay": [
        (LARGE, {"optimizer.warmup_steps": warmup}, {"lr_warmup_iters": warmup, "lr_decay_iters": decay, "train_iters": 16})
        for warmup, decay in ((2, 16), (15, 16), (16, 17), (40, 41))
    ],
}

ROWS = {"parallel.tp": 2, "parallel.sequence_parallel": True, "data.tokenizer": "tokenizer.json"}
FSDP = {"megatron.data_parallel": "megatron_fsdp", "parallel.pp": 1, "parallel.vpp": 1}
IN_8_BITS = {"fp8_param": True, "--fp8-param-gather": PRINTED, "megatron.fp8_param": ABSENT}
IN_16_BITS = {"fp8_param": False, "--fp8-param-gather": ABSENT, "megatron.fp8_param": UNSAYABLE}
OF_ONE = {
    "weights keep their rows where Megatron-LM would round the vocabulary up": [
        ("megatron-lm", ROWS, {"--padded-vocab-size 151936": PRINTED}),
        ("megatron-bridge", ROWS, {"padded_vocab_size": ABSENT}),
    ],
    "Megatron-FSDP is told the precision of gradients by its own field": [
        ("megatron-lm", {**FSDP, "megatron.grad_reduce_dtype": "fp32"}, {"--megatron-fsdp-main-grads-dtype fp32": PRINTED}),
        ("megatron-lm", {**FSDP, "megatron.grad_reduce_dtype": "bf16"}, {"--megatron-fsdp-main-grads-dtype bf16": PRINTED}),
        (
            "megatron-lm",
            {**FSDP, "megatron.data_parallel": "distributed_optimizer", "megatron.grad_reduce_dtype": "bf16"},
            {"megatron_fsdp_main_grads_dtype": ABSENT},
        ),
        (
            "megatron-lm",
            {**FSDP, "megatron.data_parallel": "distributed_optimizer", "megatron.grad_reduce_dtype": "fp32"},
            {"megatron_fsdp_main_grads_dtype": ABSENT},
        ),
    ],
    "weights are gathered in 8 bits where it can be said": [
        ("megatron-lm", {"megatron.fp8_param": True, "precision.fp8": "delayed"}, IN_8_BITS),
        ("megatron-lm", {"megatron.fp8_param": True, "precision.fp8": "tensorwise"}, IN_8_BITS),
        ("megatron-lm", {"megatron.fp8_param": True, "precision.fp8": "delayed", **OFFLOADED}, IN_8_BITS),
        ("megatron-lm", {"megatron.fp8_param": True, "precision.fp8": "tensorwise", **OFFLOADED}, IN_16_BITS),
        ("megatron-lm", {"megatron.fp8_param": True, "precision.fp8": "tensorwise", "megatron.data_parallel": "ddp"}, IN_16_BITS),
    ],
    "a folder for checkpoints comes with an interval": [
        ("megatron-lm", {"checkpoint.dir": "saved", "checkpoint.every": 0}, {"--save saved": PRINTED, "--save-interval 16": PRINTED}),
        ("megatron-lm", {"checkpoint.dir": "saved", "checkpoint.every": 5}, {"--save saved": PRINTED, "--save-interval 5": PRINTED}),
        ("megatron-lm", {}, {"save_interval": None}),
    ],
}
ASKED = [
    *((rule, target, *row) for rule, rows in BOTH.items() for row in rows for target in MEGATRON),
    *((rule, target, LARGE, words, told) for rule, rows in OF_ONE.items() for target, words, told in rows),
]


@pytest.mark.parametrize(("rule", "target", "path", "words", "told"), ASKED)
def test_what_is_exported_goes_together(rule, target, path, words, told):
    """`told` has fields of the other trainer, flags of Megatron-LM, and keys of ours."""
    export_ = export(load(path, words), target)
    found = (
        {s.field: s.value for s in export_.settings} | dict.fromkeys(export_.lines, PRINTED) | {r.key: UNSAYABLE for r in export_.missing}
    )
    expected = {key: value for key, value in told.items() if target == "megatron-lm" or not key.startswith("--")}
    assert {key: found.get(key, ABSENT) for key in expected} == expected, rule
