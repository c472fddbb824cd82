"""How a page says to install: from a clone until the repository's address is set, then from there; the image installs what the package has."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from types import SimpleNamespace

import pytest

from playbook.paths import repo_root

DOCS = repo_root() / "docs"
LINE = "# in a clone of this repository"
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if LINE in p.read_text(encoding="utf-8")]
PROJECT = tomllib.loads((repo_root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(hooks, path, address):
    """The page's text as the site gets it."""
    file = SimpleNamespace(src_uri=path.relative_to(DOCS).as_posix(), dest_uri="x.html")
    config = SimpleNamespace(repo_url=address, extra={"inserts": {}, "records": set(), "questions": {}})
    return hooks.on_page_markdown(path.read_text(encoding="utf-8"), SimpleNamespace(file=file, edit_url=None, meta={}), config)


def test_pages_install_from_a_clone_until_the_address_is_set_and_then_from_there(hooks):
    assert {"index.md", "agents.md", "getting-started.md", "your-trainer.md"} <= {p.name for p in PAGES}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert shown(hooks, path, "") == text
        there = shown(hooks, path, "https://example.org/playbook")
        assert LINE not in there, path
        assert there.count("@ git+https://example.org/playbook'") == text.count(LINE), path
    agents = shown(hooks, DOCS / "guide" / "agents.md", "https://example.org/playbook")
    assert "pip install 'perf-playbook[mcp] @ git+https://example.org/playbook'" in agents


def test_every_page_that_installs_says_so_in_one_way():
    """Beside editable installs, which need a clone anyway."""
    lines = {
        (path.name, line)
        for path in (repo_root() / "README.md", *sorted(DOCS.rglob("*.md")))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"pipx? install ", line) and " -e " not in line
    }
    assert lines
    assert [entry for entry in lines if LINE not in entry[1]] == []


def test_the_image_installs_extras_that_exist_and_starts_the_command():
    text = (repo_root() / "Containerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (entry,) = re.findall(r'^ENTRYPOINT \["(\S+)"\]$', text, re.MULTILINE)
    assert entry in PROJECT["scripts"]
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (repo_root() / source).exists()
