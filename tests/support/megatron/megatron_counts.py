"""Real megatron-core models, one rank of any world at a time, on a CPU: `python megatron_counts.py`, jobs as JSON on stdin.

A job is {"config", "words", "world", "stage"}; the answer holds its parameters and the bytes of all tensors that building it made.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megatron_shim
import torch

from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.megatron import engine, probe, weights


def tensor_bytes(_: torch.device) -> int:
    """Bytes of every tensor that is alive, each storage once; what the allocator says on a GPU."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def main() -> None:
    """Build every job."""
    warnings.filterwarnings("ignore")
    megatron_shim.install()
    weights.initialise = lambda *_: None  # only sizes are asked for
    engine.require = lambda *_: None  # there is no GPU, which is what the shim is for
    probe.allocated = tensor_bytes
    gc.freeze()  # what was imported is in no count, and looking through it would take most of the time
    found: list[dict[str, Any]] = []
    for job in json.load(sys.stdin):
        config = load(Path(job["config"]), parse_overrides(job["words"]))
        found.append(asdict(probe.build(config, job["world"], torch.device("cpu"), job["stage"])))
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
