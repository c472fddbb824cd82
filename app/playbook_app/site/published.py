"""Pages of speeds: published runs by hardware and precision, plans that were asked beforehand, worked examples of one setting varied, and
the short form of the diagnosis, which compares a figure with the planner's answers to common questions.

Asking all of these takes minutes, so `tools/plan_page.py` does it beforehand, and they are read from a file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from playbook.diagnosis.published import nearest
from playbook.diagnosis.setting import setting
from playbook.planner import memory
from playbook.planner.choice.anchored import scale_of, scaled
from playbook.planner.choice.plain_data import PARTS, words
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.runs.published import link as source_link
from playbook.planner.time.cluster import Cluster, cluster, clusters, spelled
from playbook.planner.time.step import step_time
from playbook_app.site.models import address
from playbook_app.site.pages import markdown, render
from playbook_app.site.svg import bars, curve, dots
from playbook_app.site.text import NBSP, attribute, code, link, number, percent, table, text

_PLANS_SHOWN = 3
_START = ("qwen3_30b_a3b", "64", "h100")
_MOST = 1 << 20
_TINY = "_tiny"
"""What the names of presets for tests end with."""
_RUN = ("model", "hardware", "gpus", "layout", "tokens_per_s_per_gpu", "mfu", "predicted")
_SIZES = ("layers", "hidden", "heads", "experts", "vocab")
"""What a published configuration is recognised by."""


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
                shown = near.rows[:_PLANS_SHOWN]
                runs |= {r.id: {k: getattr(r, k) for k in _RUN} for r in shown}
                rows = [[r.id, r.other(where.question)] for r in shown]
                on[gpu] = [near.shared, near.by, *(float(f"{v:.6g}") for v in (near.low, near.high)), near.predicted, rows]
        shape = MODELS[model]
        models_data[model] = {
            "flops": where.flops_per_token,
            "moe": shape.experts > 0,
            "sizes": [getattr(shape, k) for k in _SIZES],
            "published": on,
        }
    silent, names = spelled()
    return {
        "models": models_data,
        "gpus": gpus,
        "runs": runs,
        "step": where.question.global_batch * 4096,
        "silent": silent,
        "names": dict(names),
    }


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
        tuple(_short(s.peak / memory.GIB) for s in plans[0].stages),
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def read(path: Path) -> list[PlannedAnswer]:
    """The answers of a file of lines."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        PlannedAnswer(
            **{**row, "asked": PlanQuestion(**row["asked"]), "settings": tuple(row["settings"]), "stages_gib": tuple(row["stages_gib"])}
        )
        for row in rows
    ]


_ASKED = 25.0
"""The MFU that the ladder marks, in percent: what a slow run often is at."""
_FEWEST = 5
"""Runs that a step of the ladder needs."""
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
Row = Mapping[str, str]


def published_page(path: Path) -> str:
    """The runs of a table as `playbook plan check` reads it."""
    with path.open(encoding="utf-8", newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["status"] == "ok"]
    speeds = [row for row in rows if row["tokens_per_s_per_gpu"] or row["mfu_pct"]]
    models, hardware = (sorted({row[k] for row in speeds}) for k in ("model", "hardware"))
    choices = {"model": ("Model", {m: m for m in models}), "platform": ("Hardware", {h: h for h in hardware})}
    return render(
        "published.md",
        asked=number(_ASKED),
        ladder=markdown(_ladder(rows)),
        choices=choices,
        rows=[_run(row) for row in sorted(speeds, key=_order)],
    )


def _order(row: Row) -> tuple[str, str, int, float]:
    return row["model"], row["hardware"], int(row["gpus"] or 0), -float(row["mfu_pct"] or 0)


def _kind(row: Row) -> str:
    sparse = row["params_active_B"] and float(row["params_active_B"]) < 0.9 * float(row["params_total_B"] or 0)
    return "mixture of experts" if sparse else "dense"


