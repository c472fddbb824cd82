"""Every variant of every shipped case can start on the ranks that its profile names, but for those whose refusal is the claim."""

from __future__ import annotations

import contextlib

import pytest

from playbook.cards.load import load_all
from playbook.errors import ConfigError
from playbook.records.case import LAUNCHED_KINDS, list_cases, load_case
from playbook_bench.judge.curve_rules import named
from playbook_bench.run.variants import resolve_all
from playbook_trainer.config import checks
from playbook_trainer.megatron import checks as megatron

CASES = [case for case in map(load_case, list_cases()) if case.kind in LAUNCHED_KINDS]
CLAIMS = [claim for card in load_all().values() for claim in card.claims]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_no_variant_is_refused_before_it_starts(case, monkeypatch):
    monkeypatch.setattr(megatron, "installed", lambda module: True)  # what is missing here is for preflight to say
    may_fail = {name for claim in CLAIMS if claim.case == case.id for name in named(claim.expect.infeasible)}
    for profile in case.profiles:
        for name, variant in resolve_all(case, profile).items():
            with contextlib.suppress(*([ConfigError] if name in may_fail else [])):
                checks.check(variant.config, variant.ranks)
