"""Ranks as steps of an allocation, without Slurm: where they go, how their ends are read, what a journal gives back."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from guide_blocks import script

from playbook.errors import ConfigError, LaunchError, StoreError
from playbook.paths import repo_root
from playbook.records.case import load_case
from playbook.records.evidence import Machine, Run
from playbook_app.cli import outcomes
from playbook_bench.launch.local import Spec
from playbook_bench.launch.slurm import Allocation, SrunLauncher, allocation, exits
from playbook_bench.machine import detect, requirements
from playbook_bench.run.journal import Journal
from playbook_bench.run.schedule import RunSpec
from playbook_trainer.config import tree as trainer_config

TWO = Allocation("7", ("n1", "n2"), "10.0.0.1")


def option(words, name):
    return next(w.partition("=")[2] for w in words if w.startswith(f"--{name}="))


@pytest.mark.parametrize(
    ("ranks", "per_node", "nodes", "hosts"),
    [(2, None, "2", "n1,n2"), (8, 8, "1", "n1"), (16, 8, "2", "n1,n2"), (3, 2, "2", "n1,n2"), (1, None, "1", "n1")],
)
def test_ranks_fill_the_nodes_in_order(ranks, per_node, nodes, hosts):
    words = SrunLauncher(TWO, per_node).step(ranks, Path("/run"), ["rank"])
    assert (option(words, "nodes"), option(words, "nodelist"), option(words, "ntasks")) == (nodes, hosts, str(ranks))


def test_more_ranks_than_the_allocation_holds_are_refused():
    with pytest.raises(ConfigError, match="24 ranks at 8 a node need 3 nodes, and the allocation has 2"):
        SrunLauncher(TWO, 8).step(24, Path("/run"), ["rank"])


def test_ranks_get_their_variables_however_the_job_was_submitted_and_a_folder_with_a_percent_sign_is_no_pattern_of_srun():
    """srun takes what `sbatch --export=NONE` left in the job's environment for its own option, and each rank would be a run of one."""
    words = SrunLauncher(TWO).step(2, Path("/runs/50%n"), ["rank"])
    assert (option(words, "export"), option(words, "output")) == ("ALL", "/runs/50%%n/rank%t.log")


def test_ranks_that_slurm_could_not_start_did_not_end_well(tmp_path, monkeypatch):
    """Slurm's own words, and its exit code: 0 where the logs of the tasks cannot be opened."""
    spec = planted(tmp_path, monkeypatch, "echo 'srun: error: task 0 launch failed: Slurmd could not connect IO'")
    script(tmp_path / "squeue", "exit 1")  # a controller that does not answer does not say that the job ends
    with pytest.raises(LaunchError, match="task 0 launch failed: Slurmd could not connect IO"):
        SrunLauncher(TWO).run(spec)


def test_the_ranks_of_a_node_that_went_away_are_named(tmp_path, monkeypatch):
    spec = planted(tmp_path, monkeypatch, "touch $F/rank0.log; exit 1", "n1 allocated\nn2 down*", ranks=12)
    found = SrunLauncher(TWO, 8).run(spec)
    assert found.message.startswith("node n2 with rank 8 to 11 went away")


def planted(folder, monkeypatch, srun, sinfo="n1 allocated\nn2 allocated", ranks=2, **limits):
    """A run, and Slurm's commands as scripts: what a step does, and what is said of the nodes. `$F` is the run's folder."""
    texts = {"srun": f"F={folder / 'run'}\n{srun}", "sinfo": f"cat <<'END'\n{sinfo}\nEND", "squeue": "echo RUNNING", "scancel": "exit 0"}
    for name, text in texts.items():
        script(folder / name, text)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    config = trainer_config.load(repo_root() / "trainer/configs/qwen3_moe_tiny.yaml", {})
    return Spec(config, ranks, folder / "run", **limits)


HUNG = 'touch $F/rank0.log $F/rank1.log; echo "code 6" > $F/rank0.log; echo 6 > $F/rank0.exit; exit 6'
LATE = 'touch $F/rank0.log $F/rank1.log; echo 0 > $F/rank0.exit; echo "srun: First task exited 20s ago"; exit 143'


