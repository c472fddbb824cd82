"""Cards: what the playbook claims, in which scope, why, from which source, and which case settles it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from playbook.text import count
from playbook.yaml_files import Strict, did_you_mean

SHORT_METRICS = {"step_time": "step_seconds", "tokens_per_s": "useful_tokens_per_s_per_gpu", "memory": "peak_memory_bytes"}
"""Short names of metrics, which `playbook ab` takes; cards and cases have the full ones."""

Slug = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)
ClaimId = Field(pattern=r"^[A-Z][0-9]{1,3}(\.[a-z])?$")


OPS: Mapping[str, tuple[str, ...]] = {
    "pair": (">=", "<=", "within"),
    "sweep": (">=", "<=", "within", "best", "not_best", "band", "rising", "knee", "reaches", "excludes"),
    "interaction": (">=", "<=", "within", "crossover", "excludes"),
    "prediction": ("inside", ">=", "<=", "within"),
    "arithmetic": ("holds",),
    "invariant": ("holds",),
}
"""What a claim of each kind may expect."""

_WORDS: Mapping[str, str] = {
    "holds": "holds",
    ">=": "at least {m} better",
    "<=": "at most {m} better",
    "within": "equal within {m}",
    "best": "{at} within {m} of the best",
    "not_best": "another value better than {at} by {m} or more",
    "band": "every value within {m} of the first",
    "rising": "each step better by {m} or more",
    "knee": "steps better by {m} or more up to {at}, and by at most {m} after it",
    "reaches": "only the last value within {m} of {at}, and all before it short of it by {m} or more",
    "inside": "each value inside the interval predicted for it",
    "crossover": "the first factor better by {m} or more at the second's low level, and worse by {m} or more at its high one",
    "excludes": "{infeasible} cannot run, and all others can",
}
_SUBJECTS: Mapping[str, str] = {
    "sweep": "the last value against the first: ",
    "interaction": "the first factor's effect at the second's high level against its low one: ",
    "prediction": "the last value against the first: ",
}


class Quantity(Strict):
    """A number with its unit; `approx` marks a rounded one."""

    value: float
    unit: Literal["percent", "points", "ratio", "count", "bytes", "gib", "tokens", "seconds", "flops", "gpus", "tflops"]
    approx: bool = False


class Source(Strict):
    """Where a statement comes from."""

    title: str
    origin: str
    """Who published it, or `ours`."""
    section: str | None = None
    date: str = Field(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")
    url: str | None = None


class Expect(Strict):
    """What the claim expects of the effect.

    Effect: how much better the candidate is than the baseline, in the metric's own direction, as a share of the baseline.
    `>=`: at least this much better. `<=`: no more than this much better. `within`: equal up to this much, both ways.
    `holds`: for arithmetic and invariant cases, which are true or false.

    A sweep compares the last value with the first by `>=`, `<=` and `within`, or asks for a shape of the curve: `best`, `not_best`,
    `band`, `rising`, `knee`, `reaches`. An interaction compares the effect of its first factor at the second factor's two levels: `>=`,
    `<=` and `within` speak of the difference of the two effects (on logarithms, a ratio of ratios), `crossover` of their signs.
    `excludes`: exactly the variants of `infeasible` cannot run. `inside`: each value of a prediction lies in the interval that its case
    names; it has no margin. `playbook_bench.judge.effects` says when each is confirmed and refuted.

    A rate or a count of bytes is compared as a ratio: where lower is better, `ratio: 2` means half as much, which is also `percent: 100`
    (twice as good). Shares and counts that may be zero are compared by difference, in points or in counts.
    """

    op: Literal[">=", "<=", "within", "holds", "best", "not_best", "band", "rising", "knee", "reaches", "crossover", "excludes", "inside"]
    margin: Quantity | None = None
    at: list[str | int | float] = Field(default_factory=list)
    """The values of a sweep that the rule speaks of: the predicted best, the knee, the reference that is reached."""
    infeasible: list[str | int | float] = Field(default_factory=list)
    """Variants that may be refused or out of memory: data, not an error. Every rule but `excludes` leaves out those that are."""


class Comparison(Strict):
    """The two variants, as configuration deltas (dotted keys)."""

    baseline: dict[str, Any] = Field(default_factory=dict)
    candidate: dict[str, Any] = Field(default_factory=dict)


class MechanismCheck(Strict):
    """A deterministic check of the claim's mechanism, with a status of its own, which never changes the claim's."""

    id: str = ClaimId
    statement: str
    case: str = Slug
    metric: str
    expect: Expect
    comparison: Comparison


class Claim(Strict):
    """One statement that a machine can check."""

    id: str = ClaimId
    statement: str = Field(min_length=20, max_length=600)
    mechanism: str = Field(min_length=20)
    kind: Literal["pair", "sweep", "interaction", "prediction", "arithmetic", "invariant"]
    comparison: Comparison = Field(default_factory=Comparison)
    metric: str
    expect: Expect
    scope: dict[str, Any] = Field(default_factory=dict)
    """A predicate over the machine and the run; see `playbook.cards.scope`."""
    cpu_scope: str | None = None
    """What a verdict on a CPU may speak for, where the case has a cpu profile."""
    label: Literal["training-equivalent", "benchmark-only"]
    sources: list[Source] = Field(min_length=1)
    case: str | None = Field(default=None, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    mechanism_check: MechanismCheck | None = None
    contradicts: list[str] = Field(default_factory=list)
    supersedes: list[str] = Field(default_factory=list)
    depends_on: list[str] = Field(default_factory=list)


def near_metric(name: str, metrics: Collection[str]) -> str:
    """The advice for a name that is no metric: the full name of a short one, else what is near."""
    return f"; did you mean '{SHORT_METRICS[name]}'?" if name in SHORT_METRICS else did_you_mean(name, metrics)


def guidance(cards: Mapping[str, Card]) -> dict[str, Card]:
    """The cards that advise people on their own runs: all but those about Playbook's own trainer."""
    return {card.id: card for card in cards.values() if not card.own_trainer}


