"""A plain torch loop that prints a JSON line for each step, as a user's own script would.

`--work` repeats the products of the model; `--nan-at`, `--stop-at` and `--slow-every` misbehave.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch import nn

WIDTH, BATCH, LENGTH = 128, 4, 32


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--work", type=int, default=4)
    arguments.add_argument("--sleep-ms", type=float, default=0.0, help="of each step")
    arguments.add_argument("--slow-every", type=int, default=0, help="every so many steps, one sleeps 50 ms more")
    arguments.add_argument("--nan-at", type=int, default=0)
    arguments.add_argument("--stop-at", type=int, default=0, help="end there, with exit code 0")
    told = arguments.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.randn(BATCH * LENGTH, WIDTH)
    for step in range(1, told.steps + 1):
        began = time.perf_counter()
        for _ in range(told.work):
            out = model(data)
        loss = nn.functional.mse_loss(out, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slow = told.slow_every and step % told.slow_every == 0
        time.sleep((told.sleep_ms + 50 * bool(slow)) / 1000)
        value = float("nan") if step == told.nan_at else loss.item()
        print(json.dumps({"step": step, "seconds": time.perf_counter() - began, "loss": value, "tokens": BATCH * LENGTH}), flush=True)
        if step == told.stop_at:
            sys.exit(0)


if __name__ == "__main__":
    main()
