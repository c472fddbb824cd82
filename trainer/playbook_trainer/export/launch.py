"""A plan as something to start with another trainer: environment, files, and the command; and what trainers on torch's FSDP2 share as
targets of a plan: which options each has words for, the launcher's line, and the row of a table of runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from playbook.errors import ConfigError
from playbook.planner.models import MODELS
from playbook.planner.options import DEEPSPEED, Options
from playbook.planner.plan import Plan

STEPS = 20
"""Steps of an exported run: enough for a median behind the first ones, which are slower."""
LOG = "train.log"
"""Where a started script writes what the trainer prints."""
_LARGEST_NODE = 8
_PORT = 29500


@dataclass(frozen=True)
class Launchable:
    """All that starts one plan with one release of a trainer.

    Files are by name and are written beside the script. `command` is the whole launcher's line as words, which names those files;
    `torchrun` begins it.
    `notes` become comments above it: what is assumed. `beside` is the command that sets `log`, a file or a folder, beside the prediction.
    """

    target: str
    release: str
    environment: Mapping[str, str]
    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    log: str = LOG
    beside: str = ""

    def text(self, *, slurm: bool = False) -> str:
        """A shell script that writes the files and starts the run; with `slurm`, one for sbatch.

        A run of several nodes without Slurm is started on each of them, with the first one's name in HEAD.

        Raises:
            ConfigError: `slurm`, and the launcher is not torchrun, whose words say nodes and GPUs.
        """
        if slurm and self.command[0] != "torchrun":
            raise ConfigError(
                f"--slurm is not written for {self.target}, which {self.command[0]} starts; leave --slurm out, or choose another target"
            )
        named = dict(pairwise(self.command))
        nodes, gpus = int(named.get("--nnodes", "1")), int(named.get("--nproc-per-node", "1"))
        lines = ["#!/usr/bin/env bash", f"# for {self.release}"]
        if slurm:
            lines[1:1] = [
                f"#SBATCH --nodes={nodes}",
                "#SBATCH --ntasks-per-node=1",
                f"#SBATCH --gpus-per-node={gpus}",
                f"#SBATCH --output={LOG}",
            ]
        elif nodes > 1:
            lines.append(f"# start it on each of {nodes} nodes, with HEAD=the name of the first")
        lines += [*(f"# {note}" for note in self.notes), "set -euo pipefail"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        for name, content in self.files.items():
            lines += [f"cat > {shlex.quote(name)} <<'END'", content.rstrip("\n"), "END"]
        if slurm and nodes > 1:
            lines.append('HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        meet = f'--rdzv-backend c10d --rdzv-endpoint "$HEAD:{_PORT}"' if nodes > 1 else ""
        lines.append(("srun " if slurm else "") + _wrapped(self.command, meet) + ("" if slurm else f" 2>&1 | tee {LOG}"))
        return "\n".join([*lines, *([f"# beside the prediction: {self.beside}"] if self.beside else [])]) + "\n"


def torchrun(gpus: int) -> tuple[str, ...]:
    """The launcher's words for a job: one node where they fit, else nodes of as many GPUs as divide them, 8 at most."""
    each = max(n for n in range(1, _LARGEST_NODE + 1) if gpus % n == 0)
    return ("torchrun", *(("--nnodes", str(gpus // each)) if gpus > each else ()), "--nproc-per-node", str(each))


def chosen(*parts: tuple[object, Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of the parts whose condition holds."""
    return {name: value for holds, fields in parts if holds for name, value in fields.items()}


def refuse(target: str, reasons: Iterable[str]) -> None:
    """End with everything that a target cannot express.

    Raises:
        ConfigError: there is anything.
    """
    text = "; ".join(reasons)
    if text:
        raise ConfigError(f"{target} cannot express this plan: {text}. Choose another target, or another plan with --fix")


def by_flag(words: Iterable[str]) -> list[str]:
    """The words as a shell takes them, each flag with its values in one line."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and groups[-1]:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    return [" ".join(group) for group in groups]


def _wrapped(words: tuple[str, ...], meet: str = "") -> str:
    """One flag a line, each line but the last continued; `meet` is how the nodes find each other, behind the launcher's name."""
    lines = by_flag(words)
    return " \\\n  ".join([lines[0], *([meet] if meet else []), *lines[1:]])


_IDLE = frozenset({"backend", "overlap_p2p", "uneven"})
"""Options that need no words: the backend is asked for by itself, torch's pipelines overlap and are split as the plan says."""
_WIDTHS = {"grad_bytes": 4, "master_bytes": 4}
_ROW = "model hardware gpus seq_len mbs gbs tp cp pp vpp ep etp fsdp dispatcher recompute routing backend offload task lora lora_targets"
LOSSES = ("torch", "compiled")
"""How trainers on torch's FSDP2 compute the loss."""
_RUNS = "run.csv"
"""The file with the run's row."""


def require(
    plan: Plan, release: str, expressed: Mapping[str, Container[Any]], lacks: Iterable[str], widths: Mapping[str, int] | None = None
) -> None:
    """Refuse what the target has no words for.

    `expressed` has by option the values that it can say; every other option must be at its default, and the bytes of each state as in
    `widths`. `lacks` are further reasons, each with what was asked, what the target has, and what to do.

    Raises:
        ConfigError: with all of them.
    """
    if plan.options.backend != "torch":
        raise ConfigError(
            f"the plan is for backend {plan.options.backend}, whose sharding and kernels {release} does not have; it has FSDP2: plan with "
            "--backend torch"
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
    return 4 if hardware.lower().startswith("gb") else 8


def nodes(plan: Plan, hardware: str) -> int:
    """Hosts that the plan takes."""
    return -(-plan.gpus // gpus_per_node(hardware))


def table_of(plan: Plan, hardware: str) -> dict[str, str]:
    """The file of a table of runs with the plan as its one row, whose speed is still to be filled in; none where the table has no words:
    a model that its name does not describe, routing that is uneven by a ratio, or how keys travel under CP.
    """
    if plan.model not in MODELS or MODELS[plan.model] != plan.shape or plan.imbalance != 1 or plan.options.cp_comm:
        return {}
    o = plan.options
    trainer = "deepspeed" if o.sharding in DEEPSPEED else o.backend if o.compiled else "accelerate"
    values = {
        "hardware": hardware, "gbs": plan.global_batch, "fsdp": plan.options.sharding,
        "recompute": "+".join(plan.options.recompute) or "none",
        "dispatcher": (plan.options.dispatcher or "alltoall") if plan.ep > 1 else "",
        "routing": "balanced" if plan.shape.experts and plan.even_rows else "", "backend": trainer,
        "offload": f"optimizer {o.optimizer_offload}%" if o.optimizer_offload else "", "task": "lora" if o.lora else "",
        "lora": o.lora or "", "lora_targets": "+".join(o.lora_targets),
    }  # fmt: skip
    cells = [str(values.get(name, getattr(plan, name, ""))) for name in _ROW.split()]
    return {_RUNS: f"{','.join(_ROW.split())},tokens_per_s_per_gpu\n{','.join(cells)},\n"}


def beside(plan: Plan, hardware: str, log: str) -> str:
    """How a run's log is set beside the prediction; `log` names the figure of it that counts."""
    if table_of(plan, hardware):
        return f"afterwards write {log} into the last cell of {_RUNS}, and set it beside the prediction: playbook plan check {_RUNS}"
    return f"set {log} beside the tokens/s/GPU that playbook plan prints"
