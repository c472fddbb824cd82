"""Every command that README and guide show is one that this version's command line takes, on cards, cases and configurations that exist."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest

from playbook.paths import repo_root
from playbook.skills import model
from playbook_app.cli.commands import skills
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import load, parse_overrides

ROOT = repo_root()
FORM = re.compile(r"\[|\.\.\.|^N$")
"""Words of a form that is to be filled in."""
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/index.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/trainer-files.md",
    *sorted((ROOT / "docs/guide").glob("*.md")),
    *sorted((ROOT / "docs/learn").glob("*.md")),
]


@pytest.fixture(scope="module")
def known():
    return skills.known_here([])


def problems(text, known):
    page = SimpleNamespace(body=lambda: enumerate(text.splitlines(), start=1))
    found = [(line, words) for line, words in model.command_lines(page) if not any(FORM.search(w) for w in words)]
    told = [f"{line}: {what}" for line, words in found for what in model._command(words, known, set())]
    written = re.findall(r'title="([^"]+)"', text)  # files that the page has the reader write
    told = [t for t in told if not any(f"'{path}'" in t for path in written)]
    return [t for t in told if "Missing argument" not in t]  # a sentence names `playbook train --dry-run` and does not call it


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_the_commands_of_the_pages_are_taken(path, known):
    assert problems(path.read_text(encoding="utf-8"), known) == []


def runs(text):
    """The trainer's runs that a page shows with a number of ranks, as configuration, overrides and ranks."""
    page = SimpleNamespace(body=lambda: enumerate(text.splitlines(), start=1))
    for _, words in model.command_lines(page):
        given = {k: v for k, v in itertools.pairwise(words) if k.startswith("--")}
        if words[0] == "torchrun":
            yield (
                *words[words.index("playbook_trainer") + 1 :][:1],
                words[words.index("playbook_trainer") + 2 :],
                int(given["--nproc-per-node"]),
            )
        elif words[1] == "train" and "--ranks-per-node" in given:
            yield words[2], [w for w in words[3:] if "=" in w], int(given["--nodes"]) * int(given["--ranks-per-node"])


@pytest.mark.parametrize(
    "path",
    [p for p in [*PAGES, *sorted(ROOT.glob("skills/*/SKILL.md"))] if any(runs(p.read_text(encoding="utf-8")))],
    ids=lambda p: p.parent.name + "/" + p.name,
)
def test_a_run_that_a_page_shows_can_run_on_the_ranks_that_it_names(path):
    for config, overrides, ranks in runs(path.read_text(encoding="utf-8")):
        assert dry_run(load(ROOT / config, parse_overrides(overrides)), ranks).stages


def test_a_command_of_yesterday_is_found(known):
    assert problems("`playbook gate --against HEAD moe-dispatch-bytes`\n", known)
    assert problems("```text\nplaybook confirm moe-dispatcher-choise\n```\n", known)
    assert problems("`torchrun -m playbook_trainer trainer/configs/gone.yaml`\n", known)