def _ladder(rows: Sequence[Row]) -> str:
    """A step for each kind of model, hardware and precision with enough runs, the highest median first."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["mfu_pct"] and row["task"].startswith("pretrain"):
            groups.setdefault((_kind(row), row["hardware"], row["precision"]), []).append(float(row["mfu_pct"]))
    steps = sorted(((name, sorted(v)) for name, v in groups.items() if len(v) >= _FEWEST), key=lambda s: -median(s[1]))
    most = 1.05 * max((v[-1] for _, v in steps), default=1.0)
    lines = "".join(_step(name, values, most) for name, values in steps)
    head = f"<tr><th>Runs</th><th>MFU, 0 to {most:.0f} %</th><th>Lowest, median, highest</th><th>At {_ASKED:.0f} % or above</th></tr>"
    return f'<table class="pb-forest"><thead>{head}</thead><tbody>{lines}</tbody></table>' if steps else ""


def _step(name: tuple[str, str, str], values: Sequence[float], most: float) -> str:
    kind, hardware, precision = map(attribute, name)
    above = sum(v >= _ASKED for v in values)
    words = f"{values[0]:.0f}, {median(values):.0f}, {values[-1]:.0f} %"
    return (
        f"<tr><td><b>{hardware} {precision}</b>, {kind}</td><td>{dots(values, most, _ASKED)}</td><td>{words}</td>"
        f"<td>{above} of {len(values)}</td></tr>"
    )


def _run(row: Row) -> list[str]:
    """One published run as a row of cells, with what the filters look at."""
    words = " ".join([row["id"], row["model"], row["hardware"], row["precision"], row["dispatcher"]]).lower()
    page = source_link(row["source_group"], row.get("source", ""))
    source = f"[{text(row['source_group'])}]({page})" if page else text(row["source_group"])
    marks = (
        f'#{attribute(row["id"])} data-text="{attribute(words)}" data-model="{attribute(row["model"])}"'
        f' data-platform="{attribute(row["hardware"])}"'
    )
    layout = " ".join(f"{k} {row[k]}" for k in _DEGREES if row[k] not in ("", "1"))
    task = "" if row["task"] == "pretrain" else f"{text(row['task'])}, "
    return [
        f'{text(row["model"])}<br><span class="pb-of">{text(row["id"])}, {task}{source}'
        f" {text(row['release_or_date'])}</span> {{ {marks} }}",
        text(f"{row['gpus']} {row['hardware']}".strip()),
        text(row["precision"]),
        _cell(row["seq_len"], "tokens a row"),
        text(layout or "data parallel"),
        _cell(row["tokens_per_s_per_gpu"], "tokens/s per GPU"),
        _cell(row["mfu_pct"], "MFU, %"),
    ]


def _cell(value: str, label: str) -> str:
    return f'{number(float(value))} {{ data-label="{label}" }}' if value else ""


_SHOWN = ("tp", "cp", "pp", "vpp", "ep", "mbs")


def tables_page(path: Path) -> str:
    """The answers of a file as tables and figures."""
    answers = read(path)
    short = [a for a in answers if a.asked.seq_len == 4096]
    models, hardware = (list(dict.fromkeys(getattr(a.asked, k) for a in short)) for k in ("model", "hardware"))
    choices = {"model": ("Model", {m: m for m in models}), "platform": ("Hardware", {h: h for h in hardware})}
    return render("plan_tables.md", choices=choices, rows=[_row(a) for a in short], lengths=[_length(answers, where) for where in LONG])


def _row(a: PlannedAnswer) -> list[str]:
    """One answer of the planner as a row of cells; stages in GiB."""
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
        f'**{number(round(a.speed))}**<br><span class="pb-of">{number(round(a.low))} to {number(round(a.high))}</span>'
        ' { data-label="tokens/s per GPU" }',
        f'{a.mfu:.0%} {{ data-label="MFU" }}',
        f'{bars(a.stages_gib, a.capacity_gib)} {{ .pb-drawn title="stage by stage: {", ".join(map(str, peaks))} GiB" }}',
        f'{memory} {{ data-label="GiB" }}',
    ]


def _length(answers: Sequence[PlannedAnswer], where: tuple[str, str, int]) -> tuple[str, Markup]:
    """Tokens per second over the length of a row, and the memory of the fullest stage."""
    at = [a for a in answers if (a.asked.model, a.asked.hardware, a.asked.gpus) == where]
    names = {a: f"{a.asked.seq_len // 1024}K" for a in at}
    speed = [(names[a], a.speed or None, number(round(a.speed)) if a.settings else "nothing fits") for a in at]
    memory = [(names[a], max(a.stages_gib, default=None), f"{max(a.stages_gib):.0f} GiB" if a.settings else "nothing fits") for a in at]
    drawn = ((curve(speed, "tokens per second and GPU"), "tokens/s per GPU"), (curve(memory, "GiB"), "memory of the fullest stage"))
    model, hardware, gpus = where
    figures = "\n\n".join(f'<figure class="pb-figure">{svg}<figcaption>{words}, from zero</figcaption></figure>' for svg, words in drawn)
    return f"{model} on {gpus} {hardware}", markdown(figures)


_MOE = ("gpus=64", "gbs=1024", "recompute=full")


@dataclass(frozen=True)
class _Example:
    """A model on some GPUs with settings that stay, and the settings that each row has."""

    model: str
    hardware: str
    base: Sequence[str]
    rows: Sequence[Sequence[str]]


_EXAMPLES = {
    "worked fsdp": _Example("llama3_8b", "h100", ("gpus=8", "gbs=64", "backend=torch"), (("sharding=none",), ("sharding=fsdp2",))),
    "worked ep": _Example(
        "qwen3_30b_a3b",
        "h100",
        _MOE,
        (("ep=1", "dispatcher=alltoall"), *((f"ep={n}", "dispatcher=hybridep") for n in (2, 4, 8, 16, 32, 64))),
    ),
    "worked cp": _Example(
        "qwen3_30b_a3b",
        "h100",
        ("gpus=64", "gbs=64", "seq_len=65536", "ep=8", "dispatcher=hybridep", "recompute=full"),
        [(f"cp={n}",) for n in (1, 2, 4, 8, 16)],
    ),
    "worked pp": _Example(
        "llama3_70b",
        "h100",
        ("gpus=64", "gbs=256", "tp=4", "recompute=full"),
        [("pp=1",), ("pp=2",), ("pp=4",), ("pp=8",), ("pp=8", "vpp=5")],
    ),
    "worked tp": _Example("llama3_70b", "h100", ("gpus=64", "gbs=1024", "pp=4", "recompute=full"), [(f"tp={n}",) for n in (1, 2, 4, 8)]),
}


def worked() -> dict[str, str]:
    """Markdown by the name of the comment that it replaces: an example each, and what the hardware should reach."""
    return {**{name: _table(example) for name, example in _EXAMPLES.items()}, "what links should reach": _links()}


def _table(example: _Example) -> str:
    where = cluster(example.hardware)
    setting = (
        f"`{example.model}` on {example.hardware.upper()}s, {', '.join(f'`{w}`' for w in example.base)}; {where.memory_gib:.0f} GiB a GPU:"
    )
    rows = [_example_row(example, words, where) for words in example.rows]
    body = table(["Set", "Memory", "GiB>", "Tokens/s per GPU>", "Against the first>", "Where the step goes"], _compared(rows))
    return f'{setting}\n\n<div class="pb-matrix pb-families" markdown="1">\n\n{body}\n\n</div>'


def _example_row(example: _Example, words: Sequence[str], where: Cluster) -> tuple[float, list[str]]:
    plan = parse(example.model, [*example.base, *words])
    if plan.broken():
        raise AssertionError(f"{example.model} {words}: {plan.broken()}")  # an example of ours
    time, stages = step_time(plan, where), [s.peak / memory.GIB for s in memory.stages(plan)]
    shares = sorted(((v / time.seconds.value, k) for k, v in time.parts.items()), reverse=True)[:4]
    most = max(stages)
    gib = f"**{most:.0f}**, does not fit" if most > where.memory_gib else f"{most:.0f}"
    cells = [code(" ".join(words)), f"{bars(stages, max(where.memory_gib, most))}", f'{gib} {{ data-label="GiB" }}']
    speed = time.tokens_per_s_per_gpu.value
    tail = [f'{number(round(speed))} {{ data-label="tokens/s per GPU" }}', ", ".join(f"{text(PARTS[k])} {v:.0%}" for v, k in shares)]
    return speed, [*cells, *tail]


def _compared(rows: Sequence[tuple[float, list[str]]]) -> list[list[str]]:
    first = rows[0][0]
    return [
        [*cells[:-1], f'{percent(speed / first - 1)} {{ data-label="against the first" }}' if i else "", cells[-1]]
        for i, (speed, cells) in enumerate(rows)
    ]


def _links() -> str:
    """What each GPU should reach, one direction."""
    rows = [
        [
            name,
            number(round(c.bf16_flops_per_s / 1e12)),
            number(round(c.memory_bytes_per_s / 1e9)),
            number(round(c.link_bytes_per_s / 1e9)),
            number(c.domain),
            number(c.nic_bytes_per_s / 1e9),
        ]
        for name, c in ((n, cluster(n)) for n in clusters())
    ]
    head = ["GPU", "BF16 TFLOP/s>", "Memory GB/s>", "NVLink GB/s>", "GPUs in a domain>", "Network GB/s per GPU>"]
    return table(head, rows)
