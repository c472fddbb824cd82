"""`playbook tune`: which settings make a run faster, at a stated chance to keep one that does not."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from playbook.errors import ConfigError, LaunchError
from playbook.paths import default_results, folders
from playbook.records.case import is_shipped
from playbook.records.commands import Steps
from playbook.records.evidence import Machine
from playbook.yaml_files import load
from playbook_app.cli.options import AsJson, Fork, Profile, Results, Seed, commands, to_seconds, to_share
from playbook_app.cli.outcomes import local_launcher, progress
from playbook_app.cli.output import complain, print_json, say
from playbook_app.services import tuning
from playbook_app.services.ready_knobs import ready
from playbook_app.services.standing import stock_here
from playbook_app.site.svg import contrasts
from playbook_bench.machine import detect
from playbook_bench.run import report
from playbook_bench.run.options import Options
from playbook_bench.run.store import replace
from playbook_bench.tune import session
from playbook_bench.tune.knobs import Knobs, Ranked
from playbook_bench.tune.subject import goal as metric_of
from playbook_bench.variants.resolve import resolve

EXIT_CODES = {"complete": 0, "budget": 3, "interrupted": 130, "failed": 5}

app = commands()


class _KnobsAlone(TyperCommand):  # type: ignore[misc]
    """`--knobs` may stand without a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Its value is then empty, and not the word behind it."""
        end = args.index("--") if "--" in args else len(args)
        following = [*args[1 : end + 1], "--"]
        alone = [word == "--knobs" and after.startswith("-") for word, after in zip(args[:end], following, strict=False)]
        return super().parse_args(
            ctx, [*("--knobs=" if is_alone else word for word, is_alone in zip(args, alone, strict=False)), *args[end:]]
        )


@app.command(cls=_KnobsAlone)
def tune(
    words: Annotated[list[str], typer.Argument(metavar="CASE | -- COMMAND", help="A case, whose baseline is the start, or a command.")],
    knobs: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE]",
            help="What may be changed; without it, the ready set that fits. Without FILE: print that set as a file; launch nothing.",
        ),
    ] = None,
    goal: Annotated[str, typer.Option(help="What should become better: step_time, tokens_per_s or peak_memory.")] = "step_time",
    budget: Annotated[
        str | None, typer.Option(help="At most this long. Without --resume, candidates are left out in time for proof and comparison.")
    ] = None,
    false_keep: Annotated[
        str,
        typer.Option(
            "--false-keep", metavar="PERCENT", help="The chance, over the whole run, that what is kept holds a change that does not help."
        ),
    ] = "5%",
    loss: Annotated[str, typer.Option(metavar="PERCENT", help="How far the mean loss may differ; any, if it may differ at all.")] = "1%",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from where the same tuning was stopped, and leave off at the end of the budget.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the order of the candidates and why; launch nothing.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A trace of the start: what it says cannot matter is tried last.")
    ] = None,
    log: Annotated[str | None, typer.Option(help="Kind of the command's log, as in playbook ab.")] = None,
    log_file: Annotated[
        str | None, typer.Option("--log-file", help="File of the steps, if not printed; {run} is a launch's folder.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Steps that each launch makes.")] = None,
    warm_up: Annotated[int | None, typer.Option("--warm-up", min=0, help="Steps that are not timed.")] = None,
    timeout: Annotated[str, typer.Option(help="The longest that a launch may take.")] = "1h",
    claims: Annotated[bool, typer.Option("--emit-claims", help="Write a claim for each decided knob into your own cards.")] = False,
    profile: Profile = None,
    results: Results = None,
    seed: Seed = None,
    fork: Fork = False,
    as_json: AsJson = False,
) -> None:
    """Find the settings that make a run faster, and prove each that is kept.

    Exit code 0 the tuning is complete, whether or not anything is kept; 3 the time was up; 5 the start does not run; 130 interrupted.
    """
    machine, place = detect.detect(), results or default_results()
    command = shlex.join(["playbook", *sys.argv[1:]])
    if claims and not folders("cards")[1:]:
        raise ConfigError("--emit-claims writes into your own cards, and there are none; name their folder: playbook --cards DIR tune ...")
    # A command that goes on needs the seed that it began with, which it has if it is always the same.
    drawn = 0 if seed is None and resume else seed
    request = tuning.Request(goal, _chance(false_keep), None if loss == "any" else to_share(loss, "--loss"), drawn, trace)
    metric, _ = metric_of(goal)
    if len(words) == 1 and (words[0].endswith((".yaml", ".yml")) or is_shipped(words[0])):
        case, chosen = tuning.case_named(words[0], machine, metric, profile)
    else:
        told = Steps(log=log, file=log_file, count=steps, warm_up=warm_up)
        case = tuning.case_of_command(words, machine, told, metric, request.loss, to_seconds(timeout, "--timeout") or 0.0)
        chosen = machine.name
    if fork and case.command:
        raise ConfigError("--fork forks ranks of our trainer, and this tunes a command, which is started as it stands; leave out --fork")
    if knobs:
        chosen_knobs, _ = load(Path(knobs), Knobs)
    else:
        chosen_knobs = ready(case, resolve(case, "baseline", chosen), stock_here(), machine, goal)
    if knobs == "":
        say(_as_file(chosen_knobs, machine))
        return
    plan, order = tuning.planned(case, chosen, chosen_knobs, machine, request, place, command)
    if explain:
        _explain(order, as_json)
        return
    options = Options(chosen, place, None, to_seconds(budget), plan.setup.seed, local_launcher(fork))
    try:
        with progress(as_json, report.LaunchLines) as shown:
            found = session.run(plan, options, shown, resume=resume)
    except LaunchError as e:
        complain(f"error: {e}")
        raise typer.Exit(5) from e
    record = session.write_record(found)
    answer = {**session.answer(found), "record": str(record)}
    if figure := _ladder(answer):
        replace(record.with_name("ladder.svg"), figure)
    _show(
        found,
        answer,
        shown.out,
        "the same command" + ("" if resume else " with --resume" + (f" --seed {plan.setup.seed}" if seed is None else "")),
    )
    is_borne_out = not answer["kept"] or (answer["final"] or {}).get("verdict") == "faster"
    if claims and is_borne_out and (card := tuning.emit_claims(plan, answer, machine, datetime.now(UTC).strftime("%Y-%m-%d"))):
        shown.out.print(f"claims    {card}", markup=False, highlight=False)
    if as_json:
        print_json(answer)
    raise typer.Exit(EXIT_CODES[found.ended])


def _chance(text: str) -> float:
    chance = to_share(text, "--false-keep")
    if not 0 < chance <= 0.5:
        raise ConfigError(f"--false-keep is {text}; expected more than 0 % and at most 50 %")
    return chance


def _as_file(knobs: Knobs, machine: Machine) -> str:
    """A ready set as a file of knobs."""
    head = f"# For {knobs.framework} on {machine.name}, today's value first. Take out what should stay: playbook tune --knobs FILE ..."
    rows = {name: knob.model_dump(mode="json", exclude_defaults=True) for name, knob in knobs.knobs.items()}
    return f"{head}\n{yaml.safe_dump({'knobs': rows}, sort_keys=False, default_flow_style=None, width=140)}".rstrip()


def _explain(order: Sequence[Ranked], as_json: bool) -> None:
    """Print the order of candidates, the reason of each, and those that are left out."""
    rows = [
        {
            "knob": row.knob,
            "value": row.value,
            "place": row.place,
            "expected_percent": None if row.gain is None else round(100 * row.gain, 1),
            "why": row.why,
            "launched": not row.skipped,
        }
        for row in order
    ]
    if as_json:
        print_json(rows)
        return
    width, out = max(len(f"{row.knob}={row.value}") for row in order), report.console()
    for number, row in enumerate(order, 1):
        expected = "?" if row.gain is None else f"{100 * row.gain:+.1f} %"
        out.print(Text(f"{'never' if row.skipped else number:>5}  {f'{row.knob}={row.value}':<{width}}  {expected:>8}  {row.why}"))


def _show(found: session.Session, answer: Mapping[str, Any], out: Console, again: str) -> None:
    """The answer in lines: what is kept with its interval, what is not and why, and the comparison on fresh launches.

    `again` names the command that goes on from here.
    """

    def line(text: str) -> None:
        out.print(Text(text))

    if found.tuning.problem:
        line(f"error  the start does not run: {found.tuning.problem}")
    for row in answer["kept"]:
        line(f"kept      {row['knob']}={row['value']}  {_interval(row['effect_percent'], row['reason'])}")
    for row in answer["refused"]:
        looked = "" if row["looked_percent"] is None else f" (looked like {row['looked_percent']:+.1f} %)"
        line(f"refused   {row['knob']}={row['value']}  {_interval(row['effect_percent'], row['reason'])}{looked}")
    for row in answer["never"]:
        line(f"never     {row['knob']}={row['value']}  {row['reason']}")
    for row in answer["undecided"]:
        line(f"undecided {row['knob']}={row['value']}")
    if answer["final"]:
        final = answer["final"]
        if final["effect_percent"]["low"] is None:
            line(f"together  {final['verdict']}: {final['sentence']}")
        else:
            line(f"together  {final['verdict']} {_interval(final['effect_percent'], '')}, {final['pairs']} fresh pairs against the start")
    noise = (
        ""
        if answer["noise_percent"] is None
        else f", a launch varies by {answer['noise_percent']:.2g} %: gains below about {answer['provable_percent']:.1f} % cannot be proven"
    )
    line(f"{answer['launches']} launches, {answer['seconds']:.0f} s{noise}; {_ENDS[found.ended].format(again)}")
    compared = (answer["final"] or {"verdict": "undecided"})["verdict"]
    if answer["kept"] and compared == "undecided" and found.ended in ("budget", "interrupted"):
        pairs = (answer["final"] or {"pairs": 0})["pairs"]
        least = found.plan.final_pairs
        line(f"missing   the comparison on fresh launches has {pairs} pairs so far and needs at least {least}: {again} makes the others")
    elif answer["kept"] and compared != "faster":
        line("careful   the comparison on fresh launches does not bear out what was kept: find out why before you take it over")
    if answer["kept"] and answer["run"]:
        line(f"run       {answer['run']}")
    line(f"record    {answer['record']}")


def _ladder(answer: Mapping[str, Any]) -> str:
    """What each kept change brings in the final set, and all of them together, with intervals, as an SVG file; empty where nothing is
    kept.
    """
    rows = [(f"{row['knob']}={row['value']}"[:24], row["effect_percent"]) for row in answer["kept"] if row["effect_percent"]]
    if answer["final"] and answer["final"]["effect_percent"]["low"] is not None:
        rows.append(("together", answer["final"]["effect_percent"]))
    figure = contrasts([(name, *(each[k] / 100 for k in ("value", "low", "high"))) for name, each in rows])
    style = "<style>text{font:13px sans-serif}line{stroke:#888}.pb-interval{stroke:#1565c0;stroke-width:3}.pb-effect{fill:#1565c0}</style>"
    return figure.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{style}", 1) if figure else ""


_ENDS = {
    "complete": "complete",
    "budget": "the time was up; {} goes on",
    "interrupted": "interrupted; {} goes on",
    "failed": "nothing was tuned",
}


def _interval(effect: Mapping[str, float] | None, reason: str) -> str:
    if effect is None or effect["low"] is None:
        return reason
    return f"{effect['value']:+.1f} % [{effect['low']:.1f}, {effect['high']:.1f}]{f', {reason}' if reason else ''}"
