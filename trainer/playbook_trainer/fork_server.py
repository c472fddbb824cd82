"""The fork server: forks ranks of one configuration from a process that has imported what they import.

`python -m playbook_trainer.fork_server CONFIG` is the trainer's end of `playbook_bench.launch.forked`.
It writes `{"ready": true}`, then reads a line of JSON for each rank, `{"words": [...], "environment": {...}, "log": path}`, answers it with
`{"pid": n}`, and writes `{"pid": n, "code": c}` once that rank has ended (negative: by that signal). It ends with its input, and its ranks
with it. A process that has touched a GPU cannot be forked, so where importing does that, it ends without a word, and with code 2.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from playbook.processes import die_with_parent
from playbook_trainer.config.environment import apply
from playbook_trainer.config.tree import load

_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
# What each backend imports before its first use of a GPU; what is missing here is reported by the ranks.
MODULES: dict[str, tuple[str, ...]] = {
    "torch": ("playbook_trainer.loop", "playbook_trainer.torch.build", "torch.distributed.fsdp", *_COMPILER),
    "megatron": (
        "playbook_trainer.loop",
        "playbook_trainer.megatron.engine",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.optimizer",
        "megatron.core.distributed",
        "megatron.core.pipeline_parallel",
        "transformer_engine.pytorch",
        *_COMPILER,
    ),
}
_POLL_S = 0.02


def main(argv: list[str] | None = None) -> int:
    """Import, then fork until the input ends; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    # What imports print is no answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    config = load(Path(words[0]))
    apply(config)  # libraries read some variables when they are imported
    if not import_all(config.backend):
        return 2
    _say(answers, {"ready": True})
    unread = b""
    while True:
        if select.select([0], [], [], _POLL_S)[0]:
            got = os.read(0, 1 << 16)
            if not got:
                return 0
            *lines, unread = (unread + got).split(b"\n")
            for line in lines:
                job = json.loads(line)
                _say(answers, {"pid": fork(job["words"], job["environment"], Path(job["log"]), answers)})
        for pid, code in _ended():
            _say(answers, {"pid": pid, "code": code})


def import_all(backend: str) -> bool:
    """Import what ranks of a backend import; whether this process can be forked after that."""
    # So that a question whether there is a GPU leaves CUDA alone.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # The compiler's pool of processes belongs to the rank that compiles: a fork has neither its threads nor a right to its pipes.
    os.environ["TORCH_WARM_POOL"] = "0"
    for name in MODULES[backend]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError, AttributeError):
        # It reads Triton's whole library, 0.4 s, and is kept by the process.
        importlib.import_module("triton.runtime.cache").triton_key()
    # What is imported stays: collections in ranks need not look at it, nor copy its pages to mark it.
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    return torch is not None and not torch.cuda.is_initialized()


def fork(
    words: list[str],
    environment: Mapping[str, str],
    log: Path,
    answers: TextIO | None = None,
    run: Callable[[list[str]], int] | None = None,
) -> int:
    """The process id of a new rank, in a session of its own, that dies with this process; it closes `answers`, which are not its own.

    The rank is the trainer's, or whatever `run` does with the words.
    """
    end_with_us = die_with_parent(os.getpid())
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        end_with_us()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
            os.dup2(target, stream)
        if answers is not None:
            answers.close()
        os.environ.clear()
        os.environ.update(environment)
        from playbook_trainer.__main__ import main as rank

        code = (run or rank)(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # As a rank of its own process does: what it started is not waited for.
        os._exit(code)


def _ended() -> list[tuple[int, int]]:
    """Ranks that have ended since the last call, with their codes."""
    codes = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return codes


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    sys.exit(main())
