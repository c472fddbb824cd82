"""The record of a tuning: its setup, what each launch gave, and the answer. It replays through the procedure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from playbook.errors import StoreError
from playbook.files import read_bytes
from playbook.records.evidence import digest
from playbook_bench.judge.effects import percent
from playbook_bench.tune.procedure import Decision, Event, Hurry, Launch, Observation, Setup, Tuning

SCHEMA = "tune-record/1"
_MOST_BYTES = 64 << 20
_OBSERVATION: TypeAdapter[Observation] = TypeAdapter(Observation)
_SETUP: TypeAdapter[Setup] = TypeAdapter(Setup)


def event_of(row: Mapping[str, Any]) -> Event:
    """The event of a line.

    Raises:
        ValidationError: it is none.
    """
    observation = row.get("observation")
    return Hurry() if observation == "hurry" else _OBSERVATION.validate_python(observation)


def decision_row(decision: Decision) -> dict[str, Any]:
    """What became of a candidate, as plain data."""
    effect = decision.effect
    return {
        "knob": decision.knob,
        "value": decision.value,
        "reason": decision.reason,
        "effect_percent": None
        if effect is None
        else {"value": percent(effect.value), "low": percent(effect.low), "high": percent(effect.high)},
        "looked_percent": percent(decision.looked),
    }


def is_record(path: Path) -> bool:
    """Whether a file is the record of a tuning."""
    try:
        return f'"{SCHEMA}"'.encode() in read_bytes(path, 4096)
    except (OSError, ValueError):
        return False


def replay(path: Path) -> list[str]:
    """What differs between a record and what its events give again; nothing where all is the same.

    Raises:
        StoreError: the file cannot be read, or is no record of a tuning.
    """
    try:
        data = json.loads(read_bytes(path, _MOST_BYTES))
        out = [] if data.pop("sha256", None) == digest(data) else ["sha256: the content is not the one that was sealed"]
        tuning = Tuning(_SETUP.validate_python(data["setup"]))
        for row in data["events"]:
            if tuning.due is None or row["launch"] != plain(tuning.due):
                return [*out, f"events: one is of {row['launch']}, due was {tuning.due and plain(tuning.due)}"]
            tuning.add(event_of(row))
        recorded = data["answer"]
        both = [{(d["knob"], d["value"], kept) for kept, name in ((True, "kept"), (False, "refused")) for d in recorded[name]}]
        both.append({(*pair, d.kept) for pair, d in tuning.decisions.items()})
        effects = {(d["knob"], d["value"]): d["effect_percent"] for name in ("kept", "refused") for d in recorded[name]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise StoreError(f"{path} is no record of a tuning: {str(e).splitlines()[0][:200]}") from e
    if both[0] != both[1]:
        out.append(f"answer: recorded {sorted(both[0])}, derived {sorted(both[1])}")
    for pair, decision in tuning.decisions.items():
        if effects.get(pair) != decision_row(decision)["effect_percent"]:
            out.append(f"{'='.join(pair)}: recorded {effects.get(pair)}, derived {decision_row(decision)['effect_percent']}")
    return out


def plain(content: Setup | Launch | Observation) -> dict[str, Any]:
    """As it is in JSON."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(content), default=sorted))
    return data
