"""What `auto` stands for by device, precision, shapes and layout, and that it never takes what a rule refuses."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from playbook.errors import ConfigError
from playbook_trainer.config import automatic, checks
from playbook_trainer.config import megatron_checks as megatron
from playbook_trainer.config.automatic import SWITCHES, Target
from playbook_trainer.config.tree import TrainerConfig, dump, flatten, load, neutral

CONFIGS = Path("trainer/configs")
MOE, DENSE, IMAGES = (CONFIGS / f"{name}.yaml" for name in ("qwen3_30b_a3b_24l", "qwen3_tiny", "qwen3_vl_30b_a3b_6l"))
H200 = Target("NVIDIA H200", transformer_engine=True)
ALONE = Target("NVIDIA H200", transformer_engine=True, ranks=1)
KERNELS = {"train.fused_activation", "train.fused_norms", "train.fused_loss", "optimizer.fused"}
OF_EXPERTS = {"moe.fused_permutation", "moe.fused_router", "moe.apply_probs_on"}
BF16 = {"train.dtype": "bf16"}
LARGE = {"train.micro_batch_size": 4}
WIDE = {"data.seq_len": 16_384}
"""Rows of which a micro-batch of the tiny model has as many values as the kernels are taken for."""


def fast(config: TrainerConfig, target: Target) -> set[str]:
    """The switches that are on when the configuration is run there."""
    flat = flatten(dump(automatic.switched(config, target)))
    assert not [key for key in SWITCHES if flat[key] == "auto"]
    return {key for key, switch in SWITCHES.items() if flat[key] == switch.fast}


@pytest.mark.parametrize(
    ("path", "words", "target", "on"),
    [
        (MOE, {}, H200, KERNELS | OF_EXPERTS),
        (MOE, {}, Target("NVIDIA A100-SXM4-80GB"), KERNELS | OF_EXPERTS),
        (IMAGES, {}, H200, KERNELS | OF_EXPERTS),
        (DENSE, BF16 | WIDE, H200, KERNELS),
        (DENSE, WIDE, H200, KERNELS - {"train.fused_loss"}),
        # Too few values for a kernel to be worth its start.
        (DENSE, {}, H200, set()),
        (DENSE, WIDE | {"data.seq_len": 16_383}, H200, set()),
        (DENSE, WIDE | {"parallel.cp": 2}, H200, set()),
        (MOE, {}, Target(), set()),
        (MOE, {"train.device": "cpu"}, H200, set()),
        (MOE, {}, Target("NVIDIA H200", triton=False), set()),
        (MOE, {"backend": "megatron"}, H200, set()),
        # Precision stays what is asked for: the remainder comes only where gradients are reduced in 16 bits anyway, or not at all.
        (MOE, {"parallel.reduce_dtype": "bf16"}, H200, KERNELS | OF_EXPERTS | {"optimizer.master_weights"}),
        (MOE, {"parallel.ep": 1}, ALONE, KERNELS | OF_EXPERTS | {"optimizer.master_weights"}),
        (DENSE, WIDE, ALONE, KERNELS - {"train.fused_loss"}),
        (MOE, {"parallel.reduce_dtype": "bf16", "parallel.fsdp": False}, H200, KERNELS | OF_EXPERTS),
        (MOE, {"parallel.reduce_dtype": "bf16", "optimizer.fused": False}, H200, (KERNELS | OF_EXPERTS) - {"optimizer.fused"}),
        (MOE, {"offload.optimizer": True, "parallel.reduce_dtype": "bf16"}, H200, (KERNELS | OF_EXPERTS) - {"optimizer.fused"}),
        (MOE, {"moe.router_dtype": "bf16"}, H200, (KERNELS | OF_EXPERTS) - {"moe.fused_router"}),
        (MOE, {"moe.bias_update_rate": 0.001}, H200, (KERNELS | OF_EXPERTS) - {"moe.fused_router"}),
        (MOE, {"model.num_experts": 1024}, H200, (KERNELS | OF_EXPERTS) - {"moe.fused_router"}),
        (MOE, {"moe.dispatcher": "allgather"}, H200, (KERNELS | OF_EXPERTS) - {"moe.fused_permutation"}),
        (MOE, {"moe.dispatcher": "dedup"}, H200, KERNELS | {"moe.fused_router"}),
        (MOE, {"moe.dispatcher": "dedup", "parallel.ep": 1}, H200, KERNELS | OF_EXPERTS),
        (MOE, {"train.fused_activation": False}, H200, (KERNELS | OF_EXPERTS) - {"train.fused_activation", "moe.apply_probs_on"}),
        (DENSE, BF16 | WIDE | {"model.head_dim": 48, "model.num_heads": 2, "model.num_kv_heads": 1}, H200, KERNELS - {"train.fused_norms"}),
        # What is said by hand stays.
        (MOE, {"train.compile.loss": True}, H200, (KERNELS | OF_EXPERTS | {"train.compile.loss"}) - {"train.fused_loss"}),
        (IMAGES, {"train.compile.vision": True, "train.fused_norms": False}, H200, (KERNELS | OF_EXPERTS | {"train.compile.vision"}) - {"train.fused_norms"}),
    ],
)  # fmt: skip
def test_a_switch_is_on_where_device_shapes_and_layout_allow_it(path: Path, words: dict[str, Any], target: Target, on: set[str]) -> None:
    assert fast(load(path, words), target) == on


@pytest.mark.parametrize(
    ("path", "words", "target", "expected"),
    [
        (MOE, LARGE, H200, "cudnn"),
        (MOE, {}, H200, "cudnn"),
        (MOE, {"train.micro_batch_size": 1}, H200, "auto"),
        (MOE, LARGE, Target("NVIDIA H200"), "auto"),
        (MOE, LARGE | {"data.pack": False, "data.pad": False}, H200, "auto"),
        (IMAGES, LARGE | {"data.pack": False, "data.pad": False}, H200, "cudnn"),
        (IMAGES, {"train.micro_batch_size": 2}, H200, "auto"),
        (MOE, {}, Target("NVIDIA A100-SXM4-80GB", transformer_engine=True), "flash"),
        (MOE, {"train.dtype": "fp32"}, H200, "plain"),
        (MOE, LARGE | {"train.deterministic": True}, H200, "auto"),
        (MOE, LARGE | {"model.head_dim": 256}, H200, "auto"),
        (MOE, LARGE | {"parallel.cp": 2, "parallel.ep": 1}, H200, "auto"),
        (MOE, LARGE | {"parallel.cp": 2, "parallel.ep": 1, "parallel.cp_comm": "ulysses"}, H200, "cudnn"),
        (MOE, LARGE | {"backend": "megatron"}, H200, "auto"),
        (MOE, {}, Target(), "plain"),
        (MOE, {"train.attention": "flash"}, H200, "flash"),
    ],
)
def test_attention_is_cudnns_where_it_serves_the_rows(path: Path, words: dict[str, Any], target: Target, expected: str) -> None:
    assert automatic.resolved(load(path, words), target).train.attention == expected


LAYOUTS = [
    dict(
        zip(
            ("parallel.ep", "parallel.tp", "moe.dispatcher", "train.dtype", "offload.optimizer", "parallel.reduce_dtype"), each, strict=True
        )
    )
    for each in product((1, 2), (1, 2), ("alltoall", "allgather", "dedup"), ("fp32", "bf16"), (False, True), ("fp32", "bf16"))
]


@pytest.mark.parametrize("path", [MOE, DENSE, IMAGES], ids=lambda p: p.stem)
def test_what_auto_takes_is_accepted_and_changes_no_precision(path: Path) -> None:
    of_precision = ("optimizer.moments_dtype", "parallel.reduce_dtype", "train.dtype", "moe.router_dtype", "precision.fp8")
    for words in LAYOUTS:
        config = load(path, words | {"data.pad": True, "train.global_batch_size": 16})
        ran = automatic.resolved(config, H200)
        before, after = flatten(dump(config)), flatten(dump(ran))
        assert checks.switch_problems(ran, 8) == checks.switch_problems(config, 8), words
        assert {k: before[k] for k in of_precision} == {k: after[k] for k in of_precision}


def test_off_a_gpu_each_switch_is_at_its_neutral_value() -> None:
    """So that no hash of a run on a CPU, and none of megatron-core, depends on what the default is."""
    for path, words, target in ((MOE, {}, Target()), (IMAGES, {}, Target()), (MOE, {"backend": "megatron"}, H200)):
        flat = flatten(dump(automatic.switched(load(path, words), target)))
        assert {key: flat[key] for key in SWITCHES} == {key: neutral()[key] for key in SWITCHES}


def test_megatron_takes_auto_and_refuses_a_fast_value_by_hand() -> None:
    config = load(MOE, {"backend": "megatron"})
    assert not [line for line in megatron.feature_problems(config) if "torch backend" in line]
    said = load(MOE, {"backend": "megatron", "train.fused_norms": True})
    assert any("train.fused_norms true belongs to the torch backend" in line for line in megatron.feature_problems(said))


def test_one_line_says_what_was_chosen() -> None:
    said = automatic.told(load(DENSE, BF16 | WIDE | {"optimizer.fused": False}), H200)
    assert said == (
        "auto on NVIDIA H200: train.attention cudnn; fast train.fused_activation, train.fused_norms, train.fused_loss; "
        "plain train.compile.decoder, train.compile.loss, optimizer.master_weights"
    )
    assert automatic.told(load(DENSE), Target()) == "auto on the CPU: train.attention plain; plain all switches"
    assert automatic.told(automatic.resolved(load(DENSE), Target()), Target()) == ""
    assert automatic.told(load(MOE, {"backend": "megatron"}), H200) == ""


def test_one_rank_reduces_nothing_so_halves_ask_for_no_precision_there() -> None:
    config = load(MOE, {"parallel.ep": 1, "optimizer.master_weights": "remainder"})
    checks.check(config, 1)
    with pytest.raises(ConfigError, match=r"set parallel\.reduce_dtype: bf16"):
        checks.check(config, 2)
