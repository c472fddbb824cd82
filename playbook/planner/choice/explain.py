"""What is said of plans: why one lost to another, and which two to run where times alone cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

from playbook.planner.choice.search import Answer, Choice

PARTS = {
    "products": "matrix products", "grouped": "experts' products", "attention": "attention", "elementwise": "elementwise kernels",
    "host": "waiting for the host", "tp": "tensor-parallel transfers", "ep": "expert transfers", "cp": "context-parallel transfers",
    "pp": "transfers between stages", "bubble": "waiting for the pipeline", "dp": "gradients and weights", "optimizer": "the optimizer",
    "offload": "transfers to the host", "stragglers": "waiting for the slowest rank",
}  # fmt: skip
"""Words for the parts of a step's time."""


def lost(best: Choice, other: Choice, most: int = 2) -> str:
    """Where the slower plan spends more, by parts, in the share of a step."""
    whole = other.time.seconds.value
    more = {k: other.time.parts.get(k, 0.0) - best.time.parts.get(k, 0.0) for k in PARTS}
    worst = sorted((k for k in more if more[k] > 0.005 * whole), key=lambda k: -more[k])[:most]
    slower = other.time.seconds.value / best.time.seconds.value - 1
    differences = " and ".join(f"{PARTS[k]} (+{more[k] / whole:.0%} of its step)" for k in worst)
    return f"{slower:.1%} slower: more {differences}" if differences else f"{slower:.1%} slower"


def next_run(answer: Answer) -> tuple[Choice, Choice, str] | None:
    """Two plans among the ties that differ most in what decides, and the part that does; None where nothing ties."""
    if len(answer.tied_indices) < 2:
        return None
    best = answer.choices[0]
    shares = [(other, part, abs(_share(best, part) - _share(other, part))) for other in _tied(answer)[1:] for part in PARTS]
    other, part, _ = max(shares, key=lambda s: s[2])
    return best, other, part


def _tied(answer: Answer) -> Sequence[Choice]:
    return [answer.choices[i] for i in answer.tied_indices]


def _share(choice: Choice, part: str) -> float:
    return choice.time.parts.get(part, 0.0) / choice.time.seconds.value
