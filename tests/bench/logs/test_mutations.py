"""A log that something has damaged gives a clear error or the same steps; only where a digit itself changed may a figure change."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Callable
from functools import cache, lru_cache

import log_excerpts as logs
import pytest

from playbook.errors import LogError
from playbook_bench.logs import LoggedStep, StepLog, parsers, read
from playbook_bench.logs.adapters import ADAPTERS

SEEDS = int(os.environ.get("PLAYBOOK_MUTATIONS", "500"))
"""Of each format; 10,000 take some ten seconds."""
LOGS: dict[str, tuple[str, str | None]] = {
    **{a.name: (logs.of_adapter(a.name), None) for a in ADAPTERS if not a.binary and a.parse.__module__ == parsers.__name__},
    "megatron": (logs.megatron(skipped=(2,)), None),
    "bridge": (logs.megatron_bridge(), None),
    "primus": (logs.primus(), None),
    "console": (logs.trainer_console(), None),
    "monitor": (logs.lightning(monitor=True), None),
    "swift": (logs.swift(), None),
    "modded": (logs.modded_nanogpt(), None),
    "wandb": (logs.wandb(), None),
    "nanotron": (logs.nanotron(), None),
    "blocks": (logs.printed_blocks(), None),
    "micro": (logs.micro_batches(), logs.MICRO_PATTERN),
    "late": (logs.nanogpt(first=1631), None),
    "regex": (logs.own_format(), logs.OWN_PATTERN),
}
"""One for each adapter, and other forms that some of them read. The steps of reinforcement learning have no loss to compare."""
STEPS = {"mmengine": 400, "timm": 240, "micro": 7}
"""How many steps those logs tell of whose lines cover several, or whose first and last steps are not whole; others as many as there are losses."""
_BLOCKS = ("olmo-core", "hf", "composer", "blocks")
"""Logs with figures of a step on lines of their own."""
WORD = re.compile(r"[\w+.\-]+")
DIGIT = re.compile(r"\d")
JUNK = "x|:,'\"{}[]\x00\x1b\r\n\t \x0b\u2028é0"


def change_character(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text))
    return text[:i] + rng.choice(["", rng.choice(JUNK), rng.choice(JUNK) + text[i]]) + text[i + 1 :]


def insert_junk(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text))
    return text[:i] + rng.choice(["\x1b[31m", "WARNING: slow\n", "\x00" * 5, "}{", "\r", "=" * 20_000]) + text[i:]


def cut(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text))]


def lines_changed(rng: random.Random, text: str) -> str:
    rows = text.split("\n")
    i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
    match rng.randrange(4):
        case 0:
            del rows[i]
        case 1:
            rows.insert(j, rows[i])
        case 2:
            rows[i], rows[j] = rows[j], rows[i]
        case _:
            rows[i : i + 2] = ["".join(rows[i : i + 2])]
    return "\n".join(rows)


MUTATIONS: list[Callable[[random.Random, str], str]] = [change_character, change_character, insert_junk, cut, lines_changed, lines_changed]


def attempt(text: str, adapter: str | None, steps: int | None) -> StepLog | str:
    """The log as a launcher reads it, each line with its moment; or the message of the error."""
    try:
        return read(text, adapter, steps=steps, arrivals=[0.5 * i for i in range(text.count("\n") + 2)])
    except LogError as e:
        return str(e)


@cache
def original(kind: str) -> StepLog:
    found = attempt(*LOGS[kind], STEPS.get(kind, len(logs.LOSSES)))
    assert isinstance(found, StepLog)
    return found


def figures(log: StepLog) -> dict[str, list[object]]:
    """Figure by figure, without the arrival of lines, which a line that was put between others moved."""
    moved = {"arrived", *(["seconds"] if log.clock == "arrival" else [])}
    names = [f.name for f in dataclasses.fields(LoggedStep) if f.name not in moved]
    # Where a clock of a table is lost, another counts, which rounds otherwise.
    values = {name: [getattr(step, name) for step in log.steps] for name in names}
    return values | ({"seconds": [round(s.seconds, 6) for s in log.steps]} if "seconds" in names else {})


@lru_cache(64)
def numbers(text: str) -> list[str]:
    return sorted(word for word in WORD.findall(text) if DIGIT.search(word))


def check(kind: str, seed: int) -> bool:
    """Whether the mutation was noticed."""
    text, adapter = LOGS[kind]
    rng = random.Random(f"{kind} {seed}")
    mutated = rng.choice(MUTATIONS)(rng, text)
    # Most are read by the name of their adapter, as a second launch's is; the others must be recognised first.
    found = attempt(mutated, adapter or (original(kind).adapter if seed % 4 else None), STEPS.get(kind, len(logs.LOSSES)))
    if kind in _BLOCKS and sorted(mutated.split("\n")) == sorted(text.split("\n")):
        return False  # figures of a step on lines of their own, which changed places: nothing can show it
    if isinstance(found, str):
        assert len(found) > 30
        assert found.isprintable()
        return True
    # A line break in place of a digit does not show where a number ends a line and no other form is expected.
    digits = (kind in (*_BLOCKS, "regex", "micro") or mutated.count("\n") == text.count("\n")) and numbers(mutated) != numbers(text)
    if digits:
        assert len(found.steps) == len(original(kind).steps)
        assert all(s.seconds > 0 for s in found.steps)
        return False
    # A table names a figure once, in its header: where that is damaged, the figure is unknown, which the log says.
    lost = set(found.unknown) - set(original(kind).unknown) if adapter is None and found.adapter == "lightning" else set()
    before = figures(original(kind))
    assert {name: values for name, values in figures(found).items() if name not in lost} == {
        n: v for n, v in before.items() if n not in lost
    }
    return False


@pytest.mark.parametrize("seeds", [40, pytest.param(SEEDS, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", LOGS)
def test_damage_is_an_error_or_changes_nothing(kind: str, seeds: int) -> None:
    noticed = sum(check(kind, seed) for seed in range(seeds))
    assert seeds // 10 < noticed < seeds
