"""Pages made from records: one per verdict, one per trace, and the list of all."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any

from playbook.cards.model import by_claim
from playbook.records.evidence import Comparison, Evidence, Measured, Run
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
    signed,
    text,
)

_CONTENT = {"text": "text", "vqa": "photographs with questions"}
_OF_ONES_OWN = {"text": "text", "vqa": "images with questions"}


def evidence_page(shelf: Shelf, record: Record, shown_path: str) -> str:
    """One verdict with everything behind it."""
    title = f"{record.about or 'a case'} on {record.machine}"
    evidence = record.content
    if record.altered or not isinstance(evidence, Evidence):
        return render("altered.md", title=title, record=record)
    runs = evidence.measured.runs
    spent = " ".join(filter(None, [_computing(runs), _host(record), _limited(runs), _on_data(runs), _stolen(runs)]))
    return render(
        "evidence.md",
        title=title,
        record=record,
        statement=markdown(_statement(shelf, record)),
        facts=_facts(record, evidence),
        commands=f"{' '.join(str(record.get('command', default='')).split())}\nplaybook bench replay {shown_path}",
        comparison=_comparison(record, evidence),
        curve_figures=markdown(curves.figures(record)),
        curve_tables=markdown(curves.tables(record)),
        receipts=[
            [text(c.variant), text(c.rule), number(c.observed), text(c.expected), _yes(c.ok), number(c.runs)]
            for c in evidence.derived.receipts
        ],
        spent=markdown(spent),
        traced=_traced(shelf, record),
        gates=[[text(g.name.replace("a_a", "A/A").replace("_", " ")), _yes(g.ok), text(g.detail)] for g in evidence.derived.gates],
        missing=record.get("measured", "missing", default=[]),
        steps=markdown(samples(runs)),
        launches=[_launch(r) for r in sorted(runs, key=lambda r: r.position)],
        figures=[[text(k.replace("_", " ")), _figure(v)] for k, v in evidence.derived.figures.items()],
        environment=_environment(evidence.measured),
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
            rows.append([text(other), code(name), signed(ms), part(start, end, min(ends), max(ends))])
        rows.append([text(other), "**the step**", f"**{signed(whole)}**", part(0.0, whole, min(ends), max(ends))])
    return rows


def _traced(shelf: Shelf, record: Record) -> tuple[str, list[list[str]]]:
    """A link to the trace of this record's configurations, and the waterfall of it; empty where there is none."""
    shas = {r.config_sha for r in record.runs}
    for each in traces(shelf.records, record.get("measured", "case", "id")):
        trace = each.content
        if isinstance(trace, TraceResult) and {v.config_sha for v in trace.variants.values()} <= shas:
            return markdown(link("the trace", f"{each.id}.md")), _waterfall(trace)
    return "", []


def _statement(shelf: Shelf, record: Record) -> str:
    claim = record.claim_ref
    if claim is None:
        return ""
    home = None if record.foreign else shelf.home.get(claim.id)
    name = link(text(claim.id), f"../cards/{home}.md#{anchor(claim.id)}") if home else text(claim.id)
    speaks = f"\n\nA CPU verdict speaks for: {text(claim.cpu_scope)}" if claim.cpu_scope and record.gpus == 0 else ""
    today = by_claim(shelf.cards).get(claim.id) if home else None
    other = "\n\nThese are the words that were tested; today's are on the card." if today and record.other_words(today[1]) else ""
    return f"> {name}: {text(claim.statement)}{speaks}{other}"


def _facts(record: Record, evidence: Evidence) -> list[list[str]]:
    """Rows on what was run: machine, case, data, dates, time spent, launches that failed under earlier commands, and the record's hash."""
    measured = evidence.measured
    failed = ", ".join(f"{number(n)} {text(how)}" for how, n in measured.failed_before.items())
    return [
        ["Machine", text(measured.machine.description)],
        ["Case and profile", f"{code(measured.case.id if measured.case else 'none')} {text(measured.profile or '')}"],
        *([["Data", read]] if (read := _data_read(measured)) else []),
        ["Measured", text(record.created)],
        ["Valid until", text(evidence.expires)],
        ["Reason", code(evidence.derived.verdict.reason)],
        ["Time spent", ", ".join(f"{text(k.replace('_', ' '))} {quantity(v, 's')}" for k, v in evidence.seconds if v)],
        *([["Failed and launched again", failed]] if failed else []),
        ["Record", f"{code(record.id)}, SHA-256 {code(evidence.sha256[:16])}"],
    ]


def _data_read(measured: Measured) -> str:
    """The data of each variant, as Markdown; empty where no run has a configuration that names them."""
    words: dict[str, str] = {}
    for run in measured.runs:
        data = _in_words(measured.configs.get(run.config_sha, {}).get("data"))
        if data:
            words.setdefault(run.variant, data)
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


def _comparison(record: Record, evidence: Evidence) -> list[list[str]]:
    """Rows of a comparison: metric, both values, effect, design and the statistics behind it."""
    found, plan = evidence.derived.comparison, evidence.measured.plan
    if found is None:
        return []
    # An interval that a budget has stopped gives no verdict.
    stopped = ", between looks" if found.design != "deterministic" and found.look is None else ""
    rows = [
        ["Metric", f"{code(found.metric)}, {text(found.better)} is better"],
        ["Baseline", quantity(found.baseline, found.unit)],
        ["Candidate", quantity(found.candidate, found.unit)],
        ["Effect, positive where the candidate is better", f"**{effect(record)}**"],
        *_itself(found),
        ["Design", text(found.design.replace("_", " "))],
        ["Pairs", number(found.pairs) + stopped],
    ]
    labels = {
        "deviation": "Deviation of the paired differences",
        "floor": "Deviation of the stored A/A",
        "mde": "Least distance from the margin that so many pairs settle",
        "pairs_needed": "Pairs needed",
    }
    for key, label in labels.items():
        value = getattr(found, key)
        if value is None:
            continue
        if key == "pairs_needed":
            rows.append([label, number(max(value, min(plan.looks) if plan else 0))])  # no verdict is given before the first look
        elif found.scale == "log_ratio":  # effects are converted to ratios, deviations are not
            rows.append([label, percent(math.expm1(value) if key == "mde" else value).lstrip("+")])
        else:
            rows.append([label, number(value)])
    return rows


