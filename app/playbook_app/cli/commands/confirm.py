"""`playbook confirm`: test claims by matched runs; `playbook demo`: four of them, on this machine's CPU."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from playbook.cards.load import load_all
from playbook.errors import ExitCode, PlaybookError
from playbook.paths import default_results
from playbook.records.evidence import Evidence
from playbook.records.standing import untested_claims, untraced_verdicts
from playbook.text import count
from playbook_app.cli import jobs, outcomes
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
    to_seconds,
)
from playbook_app.cli.output import complain, say
from playbook_app.services.standing import here, records_here, today
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.machine import detect, requirements
from playbook_bench.run import confirm as harness
from playbook_bench.run import report
from playbook_bench.run.options import Options
from playbook_bench.run.store import Outcome
from playbook_bench.run.targets import count_inapplicable, tasks_of

app = commands()


@app.command()
def confirm(
    targets: Annotated[list[str] | None, typer.Argument(metavar="CARD[/CLAIM]", help="Such as moe-dispatcher-choice/W9.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every claim of every card.")] = False,
    untested: Annotated[
        bool,
        typer.Option(
            "--untested",
            help="With --profile: of --all, or of those named, the claims without a fresh verdict from it, those that most rules rest"
            " on first, or as named; --budget ends it, the next call goes on, and first traces what was left without.",
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
    request = jobs.JobRequest(nodes, cluster, show, not no_wait, job, as_json)
    jobs.check_request(launcher, request)
    allocation = jobs.inside(launcher, cluster)
    if fork and launcher != "local":
        raise PlaybookError(f"--fork has no meaning with --launcher {launcher}; leave one of them out")
    if launcher == "slurm":
        for target in chosen:
            tasks_of(target)  # a mistake is told now, not by a job that waited its turn
        given = {"--profile": profile, "--pairs": pairs, "--budget": budget, "--seed": seed}
        raise typer.Exit(jobs.confirm(chosen, given, results, request, journal))
    finished_runs = outcomes.journal(
        journal or ((results or default_results()) / "journal" / "campaign" if untested else None), allocation, fork
    )
    options = Options(
        profile,
        results or default_results(),
        pairs,
        seconds,
        seed,
        allocation or outcomes.local_launcher(fork),
        finished_runs,
        campaign=untested,
        trace=trace,
        untraced=untraced if trace else {},
    )
    outcomes.show_outcomes(lambda shown: harness.run(chosen, options, shown), as_json, counts=every)


def _waiting(profile: str, results: Path | None, named: Sequence[str]) -> tuple[list[str], Mapping[str, Evidence]]:
    """The claims of a campaign, the most valuable first, or in the order in which they are `named`, and verdicts to trace; said before
    the first is tested.
    """
    cards = load_all()
    standing = cards, records_here(cards, here(), results), profile, today()
    claims, untraced = untested_claims(*standing), untraced_verdicts(*standing)
    named_claims = dict.fromkeys(f"{task.claim.card}/{task.claim.id}" for target in named for task in tasks_of(target) if task.claim)
    if named:
        claims = [target for target in named_claims if target in claims]
        untraced = {case: each for case, each in untraced.items() if each[0] in named_claims}
    complain(f"{count(len(claims), 'claim')} without a fresh verdict from {profile}: {', '.join(claims) or 'nothing to do'}")
    if untraced:
        complain(f"{count(len(untraced), 'verdict')} without a trace: {', '.join(target for target, _ in untraced.values())}")
    return claims, {case: record for case, (_, record) in untraced.items()}


DEMO = ("moe-dispatcher-choice/W9.m", "long-context-cp-sizing/L1.m", "vlm-real-data/V3", "vlm-real-data/T1")
"""Two claims that one count of bytes settles, then two about speed."""

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
    """Test four claims on this machine's CPU, within five minutes; exit code 0 once one has a verdict of any kind, 4 where none applies
    here.
    """
    lacking_packages = requirements.unmet_requirements([])
    if lacking_packages and not targets:
        complain(f"the demo trains a small model, and cannot: {lacking_packages[0].detail}")
        raise typer.Exit(ExitCode.INAPPLICABLE)
    chosen = targets or list(DEMO)
    say(
        f"{count(len(chosen), 'claim')} of the cards, tested on this CPU in less than five minutes: a tiny model trains with and"
        " without one change."
    )
    say("Bytes are counted once, in seconds. Speed is noisy: a claim about it takes 18 launches or more, a minute or two in all.")
    say(f"To come: {', '.join(chosen)}")
    options = Options(detect.CPU, results or default_results(), budget_s=_DEMO_S, launcher=ForkLauncher())
    with outcomes.progress(kind=DemoProgress) as shown:
        found = harness.run(chosen, options, shown)
    lacking, total = count_inapplicable(detect.CPU)
    playbook = "playbook" if shutil.which("playbook") else os.path.relpath(sys.argv[0])
    last = found[-1]
    claim = last.evidence.measured.claim
    say(f"\n{lacking} of {total} claims need GPUs or another machine; there, `{playbook} confirm CARD` tests them in the same way.")
    say("Three things to do next:")
    say(f"  {playbook} search 'all-to-all takes a third of the step'   find the card for what you see")
    say(f"  {playbook} cards show {claim.card if claim else 'vlm-real-data'}   read what to set, why, and what was measured where")
    say(f"  {playbook} evidence show {last.path}   look at what the last verdict rests on")
    code = harness.exit_code(found)
    raise typer.Exit(code if code in (ExitCode.FAILED, ExitCode.INAPPLICABLE) else 0)
