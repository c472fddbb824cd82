"""Pages made from records: one per verdict, one per trace, and the list of all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, TypeGuard

from playbook.records.conditions import NOTABLE_DATA, NOTABLE_STOLEN, limited
from playbook.records.read import EVIDENCE, TRACE, Record
from playbook.site.cards import Shelf, anchor, coverage, effect
from playbook.site.data import data_read
from playbook.site.figures import curves
from playbook.site.figures.svg import samples
from playbook.site.text import (
    badge,
    block,
    code,
    day,
    details,
    front_matter,
    link,
    mapping,
    milliseconds,
    number,
    percent,
    plain,
    quantity,
    sentence,
    table,
    text,
)


def evidence_page(shelf: Shelf, record: Record, shown_path: str) -> str:
    """One verdict with everything behind it."""
    claim = record.about or "a case"
    head = [
        front_matter(f"{claim} on {record.machine}", description=f"Evidence record {record.id}", search="exclude: true"),
        f"# {text(claim)} on {text(record.machine)}",
    ]
    raw = link("the record as JSON", f"{record.id}.json")
    if record.altered:
        warning = (
            '!!! danger "Altered"\n'
            f"    {text('; '.join(record.problems))}. It counts for nothing. Restore the file or run the case again. See {raw}."
        )
        return "\n\n".join([*head, badge("altered"), warning]) + "\n"
    parts = [
        *head,
        f"{badge(record.status)} {sentence(record.status, record.get('derived', 'verdict', 'sentence'))}",
        _statement(shelf, record),
        _facts(record),
        f"Repeat it, or derive the verdict again from this file ({raw}):",
        block(f"{' '.join(str(record.get('command', default='')).split())}\nplaybook bench replay {shown_path}", "text"),
        _comparison(record),
        _curve(record),
        _checks(record),
        _runs(record),
        _logic(record),
        _environment(record),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _statement(shelf: Shelf, record: Record) -> str:
    claim = record.get("measured", "claim")
    if not isinstance(claim, Mapping):
        return ""
    home = None if record.foreign else shelf.home.get(str(claim.get("id")))
    name = link(text(claim.get("id")), f"../cards/{home}.md#{anchor(str(claim.get('id')))}") if home else text(claim.get("id"))
    limits = claim.get("cpu_scope")
    speaks = f"\n\nA CPU verdict speaks for: {text(limits)}" if limits and record.gpus == 0 else ""
    return f"> {name}: {text(claim.get('statement'))}{speaks}"


def _facts(record: Record) -> str:
    seconds = record.get("seconds", default={})
    rows = [
        ["Machine", text(record.get("measured", "machine", "description", default=""))],
        [
            "Case and profile",
            f"{code(record.get('measured', 'case', 'id', default='none'))} {text(record.get('measured', 'profile', default=''))}",
        ],
        *([["Data", read]] if (read := data_read(record)) else []),
        *_dates(record),
        ["Valid until", text(record.get("expires", default=""))],
        ["Reason", code(record.get("derived", "verdict", "reason", default=""))],
        [
            "Time spent",
            ", ".join(f"{text(k.replace('_', ' '))} {quantity(v, 's')}" for k, v in seconds.items() if isinstance(v, int | float) and v),
        ],
        *_failed(record),
        ["Record", f"{code(record.id)}, SHA-256 {code(str(record.get('sha256'))[:16])}"],
    ]
    return table(["", ""], rows)


def _dates(record: Record) -> list[list[str]]:
    """When the runs were made; where mended rules judged them again, also when, and from which record they come."""
    source = record.get("judged_from")
    if source is None:
        return [["Measured", text(record.created)]]
    return [["Measured", text(record.measured)], ["Judged again", f"{text(record.created)}, the runs of {code(source)}"]]


def _failed(record: Record) -> list[list[str]]:
    """Launches that failed under earlier commands on the series' journal."""
    found = record.get("measured", "failed_before", default={})
    rows = [f"{number(n)} {text(how)}" for how, n in found.items() if isinstance(n, int)] if isinstance(found, Mapping) else []
    return [["Failed and launched again", ", ".join(rows)]] if rows else []


