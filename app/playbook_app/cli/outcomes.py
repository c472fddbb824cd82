"""What commands that run series share: the journal, verdicts on the terminal as they come, and the exit code that they have together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from playbook_app.cli.output import print_json
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import Launcher, LocalLauncher
from playbook_bench.launch.slurm import SrunLauncher
from playbook_bench.machine import detect
from playbook_bench.run import confirm as harness
from playbook_bench.run import report
from playbook_bench.run.journal import Journal
from playbook_bench.run.store import Outcome


@contextmanager
def progress(
    as_json: bool = False, kind: type[report.TerminalProgress] = report.TerminalProgress, counts: bool = False
) -> Iterator[report.TerminalProgress]:
    """A progress line while a series runs, with its console (`out`): that is on stderr where stdout has the JSON."""
    shown = kind(report.console(sys.stderr if as_json else None), counts)
    try:
        yield shown
    finally:
        shown.close()


def show_outcomes(run: Callable[[report.TerminalProgress], Sequence[Outcome]], as_json: bool, counts: bool = False) -> None:
    """Run with a progress line, print every verdict, and exit with their combined code.

    With `counts`, claims that do not apply here are only counted.
    """
    with progress(as_json, counts=counts) as shown:
        outcomes = run(shown)
    report.print_table(outcomes, shown.out, counts)
    report.print_summary(outcomes, shown.out)
    if as_json:
        print_json(report.as_json(outcomes))
    raise typer.Exit(harness.exit_code(outcomes))


def journal(folder: Path | None, allocation: SrunLauncher | None, fork: bool = False) -> Journal | None:
    """The journal in this folder for these machines. Forked and fresh ranks have separate journals, since they are not compared.

    Raises:
        StoreError: it cannot be used.
    """
    place = [*(allocation.allocation.hosts if allocation else detect.place()), *["fork"] * fork]
    return Journal(folder, place, detect.exported()) if folder else None


def local_launcher(fork: bool) -> Launcher:
    """What starts launches on this machine."""
    return ForkLauncher() if fork else LocalLauncher()
