"""The host of experts whose rows differ: searches for kernels are spared where a size comes again within a step."""

import json
from dataclasses import replace
from math import log
from statistics import fmean, median

from playbook.paths import repo_root
from playbook.planner.plan import parse
from playbook.planner.time.cluster import cluster
from playbook.planner.time.layer import searched
from playbook.planner.time.step import step_time
from playbook_trainer.config import dry_run, tree

PARITY = repo_root() / "docs" / "parity"
SPREAD = 0.17
"""Root of the mean square of the logarithm of predicted over measured that the fitted law keeps."""


def plan(*words):
    return replace(parse("qwen3_30b_a3b", ["gpus=4", "imbalance=1.0", *words]), even_rows=False)


def test_more_products_search_less_and_more_rows_more():
    steps = [searched(plan("ep=4", f"gbs={gbs}")) for gbs in (8, 32, 128, 512)]
    assert 1 > steps[0] > steps[1] > steps[2] > steps[3] > 0
    rows = [searched(plan("ep=4", f"mbs={mbs}", "gbs=512")) for mbs in (1, 2, 4)]
    assert rows[0] < rows[1] < rows[2]
    assert searched(plan("ep=2", "gbs=64")) < searched(plan("ep=4", "gbs=64"))
    assert searched(parse("qwen3_30b_a3b", ["gpus=4", "ep=4"])) == searched(parse("qwen3_8b", ["gpus=4"])) == 0


def test_a_search_costs_the_host_and_never_less_than_none():
    machine = cluster("h200")
    for words in (("ep=4", "gbs=16"), ("pp=2", "ep=2", "gbs=16"), ("tp=2", "etp=2", "gbs=16")):
        uneven = plan(*words)
        assert step_time(uneven, machine).parts["host"] > step_time(replace(uneven, even_rows=True), machine).parts["host"]


def measured():
    """Runs of text with experts on megatron-core and H200s: each configuration's settings, its GPUs and its tokens per second and GPU."""
    registered = {
        f"{r['gpus']}/{r['model']}/{r['layout']}": r
        for r in map(json.loads, (PARITY / "planned-layouts.jsonl").read_text(encoding="utf-8").splitlines())
        if r.get("hardware", "h200") == "h200"
    }
    shown = {}
    for row in map(json.loads, (PARITY / "planned-layouts-runs.jsonl").read_text(encoding="utf-8").splitlines()):
        if row["outcome"] == "ok" and not row["rehearsed"] and "/moe" in row["name"] and "fsdp2" not in row["name"]:
            shown.setdefault(row["name"], []).append(row["tokens_per_s_per_gpu"])
    return [(registered[n]["settings"], registered[n]["gpus"], median(v)) for n, v in shown.items() if n in registered]


def test_runs_with_uneven_experts_are_predicted_as_closely_as_the_law_was_fitted(monkeypatch):
    runs = measured()
    assert len(runs) >= 10

    def spread():
        times = [dry_run.predicted(tree.load(repo_root() / "trainer/configs/planned.yaml", s), g, cluster("h200")) for s, g, _ in runs]
        return fmean(log(t.tokens_per_s_per_gpu.value / m) ** 2 for t, (_, _, m) in zip(times, runs, strict=True)) ** 0.5

    assert spread() < SPREAD
    for share in (0.0, 1.0):  # neither an even routing nor a search for each product says it as well
        monkeypatch.setattr("playbook.planner.time.layer.searched", lambda _, share=share: share)
        assert spread() > 1.3 * SPREAD
