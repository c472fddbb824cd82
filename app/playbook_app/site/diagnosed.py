"""The planner's answers to common questions, read from a file, and the short form of the diagnosis, which compares a figure with them.

Asking all of them takes minutes, so `tools/plan_page.py` does it beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from playbook.diagnosis.published import nearest
from playbook.diagnosis.setting import setting
from playbook.planner.choice.anchored import scale_of, scaled
from playbook.planner.choice.plain_data import words
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.memory import GIB
from playbook.planner.models import MODELS
from playbook.planner.shapes import Shape
from playbook.planner.time.cluster import cluster, clusters, spelled
from playbook_app.site.text import attribute

_SHOWN = 3
_START = ("qwen3_30b_a3b", "64", "h100")
_MOST = 1 << 20
_TINY = "_tiny"
"""What the names of presets for tests end with."""
_RUN = ("model", "hardware", "gpus", "layout", "tokens_per_s_per_gpu", "mfu", "predicted")


def form(path: Path) -> str:
    """The form; empty without plans. Its data lie in a file of their own, `data`."""
    if not path.is_file():
        return ""
    return (
        '<form id="pb-diagnose" class="pb-filters pb-diagnose" data-search-exclude hidden>'
        f'<label>Model<input name="model" list="pb-models" value="{_START[0]}" autocomplete="off" spellcheck="false"></label>'
        f'<datalist id="pb-models">{"".join(f"<option>{attribute(m)}</option>" for m in models())}</datalist>'
        f'<label>GPUs<input name="gpus" type="number" min="1" max="{_MOST}" step="1" value="{_START[1]}" inputmode="numeric"></label>'
        f"{_select('gpu', 'of kind', list(clusters()), _START[2])}"
        '<label>Your speed<input name="speed" type="number" min="0" step="any" value="25" inputmode="decimal"></label>'
        f"{_select('unit', 'in', ['% MFU', 'tokens/s per GPU', 'seconds a step'], '% MFU')}"
        "<details><summary>or paste a file</summary><label>config.json, a calibration or a hardware file"
        '<textarea name="file" rows="2" spellcheck="false"></textarea></label></details></form>\n'
        '<div id="pb-diagnosis" aria-live="polite"></div>'
    )


def models() -> list[str]:
    """Every model of the planner but those for tests."""
    return [m for m in MODELS if not m.endswith(_TINY)]


def _select(name: str, label: str, values: list[str], chosen: str) -> str:
    options = "".join(f"<option{' selected' if v == chosen else ''}>{attribute(v)}</option>" for v in values)
    return f'<label>{label}<select name="{name}">{options}</select></label>'


def data(path: Path) -> str:
    """What the page compares with, for `search/diagnosis.json` of the built site; empty without plans.

    Speeds are tokens per second and GPU.
    """
    return json.dumps({**_settings(), "plans": _plans(path)}, separators=(",", ":")) if path.is_file() else ""


def _plans(path: Path) -> list[dict[str, Any]]:
    """The planner's fastest plan of each question; no speed where nothing fits."""
    return [
        {
            "model": a.asked.model, "hardware": a.asked.hardware, "gpus": a.asked.gpus, "speed": a.speed, "low": a.low, "high": a.high,
            "mfu": a.mfu, "gib": max(a.stages_gib, default=0), "settings": " ".join(a.settings),
        }
        for a in read(path) if a.asked.seq_len == 4096
    ]  # fmt: skip


@cache
def _settings() -> dict[str, Any]:
    """Models with the work of a token, GPUs with their peaks, and the published runs that each model has on each of them."""
    models_data: dict[str, Any] = {}
    gpus: dict[str, list[float]] = {}
    runs: dict[str, dict[str, Any]] = {}
    for model in models():
        on: dict[str, Any] = {}
        for gpu in clusters():
            where = setting(MODELS[model], model, gpu, int(_START[1]), seq_len=4096, gbs=None)
            gpus[gpu] = [where.peak, where.reached]
            if near := nearest(where):
                shown = near.rows[:_SHOWN]
                runs |= {r.id: {k: getattr(r, k) for k in _RUN} for r in shown}
                rows = [[r.id, r.other(where.question)] for r in shown]
                on[gpu] = [near.shared, near.by, *(float(f"{v:.6g}") for v in (near.low, near.high)), near.predicted, rows]
        shape = MODELS[model]
        models_data[model] = {"flops": where.flops_per_token, "moe": shape.experts > 0, "sizes": _sizes(shape), "published": on}
    silent, names = spelled()
    return {
        "models": models_data,
        "gpus": gpus,
        "runs": runs,
        "step": where.question.global_batch * 4096,
        "silent": silent,
        "names": dict(names),
    }


def _sizes(shape: Shape) -> list[int]:
    """What a published configuration is recognised by: layers, columns, heads, experts, vocabulary."""
    return [shape.layers, shape.hidden, shape.heads, shape.experts, shape.vocab]


_MODELS = (
    "llama3_8b", "llama3_70b", "qwen3_8b", "mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_120b", "qwen3_next_80b_a3b",
    "qwen3_235b_a22b", "deepseek_v3",
)  # fmt: skip
_HARDWARE = ("h100", "h200", "b200")
_GPUS = (8, 64, 256)
_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
LONG = (("llama3_70b", "h100", 64), ("qwen3_30b_a3b", "h100", 64))
"""Models whose speed is asked at every length."""


@dataclass(frozen=True)
class PlanQuestion:
    """A question: which layout of a model on so many GPUs, at this length, with steps of four million tokens."""

    model: str
    hardware: str
    gpus: int
    seq_len: int = 4096


@dataclass(frozen=True)
class PlannedAnswer:
    """A question with the fastest plan that fits; none where `settings` is empty. Units: tokens per second and GPU, GiB of each stage."""

    asked: PlanQuestion
    capacity_gib: float
    settings: tuple[str, ...] = ()
    speed: float = 0.0
    low: float = 0.0
    high: float = 0.0
    mfu: float = 0.0
    stages_gib: tuple[float, ...] = ()


def questions() -> Iterator[PlanQuestion]:
    """Everything that the page answers."""
    yield from (PlanQuestion(m, h, g) for m in _MODELS for h in _HARDWARE for g in _GPUS)
    yield from (PlanQuestion(*where, length) for where in LONG for length in _LENGTHS[1:])


def ask(request: PlanQuestion) -> PlannedAnswer:
    """The planner's answer."""
    where = cluster(request.hardware)
    question = Question(MODELS[request.model], request.model, where, request.gpus, request.seq_len)
    plans = search(question, 1).choices
    if not plans:
        return PlannedAnswer(request, where.memory_gib)
    first = plans[0].time
    time = scaled(first, scale_of(question, first, fp8=bool(plans[0].plan.options.fp8)))
    speed = time.tokens_per_s_per_gpu
    return PlannedAnswer(
        request,
        where.memory_gib,
        tuple(words(plans[0].plan)),
        _short(speed.value),
        _short(speed.low),
        _short(speed.high),
        _short(time.mfu),
        tuple(_short(s.peak / GIB) for s in plans[0].stages),
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def read(path: Path) -> list[PlannedAnswer]:
    """The answers of a file that `write` has written."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        PlannedAnswer(
            **{**row, "asked": PlanQuestion(**row["asked"]), "settings": tuple(row["settings"]), "stages_gib": tuple(row["stages_gib"])}
        )
        for row in rows
    ]


def line(answered: PlannedAnswer) -> str:
    """An answer as a line of the file."""
    return json.dumps(asdict(answered))
