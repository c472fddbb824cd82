"""Ranks that are forked from a process with everything imported: the same runs as of fresh processes, and nothing left behind."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from planted_case import wait_for

from playbook_bench.launch import forked, local
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import LocalLauncher, Spec
from playbook_bench.launch.outcome import Result
from playbook_bench.run import confirm
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.run.store import Outcome
from playbook_trainer.config.tree import load, parse_overrides

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["train.steps=4", "train.warmup_steps=1", "train.deterministic=true", "data.seq_len=32", "train.global_batch_size=2"]


def spec(folder: Path, *words: str, ranks: int = 2) -> Spec:
    config = load(ROOT / "trainer/configs/qwen3_moe_tiny.yaml", parse_overrides([*WORDS, f"parallel.ep={ranks}", *words]))
    return Spec(config, ranks, folder, {"PLAYBOOK_TEST_MARK": "here"}, timeout_s=1000)


@pytest.fixture(scope="module")
def launcher():
    """One for all tests, whose server has imported everything once: a test leaves it without ranks."""
    made = ForkLauncher()
    yield made
    (server,) = made.servers.values()
    made.close()
    assert not Path(f"/proc/{server.process.pid}").exists()


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(r["loss"], r["grad_norm"]) for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def running(launcher: ForkLauncher) -> list[int]:
    """Process ids of servers and their ranks that are alive."""
    pids = [p for t in launcher.servers.values() if t for p in (t.process.pid, *t.pids)]
    return [p for p in pids if Path(f"/proc/{p}/stat").is_file() and ") Z " not in Path(f"/proc/{p}/stat").read_text()]


def gone(launcher: ForkLauncher, left: int) -> None:
    """Ranks have gone, the server waits; what dies with its parent takes a moment."""
    wait_for(lambda: len(running(launcher)) <= left, 1200)
    assert len(running(launcher)) == left


def struck(launcher: ForkLauncher, long: Spec, whose: Callable[[forked.ForkServer], int], signum: int) -> Result:
    """Once the run has made two steps, one of the server's processes gets a signal."""

    def watch() -> None:
        log = long.folder / "metrics.jsonl"
        while not log.is_file() or log.read_text().count("\n") < 2:
            time.sleep(0.01)
        (server,) = launcher.servers.values()
        os.kill(whose(server), signum)

    threading.Thread(target=watch, daemon=True).start()
    return launcher.run(long)


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


@pytest.mark.full
def test_what_a_run_gets_wrong_is_said_as_by_a_fresh_rank(launcher, tmp_path):
    wrong = spec(tmp_path / "layout", "parallel.ep=3", ranks=2)
    result = launcher.run(wrong)
    assert result.outcome == "refused"
    assert result.message == LocalLauncher().run(replace(wrong, folder=tmp_path / "again")).message
    nan = launcher.run(spec(tmp_path / "nan", "optimizer.lr=1e30", "optimizer.warmup_steps=0", "train.steps=8"))
    assert nan.outcome == "nan"


@pytest.mark.full
def test_evidence_says_how_ranks_were_started_whatever_was_asked_for(launcher, tmp_path, monkeypatch):
    """A series of forked ranks and fresh ones has no verdict."""

    def series(name: str, progress: Progress) -> Outcome:
        options = Options(results=tmp_path / name, profile="cpu", launcher=launcher)
        (found,) = confirm.bench_run("moe-dispatch-bytes", options, progress)
        assert all(r.outcome == "ok" for r in found.evidence.measured.runs)
        assert found.evidence.command.endswith(" --fork"), "or a fresh process would be what repeats it"
        return found

    def environment(found: Outcome) -> tuple[set[str | None], bool, str]:
        (gate,) = [g for g in found.evidence.derived.gates if g.name == "environment"]
        return {s.get("launch") for s in found.evidence.measured.strict.values()}, gate.ok, gate.detail

    class Gone(Progress):
        """Takes the fork server away from the second launch on, so that its ranks cannot be forked."""

        def launch(self, number, total, spec):
            if number == 2:
                monkeypatch.setattr(forked.ForkServer, "fork", lambda *_: None)

    forks = series("forked", Progress())
    assert forks.status in ("confirmed", "refuted")
    assert environment(forks) == ({"fork"}, True, "")
    both = series("both", Gone())
    assert both.status not in ("confirmed", "refuted")
    assert environment(both) == ({None, "fork"}, False, "differs in launch: fork, fresh processes")


@pytest.mark.full
def test_a_killed_or_hanging_process_ends_the_run_and_the_next_one_works(launcher, tmp_path):
    hung = struck(
        launcher, replace(spec(tmp_path / "hang", "train.steps=4000"), stall_s=5.0), lambda server: server.pids[-2], signal.SIGSTOP
    )
    assert hung.outcome == "hang"
    gone(launcher, 1)
    killed = struck(launcher, spec(tmp_path / "rank", "train.steps=4000"), lambda server: server.pids[-1], signal.SIGKILL)
    assert (killed.outcome, killed.returncode) == ("killed", -9)
    gone(launcher, 1)
    assert launcher.run(spec(tmp_path / "forked")).outcome == "ok", "forked anew"
    killed = struck(launcher, spec(tmp_path / "server", "train.steps=4000"), lambda server: server.process.pid, signal.SIGKILL)
    assert (killed.outcome, killed.returncode) == ("killed", -9)
    gone(launcher, 0)
    assert launcher.run(spec(tmp_path / "afresh")).outcome == "ok", "started afresh"


def test_a_refusal_is_told_by_the_rank_that_says_why_even_if_it_ends_last(tmp_path, monkeypatch):
    slow = tmp_path / "slow.py"
    slow.write_text("import os, sys, time\nif os.environ['RANK'] == '0':\n    time.sleep(1)\n    print('error: why')\nsys.exit(2)\n")
    monkeypatch.setattr(local, "_REFUSAL_S", 60.0)
    result = LocalLauncher(command=(sys.executable, str(slow))).run(spec(tmp_path / "run"))
    assert (result.outcome, result.message) == ("refused", "rank 0 ended with exit code 2: error: why\nerror: why")


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
