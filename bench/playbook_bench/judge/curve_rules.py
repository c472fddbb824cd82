"""What a claim may say of variants, and when it is confirmed and refuted.

A rule names the contrasts that it looks at before any run, and decides from their intervals alone. The intervals hold together
(Bonferroni), so a rule may pick among them: a wrong verdict of either kind is no likelier than the error rate of the look.

`gain(i, j)` is how much better variant i is than variant j, in the metric's own direction; L and U are the ends of its interval and m
is the claimed margin. Refuted means that the interval rules the claim out, so each rule's refutation is its negation.

| op | says | confirmed | refuted |
|---|---|---|---|
| `>=` `<=` `within` | of gain(last, first); for an interaction, of the first factor's gain at the second's high level less that at its low | L >= m; U <= m; both inside [-m, m] | U < m; L > m; outside |
| `best` | a value of `at` is within m of the best | for some i in `at`, U(j, i) <= m for every other j | for each i in `at`, L(j, i) > m for some j |
| `not_best` | some value is better than each of `at` by m or more | for each i in `at`, L(j, i) >= m for some j | for some i in `at`, U(j, i) < m for every other j |
| `band` | every value is within m of the first | all of L, U(j, first) inside [-m, m] | some L > m or U < -m |
| `rising` | each step gains m or more | every L(next, previous) >= m | some U < m |
| `knee` | steps gain m or more up to a knee (one of `at`, if given) and at most m after it | L >= m before and U <= m after one such knee | every such knee is ruled out by a step |
| `reaches` | only the last value comes within m of the reference `at`; all before it fall short by m or more | L(at, j) >= m for all but the last, U(at, last) <= m | some U(at, j) < m, or L(at, last) > m |
| `crossover` | the first factor gains m or more at the second's low level and loses m or more at its high one | both L >= m | one U < m |
| `inside` | each value of a prediction lies in the interval that was predicted for it | both ends of each one's interval inside | some L > high, or U < low |
| `excludes` | exactly the variants of `infeasible` cannot run | they were refused or out of memory in each launch and all others ran | one of them ran |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from playbook.cards.model import Expect
from playbook.errors import ConfigError

_Bounds = tuple[float, float]
Status = bool | None
"""True: confirmed. False: refuted. None: the intervals do not say."""


@dataclass(frozen=True)
class Asked:
    """One contrast that a rule looks at."""

    name: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Question:
    """A claim's rule with what it speaks of: the variants that ran, in order, and the margin on the metric's scale."""

    op: str
    names: Sequence[str]
    margin: float
    at: Sequence[str] = field(default_factory=tuple)
    bands: Sequence[_Bounds] = field(default_factory=tuple)
    """What was predicted for each of the names: from least to most gain over the predicted value."""


def named(values: Sequence[str | int | float]) -> list[str]:
    """Values of a claim as variants are named."""
    return [v if isinstance(v, str) else f"{v:g}" for v in values]


def question(expect: Expect, names: Sequence[str], margin: float, bands: Mapping[str, _Bounds] | None = None) -> Question:
    """The claim's question about the variants that ran."""
    return Question(
        expect.op, list(names), margin, [a for a in named(expect.at) if a in names], [b for v, b in (bands or {}).items() if v in names]
    )


def over(i: str, j: str) -> Asked:
    """How much better variant i is than variant j."""
    return Asked(f"{i} over {j}", {i: 1.0, j: -1.0})


def asked(q: Question, interaction: bool = False) -> list[Asked]:
    """The contrasts of a rule, fixed by the variants and the claim alone.

    Raises:
        ConfigError: the rule does not exist, or the variants are too few for it.
    """
    names = q.names
    if interaction:
        return _cells(q)
    if q.op in (">=", "<=", "within"):
        return [over(names[-1], names[0])]
    if q.op == "inside":
        return [Asked(f"{v} over its prediction", {v: 1.0}) for v in names]
    if q.op in ("best", "not_best"):
        return [over(j, i) for i in q.at for j in names if j not in q.at]
    if q.op == "band":
        return [over(j, names[0]) for j in names[1:]]
    if q.op in ("rising", "knee"):
        return [over(j, i) for i, j in itertools.pairwise(names)]
    if q.op == "reaches":
        return [over(q.at[0], j) for j in names if j != q.at[0]]
    raise ConfigError(f"'{q.op}' is no rule for a sweep; playbook_bench.judge.curve_rules lists them")


def _cells(q: Question) -> list[Asked]:
    low, first, second, both = q.names
    if q.op == "crossover":
        return [over(first, low), over(second, both)]
    if q.op in (">=", "<=", "within"):
        return [Asked("difference of differences", {both: 1.0, second: -1.0, first: -1.0, low: 1.0})]
    raise ConfigError(f"'{q.op}' is no rule for an interaction; playbook_bench.judge.curve_rules lists them")


