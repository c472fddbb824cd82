"""Pages that gather: claims by machine, configuration families, models, curves, the API, and the text for machines."""

from __future__ import annotations

import json
import re
import shutil
from datetime import date
from html import unescape
from pathlib import Path

import pytest
from site_tree import ID, LENGTHS, SWEEP, Generated, add_sweep, generated, page, reseal

from playbook.cards.load import load_all
from playbook.cards.model import guidance
from playbook.paths import data_root
from playbook.planner.models import MODELS
from playbook.records.read import read
from playbook_app.site import build
from playbook_app.site.cards import DECIDED, Shelf, anchor, changes
from playbook_app.site.evidence import trace_page
from playbook_app.site.indexes import llms
from playbook_app.site.lists import facts, one_gpu_page, record_and_trace, travel_page
from playbook_app.site.models import plan_of, settings
from playbook_app.site.text import NBSP


def test_a_card_draws_a_current_interval_from_gpus_and_home_counts_it(plain: Generated) -> None:
    made = plain.made
    assert "**1 are settled on GPUs**" in made.inserts["coverage"]
    shown = unescape(made.inserts["example of verdicts"]).replace(NBSP, " ")
    assert 'cards/fixture-card.html#x1"' in shown
    assert "+7.3 % [+6.2, +8.5]" in shown
    assert "at least +3 %" in shown
    assert "confirmed" in shown
    places = {name: float(at) for name, at in re.findall(r'class="pb-(zero|margin|interval)" x1="([-0-9.]+)%', shown)}
    assert places["zero"] < places["margin"] < places["interval"], "the whole interval lies where the claim holds"


def test_a_verdict_that_is_out_of_date_is_not_drawn_and_counts_as_open(tree: Path) -> None:
    made = generated(tree, date(2199, 1, 1)).made
    assert made.inserts["example of verdicts"] == ""
    assert "**0 are settled on GPUs**" in made.inserts["coverage"]


def test_home_has_every_card_once(plain: Generated) -> None:
    made = plain.made
    for card in made.cards:
        assert made.inserts["cards by phase"].count(f"(cards/{card}.md)") == (card not in made.trainer)


def test_rows_of_claims_carry_what_they_are_filtered_by(whole: Generated) -> None:
    rows = re.findall(r'data-text="([^"]*)" data-standings="([^"]*)" data-card="([^"]*)"', unescape(whole.page("_generated/claims.md")))
    assert len(rows) == sum(1 + bool(c.mechanism_check) for card in load_all().values() for c in card.claims) + 2
    held = {words.split()[0]: (standings, card) for words, standings, card in rows}
    assert held["x1"] == ("h200x4:confirmed", "fixture-card")
    assert held["x1.m"] == (":untested", "fixture-card")


def test_claims_that_gpus_have_settled_come_first_and_untested_ones_are_folded(plain: Generated) -> None:
    shown = plain.page("_generated/claims.md")
    settled, untested = shown.index("Current, on GPUs: 1"), shown.index("<summary>Untested: ")
    assert settled < shown.index("fixture-card.md#x1)") < untested < shown.index("fixture-card.md#x1-m)")


def test_a_card_shows_its_settings_in_the_words_of_other_trainers_and_its_intervals(tree: Path) -> None:
    words = {"megatron-lm": ["--moe-token-dispatcher-type alltoall"], "torchtitan": ["a<b"]}
    generated(tree, reference=build.Reference(flags=lambda keys: words if keys == {"moe.dispatcher": "alltoall"} else {}))
    shown = unescape(page(tree, "cards/fixture-card.md"))
    assert "| Set | Megatron-LM | torchtitan |" in shown
    assert "--moe-token-dispatcher-type alltoall" in shown
    assert shown.index("## What to set") < shown.index('href="../cards/fixture-card.html#x1"') < shown.index("## Claims")
    assert "<p hidden>thingamajig</p>" in shown


def test_every_model_is_on_its_page_with_its_source(plain: Generated) -> None:
    shown = plain.page("_generated/models.md")
    for name, shape in MODELS.items():
        assert f"{{ #{name.replace('_', '-')} }}" in shown
        assert f"calculator.md?model={name}" in shown
        assert shape.source in shown or not shape.source.startswith("http")
    assert "671" in shown or "682" in shown, "DeepSeek-V3 with its MTP layer"


def test_every_family_is_listed_and_what_its_link_opens_is_what_was_checked(whole: Generated) -> None:
    shown = whole.page("_generated/families.md")
    checked = 0
    for card in load_all().values():
        for family in card.families:
            assert f"../cards/{card.id}.md#configurations-in-use" in shown
            plan = plan_of(family)
            if plan is not None:
                checked += 1
                assert settings(family)["gpus"] == plan.gpus
                assert all(getattr(plan, k) == v for k, v in family.layout.items() if k not in ("dp", "edp"))
    assert checked > 5


