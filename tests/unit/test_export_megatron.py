"""`playbook config export` for Megatron: flags that its own checks refuse together are never printed together."""

from __future__ import annotations

import pytest

from playbook.paths import data_root
from playbook_trainer.config import load
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


@pytest.mark.parametrize("grads", ["fp32", "bf16"])
@pytest.mark.parametrize("target", MEGATRON)
def test_an_offloaded_optimizer_is_the_precision_aware_one(target, grads):
    fields, lines, missing = settings(LARGE, {**OFFLOADED, "megatron.grad_reduce_dtype": grads}, target)
    assert fields["optimizer_cpu_offload"]
    assert fields["use_precision_aware_optimizer"]
    assert "offload.optimizer" not in missing
    assert target != "megatron-lm" or {"--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--exp-avg-dtype fp32"} <= lines


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
        (SMALL, {"parallel.fsdp": False, "optimizer.master": "split", "train.dtype": "bf16"}, "optimizer.master"),
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
