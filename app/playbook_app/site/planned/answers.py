"""The planner's answers to common questions, kept in a file because asking all of them takes minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from playbook.planner.choice.anchored import scale_of, scaled
from playbook.planner.choice.plain_data import words
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.memory import GIB
from playbook.planner.models import MODELS
from playbook.planner.time.cluster import cluster

_MODELS = (
    "llama3_8b", "llama3_70b", "qwen3_8b", "mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_120b", "qwen3_next_80b_a3b", "qwen3_235b_a22b", "deepseek_v3",
)  # fmt: skip
_HARDWARE = ("h100", "h200", "b200")
_GPUS = (8, 64, 256)
_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
LONG = (("llama3_70b", "h100", 64), ("qwen3_30b_a3b", "h100", 64))
"""Models whose speed is asked at every length."""


@dataclass(frozen=True)
class Asked:
    """A question: which layout of a model on so many GPUs, at this length, with steps of four million tokens."""

    model: str
    hardware: str
    gpus: int
    seq_len: int = 4096


@dataclass(frozen=True)
class Answered:
    """A question with the fastest plan that fits; none where `settings` is empty. Units: tokens per second and GPU, GiB of each stage."""

    asked: Asked
    capacity_gib: float
    settings: tuple[str, ...] = ()
    speed: float = 0.0
    low: float = 0.0
    high: float = 0.0
    mfu: float = 0.0
    stages_gib: tuple[float, ...] = ()


def questions() -> Iterator[Asked]:
    """Everything that the page answers."""
    yield from (Asked(m, h, g) for m in _MODELS for h in _HARDWARE for g in _GPUS)
    yield from (Asked(*where, length) for where in LONG for length in _LENGTHS[1:])


def ask(asked: Asked) -> Answered:
    """The planner's answer."""
    where = cluster(asked.hardware)
    question = Question(MODELS[asked.model], asked.model, where, asked.gpus, asked.seq_len)
    found = search(question, 1).choices
    if not found:
        return Answered(asked, where.memory_gib)
    first = found[0].time
    time = scaled(first, scale_of(question, first, fp8=bool(found[0].plan.options.fp8)))
    speed = time.tokens_per_s_per_gpu
    return Answered(
        asked,
        where.memory_gib,
        tuple(words(found[0].plan)),
        _short(speed.value),
        _short(speed.low),
        _short(speed.high),
        _short(time.mfu),
        tuple(_short(s.peak / GIB) for s in found[0].stages),
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def read(path: Path) -> list[Answered]:
    """The answers of a file that `write` has written."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Answered(**{**row, "asked": Asked(**row["asked"]), "settings": tuple(row["settings"]), "stages_gib": tuple(row["stages_gib"])})
        for row in rows
    ]


def line(answered: Answered) -> str:
    """An answer as a line of the file."""
    return json.dumps(asdict(answered))
