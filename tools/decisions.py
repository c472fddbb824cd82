"""Twenty decisions over MCP and on the command line: makes the calls of each task in `tests/mcp/decisions.yaml`, and says whether the
answers are right.

    python tools/decisions.py

No language model takes part: the calls are those that the skills name, over `playbook mcp` first and then as commands. Exit code 1 where an
answer is wrong, or a command answers otherwise than the tool.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import yaml
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "app"), str(ROOT / "bench"), str(ROOT / "trainer"), str(ROOT / "tools")]

from plan_page import DECISIONS  # noqa: E402

from playbook.paths import sources  # noqa: E402
from playbook_app.cli.app import app, run_command  # noqa: E402

TASKS = ROOT / "tests" / "mcp" / "decisions.yaml"
MOST_CALLS = 4
Call = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

_ARGUMENTS = {
    "--gpus": "gpus",
    "--hardware": "hardware",
    "--seq": "seq_len",
    "--gbs": "global_batch_size",
    "--goal": "goal",
    "--allow": "allow",
}
_OPTIONS = {
    **{argument: option for option, argument in _ARGUMENTS.items()},
    "backend": "--backend", "fix": "--fix", "top": "--top", "mfu": "--mfu", "tokens_per_s": "--tokens-per-s", "layout": "--layout",
    "framework": "--framework", "limit": "--limit", "model": "--model",
}  # fmt: skip
_COMMANDS = {
    "plan_layout": "plan {model}",
    "check_layout": "layout check",
    "estimate_memory": "layout memory",
    "diagnose": "diagnose",
    "search": "search {query}",
    "get_card": "cards show {card_id}",
    "get_claim": "cards show {card_id}",
    "list_evidence": "evidence list",
}
"""The command of each tool. That of `plan_confirmation` is `playbook confirm`, which says what it will do and begins."""
_OPS: Mapping[str, Callable[[Any, Any], bool]] = {
    "equals": lambda part, expected: bool(part == expected),
    "contains": lambda part, expected: expected in (part if isinstance(part, str) else json.dumps(part)),
    "lacks": lambda part, expected: expected not in (part if isinstance(part, str) else json.dumps(part)),
    "above": lambda part, expected: part is not None and part > expected,
    "below": lambda part, expected: part is not None and part < expected,
}


def tasks() -> list[dict[str, Any]]:
    """All tasks, the plans of the guide with their calls."""
    commands = dict(DECISIONS)
    read: list[dict[str, Any]] = yaml.safe_load(TASKS.read_text(encoding="utf-8"))
    return [planned(t["plan"], commands[t["plan"]]) if "plan" in t else t for t in read]


def planned(question: str, command: str) -> dict[str, Any]:
    """A decision of the guide as calls: plan, then judge and weigh what comes first."""
    _, _, model, *words = shlex.split(command)
    arguments: dict[str, Any] = {"model": model, "gpus": 1, "top": 5}
    for option, value in zip(words[::2], words[1::2], strict=True):
        arguments[_ARGUMENTS[option]] = int(value) if value.isdigit() else value.split(",") if option == "--allow" else value
    chosen = {"model": model, "gpus": "$plan.gpus", "settings": "$plan.plans.0.settings"}
    return {
        "question": question,
        "command": command,
        "calls": [
            {"as": "plan", "tool": "plan_layout", "arguments": arguments},
            {"as": "legal", "tool": "check_layout", "arguments": chosen},
            {"as": "held", "tool": "estimate_memory", "arguments": {**chosen, "hardware": arguments["hardware"]}},
        ],
        "right": [
            ["legal.legal", "equals", True],
            ["held.verdict", "lacks", "does not fit"],
            ["plan.plans.0.tokens_per_s_per_gpu.low", "above", 0],
            ["plan.plans.0.mfu", "above", 0.05],
            ["plan.plans.0.mfu", "below", 0.7],
        ],
    }  # fmt: skip


async def decide(task: Mapping[str, Any], call: Call) -> tuple[dict[str, Any], list[str]]:
    """The answers to a task's calls by their names, and what is wrong with them."""
    answers: dict[str, Any] = {}
    if len(task["calls"]) > MOST_CALLS:
        return answers, [f"{len(task['calls'])} calls; at most {MOST_CALLS}"]
    for each in task["calls"]:
        try:
            arguments = _filled(each["arguments"], answers)
        except (KeyError, IndexError, TypeError) as e:
            return answers, [f"{each['as']}: nothing to ask with: {e} is not in an earlier answer {json.dumps(answers)[:300]}"]
        answers[each["as"]] = await call(each["tool"], arguments)
    wrong = []
    for path, op, expected in task["right"]:
        try:
            part = _part(answers, path)
        except (KeyError, IndexError, TypeError):
            wrong.append(f"{path} is not in the answer")
            continue
        if not _OPS[op](part, expected):
            wrong.append(f"{path} is {json.dumps(part)[:160]}; expected {op} {expected}")
    return answers, wrong


