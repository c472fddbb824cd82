"""The built site as a reader meets it: every page in headless Chromium, links, search, filters, keyboard, phone, light and dark."""

from __future__ import annotations

import html
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from site_browser import ASK, names, places, tags, watched
from site_tree import CARD

from playbook.cards import search
from playbook.cards.load import load_all, read_cards
from playbook.cards.search import diagnosis_of
from playbook.cards.terms import Facts, load_asked
from playbook.diagnosis.published import nearest
from playbook.diagnosis.setting import setting
from playbook.paths import repo_root
from playbook.planner.models import MODELS
from playbook.planner.time.cluster import cluster, clusters
from playbook_app.site.published import read

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
INSPECT = (Path(__file__).parent / "inspect_page.js").read_text()
CARDS = Path(__file__).parents[1] / "cards"
_PARTS = 4
"""Of the pages, so that each worker opens some."""


def opened(built: Path) -> list[str]:
    """Every page but most of the records': these are alike, and each fifth stands for them."""
    whole = names(built)
    records = [n for n in whole if n.startswith("evidence/") and n != "evidence/index.html"]
    return sorted({*whole} - {*records} | {*records[::5]})


@pytest.mark.parametrize("part", range(_PARTS))
def test_every_page_is_in_order(chromium: Any, built_site: Path, site_root: str, part: int) -> None:
    """Each page, opened once: nothing is logged as an error, nothing is too wide for a phone, and inspect_page.js finds nothing."""
    found: list[str] = []
    context = chromium.new_context(viewport=DESK)
    page = context.new_page()
    wrong = watched(page, site_root)
    for name in opened(built_site)[part::_PARTS]:
        page.set_viewport_size(DESK)
        page.goto(f"{site_root}/{name}")
        page.add_style_tag(content="* { transition: none !important; }")
        for kind, problems in page.evaluate(INSPECT).items():
            found += [f"{kind}: {name}: {p}" for p in problems]
        page.set_viewport_size(PHONE)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        found += [f"phone: {name}: {wide} pixels too wide"] if wide > 0 else []
        found += [f"errors: {name}: {w}" for w in wrong]
        wrong.clear()
    context.close()
    assert not found, "\n".join(found[:40])


def test_no_link_and_no_anchor_is_broken(built_site: Path) -> None:
    opened = {built_site / name: [values for _, values in tags((built_site / name).read_text())] for name in names(built_site)}
    ids = {path: {values.get(k) for values in found for k in ("id", "name")} for path, found in opened.items()}
    links = {path: [values[k] or "" for values in found for k in ("href", "src") if k in values] for path, found in opened.items()}
    broken = []
    for path, found in links.items():
        for link in found:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{path.relative_to(built_site)} -> {link}: no such file")
            elif parts.fragment and target in ids and unquote(parts.fragment) not in ids[target]:
                broken.append(f"{path.relative_to(built_site)} -> {link}: no such anchor")
    assert not broken, "\n".join(broken)
    assert sum(map(len, links.values())) > 1000


@pytest.mark.parametrize(
    ("question", "card"),
    [
        ("all-to-all takes a third of the step", "moe-dispatcher-choice"),
        ("ring attention", "long-context-"),
        ("recompiles with images of variable resolution", "vlm-real-data"),
        ("FP8 slower than bf16", "fp8-recipes"),
        ("host to device offload is slow", "offloading"),
        ("thingamajig", "fixture-card"),
    ],
)
def test_search_finds_a_symptom(home: Any, question: str, card: str) -> None:
    home.locator("input.md-search__input").press_sequentially(question)
    first = "[...document.querySelectorAll('.md-search-result__item > a')].slice(0, 5)"
    home.wait_for_function(f"name => {first}.some(a => a.href.includes(name))", arg=f"cards/{card}", timeout=20_000)


def test_the_question_box_answers_as_the_command_line_does(home: Any, tmp_path: Path) -> None:
    """The same cards first and the same silence, but for words whose forms the page has no stem of."""
    (tmp_path / "fixture-card.yaml").write_text(CARD, encoding="utf-8")
    index = search.index(load_all() | {e.card.id: e.card for e in read_cards([tmp_path]).loaded})
    files = [CARDS / f"{name}.yaml" for name in ("issues", "later_issues", "tenth_issues", "eleventh_issues", "questions")]
    asked = [q.text for q in load_asked()] + [q["ask"] for file in files for q in yaml.safe_load(file.read_text(encoding="utf-8"))]
    found = home.evaluate(
        "async (all) => { const f = document.querySelector('form.pb-ask'), r = []; for (const q of all) r.push(await f.playbookAsk(q)); return r }",
        asked,
    )
    wrong = []
    for question, there in zip(asked, found, strict=True):
        here = search.search(index, question)
        if there["cards"][:1] != [h.id for h in here.hits][:1] or there["command"] != diagnosis_of(question, Facts()):
            wrong.append((question, there, [h.id for h in here.hits]))
    assert len(wrong) <= 0.01 * len(asked), wrong