@pytest.mark.parametrize(
    ("srun", "sinfo", "outcome", "first"),
    [
        (f'echo "srun: error: Node failure on n2"; {HUNG}', "", "killed", "node n2 with rank 1 went away: Slurm says 'Node failure on n2'"),
        (HUNG, "n1 mixed\nn2 allocated*", "killed", "node n2 with rank 1 went away: it does not respond, its state is 'allocated*'"),
        (LATE, "n1 mixed\nn2 down*", "killed", "node n2 with rank 1 went away: it does not respond, its state is 'down*'"),
        ("touch $F/rank0.log; exec sleep 60", "n1 down*\nn1 down*", "killed", "node n1 with rank 0 went away"),
        (HUNG, "n1 mixed\nn2 draining", "hang", "rank 0 ended with exit code 6"),
        (HUNG, "n1 mixed", "hang", "rank 0 ended with exit code 6"),
        (LATE, "n1 mixed\nn2 allocated", "hang", "rank 1 did not end within 20 s of the others"),
        ("touch $F/rank0.log; exec sleep 60", "n1 mixed\nn2 mixed", "hang", "no step for 1 s, after step 0"),
        # The shell in front of a rank was killed with it, so that it has left no code.
        (f'echo "srun: error: n2: task 1: Killed"; {LATE}', "", "killed", "rank 1 went away: Slurm says 'n2: task 1: Killed'"),
        (f'echo "srun: error: n2: task 1: Out Of Memory"; {LATE}', "", "killed", "rank 1 went away: Slurm says 'n2: task 1: Out Of Memory'"),
        (f'{LATE.replace("exit 143", "")}echo "srun: error: n2: task 1: Killed"; exit 137', "", "hang", "rank 1 did not end within 20 s"),
        ("touch $F/rank0.log $F/rank1.log", "n1 mixed", "killed", "the step was ended from outside"),
        ('touch $F/rank0.log; echo "srun: StepId=2.3 task 1: unknown"', "", "killed", "rank 1 went away: Slurm does not know what has become of it"),
        (HUNG.replace("6", "4"), "n1 mixed\nn2 down*", "oom", "rank 0 ended with exit code 4"),
    ],
)  # fmt: skip
def test_a_node_or_a_rank_that_went_away_is_no_hang(srun, sinfo, outcome, first, tmp_path, monkeypatch):
    spec = planted(tmp_path, monkeypatch, srun, sinfo, timeout_s=1000, stall_s=1.0 if "sleep" in srun else 600.0)
    found = SrunLauncher(TWO, grace_s=1.0).run(spec)
    assert (found.outcome, found.message.splitlines()[0][: len(first)]) == (outcome, first)


