"""What tests of megatron-core on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[torch.device]:
    """One rank, and megatron-core's groups over it, which each test gives back: they are dozens of threads and open files every time."""
    from megatron.core import parallel_state

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield device
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
