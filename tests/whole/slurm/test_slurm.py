"""Jobs of a real Slurm: two virtual nodes of this machine, CPU ranks, the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_case import CASE, wait_for
from planted_case import FAKE as PLANTED
from ranks import SUPPORT

from playbook.paths import repo_root, sources
from playbook.planner.hardware import machine
from playbook.records.read import read
from playbook_bench.launch.local import LocalLauncher
from playbook_bench.run import confirm, replay, store
from playbook_bench.run.options import Options

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

# One core of the two for the harness, so that ranks run with a thread each.
CLUSTER = 'platform: cpu\npartition: p\nnodes: 2\ntime: 20m\nsetup: ["taskset --pid --cpu-list 0 $$ > /dev/null"]\n'


@pytest.fixture
def environment(slurm):
    paths = os.pathsep.join(sources(repo_root()))
    return {**slurm, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def case(tmp_path):
    def write(metric, timeout=60):
        path = tmp_path / "planted.yaml"
        text = CASE.replace("METRIC", metric).replace("TIMEOUT", str(timeout)).replace("minutes: 5", "minutes: 10")
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf-8")
    return str(path)


def batch(environment, tmp_path, command, *options):
    """The lines of JSON that a command prints as a batch job on both nodes."""
    log, script = tmp_path / "log", tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
    wrapped = ["sbatch", "--wait", "--nodes=2", "--exclusive", *options, f"--output={log}", f"--chdir={tmp_path}", str(script)]
    done = subprocess.run(wrapped, env=environment, capture_output=True, text=True, timeout=300, check=False)
    text = log.read_text(errors="replace") if log.exists() else ""
    assert done.returncode == 0, done.stderr + text
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def in_an_allocation(environment, tmp_path, *words):
    """What planted_series.py prints there."""
    command = " ".join(f"'{w}'" for w in (sys.executable, str(SUPPORT / "ranks" / "planted_series.py"), *words))
    return batch(environment, tmp_path, command, "--no-kill")


def playbook(environment, tmp_path, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "playbook", *words], env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def number_of_the_job(tmp_path):
    (script,) = tmp_path.glob("**/jobs/*/[0-9]*_submission.sh")
    return script.name.partition("_")[0]


def shape(value, depth=3):
    """The keys of a record, down to where the content of a run decides them."""
    if isinstance(value, dict) and depth:
        return {k: shape(v, depth - 1) for k, v in value.items() if k not in ("context", "strict", "configs")}
    if isinstance(value, list) and depth and value and isinstance(value[0], dict):
        return [shape(value[0], depth - 1)]
    return type(value).__name__


def test_a_matched_series_over_two_nodes_gives_the_record_of_a_local_one(environment, case, tmp_path, monkeypatch):
    plant = '{"candidate": {"slower": 0.2}}'
    path = case("useful_tokens_per_s_per_gpu")
    (found,) = in_an_allocation(environment, tmp_path, path, str(tmp_path / "results"), plant)
    monkeypatch.setenv("PLANT", plant)
    (local,) = confirm.bench_run(path, Options(results=tmp_path / "local", launcher=LocalLauncher(PLANTED), profile="cpu", seed=1))
    record = store.load(Path(found["path"]))
    assert found["status"] == local.status == "measured"
    assert record.derived.comparison.effect == pytest.approx(-0.2 / 1.2, abs=0.02)
    assert [(r.variant, r.role, r.pair) for r in record.measured.runs] == [
        (r.variant, r.role, r.pair) for r in local.evidence.measured.runs
    ], "the order of the plan is kept"
    assert shape(record.model_dump(mode="json")) == shape(local.evidence.model_dump(mode="json"))
    assert (record.measured.machine.nodes, record.measured.context["nodes"]) == (2, "n[1-2]")
    assert replay.replay(Path(found["path"])) == (True, [])


def test_every_end_of_a_step_is_an_outcome_and_later_runs_go_on(environment, case, tmp_path):
    faults = ("hang", "crash", "oom", "nan", "kill", "silent")
    plants = [*(json.dumps({"baseline": {"fault": f}, "candidate": {"fault": f}}) for f in faults), "cancel", "{}"]
    found = in_an_allocation(environment, tmp_path, case("dispatch_bytes_per_token_layer", 24), str(tmp_path / "results"), *plants)
    last = [series["outcomes"][-1] for series in found]
    assert [outcome for outcome, _ in last] == ["hang", "crash", "oom", "nan", "killed", "crash", "killed", "ok"]
    assert "ValueError: planted" in last[1][1]
    assert any(text in last[6][1] for text in ("ended from outside", "ended with SIGKILL")), "as the shells die first or last"
    assert [series["status"] for series in found] == ["error", "error", "inconclusive", *["error"] * 4, "measured"]
    logs = list((tmp_path / "results").glob("*/work/*/*/rank1.log"))
    assert logs, "the logs of failed runs stay"


def test_a_rank_whose_node_goes_down_is_not_said_to_hang(environment, case, tmp_path):
    try:
        (found,) = in_an_allocation(environment, tmp_path, case("dispatch_bytes_per_token_layer", 24), str(tmp_path / "results"), "node")
    finally:
        subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], env=environment, check=False)  # or it is back by itself
        wait_for(lambda: idle(environment) == 2, 60)
    ((outcome, message),) = found["outcomes"]
    assert (outcome, message.splitlines()[0]) == ("killed", "node n2 with rank 1 went away: Slurm says 'Node failure on n2'")


def idle(environment):
    words = ["sinfo", "--noheader", "--Node", "--format=%T"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.split().count("idle")


LOCKS = """
import os, socket, sys, time
from pathlib import Path
from playbook import files as locks
from playbook_bench.run.options import Options
from playbook_bench.launch.local import LocalLauncher
socket.gethostname = lambda: os.environ["SLURMD_NODENAME"]
who = locks.take(Path(sys.argv[1]))
print(f"{os.environ['SLURMD_NODENAME']}: {who or 'took it'}", flush=True)
time.sleep(0 if who else 5)
"""


def test_two_steps_of_a_job_do_not_share_a_folder_and_one_of_a_requeued_job_takes_it(environment, tmp_path):
    """A process outside stands for a node that died and whose lock a file server goes on holding."""
    (tmp_path / "locks.py").write_text(LOCKS, encoding="utf-8")
    (tmp_path / "saved").mkdir()
    step = f"srun --nodes=1 --ntasks=1 --exact --nodelist=%s '{sys.executable}' locks.py '{tmp_path}/saved' &"
    wait = f"until [ -e '{tmp_path}/held' ]; do sleep 0.2; done"
    lines = ["#!/bin/sh", wait, step % "n1", step % "n2", "wait", 'touch "ended${SLURM_RESTART_COUNT:-0}"', "sleep 100"]
    (tmp_path / "job.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["sbatch", "--parsable", "--requeue", "--nodes=2", "--exclusive", "--open-mode=append", f"--output={tmp_path / 'log'}"]
    number = subprocess.run(
        [*words, f"--chdir={tmp_path}", "job.sh"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.strip()
    dead = {**os.environ, "SLURM_JOB_ID": number, "SLURMD_NODENAME": "n9", "PYTHONPATH": environment["PYTHONPATH"]}
    with subprocess.Popen([sys.executable, "-c", LOCKS.replace("else 5", "else 300"), str(tmp_path / "saved")], env=dead) as other:
        wait_for(lambda: (tmp_path / "saved/.lock").exists() and (tmp_path / "saved/.lock").read_text(), 30)
        (tmp_path / "held").touch()
        wait_for(lambda: (tmp_path / "ended0").exists(), 60)
        subprocess.run(["scontrol", "requeue", number], env=environment, check=True)
        wait_for(lambda: (tmp_path / "ended1").exists(), 90)
        other.kill()
    subprocess.run(["scancel", number], env=environment, check=True)
    said = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("n")]
    kept = f"process {other.pid} on n9 of job {number}"
    assert sorted(said[:2]) == [f"n1: {kept}", f"n2: {kept}"]
    assert sorted("took it" in line for line in said[2:]) == [False, True]
    assert f" of job {number}, restart 1" in next(line for line in said[2:] if "took it" not in line)


def test_confirm_as_a_job_goes_on_after_it_was_queued_again(environment, cluster, tmp_path):
    claims = ("long-context-cp-sizing/L2", "moe-dispatcher-choice/W9.m")
    waiting = playbook(environment, tmp_path, "confirm", *claims, "--launcher", "slurm", "--cluster", cluster, "--profile", "cpu", "--json")

    def first_run():
        whole = [line for path in tmp_path.glob("**/journal/*.jsonl") for line in path.read_text().splitlines(True) if line.endswith("\n")]
        return next((row["run"]["run_id"] for row in map(json.loads, whole) if "run" in row), None)  # others are settled claims and headers

    cut = wait_for(first_run)
    number = number_of_the_job(tmp_path)
    subprocess.run(["scontrol", "requeue", number], env=environment, check=True)  # as a preemption does
    out, err = waiting.communicate(timeout=300)
    answer = json.loads(out)
    assert (answer["job"], answer["exit_code"]) == (number, waiting.returncode), err
    status = {c["claim"]: c["status"] for c in answer["claims"]}
    assert status["L2"] == "confirmed"
    assert status["W9.m"] in ("confirmed", "refuted")
    assert f"job {number} is pending" in err
    records = [store.load(r.path) for r in reversed(read([tmp_path / ".playbook/results"]))]
    assert sorted(e.measured.claim.id for e in records) == ["L2", "W9.m"], "what was settled before is not settled again"
    runs = records[-1].measured.runs
    assert len(runs) == 2
    assert cut not in {r.run_id for r in runs}, "a pair that was cut is run again whole"
    again = playbook(environment, tmp_path, "confirm", "--launcher", "slurm", "--job", number)
    assert again.wait(timeout=60) == answer["exit_code"]


def test_training_as_a_job_resumes_from_its_checkpoint(environment, cluster, tmp_path):
    config = str(repo_root() / "trainer/configs/qwen3_moe_tiny.yaml")
    changes = ["train.steps=40", "train.warmup_steps=2", "data.seq_len=32", "train.global_batch_size=2", "train.receipt=false"]
    saved = [f"output={tmp_path / 'run'}", f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2", "train.device=cpu"]
    options = ["--launcher", "slurm", "--ranks-per-node", "1", "--cluster", cluster, "--json"]
    waiting = playbook(environment, tmp_path, "train", config, *changes, *saved, *options)
    wait_for(lambda: list((tmp_path / "saved").glob("step_*")))
    # What Slurm sends before the time limit; the job queues itself again.
    subprocess.run(["scancel", "--batch", "--signal=USR2", number_of_the_job(tmp_path)], env=environment, check=True)
    out, err = waiting.communicate(timeout=300)
    assert (waiting.returncode, json.loads(out)["exit_code"]) == (0, 0), err
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41)), "no step is missing or done twice"
    assert json.loads((tmp_path / "run/summary.json").read_text())["world_size"] == 2
    starts = [sorted(p.name for p in f.glob("rank*.log")) for f in (tmp_path / "run/launches").iterdir()]
    assert starts == [["rank0.log", "rank1.log"]] * 2


def test_what_sbatch_refuses_is_one_line_and_leaves_nothing(environment, cluster, tmp_path):
    Path(cluster).write_text(CLUSTER.replace("partition: p", "partition: nowhere"), encoding="utf-8")
    done = playbook(environment, tmp_path, "confirm", "moe-dispatcher-choice/W9.m", "--launcher", "slurm", "--cluster", cluster)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (2, "")
    assert err.startswith("error: Slurm refused the job: ")
    assert "Invalid partition name specified" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("**/jobs/*"))


def test_a_job_is_submitted_and_left_alone(environment, cluster, tmp_path):
    words = ("confirm", "moe-dispatcher-choice/W9.m", "--launcher", "slurm", "--cluster", cluster, "--no-wait", "--json")
    out, _ = playbook(environment, tmp_path, *words).communicate(timeout=60)
    answer = json.loads(out)
    queued = subprocess.run(["squeue", "-h", "-o", "%i %j"], env=environment, capture_output=True, text=True, check=True).stdout
    subprocess.run(["scancel", answer["job"]], env=environment, check=True)
    assert f"{answer['job']} playbook-confirm" in queued
    left = playbook(environment, tmp_path, "confirm", "--launcher", "slurm", "--job", answer["job"])
    _, err = left.communicate(timeout=120)
    assert left.returncode == 5
    assert "ended without a result" in err


def of_one_step(environment, tmp_path, ranks_of_a_node, *words):
    """What a step on both nodes prints."""
    return batch(environment, tmp_path, f"srun --ntasks-per-node={ranks_of_a_node} {sys.executable} {' '.join(words)}")


def test_a_check_of_all_nodes_is_one_step_and_one_answer(environment, tmp_path):
    """Two healthy nodes pass; the answer has every rank's readings and the link between the nodes."""
    (answer,) = of_one_step(environment, tmp_path, 1, "-m", "playbook", "preflight", "--seconds", "0.3", "--json")
    assert answer["faults"] == []
    assert {r["host"] for r in answer["readings"]} == {"n1", "n2"}
    assert sorted((r["host"], r["other"][0]) for r in answer["readings"] if r["metric"] == "link_bytes_per_s") == [
        ("n1", "n2"),
        ("n2", "n1"),
    ]


