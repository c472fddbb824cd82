"""`bare_megatron_steps.py` on a CPU, where the shim stands in for CUDA: `python bare_steps.py CONFIG [key.path=value ...] [--trace FILE]`."""

from __future__ import annotations

import os
import sys

import bare_megatron_steps
import megatron_shim
from megatron.core.transformer.moe import moe_utils

if __name__ == "__main__":
    megatron_shim.install()
    moe_utils.te_general_gemm = None
    bare_megatron_steps.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
