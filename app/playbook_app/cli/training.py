"""A whole training in words, and the curve of speed over numbers of GPUs as a table with bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from playbook.errors import ExitCode
from playbook.planner.choice.plain_data import layout, words
from playbook.planner.choice.search import Answer, Choice
from playbook.planner.choice.space import Question
from playbook.planner.choice.training import Training, by_gpus, training
from playbook.planner.time.cluster import Cluster
from playbook_app.cli.output import complain, print_json, print_table, say

_BAR = 24
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_SAID = ("gpus=", "gbs=", "seq_len=", "layers=")
"""Words of a layout that a row has elsewhere, or that all rows share."""


def takes(whole: Training, cluster: Cluster) -> str:
    """What a training takes, such as `1T tokens: 14.9 days (80 %: 11.3 to 19.7), ...`."""
    parts = [
        f"{_number(whole.days.value)} days (80 %: {_number(whole.days.low)} to {_number(whole.days.high)})",
        f"{_number(whole.gpu_hours.value)} GPU hours",
    ]
    if whole.price is not None:
        parts.append(f"price {_number(whole.price.value)} ({_number(whole.price.low)} to {_number(whole.price.high)})")
    if whole.energy_mwh is None:
        parts.append(f"energy unknown: no source says what a {cluster.name} may draw")
    else:
        parts.append(f"at most {_number(whole.energy_mwh.value)} MWh (GPUs alone, {cluster.board_w:,.0f} W each)")
    return f"{_count(whole.tokens)} tokens: {', '.join(parts)}"


def show_curve(
    question: Question,
    numbers: Sequence[int],
    anchor: Path | None,
    tokens: float | None,
    price: float | None,
    *,
    published: bool,
    as_json: bool,
) -> None:
    """Print the fastest plan for each number of GPUs, of one global batch. Exit code 2 where nothing fits on any."""
    rows: list[tuple[int, Answer]] = []
    for answer in by_gpus(question, numbers, anchor, with_published=published):
        rows.append((answer.question.gpus, answer))
        complain(f"planned for {answer.question.gpus} GPUs, {len(rows)} of {len(numbers)}")
    best = [(gpus, answer.choices[0]) for gpus, answer in rows if answer.choices]
    trained = {gpus: training(choice, question.cluster, tokens, price) for gpus, choice in best} if tokens else {}
    if as_json:
        print_json(_document(question, rows, trained))
    else:
        say(f"{question.model} on {question.cluster.name}, {question.seq_len} tokens, global batch {question.global_batch}")
        table = [_row(gpus, answer, best, trained.get(gpus)) for gpus, answer in rows]
        print_table(table, [k for k in table[0] if any(row[k] for row in table)])
    if not best:
        raise typer.Exit(ExitCode.USAGE)


def _row(gpus: int, answer: Answer, best: Sequence[tuple[int, Choice]], whole: Training | None) -> dict[str, str]:
    """The fastest plan on so many GPUs as a row, its bar relative to the most tokens per second and GPU of all."""
    if not answer.choices:
        empty = dict.fromkeys(("tokens/s/GPU", "80 %", "all GPUs", "to the first", "days", "price"), "")
        return {"GPUs": f"{gpus:,}", **empty, "": "", "layout": "nothing fits"}
    choice, most = answer.choices[0], max(c.speed for _, c in best)
    speed = choice.time.tokens_per_s_per_gpu
    return {
        "GPUs": f"{gpus:,}",
        "tokens/s/GPU": f"{speed.value:,.0f}",
        "80 %": f"{speed.low:,.0f} to {speed.high:,.0f}",
        "all GPUs": f"{speed.value * gpus:,.0f}",
        "to the first": f"{speed.value / best[0][1].speed:.0%}",
        "days": _number(whole.days.value) if whole else "",
        "price": _number(whole.price.value) if whole and whole.price else "",
        "": "█" * round(_BAR * speed.value / most),
        "layout": " ".join(w for w in words(choice.plan) if not w.startswith(_SAID)),
    }


def _document(question: Question, rows: Sequence[tuple[int, Answer]], trained: dict[int, Training]) -> dict[str, Any]:
    """Units: tokens per second and GPU, days, GPU hours, MWh; `plan` is None where nothing fits."""
    return {
        "schema": "plan-scale/1",
        "model": question.model,
        "hardware": question.cluster.name,
        "seq_len": question.seq_len,
        "gbs": question.global_batch,
        "rows": [
            {
                "gpus": gpus,
                "plan": layout(answer.choices[0].plan) if answer.choices else None,
                "tokens_per_s_per_gpu": asdict(answer.choices[0].time.tokens_per_s_per_gpu) if answer.choices else None,
                "training": asdict(trained[gpus]) if gpus in trained else None,
            }
            for gpus, answer in rows
        ],
    }


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(tokens: float) -> str:
    unit, letter = next(((u, name) for u, name in _UNITS if tokens >= u), (1.0, ""))
    return f"{tokens / unit:,.6g}{letter}"
