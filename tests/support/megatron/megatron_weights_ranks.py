"""One rank that loads, shares out and saves models of several layouts: `megatron_weights_ranks.py JOBS`, started as torchrun would.

JOBS is a JSON file with a list of {"name", "words", "weights"}; `megatron.data_parallel` among the words says how parameters are shared out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import megatron_ranks
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

from playbook_trainer.megatron import engine, groups, weights
from playbook_trainer.megatron import settings as mapping

WRAPPERS = {"megatron_fsdp": FullyShardedDataParallel, "fsdp2": TorchFullyShardedDataParallel}


def job(spec: dict[str, Any], folder: Path) -> None:
    """One layout on this rank."""
    config = megatron_ranks.configuration(["train.device=cuda", "train.dtype=bf16", *spec["words"]])
    groups.initialise(config)
    engine.seed(config)
    settings = engine.transformer_config(config)
    chunks = engine.build_chunks(config, settings, torch.device("cuda", torch.cuda.current_device()))
    weights.load(chunks, config.model, Path(spec["weights"]))
    how = DistributedDataParallelConfig(**mapping.data_parallel(config, DistributedDataParallelConfig))
    wrapped = [WRAPPERS[config.megatron.data_parallel](settings, how, chunk) for chunk in chunks]
    weights.save(wrapped, config.model, folder / spec["name"], max_shard_bytes=1_000_000)
    dist.barrier()
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    jobs = Path(sys.argv[1])
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for each in json.loads(jobs.read_text()):
        job(each, jobs.parent)
        if rank == 0:
            print("saved", each["name"], flush=True)
    dist.destroy_process_group()
