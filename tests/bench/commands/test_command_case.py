"""Cases that launch a command: read from YAML, launched for real, judged, kept and replayed; what is wrong with a launch is never a figure."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_process import run

from playbook.errors import ConfigError, FileError
from playbook.processes import listed
from playbook.records.case import load_case
from playbook_bench.run import aa, confirm, replay
from playbook_bench.run.options import Options
from playbook_bench.trace.reports import timeline_from_file
from playbook_bench.variants import program

pytestmark = pytest.mark.usefixtures("planned")

SCRIPT = Path(__file__).parents[2] / "support" / "ranks" / "foreign_script.py"
CASE = """
id: foreign
kind: command
summary: A script of somebody else, with and without its fast path.
command: [PYTHON, SCRIPT, --launch, "{run}", --slower, "{slower}", --steps, "{steps}"]
baseline: {slower: 1.0}
candidate: {slower: 0, arguments: [--fast]}
steps: {log: jsonl, count: 20, warm_up: 4}
metric: step_seconds
profiles: {cpu: {steps: 20}}
activation:
  baseline: {forbid: [{log: the fast path is on}]}
  candidate: {require: [{log: the fast path is on}]}
budget: {pairs: [2], launch_timeout_s: 100}
"""
PROOF = CASE[CASE.index("activation:") : CASE.index("budget:")]


@pytest.fixture
def case(tmp_path):
    def write(*changes):
        text = CASE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "foreign.yaml"
        path.write_text(text.replace("PYTHON", sys.executable).replace("SCRIPT", str(SCRIPT)))
        return str(path)

    return write


def bench(path, tmp_path):
    (found,) = confirm.bench_run(path, Options(profile="cpu", results=tmp_path / "results", seed=1))
    return found


def test_a_planted_gain_is_measured_and_the_record_replays(case, tmp_path):
    found = bench(case(), tmp_path)
    effect = found.evidence.derived.comparison
    assert found.status == "measured", found.evidence.derived.verdict.sentence
    assert effect.low < 1.0 < effect.high
    assert [c.ok for c in found.evidence.derived.receipts] == [True, True]
    assert "not vouched for: data" in found.evidence.derived.verdict.sentence
    same, differences = replay.replay(found.path)
    assert same, differences
    run = found.evidence.measured.runs[-1]
    strict = found.evidence.measured.strict[run.strict_sha]
    assert (strict["python"], strict["trainer"]["log"], strict["trainer"]["world_size"]) == (
        f"{sys.version_info.major}.{sys.version_info.minor}",
        "jsonl",
        1,
    )
    assert found.evidence.measured.configs[run.config_sha]["command"][1] == str(SCRIPT)


@pytest.mark.parametrize(
    ("fault", "status", "word"),
    [
        ("no path", "error", "the fast path is on"),
        ("nan loss", "error", "loss"),
        ("ends early", "error", "step"),
        ("no throughput", "error", "arrived in bursts"),
        ("nan throughput", "error", "seconds"),
        ("no memory", "inconclusive", "out of memory"),
        ("fewer tokens", "inconclusive", "work"),
        ("other loss", "inconclusive", "loss"),
    ],
)
@pytest.mark.sample("no path-error-the fast path is on", "ends early-error-step")
def test_what_is_wrong_with_the_candidate_is_no_figure(case, tmp_path, fault, status, word):
    found = bench(case(("[--fast]", f'[--fast, --fault, "{fault}"]')), tmp_path)
    assert found.status == status
    assert word in found.evidence.derived.verdict.sentence
    assert found.evidence.derived.comparison is None


def test_a_journal_that_is_named_lets_a_series_go_on_where_there_is_no_git(case, tmp_path, monkeypatch, capsys):
    """Whoever names it vouches for the files. Without it nobody can tell that they are as they were."""
    monkeypatch.chdir(tmp_path)
    # Seed 1 draws B A A B, so that one pair is no more than that.
    words = ["bench", "run", case(), "--profile", "cpu", "--results", "results", "--journal", "kept", "--seed", "1"]
    for more in (["--pairs", "1"], []):
        run(capsys, *words, *more)
    records = sorted((tmp_path / "results" / "cpu").glob("*.json"))
    first, second = ([run["started"] for run in json.loads(path.read_text())["measured"]["runs"]] for path in records)
    assert len(second) > len(first)
    assert second[: len(first)] == first


def test_proofs_are_checked_by_one_launch_of_each_and_one_that_is_not_met_is_shown_with_what_was_seen(case, capsys):
    assert [proof.ok for proof in aa.prove([case()])] == [True, True]
    code, out, err = run(capsys, "bench", "check", case(("[--fast]", '[--fast, --fault, "no path"]')), "--profile", "cpu", "--json")
    assert code == 5
    assert [(r["variant"], r["outcome"], r["ok"]) for r in json.loads(out)] == [("baseline", "ok", True), ("candidate", "ok", False)]
    assert "require line the fast path is on, expected >= 1, found 0" in err


def test_a_case_that_launches_nothing_has_no_proofs():
    with pytest.raises(ConfigError, match="has no proofs to check"):
        aa.prove(["cp-dp-floor"], profile="cpu")


def test_a_hang_ends_at_the_limit_and_leaves_no_process(case, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "time", time)  # the limit is of the machine's own clock
    monkeypatch.delenv("PLANNED_CLOCK")
    found = bench(case(("[--fast]", "[--fast, --fault, hang]"), ("launch_timeout_s: 100", "launch_timeout_s: 1")), tmp_path)
    assert found.status == "error"
    assert "did not end within 1 s" in found.evidence.derived.verdict.sentence


@pytest.mark.full
def test_a_command_ends_with_the_harness_even_where_that_is_killed(case, tmp_path):
    path = case(("slower: 1.0}", 'slower: 1.0, arguments: [--fault, hang, --out, "{run}/none"]}'))
    own = subprocess.Popen(
        [sys.executable, "-m", "playbook", "bench", "run", path, "--results", str(tmp_path / "results")], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 600
    while not (children := _running(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children
    own.kill()
    own.wait()
    while _running(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _running(tmp_path)


def _running(folder):
    found = []
    for process in listed():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(SCRIPT).encode() in words and any(str(folder).encode() in word for word in words):
            found.append(int(process.name))
    return found


def test_a_strangers_process_that_ends_while_its_files_are_looked_at_stops_no_launch(case, monkeypatch):
    """Linux says ESRCH of such a file, which the harness met where it looks for what a command has left behind."""

    def ending(real):
        def look(path, *words, **more):
            if path.parts[1:2] == ("proc",) and path.parts[2:3] != (str(os.getpid()),):
                raise ProcessLookupError(3, "No such process", str(path))
            return real(path, *words, **more)

        return look

    for name in ("stat", "read_bytes"):
        monkeypatch.setattr(Path, name, ending(getattr(Path, name)))
    assert [proof.outcome for proof in aa.prove([case()], profile="cpu")] == ["ok", "ok"]


def test_what_a_command_leaves_behind_ends_with_the_launch_whatever_it_did_to_live_on(tmp_path, monkeypatch):
    """It would take its share of the machine from every later launch, and holds the pipe that its output goes into."""
    started = tmp_path / "started"
    script = tmp_path / "leaves.py"
    script.write_text(
        "import json, subprocess, sys\n"
        "def start(words, env): return subprocess.Popen(words, start_new_session=True, env=env).pid\n"
        # The second has no variable of its launch and no parent: it is the child of a process that ends at once.
        "twice = 'import subprocess; print(subprocess.Popen([\\'sleep\\', \\'600\\'], start_new_session=True, stdout=2).pid)'\n"
        "second = subprocess.run([sys.executable, '-c', twice], env={}, stdout=subprocess.PIPE, text=True).stdout.strip()\n"
        f"print(start(['sleep', '600'], None), second, file=open({str(started)!r}, 'a'))\n"
        "for i in range(10): print(json.dumps({'step': i, 'seconds': (1 + i % 3 / 100) / 1e4, 'loss': 1.0, 'tokens': 1}))\n"
    )
    path = tmp_path / "leaves.yaml"
    path.write_text(
        f"id: leaves\nkind: command\nsummary: A daemon.\ncommand: [{sys.executable}, {script}]\nbaseline: {{}}\n"
        "candidate: {arguments: [x]}\nmetric: step_seconds\nprofiles: {cpu: {}}\n"
    )
    closed, finish = [], program._PrintedOutput.finish
    monkeypatch.setattr(program._PrintedOutput, "finish", lambda self: closed.append(finish(self) or not self._thread.is_alive()))
    assert [proof.outcome for proof in aa.prove([str(path)], profile="cpu")] == ["ok", "ok"]
    assert closed == [True, True], "nobody holds the pipe"
    left = started.read_text().split()
    assert len(left) == 4
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()]


@pytest.mark.full
def test_steps_are_read_from_a_file_of_the_launch(case, tmp_path):
    found = bench(
        case(
            ('"{steps}"]', '"{steps}", --out, "{run}/log.jsonl"]'),
            ("{log: jsonl, count: 20, warm_up: 4}", '{file: "{run}/log.jsonl"}'),
        ),
        tmp_path,
    )
    assert found.status == "measured", found.evidence.derived.verdict.sentence
    assert {r.steps_wanted for r in found.evidence.measured.runs} == {16}


@pytest.mark.parametrize("kept", ["steps", "trace"])
def test_a_file_that_an_earlier_launch_left_is_no_answer_of_this_one(case, tmp_path, monkeypatch, kept):
    """The command leaves nothing in these places, where sound files of before lie."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": i, "seconds": 1 + i % 3 / 100}) + "\n" for i in range(20)))
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    of = {"steps": ("steps: {log: jsonl", "steps: {file: log.jsonl"), "trace": ("budget:", "trace: {file: trace.json}\nbudget:")}
    (found, _) = aa.prove([case(of[kept])])
    assert found.outcome == "crash"
    assert "is as it was before the launch" in found.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"{slower}"', '"{slowr}"', "nothing gives {slowr} a value; did you mean"),
        ("arguments: [--fast]", "arguments: [--fast, --api-key, x9y8z7w6]", "the value of --api-key looks like a secret"),
        ("command: [PYTHON", "command: [PYTHON, --auth=x9y8z7w6", "the value of --auth looks like a secret"),
        ("arguments: [--fast]", "arguments: --fast", "expected a list of texts"),
        ("arguments: [--fast]", "environment: {HF_TOKEN: x}", "looks like a secret"),
        ("command: [PYTHON", "trainer: x\ncommand: [PYTHON", "belongs to a case that launches a command"),
        ("require: [{log: the fast path is on}]", "require: [{kernel: gemm}]", "looked for in a trace"),
        ("require: [{log: the fast path is on}]", "require: [{counter: x, count: 1}]", "counts nothing by itself"),
        ("require: [{log: the fast path is on}]", "require: [{log: '(a+)+'}]", "repeats a group"),
    ],
)
def test_mistakes_in_a_case_are_told_with_their_place(case, old, new, message):
    with pytest.raises(FileError) as problem:
        load_case(case((old, new)))
    assert message in str(problem.value)


