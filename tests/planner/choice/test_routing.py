"""Measured routing in plans: where it comes from, and what it costs."""

import json

import pytest

from playbook.errors import PlaybookError
from playbook.planner.choice import routing
from playbook.planner.choice.plain_data import words
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question, check
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.time.cluster import cluster
from playbook.planner.time.step import step_time

MOE = "qwen3_30b_a3b"
LOAD = {"max_over_mean": 4.0, "entropy": 0.9, "idle": 3, "ep2": 1.05, "ep4": 1.2, "ep8": 1.5}


def log(folder, *loads):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": i, "seconds": 1.0} | ({"expert_load": load} if load else {})) for i, load in enumerate(loads)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def test_a_ratio_is_the_fullest_rank_of_every_degree():
    found = routing.measured("1.35")
    assert [found.on(parse(MOE, ["gpus=8", f"ep={ep}"])).imbalance for ep in (1, 2, 8)] == [1.0, 1.35, 1.35]
    assert not found.on(parse(MOE, ["gpus=8"])).even_rows


def test_a_run_says_it_for_each_degree_by_the_median_of_its_steps(tmp_path):
    found = routing.measured(log(tmp_path / "run", LOAD, None, LOAD | {"ep8": 1.4}, LOAD | {"ep8": 9.0}))
    assert [found.on(parse(MOE, ["gpus=8", f"ep={ep}"])).imbalance for ep in (1, 2, 8)] == [1.0, 1.05, 1.5]
    assert "3 steps of run, the fullest expert 4 times the mean" in found.words
    # a log of the fullest expert alone: loads of experts are taken as independent
    alone = routing.measured(log(tmp_path / "alone", {"max_over_mean": 4.0, "entropy": 0.9, "idle": 3}))
    assert alone.on(parse(MOE, ["gpus=8", "ep=8"])).imbalance == pytest.approx(1 + 3 / 16**0.5)


def test_what_it_costs_is_the_time_of_even_routing_less():
    plan, machine = parse(MOE, ["gpus=8", "ep=8", "gbs=64", "mbs=2"]), cluster("h200")
    shares = [routing.routing_share(routing.measured(text).on(plan), machine) for text in ("1.0", "1.2", "1.5", "3")]
    assert 0 < shares[0] < shares[1] < shares[2] < shares[3] < 1
    uneven = routing.measured("1.5")
    even, slow = (step_time(p, machine).seconds.value for p in (plan, uneven.on(plan)))
    assert shares[2] == pytest.approx(1 - even / slow)
    assert f"costs {shares[2]:.0%} of the step" in uneven.about(uneven.on(plan), machine)
    assert routing.routing_share(plan, machine) is None


@pytest.fixture
def steep(tmp_path):
    """Routing that gets more uneven with every degree."""
    return routing.measured(log(tmp_path / "run", {"max_over_mean": 60.0, **{f"ep{n}": float(n) * 0.9 for n in (2, 4, 8, 16)}}))


def asked(routes):
    return Question(MODELS[MOE], MOE, cluster("h200"), 16, 4096, 32, routing=routes)


def test_a_search_counts_with_each_layout_s_own_routing(steep):
    even, uneven = asked(None), asked(steep)
    first, other = (search(q, 1).choices[0] for q in (even, uneven))
    assert first.plan.imbalance == 1
    assert other.plan.imbalance == pytest.approx(1.0 if other.plan.ep == 1 else 0.9 * other.plan.ep)
    assert other.plan.ep < first.plan.ep
    assert any(w.startswith("imbalance=") for w in words(other.plan)) == (other.plan.imbalance != 1)


@pytest.mark.full
def test_a_search_that_leaves_out_layouts_counts_with_the_same_routing(steep):
    pruned, whole = (search(asked(steep), 3, prune=prune).choices for prune in (True, False))
    assert [c.plan for c in pruned] == [c.plan for c in whole]


@pytest.mark.parametrize("text", ["0.5", "2000", "1e3", "nowhere", "-1", "nan"])
def test_what_is_no_routing_is_refused(text):
    with pytest.raises(PlaybookError, match="imbalance"):
        routing.measured(text)


def test_lines_that_make_no_sense_are_left_out(tmp_path):
    spoilt = [{"max_over_mean": v} for v in (-1, 1e9, "2", None, True)] + [[1], 3, {"ep2": 1.5}]
    assert routing.of_run(tmp_path / log(tmp_path / "bad", *spoilt)) is None
    with pytest.raises(PlaybookError, match="no step with an expert_load"):
        routing.measured(str(tmp_path / "bad"))
    assert routing.measured(log(tmp_path / "some", *spoilt, LOAD)).ranks == {2: 1.05, 4: 1.2, 8: 1.5}
    with pytest.raises(PlaybookError, match="no experts"):
        check(Question(MODELS["qwen3_8b"], "qwen3_8b", cluster("h100"), 8, routing=routing.measured("1.2")))
