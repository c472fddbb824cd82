"""`playbook gate`: whether the working tree made a case slower. `playbook bisect`: which commit did, or made it fail; which version of a
package made a command so.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from playbook.errors import PlaybookError
from playbook.files import replace
from playbook.paths import default_results
from playbook.records.case import load_case
from playbook_app.cli.options import AsJson, Budget, Profile, Results, Slowdown, commands, to_seconds, to_share
from playbook_app.cli.outcomes import progress
from playbook_app.cli.output import print_json, say
from playbook_bench.judge.slowdown import ALLOWABLE, UNKNOWN, Judged
from playbook_bench.run import bisect as bisection
from playbook_bench.run import gate as harness
from playbook_bench.run import report
from playbook_bench.run.options import Options
from playbook_bench.variants import checkout

app = commands()


@app.command()
def gate(
    baseline: Annotated[str, typer.Option(metavar="REF", help="The commit to compare the working tree with.")],
    case: Annotated[
        str | None, typer.Argument(metavar="CASE", help="A case's id, or its file; its baseline configuration is what runs.")
    ] = None,
    named: Annotated[str | None, typer.Option("--case", metavar="CASE", help="The same, as an option.")] = None,
    profile: Profile = None,
    results: Results = None,
    pairs: Annotated[int | None, typer.Option(help="At most this many pairs of launches; more than the case names add looks.")] = None,
    budget: Budget = None,
    limit: Slowdown = "3%",
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
    options = Options(profile, results or default_results(), pairs, to_seconds(budget))
    limits = harness.Limits(to_share(limit, "--limit"), dict(_allowance(text) for text in allow or []))
    with progress(as_json) as shown:
        result = harness.run(case or named or "", baseline, options, limits, shown, anchor=anchor)
    report.print_gate(result, shown.out)
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


def _allowance(text: str) -> tuple[str, float]:
    """`memory=5%` as a name and a share."""
    name, _, percent = text.partition("=")
    return name, to_share(percent, f"--allow {name}")


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
    limit: Slowdown = "3%",
    as_json: AsJson = False,
) -> None:
    """Find the commit that made a case slower, or made it fail, by a binary search with the gate as the judge; or the version of a
    package, with ab as the judge.
    """
    arguments = list(words or [])
    if packages is not None and (not arguments or case is not None):
        raise PlaybookError(
            "with --packages a command is expected and no case: playbook bisect --packages torch==2.10..2.12 -- python train.py"
        )
    if packages is None and (len(arguments) != 2 or case is None or requirements is not None):
        raise PlaybookError("expected two commits and a case: playbook bisect GOOD BAD --case CASE; or --packages and a command")
    options = Options(profile, results or default_results(), pairs)
    share = to_share(limit, "--limit")
    span = bisection.package_span(packages) if packages is not None else None
    loaded = load_case(case) if case is not None else None
    root = None if loaded is None else harness.repository_of(loaded, None)

    def name(candidate: str) -> str:
        return f"{span.name} {candidate}" if span else bisection.subject(candidate, root)

    def report_judged(judged: Judged, most_left: int) -> None:
        shown.out.print(f"{name(judged.commit)}: {judged.trouble}, at most {most_left} left  ({judged.sentence})", markup=False)

    with progress(as_json, report.TerminalProgress if loaded else report.LaunchLines) as shown:
        if span is not None:
            good, bad = span.good, span.bad
            line = shlex.join(["playbook", *sys.argv[1:]])
            result = bisection.run_packages(arguments, span, requirements, options, shown, line, share, report_judged)
        else:
            assert loaded is not None
            good, bad = arguments
            result = bisection.run(loaded, good, bad, options, shown, report_judged, limits=harness.Limits(share))
    kind = "version" if span else "commit"
    if as_json:
        print_json(bisection.as_json(result, kind))
    else:
        none = f"cannot be judged against {good}" if result.trouble == UNKNOWN else f"shows no trouble that {good} has not"
        sentence = {
            "found": f"first {kind} with it ({result.trouble}):",
            "suspects": f"one of these ({result.trouble}):",
            "no_trouble": f"{bad} {none}: {result.judged[0].sentence}",
        }
        say(sentence[result.status])
        for suspect in result.suspects:
            say(f"  {name(suspect)}")
    raise typer.Exit(result.exit_code)
