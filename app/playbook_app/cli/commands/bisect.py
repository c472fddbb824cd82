"""`playbook bisect`: which commit made a case slower, or made it fail."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from playbook.errors import PlaybookError
from playbook.paths import default_results
from playbook.records.case import load_case
from playbook_app.cli.options import AsJson, Profile, Slowdown, commands
from playbook_app.cli.options import share as to_share
from playbook_app.cli.output import print_json, say
from playbook_bench.judge.bisection import UNKNOWN, Judged
from playbook_bench.run import bisect as bisection
from playbook_bench.run import gate as harness
from playbook_bench.run import report
from playbook_bench.run.options import Options

app = commands()


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
    limit: Slowdown = "3%",
    as_json: AsJson = False,
) -> None:
    """Find the commit that made a case slower, or made it fail, by a binary search with the gate as the judge."""
    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    loaded = load_case(case)
    root = harness.repository_of(loaded, None)

    def told(judged: Judged, left: int) -> None:
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
        none = f"cannot be judged against {good}" if found.trouble == UNKNOWN else f"shows no trouble that {good} has not"
        words = {
            "found": f"first commit with it ({found.trouble}):",
            "suspects": f"one of these ({found.trouble}):",
            "no_trouble": f"{bad} {none}: {found.judged[0].sentence}",
        }
        say(words[found.status])
        for commit in found.suspects:
            say(f"  {bisection.subject(commit, root)}")
    raise typer.Exit(found.exit_code)
