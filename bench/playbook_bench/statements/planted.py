"""A record of planted runs, for statements about what the harness makes of records."""

from __future__ import annotations

from typing import Any

from playbook.cards.model import Comparison, Expect, Quantity
from playbook.records.case import Case, Delta
from playbook.records.evidence import CaseRef, ClaimRef, Machine, Measured, Plan, Run, Sample, Variant, digest
from playbook_bench.judge import design
from playbook_bench.judge.verdict_rules import VERSION

_STEPS = 8
_STRICT: dict[str, Any] = {"machine": {"gpus": 0}, "trainer": {"torch": "any"}}


def planted(metric: str, tokens: int, data: str, delta: Delta | None = None) -> Measured:
    """A record whose candidate takes half the time per step, at `tokens` times the baseline's work, on `data`."""
    case = Case(
        id="planted-pair",
        summary="Planted records",
        trainer="planted",
        baseline={"train.micro_batch_size": 1},
        candidate={"train.micro_batch_size": 2},
        metric=metric,
        delta=delta or Delta(),
    )
    expect = Expect(op=">=", margin=Quantity(value=5.0, unit="percent"))
    claim = ClaimRef(
        id="X1", card="planted", card_sha="", statement="planted", kind="pair", metric=metric, expect=expect, comparison=Comparison()
    )
    looks = case.budget.looks
    runs = [
        _run("candidate", each.block, i, 0.5, tokens, data) if each.variant else _run("baseline", each.block, i, 1.0, 1, "same")
        for i, each in enumerate(design.launched(design.order(0, 2, looks)[: 2 * looks[0]], 2))
    ]
    machine = Machine(name="cpu", description="planted", gpus=0, cpu="planted", cores=1)
    return Measured(
        claim=claim,
        case=CaseRef(id=case.id, sha=digest(case.model_dump(mode="json"), 16), content=case),
        machine=machine,
        profile="planted",
        plan=Plan(rules=VERSION, seed=0, looks=looks),
        strict={"strict": _STRICT},
        configs={"baseline": {"train": {"micro_batch_size": 1}}, "candidate": {"train": {"micro_batch_size": 2}}},
        runs=runs,
    )


def _run(variant: Variant, pair: int, position: int, step_s: float, tokens: int, data: str) -> Run:
    # A ripple of 0.1 % from step to step and run to run: equal figures to the last digit are nothing that a machine gives.
    def seconds(step: int) -> float:
        return step_s * (1 + 0.001 * ((7 * step + 3 * position) % 5 - 2) + 1e-6 * position)

    samples = [
        Sample(step=i, timed=True, loss=2.0, grad_norm=1.0, seconds=seconds(i), useful_tokens=1000 * tokens, raw_tokens=1000 * tokens)
        for i in range(_STEPS)
    ]
    return Run(
        run_id=f"{variant}-measure-{position}",
        variant=variant,
        role="measure",
        pair=pair,
        position=position,
        outcome="ok",
        returncode=0,
        started="",
        wall_s=1.0,
        ranks=1,
        steps_wanted=_STEPS,
        config_sha=variant,
        strict_sha="strict",
        data_sha=data,
        num_parameters=1,
        trained_parameters=1,
        samples=samples,
    )
