"""The calculator's scripts against the Python functions that they are a port of, on random layouts, and the page in use."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from in_process import document

from playbook.errors import ConfigError
from playbook.paths import repo_root
from playbook.planner import flops, memory, parameters, pipeline
from playbook.planner.layout import min_gpus
from playbook.planner.models import MODELS, from_file
from playbook.planner.options import CP_COMM, DISPATCHERS, FP8, GRAPH_MODULES, LABELS, OFFLOAD_MODULES, RECOMPUTE
from playbook.planner.plan import Plan, nearest, parse
from playbook.planner.time.cluster import cluster, clusters
from playbook.planner.time.step import step_time
from playbook_app.site.models import tables

pytestmark = [pytest.mark.browser, pytest.mark.timeout(6000)]

LAYOUTS = 400
OFFERS = 60
"""Of the layouts that cannot run, so many are compared with their nearest legal ones, which takes longer."""

STATES = ("parameters", "gradients", "optimizer", "fp8_weights", "gathered", "activations", "transient", "workspace", "peak")

ANSWER = """([tables, cases]) => cases.map(({model, values, near}) => {
  const plan = PlaybookLayout.parse(tables, model, values), broken = PlaybookLayout.broken(tables, plan);
  const L = PlaybookLayout, M = PlaybookMemory;
  const found = {broken, dp: L.dp(plan), edp: L.edp(plan), gbs: L.globalBatch(plan), microbatches: L.microbatches(plan), min: L.minGpus(plan),
    total: M.total(plan.shape), active: M.active(plan.shape), flops: M.flopsPerToken(tables, plan.shape, plan.seq_len), bubble: M.bubble(plan)};
  if (near) found.nearest = L.nearest(tables, plan).map(({changes, distance}) => ({changes, distance}));
  try { if (!broken.length) found.stages = M.estimate(tables, plan); } catch (e) { found.error = e.message; }
  return found;
})"""


FILES = (Path(__file__).parents[1] / "fixtures" / "models").glob("*.json")
SHAPES = {m: s for m, s in MODELS.items() if not m.endswith("_tiny")} | {p.stem: from_file(p) for p in sorted(FILES)}
"""Presets, and the kinds of model that only files have: without gates, with learned positions, with other windows."""


def some(rng: random.Random, names: frozenset[str], most: int) -> str:
    return ",".join(rng.sample(sorted(names), rng.randint(1, most)))


def values(rng: random.Random) -> dict[str, str]:
    """Settings of a random plan: degrees that often divide, and a few options."""
    found: dict[str, Any] = {k: rng.choice([1, 1, 1, 2, 4, 8]) for k in ("tp", "cp", "pp", "ep")}
    found |= {
        "gpus": found["tp"] * found["cp"] * found["pp"] * rng.choice([1, 2, 3, 8, 32]),
        "seq_len": rng.choice([2048, 4096, 6000, 131072]),
    }
    found |= {
        "etp": rng.choice([1, 1, 1, 2]),
        "vpp": rng.choice([1, 1, 2, 3]),
        "mbs": rng.choice([1, 2, 4]),
        "gbs": rng.choice([0, 0, 64, 96]),
    }
    options = {
        "layers": lambda: rng.choice([8, 12, 24]),
        "grad_bytes": lambda: 2,
        "moment_bytes": lambda: rng.choice([1, 2]),
        "loss": lambda: "native",
        "imbalance": lambda: rng.choice([1.5, 2]),
        "fp8": lambda: rng.choice(sorted(FP8)),
        "recompute": lambda: some(rng, RECOMPUTE, 3),
        "offload_modules": lambda: some(rng, OFFLOAD_MODULES, 3),
        "graphs": lambda: some(rng, GRAPH_MODULES | {"full_iteration"}, 2),
        "dispatcher": lambda: rng.choice(sorted(DISPATCHERS)),
        "sharding": lambda: rng.choice(sorted(LABELS["sharding"])),
        "cp_comm": lambda: rng.choice(sorted(CP_COMM)),
        "cp_sizes": lambda: "2,2",
        "rank_order": lambda: rng.choice(["tp-cp-ep-pp-dp", "tp-dp"]),
        "optimizer_instances": lambda: rng.choice([2, 3]),
        "backend": lambda: "torch",
        "lora": lambda: rng.choice([8, 16]),
        "lora_targets": lambda: rng.choice(["attention", "q,v", "mlp,down", "experts,k"]),
        "base": lambda: "nf4",
        "compiled": lambda: "false",
        "frozen": lambda: rng.choice(["vision", "decoder"]),
        "optimizer_offload": lambda: rng.choice([50, 100]),
        "offload_percent": lambda: rng.choice([50, 101]),
    }
    switches = (
        "uneven",
        "ep_overlap",
        "delay_wgrad",
        "shared_overlap",
        "capacity",
        "offload",
        "precision_aware",
        "sp",
        "overlap_p2p",
        "fp8_params",
    )
    found |= {k: options[k]() for k in options if rng.random() < 0.12}
    found |= {k: rng.choice(["true", "false"]) for k in switches if rng.random() < 0.12}
    return {k: str(v) for k, v in found.items()}


def plan_of(case: dict[str, Any]) -> Plan:
    return parse(case["model"], [f"{k}={v}" for k, v in case["values"].items()], shape=SHAPES[case["model"]])


def cases() -> list[dict[str, Any]]:
    rng = random.Random(20261121)
    made = [{"model": rng.choice(list(SHAPES)), "values": values(rng), "near": False} for _ in range(LAYOUTS)]
    offers = 0
    for case in made:
        plan = plan_of(case)
        if plan.broken() and offers < OFFERS:
            case["near"], offers = True, offers + 1
            legal = nearest(plan, 1)
            if legal:  # so that many layouts that can run are among the cases, and have their memory compared
                made.append({**case, "near": False, "values": case["values"] | {k: str(v).lower() for k, v in legal[0].changes.items()}})
    return made


@pytest.fixture(scope="module")
def scripts(chromium: Any) -> Any:
    page = chromium.new_page()
    for name in ("layout.js", "memory.js", "time.js"):
        page.add_script_tag(path=str(repo_root() / "docs" / "javascripts" / name))
    yield page
    page.close()


def test_scripts_agree_with_python_on_random_layouts(scripts: Any) -> None:
    made = cases()
    found = scripts.evaluate(ANSWER, [tables() | {"models": {name: asdict(shape) for name, shape in SHAPES.items()}}, made])
    legal = 0
    for case, js in zip(made, found, strict=True):
        plan = plan_of(case)
        shape = plan.shape
        assert js["broken"] == plan.broken(), case
        degrees = {k: getattr(plan, k) for k in ("pp", "tp", "cp", "ep", "etp")}
        whole = (
            plan.dp,
            plan.edp,
            plan.global_batch,
            plan.microbatches,
            min_gpus(**degrees),
            parameters.total(shape),
            parameters.active(shape),
        )
        assert tuple(js[k] for k in ("dp", "edp", "gbs", "microbatches", "min", "total", "active")) == whole, case
        assert js["flops"] == pytest.approx(flops.per_token(shape, plan.seq_len), rel=1e-12)
        assert js["bubble"] == pytest.approx(pipeline.bubble(pp=plan.pp, microbatches=plan.microbatches, vpp=plan.vpp), rel=1e-12)
        if case["near"]:
            assert js["nearest"] == [{"changes": n.changes, "distance": pytest.approx(n.distance)} for n in nearest(plan)], case
        if not plan.broken():
            legal += 1
            compare_memory(case, plan, js)
    assert legal > 60
    print(f"{len(made)} layouts, {legal} of them legal")


def compare_memory(case: dict[str, Any], plan: Plan, js: dict[str, Any]) -> None:
    if "error" in js:
        with pytest.raises(ConfigError, match="linear attention"):
            memory.estimate(plan)
        assert "linear attention" in js["error"]
        return
    stages = memory.estimate(plan)
    for theirs, ours in zip(js["stages"], stages, strict=True):
        row = ours.row()
        assert [theirs["stage"], theirs["layers"], theirs["in_flight"]] == [row["stage"], row["layers"], row["in_flight"]], case
        assert [theirs[k] for k in STATES] == pytest.approx([row[k] for k in STATES], rel=1e-9), case


TIME = """([tables, cases]) => cases.map(({model, values, gpu}) => PlaybookTime.step(tables, PlaybookLayout.parse(tables, model, values), gpu))"""
TIMED = 400


def legal_layouts() -> Iterator[dict[str, Any]]:
    """Random layouts that break no rule, each on a random GPU."""
    rng = random.Random(20261128)
    while True:
        case = {"model": rng.choice(list(SHAPES)), "values": values(rng), "gpu": rng.choice(clusters())}
        if not plan_of(case).broken():
            yield case


def test_the_page_s_step_time_is_python_s_on_random_layouts(scripts: Any) -> None:
    timed = [*islice(legal_layouts(), TIMED)]
    found = scripts.evaluate(TIME, [tables() | {"models": {name: asdict(shape) for name, shape in SHAPES.items()}}, timed])
    for case, js in zip(timed, found, strict=True):
        step = step_time(plan_of(case), cluster(case["gpu"]))
        assert js["parts"] == pytest.approx(dict(step.parts), rel=1e-9), case
        speed = step.tokens_per_s_per_gpu
        ours = (step.seconds.value, speed.value, speed.low, speed.high, step.mfu, step.spread)
        assert tuple(js[k] for k in ("seconds", "value", "low", "high", "mfu", "spread")) == pytest.approx(ours, rel=1e-9), case


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("qwen3_8b", "tp=0"),
        ("qwen3_8b", "tp=two"),
        ("qwen3_8b", "grad_bytes=3"),
        ("qwen3_8b", "loss=x"),
        ("qwen3_8b", "imbalance=0"),
        ("qwen3_8b", "imbalance=0x10"),
        ("qwen3_8b", "uneven=maybe"),
        ("qwen3_8b", "layers=1001"),
        ("gpt_9", "tp=1"),
        ("__proto__", "tp=1"),
    ],
)
def test_scripts_refuse_what_python_refuses_in_the_same_words(scripts: Any, model: str, word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(model, [word])
    key, _, value = word.partition("=")
    said = scripts.evaluate(
        "([t, m, v]) => { try { PlaybookLayout.parse(t, m, v); return ''; } catch (e) { return e.message; } }",
        [tables(), model, {key: value}],
    )
    assert said == str(refused.value)


def test_the_page_answers_and_its_address_holds_the_layout(page: Any, site_root: str) -> None:
    page.goto(f"{site_root}/_generated/calculator.html")
    assert "can run" in page.inner_text("#pb-legal")
    page.fill("input[name=tp]", "3")
    assert "32 attention heads do not divide over tp 3" in page.inner_text("#pb-broken")
    assert "tp=3" in page.url
    assert "playbook layout check --model qwen3_30b_a3b" in page.inner_text(".pb-command")
    page.locator("#pb-nearest a").first.click()
    page.wait_for_selector("#pb-peak")
    assert "can run" in page.inner_text("#pb-legal")


def test_the_page_says_how_fast_the_layout_is_and_the_command_beside_it_says_the_same(page: Any, site_root: str, capsys: Any) -> None:
    page.goto(f"{site_root}/_generated/calculator.html?model=qwen3_30b_a3b&gpu=h200&gpus=16&ep=8&gbs=64")
    for change in (None, ("select[name=gpu]", "gb200"), ("input[name=mbs]", "2")):
        if change:
            page.locator(change[0]).select_option(change[1]) if "select" in change[0] else page.fill(*change)
        gpu = page.input_value("select[name=gpu]")
        assert f"gpu={gpu}" in page.url
        shown = page.inner_text("#pb-speed")
        words = next(t for t in page.locator(".pb-command").all_inner_texts() if t.startswith("playbook plan")).split()
        found = document(capsys, *words[1:])["plans"][0]["tokens_per_s_per_gpu"]["value"]
        assert shown == f"{found:,.0f} tokens/s/GPU"
        assert f"On {gpu}: fits, " in page.inner_text("#pb-legal")
        assert shown in page.inner_text("#pb-legal")
    page.goto(f"{site_root}/_generated/calculator.html?model=llama3_8b&gpu=h100&gpus=1")
    assert "On h100: does not fit, " in page.inner_text("#pb-legal")
    assert "tokens/s/GPU" not in page.inner_text("#pb-legal")


def test_the_home_page_leads_to_the_layout_of_its_form(home: Any) -> None:
    home.locator("#pb-diagnosis a").last.click()
    home.wait_for_selector("#pb-line strong")
    assert (home.input_value("select[name=gpu]"), home.input_value("input[name=gpus]")) == ("h100", "64")


def test_a_shared_address_shows_the_same_layout(page: Any, site_root: str) -> None:
    words = {
        "gpus": "256",
        "cp": "32",
        "ep": "32",
        "pp": "8",
        "vpp": "4",
        "seq_len": "131072",
        "recompute": "mla_up_proj,moe",
        "uneven": "true",
    }
    page.goto(f"{site_root}/_generated/calculator.html?model=deepseek_v3&" + "&".join(f"{k}={v}" for k, v in words.items()))
    plan = parse("deepseek_v3", [f"{k}={v}" for k, v in words.items()])
    assert plan.broken() == []
    assert page.inner_text("#pb-peak") == f"{memory.peak(plan) / memory.GIB:.1f} GiB"
    assert page.locator("input[name=recompute]:checked").count() == 2
    assert "recompute=mla_up_proj,moe" in page.url


@pytest.mark.parametrize("query", ["model=x&tp=1", "model=qwen3_8b&tp=<img src=x onerror=alert(1)>", "tp=1e9&sharding=", "frob=1"])
def test_a_crooked_address_is_answered_in_words(page: Any, site_root: str, query: str) -> None:
    page.goto(f"{site_root}/_generated/calculator.html?{query}")
    assert (page.inner_text("#pb-line") + page.inner_text("#pb-answer")).strip()
    assert page.locator(":is(#pb-line, #pb-answer) img").count() == 0


def test_the_page_carries_the_tables_that_python_has(built_site: Path) -> None:
    shown = (built_site / "_generated" / "calculator.html").read_text()
    held = re.search(r'<script type="application/json" id="pb-tables">(.*?)</script>', shown, re.DOTALL)
    assert held
    assert json.loads(held[1]) == json.loads(json.dumps(tables()))
