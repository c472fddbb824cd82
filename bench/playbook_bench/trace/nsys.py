"""Nsight Systems' SQLite export as a Timeline.

`nsys export --type sqlite` writes one table per kind of event; which tables and columns exist depends on the version and on what was
traced, so each is looked for before it is read. The file comes from elsewhere: it is opened read-only and nothing in it is trusted.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from playbook.errors import PlaybookError
from playbook.kernels import OTHER, communicates, kernel_class
from playbook_bench.trace.table import STEP, Kind, Op, Span, Timeline

SQLITE_MAGIC = b"SQLite format 3\0"
"""The first bytes of an export."""
PUSH_POP, START_END = 59, 60
# Ranges that libraries open around their own calls; they name no part of the step.
_FOREIGN = re.compile(r"^(nccl[A-Z]|nvshmem|nvte_|transformer_engine\.|cub::|thrust::|cudnn|cublas)")
MAX_ROWS = 5_000_000
# SQLite calls back after this many of its instructions; the limit ends a file that is built to run for ever.
_TICK, _MAX_TICKS = 1_000_000, 20_000
_PROCESS = 0xFFFFFFFFFF000000
_MAX_TIME = 1 << 62
_RANGES = "NVTX_EVENTS"
_NEEDED = {
    _RANGES: {"start", "end", "eventType", "text", "globalTid"},
    "CUPTI_ACTIVITY_KIND_RUNTIME": {"start", "end", "globalTid", "correlationId"},
    "CUPTI_ACTIVITY_KIND_KERNEL": {"start", "end", "correlationId"},
}
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_NAME_COLUMNS = ("shortName", "demangledName", "mangledName")

_GRAPH = "CUDA graph"

_Calls = dict[tuple[int, int], tuple[int, int]]


def read(path: Path, ranges: bool = True) -> Timeline:
    """The trace of the process that ran the steps; without ranges, of the process whose kernels ran longest.

    Raises:
        PlaybookError: not there, damaged, or without the tables that a trace of CUDA has, and of NVTX where ranges are wanted.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as db:
            return _timeline(_guarded(db), path, ranges)
    except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as e:
        raise PlaybookError(f"{path}: cannot be read ({e}); export the report again: nsys export --type sqlite") from e


def _guarded(db: sqlite3.Connection) -> sqlite3.Connection:
    ticks = 0

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return int(ticks > _MAX_TICKS)

    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA query_only=ON")
    db.set_progress_handler(tick, _TICK)
    return db


def _timeline(db: sqlite3.Connection, path: Path, ranges: bool) -> Timeline:
    """The timeline of the process that ran the steps, from the tables of an open export; without `ranges`, of the busiest process."""
    tables = _tables(db)
    _check(tables, path, ranges)
    named = {"id", "value"} <= tables.get("StringIds", set())
    strings = {i: str(v) for i, v in db.execute("SELECT id, value FROM StringIds") if isinstance(i, int)} if named else {}
    spans = _spans(db, tables, strings, path) if "NVTX_EVENTS" in tables else []
    process = _process(spans) if ranges else _busiest(db, tables, path)
    spans = [s for s in spans if s.thread & _PROCESS == process]
    notes: list[str] = []
    calls = _calls(db, path)
    ops: list[Op] = []
    unlaunched: list[Op] = []
    for op, launched in _operations(db, tables, strings, calls, process, path):
        (ops if launched else unlaunched).append(op)
    if graphs := sum(op.name == _GRAPH for op in ops):
        notes.append(
            f"{graphs} launches of CUDA graphs were recorded whole and count as computation, with what they communicate and copy; "
            "nsys shows what is in them with --cuda-graph-trace=node"
        )
    if unlaunched:
        notes.append(f"{len(unlaunched)} operations have no recorded launching call and are left out")
    return Timeline("nsys", "gpu", spans, ops, unlaunched, notes=notes)


def _tables(db: sqlite3.Connection) -> dict[str, set[str]]:
    """Real tables (no view, no virtual table) and their columns."""
    names = [
        str(n)
        for n, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        if "VIRTUAL" not in str(sql)[:20].upper()
    ]
    needed = {*_NEEDED, *_COPIES, _GRAPHS, "StringIds"}
    return {n: {str(row[1]) for row in db.execute(f'PRAGMA table_info("{n}")')} for n in names if n in needed}


def _check(tables: dict[str, set[str]], path: Path, ranges: bool) -> None:
    missing = [n for n in _NEEDED if n not in tables and (ranges or n != _RANGES)]
    if missing:
        raise PlaybookError(
            f"{path}: has no table {', '.join(missing)}; expected a trace of CUDA and NVTX. "
            "Trace again with: nsys profile -s none --cpuctxsw=none -t cuda,nvtx ... and with profile.nvtx=true"
        )
    for name, columns in _NEEDED.items():
        lacking = sorted(columns - tables.get(name, columns))
        if lacking:
            raise PlaybookError(f"{path}: table {name} has no column {', '.join(lacking)}; this version of the export is not known here")


def _rows(db: sqlite3.Connection, table: str, columns: list[str], path: Path) -> Iterator[tuple[object, ...]]:
    """Rows of a table, up to a limit; table and column names come from this module."""
    chosen = ", ".join(f'"{c}"' if c != "NULL" else c for c in columns)
    for i, row in enumerate(db.execute(f'SELECT {chosen} FROM "{table}"')):
        if i >= MAX_ROWS:
            raise PlaybookError(f"{path}: table {table} has more than {MAX_ROWS} rows; trace fewer steps (profile.steps)")
        yield row


