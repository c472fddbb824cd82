"""The page of plans that were asked beforehand: model by hardware by number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from playbook_app.site.calculator import address
from playbook_app.site.figures.strips import bars
from playbook_app.site.figures.svg import curve
from playbook_app.site.pages import markdown, render
from playbook_app.site.planned.answers import LONG, Answered, read
from playbook_app.site.text import NBSP, code, link, number

_SHOWN = ("tp", "cp", "pp", "vpp", "ep", "mbs")


def tables_page(path: Path) -> str:
    """The answers of a file as tables and figures."""
    found = read(path)
    short = [a for a in found if a.asked.seq_len == 4096]
    models, hardware = (list(dict.fromkeys(getattr(a.asked, k) for a in short)) for k in ("model", "hardware"))
    choices = {"model": ("Model", {m: m for m in models}), "platform": ("Hardware", {h: h for h in hardware})}
    return render("plan_tables.md", choices=choices, rows=[_row(a) for a in short], lengths=[_length(found, where) for where in LONG])


def _row(a: Answered) -> list[str]:
    words = f"{a.asked.model} {a.asked.hardware} {a.asked.gpus}"
    marks = f'data-text="{words}" data-model="{a.asked.model}" data-platform="{a.asked.hardware}"'
    head = [f"{code(a.asked.model)} {{ {marks} }}", f"{a.asked.gpus} {a.asked.hardware}"]
    if not a.settings:
        return [*head, "nothing fits", "", "", "", ""]
    chosen = dict(w.split("=", 1) for w in a.settings)
    recompute = f", recompute {chosen['recompute'].replace(',', ' + ')}" if "recompute" in chosen else ""
    layout = " ".join(f"{k}{NBSP}{chosen[k]}" for k in _SHOWN if k in chosen) or "data parallel"
    peaks = [round(v) for v in a.stages_gib]
    memory = f"{number(max(peaks))} of {number(round(a.capacity_gib))}"
    return [
        *head,
        link(layout + recompute, address({"model": a.asked.model, **chosen})),
        f'**{number(round(a.speed))}**<br><span class="pb-of">{number(round(a.low))} to {number(round(a.high))}</span> {{ data-label="tokens/s per GPU" }}',
        f'{a.mfu:.0%} {{ data-label="MFU" }}',
        f'{bars(a.stages_gib, a.capacity_gib)} {{ .pb-drawn title="stage by stage: {", ".join(map(str, peaks))} GiB" }}',
        f'{memory} {{ data-label="GiB" }}',
    ]


def _length(found: Sequence[Answered], where: tuple[str, str, int]) -> tuple[str, Markup]:
    """Tokens per second over the length of a row, and the memory of the fullest stage."""
    at = [a for a in found if (a.asked.model, a.asked.hardware, a.asked.gpus) == where]
    names = {a: f"{a.asked.seq_len // 1024}K" for a in at}
    speed = [(names[a], a.speed or None, number(round(a.speed)) if a.settings else "nothing fits") for a in at]
    memory = [(names[a], max(a.stages_gib, default=None), f"{max(a.stages_gib):.0f} GiB" if a.settings else "nothing fits") for a in at]
    drawn = ((curve(speed, "tokens per second and GPU"), "tokens/s per GPU"), (curve(memory, "GiB"), "memory of the fullest stage"))
    model, hardware, gpus = where
    figures = "\n\n".join(f'<figure class="pb-figure">{svg}<figcaption>{words}, from zero</figcaption></figure>' for svg, words in drawn)
    return f"{model} on {gpus} {hardware}", markdown(figures)
