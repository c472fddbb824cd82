"""Every variant of every shipped case can start on the ranks that its profile names, but for those whose refusal is the claim."""

from __future__ import annotations

import contextlib

import pytest
import yaml

from playbook.cards.load import load_all
from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.records.case import LAUNCHED_KINDS, Case, list_cases, load_case
from playbook_bench.judge.effects import variant_names
from playbook_bench.variants.resolve import resolve_all
from playbook_trainer.config import automatic, checks
from playbook_trainer.config import megatron_checks as megatron
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.data.tokenizer import load_tokenizer

CASES = [case for case in map(load_case, list_cases()) if case.kind in LAUNCHED_KINDS and case.trainer]
CLAIMS = [claim for card in load_all().values() for claim in card.claims]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_no_variant_is_refused_before_it_starts_and_each_fits_the_gpu_that_is_to_measure_it(case, monkeypatch):
    monkeypatch.setattr(megatron, "installed", lambda module: True)  # what is missing here is for preflight to say
    may_fail = {name for claim in CLAIMS if claim.case == case.id for name in variant_names(claim.expect.infeasible)}
    for profile in case.profiles:
        variants = resolve_all(case, profile)
        for name, variant in variants.items():
            with contextlib.suppress(*([ConfigError] if name in may_fail else [])):
                checks.check(variant.config, variant.ranks)
            if variant.config.data.kind != "mock":
                load_tokenizer(variant.config.data.tokenizer, variant.config.model)
            if profile.startswith("h100x") or (profile == "h200x1" and case.metric != "fits"):
                assert peak(variant) < room(profile, variant.shared), (profile, name)
        if profile == "h200x1" and case.metric != "fits":
            # It casts and copies in every step of one rank, so that a pair with it on one side compares more than it names.
            torch_ones = [v for v in variants.values() if v.config.backend == "torch" and v.ranks == 1]
            assert len({automatic.switched(v.config, v.target).wants_fsdp(1, 1) for v in torch_ones}) <= 1


def peak(variant):
    """By the planner, on the fullest GPU: of one rank, or of all that share it."""
    of_a_rank = max(stage.peak for stage in dry_run(variant.config, variant.ranks).stages)
    return of_a_rank * (variant.ranks if variant.shared else 1)


def room(profile, shared):
    """Of ranks that share a GPU, each has a CUDA context too, and keeps memory that it has freed."""
    return 0.92 * 79 * 2**30 if profile.startswith("h100x") else 0.85 * 139 * 2**30 if shared else 141e9


def test_a_profile_begins_from_another_with_its_values_for_single_variants():
    text = (data_root("cases") / "fused-loss.yaml").read_text(encoding="utf-8")
    case = Case.model_validate(yaml.safe_load(text))
    h200, h100 = case.profiles["h200x1"], case.profiles["h100x1"]
    assert h100 == h200
    told = yaml.safe_load(text)
    told["profiles"]["h100x1"] = {"like": "h200x1", "model.num_layers": 3}
    told["variant_profiles"] = {"h200x1": {"candidate": {"train.steps": 9}}}
    case = Case.model_validate(told)
    assert case.profiles["h100x1"] == {**h200, "model.num_layers": 3}
    assert case.variant_profiles["h100x1"] == {"candidate": {"train.steps": 9}}
    for other in ("h300x1", "h100x1", 7):
        told["profiles"]["h100x1"] = {"like": other}
        with pytest.raises(ValueError, match=r"expected one that is written out: .*h200x1"):
            Case.model_validate(told)


def test_long_rows_without_cp_exceed_the_gpu_that_ranks_share_and_nothing_else_does():
    variants = resolve_all(load_case("short-baseline-at-64k"), "h200x1")
    peaks = {n: v.ranks * max(s.peak for s in dry_run(v.config, v.ranks).stages) / 2**30 for n, v in variants.items()}
    assert peaks.pop("cp1+64k") > 1.5 * 139
    assert max(peaks.values()) < 0.85 * 139
