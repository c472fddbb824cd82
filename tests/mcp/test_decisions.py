"""Decisions that agents are asked for: right answers over MCP in at most four calls, and the same ones as on the command line."""

from __future__ import annotations

import re

import anyio
import pytest
from decisions import MOST_CALLS, decide, on_the_command_line, otherwise, tasks
from in_process import document
from mcp import Client
from plan_page import PAGE

from playbook_app.mcp.server import server

MOST_CHARACTERS = 2500
"""What an agent reads of one answer."""
TASKS = {t["question"]: t for t in tasks()}
SLOW = ("64 H100", "Mixtral", "The same run", "It recomputes", "900,000")
"""Of the decisions that are no plans, those whose search takes seconds."""
QUICK = [q for q, t in TASKS.items() if "command" not in t and not any(word in q for word in SLOW)]


def decided(library, task):
    async def use():
        async with Client(server(library)) as client:

            async def call(tool, arguments):
                result = await client.call_tool(tool, arguments)
                assert sum(len(part.text) for part in result.content) < MOST_CHARACTERS, tool
                return {"error": result.content[0].text} if result.is_error else result.structured_content

            return await decide(task, call)

    return anyio.run(use)


def test_there_are_twenty_and_each_takes_few_calls():
    assert len(TASKS) == 20
    assert sum("command" in t for t in TASKS.values()) == 10
    assert all(1 <= len(t["calls"]) <= MOST_CALLS and t["right"] for t in TASKS.values())


@pytest.mark.parametrize("question", QUICK)
def test_a_decision_is_right(library, question):
    assert decided(library, TASKS[question])[1] == []


@pytest.mark.full
def test_all_twenty_are_right_and_the_same_on_the_command_line_and_on_the_page_of_plans(library):
    found = {question: decided(library, task) for question, task in TASKS.items()}
    assert {q: wrong for q, (_, wrong) in found.items() if wrong} == {}
    there = [q for q, t in TASKS.items() if not any(c["tool"] == "plan_confirmation" for c in t["calls"])]
    assert len(there) == 19
    for question in there:
        answers, wrong = anyio.run(decide, TASKS[question], on_the_command_line)
        assert (wrong or otherwise(TASKS[question], found[question][0], answers)) == [], question
    sections = dict(re.findall(r"^### (.+?)\n\n```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    for question, (answers, _) in found.items():
        if "command" in TASKS[question]:
            best, shown = answers["plan"]["plans"][0], sections[question]
            assert re.search(r"^check .* --model \S+ (.*)$", shown, re.MULTILINE)[1].split() == best["settings"]
            speed = best["tokens_per_s_per_gpu"]
            assert f"{speed['value']:,.0f}" in shown
            assert f"{speed['low']:,.0f} to {speed['high']:,.0f}" in shown


def test_another_answer_on_the_command_line_is_told(library):
    task = TASKS["DeepSeek-V3 with EP 24 on 256 GPUs does not start. What is the nearest layout that does?"]
    answers = decided(library, task)[0]
    assert otherwise(task, answers, answers) == []
    assert otherwise(task, answers, {**answers, "mended": {**answers["mended"], "legal": False}}) == ["mended.legal: true and false"]


def test_a_wrong_answer_is_told():
    async def nothing(tool, arguments):
        return {}

    async def other(tool, arguments):
        return {"position": "you are above published runs", "published": {"count": 0}, "confidence": {"unknown": []}}

    slow = TASKS["My Qwen3-30B-A3B on 64 H100 is at 25 % MFU. Is that slow?"]
    for call in (nothing, other):
        assert len(anyio.run(decide, slow, call)[1]) == len(slow["right"])


def test_a_diagnosis_is_the_same_on_the_command_line(library, capsys):
    words = ["diagnose", "--model", "Qwen/Qwen3-8B", "--gpus", "8", "--gpu", "h100", "--gbs", "64", "--seq", "4096", "--mfu", "30"]
    shown = document(capsys, *words, "--layout", "tp=2,recompute=full", "--framework", "megatron-bridge")
    asked = {"model": "Qwen/Qwen3-8B", "gpus": 8, "hardware": "h100", "global_batch_size": 64, "seq_len": 4096, "mfu": 30}
    more = {"layout": ["tp=2", "recompute=full"], "framework": "megatron-bridge"}
    call = {"as": "at", "tool": "diagnose", "arguments": {**asked, **more}}
    answer = decided(library, {"calls": [call], "right": []})[0]["at"]
    assert answer["position"] == shown["position"]["sentence"]
    for part in ("measured", "predicted", "actions", "how_to_tell", "confidence", "assumptions"):
        assert answer[part] == shown[part], part
