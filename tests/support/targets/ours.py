"""Configurations of this trainer read back by its own checks, as `playbook train --dry-run` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from playbook.errors import PlaybookError
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import from_data
from playbook_trainer.data.tokenizer import load_tokenizer
from tests.support.targets.megatron import Export


def read_back(exports: Sequence[Export]) -> list[dict[str, Any]]:
    """What a dry run makes of each file; `error` where it refuses."""
    return [_read(export) for export in exports]


def _read(export: Export) -> dict[str, Any]:
    plan, _, found = export
    try:
        config = from_data(yaml.safe_load(found.files["plan.yaml"]), {}, "plan.yaml", {})
        report = dry_run(config, plan.gpus)
        load_tokenizer(config.data.tokenizer, config.model)
    except PlaybookError as e:
        return {"error": str(e)}
    train, routed = config.train, config.model.num_experts > 0
    kinds = {"full": ["full"], "selective": ["selective"] if config.backend == "torch" else sorted(train.recompute_modules), "none": []}
    return {
        **{k: report.layout[k] for k in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "mbs", "gbs", "seq_len")},
        **({} if routed else {"ep": 1, "etp": 1}),
        "chunks": config.parallel.pipeline_layout or [config.model.num_layers // (config.parallel.pp * config.parallel.vpp)] * (
            config.parallel.pp * config.parallel.vpp
        ),
        "recompute": kinds[train.recompute],
        "dispatcher": config.moe.dispatcher if routed else "",
    }  # fmt: skip
