"""Every command that README and guide show is one that this version's command line takes, on cards, cases and configurations that exist."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from playbook import cli_skills, skills_check
from playbook.paths import repo_root

ROOT = repo_root()
FORM = re.compile(r"\[|\.\.\.|^N$")
"""Words of a form that is to be filled in."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/trainer-files.md", *sorted((ROOT / "docs/guide").glob("*.md"))]


@pytest.fixture(scope="module")
def known():
    return cli_skills.known_here([])


def problems(text, known):
    page = SimpleNamespace(body=lambda: enumerate(text.splitlines(), start=1))
    found = [(line, words) for line, words in skills_check.command_lines(page) if not any(FORM.search(w) for w in words)]
    told = [f"{line}: {what}" for line, words in found for what in skills_check._command(words, known, set())]
    return [t for t in told if "Missing argument" not in t]  # a sentence names `playbook train --dry-run` and does not call it


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_the_commands_of_the_pages_are_taken(path, known):
    assert problems(path.read_text(encoding="utf-8"), known) == []


def test_a_command_of_yesterday_is_found(known):
    assert problems("`playbook gate --against HEAD moe-dispatch-bytes`\n", known)
    assert problems("```text\nplaybook confirm moe-dispatcher-choise\n```\n", known)
    assert problems("`torchrun -m playbook_trainer trainer/configs/gone.yaml`\n", known)
