"""What a rule that names a size says for a run, and which of the two to follow: the rule, or the planner.

The planner has the last word on sizes. Where a rule's size was within 5 % of its fastest layout the rule says so; a test asks both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.cards.model import Card, Decision, Sizes
from playbook.cards.scope import unmet
from playbook.cards.terms import Facts

WITHIN = 0.05
"""Share of the planner's fastest predicted speed that a rule's size may cost, where the rule says that the two agree."""
KEYS = frozenset(f"parallel.{k}" for k in ("cp", "tp", "ep", "etp")) | {
    "train.micro_batch_size",
    "train.recompute",
    "train.recompute_modules",
}
"""Settings that are sizes; a rule that sets one says how it stands to the planner."""


def words(sizes: Sizes, seq_len: int) -> list[str]:
    """What `playbook plan --fix` takes for the sizes of a rule at this length."""
    cp = [f"cp={_cp(sizes.tokens_per_cp_rank, seq_len)}"] if sizes.tokens_per_cp_rank else []
    return [*cp, *(f"{k}={v}" for k, v in sizes.keep.items())]


def _cp(tokens: int, seq_len: int) -> int:
    """The sequence over tokens per CP rank, rounded up to a power of two."""
    return 1 << max(0, -(-seq_len // tokens) - 1).bit_length()


def agrees(sizes: Sizes, run: Mapping[str, Any]) -> bool:
    """Whether a run lies in one of the ranges in which the rule and the planner agree."""
    return any(not unmet(where, run) for where in sizes.agrees)


def follow(card: Card, run: Facts) -> list[str]:
    """One line for each rule of a card whose size holds for a run, else one that names the planner; none where the run or the card says nothing of sizes."""
    rules = [rule.sizes for rule in card.decide if rule.sizes]
    if not rules or run.model is None or run.seq_len is None:
        return []
    plan = _command(run)
    each = run.each()
    near = [s for s in rules if all(agrees(s, facts) for facts in each) and _room(s, run.seq_len, run.gpus)]
    held = [f"{' '.join(words(s, run.seq_len))} by the card, within 5 % of the planner's fastest layout; the rest by {plan}" for s in near]
    return held or [
        f"{plan}: the card's rule is not known to come within 5 % of its fastest layout here, and it weighs memory, TP, CP and EP together"
    ]


def _room(sizes: Sizes, seq_len: int, gpus: int | None) -> bool:
    return gpus is None or sizes.tokens_per_cp_rank is None or _cp(sizes.tokens_per_cp_rank, seq_len) <= gpus


def _command(run: Facts) -> str:
    """The command that plans a run; capital words are left to fill in."""
    kind = run.hardware[0] if len(run.hardware) == 1 else "KIND"
    return f"playbook plan {run.model or 'MODEL'} --gpus {run.gpus or 'N'} --hardware {kind} --seq {run.seq_len or 'TOKENS'}"


def note(rule: Decision) -> str:
    """Where a rule's size agrees with the planner, and what to follow elsewhere; empty where it names none."""
    if rule.sizes is None:
        return ""
    where = " or ".join(", ".join(f"{k} {v}" for k, v in part.items()) for part in rule.sizes.agrees)
    return (
        f"size: within 5 % of the planner's fastest layout for {where}; elsewhere follow playbook plan"
        if where
        else "size: follow playbook plan, whose fastest layouts often have another"
    )


def sized(cards: Sequence[Card]) -> list[Sizes]:
    """The sizes of all rules."""
    return [rule.sizes for card in cards for rule in card.decide if rule.sizes]
