"""The short form of the diagnosis on its page: published runs of every GPU, and the fastest plan of common settings, as data that the page compares a figure with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from playbook.diagnosis.published import nearest
from playbook.diagnosis.setting import setting
from playbook.planner.models import MODELS
from playbook.planner.time.cluster import clusters, spelled
from playbook_app.site.planned.answers import Answered, Asked, read
from playbook_app.site.text import attribute

_SHOWN = 3
_START = ("qwen3_30b_a3b", "64", "h100")
_MOST = 1 << 20


def form(path: Path) -> str:
    """The form with its data; empty without plans. A file of plans holds what the planner answers to each setting."""
    found = [a for a in read(path) if a.asked.seq_len == 4096]
    if not found:
        return ""
    silent, names = spelled()
    data = json.dumps({"rows": settings(found), "silent": silent, "names": dict(names)}, separators=(",", ":")).replace("<", "\\u003c")
    models = list(dict.fromkeys(a.asked.model for a in found))
    return (
        '<form id="pb-diagnose" class="pb-filters pb-diagnose" data-search-exclude hidden>'
        f"{_select('model', 'Model', models, _START[0])}"
        f'<label>GPUs<input name="gpus" type="number" min="1" max="{_MOST}" step="1" value="{_START[1]}" inputmode="numeric"></label>'
        f"{_select('gpu', 'of kind', list(clusters()), _START[2])}"
        '<label>Your speed<input name="speed" type="number" min="0" step="any" value="25" inputmode="decimal"></label>'
        f"{_select('unit', 'in', ['% MFU', 'tokens/s per GPU', 'seconds a step'], '% MFU')}"
        '<label>or paste a calibration or a hardware file<textarea name="file" rows="1" spellcheck="false"></textarea></label></form>\n'
        '<div id="pb-diagnosis" aria-live="polite"></div>\n'
        f'<script type="application/json" id="pb-settings">{data}</script>'
    )


def settings(found: list[Answered]) -> list[dict[str, Any]]:
    """A row for each plan and each question that nothing fits, and one of published runs alone for each model on a GPU that no plan was asked for."""
    asked = {(a.asked.model, a.asked.hardware) for a in found}
    models = dict.fromkeys(a.asked.model for a in found)
    others = [Answered(Asked(m, h, int(_START[1])), 0.0) for m in models for h in clusters() if (m, h) not in asked]
    return [{**_row(a), "asked": True} for a in found] + [{**_row(a), "asked": False} for a in others]


def _select(name: str, label: str, values: list[str], chosen: str) -> str:
    options = "".join(f"<option{' selected' if v == chosen else ''}>{attribute(v)}</option>" for v in values)
    return f'<label>{label}<select name="{name}">{options}</select></label>'


def _row(a: Answered) -> dict[str, Any]:
    where = setting(MODELS[a.asked.model], a.asked.model, a.asked.hardware, a.asked.gpus, seq_len=a.asked.seq_len, gbs=None)
    runs = nearest(where)
    told = ("id", "model", "hardware", "gpus", "layout", "tokens_per_s_per_gpu", "mfu", "predicted")
    rows = [{**{k: getattr(r, k) for k in told}, "other": r.other(where.question)} for r in runs.rows[:_SHOWN]] if runs else []
    return {
        **asdict(a.asked),
        "speed": a.speed,
        "low": a.low,
        "high": a.high,
        "mfu": a.mfu,
        "gib": max(a.stages_gib, default=0),
        "settings": " ".join(a.settings),
        "tokens_per_mfu": where.peak / where.flops_per_token,
        "reached": where.reached,
        "peak": where.peak,
        "step_tokens": where.question.global_batch * a.asked.seq_len / a.asked.gpus,
        "published": {"shared": runs.shared, "by": runs.by, "low": runs.low, "high": runs.high, "predicted": runs.predicted, "rows": rows}
        if runs
        else None,
    }