def _times(path: Path, table: str, *values: object) -> tuple[int, ...]:
    for value in values:
        if not isinstance(value, int) or not -_MAX_TIME < value < _MAX_TIME:
            raise PlaybookError(
                f"{path}: table {table} holds {str(value)[:40]!r} where a time or an id was expected; the export is damaged"
            )
    return tuple(v for v in values if isinstance(v, int))


def _spans(db: sqlite3.Connection, tables: dict[str, set[str]], strings: dict[int, str], path: Path) -> list[Span]:
    """NVTX ranges by thread, in nanoseconds; a range that nothing closed lasts until the latest time in the table.

    Raises:
        PlaybookError: a time or a thread is no number.
    """
    text_id = "textId" if "textId" in tables["NVTX_EVENTS"] else "NULL"
    ranges: list[tuple[int, str, int, int | None]] = []
    latest = 0
    for start, end, kind, text, number, thread in _rows(
        db, "NVTX_EVENTS", ["start", "end", "eventType", "text", text_id, "globalTid"], path
    ):
        if kind not in (PUSH_POP, START_END):
            continue
        name = text if isinstance(text, str) and text else strings.get(number, "") if isinstance(number, int) else ""
        if not name or _FOREIGN.match(name):
            continue
        begin, tid = _times(path, "NVTX_EVENTS", start, thread)
        until = None if end is None else _times(path, "NVTX_EVENTS", end)[0]
        latest = max(latest, begin, until or 0)
        ranges.append((tid, name[:200], begin, until))
    # A range that nothing closed lasts until the trace ends.
    return [Span(tid, name, begin, latest if until is None else until) for tid, name, begin, until in ranges]


def _process(spans: list[Span]) -> int:
    """The process that ran the steps: data workers, forked from it, have ranges too."""
    every = Counter(s.thread & _PROCESS for s in spans)
    steps = Counter(s.thread & _PROCESS for s in spans if s.name == STEP)
    return max(every, key=lambda p: (steps[p], every[p]), default=0)


def _busiest(db: sqlite3.Connection, tables: dict[str, set[str]], path: Path) -> int:
    """The process whose kernels ran longest, which must have used one GPU."""
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    columns = [c if c in tables[kernels] else "NULL" for c in ("start", "end", "globalPid", "deviceId")]
    busy: Counter[int] = Counter()
    devices: defaultdict[int, set[object]] = defaultdict(set)
    for start, end, owner, device in _rows(db, kernels, columns, path):
        begin, until = _times(path, kernels, start, end)
        process = owner & _PROCESS if isinstance(owner, int) else 0
        busy[process] += until - begin
        devices[process].add(device)
    if not busy:
        raise PlaybookError(
            f"{path}: holds no kernels; expected a trace of steps on a GPU. Trace with -t cuda,nvtx while the run makes steps"
        )
    process = max(busy, key=lambda p: (busy[p], -p))
    if len(devices[process]) > 1:
        raise PlaybookError(f"{path}: holds kernels of {len(devices[process])} GPUs in one process; expected one GPU for each process")
    return process or next(
        (tid & _PROCESS for tid, *_ in _rows(db, "CUPTI_ACTIVITY_KIND_RUNTIME", ["globalTid"], path) if isinstance(tid, int)), 0
    )


def _calls(db: sqlite3.Connection, path: Path) -> _Calls:
    """(process, correlation) of each CUDA call, to its thread and begin."""
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    out: _Calls = {}
    for row in _rows(db, table, ["globalTid", "correlationId", "start"], path):
        tid, correlation, start = _times(path, table, *row)
        # A runtime call may contain a driver call of the same correlation: the outer one, which began first, is the launch.
        key = (tid & _PROCESS, correlation)
        if key not in out or start < out[key][1]:
            out[key] = (tid, start)
    return out


def _operations(
    db: sqlite3.Connection, tables: dict[str, set[str]], strings: dict[int, str], calls: _Calls, process: int, path: Path
) -> Iterator[tuple[Op, bool]]:
    """Kernels, copies, fills and graphs of one process, each with whether its launching call was recorded.

    By default nsys records the launch of a CUDA graph whole: its kernels are in no other table.
    """
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", *_COPIES, _GRAPHS):
        columns = tables.get(table, set())
        if not {"start", "end", "correlationId"} <= columns:
            continue
        pid = "globalPid" if "globalPid" in columns else "NULL"
        named = [c for c in _NAME_COLUMNS if c in columns] or ["NULL"]
        for start, end, correlation, owner, *labels in _rows(db, table, ["start", "end", "correlationId", pid, *named], path):
            begin, until, number = _times(path, table, start, end, correlation)
            if isinstance(owner, int) and owner & _PROCESS != process:
                continue
            call = calls.get((process, number))
            unnamed = _GRAPH if table == _GRAPHS else table.rsplit("_", 1)[1].lower()
            names = [strings.get(label, str(label)) if isinstance(label, int) else str(label or unnamed) for label in labels]
            thread, launch = call or (0, begin)
            # The short name has no namespace: DeepEP's kernels are called `dispatch` and `combine` there.
            kind: Kind = "copy" if table in _COPIES else "communication" if any(map(communicates, names)) else "compute"
            yield Op(thread, launch, begin, until, kind, _name(names) if kind == "compute" else names[0]), call is not None


def _name(names: list[str]) -> str:
    """The short name; where it tells no class, as `Kernel` of CUTLASS, the first that does."""
    return next((name for name in names if kernel_class(name) != OTHER), names[0])[:300]
