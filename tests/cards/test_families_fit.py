"""Configuration families: each layout is legal and fits the hardware that it names, with some choice of what its source leaves open."""

from __future__ import annotations

import re
from itertools import product

import pytest

from playbook.cards.load import load_all
from playbook.planner import memory
from playbook.planner.choice.space import Question, ladder
from playbook.planner.models import MODELS
from playbook.planner.plan import Plan, parse
from playbook.planner.time.cluster import cluster, clusters

FAMILIES = [(card, family) for card in load_all().values() for family in card.families]
WHOLE = [
    pytest.param(family, id=f"{card.id}: {family.name}")
    for card, family in FAMILIES
    if family.gpus and not family.unspecified and family.model in MODELS and not family.recipe
]
"""Those without a file; `tests/site/test_recipes.py` judges each file by a dry run."""
DEGREES = ("tp", "cp", "pp", "ep", "etp", "vpp")
STATES = ("", "grad_bytes=2", "grad_bytes=2 moment_bytes=2", "grad_bytes=2 moment_bytes=2 master_bytes=2")
"""From float32 gradients and moments to what the precision-aware optimizer needs least."""


def hardware(text: str) -> str | None:
    """The first GPU that a family names."""
    words = re.findall("[a-z0-9]+", text.lower())
    return next((w for w in words if w in clusters()), None)


def plans(family, machine) -> list[Plan]:
    """The family with every choice of what it does not state."""
    stated = family.settings
    words = [f"gpus={family.gpus}", *(f"{k}={family.layout[k]}" for k in DEGREES if k in family.layout)]
    words += [
        f"{k}={stated[key]}"
        for key, k in (("seq_len", "seq_len"), ("micro_batch_size", "mbs"), ("global_batch_size", "gbs"))
        if key in stated
    ]
    precision = str(stated.get("precision", stated.get("fp8_recipe", "")))
    words += ["fp8=mxfp8"] if precision.startswith("mxfp8") else ["fp8=blockwise"] if "fp8" in precision and "bf16" not in precision else []
    words += ["optimizer_offload=100"] if "optimizer" in str(stated.get("offload", "")) else []
    words += [f"layers={stated['num_layers']}"] if "num_layers" in stated else []
    # This trainer's own torch backend takes the loss in chunks, so logits weigh as with a fused one.
    words += (
        ["backend=torch", "loss=te"] if stated.get("backend") == "torch" else ["sharding=fsdp"] if "fsdp" in family.name.lower() else []
    )
    again = stated.get("recompute")
    rungs = [tuple(again)] if isinstance(again, list) else [("full",)] if "full" in str(again) else ladder(asked(family, machine))
    made = []
    for states, rung in product(STATES, rungs):
        more = [*states.split(), *([f"recompute={','.join(rung)}"] if rung else [])]
        made.append(parse(family.model, [*words, *more]))
    return made


def asked(family, machine) -> Question:
    return Question(MODELS[family.model], family.model, machine, family.gpus)


@pytest.mark.parametrize("family", WHOLE)
def test_a_family_is_legal_and_fits_its_hardware(family) -> None:
    name = hardware(family.hardware)
    machine = cluster(name or "h100")
    made = plans(family, machine)
    legal = [plan for plan in made if not plan.broken()]
    assert legal, made[0].broken()
    if name:
        least = min(memory.peak(plan) for plan in legal)
        assert memory.verdict(least, machine.memory_gib) != "does not fit", least / memory.GIB


def test_families_with_speed_say_where_it_comes_from() -> None:
    fast = [family for _, family in FAMILIES if "tokens_per_s_per_gpu" in family.measured]
    assert len(fast) >= 15
    for family in fast:
        assert family.sources
        assert {"tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu"} <= set(family.measured)
