"""What the trainer sets for itself before CUDA starts, whichever launcher started it."""

from __future__ import annotations

import pytest
import torch

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_trainer import loop
from playbook_trainer.config import environment
from playbook_trainer.config.tree import load

TINY = data_root("configs") / "qwen3_moe_tiny.yaml"
FSDP = {"backend": "megatron", "megatron.data_parallel": "megatron_fsdp"}


def test_a_local_launch_gets_what_a_job_gets():
    config = load(TINY, {"backend": "megatron", "parallel.cp": 2, "moe.dispatcher": "hybridep", "parallel.ep": 2})
    found: dict[str, str] = {}
    assert environment.apply(config, found, "hopper") == environment.variables(config, "hopper") == found
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


WIDE = {"backend": "megatron", "model.hidden_size": 128, "model.expert_ffn_size": 128}
CUTLASS, CUBLAS = ({**WIDE, "megatron.grouped_gemm": gemm} for gemm in ("cutlass", "cublas"))
OWN_KERNEL = "NVTE_USE_CUTLASS_GROUPED_GEMM"


@pytest.mark.parametrize(
    ("config", "words", "given", "added"),
    [
        (TINY, {"backend": "megatron", "parallel.cp": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {}),
        (TINY, FSDP, {}, {}),
        (TINY, {"parallel.cp": 2, "parallel.fsdp": False}, {}, {}),
        (TINY, CUTLASS, {}, {OWN_KERNEL: "1"}),
        (TINY, CUTLASS, {OWN_KERNEL: "1"}, {}),
        (TINY, CUBLAS, {}, {}),
        (data_root("configs") / "qwen3_tiny.yaml", {"backend": "megatron"}, {OWN_KERNEL: "1"}, {}),
        (TINY, {"parallel.comm_sms": 16}, {}, {"NCCL_MAX_CTAS": "16"}),
        (TINY, {"parallel.comm_sms": 16}, {"NCCL_MAX_CTAS": "8"}, {}),
    ],
)
def test_what_a_configuration_needs_is_added_and_what_the_user_set_stays(config, words, given, added):
    found = {**given}
    assert environment.apply(load(config, words), found, "hopper") == added
    assert found == given | added


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        (FSDP, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, r"CUDA_DEVICE_MAX_CONNECTIONS is 1.*unset it"),
        (CUTLASS, {OWN_KERNEL: "0"}, rf"{OWN_KERNEL} is '0' and megatron.grouped_gemm is .*unset"),
        (CUBLAS, {OWN_KERNEL: "1"}, rf"{OWN_KERNEL} is '1' and megatron.grouped_gemm is .*unset"),
    ],
)
def test_what_the_user_set_against_the_configuration_is_refused(words, given, said):
    with pytest.raises(ConfigError, match=said):
        environment.apply(load(TINY, words), given, "hopper")


@pytest.mark.parametrize(("said", "platform"), [("9.0\n9.0", "hopper"), ("10.0", "blackwell"), ("12.1", "blackwell"), ("", "hopper")])
def test_the_platform_is_what_the_driver_reports(said, platform, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{said}'\n", encoding="ascii")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.this_platform({}) == platform
    assert environment.this_platform({"NVLINK_DOMAIN_SIZE": "72"}) == "nvl72"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert environment.this_platform({}) == "cpu"


@pytest.mark.parametrize(("gpus", "local_rank"), [(0, 0), (2, 2)])
def test_a_rank_without_a_gpu_of_its_own_is_refused(gpus, local_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(ConfigError, match=f"local rank {local_rank} needs a GPU of its own, and this machine has {gpus}"):
        loop.start(load(TINY, {"train.device": "cuda"}), 0, 1)
