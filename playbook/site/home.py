"""What stands on the home page: current verdicts from GPUs as a forest of intervals, and how far the claims are covered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from playbook.cards.model import Card, Claim
from playbook.records.read import Record, verdicts
from playbook.site.cards import Shelf, anchor, margin
from playbook.site.figures.forest import Bar, forest
from playbook.site.text import block, link, text

_DECIDED = ("confirmed", "refuted")


def verdict_forest(shelf: Shelf, up: str = "") -> str:
    """Current verdicts from GPUs that have an interval; `up` leads to the site's root."""
    return forest([b for card in shelf.cards.values() for claim in card.claims for b in _bars(shelf, card, claim, up)])


def _bars(shelf: Shelf, card: Card, claim: Claim, up: str) -> Iterator[Bar]:
    for r in current(shelf, claim):
        found = r.get("derived", "comparison", default={})
        low, value, high = (found.get(k) for k in ("low", "effect", "high"))
        if found.get("scale") != "log_ratio" or low == high or not all(isinstance(v, int | float) for v in (low, value, high)):
            continue
        name = (claim.case or card.id).replace("-", " ")
        yield Bar(
            claim=claim.id,
            name=name,
            statement=claim.statement,
            address=f"{up}cards/{card.id}.html#{anchor(claim.id)}",
            effect=value,
            low=low,
            high=high,
            margin=margin(claim.expect),
            op=claim.expect.op,
            status=r.status,
        )


def current(shelf: Shelf, claim: Claim) -> list[Record]:
    """The verdicts from GPUs that still speak for the claim."""
    return [
        r
        for r in verdicts(shelf.records, claim.id)
        if r.gpus and r.status in (*_DECIDED, "inconclusive") and not r.stale(shelf.today, claim)
    ]


def coverage(shelf: Shelf) -> str:
    """One line: how many claims are settled, and by what."""
    claims = [claim for card in shelf.cards.values() for claim in card.claims]
    gpus = [claim for claim in claims if any(r.status in _DECIDED for r in current(shelf, claim))]
    other = [claim for claim in claims if claim not in gpus and _settled(shelf, claim)]
    machines = dict.fromkeys(str(r.get("measured", "machine", "description", default=r.machine)) for c in gpus for r in current(shelf, c))
    where = f" ({', '.join(sorted(machines))})" if machines else ""
    return (
        f"Of {len(claims)} claims, **{len(gpus)} are settled on GPUs**{text(where)}, {len(other)} by arithmetic, by a rule or on a CPU. "
        f"The other {len(claims) - len(gpus) - len(other)} are untested, undecided, or were measured on an older version: "
        f"{link('all claims', '_generated/claims.md')} say which."
    )


def _settled(shelf: Shelf, claim: Claim) -> bool:
    return any(r.status in _DECIDED and not r.stale(shelf.today, claim) for r in verdicts(shelf.records, claim.id))


def commands_shown(shown: Mapping[str, str]) -> str:
    """Each command with what it prints."""
    return "\n\n".join(block(f"$ {command}\n{printed}", "text") for command, printed in shown.items())
