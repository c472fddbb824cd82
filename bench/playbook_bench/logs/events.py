"""TensorBoard's event files, by TensorBoard's own reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playbook.errors import LogError
from playbook_bench.logs.fields import figures
from playbook_bench.logs.parsers import Row
from playbook_bench.logs.text import MAX_BYTES, shown

_FRAME_BYTES = 16
"""Length and checksums around each record."""


def read(name: str) -> Iterator[Row]:
    """The scalars of one event file, step by step. Where none of them is a time, the moments at which they were written are the clock.

    Raises:
        LogError: TensorBoard is not installed, or the file cannot be read to its end.
    """
    path = Path(name)
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in _events(path):
        for value in event.summary.value:
            scalar = _scalar(value)
            if scalar is None or not figures({value.tag: scalar}):
                continue
            of_step = rows.setdefault(event.step, [{"step": event.step, "wall_time": event.wall_time}])
            if value.tag in of_step[-1]:
                of_step.append({"step": event.step, "wall_time": event.wall_time})
            of_step[-1][value.tag] = scalar
    yield from enumerate((row for of_step in rows.values() for row in of_step), start=1)


def _events(path: Path) -> Iterator[Any]:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as e:
        raise LogError(
            f"{path}: is an event file for TensorBoard, which is not installed; run pip install '.[trackers]' in a clone of Playbook"
        ) from e
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise LogError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; expected the event file of one run's scalars")
        done = 0
        for raw in RawEventFileLoader(str(path)).Load():
            done += len(raw) + _FRAME_BYTES
            yield Event.FromString(raw)
    except (OSError, DecodeError, ValueError) as e:
        raise LogError(f"{path}: cannot be read as an event file ({shown(e)}); expected what a SummaryWriter wrote") from e
    if done != size:
        raise LogError(
            f"{path}: is damaged after byte {done} of {size}, or still being written; expected a whole event file. Let the run close its writer"
        )


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and len(value.tensor.float_val) == 1:
        return float(value.tensor.float_val[0])
    return None
