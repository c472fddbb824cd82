"""Reports of traces: the file that a collector left, as a table or a timeline, and the record of a traced case."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from playbook.errors import PlaybookError
from playbook.records.trace import TraceTable
from playbook_bench.trace import containers, dumps, kineto, nsys
from playbook_bench.trace.table import Timeline, build

WRITE_S = 300.0
"""How long Nsight Systems may take to write its report after the run."""


def table_from_file(path: Path) -> TraceTable:
    """The table of an existing report: an Nsight Systems SQLite export, or a Chrome trace of torch.profiler.

    Raises:
        PlaybookError: neither, or damaged.
    """
    return build(timeline_from_file(path, ranges=True))


def timeline_from_file(path: Path, ranges: bool = False) -> Timeline:
    """What a report of one rank of any trainer holds; `ranges`: it must hold ours.

    Raises:
        PlaybookError: it is no report, or damaged, or of several ranks.
    """
    ranks = list(islice(contents(path, ranges), 2))
    if len(ranks) > 1:
        raise PlaybookError(
            f"{path}: holds the traces of several ranks; expected one rank's: playbook bench trace --file {path} compares them "
            "and names the one that waits least"
        )
    _, timeline = ranks[0]
    if isinstance(timeline, PlaybookError):
        raise timeline
    if not isinstance(timeline, Timeline):
        raise PlaybookError(f"{path}: is no trace of a step; expected a report of nsys, its SQLite export, or a Chrome trace")
    return timeline


def memory_from_file(path: Path) -> dumps.Snapshot:
    """What holds the peak of a memory snapshot of PyTorch.

    Raises:
        PlaybookError: it is none, or damaged.
    """
    _, each = next(contents(path))
    if isinstance(each, PlaybookError):
        raise each
    if isinstance(each, dict) and dumps.is_snapshot(each):
        return dumps.read_snapshot(each)
    raise PlaybookError(f"{path}: is no memory snapshot; expected what torch.cuda.memory._dump_snapshot writes")


def contents(path: Path, ranges: bool = False) -> Iterator[tuple[str, Timeline | dict[str, Any] | PlaybookError]]:
    """Each trace, dump of the flight recorder, or memory snapshot, of a file, an archive or a folder by its name, or why it cannot be read.
    A `.nsys-rep` is exported first, by the nsys on this machine.

    Raises:
        PlaybookError: there is no such file, or none in the folder, or the archive is damaged.
    """
    for file in _files(path):
        if file.suffix == ".nsys-rep" or _starts(file, nsys.SQLITE_MAGIC):
            try:
                yield str(file), _of_nsys(file, ranges)
            except PlaybookError as e:
                yield str(file), e
            continue
        for stream in containers.files(file):
            try:
                yield from _of_stream(stream, ranges)
            except PlaybookError as e:
                yield stream.name, e


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    files = [p for p in files if p.suffix != ".nsys-rep" or p.with_suffix(".sqlite") not in files]
    if not 0 < len(files) <= containers.MAX_FILES:
        raise PlaybookError(f"{path}: holds {len(files) or 'no'} files; expected the traces of 1 to {containers.MAX_FILES} ranks")
    return files


def _starts(path: Path, head: bytes) -> bool:
    try:
        with path.open("rb") as f:
            return f.read(len(head)) == head
    except OSError as e:
        raise PlaybookError(f"{path}: cannot be read ({e.strerror or e}); expected a SQLite export of nsys or a Chrome trace") from e


def _of_stream(stream: containers.Unpacked, ranges: bool) -> list[tuple[str, Timeline | dict[str, Any]]]:
    """What a file holds by its name: one trace or dump, or the traces of several ranks that were merged."""
    head = stream.peek(len(nsys.SQLITE_MAGIC))
    if head == nsys.SQLITE_MAGIC:
        with tempfile.NamedTemporaryFile(suffix=".sqlite") as f:
            shutil.copyfileobj(stream, f)
            f.flush()
            return [(stream.name, nsys.read(Path(f.name), ranges))]
    if head.startswith(containers.HEAD):
        return [(stream.name, _dump(containers.load_pickle(stream), stream.name))]
    document = containers.Document(stream)
    timelines = kineto.of_document(document, stream)
    if "entries" in document.head:
        return [(stream.name, _dump(document.head, stream.name))]
    return [(f"{stream.name}: {name}" if name else stream.name, timeline) for name, timeline in timelines]


def _dump(document: Any, name: str) -> dict[str, Any]:
    if not (dumps.is_dump(document) or dumps.is_snapshot(document)):
        raise PlaybookError(
            f"{name}: is no trace, no dump of the flight recorder, which has version, pg_config and entries, and no memory snapshot, "
            "which has segments"
        )
    return dict(document)


def _of_nsys(path: Path, ranges: bool) -> Timeline:
    if path.suffix != ".nsys-rep":
        return nsys.read(path, ranges)
    if not path.is_file():
        raise PlaybookError(f"{path}: there is no such file; expected a report of nsys, its SQLite export, or a Chrome trace")
    if not shutil.which("nsys"):
        raise PlaybookError(
            f"{path}: only nsys reads its reports, and it is not on PATH here; where it is, run nsys export --type sqlite {path}, and "
            "give the .sqlite"
        )
    with tempfile.TemporaryDirectory() as folder:
        return nsys.read(exported(path, Path(folder) / "trace.sqlite"), ranges)


def exported(report: Path, target: Path) -> Path:
    """The report as SQLite.

    Raises:
        PlaybookError: nsys cannot.
    """
    words = ["nsys", "export", "--type", "sqlite", "--force-overwrite", "true", "-o", str(target), str(report)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WRITE_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise PlaybookError(f"nsys export took more than {WRITE_S:g} s; trace fewer steps (profile.steps)") from e
    if done.returncode or not target.is_file():
        raise PlaybookError(f"nsys export failed: {(done.stderr or done.stdout)[-300:]}")
    return target
