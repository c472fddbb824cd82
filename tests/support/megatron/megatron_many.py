"""`many.py` for the megatron backend on a CPU: `python megatron_many.py JOBS SECONDS [WORKERS]`. The shim stands in for CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import many
import megatron_shim
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from playbook_trainer.megatron import engine


def clean(before: dict[str, str], cleaned: Callable[[dict[str, str]], None] = many.clean) -> None:
    """megatron-core keeps the balancing losses of as many layers as the first model has, for as long as the process lives."""
    cleaned(before)
    get_moe_layer_wise_logging_tracker().clear()


if __name__ == "__main__":
    megatron_shim.install()
    many.clean = clean
    engine.require = lambda *_: None  # there is no GPU, which is what the shim is for
    sys.exit(many.main(Path(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:])))
