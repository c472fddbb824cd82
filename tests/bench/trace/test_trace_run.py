"""Tracing a case: launches, reports, records. The trainer and nsys are stood in for by small programs; the rest is real."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_kineto import gpu, ranges
from test_nsys import database

from playbook.errors import ConfigError, FileError, PlaybookError
from playbook.paths import data_root
from playbook.records.evidence import Machine
from playbook.records.read import read
from playbook_bench.launch.local import LocalLauncher
from playbook_bench.machine import detect
from playbook_bench.run import tracing
from playbook_bench.trace import reports
from playbook_bench.variants.resolve import resolve_all

CASE = "moe-dispatcher-allgather-vs-alltoall"
COMMAND_CASE = """
id: their-step
kind: command
summary: Their script.
command: [python, train.py]
candidate: {arguments: [--fast]}
steps: {count: 20}
metric: step_seconds
profiles: {cpu: {}}
"""
# A rank: rank 0 leaves a summary and, where the configuration asks for it, a trace.
TRAINER = """
import json, os, pathlib, shutil, sys
config = json.loads(pathlib.Path(sys.argv[-1]).read_text())
out = pathlib.Path(config["output"])
if os.environ["RANK"] == "0":
    if config["moe"]["dispatcher"] == os.environ.get("FAIL"):
        sys.exit("no memory left: OutOfMemoryError")
    (out.parent / "threads.txt").open("a").write(os.environ["OMP_NUM_THREADS"] + " ")
    if config["profile"]["kineto"]:
        shutil.copy(os.environ["TRACE"], out / "trace.json")
    (out / "summary.json").write_text(json.dumps({"outcome": "ok", "env": {"strict": {"torch": "2.13.0", "cuda": None}}}))
"""
# nsys: runs the program, then leaves a report and (as a full installation with --export would) its SQLite export.
NSYS = """#!{python}
import os, shutil, subprocess, sys
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2025.3.1")
elif sys.argv[1] == "export":
    shutil.copy(os.environ["SQLITE"], sys.argv[sys.argv.index("-o") + 1])
else:
    at = sys.argv.index("-o")
    open(sys.argv[at + 1] + ".nsys-rep", "w").write(" ".join(sys.argv[1:at]))
    sys.exit(subprocess.call(sys.argv[at + 2 :]))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "rank.py").write_text(TRAINER)
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*ranges(), *gpu("k", 100, 2, 3, 5, 1)]}))
    monkeypatch.setenv("TRACE", str(tmp_path / "trace.json"))
    return [sys.executable, str(tmp_path / "rank.py")]


def test_both_variants_are_traced_and_the_record_is_found_again_and_refused_once_it_is_altered_or_damaged(
    tmp_path: Path, command: list[str]
) -> None:
    results = tmp_path / "results"
    lines: list[str] = []
    made = tracing.run(CASE, profile="cpu", results=results, launcher=LocalLauncher(command), progress=lines.append)
    assert made.ok
    assert made.collector == "kineto"
    assert made.collector_version == "torch 2.13.0"
    assert set(made.variants) == {"baseline", "candidate"}
    assert [r.content for r in read([results])] == [made]
    assert any("baseline" in line for line in lines)
    for variant in made.variants.values():
        assert [(results / "traces" / f.name).is_file() for f in variant.files] == [True]
        assert reports.table_from_file(results / "traces" / variant.files[0].name) == variant.table
    (path,) = (results / "traces").glob("*.json")
    whole = path.read_text()
    path.write_text(whole.replace('"busy_ms": 2.0', '"busy_ms": 1.0', 1))
    assert path.read_text() != whole
    assert [r.status for r in read([results])] == ["altered"]
    path.write_text(whole[:200])
    with pytest.raises(FileError, match="no readable record"):
        read([results])


