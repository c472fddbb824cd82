"""One rank that trains several configurations in turn: `python many.py JOBS`, where JOBS is a JSON list of lists of words.

Starting a rank costs seconds and training ten steps of a tiny model costs one, so layouts of one world size share their processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from playbook_trainer import checks
from playbook_trainer.config import load, parse_overrides
from playbook_trainer.loop import train


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else None
    if cuda:
        torch.cuda.set_device(device)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0, timeout=timedelta(seconds=120))
    for number, words in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        began = time.monotonic()
        config = load(Path(words[0]), parse_overrides(words[1:]))
        checks.check(config, world)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore(str(number), store),
            rank=rank,
            world_size=world,
            device_id=device,
            timeout=timedelta(seconds=60),
        )
        outcome = train(config, rank, world)
        dist.destroy_process_group()
        if rank == 0:
            print(f"{words[-1]}: {outcome}, {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:  # whatever it was, the other ranks wait for this one
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
