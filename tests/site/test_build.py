"""The built site: strict, complete, and without a request to anywhere else."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from site_browser import tags
from site_tree import ID, build, make_tree

from playbook.cards.load import load_all

pytestmark = pytest.mark.full

FETCHED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
    ("use", "href"),
}
NAVIGATION = {"canonical", "prev", "next", "alternate"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(make_tree(tmp_path_factory.mktemp("site")))


def words(path: Path) -> str:
    """A built page with its entities and its unbreakable spaces as plain characters."""
    return html.unescape(path.read_text()).replace("\u00a0", " ")


def pages(built: Path) -> list[Path]:
    return sorted(built.rglob("*.html"))


def test_no_page_is_too_large_for_a_phone(built: Path) -> None:
    assert [f"{p.name}: {p.stat().st_size}" for p in pages(built) if p.stat().st_size > 300_000] == []


def test_no_page_fetches_anything_from_elsewhere(built: Path) -> None:
    assert len(pages(built)) > 10
    for page in pages(built):
        opened = [(tag, values) for tag, values in tags(page.read_text()) if tag != "link" or values.get("rel") not in NAVIGATION]
        fetched = [value for tag, values in opened for name, value in values.items() if (tag, name) in FETCHED and value]
        assert fetched
        outside = [u for u in fetched if re.match(r"(?:[a-z]+:)?//", u)]
        assert not outside, f"{page.name}: {outside}"


def test_no_style_sheet_names_another_host(built: Path) -> None:
    for sheet in built.rglob("*.css"):
        found = [u for u in re.findall(r"url\(\s*[\"']?([^)\"']+)", sheet.read_text()) if re.match(r"(?:https?:)?//", u)]
        assert not found, f"{sheet.name}: {found}"


def test_the_search_keeps_states_of_its_index_apart(built: Path) -> None:
    """What it mends is looked up in a browser (`test_browser.py`); here it is seen that the theme's script still is the one that is mended."""
    (worker,) = (built / "assets/javascripts/workers").glob("search.*.min.js")
    text = worker.read_text()
    assert text.count('e=e+s+o.id+","') == 1
    assert text.count("+s+o.id}") == 0


def test_every_card_is_a_page_and_in_the_navigation(built: Path) -> None:
    home = (built / "index.html").read_text()
    for card in load_all().values():
        assert (built / "cards" / f"{card.id}.html").is_file()
        assert f"cards/{card.id}.html" in home
    # Cards of guidance stand under their phase, that about the trainer stands beside what else tells of the project.
    start, project = home.index("cards/index.html"), home.index("experiments/index.html")
    assert start < home.index("cards/recompute.html") < home.index("cards/torch-trainer-speed.html") < project


def test_numbers_link_to_their_record(built: Path) -> None:
    shown = words(built / "cards" / "fixture-card.html")
    assert re.search(rf'<a href="\.\./evidence/{ID}\.html">\+7\.3 % \[\+6\.2, \+8\.5\]</a>', shown)
    assert (built / "evidence" / f"{ID}.html").is_file()
    assert (built / "evidence" / f"{ID}.json").is_file()


def test_reference_pages_come_from_their_tables(built: Path) -> None:
    from playbook_bench.metrics import METRICS

    shown = words(built / "_generated" / "metrics.html")
    assert all(name in shown for name in METRICS)
    keys = words(built / "_generated" / "configuration.html")
    assert "train.warmup_steps" in keys
    assert "optimizer step" in keys
    commands = (built / "_generated" / "commands.html").read_text()
    assert "playbook bench replay" in commands
    assert "--budget" in commands


def test_filters_have_what_they_filter_by(built: Path) -> None:
    shown = (built / "cards" / "index.html").read_text()
    card = re.search(r'<div class="pb-card"([^>]*)>\s*<h2 id="fixture-card"', shown)
    assert card
    held = dict(re.findall(r'data-(\w+)="([^"]*)"', card[1]))
    assert "thingamajig" in held["text"]
    assert set(held["standings"].split()) == {"h200x4:confirmed", ":untested"}
    assert '<option value="h200x4">' in shown
    assert '<option value="confirmed">' in shown


def test_hostile_text_stays_text(built: Path) -> None:
    shown = (built / "cards" / "fixture-card.html").read_text()
    assert "<script>alert" not in shown
    assert 'href="javascript:' not in shown
    assert "onclick" not in re.sub(r">[^<]*<", "><", shown)


def test_api_pages_show_public_names_and_stay_small(built: Path) -> None:
    pages = {p.stem: p.read_text(encoding="utf-8") for p in (built / "api").glob("*.html")}
    assert 'id="playbook.planner.memory.estimate"' in pages["planner"]
    assert 'id="playbook.cards.load.read_cards"' in pages["cards"]
    assert not [name for name, page in pages.items() if re.search(r'id="[\w.]*\._(?!_)', page)]
    assert {name: len(page) for name, page in pages.items() if len(page.encode()) > 300_000} == {}
