"""What a run of a table should have shown, from what was set alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, hypot, log, sqrt
from statistics import fmean, pstdev

from playbook.errors import ConfigError, FileError
from playbook.planner import flops, memory
from playbook.planner.plan import Plan
from playbook.planner.runs.assumed import Unexpressed, assumed
from playbook.planner.runs.table import Measured, Run, Sealed
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.spread import QUANTILE, weights
from playbook.planner.time.step import Estimate, step_time

_ASSUMED = 0.1
"""Spread that each guess adds; what was tried in several ways spreads by itself."""


@dataclass(frozen=True)
class Prediction:
    """Speed and memory of a run. `spread` is the standard deviation of the logarithm of the speed, that of open cells among it; `parts` as
    `spread.weights`.
    """

    tokens_per_s_per_gpu: float
    flops_per_token: float
    spread: float
    plan: Plan
    cluster: Cluster
    words: tuple[str, ...]
    parts: tuple[float, ...]
    written_gib: float | None = None
    """Memory that was written down before."""

    @property
    def peak_tflops(self) -> float:
        """The peak that utilisation is a share of: that of the products' precision."""
        return (self.cluster.fp8_flops_per_s if self.plan.options.fp8 else self.cluster.bf16_flops_per_s) / 1e12

    def interval(self, scale: float = 1.0, spread: float | None = None) -> Estimate:
        """Tokens per second and GPU with their 80 % interval, scaled by an anchor."""
        wide = exp(QUANTILE * (self.spread if spread is None else spread))
        value = self.tokens_per_s_per_gpu * scale
        return Estimate(value, value / wide, value * wide)

    def as_written(self, sealed: Sealed) -> Prediction:
        """The same with the speed and interval that were written down before."""
        return replace(
            self, tokens_per_s_per_gpu=sealed.value, spread=log(sealed.high / sealed.low) / (2 * QUANTILE), written_gib=sealed.memory_gib
        )

    @cached_property
    def memory_bytes(self) -> float | None:
        """Peak bytes of the fullest rank; None where the layout is one that no trainer has."""
        return _peak(self.plan) if self.written_gib is None else self.written_gib * memory.GIB

    @property
    def fits(self) -> bool | None:
        """Whether that is under what the GPU has; None where memory has no estimate."""
        return None if self.memory_bytes is None else memory.fits(self.memory_bytes, self.cluster.memory_gib)

    def error(self, measured: Measured) -> float | None:
        """The logarithm of what was measured over what was predicted: by tokens, else by step time, else by model FLOPs."""
        shown = speed(self, measured)
        return None if shown is None else log(shown / self.tokens_per_s_per_gpu)


def _peak(plan: Plan) -> float | None:
    """Peak bytes, with one micro-batch for each stage where the batch that a table states does not divide."""
    for batch in (plan.gbs, 0):
        with suppress(ConfigError):
            return memory.peak(replace(plan, gbs=batch))
    return None


def predict(run: Run, on: Cluster | None = None) -> Prediction | str:
    """The prediction for a run, or why there is none; where the run names the kind of GPU of the machine `on`, or none, for that machine.

    Raises:
        ConfigError: a cell is not what its column holds.
    """
    try:
        readings = assumed(run, on)
        times = [step_time(plan, readings.cluster) for plan in readings.plans]
    except FileError as e:
        return f"its model cannot be read: {e}"
    except (Unexpressed, ConfigError) as e:
        return str(e)
    logs = [log(t.tokens_per_s_per_gpu.value) for t in times]
    between = pstdev(logs) if len(logs) > 1 else 0.0
    plan = readings.plans[0]
    return Prediction(
        exp(fmean(logs)),
        flops.trained_per_token(plan.shape, plan.seq_len, plan.options),
        hypot(fmean(t.spread for t in times), between, _ASSUMED * sqrt(readings.guesses)),
        plan,
        readings.cluster,
        tuple(dict.fromkeys((*readings.words, *times[0].assumptions))),
        weights(times[0].parts),
    )


def speed(prediction: Prediction, measured: Measured) -> float | None:
    """Tokens per second and GPU that were measured, as far as the table lets them follow."""
    if measured.tokens_per_s_per_gpu:
        return measured.tokens_per_s_per_gpu
    plan = prediction.plan
    if measured.tflops_per_gpu:
        return measured.tflops_per_gpu * 1e12 / prediction.flops_per_token
    if measured.step_time_s and plan.gbs:
        return plan.gbs * plan.seq_len / plan.gpus / measured.step_time_s
    return None


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so large a share lies at or below, between neighbours by distance."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
