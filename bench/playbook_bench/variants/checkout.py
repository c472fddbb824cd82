"""The files of commits, for the gate and for bisecting: which repository is judged, and a commit's files in a folder of their own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from playbook.errors import ConfigError, FileError, LaunchError
from playbook.paths import KINDS, repo_root, sources
from playbook.processes import adopting
from playbook.records.case import Case, load_case
from playbook.records.evidence import digest
from playbook.yaml_files import Strict, parse, validate
from playbook_bench.launch.outcome import tail
from playbook_bench.machine import detect

_ANCHORS = "gate-anchors.yaml"
"""In `bench/baselines/`: by case, the oldest commit whose speed was accepted."""
_GIT_TIMEOUT_S = 120
_CONFIGS, _TRAINER = Path("trainer/configs"), Path("trainer/playbook_trainer")
_PREFIX, _LOCK = "playbook-gate-", "lock"
_RESOLVE = """
import json, sys
from pathlib import Path
try:
    from playbook_trainer.config import tree
except ImportError:
    from playbook_trainer import config as tree
print(json.dumps(tree.load(Path(sys.argv[1]), json.loads(sys.argv[2])).model_dump(mode="json")))
"""
"""Run in a tree of any age; the configuration was a module before it was a package."""


class Anchor(Strict):
    """A commit whose speed was accepted, and why it is this one."""

    commit: str
    reason: str


class Anchors(Strict):
    """The file of anchors."""

    anchors: dict[str, Anchor]


def repository(root: Path | None) -> Path:
    """The checkout that is judged: the one given, or that of this code.

    Raises:
        ConfigError: it is no repository of its own, or this command was started in another one, whose changes it would not see.
    """
    tree = (root or repo_root()).resolve()
    around, cwd_top = top(tree), None if root else top(Path.cwd())
    if around not in (None, tree):
        raise ConfigError(
            f"playbook runs from {tree}, which is no checkout of its own but a folder in {around}; both commits would run what is "
            "installed. Install it from the checkout that is to be judged: pip install -e"
        )
    if cwd_top not in (None, tree):
        raise ConfigError(
            f"this folder belongs to the repository {cwd_top}, and playbook runs from {tree}, whose commits it would compare; "
            "start it there, or install it from this checkout: pip install -e; for your own trainer, write a case of kind command "
            "(docs/guide/your-trainer.md)"
        )
    return tree


@contextlib.contextmanager
def files_of(root: Path, reference: str) -> Iterator[Path]:
    """A commit's files in a temporary folder, gone afterwards. Git registers no worktree; a folder that a killed process left, the next one
    removes.

    Raises:
        ConfigError: the reference is no commit of this repository.
        LaunchError: git cannot write the files.
    """
    commit = commit_of(root, reference)
    _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    tree = folder / "tree"
    try:
        with _locked(folder):
            tree.mkdir()
            _write_tree(root, commit, tree, folder / "index", reference)
            yield tree
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> IO[bytes]:
    """A lock on the folder until this process ends, however it does. Its file has its name once it is locked, and never where no lock can
    be had.
    """
    lock = (folder / f".{_LOCK}").open("wb")
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / f".{_LOCK}").rename(folder / _LOCK)
    return lock


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of processes that were killed: nobody holds their locks."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def commit_of(root: Path, reference: str) -> str:
    """The hash of a commit.

    Raises:
        ConfigError: git cannot read the repository, or the reference is no commit of it, or of what a shallow clone has of it.
    """
    done = None if reference.startswith("-") else git(root, ["rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}"])
    if done is not None and done.returncode == 0:
        return done.stdout.strip()
    if done is not None and done.stderr.strip():  # no repository, or one of another user, as is usual in a container of CI
        raise ConfigError(f"git cannot read {root}: {' '.join(done.stderr.split())[:500]}")
    shallow = git(root, ["rev-parse", "--is-shallow-repository"]).stdout.strip() == "true"
    advice = (
        "this clone is shallow, get the rest of its history with git fetch --unshallow" if shallow else "name a branch, a tag or a hash"
    )
    raise ConfigError(f"'{reference}' is no commit of {root}; {advice}")


def _text_at(root: Path, reference: str, path: Path) -> str | None:
    """A file's text as a commit has it; None where it has no such file.

    Raises:
        ConfigError: as `commit_of`.
    """
    done = git(root, ["show", f"{commit_of(root, reference)}:{path.as_posix()}"])
    return done.stdout if done.returncode == 0 else None


def case_at(root: Path, reference: str, file: Path) -> Case | None:
    """The case of a file as a commit has it; None where the file lies outside of the repository, or was not there yet.

    Raises:
        ConfigError: this playbook does not read it any more.
    """
    path = file.resolve()
    text = _text_at(root, reference, path.relative_to(root)) if path.is_relative_to(root) else None
    if text is None:
        return None
    with tempfile.TemporaryDirectory(prefix="playbook-case-") as folder:
        (Path(folder) / path.name).write_text(text, encoding="utf-8")
        try:
            return load_case(Path(folder) / path.name)
        except FileError as e:
            raise ConfigError(f"the case {path.name} as it stood at {reference} cannot be read: {e}; name a later commit") from e


def anchor_of(case: str, root: Path, reference: str) -> str | None:
    """The commit that the repository's file of anchors names for the case, as a commit has that file; as the tree has it, where there was
    none.
    """
    path = Path(KINDS["baselines"]) / _ANCHORS
    text = _text_at(root, reference, path)
    if text is None and (root / path).is_file():
        text = (root / path).read_text(encoding="utf-8")
    anchor = validate(*parse(text, str(path)), Anchors, str(path)).anchors.get(case) if text else None
    return anchor.commit if anchor else None


def state_of(root: Path) -> str:
    """A hash of the working tree: the commit, and what is changed or new in it."""
    words = (["rev-parse", "HEAD"], ["diff", "HEAD", "--no-ext-diff", "--binary"], ["status", "--porcelain", "--untracked-files=all"])
    return detect.digest_of([git(root, w).stdout for w in words])


def source_of(folder: Path) -> str | None:
    """The commit of the repository around a folder, with a hash of what is changed in it; None outside of one."""
    head = git(folder, ["rev-parse", "HEAD"])
    if head.returncode:
        return None
    changed = git(folder, ["diff", "HEAD", "--no-ext-diff", "--binary"]).stdout
    return head.stdout.strip() + (f"+{detect.digest_of([changed])}" if changed else "")


def code_of(launcher: object, commands: bool) -> list[str] | None:
    """What tells one state of the launched code from another: what starts the ranks, our trainer's digest, and for commands the source
    around here; None without git, where nobody can tell whether their files are as they were.
    """
    words = [str(w) for w in (*getattr(launcher, "command", ()), detect.trainer_digest())]
    if commands:
        source = source_of(Path.cwd())
        return [*words, source] if source else None
    return words


def changed(before: Path, after: Path) -> list[str]:
    """The trainer's source files that differ between two trees, below its package."""
    one, other = (
        {path.relative_to(tree / _TRAINER).as_posix(): path.read_bytes() for path in (tree / _TRAINER).rglob("*.py")}
        for tree in (before, after)
    )
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def git(root: Path, words: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run git in a repository; a failure is left to the caller, in the exit code.

    Raises:
        LaunchError: git cannot be run, or does not end.
    """
    try:
        return subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
            start_new_session=True,
            env={**detect.git_environment(), **(environment or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LaunchError(f"git cannot be run: {e}") from e


def import_path(tree: Path, others: Sequence[Path]) -> str:
    """PYTHONPATH for a tree: its own sources, then what else is on this process's path, such as a checkout of megatron-core.

    Not the sources of `others`, or of the tree that runs this.
    """
    ours = {path for other in (*others, repo_root()) for path in sources(other)}
    inherited = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join([*sources(tree), *(p for p in inherited if p not in ours)])


def resolve_in(tree: Path, path: str, trainer: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a tree's own code makes of its own trainer file and the overrides. `path` is the tree's PYTHONPATH.

    Raises:
        LaunchError: it refuses them, or has no such file.
    """
    command = [sys.executable, "-c", _RESOLVE, str(tree / _CONFIGS / trainer), json.dumps(overrides)]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment, timeout=_GIT_TIMEOUT_S, check=False)
        if done.returncode == 0:
            configuration: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return configuration
        message = done.stderr
    except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as e:
        message = str(e)
    last = next((line.strip() for line in reversed(message.splitlines()) if line.strip()), "no message")
    raise LaunchError(f"its code does not read {_CONFIGS / trainer} with the case's overrides: {last[:500]}")