def test_the_question_box_leads_to_cards_and_to_the_diagnosis(home: Any) -> None:
    home.fill("#pb-ask", "my MoE training on 64 H100 is at 25 % MFU")
    home.keyboard.press("Enter")
    home.wait_for_selector("#pb-asked li")
    assert "playbook diagnose --model MODEL --gpus 64 --gpu h100 --mfu 25" in home.inner_text("#pb-asked")
    home.fill("#pb-ask", "LoRA on the experts")
    home.keyboard.press("Enter")
    home.wait_for_function("document.getElementById('pb-asked').innerText.includes('No card covers')")
    home.click("#pb-asked >> text=Search all pages")
    home.wait_for_selector(".md-search-result__item", timeout=20_000)
    assert home.input_value("input.md-search__input") == "LoRA on the experts"


@pytest.fixture
def form(page: Any, site_root: str) -> Any:
    """The page of the diagnosis, with its form for a file open."""
    page.goto(f"{site_root}/guide/diagnose.html")
    page.wait_for_selector("#pb-position")
    page.click("#pb-diagnose summary")
    return page


def answered(form: Any) -> dict[str, str]:
    """The lines of the answer by their names."""
    return dict(zip(form.locator(".pb-lines dt").all_inner_texts(), form.locator(".pb-lines dd").all_inner_texts(), strict=True))


def test_the_page_of_the_diagnosis_says_what_the_command_says(form: Any) -> None:
    lines = answered(form)
    where = setting(MODELS["qwen3_30b_a3b"], "qwen3_30b_a3b", "h100", 64, seq_len=None, gbs=None)
    runs = nearest(where)
    assert runs is not None
    value = 0.25 * where.peak / where.flops_per_token
    assert lines["you"].startswith(f"{value:,.0f} tokens/s/GPU, 25% MFU, ")
    assert f"{runs.low:,.0f} to {runs.high:,.0f} tokens/s/GPU" in form.inner_text("#pb-position")
    assert form.inner_text("#pb-position").startswith("You are where published runs are")
    assert f"the fastest {runs.most / value - 1:.0%} faster than you" in form.inner_text("#pb-position")
    first = runs.rows[0]
    assert first.predicted
    said = f"({first.id}; the planner says {first.predicted:,.0f})"
    assert any(line.endswith(said) for line in form.locator(".pb-lines dd").all_inner_texts())
    form.fill("#pb-diagnose input[name=speed]", "8")
    assert form.inner_text("#pb-position").startswith("You are below published runs")
    form.select_option("#pb-diagnose select[name=unit]", "tokens/s per GPU")
    assert "--tokens-per-s 8" in form.inner_text("#pb-diagnosis")


def test_the_form_takes_every_gpu_and_any_number_of_them(form: Any) -> None:
    plans = {
        (a.asked.model, a.asked.hardware, a.asked.gpus): a for a in read(repo_root() / "docs" / "plans.jsonl") if a.asked.seq_len == 4096
    }
    planned, rng = {m for m, _, _ in plans}, random.Random(49)
    models = [m for m in MODELS if not m.endswith("_tiny")]
    cases = [("llama3_8b", "h100", 128), ("qwen3_30b_a3b", "h200", 24), ("llama3_8b", "b200", 4), ("deepseek_v3", "h100", 8)]
    for model, gpu, gpus in [*cases, *((rng.choice(models), g, rng.randint(1, 5000)) for g in clusters())]:
        form.fill("#pb-diagnose input[name=model]", model)
        form.select_option("#pb-diagnose select[name=gpu]", gpu)
        form.fill("#pb-diagnose input[name=gpus]", str(gpus))
        if (model, gpu, gpus) in plans and not plans[model, gpu, gpus].settings:
            assert form.inner_text("#pb-diagnosis").startswith("No plan of this model fits")
            continue
        lines = answered(form)
        where = setting(MODELS[model], model, gpu, gpus, seq_len=4096, gbs=None)
        tokens = 0.25 * where.peak / where.flops_per_token
        step = 1024 * 4096 / gpus / tokens
        assert lines["you"].startswith(f"{tokens:,.0f} tokens/s/GPU, 25% MFU, {step:.2f} s a step"), (model, gpu, gpus)
        assert f"--model {model} --gpus {gpus} --gpu {gpu} --mfu 25" in form.inner_text("#pb-diagnosis")
        runs, position = nearest(where), form.inner_text("#pb-position")
        assert (runs.shared in position) if runs else ("published runs" not in position)
        below, above = ([a for (m, g, n), a in plans.items() if (m, g) == (model, gpu) and (n < gpus) == less] for less in (True, False))
        if below and above and below[-1].settings and above[0].settings:
            a, b = below[-1], above[0]
            part = log(gpus / a.asked.gpus) / log(b.asked.gpus / a.asked.gpus)
            speed = a.speed * (b.speed / a.speed) ** part
            assert lines["fastest"].startswith(f"{speed:,.0f} tokens/s/GPU [{min(a.low, b.low):,.0f}, {max(a.high, b.high):,.0f}]")
            assert f"you reach {tokens / speed:.0%} of what the planner predicts" in position
        else:
            assert lines["fastest"].startswith("nearest entry of the table: ")
            assert lines["fastest"].split()[5] in planned
            assert "you reach" not in position
    form.fill("#pb-diagnose input[name=gpus]", "2.5")
    assert "a whole number from 1" in form.inner_text("#pb-diagnosis")


