"""The page on the architecture names modules and files that exist."""

from __future__ import annotations

import re

import pytest

from playbook.paths import repo_root

PAGE = (repo_root() / "docs/guide/architecture.md").read_text(encoding="utf-8")
ROOTS = ("", "app/", "bench/", "trainer/", "app/playbook_app/", "bench/playbook_bench/", "trainer/playbook_trainer/")


def there(path: str) -> bool:
    return any((repo_root() / f"{root}{path}").exists() for root in ROOTS)


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:playbook(?:_app|_bench|_trainer)?|run|judge|launch|machine|observe)(?:\.\w+)+)`", PAGE)))
)
def test_modules_exist(name: str) -> None:
    path = name.replace(".", "/")
    assert there(f"{path}.py") or there(path)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"(?:^|[\s>`(])((?:[a-z_]+/)+(?:\w+\.(?:py|yaml))?)(?=[\s<`,;)])", PAGE))))
def test_rooms_and_files_exist(name: str) -> None:
    assert there(name.rstrip("/")) or there(f"playbook/{name.rstrip('/')}")
