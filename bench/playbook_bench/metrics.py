"""The metrics that a claim may name. Adding one is adding a row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from playbook.cards.model import near_metric
from playbook.errors import ConfigError
from playbook.records.case import Case
from playbook.records.evidence import Run, Sample

WALL_STEP, OUTSIDE = "wall_step_seconds", "outside_seconds"
"""Figures of a command's launch, which `playbook_bench.variants.program` measures; records from before have neither."""
EXACT = 1e-9
"""Launches repeat what is counted to this share: rounding alone."""
_MEMORY_REPEATS = 1e-3
"""Peak memory on GPUs differs by less than this share between launches of one configuration.
Source: 515 launches of 50 configurations on one, two and four H200s, which differ by 0.02 % at most (`docs/experiments/peak-memory.md`)."""


Kind = Literal["time", "count", "noisy count"]
"""What a clock measures; what launches of one configuration repeat; what is counted and differs from launch to launch."""


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    `scale` says how two launches are compared: by the logarithm of their ratio, or by difference (shares, and values that may be zero).
    `per_step` marks a metric that compares steps; it means nothing where the variants do different work per step.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    kind: Kind
    value: Callable[[Run], float | None]
    scale: Literal["log_ratio", "difference"] = "log_ratio"
    per_step: bool = False
    help: str = ""
    within: float = EXACT
    """To which share launches of one configuration repeat a deterministic metric."""

    @property
    def deterministic(self) -> bool:
        """Whether one launch of each variant is all there is to know."""
        return self.kind == "count"

    @property
    def is_counted(self) -> bool:
        """Whether no clock goes into it: bytes, numbers and losses are the same where ranks wait for each other's turn on a GPU."""
        return self.kind != "time"


def timed(run: Run) -> list[Sample]:
    """The steps inside the timed window."""
    return [s for s in run.samples if s.timed]


def _total(run: Run, field: str) -> float:
    return math.fsum(getattr(s, field) for s in timed(run))


def _over_time(field: str, *, per_rank: bool = False) -> Callable[[Run], float | None]:
    """What the timed steps have of that, for each of their seconds."""

    def value(run: Run) -> float | None:
        seconds = _total(run, "seconds")
        return _total(run, field) / seconds / (run.ranks if per_rank else 1) if seconds > 0 else None

    return value


def _step_seconds(run: Run) -> float | None:
    steps = timed(run)
    return _total(run, "seconds") / len(steps) if steps else None


def _step_variation(run: Run) -> float | None:
    steps = [s.seconds for s in timed(run)]
    return statistics.pstdev(steps) / statistics.fmean(steps) if steps and sum(steps) > 0 else None


def _first_grad_norm(run: Run) -> float | None:
    return run.samples[0].grad_norm if run.samples else None


def _final_loss(run: Run) -> float | None:
    steps = timed(run)
    return steps[-1].loss if steps else None


def _peak_memory(run: Run) -> float | None:
    return max((float(s.peak_memory_bytes) for s in timed(run)), default=None)


def _fits(run: Run) -> float | None:
    return {"ok": 1.0, "oom": 0.0}.get(run.outcome)


