"""A rank of the real trainer that is late after every second step, in turn with the other: `late_ranks.py CONFIG WORDS...` prints how long its timed steps took."""

import os
import sys
import time

from ranks import leave

from playbook_trainer import loop
from playbook_trainer.__main__ import main
from playbook_trainer.observe.metrics import Recorder

LATE_S = 1.0


def plant():
    rank, train_step, begin_timed = int(os.environ["RANK"]), loop.train_step, Recorder.begin_timed
    times = {}

    def late(trainer, before_update=None):
        stats = train_step(trainer, before_update)
        if trainer.step % 2 == rank:
            time.sleep(LATE_S)
        times["end"] = time.perf_counter()
        return stats

    def begin(recorder):
        begin_timed(recorder)
        times["began"] = time.perf_counter()

    loop.train_step, Recorder.begin_timed = late, begin
    return times


if __name__ == "__main__":
    seen = plant()
    try:
        code = main(sys.argv[1:])
    except SystemExit as e:
        code = e.code
    print(f"took {seen['end'] - seen['began']}")
    leave(code)
