"""`beside_bare.py` on a CPU, where the shim stands in for CUDA: `python bare_ranks.py OUT RANKS [key.path=value ...]`, one pair."""

from __future__ import annotations

import os
import sys

import beside_bare
import megatron_shim
from megatron.core.transformer.moe import moe_utils

from playbook_bench.machine import detect
from playbook_trainer.megatron import engine

if __name__ == "__main__":
    megatron_shim.install()
    moe_utils.te_general_gemm = None  # the bare side is megatron-core as it comes: without Transformer Engine a plain product
    engine.require = lambda *_: None  # there is no GPU, which is what the shim is for
    detect.device_ids = lambda machine: [str(i) for i in range(int(sys.argv[2]))]
    code = beside_bare.main(["--only", "all-to-all", "--out", sys.argv[1], *sys.argv[3:]])
    sys.stdout.flush()
    os._exit(code)
