"""The kit for a model of one's own: its conversation with the tools, its grader, and the twenty questions in full."""

from __future__ import annotations

import json
import sys

import agents
import anyio
import pytest
from decisions import MOST_CALLS, tasks

TASKS = {t["question"]: t for t in tasks()}
EP24 = next(t for q, t in TASKS.items() if q.startswith("DeepSeek-V3 with EP 24"))
SLOW = next(t for q, t in TASKS.items() if q.endswith("Is that slow?"))
PLAN = TASKS["Qwen3-VL-30B on 8 H200"]


def test_each_of_the_twenty_says_what_it_is_about_and_how_a_right_answer_is_told():
    assert len(TASKS) == 20
    for question, task in TASKS.items():
        assert question in agents.question_of(task)
        assert agents.layout_asked(task) or task["answer"]["says"], question
        assert agents.grade(task, "I do not know."), question
    assert "global_batch_size 256" in agents.question_of(PLAN)


@pytest.mark.parametrize(
    ("task", "answer", "wrong"),
    [
        (SLOW, "No: it is where published runs are.", ""),
        (SLOW, "Yes, it should reach 50 %.", "it does not say"),
        (EP24, "ep=24 pp=16 tp=1", "ep 24"),
        (EP24, "Use what fits.", "names no layout"),
        (PLAN, "tp=1 ep=1 mbs=8", "GiB"),
        (PLAN, "tp=4 ep=8 mbs=1 recompute=full", "of the best plan's predicted speed"),
    ],
)
def test_an_answer_is_graded_by_rules_memory_speed_and_words(task, answer, wrong):
    found = "; ".join(agents.grade(task, answer))
    assert (wrong in found) if wrong else found == ""


def test_a_model_that_asks_the_tools_is_right_and_one_that_guesses_is_not():
    """A model that is played: with tools it plans and repeats the first plan's words, without it says what it heard."""

    def played(text: str) -> str:
        if "Tools:" not in text:
            return '{"answer": "tp=4 ep=8 mbs=1 recompute=full"}'
        if "tokens/s/GPU" not in text.rpartition("\n\n")[2]:
            return json.dumps(
                {"tool": "plan_layout", "arguments": {"model": "qwen3_vl_30b_a3b", "gpus": 8, "hardware": "h200", "global_batch_size": 256}}
            )
        return "The tool says:\n" + json.dumps({"answer": text.rpartition("\n\n")[2].splitlines()[1]})

    kept = []
    right = anyio.run(agents.campaign, played, [PLAN], 2, kept.append)
    assert (right[PLAN["question"], True], right[PLAN["question"], False]) == (2, 0)
    assert [row["tools"] for row in kept] == [True, True, False, False]
    assert all(len(row["said"]) <= 2 * MOST_CALLS + 2 for row in kept)


def test_a_model_that_never_answers_ends_after_four_calls():
    kept = []
    anyio.run(agents.campaign, lambda text: '{"tool": "list_cards"}', [SLOW], 1, kept.append)
    assert [len(row["said"]) for row in kept] == [2 * MOST_CALLS + 2, 2]
    assert all(row["wrong"] for row in kept)


def test_a_command_is_a_model(tmp_path):
    script = tmp_path / "model.py"
    script.write_text('import sys; text = sys.stdin.read(); print(len(text)); print(\'{"answer": "no"}\')', encoding="utf-8")
    ask = agents.by_command([sys.executable, str(script)])
    assert agents.last_json(ask("a question")) == {"answer": "no"}
    assert "ended with" in agents.by_command([sys.executable, "-c", "raise SystemExit(3)"])("x")
