"""Recipes at their full size and world: real megatron-core models of one rank, without memory behind their parameters.

`python megatron_full_size.py`, a JSON list of recipe files on stdin; the answer holds for each the parameters of its first and its last stage,
counted and by arithmetic. What needs Transformer Engine and changes no parameter is left out: context parallelism, recompute, graphs, FP8.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings

import megatron_shim
import torch

from playbook_trainer.config import recipes
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import TrainerConfig, load
from playbook_trainer.megatron import engine, groups, probe, weights

NOWHERE = torch.device("meta")
PLAIN = {
    "parallel.cp": 1, "train.recompute": "none", "train.recompute_modules": [], "train.cuda_graphs": [], "precision.fp8": "none",
    "train.micro_batch_size": 1, "train.global_batch_size": 1 << 14, "megatron.optimizer_offload_fraction": 0,
}  # fmt: skip


def counted(config: TrainerConfig, world: int, stage: int) -> int:
    """Parameters that the first rank of a stage holds."""
    with probe.alone(stage * world // config.parallel.pp, world), NOWHERE:
        groups.initialise(config)
        engine.seed(config)
        chunks = engine.build_chunks(config, engine.transformer_config(config), NOWHERE)
        return sum(p.numel() for chunk in chunks for p in chunk.parameters())


def main() -> None:
    """Count every recipe."""
    warnings.filterwarnings("ignore")
    megatron_shim.CPU = NOWHERE
    megatron_shim.install()
    weights.initialise = lambda *_: None
    gc.freeze()
    found = {}
    for file in json.load(sys.stdin):
        config, _ = probe.buildable(load(recipes.folder() / file, PLAIN))
        world = recipes.find(file).gpus[0]
        stages = dry_run(config, world).stages
        found[file] = [(counted(config, world, s.stage), s.held) for s in (stages[0], *stages[1:][-1:])]
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