@pytest.mark.parametrize(
    ("text", "gpu", "says"),
    [
        ((repo_root() / "playbook" / "clusters" / "h200.json").read_text(), "h200", "its products reach"),
        ("# ours\ngpu: NVIDIA H100 PCIe 80GB\nnetwork: 100GbE\n", "h100_pcie", "the prediction here is of the table's h100_pcie"),
        ('{"gpu": "Radeon"}', "", "names no GPU that is known"),
        ("gpu: __proto__", "", "names no GPU that is known"),
        ("{[", "", "names no GPU that is known"),
    ],
    ids=["calibration", "hardware", "unknown", "prototype", "noise"],
)
def test_the_form_takes_a_pasted_file(form: Any, text: str, gpu: str, says: str) -> None:
    form.fill("#pb-diagnose textarea[name=file]", text)
    assert says in form.inner_text("#pb-diagnosis")
    if gpu:
        assert cluster(machine_name(text)).name == gpu == form.input_value("#pb-diagnose select[name=gpu]")
        assert "--gpus 64 --gpu FILE --mfu 25" in form.inner_text("#pb-diagnosis")


def test_the_form_takes_a_pasted_config_json(form: Any) -> None:
    llama = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128256}
    form.fill("#pb-diagnose textarea[name=file]", json.dumps(llama))
    assert "has the sizes of llama3_8b" in form.inner_text("#pb-diagnosis")
    assert "--model llama3_8b --gpus 64" in form.inner_text("#pb-diagnosis")
    form.fill("#pb-diagnose textarea[name=file]", json.dumps({**llama, "num_hidden_layers": 30}))
    assert "figures are of the nearest, llama3_8b" in form.inner_text("#pb-diagnosis")
    assert "--model config.json --gpus 64" in form.inner_text("#pb-diagnosis")


def machine_name(text: str) -> str:
    return str(json.loads(text)["device"]["name"] if text.startswith("{") else yaml.safe_load(text)["gpu"])


def shown(page: Any, selector: str) -> int:
    return int(page.locator(f"{selector}:visible").count())


def test_search_takes_whatever_a_question_begins_with(home: Any) -> None:
    """Every word of the site is looked up by its first character; an error in the search is a warning, which fails the page."""
    found = home.evaluate(ASK, list("abcdefghijklmnopqrstuvwxyz0123456789"))
    assert sum(bool(n) for n in found.values()) > 30, found


FIRST = 8
"""Pages that are shown without scrolling far."""


