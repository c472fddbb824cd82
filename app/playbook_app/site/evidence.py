"""Pages made from records: one per verdict, one per trace, and the list of all."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from playbook.cards.model import by_claim
from playbook.records.evidence import Evidence, Run
from playbook.records.machine import NOTABLE_DATA, NOTABLE_STOLEN, host_limit, limited, mapping_of
from playbook.records.read import EVIDENCE, TRACE, Record, traces
from playbook.records.trace import TraceResult, waterfall
from playbook_app.site import curves
from playbook_app.site.cards import Shelf, anchor, coverage, effect
from playbook_app.site.pages import markdown, render
from playbook_app.site.svg import part, samples
from playbook_app.site.text import (
    badge,
    code,
    day,
    link,
    mapping,
    milliseconds,
    number,
    percent,
    plain,
    quantity,
    text,
)

_CONTENT = {"text": "text", "vqa": "photographs with questions"}
_OF_ONES_OWN = {"text": "text", "vqa": "images with questions"}


def evidence_page(shelf: Shelf, record: Record, shown_path: str) -> str:
    """One verdict with everything behind it."""
    title = f"{record.about or 'a case'} on {record.machine}"
    if record.altered or not isinstance(record.content, Evidence):
        return render("altered.md", title=title, record=record)
    spent = " ".join(filter(None, [_computing(record), _host(record), _limited(record), _on_data(record.runs), _stolen(record)]))
    runs = sorted(
        (r for r in record.get("measured", "runs", default=[]) if isinstance(r, Mapping)), key=lambda r: int(r.get("position") or 0)
    )
    return render(
        "evidence.md",
        title=title,
        record=record,
        statement=markdown(_statement(shelf, record)),
        facts=_facts(record),
        commands=f"{' '.join(str(record.get('command', default='')).split())}\nplaybook bench replay {shown_path}",
        comparison=_comparison(record),
        curve_figures=markdown(curves.figures(record)),
        curve_tables=markdown(curves.tables(record)),
        receipts=_receipts(record),
        spent=markdown(spent),
        traced=_traced(shelf, record),
        gates=_gates(record),
        missing=record.get("measured", "missing", default=[]),
        steps=markdown(samples(record.runs)),
        launches=[_launch(r) for r in runs],
        figures=[[text(str(k).replace("_", " ")), _figure(v)] for k, v in record.get("derived", "figures", default={}).items()],
        environment=_environment(record),
    )


_LEAST_MS = 0.005


def _waterfall(trace: TraceResult) -> list[list[str]]:
    """Rows of what makes up the difference between the first variant's traced step and each other's; the parts add up to the last row."""
    tables = {name: each.table.model_dump() for name, each in trace.variants.items() if each.table}
    first, *others = tables or [""]
    rows = []
    for other in others:
        parts = waterfall(tables[first], tables[other])
        whole = sum(ms for _, ms in parts)
        small = sum(ms for _, ms in parts if abs(ms) < _LEAST_MS)
        shown = [(name, ms) for name, ms in parts if abs(ms) >= _LEAST_MS] + ([("everything else", small)] if small else [])
        ends = list(itertools.accumulate((ms for _, ms in shown), initial=0.0))
        for (name, ms), start, end in zip(shown, ends, ends[1:], strict=False):
            rows.append([text(other), code(name), _signed(ms), part(start, end, min(ends), max(ends))])
        rows.append([text(other), "**the step**", f"**{_signed(whole)}**", part(0.0, whole, min(ends), max(ends))])
    return rows


def _signed(ms: float) -> str:
    return ("+" if ms > 0 else "−" if ms < 0 else "") + milliseconds(abs(ms))


def _traced(shelf: Shelf, record: Record) -> tuple[str, list[list[str]]]:
    """A link to the trace of this record's configurations, and the waterfall of it; empty where there is none."""
    shas = {r.config_sha for r in record.runs}
    case = record.get("measured", "case", "id")
    for each in traces(shelf.records, case):
        trace = each.content
        if isinstance(trace, TraceResult) and {v.config_sha for v in trace.variants.values()} <= shas:
            return markdown(link("the trace", f"{each.id}.md")), _waterfall(trace)
    return "", []


