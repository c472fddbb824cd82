"""Journals of which a line cannot be read: what stands behind it is not lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from playbook.errors import StoreError
from playbook.records.case import load_case
from playbook_bench.run.journal import Journal, SealedLines


def damaged(path: Path, number: int) -> bytes:
    """The content of a journal, in which the first half of a line is gone."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number][len(lines[number]) // 2 :]
    path.write_bytes(b"".join(lines))
    return path.read_bytes()


@pytest.mark.parametrize("number", [0, 1])
def test_lines_behind_a_damaged_one_are_not_erased(tmp_path: Path, number: int) -> None:
    path = tmp_path / "lines.jsonl"
    SealedLines(path).replace([{"row": i} for i in range(4)])
    content = damaged(path, number)
    lines = SealedLines(path)
    rows = lines.read()
    assert rows == [{"row": i} for i in range(number)]
    with pytest.raises(StoreError, match="cannot be read"):
        lines.replace(rows)
    assert path.read_bytes() == content


def test_a_torn_last_line_is_dropped_and_a_mended_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = SealedLines(path)
    lines.replace([{"row": i} for i in range(4)])
    whole = path.read_bytes()
    damaged(path, 1)
    lines.read()
    assert lines.unreadable_midway
    path.write_bytes(whole[:-20])
    rows = lines.read()
    assert not lines.unreadable_midway
    lines.replace(rows)
    assert SealedLines(path).read() == rows == [{"row": i} for i in range(3)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_series_does_not_go_on_from_a_damaged_journal(tmp_path: Path, number: int) -> None:
    case = load_case("small-micro-batches")
    journal = Journal(tmp_path, ["here"])
    series = journal.series(case, "cpu", 1)
    for _ in range(3):
        series.lines.add({"failed": "oom"})
    path = tmp_path / f"{case.id}.jsonl"
    assert journal.series(case, "cpu", 1).failed == {"oom": 3}
    content = damaged(path, number)
    with pytest.raises(StoreError, match=re.escape(str(path))):
        journal.series(case, "cpu", 1)
    assert path.read_bytes() == content
