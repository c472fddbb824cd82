"""`playbook bench`: list, run and trace cases, measure their noise, replay their records. `playbook ab`: compare two commands without a case."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playbook.cards.load import load_all
from playbook.cards.model import by_claim
from playbook.errors import LaunchError, PlaybookError
from playbook.paths import default_results
from playbook.records.case import list_cases, load_case
from playbook.records.commands import Steps
from playbook_app.cli.options import AsJson, Budget, Fork, JournalFolder, Pairs, Profile, Results, Seed, commands
from playbook_app.cli.options import seconds as to_seconds
from playbook_app.cli.options import share as to_share
from playbook_app.cli.output import complain, print_json, print_table, print_trace, print_walls, say
from playbook_app.services import slurm
from playbook_bench.run.targets import tasks_of_card

if TYPE_CHECKING:
    from playbook_bench.commands import ab as two_commands
    from playbook_bench.commands import traced
    from playbook_bench.run import prove

app = commands()
_bench_app = commands()
app.add_typer(_bench_app, name="bench")


@_bench_app.command("run")
def bench_run(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's id, or the path of a case file.")],
    profile: Profile = None,
    results: Results = None,
    pairs: Pairs = None,
    budget: Budget = None,
    seed: Seed = None,
    journal: JournalFolder = None,
    fork: Fork = False,
    as_json: AsJson = False,
) -> None:
    """Run one case: a verdict for each claim that names it, or the effect alone where none does."""
    from playbook_app.cli.commands.confirm import show_outcomes
    from playbook_bench.launch.forked import ForkLauncher
    from playbook_bench.launch.local import LocalLauncher
    from playbook_bench.run import confirm as harness
    from playbook_bench.run.options import Options

    runs_by = ForkLauncher() if fork else LocalLauncher()
    options = Options(profile, results or default_results(), pairs, to_seconds(budget), seed, runs_by, slurm.journal(journal, None, fork))
    show_outcomes(lambda progress: harness.bench_run(case, options, progress), as_json)


@_bench_app.command("list")
def bench_list(as_json: AsJson = False) -> None:
    """List the cases, with the claims that name them."""
    named: dict[str | None, list[str]] = {}
    for card in load_all().values():
        for task in tasks_of_card(card):
            named.setdefault(task.case, []).append(task.claim.id if task.claim else "")
    rows = [
        {"id": c.id, "kind": c.kind, "claims": named.get(c.id, []), "profiles": list(c.profiles), "metric": c.metric, "summary": c.summary}
        for c in map(load_case, list_cases())
    ]
    print_json(rows) if as_json else print_table(rows, ("id", "kind", "claims", "profiles", "summary"))


@_bench_app.command("check")
def bench_check(
    cases: Annotated[list[str], typer.Argument(metavar="CASE", help="Ids of cases.")],
    profile: Profile = None,
    full_length: Annotated[bool, typer.Option("--full-length", help="Keep the case's own number of steps.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check activation proofs by one short launch of each variant, before a series is spent on them; exit code 5 where one does not hold."""
    from playbook_bench.judge.receipt import in_words
    from playbook_bench.run import prove

    def show(proof: prove.Proof) -> None:
        ended = "proven" if proof.ok else ("not proven" if proof.outcome == "ok" else f"{proof.outcome}: {proof.message}")
        (complain if as_json else say)(f"{proof.case}  {proof.variant}  {ended}")
        for check in proof.checks:
            (complain if as_json else say)(f"  {'ok     ' if check.ok else 'missing'}  {in_words(check)}")

    proofs = prove.prove(cases, profile=profile, full_length=full_length, say=show)
    if as_json:
        print_json([{**asdict(p), "checks": [c.model_dump(mode="json") for c in p.checks], "observed": None, "ok": p.ok} for p in proofs])
    raise typer.Exit(0 if all(p.ok for p in proofs) else 5)


