"""`playbook bisect`: the commit that made a case slower or made it fail. Part of the command line."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from playbook.cli.text import print_json, say
from playbook.errors import PlaybookError

if TYPE_CHECKING:
    from playbook_bench.run.bisect import Judged


def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="A commit without the trouble; every other one is compared with it.")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="A later commit that is slower, runs out of memory or fails.")],
    case: Annotated[str, typer.Option(metavar="CASE", help="The case whose baseline configuration runs.")],
    profile: Annotated[str | None, typer.Option(help="Machine class, such as cpu or h200x4; the largest that fits, if not given.")] = None,
    results: Annotated[Path | None, typer.Option(help="Where work folders go; .playbook/results, if not given.")] = None,
    pairs: Annotated[
        int | None, typer.Option(help="At most this many pairs of launches for each commit; more than the case names add looks.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="At most this long for each commit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")] = False,
) -> None:
    """Find the commit that made a case slower, or made it fail, by a binary search with the gate as the judge."""
    from playbook_bench.run import bisect as harness
    from playbook_bench.run import report

    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)

    def told(judged: Judged, left: int) -> None:
        out.print(f"{harness.subject(judged.commit)}: {judged.trouble}, at most {left} left  ({judged.sentence})", markup=False)

    try:
        if minutes is not None and not 0 < minutes < math.inf:
            raise PlaybookError(f"--minutes is {minutes:g}; expected more than 0, and an end")
        budget = None if minutes is None else 60 * minutes
        found = harness.run(case, good, bad, profile=profile, results=results, pairs=pairs, budget_s=budget, progress=progress, told=told)
    finally:
        progress.close()
    if as_json:
        print_json(harness.as_json(found))
    else:
        none = f"cannot be judged against {good}" if found.trouble == harness.UNKNOWN else f"shows no trouble that {good} has not"
        words = {
            "found": f"first commit with it ({found.trouble}):",
            "suspects": f"one of these ({found.trouble}):",
            "no_trouble": f"{bad} {none}: {found.judged[0].sentence}",
        }
        say(words[found.status])
        for commit in found.suspects:
            say(f"  {harness.subject(commit)}")
    raise typer.Exit(found.exit_code)
