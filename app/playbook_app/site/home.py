"""What stands on the home page: how far the claims are covered, and measured facts."""

from __future__ import annotations

from playbook.cards.model import Claim
from playbook.records.read import traces, verdicts
from playbook.records.standing import in_words
from playbook_app.site.cards import effect
from playbook_app.site.shelf import DECIDED, Shelf, anchor, current, verdict_forest
from playbook_app.site.text import badge, link, text


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
        f"- {link('The record', f'../evidence/{r.id}.md')} has every step of every launch. The trainer has become faster since, so the verdict is shown as `confirmed, stale`."
        for r in records
    ]
    lines += [
        f"- {link('The trace', f'../evidence/{trace.id}.md')} says where the time went: not into the network, but into summing by token over all ranks' rows."
        for r in records
        for trace in traces(shelf.records, r.get("case"))[:1]
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
                f"- {text(words)} **{effect(record)}**. {mark} {text(in_words(record).partition(', ')[2])}, {link(text(name), f'cards/{shelf.home[name]}.md#{anchor(name)}')}"
            )
    return "\n".join(lines)
