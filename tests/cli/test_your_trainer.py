"""The guide for other trainers: its files are written as it shows them, and its console blocks run. The workflows that it offers run in a clone."""

import re
import shlex

import pytest
import yaml
from guide_blocks import consoles

from playbook.paths import data_root, repo_root

GUIDE = data_root("guide") / "your-trainer.md"
BISECTED = "failure() && steps.gate.outputs.code == '1'"
"""A regression alone is looked for: of what is undecided, or an error, no commit can be named."""
RANKS = repo_root() / "tests" / "support" / "ranks"

SLEPT, INVENTED = "time.perf_counter() - begin", "told.work / 1000 * __import__('random').gauss(1, 0.002)"
"""The guide's seconds of a step, and those of the test, whatever a busy machine makes of a step."""


@pytest.mark.full
def test_every_console_block_of_the_guide_runs(shell):
    ran = 0
    for text in consoles(GUIDE, shell.place, lambda text: text.replace(SLEPT, INVENTED)):
        for line in text.splitlines():
            done = shell(line)
            timed = "--log 'regex:" in line  # a script without a file; undecided where the machine is busy
            assert done.returncode in ((0, 3) if timed else (0,)), f"{line}\n{done.stdout}{done.stderr}"
            ran += 1
    assert ran >= 7
    assert INVENTED in (shell.place / "train.py").read_text()
    assert (shell.place / "gate.xml").is_file()


CASE = """
id: step-time
kind: command
summary: Their script.
command: [python, train.py, --launch, "{run}", --step-s, "0.002"]
candidate: {arguments: [--fast]}
steps: {count: 20}
metric: step_seconds
profiles: {cpu: {}}
"""


@pytest.fixture
def clone(shell):
    """A clone of a small repository, and a function that makes commits in it; `origin/main` is the first of them."""
    upstream = shell.place / "upstream"
    (upstream / "bench").mkdir(parents=True)
    (upstream / "train.py").write_text((RANKS / "foreign_script.py").read_text())
    (upstream / "bench" / "step-time.yaml").write_text(CASE)
    (upstream / "requirements.txt").write_text("")
    (upstream / ".gitignore").write_text(".playbook/\ngate.*\nsummary.md\n")
    assert shell("git init -q -b main . && git add -A && git commit -q -m first", upstream).returncode == 0
    folder = shell.place / "clone"
    assert shell(f"git clone -q {upstream} {folder}").returncode == 0

    def commit(message, plant):
        (folder / "plant.json").write_text(plant)
        done = shell(f"git add -A && git commit -q --allow-empty -m {shlex.quote(message)} && git rev-parse --short HEAD", folder)
        return done.stdout.strip()

    commit.folder = folder
    return commit


def steps_of(name):
    """The steps of a workflow that run a command, by their names, and the job's variables."""
    text = (data_root("guide") / "ci" / name).read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}, job["env"]


def test_no_page_installs_by_a_name_that_is_on_no_index():
    pages = [repo_root() / "README.md", *(p for p in data_root("guide").parent.rglob("*") if p.suffix in (".md", ".yml"))]
    assert [str(p) for p in pages if re.search(r"install '?perf-playbook", p.read_text(encoding="utf-8"))] == []


def test_an_install_takes_requirements_where_they_are_and_no_commit_is_looked_for_where_it_failed(shell):
    (shell.place.parent / "tools" / "pip").write_text('#!/bin/sh\necho "$*"\n')
    install = steps_of("github.yml")[0]["Install"]
    (job,) = yaml.safe_load((data_root("guide") / "ci" / "gitlab.yml").read_text()).values()
    for line in (install, "\n".join(job["before_script"])):
        (shell.place / "requirements.txt").unlink(missing_ok=True)
        assert shell(line, PLAYBOOK="a.whl").stdout == "install a.whl\n"
        (shell.place / "requirements.txt").write_text("")
        assert shell(line, PLAYBOOK="a.whl").stdout == "install a.whl -r requirements.txt\n"
    for name in ("github.yml", "github-gpu.yml"):
        (found,) = yaml.safe_load((data_root("guide") / "ci" / name).read_text())["jobs"].values()
        by_name = {step.get("name"): step for step in found["steps"]}
        assert by_name["Gate"]["id"] == "gate"
        assert by_name["Name the commit"]["if"] == BISECTED
    action = yaml.safe_load((repo_root() / "action.yml").read_text())
    assert {step["name"]: step for step in action["runs"]["steps"]}["Name the commit"]["if"] == BISECTED


