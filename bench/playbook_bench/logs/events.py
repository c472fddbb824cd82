"""TensorBoard's event files, by TensorBoard's own reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook.errors import LogError
from playbook_bench.logs.fields import figures
from playbook_bench.logs.parsers import VALIDATION, Row
from playbook_bench.logs.text import MAX_BYTES, shown

_FRAME_BYTES = 16
"""Length and checksums around each record."""
_Points = Sequence[tuple[int, float, float]]
"""Step, value and moment of each scalar under a tag."""
_NO_FIGURES = frozenset({"step", "total", "epoch"})
"""What tags need not say: an event has its step, and epochs are written beside validations as well."""


def read(name: str) -> Iterator[Row]:
    """The steps of one event file: those at which the loss was written, or, where it hardly was, the most frequent figure.

    Other figures count at those steps alone: validations are written at steps of their own, and the end of a run writes some figures again.
    Where no figure is a time, the moments at which scalars were written are the clock.

    Raises:
        LogError: TensorBoard is not installed, or the file cannot be read to its end.
    """
    tags = _by_figure(_scalars(Path(name)))
    if not tags:
        return
    most = max(tags, key=lambda figure: len(tags[figure][1]))
    leading = "loss" if "loss" in tags and 2 * len(tags["loss"][1]) >= len(tags[most][1]) else most
    others = [(tag, {step: value for step, value, _ in reversed(points)}) for figure, (tag, points) in tags.items() if figure != leading]
    tag, points = tags[leading]
    for number, (step, value, moment) in enumerate(points, start=1):
        yield number, {"step": step, "wall_time": moment, tag: value, **{name: at[step] for name, at in others if step in at}}


def _by_figure(tags: Mapping[str, _Points]) -> dict[str, tuple[str, _Points]]:
    """For each figure of a step the tag that is read as it, and its points; of several tags, the one with most points."""
    chosen: dict[str, tuple[str, _Points]] = {}
    for tag, points in tags.items():
        figure = next(iter(figures({tag: 0.0}).keys() - _NO_FIGURES), None)
        if figure and not VALIDATION.match(tag) and (figure not in chosen or len(points) > len(chosen[figure][1])):
            chosen[figure] = (tag, points)
    return chosen


def _scalars(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    found: dict[str, list[tuple[int, float, float]]] = {}
    for event in _events(path):
        for value in event.summary.value:
            scalar = _scalar(value)
            if scalar is not None:
                found.setdefault(value.tag, []).append((event.step, scalar, event.wall_time))
    return found


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
