"""The twenty decisions put to a language model of yours, with the playbook's tools and without, three times each, and graded.

    python tools/agents.py --out answers.jsonl -- COMMAND

COMMAND reads a conversation on stdin and prints a reply, whose last line is JSON: {"answer": "..."}, or with the tools also
{"tool": "plan_layout", "arguments": {...}}, at most four times a question. Graded are a layout by rules, memory and predicted speed, and a
sentence by what `tests/mcp/decisions.yaml` says that a right one has. Every conversation goes to --out, a line each.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from decisions import MOST_CALLS, tasks
from mcp import Client

from playbook.errors import PlaybookError
from playbook.planner import memory
from playbook.planner.choice.search import plan_layouts
from playbook.planner.choice.space import Question
from playbook.planner.hardware import of_text
from playbook.planner.plan import KEYS, Plan
from playbook.planner.time.step import step_time
from playbook_app.mcp.answers import library_here
from playbook_app.mcp.planning import plan_of, shape_of
from playbook_app.mcp.server import server

REPEATS = 3
NEAR = 0.9
"""Of the best plan's predicted speed, what a layout must reach to be right."""
_WORD = re.compile(r"\b(" + "|".join(sorted(KEYS, key=len, reverse=True)) + r")=([\w.+,-]+)")
_LAYOUT = "Give the layout as words: tp=, cp=, pp=, vpp=, ep=, etp=, mbs=, and recompute= where you need it"
Ask = Callable[[str], str]
CallTool = Callable[[str, dict[str, Any]], Awaitable[str]]


