"""`playbook preflight`: every GPU and link of a job, before the job."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated

import typer

from playbook.errors import NO_TORCH, ConfigError, ExitCode, PlaybookError
from playbook.planner.hardware import machine as named
from playbook.planner.time.cluster import Cluster
from playbook.text import count
from playbook_app.cli.options import AsJson, commands
from playbook_app.cli.output import complain, print_json, print_table, say
from playbook_bench.machine import detect
from playbook_bench.machine import preflight as judge

app = commands()


@app.command()
def preflight(
    hardware: Annotated[
        str | None, typer.Option(help="Kind of GPU to compare with, such as h100, or a calibration's file; this machine's, if not given.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long the product runs; the whole check takes about five times as long.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check every GPU of this machine, or of all nodes of a job of Slurm (`srun --ntasks-per-node=8 playbook preflight`): products,
    memory, host, copies and links beside what this kind of GPU reaches, and beside one another. Exit code 1 if one is slow.
    """
    if find_spec("torch") is None:
        raise PlaybookError(NO_TORCH)
    machine = detect.detect()
    kind = _kind(hardware, machine.gpu)
    from playbook_trainer import preflight as trainer

    found = trainer.readings(seconds, trainer.place(os.environ))
    if found is None:
        return
    readings = [judge.Reading(**{**row, "other": tuple(row["other"]) if row["other"] else None}) for row in found]
    healthy = judge.expected(kind) if kind else {}
    faults = judge.faults(readings, healthy, cpu=not machine.gpus)
    if as_json:
        hardware = kind.name if kind else None
        print_json({"schema": "preflight/1", "hardware": hardware, "expected": healthy, "faults": faults, "readings": found})
    else:
        rows = judge.table(readings)
        print_table(rows, tuple(dict.fromkeys(column for row in rows for column in row)))
        if not kind:
            complain(f"{machine.gpu or 'a CPU'} is no GPU that the planner knows: its readings are compared with one another alone")
        for fault in faults:
            say(fault)
        checked = count(len(rows), "GPU") if machine.gpus else f"{count(len(rows), 'rank')} on the CPU"
        say(f"{checked} checked: {count(len(faults), 'fault') if faults else 'no fault'}")
    raise typer.Exit(ExitCode.REFUTED if faults else ExitCode.DONE)


def _kind(hardware: str | None, device: str | None) -> Cluster | None:
    """The kind that is named, or that the machine's GPUs are of; None where the planner does not know that.

    Raises:
        ConfigError: the named kind is not known.
    """
    if hardware is not None:
        return named(hardware)
    try:
        return named(device) if device else None
    except ConfigError:
        return None
