"""Registered predictions of layouts and the runner that tests them: legal and fitting configurations, an order that goes on, and a rehearsal on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import planned_layouts as tool
import pytest
from ranks import environment

from playbook.planner.time.cluster import cluster
from playbook_trainer.config import checks, dry_run, tree
from playbook_trainer.config import megatron_checks as megatron

ROWS = tool.read(tool.FOLDER / tool.REGISTERED)


def ran(name: str, speed: float, turn: int = 0, gib: float = 100.0) -> dict[str, object]:
    return {"name": name, "turn": turn, "outcome": "ok", "tokens_per_s_per_gpu": speed, "peak_memory_bytes": gib * tool.GIB}


def gpu(row: dict) -> str:
    return row.get("hardware", tool.USUAL)


def test_all_models_and_layouts_are_registered() -> None:
    for hardware in ("h200", "h100"):
        assert [sum(r["gpus"] == n and gpu(r) == hardware for r in ROWS) for n in (4, 2, 8)] == [4 * 6, 4 * 5, 8]
    assert len({tool.name_of(r) for r in ROWS}) == len(ROWS)
    for row in ROWS:
        speed = row["predicted"]["tokens_per_s_per_gpu"]
        assert 0 < speed["low"] < speed["value"] < speed["high"]


def test_every_registered_configuration_can_run_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "installed", lambda module: True)
    for row in ROWS:
        config = tree.load(tool.ROOT / tool.CONFIG, row["settings"])
        checks.check(config, row["gpus"])
        peak = max(s.peak for s in dry_run.dry_run(config, row["gpus"]).stages)
        assert peak < 0.92 * cluster(gpu(row)).memory_gib * tool.GIB, tool.name_of(row)


def test_each_is_run_once_and_then_the_two_fastest_of_a_model_in_turns() -> None:
    rows = [r for r in ROWS if r["gpus"] == 2 and r["model"] == "moe-64" and gpu(r) == "h200"]
    names = [tool.name_of(r) for r in rows]
    first = tool.todo(rows, [], 2, again=False)
    assert sorted(first) == sorted((n, 0) for n in names)
    assert first == tool.todo(rows, [], 0, again=False)  # the order is the same in every call
    assert [n for n, _ in first] != names
    runs = [ran(n, 1000 * i) for i, n in enumerate(names, 1)]  # the longest rows come last and do not compete
    fast, next_fast = names[3], names[2]
    assert tool.todo(rows, runs, 2, again=False) == [(fast, 1), (next_fast, 1), (next_fast, 2), (fast, 2)]
    assert tool.todo(rows, [*runs, ran(fast, 4000, 1)], 2, again=False) == [(next_fast, 1), (next_fast, 2), (fast, 2)]
    failed = {"name": names[0], "turn": 0, "outcome": "failed", "message": "out of memory"}
    assert tool.todo(rows, [failed, *runs[1:]], 0, again=False) == []
    assert tool.todo(rows, [failed, *runs[1:]], 0, again=True) == [(names[0], 0)]


def test_the_report_tells_errors_and_whether_the_choice_was_right() -> None:
    rows = [r for r in ROWS if r["gpus"] == 2 and r["model"] == "moe-64" and r["settings"]["data.seq_len"] == 4096 and gpu(r) == "h200"]
    said = {tool.name_of(r): r["predicted"] for r in rows}
    best = max(said, key=lambda n: said[n]["tokens_per_s_per_gpu"]["value"])
    as_said = [ran(n, p["tokens_per_s_per_gpu"]["value"] * 1.25, gib=p["memory_gib"]) for n, p in said.items()]
    shown = tool.report(rows, as_said)
    assert f"{len(rows)} of {len(rows)} configurations: median error 20.0 % of speed, 0.0 % of memory; {len(rows)} in the interval" in shown
    assert f"chosen {best}, fastest {best}, 0.0 % behind: right" in shown
    worse = [r | {"tokens_per_s_per_gpu": 10.0} if r["name"] == best else r for r in as_said]
    assert "wrong" in tool.report(rows, worse) or "tie set" in tool.report(rows, worse)
    assert "not run" in tool.report(rows, as_said[1:])


def test_variants_of_cases_are_rows_too() -> None:
    """With what their case predicts, what the trainer is told there, and a choice among the runs of one case, of whatever length."""
    rows = list(tool.of_cases(["predicted-moe-32k-torch", "predicted-dense-4k-megatron"], 1))
    names = [tool.name_of(r) for r in rows]
    assert names[:2] == ["1/predicted-moe-32k-torch/first-ep1", "1/predicted-moe-32k-torch/second-ep2"]
    assert rows[1]["settings"].items() >= {"model.num_experts": 64, "data.seq_len": 32768, "train.compile.decoder": True}.items()
    assert rows[0]["predicted"]["tokens_per_s_per_gpu"] == {"value": 22840.0, "low": 17410.0, "high": 29960.0}
    assert 0 < rows[1]["predicted"]["memory_gib"] < rows[0]["predicted"]["memory_gib"] < 140.0
    assert [n for n, _ in tool.todo(rows, [], 0, again=False)] != names
    shown = tool.report(rows, [ran(names[0], 22840.0), ran(names[1], 20000.0)])
    assert (
        "chosen 1/predicted-moe-32k-torch/second-ep2, fastest 1/predicted-moe-32k-torch/first-ep1, 14.2 % behind: in the tie set" in shown
    )
    with pytest.raises(SystemExit, match="expected a speed predicted for 1 GPUs"):
        list(tool.of_cases(["fp8-blockwise"], 1))


@pytest.mark.full
@pytest.mark.timeout(4000)
def test_a_rehearsal_trains_a_registered_layout(tmp_path: Path) -> None:
    tool_file = tool.ROOT / "tools" / "planner" / "planned_layouts.py"
    command = [sys.executable, str(tool_file), "run", "--rehearse", "--gpus", "2", "--out", str(tmp_path), "--only", "dense", "fsdp2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = tool.read(tmp_path / tool.RUNS)
    assert (row["name"], row["outcome"], row["rehearsed"]) == ("2/dense/fsdp2", "ok", True)
    assert row["tokens_per_s_per_gpu"] > 0


def test_a_second_call_goes_on_where_the_first_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str) -> list[tuple[str, int]]:
        assert tool.main(["run", "--rehearse", "--gpus", "2", "--out", str(tmp_path), "--only", "dense", *words]) == 0
        return [(r["name"], r["turn"]) for r in tool.read(tmp_path / tool.RUNS)]

    monkeypatch.setattr(tool, "launch", lambda *_, **__: {"outcome": "ok", "tokens_per_s_per_gpu": 1.0, "wall_s": 1.0})
    monkeypatch.setattr(tool.fork_server, "import_all", lambda backend: True)
    assert call("fsdp2") == [("2/dense/fsdp2", 0)]
    assert call("tp2", "--pairs", "1") == [("2/dense/fsdp2", 0), ("2/dense/tp2", 0), ("2/dense/tp2", 1)]
