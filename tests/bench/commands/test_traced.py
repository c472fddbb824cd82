"""`playbook ab --trace`: one more launch of each command leaves a trace, and the wall that each runs into is told."""

import json
import sys

import pytest
from in_process import run

from playbook.errors import ConfigError, LaunchError, PlaybookError
from playbook.records.commands import Traced
from playbook_bench.run import ab

SCRIPT = """
import json, sys, time
steps, idle = 10, float(sys.argv[1])
for i in range(steps):
    time.sleep(0.01)
    print(json.dumps({"step": i, "seconds": 0.01 + i % 3 / 1e5, "loss": 1.0, "tokens": 8}))
if "--profile" in sys.argv:
    events = []
    for i in range(steps):  # 10 ms a step: the GPU waits for a late launch, then computes
        at, wait = 10_000 * i, 10_000 * idle if i >= 2 else 9_900
        events.append({"ph": "X", "pid": 7, "tid": 7, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + wait - 5, "dur": 2, "args": {"correlation": i + 1}})
        events.append({"ph": "X", "pid": 0, "tid": 1, "cat": "kernel", "name": "nvjet_gemm", "ts": at + wait, "dur": 10_000 - wait, "args": {"correlation": i + 1}})
    json.dump({"traceEvents": events}, open(sys.argv[sys.argv.index("--profile") + 1], "w"))
"""


@pytest.fixture
def command(tmp_path, monkeypatch, planned):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return lambda idle: [sys.executable, "train.py", str(idle)]


def case(command, a=0.4, b=0.02):
    return ab.case_of(ab.question([*command(a), "--vs", *command(b)], [], []), "here")


def test_the_traced_launches_say_which_wall_each_command_runs_into(command):
    found = ab.walls_of(case(command), "here", Traced(file="{run}/t.json", arguments=["--profile", "{run}/t.json"]))
    assert {variant: walls.wall for variant, walls in found.items()} == {"baseline": "host-bound", "candidate": "compute-bound"}
    # No range marks a step, so the eight timed steps of the log are what counts: the first two, which are slow to start, do not.
    assert found["baseline"].num_steps == 8
    assert found["baseline"].span_ms == pytest.approx(10, rel=0.01)
    assert found["baseline"].host_idle == pytest.approx(0.4, abs=0.01)


def test_what_keeps_a_trace_from_being_made_is_one_message(command, monkeypatch):
    with pytest.raises(PlaybookError, match=r"no trace|left no trace"):
        ab.walls_of(case(command), "here", Traced(file="{run}/none.json"))
    with pytest.raises(LaunchError, match="traced launch of the baseline"):
        ab.walls_of(case(command, a="x"), "here", Traced(file="{run}/t.json"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="nsys is not on PATH"):
        ab.walls_of(case(command), "here", Traced(file="nsys"))


@pytest.mark.full
def test_the_command_prints_walls_and_its_answer_stands_without_them(command, capsys):
    words = ["--json", "--seed", "1", "--loss", "any"]
    for more, expected in (
        (["--trace", "{run}/t.json", "--trace-with=--profile", "--trace-with={run}/t.json"], 2),
        (["--trace", "gone.json"], 0),
    ):
        code, out, err = run(capsys, "ab", *words, *more, "--", *command(0.4), "--vs", *command(0.02))
        found = json.loads(out)
        assert (code, found["verdict"]) == (0, "equivalent"), err
        assert len(found.get("walls", {})) == expected
        assert ("no trace:" in err) == (not expected)
