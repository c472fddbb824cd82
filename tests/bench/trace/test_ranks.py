"""Several ranks of one run, whatever each rank's own clock says; and two traces beside one another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from test_walls import GEMM, answer, shown

from playbook.errors import PlaybookError
from playbook_bench.trace import kineto, reports

RANKS, SLOW = 8, 5
WAIT, TRANSFER = 9.0, 2.0


def rank(number: int, *, slow: int | None = SLOW, steps: int = 3, groups: bool = True, host: float = 0.0) -> dict[str, Any]:
    """Steps of 42.1 ms: 31.1 of products, on the slow rank 9 more, then an all-reduce whose transfer takes 2. The host runs ahead by its own time; so does its clock."""
    mine = 1000.0 * number
    events: list[dict[str, Any]] = []
    compute = 31.1 + (WAIT if number == slow else 0)
    for i in range(steps):
        about = {"ph": "X", "pid": 7, "tid": 7}
        called = mine + i * 30.0
        events.append({**about, "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": called * 1e3, "dur": 30e3})
        begin = mine + 20 + number + 42.1 * i
        for k, (name, a, b) in enumerate([(GEMM, 0, compute - host), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", compute, 42.1)]):
            n = 10 * i + k + 1
            launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": (called + 1 + k) * 1e3, "dur": 3, "args": {"correlation": n}}
            events.append({**about, **launch})
            args: dict[str, Any] = {"correlation": n, "device": 0}
            if k and groups:
                args |= {"Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1, 2, ...]"}
            kernel = {"cat": "kernel", "name": name, "tid": 7 + k, "ts": (begin + a) * 1e3, "dur": (b - a) * 1e3, "args": args}
            events.append({**about, **kernel, "pid": 0})
    return {"distributedInfo": {"rank": number, "world_size": RANKS}, "traceEvents": events}


def folder(path: Path, **kinds: Any) -> Path:
    path.mkdir()
    for n in range(RANKS):
        (path / f"host_{97 - n}.pt.trace.json").write_text(json.dumps(rank(n, **kinds)))
    return path


def test_a_folder_of_eight_ranks_names_the_one_that_waits_least(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, "--file", str(folder(tmp_path / "run")))
    assert (code, found["waits_least"], found["holds_up"]) == (0, SLOW, True)
    assert found["sentence"].startswith(
        "Rank 5 holds up the others: it waits least, 0.0 ms of a step in collectives, where the others wait 9.0 for it"
    )
    assert found["sentence"].endswith("it computes 9.0 ms longer, most of it in products.")
    for each in found["ranks"]:
        late = each["rank"] == SLOW
        assert each["span_ms"] == pytest.approx(42.1)  # by the hosts' marks 56.8 to 61.4
        assert (each["waiting_ms"], each["transfer_ms"]) == (pytest.approx(0 if late else WAIT), pytest.approx(TRANSFER))
        assert each["exposed_ms"] == pytest.approx(TRANSFER if late else WAIT + TRANSFER)
    (group,) = found["collectives"]
    assert (group["collective"], group["group"], group["count"]) == ("all-reduce", "default_pg #0 [0, 1, 2, ...]", 1)
    assert (group["transfer_ms"], group["waiting_ms"]) == (pytest.approx(TRANSFER), pytest.approx(WAIT * 7 / 8))
    code, out, _ = shown(capsys, "--file", str(tmp_path / "run"))
    assert (code, out.split(":")[0]) == (0, "Rank 5 holds up the others")
    assert "all-reduce" in out


def test_ranks_that_wait_alike_hold_up_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = answer(capsys, "--file", str(folder(tmp_path / "run", slow=None, groups=False)))
    assert not found["holds_up"]
    assert found["sentence"].startswith("No rank holds up the others")
    assert any("no process group" in note for note in found["notes"])


def test_a_rank_with_other_steps_is_compared_by_sums_and_one_that_cannot_be_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder(tmp_path / "run")
    (run / "host_97.pt.trace.json").write_text(json.dumps(rank(0, steps=5)))
    (run / "host_96.pt.trace.json").write_text("no trace")
    code, found = answer(capsys, "--file", str(run))
    assert (code, found["waits_least"], len(found["ranks"])) == (0, SLOW, 7)
    assert any("not equally many" in note for note in found["notes"])
    assert any("host_96" in note for note in found["notes"])
    assert found["ranks"][0]["waiting_ms"] == pytest.approx(WAIT)


def test_one_trace_among_other_files_is_the_trace_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"layers": 4}')
    (tmp_path / "t.json").write_text(json.dumps(rank(0)))
    code, found = answer(capsys, "--file", str(tmp_path))
    assert (code, found["num_steps"]) == (0, 2)
    assert any("config.json" in note for note in found["notes"])


def test_a_folder_without_any_trace_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--file", str(tmp_path))[0] == 2
    (tmp_path / "a.txt").write_text("none")
    code, _, err = shown(capsys, "--file", str(tmp_path))
    assert (code, "a.txt" in err) == (2, True)


def test_between_two_traces_the_parts_add_up_to_the_difference_of_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the slow rank's 40.1 ms of products, 5 become idle time that nobody explains; of the other's all-reduce 9 ms more are waiting."""
    first, second = tmp_path / "a.json", tmp_path / "b.json.gz"
    first.write_text(json.dumps(rank(SLOW)))
    second.write_bytes(gzip.compress(json.dumps(rank(0, host=5)).encode()))
    code, found = answer(capsys, "--file", str(second), "--against", str(first))
    change = {p["name"]: p["change_ms"] for p in found["parts"]}
    assert (code, change) == (
        0,
        {"products": pytest.approx(-14), "collectives": pytest.approx(9), "idle of unknown cause": pytest.approx(5)},
    )
    assert sum(p["after_ms"] for p in found["parts"]) == pytest.approx(found["after_ms"])
    assert [p["name"] for p in found["parts"]] == ["products", "collectives", "idle of unknown cause"]
    assert found["sentence"].endswith("in ms, products -14.00, collectives +9.00, idle of unknown cause +5.00.")
    code, out, _ = shown(capsys, "--file", str(second), "--against", str(first))
    assert (code, "-14.00" in out) == (0, True)
    assert shown(capsys, "--against", str(first))[0] == 2
    assert shown(capsys, "--against", str(first), "--file", str(folder(tmp_path / "run")))[0] == 2