def layout_asked(task: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a layout must be for, where the task asks for one: the arguments of its `plan_layout`, or of its own `layout`."""
    return task["calls"][0]["arguments"] if "command" in task else task["answer"].get("layout")


def question_of(task: Mapping[str, Any]) -> str:
    """The question as it is put, with the form of its answer."""
    asked = layout_asked(task)
    about = "" if asked is None else f" It is for {', '.join(f'{k} {v}' for k, v in asked.items() if k not in ('top', 'goal'))}. {_LAYOUT}"
    fewest = ", and gpus= for the fewest that hold it" if asked and asked.get("goal") == "gpus" else ""
    return f"{task['question']}{about}{fewest}{'' if 'command' in task else ' ' + task['answer'].get('form', '')}"


def wrong_layout(asked: Mapping[str, Any], answer: str) -> list[str]:
    """What is wrong with the layout that an answer names: it is none, breaks a rule, does not fit, or is slower than `NEAR` of the best."""
    words = dict(_WORD.findall(answer))
    gpus = int(words.pop("gpus", asked["gpus"])) if str(words.get("gpus", "1")).isdigit() else 0
    sizes = {"seq_len": asked.get("seq_len", 4096), "gbs": asked.get("global_batch_size", 0) or (1 << 22) // asked.get("seq_len", 4096)}
    if not words or gpus < 1:
        return ["it names no layout"]
    try:
        plan = plan_of(asked["model"], gpus, [f"{k}={v}" for k, v in {**words, **sizes}.items()]).require()
        peak, gpu = memory.peak(plan), of_text(asked["hardware"])
        best = _best(asked, gpus)
    except PlaybookError as e:
        return [str(e)]
    if not memory.fits(peak, gpu.memory_gib):
        return [f"it needs {peak / memory.GIB:.1f} of {gpu.memory_gib:g} GiB"]
    if asked.get("goal") == "gpus":
        return [] if gpus <= best.gpus else [f"{gpus} GPUs, and {best.gpus} hold it"]
    share = step_time(best, gpu).seconds.value / step_time(plan, gpu).seconds.value
    return [] if share >= NEAR else [f"{share:.0%} of the best plan's predicted speed; at least {NEAR:.0%} is right"]


def _best(asked: Mapping[str, Any], gpus: int) -> Plan:
    """The planner's own answer."""
    question = Question(
        shape_of(asked["model"]), asked["model"], of_text(asked["hardware"]), gpus, asked.get("seq_len", 4096),
        asked.get("global_batch_size", 0), asked.get("goal", "tokens/s"), allow=frozenset(asked.get("allow", ())),
    )  # fmt: skip
    return plan_layouts(question, 1).choices[0].plan


def grade(task: Mapping[str, Any], answer: str) -> list[str]:
    """What is wrong with an answer; nothing where it is right."""
    asked = layout_asked(task)
    wrong = wrong_layout(asked, answer) if asked else []
    says = [] if "command" in task else task["answer"].get("says", [])
    return wrong + [f"it does not say {pattern}" for pattern in says if not re.search(pattern, answer, re.IGNORECASE)]


async def converse(task: Mapping[str, Any], ask: Ask, tools: str, call: CallTool) -> list[str]:
    """The conversation about one question, the model's replies and what tools answered in turns; `tools` are their definitions, or none."""
    form = 'Reply with one line of JSON: {"answer": "..."}' + (', or {"tool": NAME, "arguments": {...}}' if tools else "")
    said = [f"{question_of(task)}\n\n{form}.{f' At most {MOST_CALLS} tool calls. Tools:{chr(10)}{tools}' if tools else ''}"]
    for left in range(MOST_CALLS if tools else 0, -1, -1):
        reply = ask("\n\n".join(said))
        said.append(reply)
        asked = last_json(reply)
        if "tool" not in asked or not left:
            break
        said.append(await call(str(asked["tool"]), dict(asked.get("arguments") or {})))
    return said


def last_json(reply: str) -> dict[str, Any]:
    """The object in the last line of a reply that is one; else the reply as its answer."""
    for line in reversed(reply.strip().splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {"answer": reply}


def by_command(command: Sequence[str]) -> Ask:
    """A model that is a command: the conversation on its stdin, its reply from stdout."""

    def ask(text: str) -> str:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=3600, check=False)
        return done.stdout if done.returncode == 0 else f"the command ended with {done.returncode}: {done.stderr[-300:]}"

    return ask


async def campaign(
    ask: Ask, chosen: Sequence[Mapping[str, Any]], repeats: int, keep: Callable[[dict[str, Any]], None]
) -> Counter[tuple[str, bool]]:
    """How often each question was answered right, with the tools and without."""
    right: Counter[tuple[str, bool]] = Counter()
    async with Client(server(library_here())) as client:
        tools = "\n".join(f"{t.name}: {t.description} {json.dumps(t.input_schema)}" for t in (await client.list_tools()).tools)

        async def call(name: str, arguments: dict[str, Any]) -> str:
            return str(getattr((await client.call_tool(name, arguments)).content[0], "text", ""))

        for task in chosen:
            for with_tools in (True, False):
                for repeat in range(repeats):
                    said = await converse(task, ask, tools if with_tools else "", call)
                    wrong = grade(task, str(last_json(said[-1]).get("answer", "")))
                    right[task["question"], with_tools] += not wrong
                    keep({"question": task["question"], "tools": with_tools, "repeat": repeat, "wrong": wrong, "said": said})
    return right


def main() -> None:
    """Ask, grade, and print how many of the repeats were right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where conversations go, a line each")
    parser.add_argument("command", nargs="+", help="behind --: reads a conversation on stdin, prints a reply")
    told = parser.parse_args()
    chosen = tasks()
    with told.out.open("w", encoding="utf-8") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        right = anyio.run(campaign, by_command(told.command), chosen, REPEATS, keep)
    for task in chosen:
        with_tools, without = (right[task["question"], tools] for tools in (True, False))
        print(f"{with_tools} and {without} of {REPEATS}  {task['question']}")
    total = REPEATS * len(chosen)
    with_tools, without = (sum(n for (_, tools), n in right.items() if tools == wanted) for wanted in (True, False))
    print(f"with the playbook {with_tools} of {total} right, without it {without}")


if __name__ == "__main__":
    sys.exit(main())
