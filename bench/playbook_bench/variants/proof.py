"""What a trace of a command shows of the path that it ran: kernels, ranges and collectives, by their numbers."""

from __future__ import annotations

import gzip
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from playbook.errors import LaunchError, PlaybookError
from playbook_bench.trace import kineto, nsys

_SQLITE = b"SQLite format 3\0"
_COLLECTIVES = {
    "all_gather": "all_?gather",
    "reduce_scatter": "reduce_?scatter",
    "all_reduce": "all_?reduce",
    "all_to_all": "all_?to_?all",
    "send": "send_?recv|send",
    "recv": "recv",
    "broadcast": "broadcast",
}
"""By name, what the names of kernels and operators hold."""


def seen(trace: Path) -> dict[str, Any]:
    """The numbers of kernels, ranges and collectives in a trace, as a receipt has them.

    Raises:
        PlaybookError: there is none, or it is of neither tool, or damaged.
    """
    try:
        with trace.open("rb") as f:
            head = f.read(len(_SQLITE))
    except OSError as e:
        raise PlaybookError(f"it left no trace {trace.name} ({e.strerror or e}); name the file that it writes in trace.file") from e
    timeline = nsys.read(trace, ranges=False) if head == _SQLITE else kineto.read(trace)
    ran = [*timeline.ops, *timeline.unlaunched]
    sent = Counter(op for o in ran if o.kind == "communication" and (op := _collective(o.name)))
    return {
        "ranges": dict(Counter(span.name for span in timeline.spans)),
        "collectives": [{"op": op, "count": count} for op, count in sent.items()],
        "kernels": dict(Counter(o.name for o in ran)),
    }


def keep(trace: Path, folder: Path, run: str) -> Path:
    """A copy of a launch's trace that stays beside the records, by the run's id; JSON is packed.

    Raises:
        LaunchError: it cannot be written.
    """
    packs = trace.suffix == ".json"
    kept = folder / f"{run}-{trace.name}{'.gz' if packs else ''}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with trace.open("rb") as source, gzip.open(kept, "wb", 5) if packs else kept.open("wb") as target:
            shutil.copyfileobj(source, target)
    except OSError as e:
        raise LaunchError(f"the trace {kept} cannot be kept: {e.strerror or e}; choose another folder with --results") from e
    return kept


def _collective(name: str) -> str | None:
    return next((op for op, pattern in _COLLECTIVES.items() if re.search(pattern, name, re.IGNORECASE)), None)
