"""`many.py` for the megatron backend on a CPU: `python megatron_many.py JOBS SECONDS [WORKERS]`. The shim stands in for CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import many
import megatron_shim

from playbook_trainer.megatron import engine

if __name__ == "__main__":
    megatron_shim.install()
    engine.require = lambda *_: None  # there is no GPU, which is what the shim is for
    sys.exit(many.main(Path(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:])))
