"""Pages that list claims: cards with their filters, the matrix of claims and machines, and what stands on the home page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from playbook.cards.model import Card, Claim, MechanismCheck, counted
from playbook.cards.scope import unmet
from playbook.records.case import list_cases, load_case
from playbook.records.evidence import Evidence
from playbook.records.read import DECIDED, EVIDENCE, UNTESTED, Record, traces, verdicts
from playbook.records.standing import in_words
from playbook_app.site.cards import PHASES, Shelf, anchor, badges, current, each, effect, effects, verdict_forest
from playbook_app.site.pages import markdown, render
from playbook_app.site.text import attribute, badge, code, link, text


def standings(shelf: Shelf, claim: Claim | MechanismCheck) -> set[str]:
    """Machine and status of each newest verdict, as `machine:status`; `:untested` without any."""
    records = verdicts(shelf.records, claim.id)
    return {f"{r.machine}:{'stale' if r.stale(shelf.today, claim) else r.status}" for r in records} or {f":{UNTESTED}"}


def _standing_choices(shelf: Shelf, claims: Sequence[Claim | MechanismCheck]) -> dict[str, tuple[str, Mapping[str, str]]]:
    pairs = [s.split(":") for c in claims for s in standings(shelf, c)]
    machines, statuses = sorted({m for m, _ in pairs if m}), sorted({s for _, s in pairs})
    return {"hardware": ("Machine", {m: m for m in machines}), "status": ("Status", {s: s.replace("_", " ") for s in statuses})}


def index_page(shelf: Shelf) -> str:
    """Every card, with filters by symptom, hardware and status that work in the page itself."""
    claims = [c for card in shelf.cards.values() for c in each(card)]
    phases = {k: words for k, words in PHASES.items() if any(c.phase == k for c in shelf.cards.values())}
    choices = {**_standing_choices(shelf, claims), "phase": ("Phase", phases)}
    entries = [_entry(shelf, c) for c in sorted(shelf.cards.values(), key=lambda c: c.title)]
    return render("cards.md", choices=choices, entries=entries)


def _entry(shelf: Shelf, card: Card) -> dict[str, Any]:
    words = " ".join([card.title, card.summary, *card.symptoms, *card.aliases, *(p.symptom for p in card.pitfalls)]).lower()
    statuses = sorted(set().union(*(standings(shelf, c) for c in each(card))))
    rows = [[link(text(c.id), f"{card.id}.md#{anchor(c.id)}"), text(c.statement), badges(shelf, c)] for c in each(card)]
    return {"card": card, "words": words, "standings": " ".join(statuses), "rows": rows, "tally": _tally(shelf, card)}


def _tally(shelf: Shelf, card: Card) -> str:
    """Counts of a card's claims by status; a claim counts with the status of its best-settled machine."""
    order = (*DECIDED, "inconclusive", "stale", "error", "not_applicable", UNTESTED)
    statuses = [
        min((s.split(":")[1] for s in standings(shelf, c)), key=lambda s: order.index(s) if s in order else len(order)) for c in each(card)
    ]
    return ", ".join(f"{statuses.count(s)} {s.replace('_', ' ')}" for s in order if s in statuses)


def matrix_page(shelf: Shelf) -> str:
    """Claims against machines, with filters: first what GPUs have settled, last what nobody has tested."""
    machines = _machines(shelf)
    cards = sorted(shelf.cards.values(), key=lambda c: c.title)
    claims = [(card, c) for card in cards for c in each(card)]
    parts = {words: [_line(shelf, card, c, machines) for card, c in claims if _part(shelf, c) == words] for words in _PARTS}
    choices = {**_standing_choices(shelf, [c for _, c in claims]), "card": ("Card", {c.id: c.title for c in cards})}
    head = ["Claim", "Statement", *[text(m) for m in machines]]
    return render(
        "claims.md",
        counted=counted(shelf.cards),
        machines=machines,
        choices=choices,
        head=head,
        parts={k: v for k, v in parts.items() if v},
    )