@_bench_app.command("replay")
def bench_replay(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Evidence files.")], as_json: AsJson = False) -> None:
    """Derive verdict and figures again from the recorded runs; exit code 5 where they differ from what was recorded."""
    from playbook_bench.run import replay, store

    rows, claims = [], by_claim(load_all())
    for file in files:
        same, differences = replay.replay(file)
        changed = replay.of_another_claim(store.load(file), claims)
        rows.append({"file": str(file), "same": same, "differences": differences, "another_claim": changed})
        if not as_json:
            say(f"{file}: {'same verdict' if same else 'differs'}{f', on another claim: {changed}' if changed else ''}")
        for line in differences:
            complain(f"  {line}")
    if as_json:
        print_json(rows)
    raise typer.Exit(0 if all(row["same"] for row in rows) else 5)


@_bench_app.command("rejudge")
def bench_rejudge(file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence record.")], results: Results = None) -> None:
    """Judge a record's runs again by this version's rules; a changed verdict becomes a new record that names the old one."""
    from playbook_bench.run import replay

    made = replay.rejudge(file, results or default_results())
    say(f"new record {made}" if made else f"{file}: today's rules give the same verdict; nothing was written")


@_bench_app.command("aa")
def bench_aa(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's id.")],
    profile: Profile = None,
    results: Results = None,
    pairs: Annotated[int, typer.Option(help="Pairs of identical runs; at least 4.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Measure a case's baseline against itself: the noise that a verdict has to clear on this machine. Exit code 3 where it is contaminated, and not stored."""
    from playbook_bench.run import aa, report
    from playbook_bench.run.options import Options

    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    try:
        noise = aa.run(case, Options(profile, results or default_results(), pairs), progress)
    finally:
        progress.close()
    report.print_noise(noise, out)
    if as_json:
        figures = {"metric": noise.metric, "mean": noise.mean, "deviation": noise.deviation, "contaminated": noise.contaminated}
        print_json(
            {"case": noise.baseline.case, "machine": noise.baseline.machine, **figures, "path": str(noise.path) if noise.path else None}
        )
    raise typer.Exit(3 if noise.contaminated else 0)


@_bench_app.command("trace")
def bench_trace(
    case: Annotated[str | None, typer.Argument(metavar="CASE", help="A case's id: both its variants are launched and traced.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Read a trace of any trainer instead: .sqlite of nsys, its .nsys-rep where nsys is installed, or a Chrome trace (.json, .json.gz)."
        ),
    ] = None,
    profile: Profile = None,
    results: Results = None,
    as_json: AsJson = False,
) -> None:
    """Where the time of a step goes: per range for both variants of a case; for a file, per class of kernels, with the wall that the step runs into."""
    from playbook_bench.trace import collect

    if (case is None) == (file is None):
        raise PlaybookError(
            "found a case and a file, or neither; expected one of them: playbook bench trace CASE, or playbook bench trace --file FILE"
        )
    if file is not None:
        _trace_file(file, as_json)
        return
    assert case is not None
    result = collect.run(case, profile=profile, results=results, progress=complain if as_json else say)
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        say(f"{result.case} on {result.machine.description}, by {result.collector} {result.collector_version}")
        for variant, traced in result.variants.items():
            if traced.table is not None:
                say(f"\n{variant}")
                print_trace(traced.table.model_dump(mode="json"))
    raise typer.Exit(0 if result.ok else 5)


def _trace_file(file: Path, as_json: bool) -> None:
    """The walls of a trace that somebody else made; with our ranges in it, their table as well."""
    from playbook_bench.trace import collect, table, walls

    timeline = collect.timeline_from_file(file)
    found = walls.walls(timeline)
    ranges = table.build(timeline).model_dump(mode="json") if any(s.name == table.STEP for s in timeline.spans) and timeline.ops else None
    if as_json:
        print_json({**asdict(found), "ranges": ranges})
        return
    print_walls(asdict(found))
    if ranges is not None:
        say("\nby range")
        print_trace(ranges)


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
    from playbook_bench.commands import ab as two_commands
    from playbook_bench.commands import traced
    from playbook_bench.machine import detect
    from playbook_bench.run import confirm as harness
    from playbook_bench.run import report
    from playbook_bench.run.options import Options

    asked = two_commands.question(
        words,
        setting or [],
        variable or [],
        metric=metric,
        margin=to_share(margin, "--margin"),
        steps=Steps(log=log, file=log_file, count=steps, warm_up=warm_up),
        loss=None if loss == "any" else to_share(loss, "--loss"),
        timeout_s=to_seconds(timeout, "--timeout") or 0.0,
    )
    machine = detect.detect()
    out = report.console(sys.stderr if as_json else None)
    progress = report.LaunchLines(out)
    options = Options(
        machine.name,
        results or default_results(),
        pairs,
        to_seconds(budget),
        seed,
        settles=lambda derived: two_commands.answer(derived, asked.margin).verdict != "undecided",
    )
    try:
        (outcome,) = harness.bench_run(
            two_commands.case_of(asked, machine.name), options, progress, shlex.join(["playbook", *sys.argv[1:]])
        )
    except LaunchError as e:
        complain(f"error: {e}")
        if as_json:
            print_json(two_commands.as_json(asked, two_commands.Answer("error"), "", str(e)))
        raise typer.Exit(two_commands.EXIT_CODES["error"]) from e
    finally:
        progress.close()
    found = two_commands.answer(outcome.evidence.derived, asked.margin)
    report.print_outcome(outcome, out, found.verdict)
    report.print_summary([outcome], out)
    walls = _walls(asked, machine.name, traced.Asked(trace, trace_with or [])) if trace is not None else {}
    if as_json:
        answered = two_commands.as_json(asked, found, str(outcome.path), outcome.evidence.derived.verdict.sentence)
        print_json(answered | ({"walls": walls} if walls else {}))
    for variant, each in [] if as_json else walls.items():
        say(f"\n{variant}")
        print_walls(each)
    raise typer.Exit(two_commands.EXIT_CODES[found.verdict])


def _walls(asked: two_commands.Question, profile: str, how: traced.Asked) -> dict[str, dict[str, Any]]:
    """The walls of both commands; where they cannot be had, a line says why, and the answer stands."""
    from playbook_bench.commands import ab as two_commands
    from playbook_bench.commands import traced

    try:
        return {variant: asdict(each) for variant, each in traced.both(two_commands.case_of(asked, profile), profile, how).items()}
    except PlaybookError as e:
        complain(f"no trace: {e}")
        return {}