def labelled(n: int, e: dict[str, Any]) -> dict[str, Any]:
    return e | {"pid": f"[TP{n:02}] {e['pid']}"}


def numbered(n: int, e: dict[str, Any]) -> dict[str, Any]:
    return e | {"args": e.get("args", {}) | {"rank": n}}


def renamed(n: int, e: dict[str, Any]) -> dict[str, Any]:
    return e | {"pid": n + 1}


@pytest.mark.parametrize("told", [labelled, numbered, renamed])
def test_one_file_that_merges_eight_ranks_is_read_as_eight(tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Any) -> None:
    """As tools for viewing merge them: a label before each process, the rank in each event, or one process for each rank with a name."""
    events = [told(n, e) for n in reversed(range(RANKS)) for e in rank(n)["traceEvents"]]
    names = [{"ph": "M", "name": "process_name", "pid": n + 1, "args": {"name": f"Rank {n}"}} for n in range(RANKS)]
    path = tmp_path / "merged.json"
    path.write_text(json.dumps({"traceEvents": [*events, *(names if told is renamed else [])], "distributedInfo": {"rank": 0}}))
    code, found = answer(capsys, "--file", str(path))
    assert code == 0
    assert (found["waits_least"], found["holds_up"], len(found["ranks"])) == (SLOW, True, RANKS)
    assert [each["rank"] for each in found["ranks"]] == list(range(RANKS))
    assert [each["waiting_ms"] for each in found["ranks"]] == pytest.approx([0 if n == SLOW else WAIT for n in range(RANKS)])
    assert [each["span_ms"] for each in found["ranks"]] == pytest.approx([42.1] * RANKS)


def test_of_a_file_that_merges_ranks_one_is_asked_for_where_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "merged.json"
    path.write_text(json.dumps({"traceEvents": [labelled(n, e) for n in range(2) for e in rank(n)["traceEvents"]]}))
    with pytest.raises(PlaybookError, match="holds the traces of several ranks; expected one rank's: playbook bench trace --file"):
        reports.timeline_from_file(path)
    with pytest.raises(PlaybookError, match="holds the traces of 2 ranks; expected the trace of one rank"):
        kineto.read(path)
