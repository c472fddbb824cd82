"""Pipeline arithmetic: layers per chunk, microbatches in flight, bubble."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playbook.errors import ConfigError
from playbook.planner import pipeline


def simulated(pp: int, stage: int, m: int, v: int) -> int:
    """Chunks alive at the peak when warm-up forwards come first and then forwards and backwards alternate."""
    warm = min(m * v, (2 * (pp - stage - 1) + (v - 1) * pp) if v > 1 else pp - stage - 1)
    alive = most = warm
    for _ in range(m * v - warm):
        alive += 1
        most = max(most, alive)
        alive -= 1
    return most


@given(pp=st.integers(2, 8), m=st.integers(1, 24), v=st.integers(1, 4), data=st.data())
def test_in_flight_is_the_peak_of_the_schedule(pp, m, v, data):
    stage = data.draw(st.integers(0, pp - 1))
    alive = pipeline.in_flight(pp=pp, stage=stage, microbatches=m, vpp=v)
    assert len(alive) == v
    assert sum(alive) == simulated(pp, stage, m, v)
    assert all(0 <= n <= m for n in alive)
    if stage:
        assert sum(alive) <= sum(pipeline.in_flight(pp=pp, stage=stage - 1, microbatches=m, vpp=v))


def heaviest(pp: int, stage: int, m: int, sizes: list[int], overlap: bool = False) -> int:
    """The most that is held at any time, forward by forward and backward by backward; overlap puts one more forward first."""
    v = len(sizes)
    forwards = [chunk for _ in range(m // pp) for chunk in range(v) for _ in range(pp)]
    backwards = [v - 1 - chunk for chunk in forwards]
    warm = min(m * v, 2 * (pp - stage - 1) + (v - 1) * pp + overlap)
    now = most = sum(sizes[c] for c in forwards[:warm])
    for forth, back in zip(forwards[warm:], backwards, strict=False):
        now += sizes[forth]
        most = max(most, now)
        now -= sizes[back]
    return most


@given(
    pp=st.integers(2, 6), groups=st.integers(1, 5), sizes=st.lists(st.integers(0, 5), min_size=2, max_size=4), overlap=st.booleans(), data=st.data()
)  # fmt: skip
def test_chunks_of_different_size_peak_when_the_large_ones_are_held(pp, groups, sizes, overlap, data):
    stage, m = data.draw(st.integers(0, pp - 1)), pp * groups
    alive = pipeline.in_flight(pp=pp, stage=stage, microbatches=m, vpp=len(sizes), sizes=sizes, overlap=overlap)
    assert sum(n * size for n, size in zip(alive, sizes, strict=True)) == heaviest(pp, stage, m, sizes, overlap)
    assert sum(alive) == min(m * len(sizes), simulated(pp, stage, m, len(sizes)) + overlap)
    assert all(0 <= n <= m for n in alive)


def test_many_microbatches_are_not_listed_one_by_one():
    assert sum(pipeline.in_flight(pp=8, stage=0, microbatches=1 << 30, vpp=4)) == 14 + 24 + 1


def test_of_equal_peaks_the_first_is_told():
    """The page's script tells the same one."""
    assert pipeline.in_flight(pp=7, stage=4, microbatches=9, vpp=3, sizes=[3, 1, 1]) == [9, 7, 3]


def dealt(layers: int, chunks: int) -> list[int]:
    """Layers per part of a row of embedding, layers and output layer that is cut as evenly as it goes, longer parts first."""
    row = ["embedding", *["layer"] * layers, "output"]
    return [list(part).count("layer") for part in np.array_split(row, chunks)]


@given(layers=st.integers(1, 100), pp=st.integers(1, 16), vpp=st.integers(1, 4))
def test_chunks_hold_every_layer_once(layers, pp, vpp):
    if layers % (pp * vpp) and pp * vpp > layers + 2:
        with pytest.raises(ConfigError, match=f"do not fill {pp * vpp} chunks; expected at most {layers + 2}"):
            pipeline.split(layers, pp, vpp)
        return
    sizes = pipeline.split(layers, pp, vpp)
    assert len(sizes) == pp * vpp
    assert min(sizes) >= 0
    assert sorted(i for s in range(pp) for chunk in pipeline.indices(sizes, pp, s) for i in chunk) == list(range(layers))
    chunks = pp * vpp
    assert sizes == ([layers // chunks] * chunks if layers % chunks == 0 else dealt(layers, chunks))


@given(pp=st.integers(1, 32), m=st.integers(1, 512), v=st.integers(1, 8))
@settings(max_examples=60)
def test_the_bubble_shrinks_with_microbatches_and_chunks(pp, m, v):
    share = pipeline.bubble(pp=pp, microbatches=m, vpp=v)
    assert 0 <= share < 1
    assert (share == 0) is (pp == 1)
    assert pipeline.bubble(pp=pp, microbatches=m + 1, vpp=v) <= share
    assert pipeline.bubble(pp=pp, microbatches=m, vpp=v + 1) <= share
    assert share * (v * m + pp - 1) == pytest.approx(pp - 1)
