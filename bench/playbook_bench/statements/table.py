"""Cases without runs: arithmetic of shapes and layouts, and rules that the harness enforces on itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from playbook.errors import ConfigError
from playbook.lint import labels
from playbook.planner import layout, traffic
from playbook.records.case import Case
from playbook.yaml_files import did_you_mean
from playbook_bench.statements import arithmetic, invariants, number_formats, short_runs, utilization

Statement = tuple[bool, str, dict[str, Any]]
Function = Callable[..., Statement]

ARITHMETIC: Mapping[str, Function] = {
    "dp_floor": layout.dp_floor,
    "batch_pressure": layout.batch_pressure,
    "min_gpus_families": layout.min_gpus_families,
    "hot_inside": traffic.hot_inside,
    "refused_together": labels.refused_together,
    "vision_left_out": utilization.vision_left_out,
    "published_utilization": utilization.published_utilization,
    "interleaving": arithmetic.interleaving,
    "platform_walls": arithmetic.platform_walls,
    "offload_makes_it_fit": arithmetic.offload_makes_it_fit,
    "mfu_falls_as_throughput_rises": arithmetic.mfu_falls_as_throughput_rises,
    "rows_per_rank": arithmetic.rows_per_rank,
    "coarser": number_formats.coarser,
    "routing_flips": number_formats.routing_flips,
}
INVARIANTS: Mapping[str, Function] = {
    "unequal_work_is_refused": invariants.unequal_work_is_refused,
    "bisect_finds_the_commit": invariants.bisect_finds_the_commit,
    "tracker_gets_configuration": short_runs.tracker_gets_configuration,
    "finetune_saves_and_evaluates": short_runs.finetune_saves_and_evaluates,
    "layouts_are_judged_by_dry_run": invariants.layouts_are_judged_by_dry_run,
}


def run(case: Case) -> Statement:
    """Whether the case's statement holds, the sentence that says so, and the figures behind it.

    Raises:
        ConfigError: the function is not in the table, or its arguments do not fit.
    """
    table = ARITHMETIC if case.kind == "arithmetic" else INVARIANTS
    name = case.function or ""
    if name not in table:
        raise ConfigError(f"case '{case.id}': function '{name}' is not known{did_you_mean(name, table)}")
    try:
        holds, sentence, figures = table[name](**case.arguments)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
        raise ConfigError(f"case '{case.id}': {name} does not take these arguments: {type(e).__name__}: {e}") from e
    return bool(holds), sentence, json.loads(json.dumps(figures))