def _reported(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.metrics.get(name)


def _bytes(name: str, text: str) -> Metric:
    return Metric(name, "bytes", "lower", "count", _reported(name), help=text)


_ROWS = (
    Metric(
        "useful_tokens_per_s_per_gpu",
        "tokens/s",
        "higher",
        "time",
        _over_time("useful_tokens", per_rank=True),
        help="without padding; on a CPU, per rank",
    ),
    Metric("raw_tokens_per_s_per_gpu", "tokens/s", "higher", "time", _over_time("raw_tokens", per_rank=True), help="padding included"),
    Metric("step_seconds", "s", "lower", "time", _step_seconds, per_step=True, help="mean over the timed steps, slowest rank"),
    Metric(
        WALL_STEP,
        "s",
        "lower",
        "time",
        _reported(WALL_STEP),
        per_step=True,
        help="of a command: a timed step by the arrival of its lines, with what lies between steps",
    ),
    Metric(
        "step_time_variation",
        "share",
        "lower",
        "time",
        _step_variation,
        "difference",
        help="standard deviation of the timed steps over their mean",
    ),
    Metric(
        "data_time_share",
        "share",
        "lower",
        "time",
        _over_time("data_seconds"),
        "difference",
        help="share of the timed window spent waiting for data",
    ),
    Metric("images_per_s", "images/s", "higher", "time", _over_time("images"), help="over all ranks"),
    Metric(
        "compile_time_share",
        "share",
        "lower",
        "time",
        _over_time("compile_seconds"),
        "difference",
        help="share of the timed window spent compiling",
    ),
    Metric("peak_memory_bytes", "bytes", "lower", "noisy count", _peak_memory, help="device memory allocated at most, largest rank"),
    Metric(
        "peak_reserved_bytes",
        "bytes",
        "lower",
        "noisy count",
        _reported("peak_reserved_bytes"),
        help="device memory that the allocator has taken at most, what lies free between tensors included; largest rank",
    ),
    Metric(
        "checkpoint_seconds",
        "s",
        "lower",
        "time",
        _reported("checkpoint_seconds"),
        help="mean time that a save after the warm-up keeps training waiting",
    ),
    _bytes("dispatch_bytes_per_token_layer", "bytes that a rank sends to route one token through one MoE layer and back"),
    _bytes("saved_activation_bytes_per_rank", "activations kept for the backward pass, largest rank"),
    _bytes("param_bytes_per_rank", "parameters held, largest rank"),
    _bytes("grad_bytes_per_rank", "gradients held, largest rank"),
    _bytes("optimizer_bytes_per_rank", "optimizer state held, largest rank"),
    _bytes("state_bytes_per_rank", "parameters, gradients and optimizer state together, largest rank"),
    Metric("recompiles", "count", "lower", "count", _reported("recompiles"), "difference", help="graphs compiled in the timed window"),
    Metric(
        "recompiles_per_step",
        "count",
        "lower",
        "count",
        _reported("recompiles_per_step"),
        "difference",
        help="graphs compiled per timed step",
    ),
    Metric(
        "mfu",
        "share",
        "higher",
        "time",
        _reported("mfu"),
        help="model FLOPs (actual lengths, vision included) over time and dense BF16 peak",
    ),
    Metric("hfu", "share", "higher", "time", _reported("hfu"), help="likewise with padding and recomputed forward passes"),
    Metric(
        "flops_vision_share",
        "share",
        "higher",
        "count",
        _reported("flops_vision_share"),
        "difference",
        help="vision tower and mergers, of all",
    ),
    Metric("final_loss", "nats", "lower", "count", _final_loss, help="loss of the last timed step"),
    Metric("first_grad_norm", "norm", "lower", "count", _first_grad_norm, help="gradient norm of the first step, before clipping"),
    Metric("fits", "share", "higher", "count", _fits, "difference", help="1 where the run completes, 0 where it runs out of memory"),
)

METRICS = {row.name: row for row in _ROWS}


def on(name: str, *, gpus: bool) -> Metric:
    """The row of that name as one launch of each variant tells it: peak memory on GPUs is as good as counted.

    Raises:
        ConfigError: there is none.
    """
    row = get(name)
    return replace(row, kind="count", within=_MEMORY_REPEATS) if gpus and name == "peak_memory_bytes" else row


def as_measured(row: Metric, case: Case, runs: Sequence[Run]) -> Metric:
    """The row as these launches bear it: what a command counts is a noisy count where launches of one of its variants differ in it.

    Our own trainer repeats what the table calls a count; whether a command's random numbers have a seed, only its launches tell.
    """
    if not (case.command and row.kind == "count"):
        return row
    values: dict[str, list[float]] = {}
    for run in runs:
        if run.outcome == "ok" and (value := row.value(run)) is not None:
            values.setdefault(run.variant, []).append(value)
    moved = any(max(v) - min(v) > row.within * max(map(abs, v)) for v in values.values())
    return replace(row, kind="noisy count") if moved else row


def get(name: str) -> Metric:
    """The row of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METRICS:
        raise ConfigError(f"metric '{name}' is not known{near_metric(name, METRICS)}")
    return METRICS[name]
