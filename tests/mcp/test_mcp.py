"""The tools of the MCP server, as the official client meets them in process, also with hostile arguments."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from datetime import date

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp import Client
from mcp.shared.exceptions import MCPError

from playbook.cards.load import load_all
from playbook.cards.model import guidance
from playbook.errors import PlaybookError
from playbook.paths import repo_root
from playbook.planner.models import MODELS, fields_of
from playbook.planner.plan import Plan
from playbook.records.read import RecordReader
from playbook_app.mcp.server import MAX_CHARS, server
from tests.support.mcp_calls import answer, ask, refusal, serving

TOOLS = {
    "search",
    "estimate_memory",
    "list_cards",
    "get_card",
    "get_claim",
    "list_evidence",
    "check_layout",
    "plan_confirmation",
    "plan_layout",
    "diagnose",
    "export_layout",
    "tune_next",
}
MAX_DEFINITIONS = 14_500
"""Characters of all tool definitions together, which every client puts before each of its model's answers."""
LAYOUT = {"gpus": 8, "model": "qwen3_30b_a3b", "settings": ["seq_len=4096", "mbs=1", "gbs=8"]}


def layout(*words, **other):
    """The arguments of a layout with more settings, which go before those that it has."""
    names = {w.partition("=")[0] for w in words}
    return {**LAYOUT, **other, "settings": [*(w for w in LAYOUT["settings"] if w.partition("=")[0] not in names), *words]}


def test_every_tool_is_read_only_and_has_an_output_schema_and_all_are_short(library):
    async def look():
        async with Client(server(library)) as client:
            return (await client.list_tools()).tools

    tools = anyio.run(look)
    assert {t.name for t in tools} == TOOLS
    for tool in tools:
        hints = tool.annotations
        assert (hints.read_only_hint, hints.open_world_hint) == (True, False)
        assert tool.output_schema["properties"], tool.name
        assert tool.description.endswith("."), tool.name
        assert tool.input_schema["additionalProperties"] is False
        for name, schema in tool.input_schema["properties"].items():
            text = json.dumps(schema)
            assert schema.get("description"), (tool.name, name)
            bounded = (
                all(word in text for word in ("inimum", "maximum"))
                if '"integer"' in text or '"number"' in text
                else any(word in text for word in ("maxLength", "pattern", "enum", "boolean"))
            )
            assert bounded, (tool.name, name)

    assert sum(len(json.dumps(t.model_dump(mode="json", by_alias=True, exclude_none=True))) for t in tools) < MAX_DEFINITIONS


def test_an_answer_stands_once_and_its_text_is_a_summary(library):
    for tool, arguments in VALID.items():
        result = ask(library, tool, **arguments)
        assert len(result.content[0].text) < max(200, len(json.dumps(result.structured_content))), tool
    text = ask(library, "get_card", card_id="moe-dispatcher-choice").content[0].text
    assert "set moe.dispatcher alltoall (because W9)" in text
    assert "W10: untested" in text


def test_a_card_comes_by_sections_and_its_decisions_first(library):
    everything = answer(library, "get_card", card_id="vlm-real-data", section="all")
    first = answer(library, "get_card", card_id="vlm-real-data")
    whole = everything["card"]
    assert first["card"]["decide"] == whole["decide"]
    assert first["card"]["claims"]["T1"] == whole["claims"][1]["statement"]
    assert len(json.dumps(first)) < len(json.dumps(everything)) / 2, "with the verdicts of both"
    parts = {
        k for s in ("answer", *first["more"]) if s != "all" for k in answer(library, "get_card", card_id="vlm-real-data", section=s)["card"]
    }
    assert set(whole) - parts == {"symptoms", "aliases", "phase", "wall"}


