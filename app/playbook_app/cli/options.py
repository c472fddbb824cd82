"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from playbook.errors import PlaybookError
from playbook.planner.shapes import DEEPEST, LARGEST

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")]

Wide = Annotated[bool, typer.Option("--wide", help="Every column, however narrow the terminal is.")]

# --- of runs ---------------------------------------------------------------------------------------------------------------------

Profile = Annotated[str | None, typer.Option(help="Machine class, such as cpu or h200x4; the largest that fits, if not given.")]
Results = Annotated[Path | None, typer.Option(help="Where evidence goes; .playbook/results, if not given.")]
Pairs = Annotated[int | None, typer.Option(help="At most this many pairs of launches; never more than the case names.")]
Budget = Annotated[str | None, typer.Option(help="At most this long, such as 90s, 10m or 1h.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the order of runs; random and recorded, if not given.")]
Slowdown = Annotated[str, typer.Option(metavar="PERCENT", help="A slowdown above it is a regression; noise never raises it.")]
Fork = Annotated[
    bool, typer.Option("--fork", help="Fork ranks from a process that has imported everything, instead of starting each afresh.")
]

# --- of hardware ------------------------------------------------------------------------------------------------------------------

Network = Annotated[str, typer.Option("--network", help="Between nodes: 100GbE, RoCE-200, IB-400, EFA-3200, or none, without InfiniBand.")]

Layers = Annotated[int | None, typer.Option("--layers", min=1, max=DEEPEST, help="Cut the model to so many layers, to try it on few GPUs.")]
Experts = Annotated[int | None, typer.Option("--experts", min=1, max=LARGEST, help="Cut a layer to so many experts.")]


def cuts(layers: int | None, experts: int | None) -> list[str]:
    """Both options as the words that a plan takes."""
    return [f"{key}={value}" for key, value in (("layers", layers), ("experts", experts)) if value is not None]


# --- of experts -------------------------------------------------------------------------------------------------------------------

Imbalance = Annotated[
    str,
    typer.Option(
        "--imbalance", metavar="RATIO|RUN", help="Measured routing: the fullest rank's tokens over the mean, or a run with moe.load_every."
    ),
]

# --- of jobs ---------------------------------------------------------------------------------------------------------------------

LauncherName = Annotated[
    str, typer.Option("--launcher", help="local; slurm, which submits a job; or srun, inside the allocation of a job.")
]
Nodes = Annotated[int | None, typer.Option(help="Number of nodes of the job; the cluster file's, if not given.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="File that describes the cluster; ./cluster.yaml, if there is one.")]
Print = Annotated[bool, typer.Option("--print", help="Print the job's script and submit nothing.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Submit the job and do not wait for it.")]
JobId = Annotated[str | None, typer.Option("--job", help="Wait for this earlier job instead of submitting one.")]
JournalFolder = Annotated[
    Path | None, typer.Option("--journal", help="Folder that keeps each finished run; given it again, a stopped command goes on.")
]


def commands(kind: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """The commands of a module: that of its name, or else a group of that name. `playbook_app.cli.app` has their lines of help."""
    return typer.Typer(cls=kind, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def to_seconds(budget: str | None, option: str = "--budget") -> float | None:
    """A time such as `90s`, `10m` or `1h` in seconds.

    Raises:
        PlaybookError: it is none of these.
    """
    if budget is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", budget)
    if match is None:
        raise PlaybookError(f"{option} is '{budget}'; expected a number and s, m or h, such as 10m")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def to_share(text: str, option: str) -> float:
    """A percentage such as `3%` or `0.5%` as a share.

    Raises:
        PlaybookError: it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", text)
    if match is None:
        raise PlaybookError(f"{option} is '{text}'; expected a percentage, such as 3%")
    return float(match[1]) / 100