_ON_GPUS, _ELSEWHERE, _OLD, _NONE = "Current, on GPUs", "Current, by arithmetic, by a rule or on a CPU", "No current verdict", "Untested"
_PARTS = (_ON_GPUS, _ELSEWHERE, _OLD, _NONE)


def one_gpu_page(shelf: Shelf, machine: str = "h200x1") -> str:
    """What is true on one H200 today: every current verdict from it with its interval, margin and price, and what is not settled there."""
    cards = sorted(shelf.cards.values(), key=lambda c: c.title)
    settled: list[list[str]] = []
    waiting: list[list[str]] = []
    for card, claim in [(shelf_card, claim) for shelf_card in cards for claim in each(shelf_card)]:
        records = [r for r in verdicts(shelf.records, claim.id) if r.get("measured", "machine", "name") == machine]
        name = link(text(claim.id), f"../cards/{card.id}.md#{anchor(claim.id)}")
        if now := [r for r in records if r.status in DECIDED and not r.stale(shelf.today, claim)]:
            settled += [[name, text(claim.statement), *_priced(r)] for r in now]
        elif records:
            waiting += [[name, text(claim.statement), *_open(shelf, r, claim)] for r in records]
        elif why := _unrun(card, claim, machine):
            waiting.append([name, text(claim.statement), why, "", ""])
    drawn = verdict_forest(shelf, cards, machine)
    return render("one_gpu.md", forest=markdown(drawn), settled=settled, waiting=waiting)


HOME, AWAY = "h200x1", "h100x1"
"""Machine classes of the page of travel: where most verdicts are from, and where they were repeated."""


class _Pair(NamedTuple):
    """A claim's current verdicts from both machines, and in what they agree."""

    card: Card
    claim: Claim | MechanismCheck
    home: Record
    away: Record
    verdict: bool
    sign: bool
    size: bool
    """Whether the intervals overlap; of two counts, whether they are within 5 % of each other."""


def travel_page(shelf: Shelf) -> str:
    """Verdicts from one H200 beside those from one H100: in how many verdict, sign and size agree."""
    pairs = [
        pair for card in sorted(shelf.cards.values(), key=lambda c: c.title) for claim in each(card) if (pair := _pair(shelf, card, claim))
    ]
    rows = [
        [
            link(text(p.claim.id), f"../cards/{p.card.id}.md#{anchor(p.claim.id)}"), text(p.claim.statement),
            *_priced(p.home), *_priced(p.away),
            "yes" if all((p.verdict, p.sign, p.size))
            else f"not in {', '.join(n for n in ('verdict', 'sign', 'size') if not getattr(p, n))}",
        ]
        for p in pairs
    ]  # fmt: skip
    counts = {name: sum(getattr(p, name) for p in pairs) for name in ("verdict", "sign", "size")}
    flipped = [link(text(p.claim.id), f"../cards/{p.card.id}.md#{anchor(p.claim.id)}") for p in pairs if not p.verdict]
    return render("travel.md", rows=rows, counts=counts, flipped=flipped)


def _pair(shelf: Shelf, card: Card, claim: Claim | MechanismCheck) -> _Pair | None:
    """The pair of a claim that both machines have decided, with an effect each."""
    current = {r.machine: r for r in verdicts(shelf.records, claim.id) if r.status in DECIDED and not r.stale(shelf.today, claim)}
    if not {HOME, AWAY} <= current.keys():
        return None
    home, away = current[HOME], current[AWAY]
    ours, theirs = _range(home), _range(away)
    if ours is None or theirs is None:
        return None
    zero = any(low <= 0 <= high for _, low, high in (ours, theirs))
    counted_alike = abs((1 + ours[0]) / (1 + theirs[0]) - 1) <= 0.05 if ours[0] > -1 < theirs[0] else ours[0] == theirs[0]
    size = (ours[1] <= theirs[2] and theirs[1] <= ours[2]) or (ours[1] == ours[2] and theirs[1] == theirs[2] and counted_alike)
    return _Pair(card, claim, home, away, home.status == away.status, zero or (ours[0] > 0) == (theirs[0] > 0), size)


