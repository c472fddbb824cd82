"""Pairs at unequal work, or on other data, are refused."""

from __future__ import annotations

from typing import Any

from playbook.records.case import Delta
from playbook.records.evidence import Measured, Verdict
from playbook_bench.judge import verdict
from playbook_bench.statements.planted import planted


def _judge(measured: Measured) -> Verdict:
    return verdict.derive(measured).verdict


def unequal_work_is_refused(metric: str = "step_seconds", factor: int = 2) -> tuple[bool, str, dict[str, Any]]:
    """Whether the harness refuses a pair whose variants differ in work or in data without saying so, and accepts the same pair when they do not."""
    statuses = {
        "equal work": _judge(planted(metric, 1, "same")),
        "unequal work": _judge(planted(metric, factor, "same")),
        "unequal work, declared, by step time": _judge(planted(metric, factor, "same", Delta(work=True, reason="to be refused"))),
        "other data": _judge(planted(metric, 1, "other")),
    }
    accepted = statuses.pop("equal work")
    refused = {name: v.reason == "invalid_pair" for name, v in statuses.items()}
    holds = accepted.status == "confirmed" and all(refused.values())
    sentence = (
        "a pair at equal work is judged by step time; at unequal work, declared or not, and on other data, it is refused"
        if holds
        else f"equal work is {accepted.status}; refused: {refused}"
    )
    return holds, sentence, {"equal_work": accepted.status, "refused": refused, "work_factor": factor}
