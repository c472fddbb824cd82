"""Where the seconds go before a run's steps are steady: samples of the main thread's stack, of rank 0.

    python tools/first_step.py trainer/configs/qwen3_30b_a3b_24l_megatron.yaml train.steps=4 train.warmup_steps=2

Ranks are forks, as in series of matched runs, one for each visible GPU (`--ranks` says another number). A call of C that keeps the
interpreter's lock is counted for the line that made it, once it has returned. Prints the lines with the most seconds: of this project, and
innermost.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer"), str(Path(__file__).parent)]

from megatron_table import run_forked  # noqa: E402

from playbook_bench.machine import detect  # noqa: E402
from playbook_trainer import fork_server  # noqa: E402
from playbook_trainer.__main__ import main as train  # noqa: E402
from playbook_trainer.config.tree import load  # noqa: E402

EVERY_S = 0.02


def stack(frame: FrameType | None) -> list[str]:
    """`file:line function` of a stack, outermost first."""
    lines = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        lines.append(f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


class Sampler(threading.Thread):
    """Adds up, until it is told to stop, the seconds that a thread spends below each line of its stack."""

    def __init__(self, thread: int) -> None:
        super().__init__(daemon=True)
        self._watched, self._over = thread, threading.Event()
        self.below, self.at = Counter[str](), Counter[str]()

    def run(self) -> None:
        """Sample."""
        last = time.perf_counter()
        while not self._over.wait(EVERY_S):
            now, frames = time.perf_counter(), sys._current_frames()
            lines = stack(frames.pop(self._watched, None))
            if any(line.endswith("_engine_run_backward") for line in lines):  # while it waits, another thread runs the functions
                others = [stack(frame) for thread, frame in frames.items() if thread != threading.get_ident()]
                lines += max((o for o in others if any(line.endswith(("backward", "apply")) for line in o)), key=len, default=[])
            for line in set(lines):
                self.below[line] += now - last
            if lines:
                self.at[lines[-1]] += now - last
            last = now

    def close(self) -> None:
        """Stop."""
        self._over.set()
        self.join()

    def report(self, most: int) -> str:
        """The lines with the most seconds."""
        own = Counter({line: s for line, s in self.below.items() if "playbook_trainer" in line or "/core/" in line})
        parts = []
        for title, counted in (("below a line of the trainer or of megatron-core", own), ("in the innermost line", self.at)):
            parts += [title, *(f"  {s:7.2f} s  {line}" for line, s in counted.most_common(most) if s >= EVERY_S)]
        return "\n".join(parts)


def sampled(words: list[str]) -> int:
    """A rank of the trainer; rank 0 is watched, and prints what was seen."""
    if os.environ["RANK"] != "0":
        return train(words)
    sampler = Sampler(threading.get_ident())
    sampler.start()
    code = train(words)
    sampler.close()
    print(sampler.report(40), flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("words", nargs="*", help="key.path=value")
    parser.add_argument("--ranks", type=int, default=None, help="one for each visible GPU, if not given")
    parser.add_argument("--limit", type=float, default=120, help="seconds")
    arguments = parser.parse_intermixed_args(argv)
    gpus = detect.device_ids(detect.detect())
    ranks = arguments.ranks or len(gpus) or 1
    if not fork_server.import_all(load(arguments.config).backend):
        print("an import has touched a GPU; nothing can be forked", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="first-step-"))
    words = [str(arguments.config), "train.receipt=false", *arguments.words]
    job = run_forked(words, gpus[:ranks] or [""] * ranks, folder, arguments.limit, sampled)
    print((folder / "rank0.log").read_text(errors="replace"))
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if job.ended or any(job.codes.values()) else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