def _range(record: Record) -> tuple[float, float, float] | None:
    """Effect of a record's comparison with its interval."""
    comparison = record.get("derived", "comparison", default=None) or {}
    value, low, high = (comparison.get(key) for key in ("effect", "low", "high"))
    if not (isinstance(value, int | float) and isinstance(low, int | float) and isinstance(high, int | float)):
        return None
    return value, low, high


def _priced(record: Record) -> list[str]:
    """The cells of a current verdict: in words (the page's title says where), its effect, and what it cost."""
    page = f"../evidence/{record.id}.md"
    return [link(badge(record.status, in_words(record, places=False)), page), effects(record), _price(record)]


def _price(record: Record) -> str:
    seconds = record.content.gpu_seconds if isinstance(record.content, Evidence) else None
    return f"{seconds:.0f}" if seconds is not None else ""


def _unrun(card: Card, claim: Claim | MechanismCheck, machine: str) -> str:
    """Why a claim that is about one GPU has no run on it, or nothing where it is about something else."""
    scope = claim.scope if isinstance(claim, Claim) else {}
    case = load_case(claim.case) if claim.case in list_cases() else None
    on_one = "gpus" not in scope or not unmet({"gpus": scope["gpus"]}, {"gpus": 1})
    if case and machine in case.profiles and on_one:
        return f"{UNTESTED}: {code(f'playbook confirm {card.id}/{claim.id} --profile {machine}')}"
    if case and case.profiles and "gpus" in scope and on_one:
        return f"its case runs elsewhere: {text(', '.join(case.profiles))}"
    return ""


def _open(shelf: Shelf, record: Record, claim: Claim | MechanismCheck) -> list[str]:
    """The cells of an older or undecided verdict: why it settles nothing, its effect, and what it cost."""
    why = record.stale(shelf.today, claim)
    words = text(f"{record.status.replace('_', ' ')}, stale: {why}" if why else record.sentence)
    return [link(words, f"../evidence/{record.id}.md"), effects(record), _price(record)]


def _part(shelf: Shelf, claim: Claim | MechanismCheck) -> str:
    """Under which heading a claim stands."""
    records = verdicts(shelf.records, claim.id)
    now = [r for r in records if r.status in (*DECIDED, "inconclusive") and not r.stale(shelf.today, claim)]
    return _ON_GPUS if any(r.gpus for r in now) else _ELSEWHERE if now else _OLD if records else _NONE


def _machines(shelf: Shelf) -> list[str]:
    """Machines with verdicts, those with most GPUs first."""
    gpus = {r.machine: r.gpus for r in shelf.records if r.claim and not r.altered}
    return sorted(gpus, key=lambda m: (-gpus[m], m))


def _line(shelf: Shelf, card: Card, claim: Claim | MechanismCheck, machines: Sequence[str]) -> list[str]:
    newest = {r.machine: r for r in verdicts(shelf.records, claim.id)}
    words = " ".join([claim.id, claim.statement, card.title]).lower()
    marks = f'data-text="{attribute(words)}" data-standings="{attribute(" ".join(sorted(standings(shelf, claim))))}" data-card="{card.id}"'
    name = link(text(claim.id), f"../cards/{card.id}.md#{anchor(claim.id)}")
    cells = [f'{_cell(shelf, newest[m], claim)} {{ data-label="{attribute(m)}" }}' if m in newest else "" for m in machines]
    return [
        f"{name} {{ {marks} }}",
        f'{text(claim.statement)}<br><span class="pb-of">{text(card.title)}</span>',
        *cells,
    ]


def _cell(shelf: Shelf, record: Record, claim: Claim | MechanismCheck) -> str:
    old = record.stale(shelf.today, claim)
    shown = effect(record)
    word = badge("stale" if old else record.status, f"{record.status}, stale" if old else None)
    return link(word + (f"<br>{shown}" if shown else ""), f"../evidence/{record.id}.md")


