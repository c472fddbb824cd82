"""Cases: how one claim is put to the test."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from playbook.cards import Slug
from playbook.document import Strict


class Rule(Strict):
    """One thing that a run's receipt must show, or must not show.

    Exactly one of `collective`, `range` or `counter` names what is looked at. `count` is a number or a formula over the
    receipt's numbers (layers, moe_layers, microbatches, ranks, steps, images); without it, `require` asks for at least one.
    """

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "broadcast"] | None = None
    range: str | None = None
    counter: str | None = None
    inside: str | None = None
    """Count only collectives issued inside this range."""
    group: str | None = None
    """Count only collectives on this process group: world, dp, ep, tp, pp, cp."""
    count: str | int | None = None
    op: Literal["==", ">=", "<="] = "=="


class Receipt(Strict):
    """What one variant's receipt must and must not show."""

    require: list[Rule] = Field(default_factory=list)
    forbid: list[Rule] = Field(default_factory=list)


class Activation(Strict):
    """Proof, per variant, that the tested path ran."""

    baseline: Receipt = Field(default_factory=Receipt)
    candidate: Receipt = Field(default_factory=Receipt)


class Loss(Strict):
    """How far the mean losses of a pair's timed steps may differ, relative; or why they may differ."""

    relative: float | None = Field(default=0.01, gt=0)
    reason: str | None = None


class Guardrails(Strict):
    """Conditions that void a pair."""

    loss: Loss = Field(default_factory=Loss)


class Budget(Strict):
    """The looks, in pairs, and the longest time that a case may take."""

    pairs: list[int] = Field(default_factory=lambda: [4, 8, 12])
    minutes: float = Field(default=10, gt=0)
    launch_timeout_s: float = Field(default=300, gt=0)


class Delta(Strict):
    """What may differ between the variants besides the declared keys, and why."""

    data: bool = False
    environment: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Environment variables per variant."""
    parameters: bool = False
    ranks: bool = False
    work: bool = False
    """The variants may do different work per step; only metrics per useful token compare them then."""
    reason: str | None = None


class Case(Strict):
    """One matched pair, arithmetic statement or invariant."""

    id: str = Slug
    kind: Literal["pair", "sweep", "interaction", "arithmetic", "invariant"] = "pair"
    summary: str
    trainer: str | None = None
    """The trainer's configuration, a path from the repository's root."""
    baseline: dict[str, Any] = Field(default_factory=dict)
    candidate: dict[str, Any] = Field(default_factory=dict)
    metric: str | None = None
    """The metric to compare; a claim that names the case says which it expects."""
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Per machine class: `ranks` and configuration overrides (dotted keys). Keys: cpu, h200x1, h200x2, h200x4, ..."""
    variant_profiles: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """Per machine class and variant, where a variant's delta needs another value there."""
    requires: list[str] = Field(default_factory=list)
    """Python packages or backends that must be present, such as `deep_ep` or `backend:megatron`."""
    delta: Delta = Field(default_factory=Delta)
    guardrails: Guardrails = Field(default_factory=Guardrails)
    activation: Activation = Field(default_factory=Activation)
    budget: Budget = Field(default_factory=Budget)
    function: str | None = None
    """For `arithmetic` and `invariant`: the name of a function in the harness's table."""
    arguments: dict[str, Any] = Field(default_factory=dict)
