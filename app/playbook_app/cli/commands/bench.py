"""`playbook bench`: list, run and trace cases, measure their noise, replay their records."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from playbook.cards.load import load_all
from playbook.cards.model import by_claim
from playbook.errors import ExitCode, PlaybookError
from playbook.paths import default_results
from playbook.records.case import list_cases, load_case
from playbook_app.cli.options import AsJson, Budget, Fork, JournalFolder, Pairs, Profile, Results, Seed, Wide, commands, to_seconds
from playbook_app.cli.output import (
    complain,
    print_difference,
    print_hang,
    print_json,
    print_ranks,
    print_snapshot,
    print_table,
    print_trace,
    print_walls,
    say,
)
from playbook_bench.judge.receipt import in_words
from playbook_bench.run import store
from playbook_bench.run.targets import tasks_of_card
from playbook_bench.tune import record as tuning

app = commands()


@app.command("run")
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
    from playbook_app.cli import outcomes
    from playbook_bench.run import confirm, options

    how = options.Options(
        profile,
        results or default_results(),
        pairs,
        to_seconds(budget),
        seed,
        outcomes.local_launcher(fork),
        outcomes.journal(journal, None, fork),
    )
    outcomes.show_outcomes(lambda progress: confirm.bench_run(case, how, progress), as_json)


@app.command("list")
def bench_list(wide: Wide = False, as_json: AsJson = False) -> None:
    """List the cases, with the claims that name them."""
    named: dict[str | None, list[str]] = {}
    for card in load_all().values():
        for task in tasks_of_card(card):
            named.setdefault(task.case, []).append(task.claim.id if task.claim else "")
    rows = [
        {"id": c.id, "kind": c.kind, "claims": named.get(c.id, []), "profiles": list(c.profiles), "metric": c.metric, "summary": c.summary}
        for c in map(load_case, list_cases())
    ]
    print_json(rows) if as_json else print_table(
        rows, ("id", "kind", "claims", "profiles", "summary"), ("profiles", "kind", "claims"), wide
    )


@app.command("check")
def bench_check(
    cases: Annotated[list[str], typer.Argument(metavar="CASE", help="Ids of cases.")],
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Check activation proofs by one short launch of each variant, before a series is spent on them.

    Exit code 5 where one does not hold.
    """
    from playbook_bench.run import aa

    def show(proof: aa.Proof) -> None:
        ended = "proven" if proof.ok else ("not proven" if proof.outcome == "ok" else f"{proof.outcome}: {proof.message}")
        (complain if as_json else say)(f"{proof.case}  {proof.variant}  {ended}")
        for check in proof.checks:
            (complain if as_json else say)(f"  {'ok     ' if check.ok else 'missing'}  {in_words(check)}")

    proofs = aa.prove(cases, profile=profile, say=show)
    for case in (c for c in map(load_case, cases) if c.is_one_sided):
        (complain if as_json else say)(f"{case.id} names no candidate, as a case for the gate need not: its baseline alone was launched")
    if as_json:
        print_json([{**asdict(p), "checks": [c.model_dump(mode="json") for c in p.checks], "observed": None, "ok": p.ok} for p in proofs])
    raise typer.Exit(ExitCode.DONE if all(p.ok for p in proofs) else ExitCode.FAILED)


@app.command("replay")
def bench_replay(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Evidence files.")], as_json: AsJson = False) -> None:
    """Derive verdict and figures again from the recorded runs; exit code 5 where they differ from what was recorded."""
    from playbook_bench.run import replay

    rows, claims = [], by_claim(load_all())
    for file in files:
        if tuning.is_record(file):
            differences, changed = tuning.replay(file), ""
            reproduced = not differences
        else:
            reproduced, differences = replay.replay(file)
            changed = replay.of_another_claim(store.load(file), claims)
        rows.append({"file": str(file), "same": reproduced, "differences": differences, "another_claim": changed})
        if not as_json:
            say(f"{file}: {'same verdict' if reproduced else 'differs'}{f', on another claim: {changed}' if changed else ''}")
        for line in differences:
            complain(f"  {line}")
    if as_json:
        print_json(rows)
    raise typer.Exit(ExitCode.DONE if all(row["same"] for row in rows) else ExitCode.FAILED)


@app.command("aa")
def bench_aa(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's id.")],
    profile: Profile = None,
    results: Results = None,
    pairs: Annotated[int, typer.Option(help="Pairs of identical runs; at least 4.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Measure a case's baseline against itself: the noise that a verdict has to clear on this machine.

    Exit code 3 where it is contaminated.
    """
    from playbook_app.cli import outcomes
    from playbook_bench.run import aa, options, report

    with outcomes.progress(as_json) as progress:
        noise = aa.run(case, options.Options(profile, results or default_results(), pairs), progress)
    report.print_noise(noise, progress.out)
    if as_json:
        print_json(
            {
                "case": noise.case,
                "machine": noise.machine,
                "metric": noise.metric,
                "mean": noise.mean_difference,
                "deviation": noise.rms_difference,
                "contaminated": noise.contaminated,
            }
        )
    raise typer.Exit(ExitCode.UNDECIDED if noise.contaminated else ExitCode.DONE)


@app.command("trace")
def bench_trace(
    case: Annotated[str | None, typer.Argument(metavar="CASE", help="A case's id: both its variants are launched and traced.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Read a trace of any trainer instead: .sqlite of nsys, its .nsys-rep where nsys is installed, or a Chrome trace, plain or"
            " packed; a folder or archive of several ranks, or of their flight recorder's dumps; or a memory snapshot."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --file: the trace before, and where the time went from it to FILE's.")
    ] = None,
    profile: Profile = None,
    results: Results = None,
    as_json: AsJson = False,
) -> None:
    """Where the time of a step goes: per range for both variants of a case; for a file, per class of kernels, with the wall that the step
    runs into.
    """
    from playbook_bench.run import tracing

    if (case is None) == (file is None):
        raise PlaybookError(
            "found a case and a file, or neither; expected one of them: playbook bench trace CASE, or playbook bench trace --file FILE"
        )
    if against is not None:
        if file is None:
            raise PlaybookError("--against names a second trace; expected the first with --file")
        changed = asdict(tracing.between(against, file))
        print_json(changed) if as_json else print_difference(changed, against.name, file.name)
        return
    if file is not None:
        answer = tracing.of_file(file)
        seen, ranges = answer if isinstance(answer, tuple) else (answer, None)
        told = asdict(seen)
        if isinstance(answer, tuple):
            told["ranges"] = ranges.model_dump(mode="json") if ranges else None
        print_json(told) if as_json else _SHOWN[type(seen).__name__](told)
        return
    assert case is not None
    result = tracing.run(case, profile=profile, results=results, progress=complain if as_json else say)
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        say(f"{result.case} on {result.machine.description}, by {result.collector} {result.collector_version}")
        for variant, traced in result.variants.items():
            if traced.table is not None:
                say(f"\n{variant}")
                print_trace(traced.table.model_dump(mode="json"))
    raise typer.Exit(ExitCode.DONE if result.ok else ExitCode.FAILED)


_SHOWN = {"Walls": print_walls, "Ranks": print_ranks, "Hang": print_hang, "Snapshot": print_snapshot}
"""What prints the answer for a file: of one rank its walls, with the table of our ranges where they are in it."""
