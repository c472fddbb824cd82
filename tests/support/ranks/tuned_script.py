"""A training script with knobs: two help, six do nothing, one hurts, one crashes, one changes the loss, one runs out of memory. Step times are invented, as `foreign_script.py` does.

It takes as long as it says unless `PLANNED_CLOCK` is set.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

GAINS = {"--fuse": 0.12, "WORKERS": 0.06, "--careful": -0.10}


def main():
    words = sys.argv[1:]
    launch = Path(words[words.index("--launch") + 1]).name[:3]
    on = {word for word, following in zip(words, [*words[1:], ""], strict=True) if following == "on"}
    on |= {word for word in ("--crash", "--big") if word in words}
    if os.environ.get("WORKERS") == "8":
        on.add("WORKERS")
    if "--crash" in on:
        sys.exit("RuntimeError: this path is not built")
    if "--big" in on:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")
    if "--fuse" in on:
        print("the fused kernel is on")
    draw = random.Random(launch)
    base = 0.02 * (1 + draw.gauss(0, 0.004))
    for knob in on:
        base /= 1 + GAINS.get(knob, 0.0)
    rows = [
        {
            "step": step,
            "seconds": base * (1 + draw.gauss(0, 0.003)),
            "loss": 4.0 / (1 + step) * (1.3 if "--cut" in on else 1.0),
            "tokens": 1024,
        }
        for step in range(1, 11)
    ]
    if "PLANNED_CLOCK" not in os.environ:
        time.sleep(sum(row["seconds"] for row in rows))
    print("\n".join(map(json.dumps, rows)))


main()
