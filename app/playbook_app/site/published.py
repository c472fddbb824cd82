"""Pages of speeds: published runs by hardware and precision, plans that were asked beforehand, worked examples of one setting varied."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from markupsafe import Markup

from playbook.planner import memory
from playbook.planner.choice.plain_data import PARTS
from playbook.planner.memory import GIB
from playbook.planner.plan import parse
from playbook.planner.runs.published import link as source_link
from playbook.planner.time.cluster import Cluster, cluster, clusters
from playbook.planner.time.step import step_time
from playbook_app.site.calculator import address
from playbook_app.site.diagnosed import LONG, PlannedAnswer, read
from playbook_app.site.pages import markdown, render
from playbook_app.site.svg import bars, curve, dots
from playbook_app.site.text import NBSP, attribute, code, link, number, percent, table, text

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
    time, stages = step_time(plan, where), [s.peak / GIB for s in memory.stages(plan)]
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
