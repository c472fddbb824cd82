"""The regression gate on two commits of a small repository: pass, regression, and everything else is an error."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planted_case import FAKE, PlannedLauncher

from playbook.errors import ConfigError
from playbook.paths import data_root, repo_root, sources
from playbook.records.case import Activation, Case, Delta, Receipt, Rule
from playbook.yaml_files import load
from playbook_bench.launch.local import Interrupted
from playbook_bench.launch.outcome import Result
from playbook_bench.machine import detect
from playbook_bench.run import bisect, gate
from playbook_bench.run.options import Options
from playbook_bench.variants import checkout


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
    configs = root / "trainer" / "configs"
    configs.mkdir(parents=True)
    shutil.copy(data_root("configs") / "qwen3_moe_tiny.yaml", configs)
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


def options(tmp_path, launcher=PlannedLauncher, **more):
    return Options(profile="cpu", results=tmp_path / "results", launcher=launcher(FAKE), seed=1, **more)


def run(
    repo, tmp_path, reference="HEAD~1", metric="useful_tokens_per_s_per_gpu", limits=None, launcher=PlannedLauncher, anchor=None, **more
):
    return gate.run(case(metric), reference, options(tmp_path, launcher, **more), limits or gate.Limits(), root=repo.root, anchor=anchor)


def watching(look):
    """A launcher that looks at what it has launched, and what it saw."""
    seen = []

    class Watched(PlannedLauncher):
        def run(self, spec, on_step=None):
            result = super().run(spec, on_step)
            seen.append(look(spec))
            return result

    return Watched, seen


def worktrees(root):
    listed = subprocess.run(["git", "-C", str(root), "worktree", "list"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_the_slower_commit_fails(repo, tmp_path):
    repo({"slower": 0.2})
    found = run(repo, tmp_path)
    assert (found.status, found.exit_code) == ("regression", 1), found.sentence
    assert found.limit == 0.03
    assert len(worktrees(repo.root)) == 1, "the worktree is gone"
    assert json.loads(json.dumps(gate.as_json(found)))["exit_code"] == 1


@pytest.mark.parametrize("fault", ["nan", "crash", "disable_metric"])
@pytest.mark.sample("crash", "nan")
def test_it_fails_closed(repo, tmp_path, fault):
    repo({"fault": fault})
    metric = "images_per_s" if fault == "disable_metric" else "useful_tokens_per_s_per_gpu"
    found = run(repo, tmp_path, metric=metric)
    assert (found.status, found.exit_code) == ("error", 5), found.sentence


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


@pytest.mark.full
def test_a_stopped_gate_goes_on_where_it_was(repo, tmp_path, stops_at):
    """It began anew: a journal was for those who asked for one, and the gate could not be asked."""
    repo({})
    launcher = stops_at(9, PlannedLauncher)
    with pytest.raises(Interrupted):
        run(repo, tmp_path, launcher=launcher)
    assert run(repo, tmp_path, launcher=launcher).status == "pass"
    assert "006" <= launcher.launched[9][:3] <= "008", "all are kept but those without a partner"
    assert not list((tmp_path / "results" / "journal").glob("*")), "a gate that ended leaves nothing to go on with"


def test_each_tree_resolves_the_configuration_by_itself(repo, tmp_path):
    """A default that a commit changes was invisible: both trees were handed what the newer one had resolved."""
    path = repo.root / "trainer" / "configs" / "qwen3_moe_tiny.yaml"
    path.write_text(path.read_text() + "\nseed: 7\n")
    repo({})
    launcher, seen = watching(lambda spec: json.loads((spec.folder / "resolved.yaml").read_text())["seed"])
    found = run(repo, tmp_path, metric="dispatch_bytes_per_token_layer", launcher=launcher)
    assert sorted(seen) == [7, 1234]
    assert found.differences == ["seed: 1234 -> 7"]


def test_each_tree_resolves_it_with_its_own_code(tmp_path):
    """A default of the code that changed from fp32 to bf16 passed as +0.0 %."""
    package = tmp_path / "trainer" / "playbook_trainer" / "config"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    code = """
class Config(dict):
    def model_dump(self, mode): return dict(self)
