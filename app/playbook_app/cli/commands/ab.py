"""`playbook ab`: compare two commands without a case."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from playbook.errors import LaunchError, PlaybookError
from playbook.paths import default_results
from playbook.records.commands import Steps, Traced
from playbook_app.cli.options import AsJson, Budget, Pairs, Results, Seed, commands, to_seconds, to_share
from playbook_app.cli.outcomes import progress
from playbook_app.cli.output import complain, print_json, print_walls, say
from playbook_bench.machine import detect
from playbook_bench.run import ab as two_commands
from playbook_bench.run import report
from playbook_bench.run.options import Options

_TOKENS = re.compile(r"([1-9][0-9]{0,14})(?:,([1-9][0-9]{0,14}))?")

app = commands()


@app.command(context_settings={"allow_interspersed_args": False})
def ab(
    words: Annotated[list[str], typer.Argument(metavar="-- CMD_A [--vs CMD_B]", help="The commands; no shell comes between.")],
    metric: Annotated[
        str, typer.Option(help="What to compare: step_time, tokens_per_s, memory, or a metric of the playbook.")
    ] = "step_time",
    margin: Annotated[str, typer.Option(metavar="PERCENT", help="Effects up to it count for nothing.")] = "2%",
    log: Annotated[
        str | None, typer.Option(help="Kind of the log, such as jsonl, hf, megatron or regex:PATTERN; found out, if not given.")
    ] = None,
    log_file: Annotated[
        str | None, typer.Option("--log-file", help="File of the steps, if not printed; {run} is a new folder of the launch.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the candidate: another value of KEY or --KEY.")
    ] = None,
    variable: Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Of the candidate: a variable.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Steps that each launch makes; as many as the first, if not given.")] = None,
    warm_up: Annotated[
        int | None, typer.Option("--warm-up", min=0, help="Steps that are not timed; the first fifth, if not given.")
    ] = None,
    loss: Annotated[str, typer.Option(metavar="PERCENT", help="How far mean losses may differ; any, if they may differ at all.")] = "1%",
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N[,N]", help="Tokens of a step of the whole job where a log tells none; of A and B, if they differ."),
    ] = None,
    work: Annotated[str, typer.Option(help="equal, or any: steps may have different numbers of tokens, for metrics per token.")] = "equal",
    timeout: Annotated[str, typer.Option(help="The longest that a launch may take.")] = "1h",
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="nsys|FILE", help="Trace one more launch of each, by nsys or into the command's own FILE: which wall each runs into."
        ),
    ] = None,
    trace_with: Annotated[
        list[str] | None, typer.Option("--trace-with", metavar="WORD", help="Added to the command in that launch, so that it writes FILE.")
    ] = None,
    results: Results = None,
    pairs: Pairs = None,
    budget: Budget = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Compare two commands that log their steps: B is faster, slower, equivalent, or it is undecided.

    Exit code 0 faster or equivalent, 1 slower beyond the margin, 3 undecided, 5 a launch failed.
    """
    if work not in ("equal", "any"):
        raise PlaybookError(f"--work is '{work[:40]}'; expected equal or any")
    question = two_commands.question(
        words,
        setting or [],
        variable or [],
        metric=metric,
        margin=to_share(margin, "--margin"),
        steps=Steps(log=log, file=log_file, count=steps, warm_up=warm_up),
        tokens=None if tokens is None else _both(tokens),
        any_work=work == "any",
        loss=None if loss == "any" else to_share(loss, "--loss"),
        timeout_s=to_seconds(timeout, "--timeout") or 0.0,
    )
    machine = detect.detect()
    options = Options(machine.name, results or default_results(), pairs, to_seconds(budget), seed)
    try:
        with progress(as_json, report.LaunchLines) as shown:
            outcome, answer = two_commands.compare(question, options, shown, shlex.join(["playbook", *sys.argv[1:]]))
    except LaunchError as e:
        complain(f"error: {e}")
        if as_json:
            print_json(two_commands.as_json(question, two_commands.AbAnswer("error"), "", str(e)))
        raise typer.Exit(two_commands.EXIT_CODES["error"]) from e
    report.print_outcome(outcome, shown.out, answer.verdict)
    report.print_summary([outcome], shown.out)
    if hint := two_commands.hint(outcome, answer):
        shown.out.print(Text(f"      {hint}"))
    walls = _walls(question, machine.name, Traced(file=trace, arguments=trace_with or [])) if trace is not None else {}
    if as_json:
        sentence = "; ".join(filter(None, [outcome.evidence.derived.verdict.sentence, hint]))
        answered = two_commands.as_json(question, answer, str(outcome.path), sentence)
        print_json(answered | ({"walls": walls} if walls else {}))
    for variant, each in [] if as_json else walls.items():
        say(f"\n{variant}")
        print_walls(each)
    raise typer.Exit(two_commands.EXIT_CODES[answer.verdict])


def _both(text: str) -> tuple[int, int]:
    """Tokens of a step of both commands: `4096`, or `4096,8192`."""
    match = _TOKENS.fullmatch(text)
    if match is None:
        raise PlaybookError(f"--tokens is '{text[:40]}'; expected tokens of a step, such as 4096, or 4096,8192 for A and B")
    return int(match[1]), int(match[2] or match[1])


def _walls(question: two_commands.CommandPair, profile: str, how: Traced) -> dict[str, dict[str, Any]]:
    """The walls of both commands; where they cannot be had, a line says why, and the answer stands."""
    try:
        return {
            variant: asdict(each) for variant, each in two_commands.walls_of(two_commands.case_of(question, profile), profile, how).items()
        }
    except PlaybookError as e:
        complain(f"no trace: {e}")
        return {}
