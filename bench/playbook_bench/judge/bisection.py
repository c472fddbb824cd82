"""The search for the first commit with a trouble: a binary search that passes over the commits that cannot be judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from playbook.errors import ExitCode

NONE, SLOWER, UNKNOWN = "none", "slower", "unknown"
"""What a commit suffers from, besides the outcomes of runs that fail (oom, crash, hang, nan)."""
EXIT_CODES = {"found": ExitCode.DONE, "suspects": ExitCode.UNDECIDED, "no_trouble": ExitCode.UNDECIDED}


@dataclass(frozen=True)
class Judged:
    """One commit and what the gate says of it."""

    commit: str
    trouble: str
    sentence: str


@dataclass(frozen=True)
class BisectResult:
    """The first commit with the trouble, or the few among which it is."""

    suspects: list[str]
    """Oldest first; one where the commit is found, none where the bad commit shows no trouble."""
    trouble: str
    judged: list[Judged]

    @property
    def status(self) -> str:
        """found, suspects or no_trouble."""
        return "no_trouble" if not self.suspects else "found" if len(self.suspects) == 1 else "suspects"

    @property
    def exit_code(self) -> int:
        """0 found; 3 otherwise."""
        return EXIT_CODES[self.status]


def search(history: Sequence[str], judge: Callable[[str], Judged], on_judged: Callable[[Judged, int], None] | None = None) -> BisectResult:
    """The first commit of `history` (oldest first, all after the good one) whose trouble is that of the last; about log2(n) + 1
    judgements.
    """
    judged: dict[int, Judged] = {}

    def look(i: int, remaining: int) -> str:
        judged[i] = judge(history[i])
        if on_judged is not None:
            on_judged(judged[i], remaining)
        return judged[i].trouble

    last = len(history) - 1
    bad_trouble = look(last, last)
    low, high = -1, last  # low is good, high has the trouble
    while bad_trouble not in (NONE, UNKNOWN):
        middle = (low + high) // 2
        open_ = sorted((i for i in range(low + 1, high) if i not in judged), key=lambda i: abs(i - middle))
        if not open_:
            break
        trouble = look(open_[0], len(open_) - 1)
        low, high = (open_[0], high) if trouble == NONE else (low, open_[0]) if trouble == bad_trouble else (low, high)
    suspects = [] if bad_trouble in (NONE, UNKNOWN) else list(history[low + 1 : high + 1])
    return BisectResult(suspects, bad_trouble, list(judged.values()))
