"""What a log says of a run's steps, whichever trainer wrote it: the names of figures, their units, and what counts as a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Literal

from playbook import files
from playbook.errors import LogError

_DATES = ("time", "datetime", "date", "asctime", "created_at", "ts")
"""Names of a clock only where they hold a date: as numbers they mean too many things."""
_GIB = 2.0**30
_HOUR_S = 3600.0


def _each(names: str, factor: float = 1.0) -> tuple[tuple[str, float], ...]:
    """Names, separated by commas, that share a factor."""
    return tuple((name.strip(), factor) for name in names.split(","))


NAMES: dict[str, tuple[tuple[str, float], ...]] = {
    "step": (
        *_each("step, global_step, iteration, iter, trainer/global_step, _step, current_steps, num_updates"),
        *_each("global_step/max_steps, steps[global_step/max_steps]"),
    ),
    "micro": _each("micro, micro_step, micro_batch, microbatch, micro_iteration"),
    "total": _each("total_steps, max_steps, train_iters"),
    "seconds": (
        *_each("seconds, step_time, step_seconds, step_time_s, time_per_step, seconds_per_step, sec_per_step, timing_s/step"),
        *_each("perf/time_per_step, step_duration, iteration_time, iter_time, step_timing in s, time_metrics/end_to_end(s)"),
        *_each("perf/step_time, timing/step_total, Total step time"),
        *_each("milliseconds, ms, step_time_ms, step_ms, ms_per_step, iteration_time_ms, iter_time_ms, time_ms", 1e-3),
        *_each("elapsed time per iteration (ms), elapsed_time_per_iteration_ms", 1e-3),
    ),
    "clock": (
        *_each(
            "elapsed, elapsed_s, elapsed_seconds, timestamp, wall_time, _runtime, _timestamp, train_runtime, seconds_total, elapsed_time"
        ),
        *_each("Relative Time (Process), wall"),
        *((n, 1.0) for n in _DATES),
        ("ms_total", 1e-3),
        ("time/train", _HOUR_S),
    ),
    "tokens": _each("useful_tokens, tokens, tokens_per_step, step_tokens, perf/total_num_tokens"),
    "tokens_total": (
        *_each("tokens_seen, total_tokens, consumed tokens, num_input_tokens_seen, ntokens_seen, num_tokens, tokens_total"),
        *_each("throughput/total tokens, time/token"),
    ),
    "samples": _each("global batch size, samples_per_step"),
    "loss": _each(
        "loss, lm loss, training_loss, reduced_train_loss, loss_metrics/global_avg_loss, CE loss, CrossEntropyLoss, loss/train/total"
    ),
    "grad_norm": _each("grad_norm, gnorm, gradient_norm, grad norm, optim/total grad norm, actor/grad_norm"),
    "memory_bytes": (
        *_each("memory_bytes, peak_memory_bytes, max_memory_allocated, cuda_max_memory_reserved"),
        *_each("memory_gib, peak_memory_gib, memory/max_reserved(GiB), memory/max_active (GiB), perf/max_memory_allocated_gb", _GIB),
        *_each("gpu_memory/GPU active mem (GiB), peak_memory_active", _GIB),
        *_each("memory/peak_reserved_mem", 1e9),
        *_each("System/Peak GPU Memory (MB)", 1e6),
        *_each("memory_mib", 2.0**20),
    ),
    "skipped": _each("skipped, optim/step skipped, number of skipped iterations"),
    "nan": _each("nan, number of nan iterations"),
    "tokens_per_s": _each(
        "tokens_per_s, tokens_per_second, tokens_per_sec, tps, wps, tok/s, tokens/s, tok/sec, tokens/sec, throughput/tokens_per_sec"
    ),
    "tokens_per_s_per_gpu": (
        *_each("tokens_per_s_per_gpu, tokens_per_second_per_gpu, tokens/s/gpu, tok/s/gpu, throughput(tps), throughput/device/TPS"),
        *_each(
            "tokens/train_per_sec_per_gpu, tokens_per_sec_per_gpu, throughput/device/tokens_per_sec, throughput/device/tokens_per_second"
        ),
        *_each("tokens/s/device"),
    ),
    "flops_per_s": (
        *_each("flops_per_s"),
        *_each("tflops, TFLOPS_per_GPU, throughput per GPU (TFLOP/s/GPU), model_tflops_per_gpu, TFLOP/s/device", 1e12),
    ),
    "epoch": _each("epoch"),
    "bar_clock": _each("progress bar's clock"),
    "run_steps": _each("steps by the closing line"),
    "mean_seconds": _each("seconds by the closing line"),
}
"""For each figure, the names that are read as it, the first that a line holds counting, each with the factor to our unit.
Capitals and punctuation do not matter, nor does a leading `train`, though a name without it goes first. `time`, `samples` and `throughput`
are left out: they mean too many things."""

_PUNCTUATION = re.compile(r"[^a-z0-9]+")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,4})?|[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
_ROUNDED = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKMBGT])")
_SUFFIX = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
"""As nanotron and others round what they print for people."""
_OF_TOTAL = re.compile(r"(\d{1,15})/(\d{1,15})")
_DURATIONS = (
    re.compile(r"(?:(\d{1,5}) days?, )?(\d{1,3}):(\d\d):(\d\d)"),
    re.compile(r"(?:(\d{1,5})d ?)?(?:(\d{1,3})h ?)?(?:(\d{1,3})m ?)?(\d{1,5})s"),
)
"""Days, hours, minutes and seconds as the Trainers of LLaMA-Factory and ms-swift write them."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
_SECONDS = (86400, 3600, 60, 1)
_LONGEST = 40
"""Characters of a number."""


