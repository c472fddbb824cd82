"""`python -m playbook_trainer CONFIG [key.path=value ...]`: one rank of a training run.

Under torchrun (or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT) it joins the others;
alone it is a run of one rank.
Exit codes: 0 finished, 2 the configuration, layout or data cannot run, 3 stopped on NaN, 4 out of memory, 5 stopped by a signal after a
checkpoint, 6 hung, 1 any other error.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from playbook import files
from playbook.errors import NO_TORCH, ConfigError, PlaybookError
from playbook_trainer.exit_codes import ERROR, OF_OUTCOME, OK, OUT_OF_MEMORY, REFUSED, RunError

if TYPE_CHECKING:
    from playbook_trainer.config.tree import TrainerConfig

USAGE = "usage: playbook train CONFIG [key.path=value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    rank = 0
    try:
        rank, world = _rank_and_world_size()
        if not words or words[0] in ("-h", "--help"):
            raise ConfigError(USAGE)
        return _run(words, rank, world)
    except PlaybookError as e:
        if rank == 0:
            sys.stderr.write(f"error: {e}\n")
        elif os.environ.get("LOCAL_RANK") == "0":
            # Data or packages may be missing on this machine alone.
            sys.stderr.write(f"rank {rank}: error: {e}\n")
        return _code(e)


def _code(e: PlaybookError) -> int:
    return ERROR if isinstance(e, RunError) else REFUSED


def _rank_and_world_size() -> tuple[int, int]:
    """This rank and the number of ranks, by the launcher's variables."""
    variables = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    words = [variables["RANK"] or ("0" if variables["WORLD_SIZE"] in (None, "1") else ""), variables["WORLD_SIZE"] or "1"]
    if all(w.isascii() and w.isdigit() and len(w) < 10 for w in words) and int(words[0]) < int(words[1]):
        rank, world = int(words[0]), int(words[1])
        port = os.environ.get("MASTER_PORT", "")
        if world > 1 and not (os.environ.get("MASTER_ADDR") and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
            raise ConfigError(
                f"WORLD_SIZE is {world}, MASTER_ADDR {os.environ.get('MASTER_ADDR')!r} and MASTER_PORT {port!r}; expected the host of rank "
                "0 and a free port on it, the same for all ranks, as torchrun sets them"
            )
        return rank, world
    stated = ", ".join(f"{name} {'is not set' if value is None else repr(value)}" for name, value in variables.items())
    raise ConfigError(
        f"{stated} in the environment; expected both, RANK from 0 to WORLD_SIZE - 1, as torchrun sets them, "
        "or neither for a run of one rank"
    )


def _run(words: list[str], rank: int, world: int) -> int:
    """Check the configuration, then the files, then train. Returns the rank's exit code."""
    # Configuration first: a mistyped key is reported before torch has been imported.
    from playbook_trainer.config import checks, environment
    from playbook_trainer.config.tree import load, parse_overrides

    config = load(Path(words[0]), parse_overrides(words[1:]))
    checks.check(config, world)
    environment.apply(config)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(NO_TORCH)

    with _uncollected():
        import playbook_trainer.loop  # noqa: F401  everything that the functions below import
        from playbook_trainer.checkpoint_files import is_finished
        from playbook_trainer.data import loader

    if is_finished(config):
        if rank == 0:
            sys.stdout.write(
                f"finished before, says checkpoint.dir {config.checkpoint.dir}: nothing is left to do; raise train.steps to go on\n"
            )
        return OK
    config = loader.with_steps(config)
    _check_files(config, rank)
    return _train(config, rank, world)


def _check_files(config: TrainerConfig, rank: int) -> None:
    """Refuse data and weights that cannot be read and folders that cannot be written, before anything is built;
    rank 0 takes the folders.
    """
    from playbook_trainer.checkpoint_files import hold
    from playbook_trainer.config.huggingface import check_rows
    from playbook_trainer.data import loader
    from playbook_trainer.huggingface import weights
    from playbook_trainer.observe import trackers

    trackers.check(config)
    loader.check(config)
    if config.init.weights is not None:
        weights.check_folder(config.model, Path(config.init.weights))
        check_rows(config.model, Path(config.init.weights), config.data.seq_len)
    if config.checkpoint.export is not None:
        weights.refuse_to_overwrite(Path(config.checkpoint.export))
        if rank == 0:
            weights.refuse_unwritable(Path(config.checkpoint.export))
    if rank > 0:
        return
    if config.checkpoint.every and config.checkpoint.dir:
        weights.refuse_unwritable(Path(config.checkpoint.dir), "checkpoint.dir")
    _take_output(Path(config.output))
    if config.checkpoint.dir:
        hold(Path(config.checkpoint.dir), None if config.profile.traced else config.train.steps)


def _train(config: TrainerConfig, rank: int, world: int) -> int:
    """Train, and turn the run's end or what it raises into the rank's exit code."""
    from playbook_trainer.checkpoint_files import mark_finished
    from playbook_trainer.loop import train

    try:
        outcome = train(config, rank, world)
        if outcome == "ok" and rank == 0:
            mark_finished(config)
        if rank == 0 and outcome in _ENDS:
            sys.stderr.write(f"ended: {_ENDS[outcome]}\n")
        return OF_OUTCOME[outcome]
    except PlaybookError as e:
        if rank == 0:
            raise
        # It may be about what this rank alone has read; the others would only say that they have lost it.
        sys.stderr.write(f"rank {rank}: error: {e}\n")
        return _code(e)
    except (RuntimeError, MemoryError) as e:
        line = (str(e).splitlines() or [type(e).__name__])[0]
        if _is_out_of_memory(e):
            sys.stderr.write(f"rank {rank}: out of memory: {line}\n")
            return OUT_OF_MEMORY
        if not any(phrase in str(e) for phrase in _LOST_PEER):
            raise
        sys.stderr.write(f"rank {rank}: error: lost another rank, whose own log says why it has ended ({line})\n")
        return ERROR


_ENDS = {
    "nan": "loss or gradient norm was not finite (train.on_nan); lower optimizer.lr, or go on from the last checkpoint",
    "stopped": "a signal asked for it, and a checkpoint was saved; the same command goes on from there",
}
"""Why a run that has not reached its last step ended."""
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvValue failed", "sendBytes failed")
"""What gloo and torch's store say of a rank that has gone."""


def _is_out_of_memory(e: BaseException) -> bool:
    """Whether the GPU's or the host's memory could not be had; torch has a type of error for the first alone."""
    import torch

    return isinstance(e, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(e)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Imports make objects by the hundred thousand, which stay: the collector looks at none of them, now or later.

    Where the process has imported torch before, it has more than imports, and nothing is done.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _take_output(folder: Path) -> None:
    """Make the folder of the run's files now, rather than find after the model has been built that they have no place,
    and keep other runs out of it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"output {folder} cannot be written: no permission; choose another folder")
        who = files.take(folder)
    except OSError as e:
        raise ConfigError(f"output {folder} cannot be written: {e.strerror or e}; choose another folder") from e
    if who:
        raise ConfigError(
            f"output {folder} is in use by {who}, and two runs would mix their steps; wait until that has ended, or choose another folder "
            f"(if its machine has died, remove {folder / files.LOCK})"
        )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave at once: tearing down process groups and loader workers one by one can outlast the run itself.
    os._exit(code)