def test_a_sweep_is_drawn_with_its_speed_its_memory_and_its_intervals(whole: Generated) -> None:
    for name in ("cards/long-context-cp-sizing.md", f"evidence/{SWEEP}.md"):
        shown = unescape(whole.page(name))
        assert shown.count('<svg class="pb-curve"') == 2
        assert shown.count('<svg class="pb-contrasts"') == 1
        for length, (rate, gib) in LENGTHS.items():
            assert f"{length} {rate:,.0f} tokens/s" in shown
            assert f"{length} {gib:.3g} GiB" in shown
        assert "32768 out of memory" in shown
        assert "16384 over 4096: −9.7 %, interval −11.7 % to −7.7 %" in shown


def test_a_curve_with_figures_that_are_none_is_left_undrawn(tree: Path) -> None:
    def spoil(data: dict) -> None:
        data["derived"]["curve"]["points"] = [{"variant": "a", "outcome": "ok", "launches": 4, "value": None}]
        data["derived"]["curve"]["contrasts"] = [{"name": "b", "weights": {}, "effect": None, "low": None, "high": None}]

    shutil.copy(data_root("cards") / "long-context-cp-sizing.yaml", tree / "cards")
    reseal(add_sweep(tree), spoil)
    assert "<svg class=" not in generated(tree).page(f"evidence/{SWEEP}.md").split("## Launches")[0]


def test_the_file_of_what_is_measured_holds_current_verdicts_alone(whole: Generated) -> None:
    lines = [line for line in whole.page("llms-measured.txt").splitlines() if line.startswith("- ")]
    assert any(f"On h200x4, 2026-11-20: confirmed, +7.3 % [+6.2, +8.5] (evidence {ID})" in line for line in lines)
    assert not [line for line in lines if not re.search(r": (?:confirmed|refuted)(?:,|\b)", line) or "stale" in line]
    assert "untested" in whole.page("llms.txt")


def test_the_index_for_machines_has_absolute_links_where_the_site_has_an_address() -> None:
    shelf = Shelf(load_all(), [], date(2026, 11, 21), {})
    targets = re.findall(r"\]\(([^)]+)\)", llms(shelf, [Path("docs/guide/agents.md")], "https://example.org/playbook"))
    assert len(targets) > 20
    assert all(t.startswith("https://example.org/playbook/") for t in targets)


def test_the_text_for_machines_has_every_card_claim_and_verdict(whole: Generated) -> None:
    made = whole.made
    index, full = whole.page("llms.txt"), whole.page("llms-full.txt")
    assert re.match(r"# [^\n]+\n\n> [^\n]+\n\n[^#]", index), "a title, a summary in a quotation, then text"
    assert set(re.findall(r"^## (.+)$", index, re.MULTILINE)) == {"Cards", "Guides", "Optional"}
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)(?:: .+)?$", index, re.MULTILINE)
    assert len(listed) == index.count("\n- ")
    assert {f"cards/{card}.html.md" for card in made.cards if card not in made.trainer} == set(made.plain) <= set(listed)
    for path in listed:
        source = path.removesuffix(".html") + ".md" if path.endswith(".html") else path
        assert path in made.plain or (whole.tree / "docs" / source).is_file(), path
    for card in guidance(load_all()).values():
        assert all(c.statement in full and f"### {c.id}" in full for c in card.claims)
    own = made.plain["cards/fixture-card.html.md"]
    assert f"On h200x4, 2026-11-20: confirmed, +7.3 % [+6.2, +8.5] (evidence {ID})" in own
    assert "<span" not in own + full
    assert own.strip() in full


@pytest.mark.parametrize("name", ["layout.js", "memory.js", "calculator.js", "filter.js", "search.js"])
def test_scripts_of_the_site_name_no_other_host(name: str, tree: Path) -> None:
    assert "http" not in (tree / "docs" / "javascripts" / name).read_text()


def test_the_calculator_carries_every_model(plain: Generated) -> None:
    held = re.search(r'id="pb-tables">(.*?)</script>', plain.page("_generated/calculator.md"))
    assert held
    assert set(json.loads(held[1])["models"]) == set(MODELS)


@pytest.fixture(scope="module")
def shipped() -> Shelf:
    """The cards and records that ship."""
    cards = load_all()
    home = {c.id: card.id for card in cards.values() for c in card.claims}
    return Shelf(cards, read([data_root("results")], cards), date(2026, 11, 26), home)


