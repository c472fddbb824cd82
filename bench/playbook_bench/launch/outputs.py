"""What a launch left in its folder: steps, summary and receipt, as a record holds them, and when its timed steps were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from playbook.records.conditions import TIMED_STEPS
from playbook.records.evidence import Fingerprint, Observed, Sample, Seconds
from playbook_bench.launch.outcome import Result, read_summary

MAX_LINES = 100_000
"""The most lines of metrics.jsonl that are read."""


def window(result: Result, folder: Path) -> tuple[str, float, float]:
    """When a launch was in its timed steps, in seconds since the epoch; all of it, where its summary does not tell.

    Counted from when the summary was written, for a launch may begin long before its ranks: the first to be forked waits for imports.
    """
    seconds = _mapping((read_summary(folder) or {}).get("seconds"))
    phases = [seconds.get(k) for k in ("total", "start_up", "warm_up", "timed")]
    numbers = [float(v) for v in phases if isinstance(v, int | float)]
    if len(numbers) < len(phases) or not numbers[-1] > 0:
        return "launch", result.started, result.started + result.wall_s
    total, start_up, warm_up, timed = numbers
    written = min((folder / "summary.json").stat().st_mtime, result.started + result.wall_s)
    begin = max(result.started, written - total) + start_up + warm_up
    return TIMED_STEPS, begin, begin + timed


@dataclass(frozen=True)
class Seen:
    """What a run left in its folder."""

    fields: dict[str, Any]
    fingerprint: Fingerprint


def read_run(folder: Path) -> Seen:
    """Samples, summary and receipt of a run, as far as the run got.

    Raises:
        ValueError: a file does not hold what `docs/trainer-files.md` says.
    """
    samples = _samples(folder / "metrics.jsonl")
    summary = read_summary(folder)
    if summary is None:
        return Seen({"samples": samples}, Fingerprint())
    env = _mapping(summary.get("env"))
    strict = {
        **_mapping(env.get("strict")),
        "source_sha": summary.get("source_sha"),
        "performance_revision": summary.get("performance_revision"),
        "world_size": summary.get("world_size"),
    }
    receipt = _mapping(summary.get("receipt"))
    fields = {
        "samples": samples,
        "data_sha": summary.get("data_sha"),
        "performance_revision": summary.get("performance_revision"),
        "revisions": {k: v for k, v in _mapping(summary.get("revisions")).items() if isinstance(v, int)},
        "parameters_of": "model" if summary.get("parameters_of") == "model" else "rank",
        "num_parameters": summary.get("num_parameters"),
        "trained_parameters": summary.get("trained_parameters"),
        "seconds": Seconds(**{k: float(v) for k, v in _mapping(summary.get("seconds")).items() if k in Seconds.model_fields}),
        "metrics": {k: float(v) for k, v in _mapping(summary.get("metrics")).items() if isinstance(v, int | float)},
        "observed": _observed(receipt),
    }
    return Seen(fields, Fingerprint(strict=strict, context=_mapping(env.get("context"))))


def _samples(path: Path) -> list[Sample]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) > MAX_LINES:
        raise ValueError(f"metrics.jsonl has {len(lines)} lines; at most {MAX_LINES} are read")
    out = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
            out.append(Sample(**{k: v for k, v in _mapping(row).items() if k in Sample.model_fields}))
        except (ValueError, ValidationError) as e:
            if number == len(lines):
                break  # a run that was ended may leave half a line
            raise ValueError(f"metrics.jsonl line {number}: {str(e).splitlines()[0]}") from e
    return out


def _observed(receipt: Mapping[str, Any]) -> Observed | None:
    if not any(receipt.get(key) for key in ("numbers", "ranges", "collectives", "logs")):
        return None
    try:
        return Observed.model_validate({k: v for k, v in receipt.items() if k in Observed.model_fields})
    except ValidationError as e:
        raise ValueError(f"summary.json, receipt: {e.errors(include_url=False)[0]['loc']}: {e.errors(include_url=False)[0]['msg']}") from e


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
