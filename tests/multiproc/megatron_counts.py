"""Parameters of real megatron-core models, one rank of any world at a time, on a CPU: `python megatron_counts.py`, jobs as JSON on stdin.

A job is {"config", "words", "world", "rank"}. torch's fake process group stands for all other ranks, so nothing is sent.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import megatron_shim
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from playbook_trainer.config import load, parse_overrides
from playbook_trainer.megatron import engine, groups, weights


def count(job: dict[str, Any]) -> int:
    """The parameters that the job's rank holds."""
    config = load(Path(job["config"]), parse_overrides(job["words"]))
    dist.init_process_group("fake", store=FakeStore(), rank=job["rank"], world_size=job["world"])
    try:
        groups.initialise(config)
        engine.seed(config)
        chunks = engine.build_chunks(config, engine.transformer_config(config), torch.device("cpu"))
        return sum(p.numel() for chunk in chunks for p in chunk.parameters())
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Count for every job."""
    warnings.filterwarnings("ignore")
    megatron_shim.install()
    weights.initialise = lambda *_: None  # only shapes are asked for
    found = [count(job) for job in json.load(sys.stdin)]
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