@pytest.mark.parametrize("code", [0, 1, 3, 5])
def test_the_step_of_the_gate_ends_as_the_gate_and_tells_the_next_step_how(shell, code):
    (shell.place.parent / "tools" / "playbook").write_text(f"#!/bin/sh\nexit {code}\n")
    told = shell.place / "told"
    for name in ("github.yml", "github-gpu.yml"):
        told.unlink(missing_ok=True)
        steps, variables = steps_of(name)
        assert shell(steps["Gate"], **variables, GITHUB_OUTPUT=str(told), GITHUB_STEP_SUMMARY="summary.md").returncode == code
        assert told.read_text() == f"code={code}\n"


def test_the_workflow_for_gpus_runs_the_same_steps():
    """It has more time, and its machine stays, so that it keeps a history there."""
    (cpu, _), (gpu, _) = steps_of("github.yml"), steps_of("github-gpu.yml")
    history = """ --history ~/gates-of-"${GITHUB_REPOSITORY##*/}".parquet"""
    assert history in gpu["Gate"]
    same = {name: line.replace("90m", "40m").replace(history, "") for name, line in gpu.items()}
    assert same == {k: v for k, v in cpu.items() if k != "Install"}


def test_the_action_runs_what_the_workflow_runs():
    """By its own clone, and with options that its user may change; every input comes by the environment, so that none is read as shell."""
    action = yaml.safe_load((repo_root() / "action.yml").read_text())
    steps = {step["name"]: step for step in action["runs"]["steps"]}
    workflow = {name: line.replace(action["inputs"]["options"]["default"], "$OPTIONS") for name, line in steps_of("github.yml")[0].items()}
    assert {name: step["run"] for name, step in steps.items()} == {**workflow, "Install": 'pip install "$PLAYBOOK"'}
    for step in steps.values():
        assert "${{" not in step["run"]
        assert set(re.findall(r"\$([A-Z]+)\b", step["run"])) == set(step["env"])


@pytest.mark.full
def test_the_workflow_as_shipped_fails_on_the_slow_commit_and_names_it(shell, clone):
    steps, variables = steps_of("github.yml")
    more = {**variables, "BASE": "origin/main", "GITHUB_STEP_SUMMARY": str(clone.folder / "summary.md"), "GITHUB_OUTPUT": "/dev/null"}
    clone("harmless", '{"noise": 0.002}')
    for step in ("Install", "Gate"):
        assert shell(steps[step], clone.folder, **more).returncode == 0
    slow = clone("a slower collate", '{"slower": 0.2}')
    failed = shell(steps["Gate"], clone.folder, **more)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    named = shell(steps["Name the commit"], clone.folder, **more)
    assert named.returncode == 0, named.stderr
    assert named.stdout.splitlines()[-1].split()[0] == slow
    summary = (clone.folder / "summary.md").read_text()
    assert "**pass**" in summary
    assert "**regression**" in summary
    assert "a slower collate" in summary


@pytest.mark.full
def test_the_job_for_gitlab_as_shipped_fails_on_the_slow_commit(shell, clone):
    (job,) = yaml.safe_load((data_root("guide") / "ci" / "gitlab.yml").read_text()).values()
    more = {**job["variables"], "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main"}
    lines = "\n".join([*job["before_script"], *job["script"]])
    clone("slow", '{"slower": 0.2}')
    assert shell(lines, clone.folder, **more).returncode == 1
    assert (clone.folder / "gate.xml").is_file()
