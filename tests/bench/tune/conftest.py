"""A command whose launches are invented in this process: no process starts, and the clock is the test's."""

from __future__ import annotations

import itertools
import json
import math
import random
import time

import pytest

from playbook_bench.launch.outcome import Result
from playbook_bench.run import series
from playbook_bench.tune import session
from playbook_bench.variants import program

LAUNCH_S = 20.0


class Launches:
    """Stands for `program.start`: step times from the words of the command, and what a launch takes from a clock of its own."""

    def __init__(self):
        self.words, self.spent, self.stop_at, self.stop = [], 0.0, None, None
        self.noise, self.began = 0.004, time.time() - 100_000
        self.cut_from = math.inf
        """From this launch on, the faster kernel changes the loss."""

    def monotonic(self):
        """What the command has spent is invented; where it begins is not."""
        return time.monotonic() + self.spent

    def start(self, program, folder, on_step=None):
        if self.stop_at == len(self.words):
            self.stop_at = None
            raise self.stop
        words = list(program.words)
        self.words.append((words, dict(program.environment)))
        took = LAUNCH_S * (1.5 if "--compile on" in " ".join(words) else 1.0)
        self.spent += took
        self.began += took
        began = self.began
        if "--crash" in words:
            return Result("crash", 1, "it ended with exit code 1: this path is not built", began, LAUNCH_S)
        if "--big" in words:
            return Result("oom", 1, "CUDA out of memory", began, LAUNCH_S)
        draw = random.Random(len(self.words))
        seconds = 0.1 * (1 + draw.gauss(0, self.noise)) / self.faster(words, program.environment)
        cuts = {"--cut on"} | ({"--fuse on"} if len(self.words) > self.cut_from else set())
        loss = 1.3 if any(each in " ".join(words) for each in cuts) else 1.0
        rows = [
            {
                "step": i,
                "timed": i > 4,
                "seconds": seconds * (1 + draw.gauss(0, 0.002)),
                "useful_tokens": 512,
                "raw_tokens": 512,
                "loss": loss * 4 / i,
            }
            for i in range(1, 15)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = {timed: sum(row["seconds"] for row in rows if row["timed"] is timed) for timed in (False, True)}
        logs = {pattern: int("--fuse on" in " ".join(words)) for pattern in program.patterns}
        summary = {
            "outcome": "ok",
            "seconds": {"start_up": 1, "warm_up": told[False], "timed": told[True], "total": took},
            "world_size": 1,
        }
        (folder / "summary.json").write_text(json.dumps({**summary, "env": {"strict": {"log": "jsonl"}}, "receipt": {"logs": logs}}))
        return Result("ok", 0, "", began, took)

    @staticmethod
    def faster(words, environment):
        text = " ".join(words)
        return (
            (1.12 if "--fuse on" in text else 1.0)
            * (1.06 if environment.get("WORKERS") == "8" else 1.0)
            * (0.9 if "--careful on" in text else 1.0)
            * 1.04 ** sum(word == "on" and option.startswith("--good") for option, word in itertools.pairwise(words))
        )


@pytest.fixture
def launches(monkeypatch):
    """Invented launches; `monotonic` of the tuning is theirs."""
    out = Launches()
    monkeypatch.setattr(program, "start", out.start)
    monkeypatch.setattr(session, "time", out)
    monkeypatch.setattr(series, "time", out)
    return out
