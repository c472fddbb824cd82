"""The gate and bisecting in somebody else's repository: worktrees, a build step, the six ways to cheat, and the commit that is named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import in_process
import pandas as pd
import pytest

from playbook.errors import ConfigError, LaunchError
from playbook_bench.run import gate, report
from playbook_bench.run.options import Options
from playbook_bench.variants import checkout

pytestmark = pytest.mark.usefixtures("planned")

SCRIPT = Path(__file__).parents[2] / "support" / "ranks" / "foreign_script.py"
CASE = """
id: step-time
kind: command
summary: The script as its commits have it.
command: [PYTHON, train.py, --launch, "{run}", --step-s, "0.001", --steps, "50"]
candidate: {arguments: [--fast]}
steps: {count: 50}
metric: step_seconds
profiles: {cpu: {}}
budget: {pairs: [4, 8], launch_timeout_s: 100}
"""


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A small repository with a training script; called with what a commit plants, it makes the commit."""
    root = tmp_path / "theirs"
    (root / "bench").mkdir(parents=True)

    def git(*words):
        done = subprocess.run(
            ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(message="work", **plant):
        (root / "plant.json").write_text(json.dumps(plant))
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", message)
        return git("rev-parse", "HEAD")

    git("init", "-q", "-b", "main")
    shutil.copy(SCRIPT, root / "train.py")
    (root / ".gitignore").write_text(".playbook/\n")
    (root / "bench" / "step-time.yaml").write_text(CASE.replace("PYTHON", sys.executable))
    commit("first")
    monkeypatch.chdir(root)
    commit.root, commit.git = root, git
    return commit


def run(baseline="HEAD~1", **more):
    return gate.run("bench/step-time.yaml", baseline, Options(profile="cpu", seed=1, **more), gate.Limits())


def test_a_slower_commit_fails_and_the_history_holds_the_effect(repo):
    repo(slower=0.2)
    found = run()
    assert found.status == "regression", found.sentence
    for commit in ("abc", "def"):
        report.add_to_history(Path("gates.parquet"), found, commit)
    rows = pd.read_parquet("gates.parquet")
    assert rows["commit"].tolist() == ["abc", "def"]
    assert rows["status"].tolist() == ["regression", "regression"]
    assert (rows["low"] <= rows["effect"]).all()
    assert (rows["effect"] < -0.1).all()
    assert (rows["candidate_value"] > 1.1 * rows["baseline_value"]).all()


def edited(repo, old, new):
    case = repo.root / "bench" / "step-time.yaml"
    case.write_text(case.read_text().replace(old, new))


@pytest.mark.full
def test_a_file_of_steps_is_looked_for_where_the_commit_runs(repo):
    """Not in the user's own folder, whose file would make any commit equal to any other."""
    edited(repo, '"50"]', '"50", --out, log.jsonl]')
    edited(repo, "count: 50", "count: 50, file: log.jsonl")
    repo("steps go into a file")
    repo(slower=0.2)
    own = "".join(json.dumps({"step": i, "seconds": 0.1, "loss": 4.0 / (1 + i), "tokens": 1024}) + "\n" for i in range(1, 51))
    (repo.root / "log.jsonl").write_text(own)
    found = run()
    assert found.status == "regression", found.sentence
    assert (repo.root / "log.jsonl").read_text() == own


@pytest.mark.full
@pytest.mark.parametrize("fault", ["slow first part", "every fourth"])
def test_steps_that_are_slow_in_part_are_a_regression(repo, fault):
    repo(fault=fault)
    found = run()
    assert found.status == "regression", found.sentence


@pytest.mark.full
def test_a_change_that_edits_its_case_is_judged_by_the_case_of_the_baseline_too(repo):
    """The new case says that nothing is slower, and passed."""
    edited(repo, '"50"]', '"50", --slower, "0"]')
    repo(slower=0.3)
    found = run()
    assert found.status == "regression", found.sentence
    assert found.sentence.startswith("the case has changed since HEAD~1; as it was: step_seconds: slower by ")
    assert "; as it is now: step_seconds" in found.sentence
    assert "is ruled out" in found.sentence


@pytest.mark.full
def test_a_case_of_the_baseline_that_cannot_be_read_is_said(repo):
    edited(repo, "metric:", "metrik:")
    repo("broken")
    edited(repo, "metrik:", "metric:")
    repo("mended")
    with pytest.raises(ConfigError, match=r"step-time.yaml as it stood at HEAD~1 cannot be read: .*name a later commit"):
        run()


@pytest.mark.full
def test_the_same_files_are_said_to_be_the_same(repo):
    """A clean tree against its own commit passed without a word."""
    found = run(baseline="HEAD")
    assert found.sentence.startswith("nothing changed since HEAD, and any difference is noise; step_seconds"), found.sentence


@pytest.mark.full
def test_a_gain_beyond_the_limit_asks_for_a_new_baseline(repo):
    repo(slower=-0.2)
    found = run()
    assert (found.status, "compare the next commits with this one" in found.sentence) == ("pass", True), found.sentence


def test_a_figure_that_a_commit_stops_logging_is_missed(repo):
    repo(fault="no loss")
    found = run()
    assert (found.status, "fields: no longer told: loss" in found.sentence) == ("error", True), found.sentence


@pytest.mark.full
def test_a_count_that_does_not_repeat_tells_nothing(repo):
    """The same commit with another loss at each launch was a regression, or passed, by chance."""
    edited(repo, "metric: step_seconds", "metric: final_loss")
    repo(fault="unseeded")
    repo(fault="unseeded", noise=0.003)
    found = run()
    assert (found.status, "final_loss differs between launches of one commit" in found.sentence) == ("undecided", True), found.sentence


@pytest.mark.full
def test_five_small_regressions_in_a_row_are_seen_from_the_anchor(repo):
    anchor = repo.git("rev-parse", "HEAD")
    folder = repo.root / "bench" / "baselines"
    folder.mkdir()
    (folder / "gate-anchors.yaml").write_text(f"anchors: {{step-time: {{commit: {anchor}, reason: the first release}}}}\n")
    for i in range(1, 6):
        if i == 5:  # that of the baseline counts, as its case does
            (folder / "gate-anchors.yaml").write_text("anchors: {}\n")
        repo(slower=0.015 * i, noise=0.001)
    found = run()
    assert found.status == "regression", found.sentence
    assert "since the anchor" in found.sentence


@pytest.mark.full
def test_uncommitted_changes_are_judged_and_new_files_are_not(repo):
    (repo.root / "plant.json").write_text('{"slower": 0.3}')
    assert run(baseline="HEAD").status == "regression"
    assert repo.git("status", "--porcelain") == "M plant.json"


@pytest.mark.full
def test_files_are_prepared_once_for_each_state(repo):
    edited(repo, "metric:", f"prepare: [{sys.executable}, -c, \"import os; open('built', 'a').write('x'); print(os.getcwd())\"]\nmetric:")
    repo()
    for _ in range(2):
        assert run(pairs=2).status == "undecided"
        assert [p.read_text() for p in repo.root.glob(".playbook/results/cache/trees/*/tree/built")] == ["x", "x"]


@pytest.mark.full
def test_a_build_that_fails_is_an_error(repo):
    edited(repo, "metric:", f"prepare: [{sys.executable}, -c, \"raise SystemExit('no compiler')\"]\nmetric:")
    found = run(baseline="HEAD")
    assert (found.status, found.exit_code) == ("error", 5)
    assert "no compiler" in found.sentence


@pytest.mark.full
def test_bisect_has_the_limit_of_the_gate(repo, capsys):
    repo("slow", slower=0.2)
    code, out, _ = in_process.run(capsys, "bisect", "HEAD~1", "HEAD", "--case", "bench/step-time.yaml", "--limit", "50%", "--json")
    assert code == 3
    assert json.loads(out)["trouble"] == "none"


def test_the_command_line_writes_junit_and_markdown_and_a_row_of_the_history_for_each_gate(repo, capsys):
    words = ["gate", "--baseline", "HEAD~1", "--case", "bench/step-time.yaml", "--history", "gates.parquet"]
    words += ["--junit", "gate.xml", "--markdown", "gate.md"]
    commits = []
    for fault in ("ends early", "nan loss"):
        commits.append(repo(fault=fault))
        assert in_process.run(capsys, *words)[0] == 5
    suite = ET.parse("gate.xml").getroot()
    assert (suite.get("errors"), suite.get("failures")) == ("1", "0")
    assert "| answer | **error** |" in Path("gate.md").read_text()
    rows = pd.read_parquet("gates.parquet")
    assert rows["commit"].tolist() == commits
    assert rows["status"].tolist() == ["error", "error"]
    assert rows["created"].is_monotonic_increasing
    assert set(rows["case"]) == {"step-time"}
    assert rows["effect"].isna().all()


@pytest.mark.parametrize("content", [b"hello", None])
def test_a_history_that_is_something_else_is_refused_before_anything_runs(repo, capsys, content):
    path = Path("gates.parquet")
    path.write_bytes(content) if content else pd.DataFrame({"a": [1]}).to_parquet(path)
    held = path.read_bytes()
    code, _, err = in_process.run(capsys, "gate", "--baseline", "HEAD", "--case", "bench/step-time.yaml", "--history", str(path))
    assert code == 2
    assert "--history gates.parquet" in err
    assert path.read_bytes() == held
    assert not Path(".playbook").exists()


def test_outside_of_a_repository_it_says_so(tmp_path, monkeypatch, repo, capsys):
    case = repo.root / "bench" / "step-time.yaml"
    monkeypatch.chdir(tmp_path)
    code, _, err = in_process.run(capsys, "gate", "--baseline", "HEAD", str(case))
    assert code == 2
    assert "no git repository" in err


def laid(repo, overlay):
    """The tree of HEAD with files laid over it."""
    return checkout.files(repo.root, None, "HEAD", [], overlay).prepared(repo.root.parent / "cache")


def test_a_file_that_is_laid_over_a_tree_stays_inside_it(repo):
    """A link that was committed led the writing to any file of the user."""
    outside = repo.root.parent / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    (repo.root / "link.txt").symlink_to(outside / "mine.txt")
    (repo.root / "folder").symlink_to(outside)
    repo("links")
    (repo.root / "new.txt").write_text("new")
    top = laid(repo, {"link.txt": "new.txt"})
    assert ((top / "link.txt").read_text(), (top / "link.txt").is_symlink()) == ("new", False)
    with pytest.raises(LaunchError, match="leads out of the repository"):
        laid(repo, {"folder/mine.txt": "new.txt"})
    assert (outside / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("source", ["link.txt", "../outside.txt", "/etc/hostname"])
def test_a_file_that_is_laid_over_is_read_from_inside_the_repository(repo, source):
    (repo.root.parent / "outside.txt").write_text("theirs")
    (repo.root / "link.txt").symlink_to(repo.root.parent / "outside.txt")
    with pytest.raises(ConfigError, match=r"leads out of the repository to .*; expected a path inside it"):
        checkout.files(repo.root, None, "HEAD", [], {"new.txt": source})


def test_what_a_log_says_is_no_markup_of_the_summary():
    """A commit's output ends up on the page of a CI job."""
    found = gate.GateResult(
        "error", "a run crashed:\n| x |<img src=x onerror=y>\n# [click](javascript:z) `a` **b**\x1b[2J", "c", "HEAD`*`", "cpu", 0.03
    )
    shown = report.markdown(found)
    assert len(shown.splitlines()) == 8
    assert not [mark for mark in ("<img", "](", "`", "**b", "\x1b", "| x") if mark in shown]
    assert "a run crashed: &#124; x &#124;&#60;img src=x onerror=y&#62;" in shown
