"""A card and a case to begin one's own playbook with: files that check as they are, and whose words are to be replaced."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from playbook import files
from playbook.errors import ConfigError
from playbook.paths import OWN_FILE, own_file

_CARD = """\
id: {name}
title: More loader workers
summary: Whether loader workers are what the step waits for, in our training script.
symptoms: [the GPU waits for data]
phase: profile
wall: host
claims:
  - id: {claim}
    statement: Eight loader workers make a step at least 3 % faster than two.
    mechanism: With two workers the step waits for samples; with eight they are ready.
    kind: pair
    comparison:
      baseline: {{workers: 2}}
      candidate: {{workers: 8}}
    metric: step_seconds
    expect: {{op: ">=", margin: {{value: 3, unit: percent}}}}
    label: benchmark-only
    sources:
      - {{title: Our own measurement, origin: ours, date: "{month}"}}
    case: {name}
"""
_CASE = """\
id: {name}
kind: command
summary: Our training script with two loader workers and with eight.
command: [python, train.py, --workers, "{{workers}}"]
baseline: {{workers: 2}}
candidate: {{workers: 8}}
steps: {{count: 50, warm_up: 10}}
metric: step_seconds
profiles: {{cpu: {{}}}}  # and h200x8, or what your machines are
# What the new path prints proves that it ran; without rules the verdict says that nothing does.
# activation:
#   candidate: {{require: [{{log: 8 workers}}]}}
"""


def begin(folder: Path, name: str, claims: Collection[str]) -> list[Path]:
    """Write `cards/NAME.yaml` and `cases/NAME.yaml` there; where no `playbook.toml` tells of own cards yet, one in the working folder that does.

    `claims` are the ids that are taken.

    Raises:
        ConfigError: one of the two files is there already.
    """
    claim = next(f"U{number}" for number in range(1, 1000) if f"U{number}" not in claims)
    words = {"name": name, "claim": claim, "month": datetime.now(UTC).strftime("%Y-%m")}
    written = {folder / "cards" / f"{name}.yaml": _CARD, folder / "cases" / f"{name}.yaml": _CASE}
    if there := [path for path in written if path.exists()]:
        raise ConfigError(f"{there[0]} is there already; choose another name")
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.create(path, text.format(**words))
    if own_file() is not None:
        return [*written]
    own = Path(OWN_FILE)
    files.create(own, "".join(f"{kind} = {json.dumps((folder / kind).as_posix())}\n" for kind in ("cards", "cases")))
    return [*written, own]
