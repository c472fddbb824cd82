"""The order of pairs and blocks that a seed gives, as rules of versions 1 and 2 drew it: with it, a record cannot choose its order."""

from __future__ import annotations

import random
from collections.abc import Sequence

_DRAWN_BY_BLOCKS = (1, 2)


def expected(rules: int, seed: int, pair: bool, variants: Sequence[str], count: int) -> list[str] | None:
    """The first `count` entries of a plan's order: halves of ABBA blocks for a pair, else all variants in a drawn order and its reverse; None for rules whose order is not known here."""
    if rules not in _DRAWN_BY_BLOCKS:
        return None
    draw = random.Random(seed)
    found: list[str] = []
    while len(found) < count:
        if pair:
            block = draw.choice(("ABBA", "BAAB"))
            found += [block[:2], block[2:]]
        else:
            order = draw.sample(list(variants), len(variants))
            found += [" ".join(order), " ".join(order[::-1])]
    return found[:count]
