"""`playbook cards`: read, check and begin cards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from playbook.cards import load
from playbook.cards.model import Card, Claim, by_claim, counted, guidance
from playbook.cards.scope import note
from playbook.errors import PlaybookError
from playbook.paths import folders
from playbook.records.read import Record
from playbook.records.standing import bases
from playbook.text import count, pairs
from playbook.yaml_files import did_you_mean
from playbook_app.cli.options import AsJson, Wide, commands
from playbook_app.cli.output import print_findings, print_json, print_table, say
from playbook_app.services.standing import as_shown, here, records_here, status_of, today

app = commands()


@app.command("check")
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


@app.command("list")
def cards_list(
    claims: Annotated[bool, typer.Option("--claims", help="One line per claim, with its status.")] = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """List the cards of guidance, or the claims of all cards."""
    cards = load.load_all()
    if claims:
        records = records_here(cards, here())
        rows = [row for card in cards.values() for row in _claim_rows(card, records)]
        if as_json:
            print_json(rows)
        else:
            print_table([as_shown(r) for r in rows], ("id", "card", "status", "statement"), ("card",), wide)
            say(f"\n{counted(cards)}")
        return
    keys = ("id", "phase", "wall", "title", "summary", "symptoms")
    rows = [{**{k: getattr(c, k) for k in keys}, "claims": [claim.id for claim in c.claims]} for c in guidance(cards).values()]
    print_json(rows) if as_json else print_table(rows, ("id", "claims", "phase", "wall", "title"), ("claims", "wall", "phase"), wide)


def _claim_rows(card: Card, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """One row for each claim of a card and for each mechanism check, with its status."""
    for claim in card.claims:
        for each, of in ((claim, None), (claim.mechanism_check, claim.id)):
            if each:
                shared = {"id": each.id, "card": card.id, "kind": claim.kind, "mechanism_of": of}
                yield {**shared, **status_of(each, records), "statement": each.statement}


@app.command("show")
def cards_show(
    target: Annotated[str, typer.Argument(metavar="ID", help="A card's id, or one of its claims, such as moe-dispatcher-choice/W9 or W9.")],
    as_json: AsJson = False,
) -> None:
    """Show one card, with the status of its claims, or one claim."""
    cards = load.load_all()
    card, claim = _chosen(target, cards)
    records = records_here(cards, here())
    claims = [claim] if claim else card.claims
    status = {i.id: status_of(i, records) for c in claims for i in (c, c.mechanism_check) if i}
    shown = {i: as_shown(row) for i, row in status.items()}
    rests_on = bases(card, records, by_claim(cards), today())
    if as_json and claim:
        print_json({"card": card.id, **claim.model_dump(mode="json"), "status": status})
    elif as_json:
        print_json({**card.model_dump(mode="json"), "status": status, "rests_on": rests_on})
    else:
        first = claims[0].id
        say("\n".join([f"{card.id}: {card.title}", *_claim_lines(claim, shown)] if claim else card_lines(card, shown, rests_on)))
        say(f"\nwhat was measured: playbook evidence show {first}    test it here: playbook confirm {card.id}/{first}")


def _chosen(target: str, cards: Mapping[str, Card]) -> tuple[Card, Claim | None]:
    """The card that `CARD`, `CARD/CLAIM` or `CLAIM` names, and the claim; of a mechanism check, the claim that has it.

    Raises:
        PlaybookError: there is no such card, or it has no such claim.
    """
    named, slash, claim = target.partition("/")
    if not slash and (holder := by_claim(cards).get(target)):
        named, claim = holder[0], target
    if named not in cards:
        raise PlaybookError(f"card '{named}' does not exist{did_you_mean(named, cards)}")
    of = {i.id: c for c in cards[named].claims for i in (c, c.mechanism_check) if i}
    if (slash or claim) and claim not in of:
        raise PlaybookError(f"card '{named}' has no claim '{claim}'{did_you_mean(claim, of)}")
    return cards[named], of.get(claim)


@app.command("init")
def cards_init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of the card and of its case: small letters, digits and -.")],
    folder: Annotated[Path, typer.Option(help="Where your own cards/ and cases/ lie.")] = Path(),
) -> None:
    """Begin a playbook of your own: write a card and a case of a command, to be changed."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise PlaybookError(f"'{name}' is no id; expected small letters, digits and -, such as loader-workers")
    claim_ids = {claim.id for card in load.load_all().values() for claim in card.claims}
    for path in load.begin(folder, name, claim_ids):
        say(f"wrote {path}")
    is_configured = any(card_folder.resolve() == (folder / "cards").resolve() for card_folder in folders("cards"))
    playbook = "playbook" if is_configured else f"playbook --cards {folder / 'cards'} --cases {folder / 'cases'}"
    say(f"next: change them, then {playbook} cards check {folder / 'cards'} and {playbook} confirm {name}")


@app.command("rules")
def rules(as_json: AsJson = False) -> None:
    """List the rules of `cards check`."""
    from playbook_app.services.check import rule_rows

    rows = rule_rows()
    print_json(rows) if as_json else print_table(rows, ("id", "weight", "finds"))


def card_lines(card: Card, status: Mapping[str, Mapping[str, Any]], bases: Sequence[str]) -> Iterable[str]:
    """A card as text, with the status of its claims and what each of its rules rests on."""
    yield f"{card.id}: {card.title}"
    yield card.summary
    for claim in card.claims:
        yield from _claim_lines(claim, status)
    if card.decide:
        yield "\ndecide"
    for rule, basis in zip(card.decide, bases, strict=True):
        never = f"; avoid {pairs(rule.avoid)}" if rule.avoid else ""
        mark = "" if basis == "measured" else f"  [{basis}]"
        yield f"  when {pairs(rule.when)}: set {pairs(rule.set)}{never}  (because {', '.join(rule.because)}){mark}"
        for line in filter(None, (rule.note, note(rule))):
            yield f"    {line}"
    for dispute in card.disputes:
        yield f"\nin dispute: {dispute.subject}\n  {', '.join(dispute.claims)}; {dispute.stands} stands: {dispute.why}"
    if card.pitfalls:
        yield "\npitfalls"
    for pitfall in card.pitfalls:
        yield f"  {pitfall.symptom}\n    cause: {pitfall.cause}\n    fix: {pitfall.fix}"
    if card.interactions:
        yield "\ninteractions"
    for words in card.interactions:
        yield f"  {words}"


def _claim_lines(claim: Claim, status: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """A claim as text, with its status and that of its mechanism check."""
    yield f"\n{claim.id}  {status[claim.id]['status']}  {claim.statement}"
    yield from _verdict_lines(status[claim.id])
    yield f"  why: {claim.mechanism}"
    yield f"  scope: {pairs(claim.scope) or 'any'}    case: {claim.case}    label: {claim.label}"
    for source in claim.sources:
        yield f"  source: {source.title}, {source.origin}, {source.section or 'whole'}, {source.date}"
    check = claim.mechanism_check
    if check:
        yield f"  {check.id}  {status[check.id]['status']}  {check.statement}"
        yield from (f"  {line}" for line in _verdict_lines(status[check.id]))


def _verdict_lines(status: Mapping[str, Any]) -> Iterable[str]:
    """One line for the verdict of each machine."""
    return (f"  {v['sentence']}  [on {v['machine']}, {v['evidence']}]" for v in status["verdicts"])