def _statement(shelf: Shelf, record: Record) -> str:
    claim = record.get("measured", "claim")
    if not isinstance(claim, Mapping):
        return ""
    home = None if record.foreign else shelf.home.get(str(claim.get("id")))
    name = link(text(claim.get("id")), f"../cards/{home}.md#{anchor(str(claim.get('id')))}") if home else text(claim.get("id"))
    limits = claim.get("cpu_scope")
    speaks = f"\n\nA CPU verdict speaks for: {text(limits)}" if limits and record.gpus == 0 else ""
    today = by_claim(shelf.cards).get(str(claim.get("id"))) if home else None
    other = "\n\nThese are the words that were tested; today's are on the card." if today and record.other_words(today[1]) else ""
    return f"> {name}: {text(claim.get('statement'))}{speaks}{other}"


def _facts(record: Record) -> list[list[str]]:
    """Rows on what was run: machine, case, data, dates, time spent and the hash of the record."""
    seconds = record.get("seconds", default={})
    return [
        ["Machine", text(record.get("measured", "machine", "description", default=""))],
        [
            "Case and profile",
            f"{code(record.get('measured', 'case', 'id', default='none'))} {text(record.get('measured', 'profile', default=''))}",
        ],
        *([["Data", read]] if (read := _data_read(record)) else []),
        ["Measured", text(record.created)],
        ["Valid until", text(record.get("expires", default=""))],
        ["Reason", code(record.get("derived", "verdict", "reason", default=""))],
        [
            "Time spent",
            ", ".join(f"{text(k.replace('_', ' '))} {quantity(v, 's')}" for k, v in seconds.items() if isinstance(v, int | float) and v),
        ],
        *_failed(record),
        ["Record", f"{code(record.id)}, SHA-256 {code(str(record.get('sha256'))[:16])}"],
    ]


def _data_read(record: Record) -> str:
    """The data of each variant, as Markdown; empty where no run has a configuration that names them."""
    configs = record.get("measured", "configs", default={})
    words: dict[str, str] = {}
    for run in record.get("measured", "runs", default=[]):
        config = configs.get(run.get("config_sha"))
        data = _in_words(config.get("data")) if isinstance(config, Mapping) else ""
        if data:
            words.setdefault(str(run.get("variant")), data)
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{data} in {text(variant)}" for variant, data in words.items())


def _in_words(data: Any) -> str:
    if not isinstance(data, Mapping) or data.get("kind") not in ("mock", *_CONTENT):
        return ""
    kind, packed = data["kind"], ", packed" if data.get("pack") is True else ""
    if kind == "mock":
        return "random tokens" + (packed or ", one document to a row")
    if data.get("source") == "generated":
        return f"generated {_CONTENT[kind]}{packed}"
    if data.get("path") is None:
        return f"bundled {_CONTENT[kind]}{packed}"
    return f"{_OF_ONES_OWN[kind]} from a data set of the run's own{packed}"


def _failed(record: Record) -> list[list[str]]:
    """Launches that failed under earlier commands on the series' journal."""
    failures = record.get("measured", "failed_before", default={})
    rows = [f"{number(n)} {text(how)}" for how, n in failures.items() if isinstance(n, int)] if isinstance(failures, Mapping) else []
    return [["Failed and launched again", ", ".join(rows)]] if rows else []


def _comparison(record: Record) -> list[list[str]]:
    """Rows of a comparison: metric, both values, effect, design and the statistics behind it."""
    comparison = record.get("derived", "comparison")
    if not isinstance(comparison, Mapping):
        return []
    unit = str(comparison.get("unit"))
    rows = [
        ["Metric", f"{code(comparison.get('metric'))}, {text(comparison.get('better'))} is better"],
        ["Baseline", quantity(comparison.get("baseline"), unit)],
        ["Candidate", quantity(comparison.get("candidate"), unit)],
        ["Effect, positive where the candidate is better", f"**{effect(record)}**"],
        *_itself(comparison),
        ["Design", text(str(comparison.get("design")).replace("_", " "))],
        ["Pairs", number(comparison.get("pairs")) + _between(comparison)],
    ]
    labels = {
        "deviation": "Deviation of the paired differences",
        "floor": "Deviation of the stored A/A",
        "mde": "Least distance from the margin that so many pairs settle",
        "pairs_needed": "Pairs needed",
    }
    relative = comparison.get("scale") == "log_ratio"
    for key, label in labels.items():
        value = comparison.get(key)
        if isinstance(value, int | float):
            if key == "pairs_needed":
                value = max(value, _first_look(record))
            rows.append([label, _on_logarithms(key, value) if relative and key in _ON_LOGARITHMS else number(value)])
    return rows


_ON_LOGARITHMS = ("deviation", "floor", "mde")