def _filled(value: Any, answers: Mapping[str, Any]) -> Any:
    """Arguments with parts of earlier answers in place of their names; changes of a layout become words."""
    if isinstance(value, dict):
        return {k: _filled(v, answers) for k, v in value.items()}
    if isinstance(value, list):
        return [word for v in value for word in _words(_filled(v, answers))]
    return _part(answers, value[1:]) if isinstance(value, str) and value.startswith("$") else value


def _words(value: Any) -> Iterator[Any]:
    yield from (f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else [value]


def _part(data: Any, path: str) -> Any:
    """The part of an answer that a dotted path leads to; a key may hold a dot."""
    head, _, tail = path.partition(".")
    if isinstance(data, list):
        return _part(data[int(head)], tail) if tail else data[int(head)]
    while head not in data and tail:
        more, _, tail = tail.partition(".")
        head = f"{head}.{more}"
    return _part(data[head], tail) if tail else data[head]


def command(tool: str, arguments: Mapping[str, Any]) -> list[str]:
    """The words of the command that asks the same as a call; KeyError where there is none."""
    options = dict(arguments)
    words = [str(options.pop(w[1:-1])) if w.startswith("{") else w for w in _COMMANDS[tool].split()]
    settings = options.pop("settings", None)
    if settings is not None:
        words += list(dict.fromkeys([f"gpus={options.pop('gpus')}", *settings]))
    for name in [k for k in options if k in _OPTIONS and tool not in ("list_evidence", "get_claim", "get_card")]:
        value = options.pop(name)
        words += [_OPTIONS[name], ",".join(value) if isinstance(value, list) else str(value)] if value not in ([], None) else []
    return [*words, "--json"]


async def on_the_command_line(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of the command in the shape of the tool's, an error as `error`; KeyError where no command asks this."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run_command(app, command(tool, arguments))
    if not out.getvalue():
        return {"error": err.getvalue()}
    answer: Any = json.loads(out.getvalue())
    if tool == "plan_layout":
        return {**answer, "gpus": answer["question"]["gpus"]}
    if tool == "diagnose":
        walls = [w for w in answer["walls"] if w["beyond"]] or answer["walls"][:1]
        return {
            **answer,
            "position": answer["position"]["sentence"],
            "walls": [{k: w[k] for k in ("name", "share", "sign")} for w in walls],
        }
    if tool in ("get_card", "get_claim"):
        about = {arguments["claim_id"]} if tool == "get_claim" else set(answer["status"])
        return {**answer, "verdicts": {claim: [newest] for claim, newest in answer["status"].items() if newest and claim in about}}
    if tool == "list_evidence":
        return {"records": [r for r in answer if r["claim"] == arguments["claim_id"]][: arguments["limit"]]}
    return dict(answer)


def otherwise(task: Mapping[str, Any], answers: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Where the answers of two ways to ask differ: in what the task looks at, and in the plans' settings and speeds."""
    paths = [path for path, *_ in task["right"] if not path.endswith("error")]
    paths += [
        f"{name}.plans.{i}.{part}"
        for name, a in answers.items()
        if "plans" in a
        for i in range(len(a["plans"]))
        for part in ("settings", "tokens_per_s_per_gpu", "memory_gib")
    ]
    differences = []
    for path in paths:
        value, other = (_plain(_part(a, path)) for a in (answers, others))
        if value != other:
            differences.append(f"{path}: {json.dumps(value)[:160]} and {json.dumps(other)[:160]}")
    return differences


def _plain(value: Any) -> Any:
    """A list of hits by what each says of itself alone; every other value as it is."""
    return [v["id"] for v in value] if isinstance(value, list) and value and isinstance(value[0], dict) and "id" in value[0] else value


async def over_stdio(use: Callable[[Call], Awaitable[int]]) -> int:
    """Use a server of its own process; an error is an answer with the message as `error`."""
    paths = os.pathsep.join(sources(ROOT))
    command = StdioServerParameters(command=sys.executable, args=["-m", "playbook", "mcp"], env={**os.environ, "PYTHONPATH": paths})
    async with Client(stdio_client(command)) as client:

        async def call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
            result = await client.call_tool(tool, arguments)
            text = str(getattr(result.content[0], "text", ""))
            return {"error": text} if result.is_error else dict(result.structured_content or {})

        return await use(call)


async def _all(call: Call) -> int:
    """Ask every task by the tools and on the command line; how many went wrong."""
    failed = 0
    for task in tasks():
        began = time.monotonic()
        answers, wrong = await decide(task, call)
        failed += bool(wrong)
        print(f"{'wrong' if wrong else 'right'}  {len(answers)} calls  {time.monotonic() - began:4.1f} s  {task['question']}")
        with contextlib.suppress(KeyError):
            others, more = await decide(task, on_the_command_line)
            differs = [f"on the command line: {line}" for line in [*more, *otherwise(task, answers, others)]] if not wrong else []
            failed += bool(differs)
            wrong += differs
        for line in wrong:
            print(f"       {line}")
    print(f"{len(tasks()) - failed} of {len(tasks())} right")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, anyio.run(over_stdio, _all)))
