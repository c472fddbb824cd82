"""What a stranger meets first, in headless Chromium: home, the pages of decisions, search and question box, and pages on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from site_browser import ASK, names, places

from playbook.paths import repo_root
from playbook_app.site.doors import DOORS
from playbook_app.site.doors import read as read_doors

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_home_has_the_form_in_its_first_screen_and_five_facts_two_of_them_refuted(
    chromium: Any, site_root: str, size: dict[str, int]
) -> None:
    page = chromium.new_context(viewport=size).new_page()
    page.goto(f"{site_root}/index.html")
    page.wait_for_selector("#pb-position")
    box = page.locator("#pb-diagnose").bounding_box()
    assert box["y"] + box["height"] <= size["height"]
    facts = page.locator(".pb-facts li").all_inner_texts()
    assert len(facts) == 5
    assert sum("refuted" in f for f in facts) >= 2
    page.context.close()


def test_no_page_is_taller_than_twelve_screens_or_wider_than_one_on_a_phone(chromium: Any, built_site: Path, site_root: str) -> None:
    page = chromium.new_context(viewport=PHONE).new_page()
    wrong, records = [], 0
    for name in names(built_site):
        records += name.startswith("evidence/")
        if name.startswith("evidence/") and name != "evidence/index.html" and records % 20:
            continue  # records are alike
        page.goto(f"{site_root}/{name}")
        height, width = page.evaluate("[document.documentElement.scrollHeight, document.documentElement.scrollWidth]")
        if height > 12 * PHONE["height"] or width > PHONE["width"]:
            wrong.append(f"{name}: {height / PHONE['height']:.1f} screens, {width} pixels wide")
    page.goto(f"{site_root}/_generated/published.html#r294")
    assert page.is_visible("#r294"), "a place that is linked to is shown"
    page.context.close()
    assert not wrong, wrong


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_what_a_search_finds_takes_two_lines_of_text_each(chromium: Any, site_root: str, size: dict[str, int]) -> None:
    page = chromium.new_context(viewport=size).new_page()
    page.goto(f"{site_root}/index.html")
    if size == PHONE:
        page.click("label.md-header__button[for=__search]")
    page.locator("input.md-search__input").press_sequentially("how much CP for 128K on 64 H100")
    page.wait_for_selector(".md-search-result__article p", timeout=20_000)
    lines = page.locator(".md-search-result__item > a p:not(.md-search-result__terms)").evaluate_all(
        "all => all.map(e => e.clientHeight / parseFloat(getComputedStyle(e).lineHeight))"
    )
    assert len(lines) >= 5
    assert max(lines) <= 2.1
    page.context.close()


def test_a_search_has_the_page_that_answers_among_its_first_three(home: Any) -> None:
    asked = yaml.safe_load((Path(__file__).parent / "searches.yaml").read_text(encoding="utf-8"))
    assert len(asked) == 50
    found = home.evaluate(ASK, [query for query, *_ in asked])
    missed = [
        f"{query}: {places(found[query])[:3]}"
        for query, *pages in asked
        if not any(p in at for p in pages for at in places(found[query])[:3])
    ]
    assert len(missed) <= 2, missed


def test_the_question_box_answers_with_a_command_a_decision_a_skill_or_a_card(home: Any) -> None:
    asked = yaml.safe_load((Path(__file__).parent / "questions.yaml").read_text(encoding="utf-8"))
    assert len(asked) == 50
    found = home.evaluate(
        "async (all) => { const f = document.querySelector('form.pb-ask'), r = []; for (const q of all) r.push(await f.playbookAsk(q)); return r }",
        [question for question, _ in asked],
    )
    missed = []
    for (question, wanted), answer in zip(asked, found, strict=True):
        told = " ".join([answer["command"], *answer["commands"], *answer["pages"], *answer["skills"], *answer["cards"][:2]])
        missed += [] if any(w in told for w in wanted.split(" | ")) else [f"{question}: {told}"]
    assert not missed, missed


@pytest.mark.parametrize("door", ["fsdp-or-3d", "how-much-cp", "which-dispatcher"])
def test_a_decision_ends_in_a_configuration_beside_its_alternatives(page: Any, site_root: str, door: str) -> None:
    page.goto(
        f"{site_root}/_generated/{door}.html?model=qwen3_30b_a3b&gpus=64&hardware=h100"
        + ("&seq_len=32768" if door == "how-much-cp" else "")
    )
    page.wait_for_selector("#pb-door-best")
    rows = [
        r
        for r in read_doors(repo_root() / "docs" / "decisions.jsonl")
        if (r.asked.model, r.asked.hardware, r.asked.gpus) == ("qwen3_30b_a3b", "h100", 64)
    ]
    named = DOORS[[d.page for d in DOORS].index(door)].door
    rows = [r for r in rows if r.asked.door == named and not r.asked.network and r.asked.seq_len == (32768 if named == "cp" else 4096)]
    best = max(rows, key=lambda r: r.speed)
    assert f"{best.speed:,.0f} tokens/s per GPU, {best.settings}" in page.inner_text("#pb-door-best")
    assert "nearest" not in page.inner_text("#pb-door-case")
    assert page.locator(".pb-compared tbody tr").count() == len(rows) >= 3
    assert f"--export {'torchtitan' if 'backend=torch' in best.settings else 'megatron-lm'}" in page.inner_text("#pb-door-answer")
    page.fill("#pb-door input[name=gpus]", "96")
    assert "not yours" in page.inner_text("#pb-door-case")
    assert "playbook plan qwen3_30b_a3b --gpus 96 --hardware h100" in page.inner_text("#pb-door-case")
    page.fill("#pb-door input[name=model]", "no such model")
    assert "No model of the planner" in page.inner_text("#pb-door-answer")
