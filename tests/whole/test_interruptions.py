"""A harness that is stopped, or that shares a machine with another: no process stays behind, and no half-written file."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from guide_blocks import script
from planted_case import FAKE, bench, wait_for

from playbook.errors import LaunchError
from playbook_bench.machine import detect
from playbook_bench.run import replay

HARNESS = """
import sys
from playbook_bench.launch.local import LocalLauncher
from playbook_bench.run import confirm
from playbook_bench.run.options import Options
confirm.bench_run(sys.argv[1], Options(results=sys.argv[2], launcher=LocalLauncher(sys.argv[3:]), profile="cpu"))
"""


def start(case, tmp_path, mark, plant):
    env = {**os.environ, "PLANT": json.dumps(plant), "PLANT_MARK": mark, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HARNESS, case, str(tmp_path / "results"), *FAKE]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def processes(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and f"PLANT_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def gone(mark):
    # This process may carry the mark itself, in the environment that monkeypatch changed; /proc shows the one it began with.
    return wait_for(lambda: not processes(mark), 300)


def wait_for_ranks(mark, count):
    wait_for(lambda: len(processes(mark)) >= count, 1000)


def test_a_hang_ends_with_its_workers(case, tmp_path, plant, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PLANT_MARK", mark)
    plant(candidate={"fault": "worker"})
    found = bench(case("dispatch_bytes_per_token_layer", timeout=3), tmp_path)
    assert found.evidence.measured.runs[-1].outcome == "hang"
    assert found.status == "error"
    assert gone(mark), "no process of the run is left"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
@pytest.mark.sample("15-143")
def test_a_stopped_harness_leaves_no_process_and_no_half_written_file(case, tmp_path, signum, code):
    mark = uuid.uuid4().hex
    harness = start(case(), tmp_path, mark, {"baseline": {"fault": "wait"}})
    wait_for_ranks(mark, 3)  # the harness and two ranks
    os.kill(harness.pid, signum)
    assert harness.wait(timeout=900) == code
    assert gone(mark)
    said = harness.stderr.read().decode()
    assert (
        signum == signal.SIGKILL or said == f"{signum.name}: ending what runs; the same command goes on from the launches that had ended\n"
    )
    results = tmp_path / "results"
    assert not [p for p in results.rglob("*") if p.suffix == ".tmp" or p.parent.name == "cpu"]


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
LAUNCH = """
import sys
from pathlib import Path
from playbook_bench.launch.local import LocalLauncher, Spec, interruptible
from playbook_trainer.config.tree import load
config = load(Path("trainer/configs/qwen3_moe_tiny.yaml"), {})
with interruptible():
    LocalLauncher((sys.executable, "-c", sys.argv[2]), grace_s=60).run(Spec(config, 1, Path(sys.argv[1]), timeout_s=1))
"""


@pytest.mark.full
def test_a_signal_while_a_hang_is_being_ended_leaves_no_process(tmp_path):
    """Ranks and workers that ignore SIGTERM are given a grace; the signal cuts that short, and not what comes after it."""
    mark = uuid.uuid4().hex
    env = {**os.environ, "PLANT_MARK": mark, "PYTHONPATH": os.pathsep.join(sys.path)}
    harness = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path / "run"), STUBBORN], env=env, stderr=subprocess.DEVNULL)
    wait_for_ranks(mark, 3)  # the harness, a rank and its worker
    time.sleep(2.0)  # the run has hung, and its grace has begun
    harness.terminate()
    assert harness.wait(timeout=900) == 143
    assert gone(mark)


SRUN = """
import os, sys, time
from pathlib import Path
from playbook_bench.launch import slurm
from playbook_bench.launch.local import interruptible
folder = Path(sys.argv[1])
process = slurm.start([sys.executable, "-c", sys.argv[2]], folder, os.environ)
with interruptible():
    while not (folder / "begun").exists():
        time.sleep(0.01)
    slurm.end(process, "7", folder, 20.0)
"""


@pytest.mark.full
def test_a_signal_while_a_step_is_being_ended_leaves_none_of_its_tasks(tmp_path):
    """Where srun ignores SIGTERM; the command that cancels a step is one that kills it here."""
    mark = uuid.uuid4().hex
    step = f"import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: open({str(tmp_path / 'asked')!r}, 'w'))\n"
    step += f"open({str(tmp_path / 'step')!r}, 'w').write('0'); open({str(tmp_path / 'begun')!r}, 'w'); [time.sleep(1) for _ in range(600)]"
    script(tmp_path / "scancel", f'echo "$@" > {tmp_path}/cancelled')
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {**os.environ, "PLANT_MARK": mark, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    harness = subprocess.Popen([sys.executable, "-c", SRUN, str(tmp_path), step], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "asked").exists, 1000)
    finally:
        harness.terminate()
    assert harness.wait(timeout=900) == 143
    assert (tmp_path / "cancelled").read_text() == "--signal=KILL 7.0\n"
    assert gone(mark)


@pytest.mark.full
def test_two_harnesses_share_a_results_folder(case, tmp_path):
    path = case("dispatch_bytes_per_token_layer")
    both = [start(path, tmp_path, uuid.uuid4().hex, {}) for _ in range(2)]
    for harness in both:
        assert harness.wait(timeout=600) == 0, harness.stderr.read().decode()
    files = sorted((tmp_path / "results" / "cpu").glob("*.json"))
    assert len(files) == 2
    assert all(replay.replay(f) == (True, []) for f in files)


def test_a_gpu_is_measured_by_one_harness_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from playbook_bench.machine import detect\n"
    command += "gpu = detect.machine_of([['NVIDIA H200', '1', '1', '1']], '', 'cpu', 1); cpu = detect.machine_of([], '', 'cpu', 1)\n"
    command += "print(detect.claim(gpu), detect.claim(cpu), flush=True); sys.stdin.read()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen([sys.executable, "-c", command, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    try:
        assert other.stdout.readline().strip() == b""
        one = detect.machine_of([["NVIDIA H200", "1", "1", "1"]], "", "cpu", 1)
        with pytest.raises(LaunchError, match=f"GPU 0 is in use by another harness .process {other.pid} on"):
            detect.claim(one)
        assert f"process {other.pid} on" in detect.claim(detect.machine_of([], "", "cpu", 1))
    finally:
        other.communicate()
