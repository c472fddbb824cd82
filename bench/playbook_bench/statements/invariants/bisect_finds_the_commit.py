"""The search for a commit finds it wherever it is planted."""

from __future__ import annotations

from typing import Any

from playbook_bench.judge import bisection


def bisect_finds_the_commit(commits: int = 12) -> tuple[bool, str, dict[str, Any]]:
    """Whether the search names the right commit wherever it is planted, slow or failing, and the right few where some cannot be judged."""
    history = [f"c{i}" for i in range(commits)]
    most, wrong = 0, []
    for first in range(commits):
        for trouble in (bisection.SLOWER, "oom", "crash"):
            for unjudged in (set[int](), {i for i in range(commits - 1) if i % 3 == 0}):

                def judge(commit: str, first: int = first, trouble: str = trouble, unjudged: set[int] = unjudged) -> bisection.Judged:
                    i = int(commit[1:])
                    return bisection.Judged(
                        commit, bisection.UNKNOWN if i in unjudged else trouble if i >= first else bisection.NONE, "planted"
                    )

                found = bisection.search(history, judge)
                most = max(most, len(found.judged)) if not unjudged else most
                judged = [i for i in range(commits) if i not in unjudged]
                last_good = max((i for i in judged if i < first), default=-1)
                expected = history[last_good + 1 : min(i for i in judged if i >= first) + 1]
                if found.suspects != expected or found.trouble != trouble:
                    wrong.append(f"planted at {first} ({trouble}): {found.suspects}")
    least = commits.bit_length() + 1
    holds = not wrong and most <= least
    sentence = f"{commits} commits: each planted one is found with at most {most} judgements" if holds else f"wrong: {'; '.join(wrong[:3])}"
    return holds, sentence, {"commits": commits, "judgements": most, "allowed": least, "wrong": len(wrong)}
