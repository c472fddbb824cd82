"""The pages of experiments: a question, its answer first, short enough to read, and found by whoever cites them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from playbook.cards.load import read_cards
from playbook.cards.model import Source
from playbook.paths import data_root, repo_root

FOLDER = repo_root() / "docs/experiments"
PAGES = sorted(p for p in FOLDER.glob("*.md") if p.stem != "index")
MOST_WORDS = 600
MOST_WORDS_IN_ALL = 15_500


def ours() -> list[tuple[str, Source]]:
    cards = [entry.card for entry in read_cards([data_root("cards")]).loaded]
    return [(claim.id, s) for card in cards for claim in card.claims for s in claim.sources if s.origin == "ours"]


def anchors(page: Path) -> set[str]:
    return {slugify(h.replace("`", ""), "-") for h in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


def test_every_source_of_our_own_leads_to_a_heading_that_exists() -> None:
    sources = ours()
    assert sources
    lost = []
    for claim, source in sources:
        page, _, heading = (source.url or "").partition("#")
        if not page or not (repo_root() / page).is_file() or heading not in anchors(repo_root() / page):
            lost.append((claim, source.title, source.url))
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_asks_a_question_answers_it_first_and_is_short(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    title, _, body = content.partition("\n")
    assert re.fullmatch(r"# .*\?", title)
    assert body.lstrip().startswith("**Answer.** ")
    assert len(content.split()) <= MOST_WORDS


def test_all_pages_together_can_be_read_in_an_hour() -> None:
    assert sum(len(p.read_text(encoding="utf-8").split()) for p in FOLDER.glob("*.md")) <= MOST_WORDS_IN_ALL


def test_the_index_lists_every_page_under_its_own_title() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert [p.stem for p in PAGES if f"[{p.read_text(encoding='utf-8').splitlines()[0][2:]}]({p.name})" not in index] == []


def test_every_id_on_a_page_is_a_record() -> None:
    records = {p.stem for p in (repo_root() / "bench/results").glob("*/01*.json")}
    named = {i for p in PAGES for i in re.findall(r"\b01[0-9A-Z]{24}\b", p.read_text(encoding="utf-8"))}
    assert named
    assert named - records == set()
