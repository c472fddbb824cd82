"""Where shipped data lives: the one place that builds such a path."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path, PurePath

from playbook.errors import ConfigError

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

OWN_FILE = "playbook.toml"
"""In the working folder or above it: where a team keeps cards and cases of its own."""
DEFAULT_RESULTS = Path(".playbook/results")
"""Where runs leave their records, unless told otherwise: beside the nearest `playbook.toml`, else in the working folder."""


_PACKAGE = Path(__file__).resolve().parent


def repo_root() -> Path:
    """The folder that holds `playbook/`: the repository, or site-packages for an installed wheel."""
    return _PACKAGE.parent


def sources(tree: Path) -> list[str]:
    """The folders of a checkout that the packages lie in, as PYTHONPATH takes them."""
    return [str((tree / part).resolve()) for part in (".", "app", "bench", "trainer")]


def data_root(kind: str) -> Path:
    """The folder of one kind of shipped data.

    An installed wheel carries it under `playbook/_data/<kind>`; a checkout has it in the repository.

    Raises:
        KeyError: `kind` is not one of `KINDS`.
    """
    shipped = _PACKAGE / "_data" / kind
    return shipped if shipped.is_dir() else repo_root() / KINDS[kind]


def folders(kind: str) -> list[Path]:
    """The shipped folder of cards or cases, and after it the user's own: `PLAYBOOK_CARDS`, else what the nearest `playbook.toml` names.

    Raises:
        ConfigError: the file is none, or names something that is no folder.
    """
    users_folder = os.environ.get(f"PLAYBOOK_{kind.upper()}") or _named_in_file(kind)
    if users_folder and not Path(users_folder).is_dir():
        raise ConfigError(f"{users_folder} is no folder; expected your own {kind} there (--{kind}, or {OWN_FILE})")
    return [data_root(kind), *([Path(users_folder)] if users_folder and Path(users_folder).resolve() != data_root(kind).resolve() else [])]


def own_file() -> Path | None:
    """The nearest `playbook.toml`, from the working folder upwards."""
    working_folder = Path.cwd()
    return next((f / OWN_FILE for f in (working_folder, *working_folder.parents) if (f / OWN_FILE).is_file()), None)


def default_results() -> Path:
    """Where records are written and looked for, unless told otherwise.

    Cards are found from below `playbook.toml`, so their evidence is too.
    """
    toml = own_file()
    return DEFAULT_RESULTS if toml is None or toml.parent == Path.cwd() else toml.parent / DEFAULT_RESULTS


def _named_in_file(kind: str) -> Path | None:
    path = own_file()
    if path is None:
        return None
    try:
        named = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f'{path} cannot be read: {e}; expected lines such as cards = "cards"') from e
    unknown = [key for key, value in named.items() if key not in ("cards", "cases") or not isinstance(value, str)]
    if unknown:
        raise ConfigError(f'{path}: \'{unknown[0]}\' is not known, or no text; expected cards = "FOLDER" and cases = "FOLDER"')
    return path.parent / named[kind] if kind in named else None


def in_package(path: Path) -> bool:
    """Whether a path lies in the package, as the data of an installed wheel do, and not in a repository around it."""
    return path.resolve().is_relative_to(_PACKAGE)


def shipped(kind: str, path: PurePath) -> Path | None:
    """The file of one kind that a path names as guides, cards and skills write it (`trainer/configs/...`); None where there is none, or
    it leads out.

    Raises:
        KeyError: `kind` is not one of `KINDS`.
    """
    if not path.is_relative_to(KINDS[kind]):
        return None
    root = data_root(kind)
    file = root / path.relative_to(KINDS[kind])
    try:
        return file if file.is_file() and file.resolve().is_relative_to(root.resolve()) else None
    except OSError:  # a name that no file system takes
        return None
