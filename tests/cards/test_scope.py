"""Scopes: predicates over facts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from playbook.cards import scope

H200 = {"gpus": 4, "gpu": "NVIDIA H200", "interconnect": "nvlink", "ep": 4, "vision": False, "backend": "torch"}


@pytest.mark.parametrize(
    ("predicate", "met"),
    [
        (4, True),
        (3, False),
        (">=2", True),
        (">=5", False),
        ("<= 4", True),
        (">4", False),
        ("<4", False),
        ("==4", True),
        ("4", True),
        ("2..8", True),
        ("4..4", True),
        ("5..8", False),
        ([1, 4], True),
        ([1, ">=8"], False),
        ([1, "3..8"], True),
    ],
)
def test_number_predicates(predicate, met):
    assert (scope.unmet({"gpus": predicate}, H200) == []) is met


@pytest.mark.parametrize(
    ("predicate", "device", "met"),
    [
        ("H200", "NVIDIA H200", True),
        ("h100|h200", "NVIDIA H200", True),
        (["H100", "B200"], "NVIDIA H200", False),
        ("B200", "NVIDIA GB200", False),  # another machine, although the name contains the other
        ("GB200|GB300", "NVIDIA GB200", True),
        ("GB200 NVL72", "NVIDIA GB200", False),  # all words of a part, not one of them
        ("H100", "NVIDIA H100 80GB HBM3", True),
    ],
)
def test_word_predicates_match_whole_words(predicate, device, met):
    assert (scope.unmet({"gpu": predicate}, {"gpu": device}) == []) is met


def test_unmet_says_what_was_found_and_expected():
    assert scope.unmet({"gpus": ">=8", "interconnect": "nvlink", "vision": True}, H200) == [
        "gpus: found 4, expected >=8",
        "vision: found False, expected True",
    ]
    assert scope.unmet({"gpu": "H100|B200"}, {}) == ["gpu: found nothing, expected H100 or B200"]


def test_waived_keys_are_not_asked():
    assert scope.unmet({"gpus": ">=2", "ep": "2..8"}, {"gpus": 0, "ep": 1}, waive=scope.MACHINE_KEYS) == ["ep: found 1, expected 2..8"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"gpu_count": 2}, "unknown scope key 'gpu_count'"),
        ({"nods": 2}, "did you mean 'nodes'"),
        ({"gpus": "many"}, "expected a number, '>=2' or '2..8', found 'many'"),
        ({"gpus": "8..2"}, "is empty"),
        ({"gpus": True}, "expected a number"),
        ({"gpus": []}, "empty list"),
        ({"gpus": [[1]]}, "do not nest"),
        ({"vision": "yes"}, "expected true or false"),
        ({"gpus": float("nan")}, "expected a number"),
        ({"gpus": [2, float("inf")]}, "expected a number"),
        ({"gpu": "|"}, "expected words"),
        ({"gpu": 200}, "expected words"),
    ],
)
def test_faults_are_found_and_never_ignored(bad, says):
    messages = [m for _, m in scope.problems(bad)]
    assert len(messages) == 1
    assert says in messages[0]
    with pytest.raises(ValueError, match="scope"):
        scope.unmet(bad, H200)


@given(low=st.integers(0, 64), span=st.integers(0, 64), found=st.integers(0, 200))
def test_a_range_equals_its_two_bounds(low, span, found):
    both = scope.unmet({"gpus": f">={low}"}, {"gpus": found}) + scope.unmet({"gpus": f"<={low + span}"}, {"gpus": found})
    assert bool(both) == bool(scope.unmet({"gpus": f"{low}..{low + span}"}, {"gpus": found}))


@example(1e22)
@example(1e-7)
@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.text(max_size=4), max_size=3)))
def test_any_predicate_is_either_a_fault_or_an_answer(predicate):
    for key in ("gpus", "gpu", "vision"):
        if not scope.problems({key: predicate}):
            assert isinstance(scope.unmet({key: predicate}, H200), list)