def _comparison(record: Record) -> str:
    found = record.get("derived", "comparison")
    if not isinstance(found, Mapping):
        return ""
    unit = str(found.get("unit"))
    rows = [
        ["Metric", f"{code(found.get('metric'))}, {text(found.get('better'))} is better"],
        ["Baseline", quantity(found.get("baseline"), unit)],
        ["Candidate", quantity(found.get("candidate"), unit)],
        ["Effect, positive where the candidate is better", f"**{effect(record)}**"],
        *_itself(found),
        ["Design", text(str(found.get("design")).replace("_", " "))],
        ["Pairs", number(found.get("pairs")) + _between(found)],
    ]
    labels = {
        "deviation": "Deviation of the paired differences",
        "floor": "Deviation of the stored A/A",
        "hodges_lehmann": "Hodges-Lehmann estimate",
        "mde": "Least distance from the margin that so many pairs settle",
        "sign_flip_p": "Sign-flip p",
        "pairs_needed": "Pairs needed",
    }
    relative = found.get("scale") == "log_ratio"
    for key, label in labels.items():
        value = found.get(key)
        if isinstance(value, int | float):
            if key == "pairs_needed":
                value = max(value, _first_look(record))
            rows.append([label, _on_logarithms(key, value) if relative and key in _ON_LOGARITHMS else number(value)])
    return "## Comparison\n\n" + table(["", ""], rows)


_ON_LOGARITHMS = ("deviation", "floor", "hodges_lehmann", "mde")


def _on_logarithms(key: str, value: float) -> str:
    """Effects as the ratio that the effect is given in; deviations as they are, as the condition below them names the A/A's."""
    return percent(value if key in ("deviation", "floor") else math.expm1(value)).lstrip("+")


def _itself(found: Mapping[str, Any]) -> list[list[str]]:
    """The metric's own change where lower is better: the effect is a ratio of baseline to candidate, 100 % where half is left."""
    value = found.get("effect")
    if found.get("scale") != "log_ratio" or found.get("better") != "lower" or not isinstance(value, int | float) or not value > -1:
        return []
    return [["Change of the metric itself", percent(1 / (1 + value) - 1)]]


def _first_look(record: Record) -> int:
    """The pairs before which no series gives a verdict, however little it scatters."""
    looks = record.get("measured", "plan", "looks", default=[])
    return min((n for n in looks if isinstance(n, int)), default=0) if isinstance(looks, list) else 0


def _between(found: Mapping[str, Any]) -> str:
    """A series that was stopped has an interval too, and no verdict."""
    return ", between looks" if found.get("design") != "deterministic" and found.get("look") is None else ""


def _curve(record: Record) -> str:
    shown = curves.tables(record)
    return f"## Curve\n\n{curves.figures(record)}\n\n{shown}" if shown else ""


def _checks(record: Record) -> str:
    parts = []
    receipts = record.get("derived", "receipts", default=[])
    if receipts:
        rows = [
            [
                text(c.get("variant")),
                text(c.get("rule")),
                number(c.get("observed")),
                text(c.get("expected")),
                _yes(c.get("ok")),
                number(c.get("runs")),
            ]
            for c in receipts
        ]
        parts.append("## Receipt: did the tested path run\n\n" + table(["Variant", "Rule", "Observed>", "Expected", "", "Launches>"], rows))
    if spent := " ".join(filter(None, [_computing(record), _limited(record), _on_data(record), _stolen(record)])):
        parts.append(spent)
    gates = record.get("derived", "gates", default=[])
    if gates:
        rows = [
            [text(str(g.get("name")).replace("a_a", "A/A").replace("_", " ")), _yes(g.get("ok")), text(g.get("detail") or "")]
            for g in gates
        ]
        parts.append("## Conditions\n\n" + table(["Condition", "", "Detail"], rows))
    missing = record.get("measured", "missing", default=[])
    if missing:
        parts.append("## What this machine lacks\n\n" + "\n".join(f"- {text(m.get('detail'))} ({code(m.get('reason'))})" for m in missing))
    return "\n\n".join(parts)


def _computing(record: Record) -> str:
    """What a slow host, or waiting for other ranks, leaves of a step."""
    shares: dict[str, list[float]] = {}
    for run in record.get("measured", "runs", default=[]):
        share = ((run.get("observed") or {}).get("counters") or {}).get("gpu_computing_percent")
        if isinstance(share, int | float):
            shares.setdefault(str(run.get("variant")), []).append(float(share))
    shown = ", ".join(f"{number(round(statistics.median(s)))} % of the step in {text(v)}" for v, s in sorted(shares.items()))
    return f"By a trace of one step, the GPU computed {shown}. The rest waited for other ranks or for the host." if shown else ""