@pytest.mark.full
def test_kernels_ranges_and_collectives_are_proven_by_the_trace_of_the_discarded_launch(case, tmp_path):
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "user_annotation", "name": "experts", "ts": 0, "dur": 100, "pid": 1, "tid": 1},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": 10,
                "dur": 1,
                "pid": 1,
                "tid": 1,
                "args": {"correlation": 1},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "cutlass_grouped_gemm",
                "ts": 20,
                "dur": 5,
                "pid": 0,
                "tid": 7,
                "args": {"correlation": 1},
            },
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": 30,
                "dur": 1,
                "pid": 1,
                "tid": 1,
                "args": {"correlation": 2},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "ncclDevKernel_AllReduce_Sum",
                "ts": 40,
                "dur": 5,
                "pid": 0,
                "tid": 7,
                "args": {"correlation": 2},
            },
        ]
    }
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    rules = "[{kernel: grouped_gemm}, {range: experts}, {collective: all_reduce}, {log: the fast path is on}]"
    changes = [
        ("require: [{log: the fast path is on}]", f"require: {rules}"),
        ("budget:", f'trace: {{file: "{{run}}/trace.json", arguments: [--trace-of, {tmp_path}/trace.json]}}\nbudget:'),
    ]
    found = bench(case(*changes), tmp_path)
    assert found.status == "measured", found.evidence.derived.verdict.sentence
    assert {c.rule.split()[1] for c in found.evidence.derived.receipts if c.variant == "candidate"} == {
        "kernel",
        "experts",
        "all_reduce",
        "line",
    }
    proofs = [run.run_id for run in found.evidence.measured.runs if run.role == "burn_in"]
    kept = {path.name: path for path in (tmp_path / "results" / "traces").iterdir()}
    assert sorted(kept) == sorted(f"{run}-trace.json.gz" for run in proofs)
    assert all(len(timeline_from_file(path).ops) == 2 for path in kept.values())
    trace["traceEvents"] = trace["traceEvents"][:1]
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    without = bench(case(*changes), tmp_path)
    assert without.status == "error"
    assert "kernel grouped_gemm" in without.evidence.derived.verdict.sentence


