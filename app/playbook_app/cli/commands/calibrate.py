"""`playbook calibrate`: what one GPU reaches."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from playbook.errors import NO_TORCH, PlaybookError
from playbook_app.cli.options import commands

app = commands()


@app.command()
def calibrate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, such as h200.json.")],
    budget: Annotated[float, typer.Option(help="Seconds; kernels that do not fit are named in the file.")] = 300.0,
) -> None:
    """Measure what this GPU reaches on the kernels that a training step is made of, and what collectives take where there are several, or
    between the nodes of a job of Slurm (`srun --ntasks-per-node=8 playbook calibrate OUT`); about 80 seconds on an H200.
    """
    if find_spec("torch") is None:
        raise PlaybookError(NO_TORCH)
    from playbook_trainer.calibrate import main as measure

    raise typer.Exit(measure([str(out), "--budget", str(budget)]))
