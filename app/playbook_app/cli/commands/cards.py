"""`playbook search` and `playbook cards`: find, read and check cards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playbook.cards import load
from playbook.cards.model import Card, Claim, by_claim, counted, guidance
from playbook.errors import PlaybookError
from playbook.paths import folders
from playbook.records.read import UNTESTED, Record
from playbook.text import count
from playbook.yaml_files import did_you_mean
from playbook_app.cli.commands.evidence import as_shown, here, records_here, status_of
from playbook_app.cli.options import AsJson, commands
from playbook_app.cli.output import card_lines, claim_lines, complain, print_findings, print_json, print_table, say

if TYPE_CHECKING:
    from playbook.cards.search import Hit

_NEAREST = 3
"""How many claims of a card a search shows with where they stand."""

app = commands()
_cards_app = commands()
app.add_typer(_cards_app, name="cards")


# A question may begin with dashes, as a flag does that somebody asks about.
@app.command(context_settings={"ignore_unknown_options": True})
def search(
    query: Annotated[str, typer.Argument(metavar="QUESTION", help="A symptom, an error text or a goal, in your own words.")],
    hardware: Annotated[str | None, typer.Option(help="Where it runs, such as h200, h200x4, gb200 or cpu.")] = None,
    model: Annotated[str | None, typer.Option(help="A preset, or a published name, such as Qwen/Qwen3-30B-A3B.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="How many GPUs.")] = None,
    status: Annotated[
        str | None,
        typer.Option(
            help="Only claims with this status on some machine: confirmed, refuted, inconclusive, not_applicable, error, stale, untested."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=50, help="At most this many cards.")] = 5,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON document on one line of stdout: hits, and where there are none, why and what is nearest."),
    ] = False,
) -> None:
    """Find the cards that answer a question; where they do not cover it or none applies to the stated machine, why, and what is nearest."""
    from playbook.cards import search as engine
    from playbook.cards.sections import load_sections
    from playbook.cards.terms import stated
    from playbook.diagnosis.question import diagnosis_of

    run = stated(hardware, model, gpus)
    cards = load.load_all()
    only = None if status is None else _with_status(cards, status)
    found = engine.search(engine.index(cards, load_sections()), query, run, only=only, limit=limit)
    standing = _standing(found.hits, cards)
    if as_json:
        row = found.as_row()
        print_json({**row, "hits": [{**hit, "standing": {i: standing[i] for i in hit["claims"]}} for hit in row["hits"]]})
        return
    speed = diagnosis_of(query, run)
    if speed:
        say(f"how fast it should be, and what to try: {speed}")
    if found.none:
        complain(f"{found.none}; playbook cards list shows all cards")
    if found.nearest:
        say(f"nearest, and perhaps of no use: {', '.join(found.nearest)}")
    for hit in found.hits:
        say(f"{hit.id}  {hit.title}{'' if hit.applies else '  [does not apply here]'}")
        say(f"  {hit.why if len(hit.why) <= 160 else hit.why[:157] + '...'}")
        shown = [f"{i} {', '.join(standing[i]) or UNTESTED}" for i in hit.claims[:_NEAREST]]
        for line in hit.sizes:
            say(f"  size: {line}")
        more = [f"and {len(hit.claims) - _NEAREST} more"] if len(hit.claims) > _NEAREST else []
        say(f"  claims {'; '.join(shown + more)}")
        for limit_ in hit.limits:
            say(f"  does not apply: {limit_}")
    for page in found.pages:
        say(f"see also {page.source}, {page.title}")
    if found.hits:
        say(f"settings and all claims: playbook cards show {found.hits[0].id}")


def _standing(hits: Sequence[Hit], cards: Mapping[str, Card]) -> dict[str, list[str]]:
    """Where each claim of what was found stands, in words; empty where nobody has tested it."""
    from playbook.records.standing import stands

    claims, found = by_claim(cards), [i for hit in hits for i in hit.claims]
    records, today = records_here(cards, here()) if found else [], datetime.now(UTC).date()
    return {i: stands(records, claims[i][1], today) for i in found}


def _with_status(cards: Mapping[str, Card], status: str) -> frozenset[str]:
    """Ids of the claims with this status, by the records of this folder and of the repository."""
    from playbook.records.read import with_status

    return with_status(cards, records_here(cards, here()), datetime.now(UTC).date(), status)


@_cards_app.command("check")
def cards_check(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH", help="Cards, or folders of cards; all that ship, if none is given.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings (old sources, expired evidence) count as findings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check cards, their cases and the trainer keys that those use; findings as file:line:column with the rule's id."""
    from playbook_app.services.check import check_all

    cards, cases, findings = check_all(paths or [])
    claims = [claim for _, _, claim in cards.claims()]
    more = count(sum(c.mechanism_check is not None for c in claims), "mechanism check")
    read = f"{count(len(cards.loaded), 'card')}, {count(len(claims), 'claim')} and {more}, {count(len(cases), 'case')}"
    print_findings(findings, {"cards": len(cards.loaded), "cases": len(cases)}, read, strict=strict, as_json=as_json)


