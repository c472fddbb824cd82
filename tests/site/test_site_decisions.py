"""The decisions that agents are asked for, on the site: what a reader finds there is what the tools answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

import anyio
import pytest
from decisions import decide, tasks
from mcp import Client

from playbook.planner.memory import GIB
from playbook.planner.models import named
from playbook_app.mcp.answers import library_here
from playbook_app.mcp.server import server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(6000)]

NOT_THERE = {"diagnose": 3, "plan_layout": 1, "plan_confirmation": 1}
"""Calls that no page answers: diagnoses of a layout that the reader names, a plan that no page shows, and the price of a confirmation. Their pages name the command."""


def plan(page: Any, root: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
    """The guide's page of plans has the settings, speed and interval of the best plan."""
    page.goto(f"{root}/guide/plans.html")
    best, speed = answer["plans"][0], answer["plans"][0]["tokens_per_s_per_gpu"]
    blocks = [b for b in page.locator("pre").all_inner_texts() if b.startswith(f"$ playbook plan {asked['model']} ")]
    blocks = [b for b in blocks if f"--gpus {asked['gpus']} " in b.partition("\n")[0] or "--goal gpus" in b.partition("\n")[0]]
    if not blocks:
        return None
    expected = [
        f"{speed['value']:,.0f}",
        f"{speed['low']:,.0f} to {speed['high']:,.0f}",
        f"--model {asked['model']} {' '.join(best['settings'])}",
    ]
    return [e for e in expected if not any(e in b for b in blocks)]


def calculator(page: Any, root: str, asked: Mapping[str, Any]) -> None:
    settings = dict(w.split("=", 1) for w in asked["settings"]) | {"gpus": asked["gpus"]}
    page.goto(f"{root}/_generated/calculator.html?{urlencode({'model': named(asked['model']), **settings})}")


def legal(page: Any, root: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
    """The calculator breaks the same rules, and offers the same layouts."""
    calculator(page, root, asked)
    broken, nearest = (page.locator(f"{name} li").all_inner_texts() for name in ("#pb-broken", "#pb-nearest"))
    offers = [" ".join(f"{k}={v}" for k, v in n["changes"].items()) for n in answer["nearest"]]
    return [f"{a} and {b}" for a, b in ((broken, answer["broken"]), (nearest, offers)) if a != b]


def held(page: Any, root: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
    """The calculator has the same peak, and names the GPU where it fits with room to spare."""
    calculator(page, root, asked)
    peak, holders = page.inner_text("#pb-peak"), re.findall(r"[a-z0-9]+", page.inner_text("#pb-holders"))
    wrong = [] if peak == f"{answer['peak'] / GIB:.1f} GiB" else [peak]
    return wrong + ([] if (asked["hardware"] in holders) == (answer["verdict"] == "fits") else [f"{answer['verdict']}: {holders}"])


def diagnosis(page: Any, root: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
    """The page of the diagnosis says in the same words where the run stands among published ones and to the prediction, and has the fastest layout."""
    if asked.get("layout"):
        return None
    page.goto(f"{root}/guide/diagnose.html")
    page.wait_for_selector("#pb-position")
    page.fill("#pb-diagnose input[name=gpus]", str(asked["gpus"]))
    page.fill("#pb-diagnose input[name=model]", named(asked["model"]))
    page.select_option("#pb-diagnose select[name=gpu]", asked["hardware"])
    speed, unit = (asked["mfu"], "% MFU") if "mfu" in asked else (asked["tokens_per_s"], "tokens/s per GPU")
    page.select_option("#pb-diagnose select[name=unit]", unit)
    page.fill("#pb-diagnose input[name=speed]", str(speed))
    said, lines = page.inner_text("#pb-position"), page.locator(".pb-lines dd").all_inner_texts()
    if "error" in answer:
        return [
            w
            for w in ("on each GPU", "%, which the best matrix product reaches", "Check your token count", "that tokens/s are of one GPU")
            if w not in said or w not in answer["error"]
        ]
    fastest = answer["predicted"]["best"]
    expected = [f"{answer['position'].replace('you', 'You', 1)}.", f": {' '.join(fastest['settings'])}"]
    return [e for e in expected if e not in said and not any(line.endswith(e) for line in lines)]


def found(page: Any, root: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
    """The question box has the first card that applies, and none before it that does not."""
    page.goto(f"{root}/index.html")
    query = " ".join([asked["query"], *(f"on {named(asked[k]) or asked[k]}" for k in ("hardware", "model") if k in asked)])
    shown = page.evaluate("(q) => document.querySelector('form.pb-ask').playbookAsk(q)", query)
    applying = [h["id"] for h in answer["hits"] if h["applies"]]
    # What the reader says of the machine and the model are words of the question here, which may bring another card before it.
    others = [h["id"] for h in answer["hits"] if not h["applies"]]
    return [] if applying[0] in shown["cards"] and shown["cards"][0] not in others else [f"{shown} and {applying}"]


def card(page: Any, root: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
    """The card's page shows the same verdicts."""
    page.goto(f"{root}/cards/{asked['card_id']}.html")
    text = str(page.text_content("article")).lower()
    return [v["stands"] for of in answer["verdicts"].values() for v in of if v["stands"].lower() not in text]


def evidence(page: Any, root: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
    """Each record has its page, with its sentence."""
    wrong = []
    for record in answer["records"]:
        page.goto(f"{root}/evidence/{record['evidence']}.html")
        wrong += (
            []
            if asked["claim_id"] in page.inner_text("article") and record["machine"] in page.inner_text("article")
            else [record["evidence"]]
        )
    return wrong


PAGES = {
    "plan_layout": plan, "check_layout": legal, "estimate_memory": held, "diagnose": diagnosis,
    "search": found, "get_card": card, "get_claim": card, "list_evidence": evidence,
}  # fmt: skip


def test_the_site_answers_as_the_tools_do(page: Any, site_root: str) -> None:
    asked: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []

    async def use() -> None:
        async with Client(server(library_here())) as client:
            for task in tasks():

                async def call(tool: str, arguments: dict[str, Any], question: str = task["question"]) -> dict[str, Any]:
                    result = await client.call_tool(tool, arguments)
                    answer = {"error": str(result.content[0])} if result.is_error else dict(result.structured_content or {})
                    asked.append((question, tool, arguments, answer))
                    return answer

                await decide(task, call)

    with ThreadPoolExecutor(1) as other:  # this thread has the browser's loop
        other.submit(anyio.run, use).result()
    wrong, missing = [], []
    for question, tool, arguments, answer in asked:
        said = PAGES[tool](page, site_root, arguments, answer) if tool in PAGES else None
        if said is None:
            missing.append(tool)
        else:
            wrong += [f"{question}: {tool}: {line}" for line in said]
    assert not wrong, "\n".join(wrong)
    assert {tool: missing.count(tool) for tool in set(missing)} == NOT_THERE