def test_cards_and_claims_come_with_their_verdicts(library):
    rows = {r["id"]: r for r in answer(library, "list_cards")["cards"]}
    assert set(rows) == set(guidance(load_all())) == set(load_all()) - {"torch-trainer-speed"}
    assert answer(library, "get_claim", card_id="torch-trainer-speed", claim_id="P6")["verdicts"]["P6"]
    assert any("four H200s, torch" in v for v in rows["moe-dispatcher-choice"]["claims"]["W9"])
    card = answer(library, "get_card", card_id="moe-dispatcher-choice")
    assert card["card"]["decide"][0]["because"] == ["W9"]
    assert {v["machine"] for v in card["verdicts"]["W9"]} >= {"h200x4"}
    claim = answer(library, "get_claim", card_id="moe-dispatcher-choice", claim_id="W9.m")
    assert claim["claim"]["id"] == "W9"
    assert set(claim["verdicts"]) == {"W9", "W9.m"}


def test_the_list_of_cards_says_which_verdicts_no_longer_count(library):
    """As `cards list` does: an agent that reads no further takes `confirmed` for today's."""
    rows = {c["id"]: c for c in answer(library, "list_cards")["cards"]}
    for card_id, row in rows.items():
        found = answer(library, "get_card", card_id=card_id)["verdicts"] if any(row["claims"].values()) else {}
        for claim, verdicts in found.items():
            assert row["claims"][claim] == [v["stands"] for v in verdicts]
    later = dataclasses.replace(library, day=date(2099, 1, 1))
    claims = [v for c in answer(later, "list_cards")["cards"] for each in c["claims"].values() for v in each]
    assert claims
    assert all(", stale, " in v for v in claims)


def test_the_text_of_a_diagnosis_says_which_way_to_turn_a_switch_and_what_a_claim_rests_on(library):
    lines = ask(library, "diagnose", model="qwen3_30b_a3b", gpus=64, hardware="h100", mfu=25).content[0].text.splitlines()
    (less,) = (line for line in lines if line.startswith("recompute less: "))
    assert "unset --recompute-granularity full" in less
    assert "V10.c confirmed, one H200, megatron" in less
    assert any("env NVTE_USE_CUTLASS_GROUPED_GEMM=1" in line for line in lines)
    assert re.fullmatch(r"fastest: \d+ tokens/s/GPU \[\d+, \d+\], .*", lines[-1])