def _plain(name: str) -> str:
    return _PUNCTUATION.sub("_", name.lower()).strip("_")


_BY_NAME = {_plain(name): (figure, 2 * rank, factor) for figure, names in NAMES.items() for rank, (name, factor) in enumerate(names)}


def number(value: Any) -> float | None:
    """A number, as itself or as text; None where it is neither. It may be infinite or NaN, which is for others to refuse."""
    if isinstance(value, str):
        text = value.strip()
        if len(text) > _LONGEST:
            return None
        if rounded := _ROUNDED.fullmatch(text):
            return float(rounded[1]) * _SUFFIX[rounded[2]]
        return float(text) if _NUMBER.fullmatch(text) else None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one line, in our units. A step may be written with the number of all, as `3/100`, and a clock as `1m 30s`."""
    return {figure: value for figure, (_, value) in ranked(row).items()}


def ranked(row: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    """The figures of one line, each with the place of its name in `NAMES`: two clocks of a log are not one."""
    values: dict[str, tuple[int, float]] = {}
    for name, raw in row.items():
        figure, rank, factor = _figure(name) or ("", 0, 0.0)
        if not figure:
            continue
        if figure == "step" and isinstance(raw, str) and (both := _OF_TOTAL.fullmatch(raw.strip())):
            raw = both[1]
            values.setdefault("total", (2 * len(NAMES["total"]), float(both[2])))
        value = number(raw) if figure != "clock" else _moment(name, raw)
        if value is not None and (figure not in values or rank < values[figure][0]):
            values[figure] = (rank, value * factor)
    return values


def _moment(name: str, raw: Any) -> float | None:
    """Seconds on some clock: a number, a duration, or a date."""
    if (value := number(raw)) is not None or not isinstance(raw, str):
        return None if _plain(name).removeprefix("train_") in _DATES else value
    text = raw.strip()[:_LONGEST]
    match = next((m for each in _DURATIONS if (m := each.fullmatch(text))), None)
    if match is not None:
        return float(sum(int(n or 0) * unit for n, unit in zip(match.groups(), _SECONDS, strict=True)))
    if not _DATE.match(text):
        return None
    try:
        moment = datetime.fromisoformat(text.replace(",", "."))
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


def figure_of(name: str) -> tuple[str, float] | None:
    """The figure that the name of a number is read as, with the factor to our unit."""
    figure, _, factor = (None if _plain(name).removeprefix("train_") in _DATES else _figure(name)) or ("", 0, 0.0)
    return (figure, factor) if figure else None


@lru_cache(4096)
def _figure(name: str) -> tuple[str, int, float] | None:
    """The figure of a name, the name's place among those of the figure, and the factor to our unit."""
    plain = _plain(name)
    bare = plain.removesuffix("_step") if plain.endswith("loss_step") else plain
    if bare in _BY_NAME:
        return _BY_NAME[bare]
    figure, rank, factor = _BY_NAME.get(bare.removeprefix("train_"), ("", 0, 0.0))
    return (figure, rank + 1, factor) if figure else None


# A log's text, bounded and free of what terminals add.

