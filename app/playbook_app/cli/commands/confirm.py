"""`playbook confirm` and `playbook demo`: test claims by matched runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from playbook.cards.load import load_all
from playbook.errors import PlaybookError
from playbook.paths import default_results
from playbook.records.evidence import Evidence
from playbook.records.untested import untested_claims, untraced_verdicts
from playbook.text import count
from playbook_app.cli.commands.evidence import here, records_here
from playbook_app.cli.options import (
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
from playbook_app.cli.options import seconds as to_seconds
from playbook_app.cli.output import complain, print_json, say
from playbook_app.services import slurm
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import LocalLauncher
from playbook_bench.machine import detect, requirements
from playbook_bench.run import confirm as harness
from playbook_bench.run import report
from playbook_bench.run.options import Options
from playbook_bench.run.store import Outcome
from playbook_bench.run.targets import tasks_of

app = commands()


@app.command()
def confirm(
    targets: Annotated[list[str] | None, typer.Argument(metavar="CARD[/CLAIM]", help="Such as moe-dispatcher-choice/W9.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every claim of every card.")] = False,
    untested: Annotated[
        bool,
        typer.Option(
            "--untested",
            help="With --profile: of --all, or of those named, the claims without a fresh verdict from it, those that most rules rest on first, or as named; --budget ends it, the next call goes on, and first traces what was left without.",
        ),
    ] = False,
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
    trace: Annotated[
        bool, typer.Option("--trace/--no-trace", help="Trace the variants of a timed verdict from GPUs: where the difference lies.")
    ] = True,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --all, list what does not apply here instead of counting it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Test claims by matched runs of the trainer, on this machine or in a Slurm job. Each claim gets a verdict with its evidence."""
    if every == bool(targets) and not job:
        raise PlaybookError("name cards or claims, or say --all (not both); playbook cards list --claims names them")
    if untested and (profile is None or launcher == "slurm"):
        raise PlaybookError("--untested goes with --profile PROFILE, such as h200x1, on the machine itself")
    chosen: Sequence[str] = list(load_all()) if every else targets or []
    untraced: Mapping[str, Evidence] = {}
    if untested:
        chosen, untraced = _waiting(profile or "", results, targets or [])
    seconds = to_seconds(budget)
    request = slurm.Request(nodes, cluster, show, not no_wait, job, as_json)
    slurm.check_request(launcher, request)
    allocation = slurm.inside(launcher, cluster)
    if fork and launcher != "local":
        raise PlaybookError(f"--fork has no meaning with --launcher {launcher}; leave one of them out")
    if launcher == "slurm":
        for target in chosen:
            tasks_of(target)  # a mistake is told now, not by a job that waited its turn
        words = slurm.confirm_words(chosen, profile, pairs, budget, seed)
        raise typer.Exit(slurm.confirm(words, results, request, journal))
    runs_by = allocation or (ForkLauncher() if fork else LocalLauncher())
    kept = slurm.journal(journal or ((results or default_results()) / "journal" / "campaign" if untested else None), allocation, fork)
    left = untraced if trace else {}
    options = Options(
        profile, results or default_results(), pairs, seconds, seed, runs_by, kept, campaign=untested, trace=trace, untraced=left
    )
    show_outcomes(lambda progress: harness.run(chosen, options, progress), as_json, counts=every and not verbose)


def _waiting(profile: str, results: Path | None, named: Sequence[str]) -> tuple[list[str], Mapping[str, Evidence]]:
    """The claims of a campaign, the most valuable first, or in the order in which they are `named`, and verdicts to trace; said before the first is tested."""
    cards = load_all()
    known = cards, records_here(cards, here(), results), profile, datetime.now(UTC).date()
    found, untraced = untested_claims(*known), untraced_verdicts(*known)
    asked = dict.fromkeys(f"{task.claim.card}/{task.claim.id}" for target in named for task in tasks_of(target) if task.claim)
    if named:
        found = [target for target in asked if target in found]
        untraced = {case: each for case, each in untraced.items() if each[0] in asked}
    complain(f"{count(len(found), 'claim')} without a fresh verdict from {profile}: {', '.join(found) or 'nothing to do'}")
    if untraced:
        complain(f"{count(len(untraced), 'verdict')} without a trace: {', '.join(target for target, _ in untraced.values())}")
    return found, {case: record for case, (_, record) in untraced.items()}