def test_evidence_is_listed_newest_first_and_grows_stale(library):
    listed = answer(library, "list_evidence", claim_id="W9")
    stamps = [r["created"] for r in listed["records"]]
    assert stamps == sorted(stamps, reverse=True)
    assert all(r["repeat"].startswith("playbook ") and r["evidence"] for r in listed["records"])
    short = answer(library, "list_evidence", claim_id="W9", limit=1)
    assert short["left_out"] == len(stamps) - 1
    later = dataclasses.replace(library, day=date(2099, 1, 1))
    assert all("expired" in r["stale"] for r in answer(later, "list_evidence", claim_id="W9")["records"])


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("get_card", {"card_id": "moe-dispatcher-choise"}, "did you mean 'moe-dispatcher-choice'"),
        ("get_card", {"card_id": "../../etc/passwd"}, "should match pattern"),
        ("get_card", {}, "Field required"),
        ("get_claim", {"card_id": "vlm-real-data", "claim_id": "W9"}, "has no claim 'W9'"),
        ("list_evidence", {"claim_id": "Z999"}, "claim 'Z999' does not exist"),
        ("list_evidence", {"claim_id": "W9", "limit": 10**9}, "less than or equal"),
        ("plan_confirmation", {"card_id": "no-such-card"}, "does not exist"),
        ("search", {"query": "x" * 100_000}, "at most 2000"),
        ("search", {"query": "?!"}, "holds no word"),
        ("search", {"query": "dispatcher", "status": "proven"}, "Input should be"),
        ("search", {"query": "dispatcher", "model": "foo"}, "is not known; expected one of aya_23_8b, "),
        ("search", {"query": "dispatcher", "hardware": "foo"}, "hardware 'foo' is not known; expected one of a100, "),
        ("check_layout", {**LAYOUT, "model": "gpt5"}, "or give the text of a config.json"),
        ("plan_layout", {"model": "qwen3_8b", "gpus": 8, "hardware": "a100", "allow": ["fp8"]}, "allow fp8: a100 has no 8-bit products"),
        ("estimate_memory", {**LAYOUT, "model": "qwen3_30b_a3c"}, "did you mean"),
        ("estimate_memory", {**LAYOUT, "mbs": 8}, "'mbs' is not an argument of estimate_memory; expected some of: model, gpus"),
        ("list_cards", {"limit": 3}, "'limit' is not an argument of list_cards"),
        ("estimate_memory", layout("ep=5"), "do not divide over ep 5"),
        ("estimate_memory", layout("recompute=everything"), "everything"),
        ("check_layout", {**LAYOUT, "gpus": 0}, "greater than or equal to 1"),
        ("check_layout", layout("tp=1e30"), "tp"),
        ("check_layout", layout("gpus=16"), "settings has gpus=16, and gpus is 8"),
        ("tune_next", {"knobs": ["fuse"]}, "expected name=today|other"),
        ("tune_next", {"knobs": ["fuse=off|on"], "seen": ["fast"]}, "expected seconds of a step"),
        ("plan_layout", {"model": "llama3_8b", "gpus": 8, "hardware": "64xH100"}, "names 64 GPUs, and gpus is 8"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(library, tool, arguments, says):
    assert says in refusal(library, tool, **arguments)


def test_search_over_mcp_is_the_commands_search(library):
    found = answer(library, "search", query="DeepEP or all-to-all", hardware="gb200")["hits"]
    assert found[0]["id"] == "moe-dispatcher-choice"
    assert found[0]["applies"]
    assert any(limit.startswith("W10: gpu: found gb200") for limit in found[0]["limits"])
    sized = answer(library, "search", query="context-parallel ranks for qwen3_30b_a3b at 128k", hardware="h100", gpus=64)["hits"][0]
    assert sized["sizes"][0].startswith("cp=8 by the card, within 5 % of the planner's fastest layout; the rest by playbook plan ")
    silent = answer(library, "search", query="Muon with tensor parallelism")
    assert (silent["hits"], silent["none"]) == ([], "no card covers 'muon'")
    assert silent["nearest"]
    untested = answer(library, "search", query="token dispatcher", status="untested")["hits"]
    assert "W9" not in untested[0]["claims"]


def test_a_hit_says_where_its_claims_stand(library):
    """The passage that matched may state a claim that nothing has shown; an agent that stops there would pass it on as a fact."""
    hit = answer(library, "search", query="DeepEP or all-to-all", hardware="h100")["hits"][0]
    listed = next(c for c in answer(library, "list_cards")["cards"] if c["id"] == hit["id"])["claims"]
    assert hit["why"].startswith(("claim W10", "rule W10"))
    assert hit["standing"] == {i: listed[i] for i in hit["claims"]}
    assert hit["standing"]["W10"] == []
    assert "four H200s" in hit["standing"]["W9"][0]


def test_uneven_pipelines_and_the_nearest_layouts_are_told(library):
    asked = {"model": "deepseek_v3", "gpus": 256}
    stages = answer(library, "check_layout", **layout("gbs=256", "ep=8", "pp=16", **asked))["uneven"]
    assert sum(map(sum, stages)) == 61
    near = answer(library, "check_layout", **layout("gbs=256", "ep=24", "pp=16", **asked))["nearest"]
    assert near[0]["changes"]


def test_a_model_may_be_the_text_of_its_configuration(library):
    text = json.dumps(fields_of("llama3_8b"))
    asked = {"gpus": 8, "settings": ["tp=2"]}
    named = answer(library, "estimate_memory", model="llama3_8b", **asked)
    for model in (text, "meta-llama/Llama-3.1-8B-Instruct", "Llama3-8B"):
        assert answer(library, "estimate_memory", model=model, **asked) == named
    assert "no JSON" in refusal(library, "estimate_memory", model="{", **asked)


degree = st.integers(1, 40)


@settings(max_examples=20)
@given(gpus=st.integers(1, 4096), degrees=st.fixed_dictionaries(dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "vpp"), degree)))
def test_a_layout_answer_is_the_layout_modules(library, gpus, degrees):
    found = answer(library, "check_layout", **layout(*(f"{k}={v}" for k, v in degrees.items()), gpus=gpus))
    plan = Plan(MODELS[LAYOUT["model"]], gpus=gpus, mbs=1, gbs=8, seq_len=4096, **degrees)
    assert found["broken"] == plan.broken()
    if found["dp"]:
        assert found["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"] == gpus


