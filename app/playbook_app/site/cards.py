"""Pages made from cards: one per card, the index with its filters, and the matrix of claims and machines; and what all pages are made from:
cards, records, today's date, and which verdicts count today.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from playbook.cards.model import Card, Claim, Decision, Expect, MechanismCheck, Source, by_claim, expectation
from playbook.cards.scope import note
from playbook.records.read import DECIDED, UNTESTED, Record, earlier, traces, verdicts
from playbook.records.standing import basis, in_words
from playbook_app.site import curves
from playbook_app.site.pages import markdown, render
from playbook_app.site.svg import effect_axis
from playbook_app.site.text import (
    NBSP,
    badge,
    code,
    day,
    details,
    link,
    mapping,
    milliseconds,
    number,
    percent,
    plain,
    prose,
    quantity,
    sentence,
    signed,
    table,
    text,
)

_SAID = re.compile(r"^(?:train|parallel|megatron|precision)\.")
"""Parts of a key that its own name says again."""
TARGETS = {"megatron-lm": "Megatron-LM", "megatron-bridge": "Megatron Bridge", "torchtitan": "torchtitan"}
"""Trainers that configurations are exported to, with their names."""
Flags = Callable[[Mapping[str, Any]], Mapping[str, Sequence[str]]]
"""A function that gives, for keys of the trainer's configuration and their values, the settings of other trainers that say the same."""


