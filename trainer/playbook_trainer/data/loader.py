"""Micro-batches for one data-parallel rank, made in worker processes, in an order that no layout changes.

Step s of a run reads global_batch_size rows from row start_row + s * global_batch_size on. They go to micro-batches in turn: micro-batch j
of rank r takes the micro_batch_size rows from (j * dp_size + r) * micro_batch_size on. So the rows of a step do not depend on ranks,
workers or micro-batches, and a run that starts at a row goes on as one that has reached it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from playbook.errors import ConfigError, DataError, PlaybookError
from playbook.processes import die_with_parent
from playbook_trainer.checkpoint_files import identity, other_stream
from playbook_trainer.config.checks import warm_up_problems
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import Batch
from playbook_trainer.data.collate import collate
from playbook_trainer.data.images import BAD_KINDS, BadImage, ImageDecoder, ImageFile, read_image
from playbook_trainer.data.packing import LaneState, Lost
from playbook_trainer.data.rows import Rows, check_data, count_steps, make_rows
from playbook_trainer.data.sources.streams import Split
from playbook_trainer.data.tokenizer import refuse_bytes
from playbook_trainer.exit_codes import RunError

_PREFETCH = 2
"""Micro-batches that each worker makes ahead."""
_COUNTERS = (
    *("images_decoded", "images_cached", *(f"bad_images_{kind}" for kind in BAD_KINDS)),
    *("padding_tokens", "samples_shortened", "samples_dropped", "samples_bad"),
)
"""What a loader counts; images that were decoded, taken from the cache and bad add up to the images of the batches."""
_NAMED = 10
"""Samples left out that each rank names; the rest are counted."""
OF_PATCHES = ("pixels_PC", "rotary_P2", "pos_index_4P", "pos_weight_4P")
"""What a batch's images have for each patch."""


def build_loader(
    config: TrainerConfig,
    *,
    dp_rank: int,
    dp_size: int,
    split: Split = "train",
    start_row: int = 0,
    state: Mapping[str, Any] | None = None,
) -> Loader:
    """The loader of one data-parallel rank, from the start, from row `start_row`, or from where `state` (of `merge_states`) was taken.

    A state holds the places of all lanes; with the row alone, the lengths of all samples before it are worked out again.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data, model and batch sizes do not fit each other, or the state belongs to another batch size,
            stream or amount of data.
    """
    lanes: dict[int, LaneState] = {}
    if state is not None:
        start_row = state["row"]
        rows_per_step = state.get("rows_per_step", config.train.global_batch_size)
        if rows_per_step != config.train.global_batch_size:
            raise ConfigError(
                f"the checkpoint's data stream has {rows_per_step} rows per step, train.global_batch_size is "
                f"{config.train.global_batch_size}; resume with the batch size that saved it"
            )
        if problem := other_stream(state, config):
            raise ConfigError(problem)
        lanes = {int(number): list(place) for number, place in state.get("lanes", {}).items()}
    rows = make_rows(config, split, lanes)
    if state is not None and state.get("extent", rows.extent) != rows.extent:
        raise ConfigError(
            f"the checkpoint's data stream is over {state['extent']} samples or shards, this run's over {rows.extent}: in another order, "
            "samples would be read twice and others never; put the data back as it was, or choose another checkpoint.dir to start anew"
        )
    return Loader(config, rows, dp_rank, dp_size, start_row)


