"""What trainers on torch's FSDP2 share as targets of a plan: which options each has words for, the launcher's line, and the row of a table of runs."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import fields
from typing import Any

from playbook.errors import ConfigError
from playbook.planner.options import DEEPSPEED, Options
from playbook.planner.plan import Plan

_IDLE = frozenset({"backend", "overlap_p2p", "uneven"})
"""Options that need no words: the backend is asked for by itself, torch's pipelines overlap and are split as the plan says."""
_WIDTHS = {"grad_bytes": 4, "master_bytes": 4}
_GPUS_PER_NODE = {"gb": 4}
"""By how a kind of GPU begins; 8 for all others."""
_ROW = "model hardware gpus seq_len mbs gbs tp cp pp vpp ep etp fsdp dispatcher recompute routing backend offload task lora lora_targets"
RUNS = "run.csv"
"""The file with the run's row."""


def require(
    plan: Plan, release: str, expressed: Mapping[str, Container[Any]], lacks: Iterable[str], widths: Mapping[str, int] | None = None
) -> None:
    """Refuse what the target has no words for.

    `expressed` has by option the values that it can say; every other option must be at its default, and the bytes of each state as in `widths`. `lacks` are further reasons, each with what was asked,
    what the target has, and what to do.

    Raises:
        ConfigError: with all of them.
    """
    if plan.options.backend != "torch":
        raise ConfigError(
            f"the plan is for backend {plan.options.backend}, whose sharding and kernels {release} does not have; it has FSDP2: plan with --backend torch"
        )
    reasons = [
        f"{f.name} is {_shown(value)}; it has {_several(has)}: set one of them with --fix, or choose another target"
        for f in fields(Options)
        if f.name not in _IDLE and (value := getattr(plan.options, f.name)) not in (has := expressed.get(f.name, (f.default,)))
    ]
    reasons += [
        f"{k} is {getattr(plan, k)}; it has {n}: leave it out"
        for k, n in (_WIDTHS if widths is None else widths).items()
        if getattr(plan, k) != n
    ]
    reasons += list(lacks)
    if reasons:
        raise ConfigError(f"{release} cannot express this plan:\n" + "\n".join(f"  - {reason}" for reason in reasons))


def _several(values: Container[Any]) -> str:
    return " or ".join(map(_shown, values)) if isinstance(values, tuple) else "others"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else "unset" if value is None else str(value) or "none"


def plain(name: str) -> str:
    """A model's name in letters that mean nothing to Python or a shell; a file's name may have others."""
    return re.sub(r"[^\w.-]", "_", name[:80], flags=re.ASCII)


def gpus_per_node(hardware: str) -> int:
    """GPUs of one host of a kind."""
    return next((n for start, n in _GPUS_PER_NODE.items() if hardware.lower().startswith(start)), 8)


def nodes(plan: Plan, hardware: str) -> int:
    """Hosts that the plan takes."""
    return -(-plan.gpus // gpus_per_node(hardware))


def row_of(plan: Plan, hardware: str) -> str:
    """A table of runs with the plan as its one row, whose speed is still to be filled in; empty where the table has no words: a model
    that its name does not describe, routing that is uneven by a ratio, or how keys travel under CP.
    """
    from playbook.planner.models import MODELS

    if plan.model not in MODELS or MODELS[plan.model] != plan.shape or plan.imbalance != 1 or plan.options.cp_comm:
        return ""
    o = plan.options
    trainer = "deepspeed" if o.sharding in DEEPSPEED else o.backend if o.compiled else "accelerate"
    values = {
        "hardware": hardware, "gbs": plan.global_batch, "fsdp": plan.options.sharding, "recompute": "+".join(plan.options.recompute) or "none",
        "dispatcher": (plan.options.dispatcher or "alltoall") if plan.ep > 1 else "", "routing": "balanced" if plan.shape.experts and plan.even_rows else "", "backend": trainer,
        "offload": f"optimizer {o.optimizer_offload}%" if o.optimizer_offload else "", "task": "lora" if o.lora else "",
        "lora": o.lora or "", "lora_targets": "+".join(o.lora_targets),
    }  # fmt: skip
    cells = [str(values.get(name, getattr(plan, name, ""))) for name in _ROW.split()]
    return f"{','.join(_ROW.split())},tokens_per_s_per_gpu\n{','.join(cells)},\n"


def beside(plan: Plan, hardware: str, log: str) -> str:
    """How a run's log is set beside the prediction; `log` names the figure of it that counts."""
    if row_of(plan, hardware):
        return f"afterwards write {log} into the last cell of {RUNS}, and set it beside the prediction: playbook plan check {RUNS}"
    return f"set {log} beside the tokens/s/GPU that playbook plan prints"
