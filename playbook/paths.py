"""Where shipped data lives: the one place that builds such a path."""

from __future__ import annotations

from pathlib import Path, PurePath

KINDS = {
    "cards": "cards",
    "schemas": "schemas",
    "skills": "skills",
    "guide": "docs/guide",
    "cases": "bench/cases",
    "results": "bench/results",
    "baselines": "bench/baselines",
    "configs": "trainer/configs",
    "assets": "trainer/assets",
    "tables": "playbook/_tables",
}

DEFAULT_RESULTS = Path(".playbook/results")
"""Where runs leave their records, unless told otherwise: in the working folder."""


def repo_root() -> Path:
    """The folder that holds `playbook/`: the repository, or site-packages for an installed wheel."""
    return Path(__file__).resolve().parent.parent


def data_root(kind: str) -> Path:
    """The folder of one kind of shipped data.

    An installed wheel carries it under `playbook/_data/<kind>`; a checkout has it in the repository.

    Raises:
        KeyError: `kind` is not one of `KINDS`.
    """
    shipped = Path(__file__).resolve().parent / "_data" / kind
    return shipped if shipped.is_dir() else repo_root() / KINDS[kind]


def in_package(path: Path) -> bool:
    """Whether a path lies in the package, as the data of an installed wheel do, and not in a repository around it."""
    return path.resolve().is_relative_to(Path(__file__).resolve().parent)


def shipped(kind: str, path: PurePath) -> Path | None:
    """The file of one kind that a path names as guides, cards and skills write it (`trainer/configs/...`); None where there is none, or it leads out.

    Raises:
        KeyError: `kind` is not one of `KINDS`.
    """
    if not path.is_relative_to(KINDS[kind]):
        return None
    root = data_root(kind)
    found = root / path.relative_to(KINDS[kind])
    try:
        return found if found.is_file() and found.resolve().is_relative_to(root.resolve()) else None
    except OSError:  # a name that no file system takes
        return None