CALIBRATED = """
import json, os
from playbook_trainer.calibrate import job_rows, joined
from playbook_trainer.preflight import meeting, place

placed = place(os.environ)
with joined(placed, meeting(placed), "cpu"):
    rows = job_rows(placed, "cpu", (1 << 20, 1 << 24))
if placed.rank == 0:
    print(json.dumps({"schema": "calibration/1", "device": {"name": "NVIDIA H100 80GB HBM3"}, "rows": rows}))
"""


def test_a_calibration_of_two_nodes_has_what_is_within_a_node_and_what_is_between(environment, tmp_path):
    """Collectives of the ranks of a node, and of those at one place of both nodes; a plan takes the network from the file."""
    (tmp_path / "calibrated.py").write_text(CALIBRATED, encoding="utf-8")
    (found,) = of_one_step(environment, tmp_path, 2, str(tmp_path / "calibrated.py"))
    between = [row for row in found["rows"] if row.get("nodes") == 2]
    assert len(found["rows"]) == 2 * len(between) == 20
    assert {row["ranks"] for row in found["rows"]} == {2}
    (tmp_path / "nodes.json").write_text(json.dumps(found), encoding="utf-8")
    assert "between 2 nodes, measured (nodes.json)" in machine(str(tmp_path / "nodes.json")).network
