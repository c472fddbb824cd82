"""`playbook bisect`: which commit made a case slower, or made it fail; which version of a package made a command so."""

from __future__ import annotations

import math
import shlex
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
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GOOD BAD | -- COMMAND", help="A commit without the trouble and a later one with it; or the command, with --packages."
        ),
    ] = None,
    case: Annotated[str | None, typer.Option(metavar="CASE", help="Of commits: the case whose baseline configuration runs.")] = None,
    packages: Annotated[
        str | None,
        typer.Option(
            metavar="NAME==GOOD..BAD", help="Compare versions of a package, such as torch==2.10..2.12, each in an environment of its own."
        ),
    ] = None,
    requirements: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of packages: what pip installs beside it, in each environment.")
    ] = None,
    profile: Profile = None,
    results: Annotated[Path | None, typer.Option(help="Where work folders go; .playbook/results, if not given.")] = None,
    pairs: Annotated[
        int | None, typer.Option(help="At most this many pairs of launches for each commit or version; more than the case names add looks.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="At most this long for each commit or version.")] = None,
    limit: Slowdown = "3%",
    as_json: AsJson = False,
) -> None:
    """Find the commit that made a case slower, or made it fail, by a binary search with the gate as the judge; or the version of a package, with ab as the judge."""
    asked = list(words or [])
    if packages is not None and (not asked or case is not None):
        raise PlaybookError(
            "with --packages a command is expected and no case: playbook bisect --packages torch==2.10..2.12 -- python train.py"
        )
    if packages is None and (len(asked) != 2 or case is None or requirements is not None):
        raise PlaybookError("expected two commits and a case: playbook bisect GOOD BAD --case CASE; or --packages and a command")
    out = report.console(sys.stderr if as_json else None)
    if minutes is not None and not 0 < minutes < math.inf:
        raise PlaybookError(f"--minutes is {minutes:g}; expected more than 0, and an end")
    options = Options(profile, results or default_results(), pairs, None if minutes is None else 60 * minutes)
    share = to_share(limit, "--limit")
    span = bisection.package_span(packages) if packages is not None else None
    loaded = load_case(case) if case is not None else None
    root = None if loaded is None else harness.repository_of(loaded, None)
    progress = report.TerminalProgress(out) if loaded else report.LaunchLines(out)

    def name(candidate: str) -> str:
        return f"{span.name} {candidate}" if span else bisection.subject(candidate, root)

    def told(judged: Judged, left: int) -> None:
        out.print(f"{name(judged.commit)}: {judged.trouble}, at most {left} left  ({judged.sentence})", markup=False)

    try:
        if span is not None:
            good, bad = span.good, span.bad
            line = shlex.join(["playbook", *sys.argv[1:]])
            found = bisection.run_packages(asked, span, requirements, options, progress, line, share, told)
        else:
            assert loaded is not None
            good, bad = asked
            found = bisection.run(loaded, good, bad, options, progress, told, limits=harness.Limits(share))
    finally:
        progress.close()
    kind = "version" if span else "commit"
    if as_json:
        print_json(bisection.as_json(found, kind))
    else:
        none = f"cannot be judged against {good}" if found.trouble == UNKNOWN else f"shows no trouble that {good} has not"
        sentence = {
            "found": f"first {kind} with it ({found.trouble}):",
            "suspects": f"one of these ({found.trouble}):",
            "no_trouble": f"{bad} {none}: {found.judged[0].sentence}",
        }
        say(sentence[found.status])
        for suspect in found.suspects:
            say(f"  {name(suspect)}")
    raise typer.Exit(found.exit_code)
