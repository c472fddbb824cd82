"""What a log says of a run's steps, whichever trainer wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import Literal

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
