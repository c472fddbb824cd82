"""The short form of the diagnosis: every model and GPU, published runs, and the fastest plans of common settings, as data that the page compares a figure with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from playbook.diagnosis.published import nearest
from playbook.diagnosis.setting import setting
from playbook.planner.models import MODELS
from playbook.planner.shapes import Shape
from playbook.planner.time.cluster import clusters, spelled
from playbook_app.site.planned.answers import read
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
        '<details><summary>or paste a file</summary><label>config.json, a calibration or a hardware file<textarea name="file" rows="2" spellcheck="false"></textarea></label></details></form>\n'
        '<div id="pb-diagnosis" aria-live="polite"></div>'
    )


def models() -> list[str]:
    """Every model of the planner but those for tests."""
    return [m for m in MODELS if not m.endswith(_TINY)]


def _select(name: str, label: str, values: list[str], chosen: str) -> str:
    options = "".join(f"<option{' selected' if v == chosen else ''}>{attribute(v)}</option>" for v in values)
    return f'<label>{label}<select name="{name}">{options}</select></label>'


def data(path: Path) -> str:
    """What the page compares with, for `search/diagnosis.json` of the built site; empty without plans. Speeds are tokens per second and GPU."""
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
    known: dict[str, Any] = {}
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
        known[model] = {"flops": where.flops_per_token, "moe": shape.experts > 0, "sizes": _sizes(shape), "published": on}
    silent, names = spelled()
    return {"models": known, "gpus": gpus, "runs": runs, "step": where.question.global_batch * 4096, "silent": silent, "names": dict(names)}


def _sizes(shape: Shape) -> list[int]:
    """What a published configuration is recognised by: layers, columns, heads, experts, vocabulary."""
    return [shape.layers, shape.hidden, shape.heads, shape.experts, shape.vocab]
