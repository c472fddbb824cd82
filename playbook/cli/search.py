"""`playbook search`: cards by what a person sees or wants. Part of the command line."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from playbook.cli.text import complain, print_json, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from playbook.cards.model import Card


def search(
    query: Annotated[str, typer.Argument(metavar="QUESTION", help="A symptom, an error text or a goal, in your own words.")],
    hardware: Annotated[str | None, typer.Option(help="Where it runs, such as h200, h200x4, gb200 or cpu.")] = None,
    model: Annotated[str | None, typer.Option(help="A model's name, such as deepseek_v3.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="How many GPUs.")] = None,
    status: Annotated[
        str | None,
        typer.Option(
            help="Only claims that stand so on some machine: confirmed, refuted, inconclusive, not_applicable, error, stale, untested."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=50, help="At most this many cards.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON list on one line of stdout; an empty one where no card answers.")
    ] = False,
) -> None:
    """Find the cards that answer a question; none, where they do not cover it or nothing applies to the stated machine."""
    from dataclasses import asdict

    with _no_collection():
        from playbook.cards import search as engine
        from playbook.cards.load import load_all
        from playbook.cards.terms import stated

        run = stated(hardware, model, gpus)
        cards = load_all()
        only = None if status is None else _with_status(cards, status)
        hits = engine.search(engine.index(cards), query, run, only=only, limit=limit)
    if as_json:
        print_json([asdict(hit) for hit in hits])
        return
    if not hits:
        complain("no card answers this, or none applies to the machine that you stated; playbook cards list shows them all")
    for hit in hits:
        say(f"{hit.id}  {hit.title}{'' if hit.applies else '  [does not apply here]'}")
        say(f"  {hit.why if len(hit.why) <= 160 else hit.why[:157] + '...'}")
        say(f"  claims {', '.join(hit.claims)}")
        for limit_ in hit.limits:
            say(f"  does not apply: {limit_}")
    if hits:
        say(f"what to set, and where each claim stands: playbook cards show {hits[0].id}")


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: what a search builds lives until it has answered, and looking through it takes a tenth of its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _with_status(cards: Mapping[str, Card], status: str) -> frozenset[str]:
    """Claims that stand so, by this folder's runs and the repository's."""
    from datetime import UTC, datetime

    from playbook.cli.evidence import here, records_here
    from playbook.records.read import with_status

    return with_status(cards, records_here(cards, here()), datetime.now(UTC).date(), status)
