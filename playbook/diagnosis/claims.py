"""What claims say of an action or a layout: which apply to the setting, where they stand, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from playbook.cards.model import Claim, MechanismCheck, by_claim
from playbook.cards.scope import unmet
from playbook.planner.plan import Plan
from playbook.planner.time.cluster import Cluster
from playbook.records.evidence import Evidence
from playbook.records.machine import CPU
from playbook.records.read import DECIDED, UNTESTED, Record, verdicts
from playbook.records.standing import Stock, in_words

_SCALE = ("gpus:", "gpu_memory_gib:", "nodes:", "interconnect:")
_BACKEND = "backend:"
"""Scope of a claim that another number of GPUs, or another trainer, does not meet: it was measured elsewhere, and still says something."""

OF_DEGREE: Mapping[str, tuple[str, ...]] = {
    "etp": ("V12", "W5"),
    "tp": ("W2", "W7"),
    "cp": ("L1", "L1.b", "L1.c", "L5"),
    "vpp": ("W4",),
    "pp": ("V2",),
}
"""Claims about each degree of a layout."""
_OF_SHARDING = ("V1", "M1.s")
"""Claims about full sharding, against TP with PP and against EP: a choice that every layout makes."""


@dataclass(frozen=True)
class Said:
    """One claim with its newest verdict on the machine that is most like the setting's, `standing` in words; `effect` is a share with its
    interval, `model` what the runs trained.
    """

    id: str
    card: str
    case: str | None
    status: str
    standing: str
    machine: str | None
    sentence: str
    evidence: str | None
    stale: str | None
    limits: tuple[str, ...]
    effect: tuple[float, float, float] | None
    statement: str
    model: str | None

    @property
    def comparable(self) -> bool:
        """Whether its effect is one to expect: decided, and of the same kind of trainer."""
        return self.fresh and self.effect is not None and not any(limit.startswith(_BACKEND) for limit in self.limits)

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """Before another: an effect to expect, then what GPUs measured, decided or not, then what was decided without them."""
        return (not self.comparable, not self.on_gpus, not self.fresh)

    @property
    def on_gpus(self) -> bool:
        """Whether GPUs measured it."""
        return self.machine is not None and self.machine.partition("-")[0] != CPU  # of several kinds each has its kind in its name

    @property
    def fresh(self) -> bool:
        """Whether it was decided, and still counts."""
        return self.status in DECIDED and not self.stale

    @property
    def words(self) -> str:
        """Claim, figure and what it rests on, then the statement, in one line."""
        rests_on = ", ".join(filter(None, (self.standing, self.model)))
        return f"{self.id} of {self.card}, {self.sentence.partition(';')[0]} ({rests_on}): {self.statement}"


def of_layout(stock: Stock, plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """The claims about a plan's degrees and its sharding that GPUs have settled, as plain data with a sentence in `words`."""
    degrees = [k for k in OF_DEGREE if getattr(plan, k) > 1]
    found = said(stock, (*_OF_SHARDING, *(i for k in degrees for i in OF_DEGREE[k])), plan, cluster)
    return [{**asdict(s), "words": s.words} for s in found if s.on_gpus and s.status in DECIDED]


def said(stock: Stock, ids: Iterable[str], plan: Plan, cluster: Cluster) -> list[Said]:
    """What these claims say of a plan: those that are out of scope by more than scale and trainer are left out; decided ones first."""
    cards_of = by_claim(stock.cards)
    facts = _facts(plan, cluster)
    statements = []
    for i in ids:
        if i not in cards_of:
            continue
        card, claim = cards_of[i]
        limits = [*unmet(stock.cards[card].scope, facts), *(unmet(claim.scope, facts) if isinstance(claim, Claim) else [])]
        if all(limit.startswith((*_SCALE, _BACKEND)) for limit in limits):
            statements.append(_said(stock, card, claim, tuple(limits), cluster.name))
    return sorted(statements, key=lambda s: s.rank)


def _said(stock: Stock, card: str, claim: Claim | MechanismCheck, limits: tuple[str, ...], gpu: str) -> Said:
    """The verdict on the same kind of GPU, else the first; runs that failed say nothing of the claim."""
    rows = [r for r in verdicts(stock.records, claim.id) if r.status != "error"]
    rows.sort(key=lambda r: (not r.machine.startswith(gpu), r.stale(stock.today, claim) is not None))
    if not rows:
        return Said(claim.id, card, claim.case, UNTESTED, UNTESTED, None, "", None, None, limits, None, claim.statement, None)
    best = rows[0]
    stale = best.stale(stock.today, claim)
    return Said(
        claim.id, card, claim.case, best.status, in_words(best, stale), best.machine, best.sentence, best.id, stale,
        limits, speed_effect(best), claim.statement, best.get("measured", "facts", "model")
    )  # fmt: skip


def speed_effect(record: Record) -> tuple[float, float, float] | None:
    """How much faster its candidate was; None where it compares no speed."""
    shown = record.content.derived.comparison if isinstance(record.content, Evidence) else None
    if shown is None or shown.scale != "log_ratio" or not any(word in shown.metric for word in ("tokens_per_s", "step")):
        return None
    if shown.effect is None or shown.low is None or shown.high is None:
        return None
    return shown.effect, shown.low, shown.high


def _facts(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """The setting in the words of scopes. More than one node is not NVLink alone."""
    shape = plan.shape
    degrees = {k: getattr(plan, k) for k in ("tp", "pp", "cp", "ep", "dp")}
    nodes = -(-plan.gpus // min(8, cluster.domain))
    return {
        "gpu": cluster.name, "gpus": plan.gpus, "gpu_memory_gib": cluster.memory_gib, "nodes": nodes, "ranks": plan.gpus,
        "model": plan.model, "moe": shape.experts > 0, "vision": shape.vision is not None, "seq_len": plan.seq_len, "top_k": shape.top_k,
        "backend": plan.options.backend, "interconnect": "nvlink" if plan.gpus <= cluster.domain else "network", **degrees,
    }  # fmt: skip