def _limited(record: Record) -> str:
    """What held clocks down, where that is worth a look."""
    measured = (r for r in record.get("measured", "runs", default=[]) if r.get("role") == "measure")
    found = limited((str(r.get("variant")), r.get("telemetry")) for r in measured)
    return f"In the timed steps, the GPUs' clocks were held down by {text('; by '.join(found))}." if found else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _on_data(record: Record) -> str:
    """What went by before batches were on their way to the device, of the variants for which it is worth a look."""
    shares: dict[str, list[float]] = {}
    for run in record.get("measured", "runs", default=[]):
        timed = [s for s in run.get("samples") or [] if isinstance(s, Mapping) and s.get("timed")] if run.get("role") == "measure" else []
        if seconds := math.fsum(_seconds(s, "seconds") for s in timed):
            shares.setdefault(str(run.get("variant")), []).append(math.fsum(_seconds(s, "data_seconds") for s in timed) / seconds)
    medians = {variant: statistics.median(each) for variant, each in sorted(shares.items())}
    shown = ", ".join(f"{number(round(100 * m))} % of the step in {text(v)}" for v, m in medians.items() if m >= NOTABLE_DATA)
    return f"The host spent {shown} on data." if shown else ""


def _stolen(record: Record) -> str:
    """What other machines on the same hardware left of the host, of the variants for which it is worth a look."""
    shares: dict[str, list[float]] = {}
    for run in record.get("measured", "runs", default=[]):
        share = (run.get("telemetry") or {}).get("stolen_percent") if run.get("role") == "measure" else None
        if isinstance(share, int | float):
            shares.setdefault(str(run.get("variant")), []).append(float(share))
    medians = {variant: statistics.median(each) for variant, each in sorted(shares.items())}
    shown = ", ".join(f"{number(round(m))} % from {text(v)}" for v, m in medians.items() if m >= NOTABLE_STOLEN)
    return f"The hypervisor kept processor time from this machine: {shown}." if shown else ""


def _seconds(sample: Mapping[str, Any], name: str) -> float:
    value = sample.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _yes(ok: Any) -> str:
    return badge("ok") if ok is True else badge("failed")


def _runs(record: Record) -> str:
    runs = [r for r in record.get("measured", "runs", default=[]) if isinstance(r, Mapping)]
    if not runs:
        return ""
    runs.sort(key=lambda r: int(r.get("position") or 0))
    rows = [
        [
            number(r.get("position")),
            text(r.get("variant")),
            text(str(r.get("role")).replace("_", " ")),
            number(r.get("pair")) if r.get("pair") is not None else "",
            badge(str(r.get("outcome"))),
            _mean_step(r),
            _last_loss(r),
            quantity(r.get("wall_s"), "s"),
        ]
        for r in runs
    ]
    figure = samples(runs)
    drawn = (
        f'<figure class="pb-figure">{figure}<figcaption>Timed steps of each launch, in order. A: baseline, B: candidate.</figcaption></figure>\n\n'
        if figure
        else ""
    )
    head = ["Launch>", "Variant", "Role", "Pair>", "Outcome", "Mean step>", "Last loss>", "Wall time>"]
    return f"## Launches\n\n{drawn}{table(head, rows)}"


