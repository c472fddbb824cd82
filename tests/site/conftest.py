from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from site_browser import served, started, watched
from site_tree import Generated, add_sweep, build, generated, make_tree

from playbook.paths import data_root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """With one card, for the pages of each are made anew by every test; without the planner's answers, for their pages change with no record."""
    made = make_tree(tmp_path, shipped=False)
    for answers in ("plans", "decisions"):
        (made / "docs" / f"{answers}.jsonl").unlink()
    return made


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    """The pages of such a tree, for tests that only read."""
    return generated(make_tree(tmp_path_factory.mktemp("plain"), shipped=False))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    """The same with the shipped cards and a sweep."""
    made = make_tree(tmp_path_factory.mktemp("whole"))
    add_sweep(made)
    return generated(made)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as a reader meets it: the real pages, cards and evidence, and a card, a verdict and a sweep of the tests' own."""
    made = make_tree(tmp_path_factory.mktemp("browser"))
    add_sweep(made)
    return build(made, more=[data_root("results")])


@pytest.fixture(scope="session")
def site_root(chromium: Any, built_site: Path) -> Iterator[str]:
    """The site's address. A missing Chromium is noticed before the build."""
    with served(built_site) as root:
        yield root


@pytest.fixture(scope="module")
def context(chromium: Any) -> Iterator[Any]:
    """One browser window's worth of state for a module, so that pages share their cache."""
    made = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield made
    made.close()


@pytest.fixture
def page(context: Any, site_root: str) -> Iterator[Any]:
    """A page that fails its test if it logs an error, throws, or asks another host."""
    made = context.new_page()
    wrong = watched(made, site_root)
    yield made
    made.close()
    assert not wrong, wrong


@pytest.fixture
def home(page: Any, site_root: str) -> Any:
    """The home page, opened."""
    page.goto(f"{site_root}/index.html")
    return page


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: the folder that PLAYBOOK_SCREENSHOTS names, or a temporary one."""
    folder = Path(os.environ.get("PLAYBOOK_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
