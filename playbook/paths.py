"""Where shipped data lives: the one place that builds such a path."""

from __future__ import annotations

from pathlib import Path

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


def here_or_shipped(path: Path) -> Path:
    """A path as it is, or, where nothing is there and it names a file that Playbook ships (`trainer/configs/...`), the shipped one.

    So what guides and cards show can be run in any folder, by a wheel without a checkout too.
    """
    for kind, folder in KINDS.items():
        if path.is_relative_to(folder) and ".." not in path.parts and not path.exists():
            found = data_root(kind) / path.relative_to(folder)
            return found if found.is_file() else path
    return path