def no_flags(keys: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """No setting of any trainer."""
    return {}


@dataclass(frozen=True)
class Shelf:
    """Everything that pages are made from."""

    cards: Mapping[str, Card]
    records: Sequence[Record]
    today: date
    home: Mapping[str, str]
    """For each claim id, the card that holds it."""
    flags: Flags = no_flags


def each(card: Card) -> list[Claim | MechanismCheck]:
    """The claims of a card, each followed by its mechanism check where it has one."""
    return [c for claim in card.claims for c in (claim, claim.mechanism_check) if c]


def anchor(claim: str) -> str:
    """The heading id of a claim."""
    return claim.lower().replace(".", "-")


def margin(expect: Expect) -> float | None:
    """The claimed margin on the effect's own scale, a share of the baseline; a ratio of 0.45 is a loss of 0.55."""
    if expect.margin is None:
        return None
    return {"percent": expect.margin.value / 100, "ratio": expect.margin.value - 1}.get(expect.margin.unit)


def verdict_forest(shelf: Shelf, cards: Iterable[Card], machine: str | None = None) -> str:
    """Current verdicts from GPUs, or from one kind of machine, on the cards' claims, of those that have an interval."""
    return curves.forest([b for card in cards for claim in card.claims for b in _bars(shelf, card, claim, machine)])


def _bars(shelf: Shelf, card: Card, claim: Claim, machine: str | None) -> Iterator[curves.Bar]:
    """The bars of a claim's current verdicts that have an interval on the logarithmic scale."""
    for r in current(shelf, claim):
        if machine not in (None, r.get("measured", "machine", "name")):
            continue
        comparison = r.get("derived", "comparison", default={})
        curve = r.get("derived", "curve", default={})
        if len(contrasts := curve.get("contrasts", ())) == 1:
            comparison = {**curve, **contrasts[0]}
        low, value, high = (comparison.get(k) for k in ("low", "effect", "high"))
        if comparison.get("scale") != "log_ratio" or low == high or not all(isinstance(v, int | float) for v in (low, value, high)):
            continue
        yield curves.Bar(
            claim=claim.id,
            name=compared(claim) or (claim.case or card.id).replace("-", " "),
            about=card.title,
            statement=claim.statement,
            address=f"../cards/{card.id}.html#{anchor(claim.id)}",
            effect=value,
            low=low,
            high=high,
            margin=margin(claim.expect),
            op=claim.expect.op,
            status=r.status,
        )


def compared(claim: Claim) -> str:
    """What the sides of a claim set differently, in a few words: `recompute: full → selective`; empty where it compares no settings."""
    before, after = claim.comparison.baseline, claim.comparison.candidate
    keys = [k for k in dict.fromkeys([*after, *before]) if before.get(k) != after.get(k)]
    changed = [f"{_SAID.sub('', k)}: {_set(before.get(k))} → {_set(after.get(k))}" for k in keys]
    return "; ".join(changed) if len(changed) < 3 else f"{changed[0]}, …"


def _set(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return "unset" if value is None else str(value)


def current(shelf: Shelf, claim: Claim) -> list[Record]:
    """The verdicts from GPUs that still speak for the claim."""
    return [
        r
        for r in verdicts(shelf.records, claim.id)
        if r.gpus and r.status in (*DECIDED, "inconclusive") and not r.stale(shelf.today, claim)
    ]


_HEADING = 60
_NEGLIGIBLE_MS = 0.01
_MAX_DEPTH = 2
PHASES = {"fit": "make it fit", "scale": "scale it", "profile": "profile it", "retune": "retune it"}
"""The phases of work on a run, in their order, in words."""


def effect(record: Record) -> str:
    """The effect with its interval, as a page shows it; both values where no effect is recorded."""
    comparison = record.get("derived", "comparison")
    return _interval(comparison) if isinstance(comparison, Mapping) else ""


def effects(record: Record) -> str:
    """As `effect`; of several variants, each contrast by its name."""
    curve = record.get("derived", "curve", default={})
    contrasts = [f"{text(c.get('name'))} {_interval({**curve, **c})}" for c in curve.get("contrasts", ())]
    return "<br>".join(contrasts) if contrasts else effect(record)


def _interval(comparison: Mapping[str, Any]) -> str:
    """A comparison's effect with its interval in brackets, in percent, in points or in the metric's unit."""
    value, low, high = (comparison.get(k) for k in ("effect", "low", "high"))
    exact = low == high
    if not isinstance(value, int | float):
        return (
            f"{quantity(comparison.get('baseline'), str(comparison.get('unit')))} →"
            f" {quantity(comparison.get('candidate'), str(comparison.get('unit')))}"
        )
    # A difference of shares is in points, another difference in the metric's unit.
    if comparison.get("scale") == "difference" and comparison.get("unit") != "share":
        shown = [number(round(v, 6)) for v in (value, low, high) if isinstance(v, int | float)]
        unit = f" {text(comparison.get('unit'))}"
    else:
        shown = [percent(v).removesuffix(NBSP + "%") for v in (value, low, high) if isinstance(v, int | float)]
        unit = NBSP + ("points" if comparison.get("scale") == "difference" else "%")
    if len(shown) < 3 or exact:
        return f"{shown[0]}{unit}"
    # What a budget has stopped has an interval and no verdict; the terminal says the same behind it.
    between = " between looks" if comparison.get("design") != "deterministic" and comparison.get("look") is None else ""
    return f"{shown[0]}{unit}" + f" [{shown[1]},{NBSP}{shown[2]}]".replace("[", "&#91;").replace("]", "&#93;") + between


def badges(shelf: Shelf, claim: Claim | MechanismCheck) -> str:
    """One badge per machine, each a link to its evidence."""
    records = verdicts(shelf.records, claim.id)
    if not records:
        return badge(UNTESTED)
    return " ".join(
        link(badge("stale" if old else r.status, in_words(r, old)), f"../evidence/{r.id}.md")
        for r in records
        for old in [r.stale(shelf.today, claim)]
    )


def heading(claim: Claim) -> str:
    """The first words of a statement, for headings and lists of contents."""
    first = re.split(r"[,:;] ", claim.statement)[0]
    return first if len(first) <= _HEADING else first[:_HEADING].rpartition(" ")[0] + " ..."


def card_page(shelf: Shelf, card: Card) -> str:
    """The page of one card."""
    return render(
        "card.md",
        card=card,
        phase=PHASES[card.phase],
        anchor=anchor,
        heading=heading,
        decisions=_decisions(shelf, card.decide),
        flag_titles=list(TARGETS.values()),
        flags=_flags(shelf, card.decide),
        forest=markdown(verdict_forest(shelf, [card])),
        about=lambda claim: _about(shelf, claim),
        verdicts=lambda claim: markdown(_verdicts(shelf, card, claim)),
        traces=lambda claim: [markdown(_trace(r)) for r in traces(shelf.records, claim.case)],
        changes=changes(shelf, card),
        claim_link=lambda claim: markdown(_claim_link(shelf, claim)),
        families=_families(card),
        related=_related(shelf, card),
    )


_SOFTWARE = ("torch", "megatron-core", "transformer-engine")
_SIZES = {"hidden_size": "{} columns", "expert_ffn_size": "experts of {}", "num_experts": "{} experts", "num_layers": "{} layers"}


def changes(shelf: Shelf, card: Card) -> list[list[str]]:
    """What the current verdicts of a card from GPUs rest on, kind by kind: another machine, model or release asks the claims again."""
    verdicts_of_claims = [(claim, r) for claim in card.claims for r in current(shelf, claim)]
    rows: dict[str, dict[str, list[str]]] = {}
    for claim, record in verdicts_of_claims:
        packages: Mapping[str, Any] = next((v.get("packages", {}) for v in record.get("measured", "strict", default={}).values()), {})
        runs_on = [
            f"{name} {packages[name]}" for name in _SOFTWARE if name in packages and (name == "torch" or "megatron" in record.backends)
        ]
        kinds = {
            "Hardware": [in_words(record).removeprefix(record.status.replace("_", " ") + ", ")],
            "Model": sorted({_model(c) for c in record.get("measured", "configs", default={}).values()}),
            "Software": [", ".join(runs_on)],
        }
        for kind, values in kinds.items():
            for value in values:
                rows.setdefault(kind, {}).setdefault(value, []).append(claim.id)
    out = [
        [kind, text(value), " ".join(_claim_link(shelf, i) for i in dict.fromkeys(ids))]
        for kind, values in rows.items()
        for value, ids in values.items()
        if value
    ]
    judged = {claim.id for claim, _ in verdicts_of_claims}
    computed = [c.id for c in card.claims if c.kind in ("arithmetic", "invariant")]
    open_ = [c.id for c in card.claims if c.id not in judged and c.id not in computed]
    unjudged = {"No current verdict from a GPU": open_, "Computed, or a check of the software: only its inputs change it": computed}
    return [*out, *([text(words), "", " ".join(_claim_link(shelf, i) for i in ids)] for words, ids in unjudged.items() if ids)]


def _model(config: Mapping[str, Any]) -> str:
    """The sizes of a run's model that its speed depends on; the name is in front where it has one."""
    model = config.get("model", {})
    sizes = [words.format(model[key]) for key, words in _SIZES.items() if model.get(key)]
    return f"{model.get('name', 'a model')}: {', '.join(sizes)}"


def _decisions(shelf: Shelf, decisions: Sequence[Decision]) -> list[list[str]]:
    rows = []
    claims = by_claim(shelf.cards)
    for d in decisions:
        rests_on = basis(d, shelf.records, claims, shelf.today)
        mark = "" if rests_on == "measured" else f"<br>*{rests_on}*"
        when = ", ".join(f"{k}: {plain(v)}" for k, v in d.when.items()).replace("_", " ")
        because = " ".join(_claim_link(shelf, i) for i in d.because) + mark
        avoid = f"<br>avoid {mapping(d.avoid)}" if d.avoid else ""
        rows.append([text(when) or "always", mapping(d.set) + avoid, because, prose(" ".join(filter(None, (d.note, note(d)))))])
    return rows


def _flags(shelf: Shelf, decisions: Sequence[Decision]) -> list[list[str]]:
    """What the decisions set, in the words of other trainers, once each."""
    rows = {}
    for d in decisions:
        flags = shelf.flags(d.set)
        cells = ["<br>".join(map(code, flags.get(target, []))) for target in TARGETS]
        rows[mapping(d.set)] = [
            f'{cell} {{ data-label="{name}" }}' if cell else "" for cell, name in zip(cells, TARGETS.values(), strict=True)
        ]
    return [[words, *cells] for words, cells in rows.items() if any(cells)]


def _claim_link(shelf: Shelf, claim: str) -> str:
    home = shelf.home.get(claim)
    return link(text(claim), f"{home}.md#{anchor(claim)}") if home else text(claim)


_PAGE = re.compile(r"docs/((?:[a-z0-9-]+/)*[a-z0-9-]+\.md(?:#[a-z0-9-]+)?)")


def _source(source: Source) -> str:
    """Title, origin, section and date; the title leads to the page where the source is one of this site."""
    page = _PAGE.fullmatch(source.url or "")
    details = [text(p) for p in (source.origin, source.section, source.date) if p]
    if page:
        return ", ".join([link(text(source.title), f"../{page.group(1)}"), *details])
    return ", ".join([text(source.title), *details]) + (f" ({text(source.url)})" if source.url else "")


def _about(shelf: Shelf, claim: Claim) -> list[list[str]]:
    """Rows of the claim's details: expectation, variants, scope, mechanism, sources, linked claims."""
    comparison = f"{mapping(claim.comparison.baseline)} against {mapping(claim.comparison.candidate)}"
    metric, words = expectation(claim)
    linked = {"Depends on": claim.depends_on, "Contradicts": claim.contradicts, "Supersedes": claim.supersedes}
    facts = {
        "Expects": f"{code(metric) if metric else ''} {text(words)}".strip(),
        "Baseline and candidate": comparison if claim.kind == "pair" else text(f"none: {claim.kind}, see case {claim.case or 'none yet'}"),
        "Scope": mapping(claim.scope) if claim.scope else "everywhere",
        **({"A CPU verdict speaks for": text(claim.cpu_scope)} if claim.cpu_scope else {}),
        "Why": prose(claim.mechanism),
        "Kind": text(f"{claim.kind}, {claim.label}"),
        "Source": "; ".join(_source(s) for s in claim.sources),
        **{name: " ".join(_claim_link(shelf, i) for i in ids) for name, ids in linked.items() if ids},
    }
    return [[f"**{name}**", value] for name, value in facts.items()]


def _verdicts(shelf: Shelf, card: Card, claim: Claim | MechanismCheck) -> str:
    """The claim's verdicts: a table, a figure for each machine, and the commands that repeat them."""
    records = verdicts(shelf.records, claim.id)
    commands = dict.fromkeys(" ".join(str(r.get("command", default="")).split()) for r in records)
    return render(
        "verdicts.md",
        card=card,
        claim=claim,
        found=records,
        altered=[r for r in earlier(shelf.records, claim.id) if r.altered],
        rows=[_row(shelf, r, claim) for r in records],
        figures=[(r.machine, markdown(_axis(r, claim.expect)), markdown(curves.figures(r))) for r in records],
        commands="\n".join(filter(None, commands)),
    )


def _row(shelf: Shelf, record: Record, claim: Claim | MechanismCheck) -> list[str]:
    page = f"../evidence/{record.id}.md"
    old = record.stale(shelf.today, claim)
    word = badge("stale" if old else record.status, in_words(record, old)) + (f"<br>{text(old)}" if old else "")
    shown, pairs = effect(record), record.get("derived", "comparison", "pairs")
    until = record.get("expires")
    return [
        f"**{text(record.machine)}**<br>{text(record.get('measured', 'machine', 'description', default=''))}",
        f"{word}<br>{sentence(record.status, record.get('derived', 'verdict', 'sentence'))}",
        link(shown, page) if shown else "",
        link(number(pairs), page) if pairs is not None else "",
        link(day(record.measured), page) + (f"<br>valid until {day(until)}" if until and not old else ""),
    ]


def _axis(record: Record, expect: Expect) -> str:
    comparison = record.get("derived", "comparison", default={})
    low, value, high = (comparison.get(k) for k in ("low", "effect", "high"))
    if comparison.get("scale") != "log_ratio" or not all(isinstance(v, int | float) for v in (low, value, high)) or low == high:
        return ""
    return effect_axis(value, low, high, margin(expect), expect.op)


def _trace(record: Record) -> str:
    """A folded table of busy time per range, one column for each variant."""
    page = f"../evidence/{record.id}.md"
    title = f"Where the time goes: {record.get('case')} on {record.get('profile')}"
    head = ["Range", "Phase", *(f"{text(v.capitalize())}>" for v in record.variants), *["Difference>"] * (len(record.variants) == 2)]
    rows = [[code(path), text(phase), *(link(c, page) if c else "" for c in cells)] for path, phase, cells in _range_rows(record)]
    busy = "GPU busy time" if record.measures == "gpu" else "host busy time (there is no GPU in this trace)"
    note = (
        f"{busy} per step in ms, {text(record.get('collector'))} ({text(record.get('collector_version', default=''))}); {coverage(record)}."
    )
    body = f"{note} {link('All ranges', page)}\n\n{table(head, rows)}"
    return details("abstract", title, body)


def coverage(record: Record) -> str:
    """How much of the busy time lies in named parts, per variant and phase."""
    words = []
    for variant in record.variants:
        shares_of_phases = record.get("variants", variant, "table", "coverage", default={})
        shares = [
            f"{phase} {shares_of_phases[phase] * 100:.1f} %"
            for phase in ("forward", "backward")
            if isinstance(shares_of_phases.get(phase), int | float)
        ]
        words.append(f"{text(variant)} {', '.join(shares) or 'no table'}")
    return "share in named parts: " + "; ".join(words)


def _range_rows(record: Record) -> list[tuple[str, str, list[str]]]:
    """Busy time per range and phase: of each variant, and the difference of two. What is negligible in all is left out."""
    busy: dict[tuple[str, str], dict[str, float]] = {}
    for variant in record.variants:
        for row in record.get("variants", variant, "table", "rows", default=[]):
            if row["path"].count("/") < _MAX_DEPTH:
                busy.setdefault((row["path"], row["phase"]), {})[variant] = row["busy_ms"]
    out = []
    for (path, phase), busy_ms in busy.items():
        each = [busy_ms.get(v, 0.0) for v in record.variants]
        if max(each) >= _NEGLIGIBLE_MS or path.startswith("("):
            out.append((path, phase, [milliseconds(ms) for ms in each] + ([signed(each[1] - each[0])] if len(each) == 2 else [])))
    order = ["forward", "backward", "recompute", "other"]
    return sorted(out, key=lambda r: (order.index(r[1]) if r[1] in order else len(order), r[0].startswith("("), r[0]))


def _families(card: Card) -> list[list[str]]:
    return [
        [
            text(f.name),
            text(f.hardware),
            text(f.model),
            number(f.gpus) if f.gpus else "",
            mapping(f.layout),
            mapping(f.settings) if f.settings else "",
            link("recipe", f"../_generated/recipes.md#{Path(f.recipe).stem.replace('_', '-')}") if f.recipe else "",
            text("; ".join(filter(None, [f.note, *(f"{s.title}, {s.origin}, {s.section or 'whole'}, {s.date}" for s in f.sources)]))),
        ]
        for f in card.families
    ]


def _related(shelf: Shelf, card: Card) -> list[tuple[str, list[str]]]:
    """Links to other cards, grouped as see, supersedes, contradicts."""
    names = {"See": card.related.see, "Supersedes": card.related.supersedes, "Contradicts": card.related.contradicts}
    titles = {i: c.title for i, c in shelf.cards.items()}
    return [
        (word, [markdown(link(text(titles[i]), f"{i}.md") if i in titles else text(i)) for i in ids]) for word, ids in names.items() if ids
    ]