def test_a_command_that_is_not_there_is_one_message(case, tmp_path):
    with pytest.raises(Exception, match="could not be started"):
        bench(case(("command: [PYTHON", "command: [no-such-program, PYTHON")), tmp_path)


def test_it_runs_in_the_users_own_environment(case, tmp_path, monkeypatch):
    """Threads, devices and import paths are the user's, but for what a profile hides."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LAUNCH", "x")
    script = tmp_path / "show.py"
    script.write_text(
        "import os, json\nprint('threads', os.environ.get('OMP_NUM_THREADS'), os.environ['LAUNCH'])\n"
        "for i in range(10): print(json.dumps({'step': i, 'seconds': (1 + i % 3 / 100) / 1e4, 'loss': 1.0, 'tokens': 1}))\n"
    )
    path = case(
        ('SCRIPT, --launch, "{run}", --slower, "{slower}", --steps, "{steps}"', f'{script}, "{{slower}}", "{{steps}}"'),
        ("count: 20, ", ""),
        (PROOF, "activation: {every: {require: [{log: threads None x}]}}\n"),
    )
    assert all(proof.ok for proof in aa.prove([path]))
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_rule_that_both_variants_meet_proves_nothing(case, tmp_path, capsys):
    """A flag that the script ignores, and a pattern that is found in a longer number of the other variant's line as well."""
    path = case(("  baseline: {forbid: [{log: the fast path is on}]}\n", ""), ("slower: 1.0}", "slower: 1.0, arguments: [--fast]}"))
    code, out, _ = run(capsys, "bench", "check", path)
    assert code == 5
    assert "both variants print what proves the candidate, so nothing shows that its path ran: expected" in out
    found = bench(path, tmp_path)
    assert (found.status, found.evidence.derived.verdict.reason) == ("error", "not_activated")
    assert found.evidence.derived.verdict.sentence.startswith("both variants print what proves the candidate")
    assert replay.replay(found.path) == (True, [])


def test_a_case_for_the_gate_is_checked_by_its_baseline_alone_and_runs_as_no_pair(case, capsys):
    path = case(
        ("candidate: {slower: 0, arguments: [--fast]}\n", ""),
        (PROOF, "activation: {baseline: {forbid: [{log: the fast path is on}]}}\n"),
    )
    code, shown, _ = run(capsys, "bench", "check", path)
    assert code == 0
    assert [line.split("  ")[1] for line in shown.splitlines() if line.endswith("proven")] == ["baseline"]
    assert "names no candidate, as a case for the gate need not: its baseline alone was launched" in shown
    code, _, err = run(capsys, "bench", "run", path)
    assert code == 2
    assert "playbook gate --baseline REF --case FILE" in err