def worker_death(e: BaseException) -> RunError | None:
    """What to say where torch found a data worker dead, which it does in a signal's handler, so anywhere in the program;
    None for other errors.
    """
    if "DataLoader worker" not in str(e):
        return None
    return RunError(
        # The harness takes a log that says "out of memory" for a run that does not fit, which nobody knows here.
        f"a data worker died: {str(e).splitlines()[0]} Most often the host's memory was full: lower data.num_workers or data.cache_gib; "
        "a checkpoint resumes where the run stood"
    )


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those of all data-parallel ranks: each knows its own lanes."""
    merged: dict[str, Any] = {"lanes": {}}
    for state in states:
        merged = {**state, "lanes": {**merged["lanes"], **state["lanes"]}}
    return merged


def check(config: TrainerConfig) -> None:
    """Find out whether this configuration's data can be read, before anything starts. Reads the first samples, decodes no image.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data and model do not fit each other.
    """
    refuse_bytes(config)
    check_data(config, ["train", "eval"] if config.eval.every else ["train"])


def with_steps(config: TrainerConfig) -> TrainerConfig:
    """The configuration with the steps that `train.epochs` comes to, where it is set.

    Raises:
        DataError: missing or unreadable data.
        ConfigError: data and model do not fit each other, or the epochs leave no step to time.
    """
    train = config.train
    if train.epochs is None:
        return config
    steps = count_steps(config, train.epochs)
    if steps <= train.warmup_steps:
        raise ConfigError(
            f"train.epochs {train.epochs:g} comes to {steps} steps of {train.global_batch_size} rows, and train.warmup_steps "
            f"{train.warmup_steps} "
            "leaves none to time; lower train.warmup_steps or train.global_batch_size, or raise train.epochs"
        )
    resolved = config.model_copy(update={"train": train.model_copy(update={"steps": steps})})
    if problems := warm_up_problems(resolved):
        raise ConfigError(problems[0])
    return resolved


def data_sha(config: TrainerConfig, steps: int = 4) -> str:
    """A hash of the tokens and images of the first `steps` global batches, whatever the layout.

    Images enter by the bytes of their files and their target sizes, which decide the pixels; nothing is decoded. Padding does not enter.
    """
    rows, digest = make_rows(config, "train"), hashlib.sha256()

    @cache
    def file_sha(file: Path | ImageFile) -> bytes:
        try:
            return hashlib.sha256(read_image(file)).digest()
        except BadImage as e:
            if config.data.on_bad_image == "fail":
                raise
            return e.kind.encode()

    for k in range(steps * config.train.global_batch_size):
        digest.update(b"row")
        for document in rows.row(k):
            digest.update(f"document {len(document.tokens)} {document.loss_from} {len(document.images)}".encode())
            digest.update(document.tokens.astype("<i8").tobytes())
            digest.update(b"" if document.is_target is None else document.is_target.tobytes())
            for image in document.images:
                digest.update(f"{image.height}x{image.width}".encode() + file_sha(image.file))
    return digest.hexdigest()[:16]


class Loader:
    """Optimizer steps without end: each is the list of this rank's micro-batches.

    Iterating always starts at `start_row`, so an evaluation that iterates anew sees the same batches again. `state()` tells where the
    latest iteration stands; given to `build_loader` (after `merge_states`, where several ranks load), it resumes there on any number of
    ranks and workers.
    """

    def __init__(self, config: TrainerConfig, rows: Rows, dp_rank: int, dp_size: int, start_row: int) -> None:
        """Read from row `start_row` of the run, for data-parallel rank `dp_rank` of `dp_size`."""
        train = config.train
        per_round = dp_size * train.micro_batch_size
        if train.global_batch_size % per_round:
            raise ConfigError(
                f"train.global_batch_size is {train.global_batch_size}; expected a multiple of data-parallel ranks x micro_batch_size "
                f"= {dp_size} x {train.micro_batch_size} = {per_round}"
            )
        self._start, self._step_rows, self._stream = start_row, train.global_batch_size, identity(config)
        self._extent = rows.extent
        self._micro_batches = train.global_batch_size // per_round
        self._row = start_row
        self._lanes: dict[str, LaneState] = {}
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._named = 0
        self._news: list[str] = []
        workers = config.data.num_workers
        options: dict[str, Any] = {}
        if workers:
            options = {
                "multiprocessing_context": "fork",
                "persistent_workers": True,
                "prefetch_factor": _PREFETCH,
                "worker_init_fn": partial(_die_with, os.getpid()),
            }
        self._loader = DataLoader(
            _MicroBatches(config, rows, dp_rank, dp_size, start_row),
            batch_size=None,
            sampler=_Endless(),
            num_workers=workers,
            pin_memory=train.device == "cuda" or (train.device == "auto" and torch.cuda.is_available()),
            generator=torch.Generator(),  # its own, so that the loader takes nothing from the global one
            **options,
        )
        self._iterator: Any = None
        self._closed = False

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from `start_row` on."""
        assert not self._closed, "the loader was closed"
        self._row = self._start
        self._iterator = iter(self._loader)
        while True:
            step = [self._next() for _ in range(self._micro_batches)]
            self._row += self._step_rows
            yield step

    def state(self) -> dict[str, Any]:
        """Where the run stands, in which stream: `row` is the first row of the next step, `lanes` the places of this rank's lanes."""
        place = {"row": self._row, "rows_per_step": self._step_rows, "lanes": dict(self._lanes)}
        return {**place, "stream": self._stream, "extent": self._extent}

    def counters(self) -> dict[str, int]:
        """Counts of what this rank has read so far, by the names in COUNTERS: images, padding tokens, samples shortened or left out."""
        return dict(self._counters)

    def take_news(self) -> list[str]:
        """A line for each sample that was left out since the last call, up to the tenth of all."""
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Stop the worker processes, for good."""
        self._closed = True
        if self._iterator is not None and hasattr(self._iterator, "_shutdown_workers"):
            self._iterator._shutdown_workers()
        self._iterator = None

    def _next(self) -> Batch:
        """The next micro-batch; takes over the counts, the lanes' places and the messages that came with it."""
        try:
            packet: _Packet = next(self._iterator)
        except RuntimeError as e:
            if died := worker_death(e):
                raise died from e
            raise
        if packet.batch is None:
            raise DataError(packet.error)
        for name, count in packet.counts.items():
            self._counters[name] += count
        self._lanes.update(packet.lanes)
        news = packet.news[: _NAMED - self._named]
        self._named += len(news)
        self._news += news
        return packet.batch