def _on_logarithms(key: str, value: float) -> str:
    """A figure on the log scale as a percentage: effects are converted to ratios, deviations are not."""
    return percent(value if key in ("deviation", "floor") else math.expm1(value)).lstrip("+")


def _itself(comparison: Mapping[str, Any]) -> list[list[str]]:
    """A row with the candidate's change of the metric itself, for metrics where lower is better: an effect of +100 % is a change of -50
    %.
    """
    value = comparison.get("effect")
    if (
        comparison.get("scale") != "log_ratio"
        or comparison.get("better") != "lower"
        or not isinstance(value, int | float)
        or not value > -1
    ):
        return []
    return [["Change of the metric itself", percent(1 / (1 + value) - 1)]]


def _first_look(record: Record) -> int:
    """Pairs at the first look; no verdict is given before."""
    looks = record.get("measured", "plan", "looks", default=[])
    return min((n for n in looks if isinstance(n, int)), default=0) if isinstance(looks, list) else 0


def _between(comparison: Mapping[str, Any]) -> str:
    """The note `between looks` for a series that its budget stopped; its interval gives no verdict."""
    return ", between looks" if comparison.get("design") != "deterministic" and comparison.get("look") is None else ""


def _receipts(record: Record) -> list[list[str]]:
    """Rows of the activation receipt: rule, count observed, count expected."""
    return [
        [
            text(c.get("variant")),
            text(c.get("rule")),
            number(c.get("observed")),
            text(c.get("expected")),
            _yes(c.get("ok")),
            number(c.get("runs")),
        ]
        for c in record.get("derived", "receipts", default=[])
    ]


def _gates(record: Record) -> list[list[str]]:
    """The conditions of the verdict, and whether each held."""
    return [
        [text(str(g.get("name")).replace("a_a", "A/A").replace("_", " ")), _yes(g.get("ok")), text(g.get("detail") or "")]
        for g in record.get("derived", "gates", default=[])
    ]


def _host(record: Record) -> str:
    """A sentence where the host's own noise is the limit."""
    comparison = record.get("derived", "comparison") or record.get("derived", "curve") or {}
    sentence = host_limit(comparison)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _computing(record: Record) -> str:
    """A sentence on the share of a step in which the GPU computed; empty without a trace."""
    shares: dict[str, list[float]] = {}
    for run in record.get("measured", "runs", default=[]):
        share = ((run.get("observed") or {}).get("counters") or {}).get("gpu_computing_percent")
        if isinstance(share, int | float):
            shares.setdefault(str(run.get("variant")), []).append(float(share))
    shown = ", ".join(f"{number(round(statistics.median(s)))} % of the step in {text(v)}" for v, s in sorted(shares.items()))
    return f"By a trace of one step, the GPU computed {shown}. The rest waited for other ranks or for the host." if shown else ""


def _limited(record: Record) -> str:
    """A sentence on limits of power or heat that held GPU clocks down during timed steps; empty if none did."""
    measured = (r for r in record.get("measured", "runs", default=[]) if r.get("role") == "measure")
    limits = limited((str(r.get("variant")), r.get("telemetry")) for r in measured)
    return f"In the timed steps, the GPUs' clocks were held down by {text('; by '.join(limits))}." if limits else ""


def _on_data(runs: Sequence[Run]) -> str:
    """A sentence on the share of step time that the host spent on data; only variants above NOTABLE_DATA."""
    shares: dict[str, list[float]] = {}
    for run in runs:
        timed = [s for s in run.samples if s.timed]
        if run.role == "measure" and (whole := sum(s.seconds for s in timed)):
            shares.setdefault(run.variant, []).append(sum(s.data_seconds for s in timed) / whole)
    medians = {variant: statistics.median(each) for variant, each in sorted(shares.items())}
    shown = ", ".join(f"{number(round(100 * m))} % of the step in {text(v)}" for v, m in medians.items() if m >= NOTABLE_DATA)
    return f"The host spent {shown} on data." if shown else ""


def _stolen(record: Record) -> str:
    """A sentence on processor time that the hypervisor gave to other machines; only variants above NOTABLE_STOLEN."""
    shares: dict[str, list[float]] = {}
    for run in record.get("measured", "runs", default=[]):
        share = (run.get("telemetry") or {}).get("stolen_percent") if run.get("role") == "measure" else None
        if isinstance(share, int | float):
            shares.setdefault(str(run.get("variant")), []).append(float(share))
    medians = {variant: statistics.median(each) for variant, each in sorted(shares.items())}
    shown = ", ".join(f"{number(round(m))} % from {text(v)}" for v, m in medians.items() if m >= NOTABLE_STOLEN)
    return f"The hypervisor kept processor time from this machine: {shown}." if shown else ""


