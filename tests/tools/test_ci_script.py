"""The stages of `.ci/run`: the first that fails ends it, and the gate never compares a commit with itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from guide_blocks import script

from playbook.paths import repo_root


def git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three commits of `main`, the second one tagged, with the script, and a `make` and a `playbook` that print their words; `make test` fails."""
    git(tmp_path, "init", "-q", "-b", "main")
    for number in range(3):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", str(number))
        if number == 1:
            git(tmp_path, "tag", "v1")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("playbook", "make"):
        script(tmp_path / ".venv/bin" / name, f'echo {name} "$@"\n[ "$*" != test ]')
    shutil.copytree(repo_root() / ".ci", tmp_path / ".ci")
    return tmp_path


def stages(root: Path, *names: str) -> subprocess.CompletedProcess[str]:
    path = f"{root / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run([root / ".ci/run", *names], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)


def test_each_stage_says_its_name_and_its_seconds(root: Path) -> None:
    done = stages(root, "rest", "check")
    assert done.returncode == 0, done.stderr
    words = [line.rpartition(": ")[0] or line for line in done.stdout.splitlines()]
    assert words == ["== rest", "make test-rest", "== rest", "== check", "make check docs", "== check"]


@pytest.mark.parametrize("names", [(), ("fast", "rest")])
def test_what_fails_first_ends_it(root: Path, names: tuple[str, ...]) -> None:
    done = stages(root, *names)
    assert done.returncode != 0
    assert done.stdout.endswith("== fast\nmake test\n")
    assert "== fast failed after " in done.stderr


MAKE = """
mkdir -p .pytest_cache/v/cache
cp failed .pytest_cache/v/cache/lastfailed
echo "make: *** [Makefile:56: $1] Error {code}" >&2
exit 2
"""
PYTHON = """
echo python "$@"
cp again .pytest_cache/v/cache/lastfailed
exit {code}
"""


def failing(root: Path, first: list[str], again: list[str], code: int = 1, alone: int | None = None) -> subprocess.CompletedProcess[str]:
    """The rest of the tests where these fail, then those; `code` is pytest's of the first run, `alone` that of the second."""
    for name, tests in (("failed", first), ("again", again)):
        (root / name).write_text(json.dumps(dict.fromkeys(tests, True), indent=2) + "\n")
    script(root / ".venv/bin/make", MAKE.format(code=code))
    script(root / ".venv/bin/python", PYTHON.format(code=int(bool(again)) if alone is None else alone))
    return stages(root, "rest")


ONE, TWO = "tests/a.py::test_x[an id, 1]", "tests/b.py::test_y"
ALONE = "python -m pytest -m full --last-failed --last-failed-no-failures none"


def test_what_fails_and_passes_alone_is_named(root: Path) -> None:
    done = failing(root, [ONE, TWO], [])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:-1] == [
        "== rest: once more, alone",
        ALONE,
        f"== passed only alone: {ONE}",
        f"== passed only alone: {TWO}",
    ]


def test_what_fails_twice_fails_its_stage(root: Path) -> None:
    done = failing(root, [TWO, ONE], [TWO])
    assert done.returncode == 1
    assert done.stdout.splitlines()[2:] == [ALONE, f"== passed only alone: {ONE}"]
    assert "== rest failed after " in done.stderr
    assert failing(root, [ONE], [], alone=5).returncode == 5, "no test ran alone"


@pytest.mark.parametrize(
    ("count", "code"), [(6, 1), (1, 2), (1, 3), (0, 1)], ids=["six tests", "interrupted", "an internal error", "no test has failed"]
)
def test_what_is_no_test_or_many_fails_at_once(root: Path, count: int, code: int) -> None:
    done = failing(root, [f"tests/a.py::test_{n}" for n in range(count)], [], code)
    assert (done.returncode, done.stdout) == (1, "== rest\n")


def test_what_failed_in_a_run_before_counts_for_nothing(root: Path) -> None:
    (root / ".pytest_cache/v/cache").mkdir(parents=True)
    (root / ".pytest_cache/v/cache/lastfailed").write_text('{\n  "tests/old.py::test": true\n}')
    script(root / ".venv/bin/make", "echo 'make: *** [Makefile:47: .venv/.dev] Error 1' >&2\nexit 2")
    done = stages(root, "fast")
    assert (done.returncode, done.stdout) == (1, "== fast\n")


def test_a_stage_that_there_is_not_is_refused(root: Path) -> None:
    done = stages(root, "quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no stage quick; expected check, fast" in done.stderr


def baseline(root: Path) -> str:
    """The commit that `.ci/run` compares with in that repository."""
    done = stages(root, "gate")
    _, command, option, reference, case = done.stdout.splitlines()[1].split()
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