@_cards_app.command("list")
def cards_list(
    claims: Annotated[bool, typer.Option("--claims", help="One line per claim, with its status.")] = False, as_json: AsJson = False
) -> None:
    """List the cards of guidance, or the claims of all cards."""
    known = load.load_all()
    if claims:
        records = records_here(known, here())
        rows = [row for card in known.values() for row in _claim_rows(card, records)]
        if as_json:
            print_json(rows)
        else:
            print_table([as_shown(r) for r in rows], ("id", "card", "status", "statement"))
            say(f"\n{counted(known)}")
        return
    keys = ("id", "phase", "wall", "title", "summary", "symptoms")
    rows = [{**{k: getattr(c, k) for k in keys}, "claims": [claim.id for claim in c.claims]} for c in guidance(known).values()]
    print_json(rows) if as_json else print_table(rows, ("id", "claims", "phase", "wall", "title"))


def _claim_rows(card: Card, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """One row for each claim of a card and for each mechanism check, with its status."""
    for claim in card.claims:
        shared = {"card": card.id, "kind": claim.kind}
        yield {"id": claim.id, **shared, "mechanism_of": None, **status_of(claim, records), "statement": claim.statement}
        check = claim.mechanism_check
        if check:
            yield {"id": check.id, **shared, "mechanism_of": claim.id, **status_of(check, records), "statement": check.statement}


@_cards_app.command("show")
def cards_show(
    target: Annotated[str, typer.Argument(metavar="ID", help="A card's id, or one of its claims, such as moe-dispatcher-choice/W9 or W9.")],
    as_json: AsJson = False,
) -> None:
    """Show one card, with the status of its claims, or one claim."""
    from playbook.records.standing import bases

    cards = load.load_all()
    card, claim = _chosen(target, cards)
    records = records_here(cards, here())
    claims = [claim] if claim else card.claims
    status = {i.id: status_of(i, records) for c in claims for i in (c, c.mechanism_check) if i}
    shown = {i: as_shown(row) for i, row in status.items()}
    rests_on = bases(card, records, by_claim(cards), datetime.now(UTC).date())
    if as_json and claim:
        print_json({"card": card.id, **claim.model_dump(mode="json"), "status": status})
    elif as_json:
        print_json({**card.model_dump(mode="json"), "status": status, "rests_on": rests_on})
    else:
        first = claims[0].id
        say("\n".join([f"{card.id}: {card.title}", *claim_lines(claim, shown)] if claim else card_lines(card, shown, rests_on)))
        say(f"\nwhat was measured: playbook evidence show {first}    test it here: playbook confirm {card.id}/{first}")


def _chosen(target: str, cards: Mapping[str, Card]) -> tuple[Card, Claim | None]:
    """The card that `CARD`, `CARD/CLAIM` or `CLAIM` names, and the claim; of a mechanism check, the claim that has it.

    Raises:
        PlaybookError: there is no such card, or it has no such claim.
    """
    named, slash, claim = target.partition("/")
    if not slash and (holder := load.card_of(target, cards)):
        named, claim = holder, target
    if named not in cards:
        raise PlaybookError(f"card '{named}' does not exist{did_you_mean(named, cards)}")
    of = {i.id: c for c in cards[named].claims for i in (c, c.mechanism_check) if i}
    if (slash or claim) and claim not in of:
        raise PlaybookError(f"card '{named}' has no claim '{claim}'{did_you_mean(claim, of)}")
    return cards[named], of.get(claim)


@_cards_app.command("init")
def cards_init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of the card and of its case: small letters, digits and -.")],
    folder: Annotated[Path, typer.Option(help="Where your own cards/ and cases/ lie.")] = Path(),
) -> None:
    """Begin a playbook of your own: write a card and a case of a command, to be changed."""
    from playbook.cards.own import begin

    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise PlaybookError(f"'{name}' is no id; expected small letters, digits and -, such as loader-workers")
    taken = {claim.id for card in load.load_all().values() for claim in card.claims}
    for path in begin(folder, name, taken):
        say(f"wrote {path}")
    found = any(own.resolve() == (folder / "cards").resolve() for own in folders("cards"))
    playbook = "playbook" if found else f"playbook --cards {folder / 'cards'} --cases {folder / 'cases'}"
    say(f"next: change them, then {playbook} cards check {folder / 'cards'} and {playbook} confirm {name}")


@_cards_app.command("rules")
def rules(as_json: AsJson = False) -> None:
    """List the rules of `cards check` and `skills report`."""
    rows = rule_rows()
    print_json(rows) if as_json else print_table(rows, ("id", "weight", "finds"))


def rule_rows() -> list[dict[str, str]]:
    """Every rule: its id, whether it is an error or a warning, and what it finds."""
    from playbook.lint import table
    from playbook.skills import foreign
    from playbook_app.services.check import CASE_RULES

    rows = [{"id": r.id, "weight": "warning" if r.warning else "error", "finds": r.title} for r in table.RULES]
    rows += [{"id": i, "weight": "warning" if i == "evidence-old" else "error", "finds": title} for i, title in CASE_RULES]
    return rows + [{"id": i, "weight": "error", "finds": title} for i, title in foreign.RULES]


@_cards_app.command("import", hidden=True)
def cards_import(folder: Annotated[Path, typer.Argument(metavar="DIR")], as_json: AsJson = False) -> None:
    """The former name of `playbook skills report`."""
    from playbook_app.cli.commands.agents import skills_report

    complain("`playbook cards import` is now `playbook skills report`")
    skills_report(folder, as_json)
