"""The fewest GPUs of published long-context layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.planner.layout import grid, min_gpus
from playbook.planner.models import MODELS
from playbook_bench.judge.verdict import Statement


def min_gpus_families(*, families: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether each published long-context layout needs at least the GPUs that it names, and which ones need uneven pipelines.

    A family has: model (a key of `playbook.planner.shapes.MODELS`), seq_len, gpus (as published), uneven (as published), and the degrees.
    """
    rows = []
    for family in families:
        degrees = {k: int(family.get(k, 1)) for k in ("pp", "tp", "cp", "ep", "etp")}
        chunks = degrees["pp"] * int(family.get("vpp", 1))
        layers = MODELS[family["model"]].layers
        need = min_gpus(**degrees)
        rows.append(
            {
                "model": family["model"],
                "seq_len": family["seq_len"],
                "gpus": need,
                "layers": layers,
                "chunks": chunks,
                "uneven": bool(layers % chunks),
                "agrees": need == family["gpus"] and bool(layers % chunks) == family["uneven"] and not grid(gpus=need, **degrees),
            }
        )
    parts = [
        f"{r['model']} at {r['seq_len']} tokens needs {r['gpus']} GPUs"
        + (f" and splits {r['layers']} layers unevenly over {r['chunks']} chunks" if r["uneven"] else "")
        for r in rows
    ]
    return bool(rows) and all(r["agrees"] for r in rows), "; ".join(parts), {"families": rows}