def summary(records: Sequence[Record]) -> dict[str, int]:
    """How many verdicts there are of each status; altered records counted as such."""
    return Counter(r.status for r in records if r.schema == EVIDENCE)


def phases(shelf: Shelf) -> list[tuple[str, list[Card]]]:
    """The phases of the work that have cards, in words, each with its cards by title."""
    titled = [
        (words.capitalize(), sorted((c for c in shelf.cards.values() if c.phase == phase), key=lambda c: c.title))
        for phase, words in PHASES.items()
    ]
    return [(words, cards) for words, cards in titled if cards]


def coverage(shelf: Shelf) -> str:
    """One line: how many claims are settled, and by what."""
    claims = [claim for card in shelf.cards.values() for claim in card.claims]
    gpus = [claim for claim in claims if any(r.status in DECIDED for r in current(shelf, claim))]
    other = [
        claim
        for claim in claims
        if claim not in gpus and any(r.status in DECIDED and not r.stale(shelf.today, claim) for r in verdicts(shelf.records, claim.id))
    ]
    machines = dict.fromkeys(str(r.get("measured", "machine", "description", default=r.machine)) for c in gpus for r in current(shelf, c))
    where = f" ({text(', '.join(sorted(machines)))})" if machines else ""
    return (
        f"Of {len(claims)} claims, **{len(gpus)} are settled on GPUs**{where}, {len(other)} by arithmetic, by a rule or on a CPU. "
        f"The other {len(claims) - len(gpus) - len(other)} are untested, undecided, or were measured on an older version: "
        f"{link('all claims', '_generated/claims.md')} say which."
    )


def example_of_verdicts(shelf: Shelf) -> str:
    """The card with most current verdicts from GPUs, as a forest, for the page that explains how to read one."""
    drawn = [verdict_forest(shelf, [card]) for card in shelf.cards.values()]
    return max(drawn, key=lambda f: f.count("<tr>"), default="")


_FACTS = (
    ("T5", "Compiling the vision tower makes training five times as fast? Useful tokens per second changed by"),
    ("W12", "FP8 by blocks is where to start on Hopper? In attention's projections it changed them by"),
    ("M1.s", "Full sharding does not replace expert parallelism: Megatron-FSDP over EP 1 instead of EP 4 changed them by"),
    ("V3", "Mock data without images flatter a vision-language run: instead of real images they changed them by"),
    ("V10", "Recompute less, once it fits: norms and expert activations instead of whole layers changed them by"),
)
"""Claims that surprise, each with what was compared; beliefs that were refuted come as questions, first."""


def record_and_trace(shelf: Shelf, claim: str = "W9") -> str:
    """Links to the newest record of a claim and to the trace of its case, with what each says; for the page that follows one verdict."""
    records = verdicts(shelf.records, claim)[:1]
    lines = [
        f"- {link('The record', f'../evidence/{r.id}.md')} has every step of every launch. The trainer has become faster since, so the"
        " verdict is shown as `confirmed, stale`."
        for r in records
    ]
    lines += [
        f"- {link('The trace', f'../evidence/{trace.id}.md')} says where the time went: not into the network, but into summing by token"
        " over all ranks' rows."
        for r in records
        for trace in traces(shelf.records, r.get("measured", "case", "id"))[:1]
    ]
    return "\n".join(lines)


def facts(shelf: Shelf) -> str:
    """The measured facts as sentences, with effect, machine and verdict of their newest current record from GPUs."""
    lines = []
    for name, words in _FACTS:
        claim = next((c for card in shelf.cards.values() for c in card.claims if c.id == name), None)
        record = next(iter(current(shelf, claim)), None) if claim else None
        if record:
            mark = link(badge(record.status, record.status), f"evidence/{record.id}.md")
            lines.append(
                f"- {text(words)} **{effect(record)}**. {mark} {text(in_words(record).partition(', ')[2])},"
                f" {link(text(name), f'cards/{shelf.home[name]}.md#{anchor(name)}')}"
            )
    return "\n".join(lines)