def _itself(found: Comparison) -> list[list[str]]:
    """A row with the candidate's change of the metric itself, for metrics where lower is better: an effect of +100 % is a change of -50
    %.
    """
    if found.scale != "log_ratio" or found.better != "lower" or found.effect is None or not found.effect > -1:
        return []
    return [["Change of the metric itself", percent(1 / (1 + found.effect) - 1)]]


def _host(record: Record) -> str:
    """A sentence where the host's own noise is the limit."""
    comparison = record.get("derived", "comparison") or record.get("derived", "curve") or {}
    sentence = host_limit(comparison)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _medians(percentages: Iterable[tuple[str, object]], place: str, least: float = -math.inf) -> str:
    """The median of each variant's percentages, such as `12 % of the step in baseline`; only those from `least` on."""
    known: dict[str, list[float]] = {}
    for variant, value in percentages:
        if isinstance(value, int | float):
            known.setdefault(variant, []).append(float(value))
    medians = {variant: statistics.median(values) for variant, values in sorted(known.items())}
    return ", ".join(f"{number(round(m))} % {place} {text(v)}" for v, m in medians.items() if m >= least)


def _computing(runs: Sequence[Run]) -> str:
    """A sentence on the share of a step in which the GPU computed; empty without a trace."""
    observed = ((run.variant, run.observed.counters) for run in runs if run.observed)
    shown = _medians(((variant, counters.get("gpu_computing_percent")) for variant, counters in observed), "of the step in")
    return f"By a trace of one step, the GPU computed {shown}. The rest waited for other ranks or for the host." if shown else ""


def _limited(runs: Sequence[Run]) -> str:
    """A sentence on limits of power or heat that held GPU clocks down during timed steps; empty if none did."""
    limits = limited((run.variant, run.telemetry) for run in runs if run.role == "measure")
    return f"In the timed steps, the GPUs' clocks were held down by {text('; by '.join(limits))}." if limits else ""


def _on_data(runs: Sequence[Run]) -> str:
    """A sentence on the share of step time that the host spent on data; only variants above NOTABLE_DATA."""
    timed = [(run.variant, [s for s in run.samples if s.timed]) for run in runs if run.role == "measure"]
    spent = ((variant, sum(s.seconds for s in each), sum(s.data_seconds for s in each)) for variant, each in timed)
    shown = _medians(
        ((variant, 100 * (on_data / whole)) for variant, whole, on_data in spent if whole), "of the step in", 100 * NOTABLE_DATA
    )
    return f"The host spent {shown} on data." if shown else ""


def _stolen(runs: Sequence[Run]) -> str:
    """A sentence on processor time that the hypervisor gave to other machines; only variants above NOTABLE_STOLEN."""
    stolen = ((run.variant, run.telemetry.get("stolen_percent")) for run in runs if run.role == "measure")
    shown = _medians(stolen, "from", NOTABLE_STOLEN)
    return f"The hypervisor kept processor time from this machine: {shown}." if shown else ""


def _yes(ok: bool) -> str:
    return badge("ok" if ok else "failed")


def _launch(run: Run) -> list[str]:
    """One launch as a row, with the mean of its timed steps and the last loss of these."""
    seconds = [s.seconds for s in run.samples if s.timed]
    losses = [s.loss for s in run.samples if s.timed and s.loss is not None]
    return [
        number(run.position),
        text(run.variant),
        text(run.role.replace("_", " ")),
        number(run.pair) if run.pair is not None else "",
        badge(run.outcome),
        f"{milliseconds(sum(seconds) / len(seconds) * 1000)} ms" if seconds else "",
        f"{losses[-1]:.4f}" if losses else "",
        quantity(run.wall_s, "s"),
    ]


def _figure(value: Any) -> str:
    if isinstance(value, list | Mapping):
        return code(plain(value) if isinstance(value, list) else value)[:2000]
    return number(value) if isinstance(value, int | float) else text(plain(value))


def _environment(measured: Measured) -> list[tuple[str, list[list[str]]]]:
    """Folded tables, each a title and rows: the environment of the launches, and the keys in which the variants differ."""
    parts = []
    for sha, values in measured.strict.items():
        rows = [[text(k), mapping(v) if isinstance(v, Mapping) else code(plain(v))] for k, v in sorted(values.items())]
        parts.append((f"Environment {sha[:12]}", rows))
    case = measured.case.content if measured.case else None
    if case and (case.baseline or case.candidate):
        rows = [["Baseline", mapping(case.baseline)], ["Candidate", mapping(case.candidate)]]
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
    variants = record.get("variants", default={})
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
    statements = {i: claim.statement for i, (_, claim) in by_claim(shelf.cards).items()}
    return render(
        "evidence_list.md",
        verdicts=evidence,
        traces=found_traces,
        effect=lambda r: markdown(effect(r)),
        says=lambda r: markdown(text(shorten(statements.get(r.about, ""), 110, placeholder=" …"))),
    )