def top(folder: Path) -> Path | None:
    """The top folder of the repository that a folder lies in; None where git knows of none."""
    done = git(folder, ["rev-parse", "--show-toplevel"])
    return Path(done.stdout.removesuffix("\n")).resolve() if done.returncode == 0 else None


# The files of a commit, or of the working tree, in a folder of their own, made ready to run once for each state of the files.

_PREPARE_S = 3600.0
_UNUSED_S = 7 * 86_400.0
_READY = "ready"


@dataclass(frozen=True)
class TreeFiles:
    """One state of a repository's files, by the hash of its tree, with what is laid over them and what makes them ready."""

    repository: Path
    inside: Path
    """Where in the repository the command was started."""
    tree: str
    prepare: tuple[str, ...] = ()
    overlay: tuple[tuple[str, str], ...] = ()
    """Path of a file, and its text."""

    def place(self, cache: Path) -> tuple[Path, dict[str, str]]:
        """The folder to run in, and the variables that let its packages come before those that are installed."""
        top = self.prepared(cache)
        parts = [str(top / part) for part in ("src", ".") if (top / part).is_dir()]
        inherited = [
            p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and not Path(p).resolve().is_relative_to(self.repository)
        ]
        try:
            inside = _inside(top, str(self.inside))
        except ValueError as e:
            raise LaunchError(f"the folder of the command: {e}") from e
        return inside, {"PYTHONPATH": os.pathsep.join([*parts, *inherited])}

    def prepared(self, cache: Path) -> Path:
        """The files in their folder, prepared; made where they are not there yet.

        Raises:
            LaunchError: git cannot write them, or the preparation fails.
        """
        parent = cache / "trees"
        folder = parent / digest([str(self.repository), self.tree, self.prepare, self.overlay], 16)
        top, ready = folder / "tree", folder / _READY
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if ready.is_file():
                os.utime(ready)
                return top
            _remove_unused(parent)
            shutil.rmtree(folder, ignore_errors=True)
            top.mkdir(parents=True)
            _write_tree(self.repository, self.tree, top, folder / "index", self.tree[:12])
            for path, text in self.overlay:
                _overlay_file(top, path, text)
            if self.prepare:
                _prepare([word.replace("{root}", str(self.repository)) for word in self.prepare], top, folder / "prepare.log")
            ready.touch()
        return top