def load(path, overrides): return Config(dtype="bf16", **overrides)
"""
    (package / "tree.py").write_text(code)
    path = checkout.import_path(tmp_path, [tmp_path])
    assert checkout.resolve_in(tmp_path, path, Path("x.yaml"), {"seed": 3}) == {"dtype": "bf16", "seed": 3}


def test_a_default_that_a_commit_changes_in_the_code_is_said_first(repo, tmp_path):
    """From fp32 to bf16, which passed as +0.0 %: of this code, with the case that continuous integration gates on. Nothing needs to be launched for it."""
    for part in ("playbook", "bench/playbook_bench", "trainer"):
        shutil.copytree(repo_root() / part, repo.root / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    repo({})
    path = repo.root / "trainer" / "playbook_trainer" / "config" / "tree.py"
    plain = 'router_dtype: Literal["fp32", "bf16"] = "fp32"'
    assert plain in path.read_text()
    path.write_text(path.read_text().replace(plain, plain.replace('= "fp32"', '= "bf16"')))

    class Refusing:
        def run(self, spec, on_step=None):
            return Result("crash", 1, "planted", 0.0, 0.0)

    found = gate.run(
        "moe-dispatch-bytes", "HEAD", Options(profile="cpu", results=tmp_path / "results", launcher=Refusing()), root=repo.root
    )
    assert found.differences == ["moe.router_dtype: fp32 -> bf16"]
    assert found.status == "error"


def test_a_tree_that_does_not_read_the_configuration_does_not_pass(repo, tmp_path):
    path = repo.root / "trainer" / "configs" / "qwen3_moe_tiny.yaml"
    path.write_text(path.read_text() + "\nno_such_key: 1\n")
    repo({})
    found = run(repo, tmp_path)
    assert (found.status, found.exit_code, found.runs) == ("error", 5, []), found.sentence
    assert "the candidate cannot be run" in found.sentence
    assert "no_such_key" in found.sentence


def test_a_gate_that_is_killed_leaves_no_worktree_and_the_next_removes_its_files(repo, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    command = "import sys, os; from pathlib import Path; from playbook_bench.variants import checkout\n"
    command += "with checkout.files_of(Path(sys.argv[1]), 'HEAD') as tree: print(tree, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", command, str(repo.root)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    tree = Path(done.stdout.strip())
    assert (tree / "plant.json").is_file(), done.stderr
    assert len(worktrees(repo.root)) == 1
    with checkout.files_of(repo.root, "HEAD") as first, checkout.files_of(repo.root, "HEAD") as second:
        assert [(t / "plant.json").is_file() for t in (tree, first, second)] == [False, True, True]
    assert not list(tmp_path.glob("playbook-gate-*"))


def test_both_commits_run_in_the_environment_of_the_first_variant(repo, tmp_path):
    launcher, seen = watching(lambda spec: spec.environment.get("NCCL_ALGO"))
    delta = Delta(environment={"baseline": {"NCCL_ALGO": "Ring"}, "candidate": {"NCCL_ALGO": "Tree"}}, reason="r")
    declared = case("dispatch_bytes_per_token_layer").model_copy(update={"delta": delta})
    found = gate.run(declared, "HEAD", options(tmp_path, launcher), root=repo.root)
    assert (found.status, seen) == ("pass", ["Ring", "Ring"]), found.sentence


def test_packages_that_come_by_pythonpath_are_there_for_both_commits(repo, tmp_path, monkeypatch):
    """As in a timed run: a checkout of megatron-core is often found in no other way."""
    launcher, seen = watching(lambda spec: spec.environment["PYTHONPATH"].split(os.pathsep))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "megatron"), str(repo.root / "bench")]))
    found = run(repo, tmp_path, "HEAD", metric="dispatch_bytes_per_token_layer", launcher=launcher)
    assert found.status == "pass", found.sentence
    assert [paths[len(sources(repo.root)) :] for paths in seen] == [[str(tmp_path / "megatron")]] * 2
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
    with checkout.files_of(repo.root, "HEAD~1") as tree:
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
        checkout.files_of(clone, "HEAD~1"),
    ):
        pass


def test_a_repository_that_git_will_not_read_says_why(repo, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(ConfigError, match=r"git cannot read .*repo: fatal: detected dubious ownership.*safe\.directory"):
        checkout.commit_of(repo.root, "HEAD")


def test_a_gate_that_is_started_in_another_repository_does_not_pass_it(repo, tmp_path, monkeypatch):
    """Its commits would be those of the checkout that playbook runs from, whatever has changed here."""
    monkeypatch.chdir(repo.root)
    with pytest.raises(ConfigError, match=f"this folder belongs to the repository {repo.root}, and playbook runs from"):
        gate.run(case("dispatch_bytes_per_token_layer"), "HEAD", options(tmp_path))
    with pytest.raises(ConfigError, match=r"this folder belongs to the repository .* write a case of kind command"):
        bisect.run(case(), "HEAD~1", "HEAD", options(tmp_path))


def test_a_gate_from_an_installed_copy_inside_a_repository_does_not_pass_it(repo, tmp_path):
    """As of a package that was installed into `.venv` there: of both commits the installed code would run."""
    installed = repo.root / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no checkout of its own but a folder in"):
        gate.run(case("dispatch_bytes_per_token_layer"), "HEAD", options(tmp_path), root=installed)


def test_the_case_of_continuous_integration_has_an_anchor_in_this_history():
    anchors = load(data_root("baselines") / "gate-anchors.yaml", checkout.Anchors)[0].anchors
    assert "moe-dispatch-bytes" in anchors
    assert set(anchors) <= {p.stem for p in data_root("cases").glob("*.yaml")}
    if checkout.git(repo_root(), ["rev-parse", "--is-shallow-repository"]).stdout.strip() == "false":
        for found in anchors.values():
            assert checkout.git(repo_root(), ["merge-base", "--is-ancestor", found.commit, "HEAD"]).returncode == 0, found


@pytest.mark.full
def test_the_case_of_continuous_integration_fails_where_a_slowdown_is_planted(repo, tmp_path):
    """The project's own gate compared HEAD with HEAD. Here rows go through the all-to-all in twice as many bytes, in a copy of this code."""
    for part in ("playbook", "bench/playbook_bench", "trainer", "schemas"):
        shutil.copytree(repo_root() / part, repo.root / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    repo({})
    own = Options(profile="cpu", results=tmp_path / "results")
    path = repo.root / "trainer" / "playbook_trainer" / "torch" / "parallel" / "dispatch.py"
    plain = "rows = all_to_all(rows, route.send, route.receive, self.ep)"
    assert plain in path.read_text()
    path.write_text(path.read_text().replace(plain, plain.replace("(rows,", "(rows.double(),") + ".float()"))
    found = gate.run("moe-dispatch-bytes", "HEAD", own, root=repo.root)
    assert (found.status, found.exit_code) == ("regression", 1), found.sentence
