"""One rank of `bare_megatron.py`'s model in a loop that prints a JSON line for each step.

`bare_megatron_steps.py CONFIG [key.path=value ...] [--trace FILE]`, which leaves a trace of the last step of rank 0. Started by itself it
is the only rank; torchrun starts several. With TORCHDYNAMO_DISABLE=1 the compiler is not even imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def as_written(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """What torch.compile makes of a function where it is switched off."""
    return model if model is not None else as_written


def main(words: list[str]) -> None:
    """Train, and print the seconds of each step."""
    words, trace = (words[:-2], words[-1]) if words[-2:-1] == ["--trace"] else (words, None)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch.compile = as_written  # torch would import its compiler all the same, for seconds
    import torch.distributed as dist
    from bare_megatron import build, everyone_is_here, joined, refuse

    from playbook_trainer.config.tree import load, parse_overrides

    config = load(Path(words[0]), parse_overrides(words[1:]))
    refuse(config)
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    device = joined()
    train = build(config, device)
    tokens = config.train.global_batch_size * config.data.seq_len
    for step in range(1, config.train.steps + 1):
        everyone_is_here(device)
        began = time.perf_counter()
        traced = trace is not None and step == config.train.steps and dist.get_rank() == 0
        with torch.profiler.profile() if traced else contextlib.nullcontext() as profile:
            with torch.profiler.record_function("step"):
                loss = float(train())
            everyone_is_here(device)
        if profile is not None:
            profile.export_chrome_trace(str(trace))
        if dist.get_rank() == 0:
            memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            row = {"step": step, "seconds": time.perf_counter() - began, "loss": loss, "tokens": tokens, "peak_memory_bytes": memory}
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # taking the interpreter down takes a second, which no step has
