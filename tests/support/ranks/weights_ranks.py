"""One rank that loads a Hugging Face folder into its shards and saves it again: `weights_ranks.py CONFIG OUT [key.path=value ...]`."""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from ranks import leave

from playbook_trainer import axes as layout
from playbook_trainer.config import checks
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.loop import start
from playbook_trainer.torch import build, weights

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = load(Path(sys.argv[1]), parse_overrides(sys.argv[3:]))
checks.check(config, world)
device = start(config, rank, world)
axes = layout.build(world, rank, config.parallel)
model = build.build(config, axes, device)
files = weights.load(model, axes, Path(config.init.weights))
held = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in model.parameters())
sys.stdout.write(f"{files.bytes_read} {held}\n")
weights.save(model, axes, Path(sys.argv[2]), max_shard_bytes=300_000)
dist.barrier()
leave()