def files(folder: Path, tree: str | None, revision: str | None, prepare: Sequence[str], overlay: Mapping[str, str]) -> TreeFiles:
    """The files of a tree's hash, or of a revision, or of the working tree, of the repository around `folder`.

    Raises:
        ConfigError: there is no repository, the revision is no commit, or a file that is laid over cannot be read.
    """
    repository = around(folder)
    if tree is None:
        tree = tree_of(repository, revision) if revision else working_tree(repository)
    try:
        texts = tuple((path, _inside(repository, source).read_text(encoding="utf-8")) for path, source in sorted(overlay.items()))
    except (OSError, ValueError) as e:
        raise ConfigError(f"a file of the variant cannot be read: {e}") from e
    return TreeFiles(repository, folder.resolve().relative_to(repository), tree, tuple(prepare), texts)


def _inside(top: Path, path: str) -> Path:
    """The file of that path below a folder, links followed.

    Raises:
        ValueError: it lies elsewhere.
    """
    target = (top / path).resolve()
    if not target.is_relative_to(top.resolve()):
        raise ValueError(f"'{path}' leads out of the repository to {target}; expected a path inside it, through no link out of it")
    return target


def _overlay_file(top: Path, path: str, text: str) -> None:
    """Write a file into the tree; a link that was committed in its place is replaced, and none is followed out of the tree."""
    try:
        parent = _inside(top, str(Path(path).parent))
        parent.mkdir(parents=True, exist_ok=True)
        target = parent / Path(path).name
        if target.is_symlink():
            target.unlink()
        target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as e:
        raise LaunchError(f"the file {path} of the variant cannot be written: {e}") from e


def around(folder: Path) -> Path:
    """The repository that a folder lies in.

    Raises:
        ConfigError: there is none.
    """
    repository = top(folder)
    if repository is None:
        raise ConfigError(f"{folder} lies in no git repository, so there are no commits and no copies of its files; start it in one")
    return repository


def tree_of(repository: Path, reference: str) -> str:
    """The hash of a commit's tree.

    Raises:
        ConfigError: the reference is no commit.
    """
    return git(repository, ["rev-parse", f"{commit_of(repository, reference)}^{{tree}}"]).stdout.strip()


def working_tree(repository: Path) -> str:
    """The hash of the tree of all files that git knows of, as they are now; new files that were not added are not in it.

    Raises:
        ConfigError: git cannot read them.
    """
    with tempfile.TemporaryDirectory(prefix="playbook-index-") as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        for words in (["read-tree", "HEAD"], ["add", "--update", "."], ["write-tree"]):
            done = git(repository, words, index)
            if done.returncode:
                raise ConfigError(f"git cannot read the working tree of {repository}: {done.stderr.strip()[:300]}")
    return done.stdout.strip()


def _write_tree(repository: Path, tree: str, target: Path, index: Path, shown: str) -> None:
    """Write the files of a tree, or of a commit, which is `shown` where git cannot."""
    for words in (["read-tree", tree], ["checkout-index", "--all", "--quiet", f"--prefix={target}/"]):
        done = git(repository, words, {"GIT_INDEX_FILE": str(index)})
        if done.returncode:
            raise LaunchError(f"git cannot write the files of {shown}: {done.stderr.strip()[:500]}")


def _prepare(words: Sequence[str], top: Path, log: Path) -> None:
    kill_orphans = adopting()
    try:
        with log.open("wb") as out:
            done = subprocess.run(
                words, cwd=top, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, timeout=_PREPARE_S, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LaunchError(f"prepare ({' '.join(words)[:200]}) cannot be run: {e}") from e
    finally:
        kill_orphans()
    if done.returncode:
        raise LaunchError(f"prepare ({' '.join(words)[:200]}) ended with exit code {done.returncode}: {tail(log)[-500:]}")


def _remove_unused(parent: Path) -> None:
    """Remove what nobody has used for a week."""
    for ready in parent.glob(f"*/{_READY}"):
        if time.time() - ready.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(ready.parent, ignore_errors=True)
