"""`playbook search`: the cards that answer a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from playbook.cards import load
from playbook.cards import search as engine
from playbook.cards.model import Card, by_claim
from playbook.cards.terms import stated
from playbook.records.read import UNTESTED, with_status
from playbook.records.standing import stands
from playbook_app.cli.options import commands
from playbook_app.cli.output import complain, print_json, say
from playbook_app.services.standing import here, records_here, today

_NEAREST = 3
"""How many claims of a card a search shows with where they stand."""

app = commands()


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
    run = stated(hardware, model, gpus)
    cards = load.load_all()
    only = None if status is None else with_status(cards, records_here(cards, here()), today(), status)
    answer = engine.search(engine.index(cards, engine.load_sections()), query, run, only=only, limit=limit)
    standing = _standing(answer.hits, cards, run.hardware)
    if as_json:
        row = answer.as_row()
        print_json({**row, "hits": [{**hit, "standing": {i: standing[i] for i in hit["claims"]}} for hit in row["hits"]]})
        return
    speed = engine.diagnosis_of(query, run)
    if speed:
        say(f"how fast it should be, and what to try: {speed}")
    if answer.none:
        complain(f"{answer.none}; playbook cards list shows all cards")
    if answer.nearest:
        say(f"nearest, and perhaps of no use: {', '.join(answer.nearest)}")
    for hit in answer.hits:
        say(f"{hit.id}  {hit.title}{'' if hit.applies else '  [does not apply here]'}")
        say(f"  {hit.why if len(hit.why) <= 160 else hit.why[:157] + '...'}")
        shown = [f"{i} {', '.join(standing[i]) or UNTESTED}" for i in hit.claims[:_NEAREST]]
        for line in hit.sizes:
            say(f"  size: {line}")
        more = [f"and {len(hit.claims) - _NEAREST} more"] if len(hit.claims) > _NEAREST else []
        say(f"  claims {'; '.join(shown + more)}")
        for limit_ in hit.limits:
            say(f"  does not apply: {limit_}")
    for page in answer.pages:
        say(f"see also {page.source}, {page.title}")
    if answer.hits:
        say(f"settings and all claims: playbook cards show {answer.hits[0].id}")


def _standing(hits: Sequence[engine.Hit], cards: Mapping[str, Card], gpus: Sequence[str]) -> dict[str, list[str]]:
    """Where each claim of what was found stands, in words, on the GPUs named first; empty where nobody has tested it."""
    claims, claim_ids = by_claim(cards), [i for hit in hits for i in hit.claims]
    records = records_here(cards, here()) if claim_ids else []
    return {i: stands(records, claims[i][1], today(), gpus) for i in claim_ids}