def _yes(ok: Any) -> str:
    return badge("ok") if ok is True else badge("failed")


def _launch(run: Mapping[str, Any]) -> list[str]:
    return [
        number(run.get("position")),
        text(run.get("variant")),
        text(str(run.get("role")).replace("_", " ")),
        number(run.get("pair")) if run.get("pair") is not None else "",
        badge(str(run.get("outcome"))),
        _mean_step(run),
        _last_loss(run),
        quantity(run.get("wall_s"), "s"),
    ]


def _timed(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [s for s in run.get("samples") or [] if isinstance(s, Mapping) and s.get("timed")]


def _mean_step(run: Mapping[str, Any]) -> str:
    seconds = [s["seconds"] for s in _timed(run) if isinstance(s.get("seconds"), int | float)]
    return f"{milliseconds(sum(seconds) / len(seconds) * 1000)} ms" if seconds else ""


def _last_loss(run: Mapping[str, Any]) -> str:
    losses = [s["loss"] for s in _timed(run) if isinstance(s.get("loss"), int | float)]
    return f"{losses[-1]:.4f}" if losses else ""


def _figure(value: Any) -> str:
    if isinstance(value, list | Mapping):
        return code(plain(value) if isinstance(value, list) else value)[:2000]
    return number(value) if isinstance(value, int | float) else text(plain(value))


def _environment(record: Record) -> list[tuple[str, list[list[str]]]]:
    """Folded tables, each a title and rows: the environment of the launches, and the keys in which the variants differ."""
    parts = []
    for sha, values in record.get("measured", "strict", default={}).items():
        if isinstance(values, Mapping):
            rows = [[text(k), mapping(v) if isinstance(v, Mapping) else code(plain(v))] for k, v in sorted(values.items())]
            parts.append((f"Environment {sha[:12]}", rows))
    case = record.get("measured", "case", "content", default={})
    if isinstance(case, Mapping) and (case.get("baseline") or case.get("candidate")):
        rows = [["Baseline", mapping(case.get("baseline") or {})], ["Candidate", mapping(case.get("candidate") or {})]]
        parts.append(("What differs between the variants", rows))
    return parts


def trace_page(record: Record) -> str:
    """The table of time per range of both variants."""
    about = [
        ["Machine", text(record.get("machine", "description", default=""))],
        ["Collector", text(f"{record.get('collector')} ({record.get('collector_version', default='')})")],
        ["Measured", text(record.created)],
        ["Coverage", coverage(record)],
        ["Record", link(code(record.id), f"{record.id}.json")],
    ]
    variants = {str(k): v for k, v in record.get("variants", default={}).items() if isinstance(v, Mapping)}
    return render(
        "trace.md",
        title=f"Trace of {record.get('case')} on {record.get('profile')}",
        record=record,
        about=about,
        command=" ".join(str(record.get("command", default="")).split()),
        variants=variants,
        waterfall=_waterfall(record.content) if isinstance(record.content, TraceResult) and not record.altered else [],
        outside={name: _outside(traced) for name, traced in variants.items()},
    )


def _outside(traced: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the operations that lie in no named range."""
    unattributed = mapping_of(traced.get("table")).get("unattributed") or []
    return [[code(u.get("name")), text(u.get("phase")), number(u.get("count")), milliseconds(u["busy_ms"])] for u in unattributed]


def list_page(shelf: Shelf) -> str:
    """Every record, newest first."""
    found_traces = [
        [
            link(day(r.created), f"{r.id}.md"),
            *(text(r.get(k)) for k in ("case", "profile", "collector")),
            badge("altered") if r.altered else "",
        ]
        for r in shelf.records
        if r.schema == TRACE
    ]
    evidence = [r for r in shelf.records if r.schema == EVIDENCE]
    claims = [claim for card in shelf.cards.values() for claim in card.claims]
    statements = {c.id: c.statement for c in claims} | {
        c.mechanism_check.id: c.mechanism_check.statement for c in claims if c.mechanism_check
    }
    return render(
        "evidence_list.md",
        verdicts=evidence,
        traces=found_traces,
        effect=lambda r: markdown(effect(r)),
        says=lambda r: markdown(text(shorten(statements.get(str(r.about), ""), 110, placeholder=" …"))),
    )
