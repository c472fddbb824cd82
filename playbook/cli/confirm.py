"""`playbook confirm`: test claims by matched runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from playbook.cards.load import load_all
from playbook.cli import slurm
from playbook.cli.options import (
    AsJson,
    Budget,
    ClusterFile,
    Fork,
    JobId,
    JournalFolder,
    LauncherName,
    Nodes,
    NoWait,
    Pairs,
    Print,
    Profile,
    Results,
    Seed,
    commands,
)
from playbook.cli.options import seconds as to_seconds
from playbook.cli.output import print_json
from playbook.errors import PlaybookError
from playbook_bench.run import confirm as harness
from playbook_bench.run import report

app = commands()


@app.command()
def confirm(
    targets: Annotated[list[str] | None, typer.Argument(metavar="CARD[/CLAIM]", help="Such as moe-dispatcher-choice/W9.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every claim of every card.")] = False,
    profile: Profile = None,
    results: Results = None,
    pairs: Pairs = None,
    budget: Budget = None,
    seed: Seed = None,
    launcher: LauncherName = "local",
    nodes: Nodes = None,
    cluster: ClusterFile = None,
    show: Print = False,
    no_wait: NoWait = False,
    job: JobId = None,
    journal: JournalFolder = None,
    fork: Fork = False,
    as_json: AsJson = False,
) -> None:
    """Test claims on this machine, or on the nodes of a job of Slurm: matched runs of the trainer, a verdict with evidence for each."""
    if every == bool(targets) and not job:
        raise PlaybookError("name cards or claims, or say --all (not both); playbook cards list --claims names them")
    chosen = list(load_all()) if every else targets or []
    seconds = to_seconds(budget)
    request = slurm.Request(nodes, cluster, show, not no_wait, job, as_json)
    slurm.check_request(launcher, request)
    allocation = slurm.inside(launcher, cluster)
    if fork and launcher != "local":
        raise PlaybookError(f"--fork has no meaning with --launcher {launcher}; leave one of them out")
    if launcher == "slurm":
        for target in chosen:
            harness.tasks_of(target)  # a mistake is told now, not by a job that waited its turn
        words = slurm.confirm_words(chosen, profile, pairs, budget, seed)
        raise typer.Exit(slurm.confirm(words, results, request, journal))
    kept = slurm.journal(journal, allocation, fork)

    def run(progress: report.TerminalProgress) -> list[harness.Outcome]:
        limits: dict[str, Any] = {"pairs": pairs, "budget_s": seconds, "seed": seed, "fork": fork}
        return harness.run(chosen, profile=profile, results=results, progress=progress, slurm=allocation, journal=kept, **limits)

    show_outcomes(run, as_json)


def show_outcomes(run: Callable[[report.TerminalProgress], Sequence[harness.Outcome]], as_json: bool) -> None:
    """Run with progress, print every verdict, and leave with the exit code that they add up to."""
    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    try:
        outcomes = run(progress)
    finally:
        progress.close()
    if len(outcomes) > 1:
        out.print()
        report.print_table(outcomes, out)
    report.print_summary(outcomes, out)
    if as_json:
        print_json(report.as_json(outcomes))
    raise typer.Exit(harness.exit_code(outcomes))