def show_outcomes(run: Callable[[report.TerminalProgress], Sequence[Outcome]], as_json: bool, counts: bool = False) -> None:
    """Run with a progress line, print every verdict, and exit with their combined code. With `counts`, claims that do not apply here are only counted."""
    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out, counts)
    try:
        outcomes = run(progress)
    finally:
        progress.close()
    report.print_table(outcomes, out, counts)
    report.print_summary(outcomes, out)
    if as_json:
        print_json(report.as_json(outcomes))
    raise typer.Exit(harness.exit_code(outcomes))


# --- demo ------------------------------------------------------------------------------------------------------------------------

DEMO = ("moe-dispatcher-choice/W9.m", "long-context-cp-sizing/L1.m", "vlm-real-data/V3", "vlm-real-data/T1")
"""Two claims that one count of bytes settles, then two about speed."""

_FAILED, _INAPPLICABLE = 5, 4
"""Exit codes that a demo ends with, too; other verdicts are its success."""
_DEMO_S = 270.0
"""After so many seconds no launch is started any more, so that the demo ends within five minutes."""


class DemoProgress(report.TerminalProgress):
    """A block for each claim: what it says, then what was found."""

    def finished(self, outcome: Outcome) -> None:
        """Print the block."""
        self.close()
        claim = outcome.evidence.measured.claim
        if claim is not None:
            self.out.print(f"\n{claim.card}/{claim.id}: {claim.statement}", markup=False)
        super().finished(outcome)


@app.command()
def demo(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="CARD/CLAIM", help="Other claims than the four; the CPU must be able to test them.")
    ] = None,
    results: Results = None,
) -> None:
    """Test four claims on this machine's CPU, within five minutes; exit code 0 once one has a verdict of any kind, 4 where none applies here."""
    lacking_packages = requirements.unmet_requirements([])
    if lacking_packages and not targets:
        complain(f"the demo trains a small model, and cannot: {lacking_packages[0].detail}")
        raise typer.Exit(_INAPPLICABLE)
    chosen = targets or list(DEMO)
    out = report.console()
    say(
        f"{count(len(chosen), 'claim')} of the cards, tested on this CPU in less than five minutes: a tiny model trains with and without one change."
    )
    say("Bytes are counted once, in seconds. Speed is noisy: a claim about it takes 18 launches or more, a minute or two in all.")
    say(f"To come: {', '.join(chosen)}")
    progress = DemoProgress(out)
    options = Options(detect.CPU, results or default_results(), budget_s=_DEMO_S, launcher=ForkLauncher())
    try:
        outcomes = harness.run(chosen, options, progress)
    finally:
        progress.close()
    lacking, known = harness.count_inapplicable(detect.CPU)
    playbook = "playbook" if shutil.which("playbook") else os.path.relpath(sys.argv[0])
    last = outcomes[-1]
    claim = last.evidence.measured.claim
    say(f"\n{lacking} of {known} claims need GPUs or another machine; there, `{playbook} confirm CARD` tests them in the same way.")
    say("Three things to do next:")
    say(f"  {playbook} search 'all-to-all takes a third of the step'   find the card for what you see")
    say(f"  {playbook} cards show {claim.card if claim else 'vlm-real-data'}   read what to set, why, and what was measured where")
    say(f"  {playbook} evidence show {last.path}   look at what the last verdict rests on")
    code = harness.exit_code(outcomes)
    raise typer.Exit(code if code in (_FAILED, _INAPPLICABLE) else 0)