def decide(q: Question, bounds: Sequence[_Bounds], interaction: bool = False) -> Status:
    """Whether the claim holds, by the intervals of the contrasts that `asked` names, in that order. None if they leave it open."""
    m = q.margin
    if q.op in (">=", "<=", "within"):
        return _one(q.op, m, *bounds[0])
    if interaction or q.op == "rising":
        return _all([low >= m for low, _ in bounds], [high < m for _, high in bounds])
    if q.op == "inside":
        both = list(zip(bounds, q.bands, strict=True))
        return _all([a <= low and high <= b for (low, high), (a, b) in both], [low > b or high < a for (low, high), (a, b) in both])
    if q.op == "band":
        return _all([-m <= low and high <= m for low, high in bounds], [low > m or high < -m for low, high in bounds])
    if q.op in ("best", "not_best"):
        return _best(q, dict(zip((a.name for a in asked(q)), bounds, strict=True)))
    if q.op == "knee":
        return _knee(q, bounds)
    *earlier, last = bounds
    return _all([*(low >= m for low, _ in earlier), last[1] <= m], [*(high < m for _, high in earlier), last[0] > m])


def _one(op: str, m: float, low: float, high: float) -> Status:
    if op == ">=":
        return True if low >= m else False if high < m else None
    if op == "<=":
        return True if high <= m else False if low > m else None
    return True if -m <= low and high <= m else False if low > m or high < -m else None


def _all(holds: Sequence[bool], fails: Sequence[bool]) -> Status:
    return False if any(fails) else True if all(holds) else None


def _best(q: Question, bounds: Mapping[str, _Bounds]) -> Status:
    others = [j for j in q.names if j not in q.at]
    found = {i: [bounds[over(j, i).name] for j in others] for i in q.at}
    unbeaten: Callable[[float], bool] = (lambda u: u <= q.margin) if q.op == "best" else (lambda u: u < q.margin)
    beaten: Callable[[float], bool] = (lambda v: v > q.margin) if q.op == "best" else (lambda v: v >= q.margin)
    stands = any(all(unbeaten(high) for _, high in row) for row in found.values())
    falls = all(any(beaten(low) for low, _ in row) for row in found.values())
    status = True if stands else False if falls else None
    return status if q.op == "best" or status is None else not status


def _knee(q: Question, bounds: Sequence[_Bounds]) -> Status:
    m = q.margin
    # Nothing lies beyond the first and the last of what ran, so no step rules a knee there in or out.
    open_ = bool({q.names[0], q.names[-1]} & set(q.at))
    for knee in range(1, len(q.names) - 1):
        if q.at and q.names[knee] not in q.at:
            continue
        before, after = bounds[:knee], bounds[knee:]
        if all(low >= m for low, _ in before) and all(high <= m for _, high in after):
            return True
        open_ = open_ or not (any(high < m for _, high in before) or any(low > m for low, _ in after))
    return None if open_ else False


def problems(expect: Expect, names: Sequence[str], kind: str) -> list[str]:
    """Why a claim cannot be put to a case with these variants, one line for each reason."""
    found = []
    at = named(expect.at)
    if expect.op == "inside" and (expect.margin is not None or expect.infeasible):
        found.append("op 'inside' has neither 'margin' nor 'infeasible': the case has the intervals, and all of it must run")
    unknown = [n for n in [*at, *named(expect.infeasible)] if n not in names]
    if unknown:
        found.append(f"{', '.join(unknown)}: the case has no such variant; it has {', '.join(names)}")
    if expect.op in ("best", "not_best", "reaches") and not at:
        found.append(f"op '{expect.op}' needs 'at': the value that it speaks of")
    if expect.op == "reaches" and len(at) > 1:
        found.append(f"op 'reaches' has one reference, found {len(at)}")
    if expect.op == "reaches" and at and at[0] == names[-1]:
        found.append("op 'reaches' asks whether the last value reaches the reference, so the reference cannot be the last")
    if expect.op in ("best", "not_best") and at and set(at) >= set(names):
        found.append(f"op '{expect.op}' needs a value beside those of 'at'")
    if expect.op in ("rising", "knee", "reaches") and len(names) < 3:
        found.append(f"op '{expect.op}' needs at least 3 values, the case has {len(names)}")
    if expect.op == "knee" and (ends := {names[0], names[-1]} & set(at)):
        found.append(f"op 'knee' has a step before its knee and one after it, so {', '.join(sorted(ends))} cannot be one")
    if at and expect.op not in ("best", "not_best", "knee", "reaches"):
        found.append(f"op '{expect.op}' has no 'at'")
    if expect.op == "excludes" and not expect.infeasible:
        found.append("op 'excludes' needs 'infeasible': the variants that cannot run")
    if kind == "interaction" and expect.infeasible and expect.op != "excludes":
        found.append("an interaction needs all four cells; only op 'excludes' has 'infeasible'")
    return found
