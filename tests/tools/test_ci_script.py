"""The last step of `.ci/run`: the gate never compares a commit with itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from playbook.paths import repo_root


def git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three commits of `main`, the second one tagged, and a `playbook` that prints its words."""
    git(tmp_path, "init", "-q", "-b", "main")
    for number in range(3):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", str(number))
        if number == 1:
            git(tmp_path, "tag", "v1")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/playbook").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / ".venv/bin/playbook").chmod(0o755)
    return tmp_path


def baseline(root: Path) -> str:
    """The commit that `.ci/run` compares with in that repository."""
    script = (repo_root() / ".ci/run").read_text()
    lines = script[script.index("base=$(git merge-base") :]
    done = subprocess.run(["bash", "-euc", lines], cwd=root, check=True, capture_output=True, text=True)
    command, option, reference, case = done.stdout.split()
    assert (command, option, case) == ("gate", "--baseline", "moe-dispatch-bytes")
    return git(root, "rev-parse", f"{reference}^{{commit}}")


def test_a_branch_is_compared_with_where_it_left_the_main_one(root: Path) -> None:
    git(root, "update-ref", "refs/remotes/origin/main", "HEAD~1")
    assert baseline(root) == git(root, "rev-parse", "HEAD~1")


def test_the_main_branch_is_compared_with_its_last_tag_or_the_commit_before(root: Path) -> None:
    git(root, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert baseline(root) == git(root, "rev-parse", "v1")
    git(root, "tag", "-d", "v1")
    assert baseline(root) == git(root, "rev-parse", "HEAD~1")


def test_without_a_remote_the_last_tag_counts(root: Path) -> None:
    git(root, "tag", "v2")  # of this commit, which is not compared with itself
    assert baseline(root) == git(root, "rev-parse", "v1")