def test_a_traced_launch_has_the_hash_and_the_threads_of_the_timed_ones_and_its_command_repeats_it_for_a_case_from_elsewhere(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "my cases" / "mine.yaml"
    own.parent.mkdir()
    shipped = (data_root("cases") / f"{CASE}.yaml").read_text(encoding="utf-8")
    own.write_text(shipped.replace(f"id: {CASE}", "id: mine", 1), encoding="utf-8")
    here = Machine(name="cpu", description="", gpus=0, cpu="c", cores=12)
    monkeypatch.setattr(detect, "detect", lambda: here)
    pair = resolve_all(tracing.load_case(str(own)), "cpu")
    made = tracing.run(str(own), profile="cpu", results=tmp_path / "results", launcher=LocalLauncher(command))
    assert shlex.split(made.command) == ["playbook", "bench", "trace", str(own), "--profile", "cpu"]
    assert {v: t.config_sha for v, t in made.variants.items()} == {v: r.sha for v, r in pair.items()}
    (seen,) = (tmp_path / "results" / "traces").glob("*/threads.txt")
    assert seen.read_text().split() == [str(12 // max(r.ranks for r in pair.values()))] * 2


def test_a_failed_launch_is_an_outcome_and_the_other_variant_is_still_traced(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "alltoall")
    made = tracing.run(CASE, profile="cpu", results=tmp_path / "results", launcher=LocalLauncher(command))
    assert not made.ok
    assert made.variants["baseline"].outcome == "oom"
    assert made.variants["candidate"].table is not None


def test_a_trace_that_cannot_be_read_is_told_not_raised(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "trace.json").write_text("{")
    made = tracing.run(CASE, profile="cpu", results=tmp_path / "results", launcher=LocalLauncher(command))
    assert made.variants["baseline"].outcome == "crash"
    assert "unusable" in made.variants["baseline"].message


def on_two_gpus_with(nsys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two GPUs, and this program as its nsys."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nsys").write_text(nsys.format(python=sys.executable))
    (tools / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    here = Machine(name="h200x2", description="2 x NVIDIA H200", gpus=2, gpu="NVIDIA H200", interconnect="nvlink", cpu="c", cores=8)
    monkeypatch.setattr(detect, "detect", lambda: here)


def test_nsys_is_put_in_front_of_rank_0_alone_and_its_report_kept(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two_gpus_with(NSYS, tmp_path, monkeypatch)
    monkeypatch.setenv("SQLITE", str(database(tmp_path / "report.sqlite")))
    made = tracing.run(CASE, results=tmp_path / "results", launcher=LocalLauncher(command))
    assert (made.collector, made.collector_version, made.profile) == ("nsys", "NVIDIA Nsight Systems version 2025.3.1", "h200x2")
    assert made.ok
    table = made.variants["candidate"].table
    assert table is not None
    assert table.measures == "gpu"
    names = [f.name.rsplit("/", 1)[1] for f in made.variants["candidate"].files]
    assert names == ["candidate.nsys-rep", "candidate.sqlite"]
    words = (tmp_path / "results" / "traces" / made.variants["candidate"].files[0].name).read_text()
    assert "--cpuctxsw=none" in words
    assert "cuda,nvtx" in words


def test_an_export_that_takes_too_long_is_told_not_raised(tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = NSYS.replace('elif sys.argv[1] == "export":', 'elif sys.argv[1] == "export":\n    __import__("time").sleep(60)')
    on_two_gpus_with(slow, tmp_path, monkeypatch)
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda words, **how: run(words, **{**how, "timeout": 0.5} if "export" in words else how))
    made = tracing.run(CASE, results=tmp_path / "results", launcher=LocalLauncher(command))
    assert {v.outcome for v in made.variants.values()} == {"crash"}
    assert "nsys export took more than" in made.variants["baseline"].message


def test_what_cannot_be_traced_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no-such-case"):
        tracing.run("no-such-case", results=tmp_path)
    with pytest.raises(ConfigError, match="launches nothing"):
        tracing.run("cp-dp-floor", results=tmp_path)
    with pytest.raises(ConfigError, match="no profile"):
        tracing.run(CASE, profile="h200x64", results=tmp_path)
    command = tmp_path / "their-step.yaml"
    command.write_text(COMMAND_CASE)
    with pytest.raises(ConfigError, match="trace it with playbook ab --trace"):
        tracing.run(str(command), results=tmp_path)


@pytest.mark.parametrize("name", ["t.nsys-rep", "none.sqlite", "none.json"])
def test_a_file_of_another_kind_says_what_to_do(tmp_path: Path, name: str) -> None:
    if name.endswith("rep"):
        (tmp_path / name).write_text("x")
    with pytest.raises(PlaybookError, match="nsys"):
        reports.table_from_file(tmp_path / name)
