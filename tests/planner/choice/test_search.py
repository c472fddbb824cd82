"""The search: bounds change no answer, what fits is told from what does not, and every plan that is offered can run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from playbook.errors import ConfigError
from playbook.planner import memory
from playbook.planner.choice import plain_data
from playbook.planner.choice.search import plan_layouts, search, tied_indices
from playbook.planner.choice.space import ALLOWED, Question
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.time.cluster import cluster

SMALL = (
    "qwen3_30b_a3b",
    "qwen3_8b",
    "llama3_8b",
    "mixtral_8x7b",
    "deepseek_v2_lite",
    "gpt_oss_20b",
    "moonlight_16b_a3b",
    "nemotron_3_nano_30b_a3b",
)


def asked(model: str = "qwen3_30b_a3b", hardware: str = "h100", gpus: int = 8, seq_len: int = 4096, gbs: int = 64, **more) -> Question:
    return Question(MODELS[model], model, cluster(hardware), gpus, seq_len, gbs, **more)


def some(seed: int) -> Question:
    rng = random.Random(seed)
    allow = frozenset(rng.sample([a for a in ALLOWED if a != "fp8"], rng.choice([0, 0, 1, 2])))
    return asked(
        rng.choice(SMALL), rng.choice(["a100", "h100", "h200", "gb200"]), rng.choice([1, 2, 4, 8]), rng.choice([2048, 4096]),
        rng.choice([16, 32, 64]), backend=rng.choice(["megatron", "megatron", "torch"]), allow=allow,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(i, marks=pytest.mark.full) for i in range(24, 34))])
def test_pruning_changes_no_answer(seed: int) -> None:
    question = some(seed)
    pruned, whole = search(question), search(question, prune=False)
    assert [(c.plan, c.speed) for c in pruned.choices] == [(c.plan, c.speed) for c in whole.choices]
    assert pruned.counts.fitting == whole.counts.fitting
    assert pruned.counts.timed <= whole.counts.timed


@pytest.mark.parametrize("seed", range(50, 56))
def test_every_plan_that_is_offered_is_legal_and_fits(seed: int) -> None:
    question = some(seed)
    found = search(question)
    for choice in found.choices:
        again = parse(question.model, plain_data.words(choice.plan), shape=question.shape)
        assert replace(again, gbs=again.global_batch) == choice.plan  # the words say all that was chosen
        assert choice.plan.broken() == []
        assert memory.peak(choice.plan) <= question.capacity
    speeds = [c.speed for c in found.choices]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize("seed", range(60, 64))
def test_more_memory_removes_no_layout(seed: int) -> None:
    few, more = (search(replace(some(seed), memory_share=share)) for share in (0.5, 0.9))
    assert few.counts.fitting <= more.counts.fitting
    if few.choices:
        assert more.choices[0].speed >= few.choices[0].speed


def test_what_is_fixed_stays_and_what_is_not_allowed_is_not_used() -> None:
    found = search(asked(fixed=("tp=2", "recompute=full", "dispatcher=alltoall"), gpus=16))
    assert found.choices
    for choice in found.choices:
        assert (choice.plan.tp, choice.plan.options.recompute) == (2, ("full",))
        assert choice.plan.options.dispatcher in ("alltoall", "")
        assert (choice.plan.grad_bytes, choice.plan.moment_bytes, choice.plan.master_bytes) == (4, 4, 4)
        assert not choice.plan.options.fp8


@pytest.mark.full
def test_nothing_fits_says_what_is_nearest_and_what_would() -> None:
    found = plan_layouts(asked("qwen3_235b_a22b", gpus=32, gbs=512))
    assert found.choices == []
    near = found.obstacle
    assert near is not None
    assert near.plan.broken() == []
    assert near.stage.peak == memory.peak(near.plan) > found.question.capacity
    assert near.ways
    way = next(w for w in near.ways if w.startswith("--gpus"))
    assert plan_layouts(replace(found.question, gpus=int(way.split()[1]))).choices


def test_where_all_weights_do_not_fit_adapters_are_a_way_that_holds() -> None:
    found = plan_layouts(asked("qwen3_30b_a3b", gpus=1, gbs=16))
    assert found.obstacle is not None
    way = next(w for w in found.obstacle.ways if "adapters" in w)
    adapted = replace(found.question, fixed=(way.split()[1],))
    assert plan_layouts(adapted).choices
    too_long = plan_layouts(replace(adapted, seq_len=262_144)).obstacle
    assert too_long is not None
    assert not any("adapters" in w for w in too_long.ways), "a way that is taken is no way"


def test_the_fewest_gpus_hold_it_and_the_next_fewer_do_not() -> None:
    found = plan_layouts(asked("mixtral_8x7b", "a100", gbs=256, goal="gpus"))
    assert found.choices
    assert not search(replace(found.question, gpus=8 if found.question.gpus == 16 else found.question.gpus - 8)).choices


def test_the_leanest_plan_needs_no_more_than_the_fastest() -> None:
    lean, fast = (search(asked("qwen3_8b", goal=goal), 1).choices[0] for goal in ("memory", "tokens/s"))
    assert lean.peak <= fast.peak


def test_ties_are_told_from_plans_that_lose() -> None:
    found = plan_layouts(asked("llama3_8b", gbs=256), 10)
    best, worst = found.choices[0], search(asked("llama3_8b", gbs=256), 500).choices[-1]
    assert 0 in found.tied_indices
    assert tied_indices(found.question, replace(search(found.question, 2), choices=[best, worst])) == [0]
    assert "slower" in plain_data.lost(best, worst)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"goal": "fun"}, "expected one of tokens/s"),
        ({"allow": frozenset({"fp4"})}, "expected some of fp8"),
        ({"allow": frozenset({"fp8"}), "hardware": "a100"}, "no 8-bit products"),
        ({"memory_share": 92.0}, "a share of the GPU's memory"),
        ({"fixed": ("gbs=4",)}, "--layers and --experts say that"),
        ({"fixed": ("speed=4",)}, "not a setting"),
        ({"model": "qwen3_8b", "fixed": ("imbalance=2",)}, "imbalance has no effect with a model without experts"),
        ({"fixed": ("tp=1", "sp=true")}, "sp has no effect with tp 1"),
        ({"backend": "torch", "fixed": ("precision_aware=true",)}, "precision_aware has no effect with the torch backend"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(more: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_layouts(asked(**more))
