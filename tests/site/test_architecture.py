"""The page on the architecture names modules and files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from playbook.paths import repo_root

PAGE = (repo_root() / "docs/guide/architecture.md").read_text(encoding="utf-8")
ROOTS = ("", "app/", "bench/", "trainer/", "app/playbook_app/", "bench/playbook_bench/", "trainer/playbook_trainer/")


def there(path: str) -> bool:
    return any((repo_root() / f"{root}{path}").exists() for root in ROOTS)


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:playbook(?:_app|_bench|_trainer)?|run|judge|variants|launch|machine|observe)(?:\.\w+)+)`", PAGE)))
)
def test_modules_exist(name: str) -> None:
    path = name.replace(".", "/")
    assert there(f"{path}.py") or there(path)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"(?:^|[\s>`(])((?:[a-z_]+/)+(?:\w+\.(?:py|yaml))?)(?=[\s<`,;)])", PAGE))))
def test_rooms_and_files_exist(name: str) -> None:
    assert there(name.rstrip("/")) or there(f"playbook/{name.rstrip('/')}")


def drawn() -> dict[str, str]:
    """The packages of the drawing, top to bottom, with what stands in the box of each."""
    boxes = re.findall(r'<g class="pb-room"><rect x="\d+" y="(\d+)".*?pb-room-name[^>]*>(\w+):[^<]*</text>(.*?)</g>', PAGE, flags=re.DOTALL)
    return {name: words for _, name, words in sorted(boxes, key=lambda box: int(box[0]))}


def test_the_drawing_and_the_contract_of_imports_agree() -> None:
    settings = tomllib.loads((repo_root() / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    assert list(drawn()) == list(dict.fromkeys(name.split(".")[0] for layer in layers for name in layer.split(" | ")))
    built = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(drawn()) == sorted(Path(package).name for package in built)
    for package in built:
        folders = {path.parent.name for path in (repo_root() / package).glob("*/__init__.py")}
        assert set(re.findall(r"(\w+)/", drawn()[Path(package).name])) == folders, package
