"""Ranks that are forked from a process with everything imported: the same runs as of fresh processes, and nothing left behind."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from playbook_bench.launch import forked, local
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import LocalLauncher, Spec
from playbook_bench.run import confirm
from playbook_bench.run.options import Options
from playbook_trainer.config.tree import load, parse_overrides

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["train.steps=4", "train.warmup_steps=1", "train.deterministic=true", "data.seq_len=32", "train.global_batch_size=2"]


def spec(folder: Path, *words: str, ranks: int = 2) -> Spec:
    config = load(ROOT / "trainer/configs/qwen3_moe_tiny.yaml", parse_overrides([*WORDS, f"parallel.ep={ranks}", *words]))
    return Spec(config, ranks, folder, {"PLAYBOOK_TEST_MARK": "here"}, timeout_s=1000)


@pytest.fixture
def launcher():
    made = ForkLauncher()
    yield made
    made.close()


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(r["loss"], r["grad_norm"]) for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def running(launcher: ForkLauncher) -> list[int]:
    """Process ids of servers and their ranks that are alive."""
    pids = [p for t in launcher.servers.values() if t for p in (t.process.pid, *t.pids)]
    return [p for p in pids if Path(f"/proc/{p}/stat").is_file() and ") Z " not in Path(f"/proc/{p}/stat").read_text()]


def gone(launcher: ForkLauncher, left: int) -> None:
    """Ranks have gone, the server waits; what dies with its parent takes a moment."""
    deadline = time.monotonic() + 1200
    while len(running(launcher)) > left and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(running(launcher)) == left


def during(launcher: ForkLauncher, folder: Path, strike) -> threading.Thread:
    """Once the run in `folder` has made two steps, do something."""

    def watch() -> None:
        log = folder / "metrics.jsonl"
        while not log.is_file() or log.read_text().count("\n") < 2:
            time.sleep(0.01)
        strike()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.full
def test_forked_ranks_train_as_fresh_ones_do(launcher, tmp_path):
    fresh, first, second = (tmp_path / name for name in ("fresh", "first", "second"))
    assert LocalLauncher().run(spec(fresh)).outcome == "ok"
    results = [launcher.run(spec(folder)) for folder in (first, second)]
    assert [r.outcome for r in results] == ["ok", "ok"]
    assert curve(fresh) == curve(first) == curve(second)
    assert launcher.run(spec(tmp_path / "other", "optimizer.lr=1e-5")).outcome == "ok"
    assert len(launcher.servers) == 1, "configurations that import the same share a server"
    (server,) = launcher.servers.values()
    assert len(server.pids) == 6
    gone(launcher, 1)
    launcher.close()
    assert not Path(f"/proc/{server.process.pid}").exists()


@pytest.mark.full
def test_what_a_run_gets_wrong_is_said_as_by_a_fresh_rank(launcher, tmp_path):
    wrong = spec(tmp_path / "layout", "parallel.ep=3", ranks=2)
    result = launcher.run(wrong)
    assert result.outcome == "refused"
    assert result.message == LocalLauncher().run(replace(wrong, folder=tmp_path / "again")).message
    nan = launcher.run(spec(tmp_path / "nan", "optimizer.lr=1e30", "optimizer.warmup_steps=0", "train.steps=8"))
    assert nan.outcome == "nan"


def test_a_refusal_is_told_by_the_rank_that_says_why_even_if_it_ends_last(tmp_path, monkeypatch):
    slow = tmp_path / "slow.py"
    slow.write_text("import os, sys, time\nif os.environ['RANK'] == '0':\n    time.sleep(1)\n    print('error: why')\nsys.exit(2)\n")
    monkeypatch.setattr(local, "_REFUSAL_S", 60.0)
    result = LocalLauncher(command=(sys.executable, str(slow))).run(spec(tmp_path / "run"))
    assert (result.outcome, result.message) == ("refused", "rank 0 ended with exit code 2: error: why\nerror: why")


@pytest.mark.parametrize("whose", ["rank", "server"])
@pytest.mark.full
def test_a_killed_process_ends_the_run_and_the_next_one_works(launcher, tmp_path, whose):
    long = spec(tmp_path / "long", "train.steps=4000")

    def strike() -> None:
        (server,) = launcher.servers.values()
        os.kill(server.pids[1] if whose == "rank" else server.process.pid, signal.SIGKILL)

    during(launcher, long.folder, strike)
    result = launcher.run(long)
    assert (result.outcome, result.returncode) == ("killed", -9)
    gone(launcher, 1 if whose == "rank" else 0)
    assert launcher.run(spec(tmp_path / "next")).outcome == "ok", "forked anew, or started afresh"


@pytest.mark.full
def test_a_hang_is_ended_with_all_ranks(launcher, tmp_path):
    long = replace(spec(tmp_path / "long", "train.steps=4000"), stall_s=5.0)

    def strike() -> None:
        (server,) = launcher.servers.values()
        os.kill(server.pids[0], signal.SIGSTOP)

    during(launcher, long.folder, strike)
    assert launcher.run(long).outcome == "hang"
    gone(launcher, 1)


@pytest.mark.full
def test_evidence_says_that_ranks_were_forked(tmp_path):
    (found,) = confirm.bench_run("moe-dispatch-bytes", Options(results=tmp_path, profile="cpu", launcher=ForkLauncher()))
    assert found.status in ("confirmed", "refuted")
    measured = found.evidence.measured
    assert {s["launch"] for s in measured.strict.values()} == {"fork"}
    assert found.evidence.command.endswith(" --fork"), "or a fresh process would be what repeats it"
    assert all(r.outcome == "ok" for r in measured.runs)


class Gone(confirm.Quiet):
    """Progress that takes the fork server away from a launch on, so that its ranks cannot be forked."""

    def __init__(self, monkeypatch, number):
        self.monkeypatch, self.number = monkeypatch, number

    def launch(self, number, total, spec):
        if number == self.number:
            self.monkeypatch.setattr(forked.ForkServer, "fork", lambda *_: None)


@pytest.mark.parametrize(("number", "ways", "detail"), [(1, {None}, ""), (2, {None, "fork"}, "differs in launch: fork, fresh processes")])
@pytest.mark.full
def test_evidence_says_how_ranks_were_started_whatever_was_asked_for(tmp_path, monkeypatch, number, ways, detail):
    """A series of forked ranks and fresh ones has no verdict; one of fresh ones alone is as good as any."""
    progress = Gone(monkeypatch, number)
    (found,) = confirm.bench_run("moe-dispatch-bytes", Options(results=tmp_path, profile="cpu", launcher=ForkLauncher()), progress)
    derived = found.evidence.derived
    assert {s.get("launch") for s in found.evidence.measured.strict.values()} == ways
    (gate,) = [g for g in derived.gates if g.name == "environment"]
    assert (gate.ok, gate.detail) == (not detail, detail)
    assert (found.status in ("confirmed", "refuted")) == (not detail)


def test_what_imports_depend_on_has_a_server_of_its_own(tmp_path):
    """The backend, and variables that libraries read when they are imported; nothing else of a configuration."""
    plain = spec(tmp_path)
    environment = {"OMP_NUM_THREADS": "1"}
    key = forked._imports(plain, environment)
    assert forked._imports(spec(tmp_path, "optimizer.lr=1e-5", "train.steps=7"), environment) == key
    others = {
        forked._imports(plain, {"OMP_NUM_THREADS": "2"}),
        forked._imports(replace(plain, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}), environment),
        forked._imports(spec(tmp_path, "parallel.comm_sms=8"), environment),
        forked._imports(spec(tmp_path, "backend=megatron", "train.dtype=bf16", "data.pack=false", "train.device=cuda"), environment),
    }
    assert len(others - {key}) == 4