def _timed(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [s for s in run.get("samples") or [] if isinstance(s, Mapping) and s.get("timed")]


def _mean_step(run: Mapping[str, Any]) -> str:
    seconds = [s["seconds"] for s in _timed(run) if isinstance(s.get("seconds"), int | float)]
    return f"{milliseconds(sum(seconds) / len(seconds) * 1000)} ms" if seconds else ""


def _last_loss(run: Mapping[str, Any]) -> str:
    losses = [s["loss"] for s in _timed(run) if isinstance(s.get("loss"), int | float)]
    return f"{losses[-1]:.4f}" if losses else ""


def _logic(record: Record) -> str:
    """What an arithmetic statement or an invariant computed."""
    figures = record.get("derived", "figures", default={})
    if not figures:
        return ""
    return "## Figures\n\n" + table(["", ""], [[text(str(k).replace("_", " ")), _figure(v)] for k, v in figures.items()])


def _figure(value: Any) -> str:
    if isinstance(value, list | Mapping):
        return code(plain(value) if isinstance(value, list) else value)[:2000]
    return number(value) if isinstance(value, int | float) else text(plain(value))


def _environment(record: Record) -> str:
    parts = []
    for sha, values in record.get("measured", "strict", default={}).items():
        if isinstance(values, Mapping):
            rows = [[text(k), mapping(v) if isinstance(v, Mapping) else code(plain(v))] for k, v in sorted(values.items())]
            parts.append(details("info", f"Environment {sha[:12]}", table(["", ""], rows)))
    case = record.get("measured", "case", "content", default={})
    if isinstance(case, Mapping) and (case.get("baseline") or case.get("candidate")):
        rows = [["Baseline", mapping(case.get("baseline") or {})], ["Candidate", mapping(case.get("candidate") or {})]]
        parts.append(details("info", "What differs between the variants", table(["", ""], rows)))
    return "\n\n".join(parts)


def trace_page(record: Record) -> str:
    """The table of time per range of both variants."""
    title = f"Trace of {record.get('case')} on {record.get('profile')}"
    head = [front_matter(title, description="Time per range", search="exclude: true"), f"# {text(title)}"]
    if record.altered:
        return (
            "\n\n".join(
                [*head, badge("altered"), f"This record does not match its own hash. See {link('the record', f'{record.id}.json')}."]
            )
            + "\n"
        )
    about = [
        ["Machine", text(record.get("machine", "description", default=""))],
        ["Collector", text(f"{record.get('collector')} ({record.get('collector_version', default='')})")],
        ["Measured", text(record.created)],
        ["Coverage", coverage(record)],
        ["Record", link(code(record.id), f"{record.id}.json")],
    ]
    parts = [*head, table(["", ""], about), block(" ".join(str(record.get("command", default="")).split()), "text")]
    for variant, traced in record.get("variants", default={}).items():
        if isinstance(traced, Mapping):
            parts += _variant(str(variant), traced)
    return "\n\n".join(parts) + "\n"


def _variant(variant: str, traced: Mapping[str, Any]) -> list[str]:
    files = [
        f"{code(f.get('name'))} ({quantity(f.get('num_bytes'), 'bytes')}, SHA-256 {code(str(f.get('sha256'))[:16])})"
        for f in traced.get("files") or []
    ]
    found = traced.get("table")
    if not isinstance(found, Mapping):
        return [f"## {text(variant.capitalize())}", f"{badge(str(traced.get('outcome')))} {text(str(traced.get('message'))[:500])}"]
    busy = "GPU busy" if found.get("measures") == "gpu" else "host busy"
    step = (
        f"Per step, over {number(found.get('num_steps'))} steps of rank {number(traced.get('rank'))} of {number(traced.get('ranks'))}: "
        f"{milliseconds(found['span_ms'])} ms, of which {milliseconds(found['busy_ms'])} ms {busy}, {milliseconds(found['idle_ms'])} ms idle, "
        f"{milliseconds(found['exposed_comm_ms'])} ms communication with no computation beside it. "
        f"Configuration {code(traced.get('config_sha'))}."
    )
    rows = [
        [
            code(r.get("path")),
            text(r.get("phase")),
            number(r.get("count")),
            *(milliseconds(r[k]) for k in ("host_ms", "busy_ms", "sum_ms", "self_ms", "exposed_comm_ms")),
        ]
        for r in found.get("rows") or []
    ]
    head = ["Range", "Phase", "Count>", "Host ms>", "Busy ms>", "Sum ms>", "Own ms>", "Exposed comm. ms>"]
    parts = [f"## {text(variant.capitalize())}", step, table(head, rows)]
    loose = found.get("unattributed") or []
    if loose:
        listed = [[code(u.get("name")), text(u.get("phase")), number(u.get("count")), milliseconds(u["busy_ms"])] for u in loose]
        parts.append(details("info", "Outside every named part", table(["Operation", "Phase", "Count>", "Busy ms>"], listed)))
    parts += ["\n".join(f"- {text(n)}" for n in found.get("notes") or [])]
    return [*parts, "Reports beside the record: " + "; ".join(files) if files else ""]


def list_page(shelf: Shelf) -> str:
    """Every record, newest first."""
    verdict_rows = [
        [
            link(day(r.created), f"{r.id}.md"),
            text(r.about),
            text(r.machine),
            badge(r.status),
            "" if r.altered else effect(r),
            text(r.get("derived", "verdict", "reason", default="")),
        ]
        for r in shelf.records
        if r.schema == EVIDENCE
    ]
    trace_rows = [
        [
            link(day(r.created), f"{r.id}.md"),
            text(r.get("case")),
            text(r.get("profile")),
            text(r.get("collector")),
            badge("altered") if r.altered else "",
        ]
        for r in shelf.records
        if r.schema == TRACE
    ]
    parts = [front_matter("Evidence", description="Every verdict on record", hide="navigation toc", search="boost: 0.4"), "# Evidence"]
    parts.append("Each verdict is one file, written once. Its page shows the launches behind it; the file is there to replay.")
    parts.append(
        table(["Date", "Claim", "Machine", "Verdict", "Effect", "Reason"], verdict_rows) if verdict_rows else "No verdict is on record yet."
    )
    if trace_rows:
        parts.append("## Traces\n\n" + table(["Date", "Case", "Profile", "Collector", ""], trace_rows))
    return "\n\n".join(parts) + "\n"
