"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from playbook.errors import PlaybookError

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")]

# --- of runs ---------------------------------------------------------------------------------------------------------------------

Profile = Annotated[str | None, typer.Option(help="Machine class, such as cpu or h200x4; the largest that fits, if not given.")]
Results = Annotated[Path | None, typer.Option(help="Where evidence goes; .playbook/results, if not given.")]
Pairs = Annotated[int | None, typer.Option(help="At most this many pairs of launches; never more than the case names.")]
MorePairs = Annotated[int | None, typer.Option(help="At most this many pairs of launches; more than the case names add looks.")]
Budget = Annotated[str | None, typer.Option(help="At most this long, such as 90s, 10m or 1h.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the order of runs; random and recorded, if not given.")]
Fork = Annotated[
    bool, typer.Option("--fork", help="Fork ranks from a process that has imported everything, instead of starting each afresh.")
]

# --- of hardware ------------------------------------------------------------------------------------------------------------------

Network = Annotated[str, typer.Option("--network", help="Between nodes: 100GbE, RoCE-200, IB-400, EFA-3200, or none, without InfiniBand.")]

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


def commands() -> typer.Typer:
    """An empty group of commands; `playbook.cli.app` has its line of help."""
    return typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def seconds(budget: str | None, option: str = "--budget") -> float | None:
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


def tokens(text: str | int) -> int:
    """The value of `--seq`, as tables of runs spell it: `131072`, `131,072`, `128K` or `1M`.

    Raises:
        BadParameter: it is no whole number from 1.
    """
    return _whole("seq_len", str(text), "tokens of a sequence, such as 4096, 128K or 1M")


def machines(gpus: str | None, hardware: str | None) -> tuple[int | None, str | None]:
    """How many GPUs, and of which kind: `64` and `h100`, or both in one, as `64xH100` in either option; a kind may be a file.

    Raises:
        BadParameter: `gpus` is no whole number from 1.
        ConfigError: the two contradict each other, or name a GPU that is not known.
    """
    from playbook.planner.hardware.named import counted, machine

    kind, number = (None, None) if hardware is None else counted(hardware)
    if gpus is None:
        return number, kind
    named, _, more = gpus.lower().partition("x")
    found = _whole("gpus", named.strip(), "a number of GPUs, such as 64 or 64xH100")
    if more and kind and machine(more).name != machine(kind).name:
        raise PlaybookError(f"--gpus {gpus[:40]} and --hardware {kind[:40]} name two kinds of GPU; expected one, or leave one of them out")
    if number not in (None, found):
        raise PlaybookError(f"--gpus says {found} GPUs, and --hardware {number}; expected the same number, or leave one of them out")
    return found, kind or more.strip() or None


def _whole(column: str, text: str, expected: str) -> int:
    from playbook.planner.runs.spelling import said

    number = said(column, text)
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 1 << 30):
        raise typer.BadParameter(f"found '{text[:40]}', expected {expected}")
    return int(number)


def percent(text: str | float) -> float:
    """The value of `--mfu`: `25` or `25%`.

    Raises:
        BadParameter: it is no number.
    """
    return _figure(str(text).strip().removesuffix("%"), "percent of the peak, such as 25 or 25%")


def figure(text: str | float) -> float:
    """A measured figure, such as `11000` or `11,000`.

    Raises:
        BadParameter: it is no number.
    """
    return _figure(str(text), "a number, such as 11000 or 11,000")


def _figure(text: str, expected: str) -> float:
    from playbook.planner.runs.spelling import number

    try:
        return float(number(text.strip()))
    except ValueError:
        raise typer.BadParameter(f"found '{text[:40]}', expected {expected}") from None


def share(text: str, option: str) -> float:
    """A percentage such as `3%` or `0.5%` as a share.

    Raises:
        PlaybookError: it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", text)
    if match is None:
        raise PlaybookError(f"{option} is '{text}'; expected a percentage, such as 3%")
    return float(match[1]) / 100
