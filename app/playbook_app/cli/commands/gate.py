"""`playbook gate`: whether the working tree made a case slower."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from playbook.errors import PlaybookError
from playbook.files import replace
from playbook.paths import default_results
from playbook.records.case import load_case
from playbook_app.cli.options import AsJson, Budget, MorePairs, Profile, Results, Slowdown, commands
from playbook_app.cli.options import seconds as to_seconds
from playbook_app.cli.options import share as to_share
from playbook_app.cli.output import print_json
from playbook_bench.judge.slowdown import ALLOWABLE
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
    pairs: MorePairs = None,
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


def _allowance(text: str) -> tuple[str, float]:
    """`memory=5%` as a name and a share."""
    name, _, percent = text.partition("=")
    return name, to_share(percent, f"--allow {name}")
