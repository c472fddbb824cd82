"""The shipped calibration of one GPU: what `playbook calibrate` wrote there."""

import json

import numpy as np
import pytest

from playbook.paths import repo_root
from playbook.planner.time.cluster import cluster

PEAK_FLOPS_PER_S = 989.5e12
MEMORY_BYTES_PER_S = 4.8e12


@pytest.fixture(scope="module")
def rows():
    return json.loads((repo_root() / "playbook" / "clusters" / "h200.json").read_text(encoding="utf-8"))["rows"]


def test_nothing_is_faster_than_the_data_sheet(rows):
    assert all(r["seconds"] > 0 for r in rows)
    assert all(r["flops_per_s"] < PEAK_FLOPS_PER_S * (2 if r["kind"] == "linear_fp8" else 1) for r in rows if "flops_per_s" in r)
    large = [r for r in rows if "bytes_per_s" in r and r.get("tokens", 1 << 30) * r.get("width", 1) > 1 << 26]
    assert large
    assert all(r["bytes_per_s"] < MEMORY_BYTES_PER_S for r in large)


def test_rates_follow_from_the_seconds_and_the_shape(rows):
    for r in rows:
        if r["kind"] == "linear":
            assert r["flops_per_s"] * r["seconds"] == pytest.approx(2 * r["tokens"] * r["wide_in"] * r["wide_out"], rel=1e-3)


def test_the_ring_between_two_gpus_is_the_one_that_was_measured():
    links = json.loads((repo_root() / "playbook" / "clusters" / "h200_links.json").read_text(encoding="utf-8"))["rows"]
    sent = np.array(
        [(r["bytes"] / 2, r["seconds"]) for r in links if r["operation"] in ("all_gather", "reduce_scatter") and r["bytes"] >= 1 << 20]
    )
    starts, per_byte = np.linalg.lstsq(np.stack([1 / sent[:, 1], sent[:, 0] / sent[:, 1]], axis=1), np.ones(len(sent)), rcond=None)[0]
    assert cluster("h200").rings[2] == pytest.approx((starts, 1 / per_byte), rel=0.02)
