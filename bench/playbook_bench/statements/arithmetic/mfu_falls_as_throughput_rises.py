"""FP8 beside BF16: faster, at a lower MFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook_bench.judge.verdict import Statement


def mfu_falls_as_throughput_rises(*, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether each published pair of runs is faster in FP8 and shows a lower MFU, because the peak that it is divided by doubles.

    A row has: model, gpu, `bf16_tflops` and `fp8_tflops` (model FLOPs per second and GPU), `bf16_peak` and `fp8_peak`.
    """
    found = [
        {
            **row,
            "gain": row["fp8_tflops"] / row["bf16_tflops"] - 1,
            "bf16_mfu": row["bf16_tflops"] / row["bf16_peak"],
            "fp8_mfu": row["fp8_tflops"] / row["fp8_peak"],
        }
        for row in rows
    ]
    parts = [f"{r['model']} on {r['gpu']}: {r['gain']:+.1%} throughput, MFU {r['bf16_mfu']:.1%} -> {r['fp8_mfu']:.1%}" for r in found]
    return bool(found) and all(r["gain"] > 0 and r["fp8_mfu"] < r["bf16_mfu"] for r in found), "; ".join(parts), {"rows": found}