def test_a_plan_counts_launches_and_knows_the_cost_where_launches_are_recorded(library):
    plan = answer(library, "plan_confirmation", card_id="moe-dispatcher-choice")
    cases = {c["case"]: c for c in plan["cases"]}
    profiles = {p["profile"]: p for p in cases["moe-dispatcher-allgather-vs-alltoall"]["profiles"]}
    # Two burn-ins, then pairs up to the first look and the last.
    assert (profiles["cpu"]["launches_least"], profiles["cpu"]["launches_most"]) == (2 + 8, 2 + 24)
    known = {c["case"]: c for c in answer(library, "plan_confirmation", card_id="torch-trainer-speed")["cases"]}
    stored = next(p for p in known["torch-text-4k-two-gpus"]["profiles"] if p["profile"] == "h200x2")
    assert (stored["launches_least"], stored["launches_most"]) == (2 + 8, 2 + 16)
    assert stored["seconds_per_launch"] > 0
    assert stored["seconds_least"] <= stored["seconds_most"] <= stored["limit_s"]
    assert cases["moe-dispatch-bytes"]["profiles"][0]["launches_most"] == 2
    logic = answer(library, "plan_confirmation", card_id="long-context-cp-sizing")
    assert [c["profiles"] for c in logic["cases"] if c["kind"] == "arithmetic"] == [[], [], []]


@pytest.mark.full
def test_an_answer_that_is_too_long_is_refused(library):
    card = load_all()["vlm-real-data"]
    long = card.model_copy(update={"interactions": ["x" * MAX_CHARS]})
    assert "one of its sections" in refusal(
        dataclasses.replace(library, cards={**library.cards, card.id: long}), "get_card", card_id=card.id
    )
    many = {f"card-{i}": card.model_copy(update={"id": f"card-{i}", "summary": "s" * 5000}) for i in range(300)}
    listed = answer(dataclasses.replace(library, cards=many, skills={}), "list_cards")
    assert listed["left_out"] == 300 - len(listed["cards"])
    assert len(json.dumps(listed)) < 1.2 * MAX_CHARS


def test_a_record_that_cannot_be_read_is_named_by_tools_and_resources_alike(library):
    class Broken(RecordReader):
        def read(self, *_):
            raise PlaybookError("x.json: not a JSON document; remove it")

    broken = dataclasses.replace(library, reader=Broken())

    async def read():
        async with Client(server(broken)) as client:
            with pytest.raises(MCPError, match="remove it"):
                await client.read_resource("card://fp8-recipes")
            with pytest.raises(MCPError, match="remove it"):
                await client.read_resource("skill://choose-layout/card.yaml")

    anyio.run(read)
    assert "remove it" in refusal(broken, "get_card", card_id="fp8-recipes")


hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=200),
    st.sampled_from(
        ["../../etc/passwd", "/etc/passwd", "; rm -rf .", "$(id)", "`id`", "\x00", "a" * 100_000, "card://x", "W9\n", "-1", "1e9"]
    ),
    st.sampled_from([*load_all(), "W9", "W9.m", "qwen3_30b_a3b"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
VALID = {
    "search": {"query": "out of memory", "hardware": "h200x4", "model": "qwen3_30b_a3b", "gpus": 4, "status": "confirmed", "limit": 3},
    "estimate_memory": {**layout("ep=8", "recompute=moe_act"), "hardware": "h100"},
    "diagnose": {
        "model": "llama3_8b",
        "gpus": 8,
        "hardware": "h100",
        "mfu": 30.0,
        "layout": ["tp=8", "pp=1"],
        "seq_len": 4096,
        "global_batch_size": 8,
        "framework": "megatron-bridge",
        "saw": ["all-reduce=20%"],
        "network": "IB-400",
    },
    "export_layout": {"model": "llama3_8b", "gpus": 8, "hardware": "h100", "settings": ["tp=2", "gbs=64"], "framework": "megatron-lm"},
    "plan_layout": {
        "model": "llama3_8b",
        "gpus": 8,
        "hardware": "h200",
        "seq_len": 4096,
        "global_batch_size": 8,
        "goal": "tokens/s",
        "backend": "torch",
        "allow": [],
        "fix": ["tp=1", "cp=1", "pp=1", "mbs=1"],
        "top": 1,
    },
    "tune_next": {"knobs": ["fuse=off|on"], "seen": ["0.5 loss=2.0 tokens=4096", "oom"], "seed": 1, "false_keep_percent": 5.0},
    "list_cards": {},
    "get_card": {"card_id": "vlm-real-data", "section": "answer"},
    "get_claim": {"card_id": "moe-dispatcher-choice", "claim_id": "W9"},
    "list_evidence": {"claim_id": "W9", "limit": 5},
    "plan_confirmation": {"card_id": "long-context-cp-sizing"},
    "check_layout": LAYOUT,
}
ARGUMENTS = [(tool, name) for tool, arguments in VALID.items() for name in [*arguments, "unknown"]]

_watched: list[tuple[str, str]] | None = None


def _watch(event, arguments):
    if _watched is not None and event in (
        "open",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.mkdir",
    ):
        _watched.append((event, str(arguments[0])))


sys.addaudithook(_watch)


@pytest.mark.parametrize(("tool", "name"), ARGUMENTS)
@settings(max_examples=10)
@given(value=hostile)
@pytest.mark.sample(
    "search-query",
    "estimate_memory-model",
    "get_card-card_id",
    "get_claim-claim_id",
    "list_evidence-claim_id",
    "plan_confirmation-card_id",
    "check_layout-gpus",
    "check_layout-settings",
    "diagnose-layout",
)
def test_no_argument_breaks_a_tool_or_reaches_a_path(library, tool, name, value):
    global _watched

    async def call():
        global _watched
        async with Client(serving(library)) as client:
            _watched = []
            return await client.call_tool(tool, {**VALID[tool], name: value})

    try:
        result = anyio.run(call)
        seen = _watched or []
    finally:
        _watched = None
    text = result.content[0].text
    assert len(text) < 2 * MAX_CHARS
    if result.is_error:
        assert "https://errors" not in text, text
        # A refusal says what is wrong; a crash would say only that the tool failed.
        assert (
            text.startswith(f"{tool}: ")
            or any(word in text for word in ("does not exist", "is not known", "has no claim", "missing"))
            or any(word in text for word in ("cannot run", "holds no word", "not modelled", "is not an argument", "; expected "))
        ), text
    else:
        assert result.structured_content
    allowed = (str(repo_root()), sys.prefix, sys.base_prefix)
    assert [e for e in seen if e[0] != "open" or not e[1].startswith((*allowed, ".playbook"))] == []


def test_an_agent_tunes_by_the_same_procedure_and_keeps_what_it_proves(library):
    """The agent launches what it is told, one launch a call; `fuse` gains 12 %, and nothing else does."""
    draw, seen = random.Random(4), []
    while True:
        told = answer(library, "tune_next", knobs=["idle=off|on", "fuse=off|on", "other=1|2"], seen=seen, seed=7)
        if told["launch"] is None:
            break
        seconds = 0.5 * (1 + draw.gauss(0, 0.004)) / (1.12 if told["launch"].get("fuse") == "on" else 1.0)
        seen.append("crash" if told["launch"].get("other") == "2" else f"{seconds:.6f} loss=2.0 tokens=4096")
    assert [(row["knob"], row["value"]) for row in told["kept"]] == [("fuse", "on")]
    assert told["kept"][0]["low"] < 12 < told["kept"][0]["high"]
    assert told["launches"] == len(seen) < 40
