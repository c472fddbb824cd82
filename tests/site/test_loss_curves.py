"""Curves are compared with the spread of repeats, and the page shows every run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from playbook_app.site.curves import distance, distances, section
from playbook_app.site.reference import CURVES, parity_page


def row(run: str, repeat: int, *loss: float) -> dict[str, Any]:
    return {"run": run, "repeat": repeat, "ranks": 4, "loss": list(loss), "torch": "2.11.0", "megatron": "0.19.2"}


ROWS = [row("fsdp", 0, 3.0, 2.0), row("fsdp", 1, 3.0, 2.2), row("3d", 0, 3.0, 2.3), row("3d", 1, 3.0, 2.4), row("ep", 0, 3.0, 2.1)]


def test_distance_is_the_root_mean_square() -> None:
    assert distance([3.0, 2.0], [3.0, 2.4]) == pytest.approx((0.16 / 2) ** 0.5)


def test_repeats_are_compared_with_each_other_and_ways_with_ways() -> None:
    within, across = distances(ROWS)
    assert within == pytest.approx(0.2 / 2**0.5)
    assert across == {
        "3d and fsdp": pytest.approx(0.4 / 2**0.5),
        "3d and ep": pytest.approx(0.3 / 2**0.5),
        "ep and fsdp": pytest.approx(0.1 / 2**0.5),
    }


def test_the_page_draws_every_run_and_names_the_distances(tmp_path: Any) -> None:
    (tmp_path / CURVES).write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    page = parity_page(tmp_path)
    assert page.count("<polyline") == len(ROWS)
    assert "| 3d and fsdp | 2.8e-01 | 2.00 |" in page
    assert "5 runs" in page
    assert "at most 0.200" in page  # from the mean of all runs, which goes from 3 to 2.2
    second = [line.split('points="')[1].split('"')[0] for line in page.split("<polyline")[1:]]
    assert [points.split(",")[-1] for points in second] == ["216.0", "114.0", "63.0", "12.0", "165.0"]


def test_series_stand_apart_and_say_what_their_repeats_are() -> None:
    nudged = [{**row("fsdp", i, 3.0, 2.0 + i / 10), "ranks": 2, "lr": 1e-3 * (1 + i * 1e-6)} for i in range(2)]
    alike = [{**r, "megatron": "0.16.1"} for r in (row("3d", 0, 3.0, 2.3), row("3d", 1, 3.0, 2.3), row("ep", 0, 3.0, 2.1))]
    shared = [{**row("3d", i, 3.0, 2.3), "gpus": 1, "weights": "bf16"} for i in range(2)]
    page = "\n".join(section([*ROWS, *nudged, *shared, *alike]))
    assert page.count("## Training side by side") == 1
    assert page.count("### 2 steps on 4 GPUs") == 2
    in_turns = page.split("### 2 steps by 4 ranks in turns on one GPU\n")[1].split("###")[0]
    assert "2 runs" in in_turns
    assert "Made before" not in in_turns
    assert page.count("Made before both backends began with the same") == 3
    assert "differ by a millionth" in page.split("### 2 steps on 2 GPUs, rates a millionth apart\n")[1].split("###")[0]
    assert "Repeats of 3d are equal to the last bit" in page.split("###")[-1]
    assert "fsdp and 3d" not in page.split("###")[-1]


def test_without_rows_the_page_says_nothing() -> None:
    assert section([]) == []


def test_a_run_that_diverged_is_infinitely_far() -> None:
    _, across = distances([*ROWS, row("tp", 0, 3.0, float("nan"))])
    assert across["fsdp and tp"] == float("inf")
    assert "| fsdp and tp | inf |" in "\n".join(section([*ROWS, row("tp", 0, 3.0, float("nan"))]))