def test_an_allocation_is_needed(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set"):
        allocation()


@pytest.mark.parametrize(
    ("codes", "own"),
    [
        (["0", "0"], [0, 0]),
        (["4", "137"], [4, None]),  # the other was killed because the first ended
        (["137", ""], [-9, None]),  # the kernel killed it
        (["143", "143"], [None, None]),  # ended by Slurm or by the launcher
        (["0", None], [0, None]),
        (["nonsense", "1"], [None, 1]),
    ],
)
def test_only_ranks_that_ended_by_themselves_say_how_a_run_ended(codes, own, tmp_path):
    for index, code in enumerate(codes):
        if code is not None:
            (tmp_path / f"rank{index}.exit").write_text(code + "\n", encoding="ascii")
    assert [r.exit_code for r in exits(tmp_path, 2)] == own


def test_nodes_make_one_machine_and_a_profile_takes_part_of_one_or_whole_ones(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = Machine(
        name="h200x8", description="8 x NVIDIA H200, NVLink", gpus=8, gpu="NVIDIA H200", interconnect="nvlink", cpu="x", cores=64
    )
    both = detect.over_nodes(node, 2)
    assert (both.name, both.gpus, both.nodes) == ("h200x16", 16, 2)
    assert detect.over_nodes(node, 1) == node
    assert (requirements.restrict(both, "h200x4").nodes, requirements.restrict(both, "h200x16").nodes) == (1, 2)
    assert detect.visible_devices(requirements.restrict(both, "h200x16"), "h200x16")["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    with pytest.raises(ConfigError, match="needs 12 x H200"):
        requirements.restrict(both, "h200x12")
    assert requirements.restrict(both, "cpu").nodes == 2


def a_run(number, variant, pair):
    return Run(
        run_id=f"{number}",
        variant=variant,
        role="measure",
        pair=pair,
        position=number,
        outcome="ok",
        started="",
        wall_s=1,
        ranks=2,
        steps_wanted=1,
        config_sha="c",
    )


@pytest.fixture
def case():
    return load_case("moe-dispatch-bytes")


PAIR = (("baseline", 0), ("candidate", 0))


def begun(journal, case, *launches):
    """A series of these launches, kept in the journal."""
    series = journal.series(case, "cpu", 11)
    for number, (variant, pair) in enumerate(launches):
        series.add(a_run(number, variant, pair), {"env": {"A": "1"}})
    return series


def test_a_journal_gives_back_whole_pairs_on_the_same_nodes(case, tmp_path):
    first = begun(Journal(tmp_path / "j", ["n1", "n2"]), case, *PAIR, ("candidate", 1))
    with first.lines.path.open("a") as f:
        f.write('{"run": {"run_id"')  # killed while writing
    again = Journal(tmp_path / "j", ["n1", "n2"]).series(case, "cpu", 12)
    assert again.seed == 11
    kept = again.take(RunSpec("baseline", "measure", 0), "c")
    assert (kept.run.run_id, kept.strict) == ("0", {"env": {"A": "1"}})
    assert again.take(RunSpec("baseline", "measure", 0), "c") is None, "each run stands for one launch"
    assert again.take(RunSpec("candidate", "measure", 0), "other") is None, "of the same configuration"
    assert again.take(RunSpec("candidate", "measure", 1), "c") is None, "a pair that was cut is run again"
    assert all(json.loads(line) for line in again.lines.path.read_text().splitlines())
    again.add(a_run(2, "candidate", 1), {})
    again.add(a_run(3, "baseline", 1), {})
    third = Journal(tmp_path / "j", ["n1", "n2"]).series(case, "cpu", 13)
    assert third.take(RunSpec("baseline", "measure", 1), "c").run.run_id == "3"


def test_a_block_without_the_value_that_does_not_fit_is_whole(tmp_path):
    sweep = load_case("cp-sizes-at-16k")
    first = Journal(tmp_path, ["n1"]).series(sweep, "cpu", 11)
    burn_in = [a_run(n, v, None).model_copy(update={"role": "burn_in"}) for n, v in enumerate(sweep.variants)]
    burn_in[2] = burn_in[2].model_copy(update={"outcome": "oom"})
    for run in (*burn_in, a_run(3, "1", 0), a_run(4, "2", 0)):
        first.add(run, {})
    again = Journal(tmp_path, ["n1"]).series(sweep, "cpu", 12)
    assert again.take(RunSpec("2", "measure", 0), "c").run.run_id == "4"
    again.add(a_run(5, "2", 1), {})
    third = Journal(tmp_path, ["n1"]).series(sweep, "cpu", 13)
    assert third.take(RunSpec("2", "measure", 1), "c") is None, "this one was cut"
    assert third.take(RunSpec("1", "measure", 0), "c").run.run_id == "3"


def test_a_full_disk_takes_no_runs_from_a_journal(case, tmp_path):
    first = begun(Journal(tmp_path, ["n1"]), case, *PAIR, ("candidate", 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (first.lines.path.stat().st_size // 3, hard))
    try:
        with pytest.raises(StoreError, match=r"\.jsonl cannot be written"):
            Journal(tmp_path, ["n1"]).series(case, "cpu", 12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = Journal(tmp_path, ["n1"]).series(case, "cpu", 13)
    assert again.seed == 11
    assert again.take(RunSpec("candidate", "measure", 0), "c").run.run_id == "1"
    assert [p.name for p in tmp_path.iterdir() if p.name != ".lock"] == [first.lines.path.name]


@pytest.mark.parametrize(("lost", "whole"), [(1, True), (2, False), (40, False)])
def test_half_a_line_in_the_list_of_verdicts_costs_that_verdict_alone(lost, whole, tmp_path):
    """A line that only lacks its end is whole."""
    first = Journal(tmp_path, ["n1"])
    first.settle({"B": Path("/results/b.json")})
    first.settle({"A": Path("/results/a.json")})
    path = tmp_path / "settled.jsonl"
    path.write_bytes(path.read_bytes()[:-lost])
    again = Journal(tmp_path, ["n1"])
    assert ("A" in again.settled) is whole
    again.settle({"C": Path("/results/c.json")})
    third = Journal(tmp_path, ["n1"]).settled
    assert third == again.settled | {"C": Path("/results/c.json")}
    assert third["B"] == Path("/results/b.json")


@pytest.mark.parametrize(
    "rest", [b"\xff\xfe\x00", b"\x00" * 512, b"{}", b"[" * 100_000], ids=["no text", "zeros", "another object", "deep"]
)
def test_what_a_lost_machine_leaves_at_the_end_takes_no_runs_from_a_journal(rest, case, tmp_path):
    first = begun(Journal(tmp_path, ["n1"]), case, *PAIR)
    with first.lines.path.open("ab") as f:
        f.write(rest)
    again = Journal(tmp_path, ["n1"]).series(case, "cpu", 12)
    assert again.seed == 11
    assert again.take(RunSpec("candidate", "measure", 0), "c").run.run_id == "1"


@pytest.mark.parametrize("attack", ["changed", "left out", "moved", "another seed"])
def test_a_journal_that_was_altered_is_refused(attack, case, tmp_path):
    """Runs of a journal go into a record as they stand: a line that was changed, left out or moved does not follow the one before it."""
    path = begun(Journal(tmp_path, ["n1"]), case, *PAIR, ("baseline", 1), ("candidate", 1)).lines.path
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if attack == "changed":
        rows[2]["run"]["wall_s"] = 0.5
    elif attack == "left out":
        del rows[1:3]
    elif attack == "moved":
        rows[1:3] = rows[2:0:-1]
    else:
        rows[0]["seed"] = 12
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = path.read_text()
    with pytest.raises(StoreError, match=r"line \d of .*jsonl was altered, or the one before it; remove the folder to start over"):
        Journal(tmp_path, ["n1"]).series(case, "cpu", 11)
    assert path.read_text() == written


def test_a_list_of_verdicts_that_names_another_record_is_refused(tmp_path):
    Journal(tmp_path, ["n1"]).settle({"A": Path("/results/a.json")})
    path = tmp_path / "settled.jsonl"
    path.write_text(path.read_text().replace("a.json", "b.json"))
    with pytest.raises(StoreError, match=r"line 1 of .*settled.jsonl was altered"):
        Journal(tmp_path, ["n1"])


def test_runs_that_cannot_be_read_now_are_not_written_over(case, tmp_path):
    journal = Journal(tmp_path, ["n1"])
    (tmp_path / f"{case.id}.jsonl").mkdir()
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        journal.series(case, "cpu", 11)


HOLDER = """
import socket
import sys
from pathlib import Path
from playbook_bench.run.journal import Journal
socket.gethostname = lambda: sys.argv[2]
journal = Journal(Path(sys.argv[1]), ["n1"])
print("held", flush=True)
sys.stdin.read()
"""


def test_two_commands_do_not_share_a_journal(tmp_path):
    said = "is in use by process {} on .*; wait until that has ended, or name another folder"
    with held(tmp_path, "here") as other, pytest.raises(StoreError, match=said.format(other.pid)):
        Journal(tmp_path, ["n1"])
    Journal(tmp_path, ["n1"]).settle({"A": Path("/results/a.json")})


@pytest.mark.parametrize(
    ("job", "restart", "host", "goes_on"),
    [
        ("7", "1", "n2", True),
        ("7", None, "n2", False),  # a second step of the same start, on another of its nodes
        ("7", "0", "n2", False),
        ("7", "x", "n2", False),
        ("8", "1", "n2", False),
        ("7", "1", "n1", False),  # the host lives, so a second command does on it
        (None, None, "n2", False),
    ],
)
@pytest.mark.sample("7-1-n2-True", "7-1-n1-False")
def test_a_job_that_was_queued_again_takes_its_journal_from_a_node_that_died(job, restart, host, goes_on, tmp_path, monkeypatch):
    """A file server may hold the lock of a node that is gone."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with held(tmp_path, "n1"):
        monkeypatch.setattr("socket.gethostname", lambda: host)
        monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID")
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart) if restart else None
        with nullcontext() if goes_on else pytest.raises(StoreError, match=r"is in use by process .* on n1 of job 7;"):
            Journal(tmp_path, [host])


def test_of_two_steps_of_a_job_that_was_queued_again_one_takes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with held(tmp_path, "n1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with held(tmp_path, "n2") as first:
            monkeypatch.setattr("socket.gethostname", lambda: "n3")
            with pytest.raises(StoreError, match=rf"is in use by process {first.pid} on n2 of job 7, restart 1;"):
                Journal(tmp_path, ["n3"])
        Journal(tmp_path, ["n3"])
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


@pytest.mark.full
def test_of_steps_that_come_at_once_one_takes_the_folder_and_the_others_name_it(tmp_path):
    """Each round queues the job again: the round before holds the lock on nodes that are gone."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE, str(tmp_path)], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == 40
    for number, said in enumerate(rounds):
        (taker,) = [step for step, who in said.items() if not who]
        assert {re.sub(r"process \d+ ", "", who) for who in said.values() if who} == {
            f"on {taker} of job 7" + (f", restart {number}" if number else "")
        }


AT_ONCE = """
import json, multiprocessing as mp, os, socket, sys
from pathlib import Path
from playbook import files

def step(host, number, together, said, over):
    os.environ.update(SLURM_JOB_ID="7", SLURM_RESTART_COUNT=str(number))
    socket.gethostname = lambda: host
    together.wait()
    try:
        said.put((host, files.take(Path(sys.argv[1]))))
    except BaseException as e:
        said.put((host, repr(e)))
    over.wait()

fork, over = mp.get_context("fork"), mp.get_context("fork").Event()
for number in range(40):
    together, said = fork.Barrier(4), fork.Queue()
    steps = [fork.Process(target=step, args=(f"n{number}-{i}", number, together, said, over), daemon=True) for i in range(4)]
    for process in steps:
        process.start()
    print(json.dumps(dict(said.get() for _ in steps)), flush=True)
over.set()
"""


@contextmanager
def held(folder, host):
    """A process on that host that uses the folder as a journal, by whatever Slurm's variables say now."""
    line = [sys.executable, "-c", HOLDER, str(folder), host]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_forked_runs_do_not_go_on_with_a_series_of_fresh_processes(case, tmp_path):
    begun(outcomes.journal(tmp_path, None), case, *PAIR)
    assert outcomes.journal(tmp_path, None, True).series(case, "cpu", 12).seed == 12
    assert outcomes.journal(tmp_path, None, True).series(case, "cpu", 13).seed == 12


def test_runs_on_other_nodes_are_not_of_the_same_series(case, tmp_path):
    begun(Journal(tmp_path / "j", ["n1", "n2"]), case, *PAIR)
    moved = Journal(tmp_path / "j", ["n1", "n3"]).series(case, "cpu", 12)
    assert moved.seed == 12
    assert moved.take(RunSpec("baseline", "measure", 0), "c") is None


@pytest.mark.parametrize("text", ["[1]\n", "[1]", "words", "words\n", '{"A": 1}', '{\n "A": "/a.json"\n}\n'])
def test_a_folder_that_is_no_journal_is_refused(text, tmp_path):
    (tmp_path / "settled.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match="cannot be used"):
        Journal(tmp_path, ["n1"])
    assert (tmp_path / "settled.jsonl").read_text(encoding="utf-8") == text
