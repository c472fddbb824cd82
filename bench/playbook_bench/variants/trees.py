"""The files of a commit, or of the working tree, in a folder of their own, made ready to run once for each state of the files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from playbook.errors import ConfigError, LaunchError
from playbook.processes import adopting
from playbook.records.evidence import digest
from playbook_bench.launch.outcome import tail
from playbook_bench.variants import checkout

_PREPARE_S = 3600.0
_KEPT_S = 7 * 86_400.0
_READY = "ready"


@dataclass(frozen=True)
class Files:
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
        own = [str(top / part) for part in ("src", ".") if (top / part).is_dir()]
        given = [
            p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and not Path(p).resolve().is_relative_to(self.repository)
        ]
        try:
            inside = _inside(top, str(self.inside))
        except ValueError as e:
            raise LaunchError(f"the folder of the command: {e}") from e
        return inside, {"PYTHONPATH": os.pathsep.join([*own, *given])}

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
            _forget(parent)
            shutil.rmtree(folder, ignore_errors=True)
            top.mkdir(parents=True)
            _write(self.repository, self.tree, top, folder / "index")
            for path, text in self.overlay:
                _lay(top, path, text)
            if self.prepare:
                _prepare([word.replace("{root}", str(self.repository)) for word in self.prepare], top, folder / "prepare.log")
            ready.touch()
        return top


def files(here: Path, tree: str | None, revision: str | None, prepare: Sequence[str], overlay: Mapping[str, str]) -> Files:
    """The files of a tree's hash, or of a revision, or of the working tree, of the repository around `here`.

    Raises:
        ConfigError: there is no repository, the revision is no commit, or a file that is laid over cannot be read.
    """
    repository = around(here)
    if tree is None:
        tree = tree_of(repository, revision) if revision else working_tree(repository)
    try:
        texts = tuple((path, _inside(repository, source).read_text(encoding="utf-8")) for path, source in sorted(overlay.items()))
    except (OSError, ValueError) as e:
        raise ConfigError(f"a file of the variant cannot be read: {e}") from e
    return Files(repository, here.resolve().relative_to(repository), tree, tuple(prepare), texts)


def _inside(top: Path, path: str) -> Path:
    """The file of that path below a folder, links followed.

    Raises:
        ValueError: it lies elsewhere.
    """
    found = (top / path).resolve()
    if not found.is_relative_to(top.resolve()):
        raise ValueError(f"'{path}' leads out of the repository to {found}; expected a path inside it, through no link out of it")
    return found


def _lay(top: Path, path: str, text: str) -> None:
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


def around(here: Path) -> Path:
    """The repository that a folder lies in.

    Raises:
        ConfigError: there is none.
    """
    repository = checkout.top(here)
    if repository is None:
        raise ConfigError(f"{here} lies in no git repository, so there are no commits and no copies of its files; start it in one")
    return repository


def tree_of(repository: Path, reference: str) -> str:
    """The hash of a commit's tree.

    Raises:
        ConfigError: the reference is no commit.
    """
    return checkout.git(repository, ["rev-parse", f"{checkout.commit_of(repository, reference)}^{{tree}}"]).stdout.strip()


def working_tree(repository: Path) -> str:
    """The hash of the tree of all files that git knows of, as they are now; new files that were not added are not in it.

    Raises:
        ConfigError: git cannot read them.
    """
    with tempfile.TemporaryDirectory(prefix="playbook-index-") as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        for words in (["read-tree", "HEAD"], ["add", "--update", "."], ["write-tree"]):
            done = checkout.git(repository, words, index)
            if done.returncode:
                raise ConfigError(f"git cannot read the working tree of {repository}: {done.stderr.strip()[:300]}")
    return done.stdout.strip()


def _write(repository: Path, tree: str, target: Path, index: Path) -> None:
    for words in (["read-tree", tree], ["checkout-index", "--all", "--quiet", f"--prefix={target}/"]):
        made = checkout.git(repository, words, {"GIT_INDEX_FILE": str(index)})
        if made.returncode:
            raise LaunchError(f"git cannot write the files of {tree[:12]}: {made.stderr.strip()[:500]}")


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


def _forget(parent: Path) -> None:
    """Remove what nobody has used for a week."""
    for ready in parent.glob(f"*/{_READY}"):
        if time.time() - ready.stat().st_mtime > _KEPT_S:
            shutil.rmtree(ready.parent, ignore_errors=True)
