"""What a log says of a run's steps, whichever trainer wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from playbook_bench.logs.facts import Facts

Clock = Literal["logged", "differences", "arrival", "none"]
"""Where seconds come from: the log states them; they lie between the log's own time stamps; they lie between the moments at which its lines arrived;
it holds none, and seconds are NaN."""


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
