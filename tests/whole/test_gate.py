"""The regression gate on two commits of a small repository: pass, regression, and everything else is an error."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from playbook.errors import ConfigError
from playbook.records.case import Activation, Case, Delta, Receipt, Rule
from playbook_bench.launch.local import LocalLauncher
from playbook_bench.machine import detect
from playbook_bench.run import bisect, gate

FAKE = (sys.executable, str(Path(__file__).parents[1] / "support" / "ranks" / "planted.py"))


@pytest.fixture
def repo(tmp_path):
    root = tmp_path / "repo"
    root.mkdir()

    def git(*words):
        subprocess.run(["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True, capture_output=True)

    git("init", "-q", "-b", "main")

    def commit(plant):
        (root / "plant.json").write_text(json.dumps(plant))
        git("add", "-A")
        git("commit", "-q", "-m", "planted", "--allow-empty")

    commit.root = root
    commit({})
    return commit


def case(metric="useful_tokens_per_s_per_gpu"):
    return Case(
        id="planted",
        summary="s",
        trainer="trainer/configs/qwen3_moe_tiny.yaml",
        metric=metric,
        baseline={"moe.dispatcher": "alltoall"},
        candidate={"moe.dispatcher": "allgather"},
        profiles={"cpu": {"ranks": 1, "train.steps": 12, "train.warmup_steps": 2}},
        activation=Activation(baseline=Receipt(require=[Rule(collective="all_to_all")])),
    )


def run(repo, tmp_path, reference="HEAD~1", metric="useful_tokens_per_s_per_gpu", **options):
    return gate.run(case(metric), reference, profile="cpu", results=tmp_path / "results", command=FAKE, root=repo.root, seed=1, **options)


def worktrees(root):
    listed = subprocess.run(["git", "-C", str(root), "worktree", "list"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


@pytest.mark.parametrize(("slower", "status", "code"), [(0.0, "pass", 0), (0.2, "regression", 1), (-0.2, "pass", 0)])
def test_the_slower_commit_fails(repo, tmp_path, slower, status, code):
    repo({"slower": slower})
    found = run(repo, tmp_path)
    assert (found.status, found.exit_code) == (status, code), found.sentence
    assert found.limit >= 0.01
    assert len(worktrees(repo.root)) == 1, "the worktree is gone"
    assert json.loads(json.dumps(gate.as_json(found)))["exit_code"] == code


@pytest.mark.full
def test_one_odd_launch_of_its_noise_does_not_let_a_slower_commit_pass(repo, tmp_path):
    """Launch 4 of the A/A takes 10 % longer, which made the limit 10 %; the pair is measured again."""
    repo({"slower": 0.1, "launches": [4]})
    repo({"slower": 0.04})
    found = run(repo, tmp_path)
    assert found.status == "regression", found.sentence
    assert found.limit < 0.03
    assert sum(r.role == "aa" for r in found.runs) == 10


@pytest.mark.full
def test_uncommitted_changes_are_what_is_tested(repo, tmp_path):
    (repo.root / "plant.json").write_text(json.dumps({"slower": 0.3}))
    assert run(repo, tmp_path, "HEAD").status == "regression"


@pytest.mark.parametrize("fault", ["nan", "short", "crash", "silent", "disable_metric"])
@pytest.mark.sample("crash", "nan", "silent")
def test_it_fails_closed(repo, tmp_path, fault):
    repo({"fault": fault})
    metric = "images_per_s" if fault == "disable_metric" else "useful_tokens_per_s_per_gpu"
    found = run(repo, tmp_path, metric=metric)
    assert (found.status, found.exit_code) == ("error", 5), found.sentence


@pytest.mark.parametrize(("options", "pairs"), [({"pairs": 2}, 2), ({"budget_s": 0.01}, 0)])
@pytest.mark.full
def test_a_series_that_is_cut_short_shows_nothing(repo, tmp_path, options, pairs):
    repo({"slower": 0.5})
    found = run(repo, tmp_path, **options)
    assert (found.status, found.exit_code) == ("undecided", 3), found.sentence
    assert f"stopped after {pairs} of the 4 pairs" in found.sentence
    assert "--budget" in found.sentence
    json.dumps(gate.as_json(found))


def test_a_budget_that_holds_no_noise_shows_nothing(repo, tmp_path, monkeypatch):
    """The reference commit is slow and the working tree fast: there is time for a pair of both, but for none of the reference with itself."""

    class Slow(LocalLauncher):
        def run(self, spec, on_step=None):
            return replace(super().run(spec, on_step), wall_s=70.0 if "000-" in spec.folder.name else 10.0)

    monkeypatch.setattr(gate, "LocalLauncher", Slow)
    found = run(repo, tmp_path, "HEAD", budget_s=100.0)
    assert (found.status, found.exit_code) == ("undecided", 3), found.sentence
    assert "stopped after 0 of the 4 pairs" in found.sentence


@pytest.mark.full
def test_what_is_neither_shown_nor_ruled_out_asks_for_more_pairs(repo, tmp_path):
    """A slowdown of a little less than the limit: passing it would let it through, and calling it a regression would be a guess."""
    repo({"slower": 0.003})
    found = run(repo, tmp_path, pairs=4)
    assert (found.status, found.exit_code) == ("undecided", 3), found.sentence
    assert 4 < found.pairs_needed <= gate.MOST_PAIRS
    assert f"--pairs {found.pairs_needed}" in found.sentence
    told = gate.as_json(found)
    assert (told["status"], told["pairs_needed"], told["comparison"]["pairs"]) == ("undecided", found.pairs_needed, 4)


@pytest.mark.full
def test_pairs_beyond_the_last_look_are_looked_at_and_share_the_error_rate(repo, tmp_path):
    repo({"slower": 0.01})
    found = run(repo, tmp_path, pairs=16)
    assert (found.status, found.comparison.pairs, found.comparison.look) == ("undecided", 16, 4), found.sentence
    assert 0.05 / 4 < found.comparison.alpha_look < 0.05, "what earlier looks have caught is not paid for twice"
    assert (found.pairs_needed, "it lies about there" in found.sentence) == (None, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pairs": 0}, "at least 1"),
        ({"pairs": 101}, "at most 100"),
        ({"budget_s": 0.0}, "more than 0"),
        ({"budget_s": float("nan")}, "more than 0"),
    ],
)
def test_limits_that_leave_room_for_nothing_or_for_all(repo, tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        run(repo, tmp_path, "HEAD", **options)
    assert not (tmp_path / "results").exists()


def test_a_deterministic_metric_takes_one_pair(repo, tmp_path):
    repo({})
    found = run(repo, tmp_path, metric="dispatch_bytes_per_token_layer")
    assert (found.status, len(found.runs)) == ("pass", 2)


@pytest.mark.parametrize(
    ("before", "after", "status"), [(100, 0, "pass"), (0, 100, "regression"), (0, 0, "pass"), (100, 50, "pass"), (100, 200, "regression")]
)
def test_an_exact_metric_is_judged_by_its_direction(repo, tmp_path, before, after, status):
    repo({"bytes": before})
    repo({"bytes": after})
    found = run(repo, tmp_path, metric="dispatch_bytes_per_token_layer")
    assert found.status == status, found.sentence


def test_both_commits_run_in_the_environment_of_the_first_variant(repo, tmp_path, monkeypatch):
    seen = []

    class Watched(LocalLauncher):
        def run(self, spec, on_step=None):
            seen.append(spec.environment.get("NCCL_ALGO"))
            return super().run(spec, on_step)

    monkeypatch.setattr(gate, "LocalLauncher", Watched)
    delta = Delta(environment={"baseline": {"NCCL_ALGO": "Ring"}, "candidate": {"NCCL_ALGO": "Tree"}}, reason="r")
    declared = case("dispatch_bytes_per_token_layer").model_copy(update={"delta": delta})
    found = gate.run(declared, "HEAD", profile="cpu", results=tmp_path / "results", command=FAKE, root=repo.root)
    assert (found.status, seen) == ("pass", ["Ring", "Ring"]), found.sentence


def test_packages_that_come_by_pythonpath_are_there_for_both_commits(repo, tmp_path, monkeypatch):
    """As in a timed run: a checkout of megatron-core is often found in no other way."""
    seen = []

    class Watched(LocalLauncher):
        def run(self, spec, on_step=None):
            seen.append(spec.environment["PYTHONPATH"].split(os.pathsep))
            return super().run(spec, on_step)

    monkeypatch.setattr(gate, "LocalLauncher", Watched)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "megatron"), str(repo.root / "bench")]))
    found = run(repo, tmp_path, "HEAD", metric="dispatch_bytes_per_token_layer")
    assert found.status == "pass", found.sentence
    assert [paths[3:] for paths in seen] == [[str(tmp_path / "megatron")]] * 2
    assert {Path(paths[0]).resolve() == repo.root for paths in seen} == {True, False}


@pytest.mark.parametrize("reference", ["no-such-branch", "--upload-pack=x", ""])
def test_a_reference_that_is_no_commit(repo, tmp_path, reference):
    with pytest.raises(ConfigError, match="no commit"):
        run(repo, tmp_path, reference)


def test_a_worktree_made_inside_a_hook_leaves_the_commit_alone(repo, monkeypatch):
    """`git commit -a` runs its hooks with GIT_INDEX_FILE: a worktree's files went into the commit in place of the user's."""
    (repo.root / "added").write_text("x")
    repo({"n": 1})
    index = repo.root / ".git" / "index"
    monkeypatch.setenv("GIT_INDEX_FILE", str(index))
    monkeypatch.setenv("GIT_DIR", str(repo.root / "elsewhere"))
    before = index.read_bytes()
    with gate.worktree(repo.root, "HEAD~1") as tree:
        assert not (tree / "added").exists()
        assert len(bisect.commits(repo.root, "HEAD~1", "HEAD")) == 1
    assert detect.commit(repo.root) is not None
    assert index.read_bytes() == before


def test_a_shallow_clone_says_that_it_is_one(repo, tmp_path):
    repo({"n": 1})
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{repo.root}", str(clone)], check=True, capture_output=True)
    with (
        pytest.raises(ConfigError, match=r"'HEAD~1' is no commit of .*clone; this clone is shallow.*--unshallow"),
        gate.worktree(clone, "HEAD~1"),
    ):
        pass


def test_a_repository_that_git_will_not_read_says_why(repo, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(ConfigError, match=r"git cannot read .*repo: fatal: detected dubious ownership.*safe\.directory"):
        gate.resolve(repo.root, "HEAD")


def test_a_gate_that_is_started_in_another_repository_does_not_pass_it(repo, tmp_path, monkeypatch):
    """Its commits would be those of the checkout that playbook runs from, whatever has changed here."""
    monkeypatch.chdir(repo.root)
    with pytest.raises(ConfigError, match=f"this folder belongs to the repository {repo.root}, and playbook runs from"):
        gate.run(case("dispatch_bytes_per_token_layer"), "HEAD", profile="cpu", results=tmp_path / "results", command=FAKE)
    with pytest.raises(ConfigError, match="this folder belongs to the repository"):
        bisect.run(case(), "HEAD~1", "HEAD", profile="cpu", results=tmp_path / "results", command=FAKE)


def test_a_gate_from_an_installed_copy_inside_a_repository_does_not_pass_it(repo, tmp_path):
    """As of a package that was installed into `.venv` there: of both commits the installed code would run."""
    installed = repo.root / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no checkout of its own but a folder in"):
        gate.run(
            case("dispatch_bytes_per_token_layer"),
            "HEAD",
            profile="cpu",
            results=tmp_path / "results",
            command=FAKE,
            root=installed,
            seed=1,
        )