MAX_BYTES = 64 * 1024 * 1024
_MAX_LINE = 16 * 1024
"""Characters; no line about a step is longer, and longer ones are passed over."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)")
_CLOSED = ("}", "|")
"""How the last line of a log may end without a line break, and is whole nevertheless."""

Lines = list[tuple[int, str]]
"""Lines with their numbers from 1 on. Text that a carriage return overwrote on a terminal is a line with the same number."""


def load(path: Path) -> str:
    """The text of a log file.

    Raises:
        LogError: it cannot be read, or is too large.
    """
    try:
        raw = files.read_bytes(path, MAX_BYTES)
    except OSError as e:
        raise LogError(f"{path}: cannot be read ({e.strerror or e}); expected a log of a training run") from e
    if len(raw) > MAX_BYTES:
        raise LogError(
            f"{path}: is larger than {MAX_BYTES >> 20} MiB; expected the log of one run. Let one rank write it, or run fewer steps"
        )
    return raw.decode("utf-8", "replace")


def lines(text: str) -> Lines:
    """The lines of a log, without colours, and without a last one that was cut off: half a number is a number too."""
    whole = _ESCAPES.sub("", text).split("\n")
    if not whole[-1].rstrip().endswith(_CLOSED):
        whole[-1] = ""
    return [(number, part) for number, line in enumerate(whole, start=1) for part in line.split("\r") if part and len(part) <= _MAX_LINE]


def shown(value: object) -> str:
    """A piece of a log for a message: short, and without characters that act on a terminal."""
    return ascii(str(value)[:80])


# What the lines around the steps say of the whole run: its global batch, its sequences, its GPUs.

_MOST = 2**40
_ARGUMENT = r"{0}(?<![\w-]{0}) \.{{3,}} (\d{{1,12}})\s*$"
"""A line of the arguments that Megatron-LM prints at its start. Patterns begin with letters, so that long logs are searched fast."""


def _patterns(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns)


_NAMED = {
    "gbs": _patterns(
        _ARGUMENT.format("global_batch_size"),
        r"global batch size (\d{1,12}), grad",
        r"Total train batch size \([^)\n]{1,80}\) = ([\d,]{1,15})\s*$",
    ),
    "seq": _patterns(_ARGUMENT.format("seq_length"), r"sequence length (\d{1,12}),"),
    "gpus": _patterns(
        _ARGUMENT.format("world_size"),
        r"Building device mesh with parallelism: pp=(\d{1,6}), dp_replicate=(\d{1,6}), dp_shard=(\d{1,6}), cp=(\d{1,6}), tp=(\d{1,6})",
    ),
}
"""For each fact the lines of Megatron-LM, torchtitan and the Hugging Face Trainer that state it; several numbers are multiplied."""


@dataclass(frozen=True)
class Facts:
    """Samples of a step of the whole job, tokens of a sequence, GPUs; None: the log does not say, or says two things."""

    gbs: int | None = None
    seq: int | None = None
    gpus: int | None = None


def of(text: str) -> Facts:
    """The facts that a log states."""
    return Facts(**{name: _stated(text, patterns) for name, patterns in _NAMED.items()})


def _stated(text: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    values = {prod(int(group.replace(",", "") or 0) for group in match.groups()) for each in patterns for match in each.finditer(text)}
    return values.pop() if len(values) == 1 and 0 < max(values) < _MOST else None


Clock = Literal["logged", "differences", "arrival", "mean", "none"]
"""Where seconds come from: the log states them; they lie between the log's own time stamps; they lie between the moments at which its lines
arrived; they are the mean of the whole run, by its closing line; it holds none, and seconds are NaN."""
NO_TIME: tuple[Clock, ...] = ("mean", "none")
"""Clocks of logs that hold no time of a step."""


@dataclass(frozen=True)
class LoggedStep:
    """One line of a log: a step, or where `StepLog.every` is above 1 the average of the steps since the line before. None: not known.

    Units: seconds, tokens and samples for one step of the whole job; memory in bytes; FLOP/s of one GPU.
    """

    step: int
    seconds: float
    tokens: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    memory_bytes: float | None = None
    skipped: bool | None = None
    """No update was made: the gradients were not finite under a loss scale."""
    samples: float | None = None
    tokens_per_s: float | None = None
    """Of the whole job or of one GPU: the log does not say which."""
    tokens_per_s_per_gpu: float | None = None
    flops_per_s: float | None = None
    arrived: float | None = None
    """When the line was read, in seconds on the reader's clock; None for a log that was not printed."""


@dataclass(frozen=True)
class StepLog:
    """The steps of one run, checked: none is missing, twice there or out of order, and every figure is finite."""

    adapter: str
    steps: tuple[LoggedStep, ...]
    unknown: tuple[str, ...]
    """Fields of `LoggedStep` that no line of this log holds."""
    every: int
    """Steps that one line covers."""
    clock: Clock
    caveats: tuple[str, ...]
    """What the figures do not vouch for, as sentences."""
    facts: Facts = field(default_factory=Facts)