@dataclass
class _Packet:
    """A micro-batch with what was counted and where its lanes stand, or the message of what went wrong, on its way from a worker."""

    batch: Batch | None
    error: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, LaneState] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)

    def pin_memory(self) -> _Packet:
        """Called by the DataLoader's pinning thread. Only what is of every patch, which is large and which the host never reads again.

        Of everything else a rank first takes its share, and in a running job that took 1 to 3 us for each number in pinned memory on
        machines where we have measured it, a tenth of a step; why is not known (an idle process reads it at full speed).
        """
        vision = self.batch.vision if self.batch is not None else None
        if self.batch is None or vision is None:
            return self
        pinned = {name: getattr(vision, name).pin_memory() for name in OF_PATCHES}
        return replace(self, batch=replace(self.batch, vision=replace(vision, **pinned)))


class _MicroBatches(Dataset[_Packet]):
    """Micro-batch m of one rank, counted over steps."""

    def __init__(self, config: TrainerConfig, rows: Rows, dp_rank: int, dp_size: int, start_row: int) -> None:
        self._config, self._rows, self._rank, self._size, self._start = config, rows, dp_rank, dp_size, start_row
        self._decoder = ImageDecoder(config.data)

    def __getitem__(self, m: int) -> _Packet:
        """Micro-batch `m` of this rank, counted from the loader's start, with what happened while it was made."""
        # Steps hold whole rounds of the ranks, so rounds can be counted through: step and micro-batch need not be told apart.
        mbs = self._config.train.micro_batch_size
        first = self._start + (m * self._size + self._rank) * mbs
        lost: list[Lost] = []
        try:
            rows = []
            for k in range(first, first + mbs):
                rows.append(self._rows.row(k))
                lost += self._rows.lost()
            batch = collate(rows, self._config.model, self._config.data, self._decoder)
        except PlaybookError as e:
            # As a value: an exception that crosses the process border loses its type to a traceback in text.
            return _Packet(None, str(e))
        except OSError as e:
            return _Packet(None, f"data that was there when the run began cannot be read: {e}; a checkpoint resumes where the run stood")
        counts = {
            **self._decoder.take_counts(),
            "padding_tokens": len(batch.tokens_N) - batch.num_useful,
            "samples_shortened": sum(d.shortened for row in rows for d in row),
            **Counter(each.counter for each in lost),
        }
        lanes = self._config.train.global_batch_size
        states = {str(k % lanes): self._rows.state(k) for k in range(first, first + mbs)}
        news = [f"left out: {each.why}" for each in lost[:_NAMED]]
        return _Packet(batch, counts=counts, lanes={number: state for number, state in states.items() if state}, news=news)


class _Endless(Sampler[int]):
    """0, 1, 2, ... without end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def _die_with(parent: int, _worker: int) -> None:
    """Make the kernel kill this worker when the rank dies, however it dies."""
    die_with_parent(parent)()
