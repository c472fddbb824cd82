"""What stands on the home page: how far the claims are covered, and commands with what they print."""

from __future__ import annotations

from collections.abc import Mapping

from playbook.cards.model import Claim
from playbook.records.read import verdicts
from playbook_app.site.shelf import DECIDED, Shelf, current, verdict_forest
from playbook_app.site.text import block, link, text


def coverage(shelf: Shelf) -> str:
    """One line: how many claims are settled, and by what."""
    claims = [claim for card in shelf.cards.values() for claim in card.claims]
    gpus = [claim for claim in claims if any(r.status in DECIDED for r in current(shelf, claim))]
    other = [claim for claim in claims if claim not in gpus and _settled(shelf, claim)]
    machines = dict.fromkeys(str(r.get("measured", "machine", "description", default=r.machine)) for c in gpus for r in current(shelf, c))
    where = f" ({text(', '.join(sorted(machines)))})" if machines else ""
    return (
        f"Of {len(claims)} claims, **{len(gpus)} are settled on GPUs**{where}, {len(other)} by arithmetic, by a rule or on a CPU. "
        f"The other {len(claims) - len(gpus) - len(other)} are untested, undecided, or were measured on an older version: "
        f"{link('all claims', '_generated/claims.md')} say which."
    )


def _settled(shelf: Shelf, claim: Claim) -> bool:
    return any(r.status in DECIDED and not r.stale(shelf.today, claim) for r in verdicts(shelf.records, claim.id))


def example_of_verdicts(shelf: Shelf) -> str:
    """The card with most current verdicts from GPUs, as a forest, for the page that explains how to read one."""
    drawn = [verdict_forest(shelf, [card], "../") for card in shelf.cards.values()]
    return max(drawn, key=lambda f: f.count("<tr>"), default="")


def commands_shown(shown: Mapping[str, str]) -> str:
    """Each command with what it prints."""
    return "\n\n".join(block(f"$ {command}\n{printed}", "text") for command, printed in shown.items())