def by_claim(cards: Mapping[str, Card]) -> dict[str, tuple[str, Claim | MechanismCheck]]:
    """Each claim and mechanism check by its id, with the id of its card."""
    return {c.id: (card.id, c) for card in cards.values() for claim in card.claims for c in (claim, claim.mechanism_check) if c}


def claim_ids(card: Card) -> list[str]:
    """The ids of a card's claims and mechanism checks, in order."""
    return [c.id for claim in card.claims for c in (claim, claim.mechanism_check) if c]


def counted(cards: Mapping[str, Card]) -> str:
    """How many claims and mechanism checks cards have, in the words that every list and page uses."""
    claims = [claim for card in cards.values() for claim in card.claims]
    return f"{count(len(claims), 'claim')} and {count(sum(c.mechanism_check is not None for c in claims), 'mechanism check')}"


class Sizes(Strict):
    """The sizes that a rule names, in the planner's words, and the ranges in which they are within 5 % of its fastest layout."""

    tokens_per_cp_rank: int | None = Field(default=None, ge=1)
    """CP is the sequence over this, rounded up to a power of two."""
    keep: dict[str, str] = Field(default_factory=dict)
    """What `playbook plan --fix` takes."""
    agrees: list[dict[str, Any]] = Field(default_factory=list)
    """Predicates over the run, as a scope has them: it lies in one. Elsewhere, and where there are none, the planner is followed."""


class Decision(Strict):
    """In this situation, set this, because of these claims."""

    when: dict[str, Any]
    set: dict[str, Any]
    avoid: dict[str, Any] = Field(default_factory=dict)
    """What not to set in this situation; a list names the members to leave out."""
    because: list[str] = Field(min_length=1)
    note: str | None = None
    sizes: Sizes | None = None


