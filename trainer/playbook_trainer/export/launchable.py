"""A plan as something to start with another trainer: environment, files, and the command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from playbook.errors import ConfigError

LOG = "train.log"
"""Where a started script writes what the trainer prints."""
_LARGEST_NODE = 8
_PORT = 29500


@dataclass(frozen=True)
class Launchable:
    """All that starts one plan with one release of a trainer.

    Files are by name and are written beside the script. `command` is the whole launcher's line as words, which names those files; `torchrun` begins it.
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
        nodes, gpus = _nodes(self.command)
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


def refuse(target: str, reasons: Iterable[str]) -> None:
    """End with everything that a target cannot express.

    Raises:
        ConfigError: there is anything.
    """
    found = "; ".join(reasons)
    if found:
        raise ConfigError(f"{target} cannot express this plan: {found}. Choose another target, or another plan with --fix")


def _nodes(command: tuple[str, ...]) -> tuple[int, int]:
    """Nodes and GPUs of each, as the launcher's words have them."""
    named = dict(pairwise(command))
    return int(named.get("--nnodes", "1")), int(named.get("--nproc-per-node", "1"))


def _wrapped(words: tuple[str, ...], meet: str = "") -> str:
    """One flag a line, each line but the last continued; `meet` is how the nodes find each other, behind the launcher's name."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and groups[-1]:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    lines = [" ".join(group) for group in groups]
    return " \\\n  ".join([lines[0], *([meet] if meet else []), *lines[1:]])