def test_the_page_of_one_gpu_has_settled_claims_with_their_price_and_says_why_others_are_not(shipped: Shelf) -> None:
    shown = one_gpu_page(shipped).replace(NBSP, " ")
    settled, waiting = shown.split("## Not settled")
    rows = {
        part: [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in part.splitlines()
            if ".md#" in line and line.startswith("| ")
        ]
        for part in (settled, waiting)
    }
    records = {r.id: r for r in shipped.records}
    assert rows[settled]
    for name, _, verdict, *_, price in rows[settled]:
        record = records[verdict.partition("../evidence/")[2].partition(".md")[0]]
        assert record.status in DECIDED, name
        assert record.status in verdict, name
        assert "stale" not in verdict, name
        assert price == f"{record.content.gpu_seconds:.0f}", name
    for name, _, why, *_ in rows[waiting]:
        assert why.strip(), name
    assert '<table class="pb-forest">' in settled


def test_home_states_facts_with_their_effects_and_verdicts(shipped: Shelf) -> None:
    lines = facts(shipped).splitlines()
    assert len(lines) == 5, "each claim has a current verdict from GPUs"
    assert sum("refuted" in line for line in lines) >= 2
    for line in lines:
        assert re.search(r"\*\*[+−][\d.]+", line), line
        assert "evidence/01" in line


def test_a_card_says_on_what_its_verdicts_rest_and_what_nobody_has_measured(shipped: Shelf) -> None:
    for card in shipped.cards.values():
        rows = changes(shipped, card)
        assert rows, "every card has the section"
        assert any(f"#{anchor(c.id)})" in ids for *_, ids in rows for c in card.claims), card.id


def test_the_page_of_a_trace_says_what_the_difference_of_the_steps_is_made_of(shipped: Shelf) -> None:
    pairs = [r for r in shipped.records if r.get("trace_id") and len(r.get("variants", default={})) == 2]
    assert pairs
    checked = 0
    for trace in pairs:
        shown = trace_page(trace).replace(NBSP, " ")
        if "## Where the difference lies" not in shown:
            continue
        part = shown.split("## Where the difference lies")[1].split("\n## ")[0]
        figures = [
            float(re.sub(r"[*+, ]", "", line.split(" | ")[2]).replace("−", "-"))
            for line in part.splitlines()
            if line.startswith("| candidate")
        ]
        assert sum(figures[:-1]) == pytest.approx(figures[-1], abs=0.1 * len(figures)), (
            f"{trace.id}: the parts add up to the step, each rounded"
        )
        checked += 1
    assert checked


def test_the_page_that_follows_one_verdict_leads_to_its_record_and_to_the_trace_of_its_case(shipped: Shelf) -> None:
    assert re.findall(r"\[(The \w+)\]\(\.\./evidence/\w+\.md\)", record_and_trace(shipped)) == ["The record", "The trace"]


def test_what_a_card_says_to_avoid_and_what_is_in_dispute_is_shown(whole: Generated) -> None:
    assert "avoid <code>train.recompute&#95;modules&#58; &#91;core&#95;attn&#93;</code>" in whole.page("cards/recompute.md")
    full = whole.page("llms-full.txt")
    assert "; avoid train.recompute_modules: " in full

    for dispute in (d for card in load_all().values() for d in card.disputes):
        assert f"- {dispute.subject}: {', '.join(dispute.claims)}; {dispute.stands} stands. {dispute.why}" in full


def test_the_page_of_travel_counts_what_both_machines_have_decided(shipped: Shelf) -> None:
    known = {(r.claim, r.machine): r for r in shipped.records if r.status in DECIDED and not r.altered}
    rows = [line for line in travel_page(shipped).splitlines() if line.startswith("| [")]
    assert rows
    for row in rows:
        claim = re.match(r"\| \[([^\]]+)\]", row).group(1)
        assert {(claim, "h200x1"), (claim, "h100x1")} <= known.keys()
        one_sign = "not in" not in row or "sign" not in row.rsplit("|", 2)[1]
        cells = [cell.strip() for cell in row.split("|")]
        effects = [float(re.match(r"[+−]?[\d.]+", cell.replace("+", "")).group().replace("−", "-")) for cell in (cells[4], cells[7])]
        between = [re.search(r"&#91;([+−\d.]+), ?\s?([+−\d.]+)", cell.replace(NBSP, " ")) for cell in (cells[4], cells[7])]
        zero = any(b and float(b[1].replace("−", "-")) <= 0 <= float(b[2].replace("−", "-")) for b in between)
        assert one_sign == (zero or (effects[0] > 0) == (effects[1] > 0))
