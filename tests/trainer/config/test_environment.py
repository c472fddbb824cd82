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


def test_what_the_user_set_stays():
    config = load(TINY, {"backend": "megatron", "parallel.cp": 2})
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert environment.apply(config, given, "hopper") == {}
    assert given == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def test_connections_that_would_serialise_fsdp_are_refused():
    with pytest.raises(ConfigError, match=r"CUDA_DEVICE_MAX_CONNECTIONS is 1.*unset it"):
        environment.apply(load(TINY, FSDP), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "hopper")
    assert environment.apply(load(TINY, FSDP), {}, "hopper") == {}


def test_the_torch_backend_is_left_alone():
    assert environment.apply(load(TINY, {"parallel.cp": 2, "parallel.fsdp": False}), {}, "hopper") == {}


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


def test_one_kernel_for_all_experts_is_transformer_engines_own_switch():
    chosen, plain = (
        load(TINY, {"backend": "megatron", "megatron.grouped_gemm": g, "model.hidden_size": 128, "model.expert_ffn_size": 128})
        for g in ("cutlass", "cublas")
    )
    assert environment.apply(chosen, {}, "hopper") == {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
    assert environment.apply(plain, {}, "hopper") == {}
    for config, said in ((chosen, "0"), (plain, "1")):
        with pytest.raises(ConfigError, match=rf"NVTE_USE_CUTLASS_GROUPED_GEMM is '{said}' and megatron.grouped_gemm is .*unset"):
            environment.apply(config, {"NVTE_USE_CUTLASS_GROUPED_GEMM": said}, "hopper")
    assert environment.apply(chosen, {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}, "hopper") == {}
    dense = load(data_root("configs") / "qwen3_tiny.yaml", {"backend": "megatron"})
    assert environment.apply(dense, {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}, "hopper") == {}


def test_collectives_keep_to_their_multiprocessors_on_the_torch_backend():
    config = load(TINY, {"parallel.comm_sms": 16})
    assert environment.apply(config, {}, "hopper") == {"NCCL_MAX_CTAS": "16"}
    given = {"NCCL_MAX_CTAS": "8"}
    assert environment.apply(config, given, "hopper") == {}


@pytest.mark.parametrize(("gpus", "local_rank"), [(0, 0), (2, 2)])
def test_a_rank_without_a_gpu_of_its_own_is_refused(gpus, local_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(ConfigError, match=f"local rank {local_rank} needs a GPU of its own, and this machine has {gpus}"):
        loop.start(load(TINY, {"train.device": "cuda"}), 0, 1)
