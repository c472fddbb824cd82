"""`playbook gate` and `playbook bisect`: whether a commit made a case slower, and which one did."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from playbook.errors import PlaybookError
from playbook.files import replace
from playbook.paths import default_results
from playbook.records.case import load_case
from playbook_app.cli.options import AsJson, Budget, MorePairs, Profile, Results, commands
from playbook_app.cli.options import seconds as to_seconds
from playbook_app.cli.options import share as to_share
from playbook_app.cli.output import print_json, say
from playbook_bench.judge.slowdown import ALLOWABLE
from playbook_bench.run import bisect as bisection
from playbook_bench.run import checkout, report
from playbook_bench.run import gate as harness
from playbook_bench.run.options import Options

app = commands()
_Limit = Annotated[str, typer.Option(metavar="PERCENT", help="A slowdown above it is a regression; noise never raises it.")]


@app.command()
def gate(
    baseline: Annotated[str, typer.Option(metavar="REF", help="The commit to compare the working tree with.")],
    case: Annotated[
        str | None, typer.Argument(metavar="CASE", help="A case's id, or its file; its baseline configuration is what runs.")
    ] = None,
    named: Annotated[str | None, typer.Option("--case", metavar="CASE", help="The same, as an option.")] = None,
    profile: Profile = None,
    results: Results = None,
    pairs: MorePairs = None,
    budget: Budget = None,
    limit: _Limit = "3%",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PERCENT",
            help=f"How much worse NAME may get, or how far losses may differ; NAME is one of {', '.join(ALLOWABLE)}.",
        ),
    ] = None,
    anchor: Annotated[
        str | None,
        typer.Option(
            metavar="REF", help="An older commit whose speed was accepted; bench/baselines/gate-anchors.yaml names it, if not given."
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answer as a JUnit file too.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the answer to this file as Markdown, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the answer as a row to this Parquet file, which begins with the first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the working tree with a commit on one case: pass, regression, undecided or error. What cannot be judged does not pass."""
    if (case is None) == (named is None):
        raise PlaybookError("name one case: playbook gate --baseline REF CASE")
    if history is not None:
        report.history(history)  # what is no history is refused before anything runs
    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    options = Options(profile, results or default_results(), pairs, to_seconds(budget))
    limits = harness.Limits(to_share(limit, "--limit"), dict(_allowance(text) for text in allow or []))
    try:
        result = harness.run(case or named or "", baseline, options, limits, progress, anchor=anchor)
    finally:
        progress.close()
    report.print_gate(result, out)
    if junit is not None:
        replace(junit, report.junit(result))
    if markdown is not None:
        with markdown.open("a", encoding="utf-8") as f:
            f.write(report.markdown(result))
    if history is not None:
        root = harness.repository_of(load_case(case or named or ""), None)
        report.add_to_history(history, result, checkout.commit_of(root, "HEAD"))
    if as_json:
        print_json(harness.as_json(result))
    raise typer.Exit(result.exit_code)


@app.command()
def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="A commit without the trouble; every other one is compared with it.")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="A later commit that is slower, runs out of memory or fails.")],
    case: Annotated[str, typer.Option(metavar="CASE", help="The case whose baseline configuration runs.")],
    profile: Profile = None,
    results: Annotated[Path | None, typer.Option(help="Where work folders go; .playbook/results, if not given.")] = None,
    pairs: Annotated[
        int | None, typer.Option(help="At most this many pairs of launches for each commit; more than the case names add looks.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="At most this long for each commit.")] = None,
    limit: _Limit = "3%",
    as_json: AsJson = False,
) -> None:
    """Find the commit that made a case slower, or made it fail, by a binary search with the gate as the judge."""
    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    loaded = load_case(case)
    root = harness.repository_of(loaded, None)

    def told(judged: bisection.Judged, left: int) -> None:
        out.print(f"{bisection.subject(judged.commit, root)}: {judged.trouble}, at most {left} left  ({judged.sentence})", markup=False)

    try:
        if minutes is not None and not 0 < minutes < math.inf:
            raise PlaybookError(f"--minutes is {minutes:g}; expected more than 0, and an end")
        budget = None if minutes is None else 60 * minutes
        limits = harness.Limits(to_share(limit, "--limit"))
        found = bisection.run(
            loaded, good, bad, Options(profile, results or default_results(), pairs, budget), progress, told, limits=limits
        )
    finally:
        progress.close()
    if as_json:
        print_json(bisection.as_json(found))
    else:
        none = f"cannot be judged against {good}" if found.trouble == bisection.UNKNOWN else f"shows no trouble that {good} has not"
        words = {
            "found": f"first commit with it ({found.trouble}):",
            "suspects": f"one of these ({found.trouble}):",
            "no_trouble": f"{bad} {none}: {found.judged[0].sentence}",
        }
        say(words[found.status])
        for commit in found.suspects:
            say(f"  {bisection.subject(commit, root)}")
    raise typer.Exit(found.exit_code)


def _allowance(text: str) -> tuple[str, float]:
    """`memory=5%` as a name and a share."""
    name, _, percent = text.partition("=")
    return name, to_share(percent, f"--allow {name}")