def test_every_page_is_found_by_its_title(home: Any, built_site: Path) -> None:
    index = json.loads((built_site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {d["location"]: html.unescape(re.sub("<[^>]+>", "", d["title"])) for d in index["docs"] if "#" not in d["location"]}
    assert len(titles) > 80
    found = home.evaluate(ASK, list(titles.values()))
    namesakes = Counter(titles.values())
    missed = [f"{title}: {at}" for at, title in titles.items() if at not in places(found[title])[: max(FIRST, namesakes[title])]]
    assert not missed, missed


def test_every_term_of_the_glossary_finds_its_page(home: Any, built_site: Path) -> None:
    text = (built_site / "guide" / "glossary.html").read_text(encoding="utf-8")
    terms = [html.unescape(re.sub("<[^>]+>", "", t)) for t in re.findall(r"<h3 id=[^>]*>(.*?)<a", text)]
    assert len(terms) > 30
    found = home.evaluate(ASK, terms)
    assert not [t for t in terms if "guide/glossary.html" not in places(found[t])[: 2 * FIRST]]


def test_common_words_of_the_site_find_something(home: Any, built_site: Path) -> None:
    """As they stand on the pages, in whatever form; half of them once found nothing, because the index held stems."""
    text = " ".join(d["text"] for d in json.loads((built_site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"])
    counted = Counter(re.findall(r"\b[a-z]{4,}\b", html.unescape(re.sub("<[^>]+>", " ", text))))
    words = [w for w, n in counted.items() if n >= 5]
    assert len(words) > 500
    found = home.evaluate(ASK, words)
    lost = [w for w in words if not found[w]]
    assert len(lost) <= 0.05 * len(words), lost


def test_filters_of_cards_work_and_are_in_the_address(page: Any, site_root: str) -> None:
    page.goto(f"{site_root}/cards/index.html")
    every = shown(page, ".pb-card")
    page.fill("#pb-text", "thingamajig")
    assert shown(page, ".pb-card") == 1
    page.fill("#pb-text", "zzyzx qwertz")
    assert shown(page, ".pb-card") == 0
    assert page.is_visible("#pb-none")
    page.fill("#pb-text", "thingamajig zzyzx")
    assert page.locator(".pb-card:visible").first.get_attribute("data-text").count("thingamajig")
    assert "0 with every word" in page.inner_text("#pb-count")
    page.fill("#pb-text", "")
    assert shown(page, ".pb-card") == every
    page.select_option("#pb-status", "refuted")
    assert 0 < shown(page, ".pb-card") < every
    assert "status=refuted" in page.url
    page.goto(f"{site_root}/cards/index.html?text=thingamajig&hardware=h200x4")
    assert shown(page, ".pb-card") == 1
    assert page.input_value("#pb-text") == "thingamajig"


def test_filters_of_claims_ask_for_one_verdict(page: Any, site_root: str) -> None:
    page.goto(f"{site_root}/_generated/claims.html")
    rows = ".pb-matrix tbody tr"
    every = page.locator(rows).count()
    assert 0 < shown(page, rows) < every, "what nobody has tested is folded"
    page.fill("#pb-text", "X1.m")
    assert [t.split()[0] for t in page.locator(f"{rows}:visible").all_inner_texts()] == ["X1.m"], "and found all the same"
    page.fill("#pb-text", "")
    page.select_option("#pb-hardware", "h200x4")
    on_gpus = shown(page, rows)
    assert 0 < on_gpus < every
    page.select_option("#pb-status", "confirmed")
    texts = page.locator(f"{rows}:visible").all_inner_texts()
    assert 0 < len(texts) < on_gpus
    assert all("confirmed" in t for t in texts)
    assert page.inner_text("#pb-count") == f"{len(texts)} of {every} shown"
    page.select_option("#pb-hardware", "")
    page.select_option("#pb-status", "")
    page.select_option("#pb-card", "fixture-card")
    assert [t.split()[0] for t in page.locator(f"{rows}:visible").all_inner_texts()] == ["X1", "X1.m"]


def test_the_keyboard_reaches_what_the_mouse_does(page: Any, site_root: str) -> None:
    page.goto(f"{site_root}/_generated/calculator.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className").split()[0] == "md-skip"
    page.focus("select[name=model]")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        name, seen = page.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.name || e.tagName, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]; })()"
        )
        reached.append(name)
        assert seen, f"{name} has no visible focus"
    assert reached[:3] == ["gpus", "gpu", "seq_len"]
    assert "SUMMARY" in reached


PICTURES = {
    "home": "index.html",
    "cards": "cards/index.html",
    "card": "cards/moe-dispatcher-choice.html",
    "fixture-card": "cards/fixture-card.html",
    "claims": "_generated/claims.html",
    "calculator": "_generated/calculator.html?model=deepseek_v3&gpus=256&cp=2&ep=32&pp=8&vpp=2&uneven=true&recompute=mla_up_proj",
    "calculator-broken": "_generated/calculator.html?model=deepseek_v3&gpus=256&cp=32&ep=32&pp=8&vpp=4&seq_len=131072",
    "evidence": "evidence/index.html",
    "families": "_generated/families.html",
    "published": "_generated/published.html",
    "plans": "_generated/plans.html",
    "parallelism": "learn/parallelism.html",
}


@pytest.fixture(
    scope="module",
    params=[("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)],
    ids=["light", "dark", "phone", "phone-dark"],
)
def photographer(request: pytest.FixtureRequest, chromium: Any) -> Iterator[tuple[str, Any]]:
    scheme, size = request.param
    context = chromium.new_context(viewport=size, color_scheme=scheme)
    yield f"{scheme}-{size['width']}", context.new_page()
    context.close()


def test_pages_are_drawn_in_light_and_dark(photographer: tuple[str, Any], site_root: str, screenshots: Path) -> None:
    label, page = photographer
    backgrounds = set()
    for name, address in PICTURES.items():
        page.goto(f"{site_root}/{address}")
        path = screenshots / f"{name}-{label}.png"
        page.screenshot(path=str(path), full_page=True)
        assert path.stat().st_size > 10_000
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    dark = {b for b in backgrounds if max(int(v) for v in b.strip("rgba()").split(",")[:3]) < 128}
    assert dark == (backgrounds if label.startswith("dark") else set())
