"""What a count of FLOPs leaves out, and what a published rate amounts to."""

from __future__ import annotations

import pytest

from playbook.planner import flops
from playbook.planner.models import MODELS
from playbook_bench.statements.utilization import published_runs_predicted, published_utilization, vision_left_out

PHOTO = {"images": [[480, 640]], "text_tokens": 100}


def test_the_share_is_the_tower_over_tower_and_decoder() -> None:
    holds, sentence, figures = vision_left_out(model="qwen3_vl_30b_a3b", samples=[PHOTO], at_least=0.05, at_most=0.15)
    row = figures["rows"][0]
    assert (row["patches"], row["tokens"]) == (30 * 40, 100 + 300)
    shape = MODELS["qwen3_vl_30b_a3b"]
    tower = 3 * sum(flops.vision_forward(shape.vision, shape.hidden, 1200, 1200**2).values())
    assert row["left_out"] == pytest.approx(tower / (tower + 400 * flops.per_token(shape, 400)))
    assert holds is (0.05 <= row["left_out"] <= 0.15)
    assert f"{row['left_out']:.0%}" in sentence


def test_the_bounds_decide() -> None:
    for low, high, expected in ((0.0, 1.0, True), (0.0, 0.01, False), (0.9, 1.0, False)):
        assert vision_left_out(model="qwen3_vl_30b_a3b", samples=[PHOTO, PHOTO], at_least=low, at_most=high)[0] is expected


def test_text_alone_leaves_nothing_out_and_a_text_model_is_refused() -> None:
    assert vision_left_out(model="qwen3_vl_30b_a3b", samples=[{"images": [], "text_tokens": 50}], at_least=0, at_most=0)[0]
    with pytest.raises(ValueError, match="no model with a vision tower"):
        vision_left_out(model="qwen3_30b_a3b", samples=[PHOTO], at_least=0, at_most=1)


def test_a_peak_belongs_to_a_whole_name() -> None:
    found = {name: flops.dense_bf16(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA RTX A1000 Laptop GPU")}
    assert [p and p.flops_per_s for p in found.values()] == [312e12, 989.5e12, None]


def test_a_published_rate_is_a_share_of_the_peak() -> None:
    row = {"gpu": "GB200", "tflops_per_gpu": 500}
    holds, sentence, _ = published_utilization(rows=[row], at_least=0.15, at_most=0.25)
    assert holds
    assert "20.0%" in sentence
    assert not published_utilization(rows=[row], at_least=0.21, at_most=0.25)[0]
    with pytest.raises(ValueError, match="not in the table"):
        published_utilization(rows=[{"gpu": "Z1", "tflops_per_gpu": 1}], at_least=0, at_most=1)


def test_the_published_runs_are_predicted_as_well_as_the_bounds_say() -> None:
    held, _, figures = published_runs_predicted(leave_one_out=False, bounds={"median_error": [0, 1], "covered": [0, 1]})
    assert held
    assert figures["runs"] > 250
    for name in ("median_error", "covered"):
        value = figures[name]["value"]
        assert not published_runs_predicted(leave_one_out=False, bounds={name: [0, 0.99 * value]})[0]
        assert not published_runs_predicted(leave_one_out=False, bounds={name: [1.01 * value, 1]})[0]