class ConfigFamily(Strict):
    """A representative configuration."""

    name: str
    hardware: str
    model: str
    gpus: int | None = None
    layout: dict[str, int]
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keys beside the layout; `megatron_core` names the version whose labels they use, the newest known if absent."""
    measured: dict[str, Quantity] = Field(default_factory=dict)
    """What was published for it, by name; see `playbook.lint.figures` for the names and their units."""
    sources: list[Source] = Field(default_factory=list)
    """Where the figures were published, and when."""
    unspecified: list[str] = Field(default_factory=list)
    """Degrees that the source leaves open, so that nobody fills them in."""
    recipe: str | None = Field(default=None, pattern=r"^trainer/configs/recipes/[a-z0-9_]+\.yaml$")
    """The file that trains it, where there is one."""
    note: str | None = None


class Ranking(Strict):
    """One configuration family of this card beats another in a measured figure."""

    metric: str
    better: str
    than: str


class Formula(Strict):
    """A sizing rule as arithmetic over the degrees, such as `pp * max(tp * cp, ep * etp)` for `min_gpus`."""

    quantity: Literal["min_gpus", "dp", "edp", "cp"]
    expression: str = Field(max_length=200)


class Figure(Strict):
    """A number that the card states outside its claims, and what it is a number of."""

    name: str
    value: Quantity
    when: dict[str, Any] = Field(default_factory=dict)
    sources: list[Source] = Field(min_length=1)


class Dispute(Strict):
    """Claims whose sources disagree. All stay, each with its dated sources; a verdict on a machine goes before what is said here."""

    subject: str
    claims: list[str] = Field(min_length=2)
    """Oldest first."""
    stands: str
    """The claim to act on where no verdict says otherwise."""
    why: str


class Pitfall(Strict):
    """A symptom, its cause and its fix."""

    symptom: str
    cause: str
    fix: str


class Related(Strict):
    """Links to other cards, by id."""

    supersedes: list[str] = Field(default_factory=list)
    contradicts: list[str] = Field(default_factory=list)
    see: list[str] = Field(default_factory=list)


class Card(Strict):
    """One subject: its claims, and what to do because of them."""

    id: str = Slug
    title: str
    summary: str
    symptoms: list[str] = Field(min_length=1)
    aliases: list[str] = Field(default_factory=list)
    phase: Literal["fit", "scale", "profile", "retune"]
    wall: Literal["memory", "communication", "compute", "host", "data"]
    own_trainer: bool = False
    """It speaks of Playbook's own trainer: its claims are tested and it has its page, but no list or search of guidance names it."""
    scope: dict[str, Any] = Field(default_factory=dict)
    """Scope of the whole card: runs outside it find nothing of use in it."""
    claims: list[Claim] = Field(min_length=1)
    decide: list[Decision] = Field(default_factory=list)
    families: list[ConfigFamily] = Field(default_factory=list)
    rankings: list[Ranking] = Field(default_factory=list)
    formulas: list[Formula] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)
    disputes: list[Dispute] = Field(default_factory=list)
    interactions: list[str] = Field(default_factory=list)
    pitfalls: list[Pitfall] = Field(default_factory=list)
    related: Related = Field(default_factory=Related)

    @field_validator("claims")
    @classmethod
    def _unique(cls, claims: list[Claim]) -> list[Claim]:
        ids = [c.id for claim in claims for c in (claim, claim.mechanism_check) if c]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"claim id {', '.join(twice)} is used twice; every claim needs its own")
        return claims


def expectation(claim: Claim) -> tuple[str, str]:
    """A claim's metric and what is expected of it, in words; no metric where arithmetic or an invariant holds or does not."""
    words = in_words(claim.expect, claim.kind)
    return ("", words) if claim.expect.op == "holds" else (claim.metric, words)


def in_words(expect: Expect, kind: str = "pair") -> str:
    """What a claim expects, in words, such as `at least 5 % better`."""
    margin = expect.margin or Quantity(value=0.0, unit="percent")
    unit = {"percent": " %", "ratio": " times"}.get(margin.unit, f" {margin.unit}")
    names = [" or ".join(v if isinstance(v, str) else f"{v:g}" for v in values) for values in (expect.at, expect.infeasible)]
    # A ratio is of the candidate to the baseline, so 0.45 times is a loss and not a gain.
    words = _WORDS[expect.op].replace("better", "as good") if margin.unit == "ratio" and expect.op in (">=", "<=") else _WORDS[expect.op]
    text = words.format(m=f"{margin.value:g}{unit}", at=names[0] or "some value", infeasible=names[1])
    return (_SUBJECTS.get(kind, "") if expect.op in (">=", "<=", "within") else "") + text
