"""Check, run and read performance claims about training large models.

Exit codes: 0 confirmed, passed or done; 1 refuted, or a regression; 2 usage, an invalid file or a finding; 3 inconclusive;
4 not applicable on this machine; 5 a run failed, or a replay differs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playbook import __version__
from playbook.cli import exit_codes, lint
from playbook.cli import slurm as cli_slurm
from playbook.cli.bisect import bisect
from playbook.cli.config import config_app
from playbook.cli.evidence import as_shown, evidence_app, here, records_here, status_of
from playbook.cli.layout import layout_app
from playbook.cli.mcp import mcp
from playbook.cli.search import search
from playbook.cli.skills import skills_app
from playbook.cli.text import card_lines, complain, print_json, print_table, print_trace, say
from playbook.cli.train import train
from playbook.errors import PlaybookError
from playbook.text import count

# Everything else is imported inside the commands, so that `playbook --help` stays quick and free of torch.
if TYPE_CHECKING:
    from pydantic import BaseModel

    from playbook.cards.model import Card
    from playbook.records.read import Record
    from playbook_bench.run.confirm import Outcome
    from playbook_bench.run.report import TerminalProgress


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__)
cards_app = typer.Typer(no_args_is_help=True, help="Cards: what is claimed, in which scope, why, and where it stands.")
bench_app = typer.Typer(no_args_is_help=True, help="Cases: run one, list them, replay a record, measure the noise, trace.")
schemas_app = typer.Typer(no_args_is_help=True, help="JSON Schemas of the files.")
site_app = typer.Typer(no_args_is_help=True, help="The documentation site.")
for name, sub in (("cards", cards_app), ("bench", bench_app), ("evidence", evidence_app), ("schemas", schemas_app), ("site", site_app)):
    app.add_typer(sub, name=name)
app.add_typer(layout_app, name="layout")
app.add_typer(config_app, name="config")
app.add_typer(skills_app, name="skills")
app.command()(mcp)
app.command()(search)
app.command()(bisect)
app.command()(train)

lint.mount(cards_app)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")]


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: runs the command and exits with its code; a user's mistake is a message, not a traceback."""
    sys.exit(exit_codes.run(app, sys.argv[1:] if argv is None else argv))


@app.command()
def version() -> None:
    """Print the version."""
    say(__version__)


# --- cards -----------------------------------------------------------------------------------------------------------------------


@cards_app.command("check")
def cards_check(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH", help="Cards, or folders of cards; all that ship, if none is given.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings (old sources, expired evidence) count as findings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check cards, their cases and the trainer keys that those use; findings as file:line:column with the rule's id."""
    from playbook.cli.check import check_all
    from playbook.cli.lint import report

    cards, cases, findings = check_all(paths or [])
    claims = [claim for _, _, claim in cards.claims()]
    more = count(sum(c.mechanism_check is not None for c in claims), "mechanism check")
    read = f"{count(len(cards.loaded), 'card')}, {count(len(claims), 'claim')} and {more}, {count(len(cases), 'case')}"
    report(findings, {"cards": len(cards.loaded), "cases": len(cases)}, read, strict=strict, as_json=as_json)


@cards_app.command("list")
def cards_list(
    claims: Annotated[bool, typer.Option("--claims", help="One line per claim, with its status.")] = False, as_json: AsJson = False
) -> None:
    """List the cards, or their claims."""
    from playbook.cards.load import load_all

    known = load_all()
    cards = known.values()
    if claims:
        records = records_here(known, here())
        rows = [row for card in cards for row in _claim_rows(card, records)]
        print_json(rows) if as_json else print_table([as_shown(r) for r in rows], ("id", "card", "status", "statement"))
        return
    keys = ("id", "phase", "wall", "title", "symptoms")
    rows = [{**{k: getattr(c, k) for k in keys}, "claims": [claim.id for claim in c.claims]} for c in cards]
    print_json(rows) if as_json else print_table(rows, ("id", "claims", "phase", "wall", "title"))


def _claim_rows(card: Card, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Each claim of a card with where it stands, followed by its mechanism check."""
    for claim in card.claims:
        shared = {"card": card.id, "kind": claim.kind}
        yield {"id": claim.id, **shared, "mechanism_of": None, **status_of(claim, records), "statement": claim.statement}
        check = claim.mechanism_check
        if check:
            yield {"id": check.id, **shared, "mechanism_of": claim.id, **status_of(check, records), "statement": check.statement}


@cards_app.command("show")
def cards_show(card_id: Annotated[str, typer.Argument(metavar="ID", help="A card's id.")], as_json: AsJson = False) -> None:
    """Show one card, with where its claims stand."""
    from playbook.cards.load import card_of, load_all
    from playbook.yaml_files import did_you_mean

    cards = load_all()
    if card_id not in cards:
        holder = card_of(card_id, cards)
        raise PlaybookError(
            f"'{card_id}' is a claim; write the card that has it, {holder}"
            if holder
            else f"card '{card_id}' does not exist{did_you_mean(card_id, cards)}"
        )
    card = cards[card_id]
    records = records_here(cards, here())
    status = {i.id: status_of(i, records) for c in card.claims for i in (c, c.mechanism_check) if i}
    if as_json:
        print_json({**card.model_dump(mode="json"), "status": status})
    else:
        say("\n".join(card_lines(card, {i: as_shown(row) for i, row in status.items()})))


# --- confirm, bench ------------------------------------------------------------------------------------------------------------------

Profile = Annotated[str | None, typer.Option(help="Machine class, such as cpu or h200x4; the largest that fits, if not given.")]
Results = Annotated[Path | None, typer.Option(help="Where evidence goes; .playbook/results, if not given.")]
Pairs = Annotated[int | None, typer.Option(help="At most this many pairs of launches; never more than the case names.")]
Budget = Annotated[str | None, typer.Option(help="At most this long, such as 90s, 10m or 1h.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the order of runs; random and recorded, if not given.")]
Fork = Annotated[
    bool, typer.Option("--fork", help="Fork ranks from a process that has imported everything, instead of starting each afresh.")
]


@app.command()
def confirm(
    targets: Annotated[list[str] | None, typer.Argument(metavar="CARD[/CLAIM]", help="Such as moe-dispatcher-choice/W9.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every claim of every card.")] = False,
    profile: Profile = None,
    results: Results = None,
    pairs: Pairs = None,
    budget: Budget = None,
    seed: Seed = None,
    launcher: cli_slurm.LauncherName = "local",
    nodes: cli_slurm.Nodes = None,
    cluster: cli_slurm.ClusterFile = None,
    show: cli_slurm.Print = False,
    no_wait: cli_slurm.NoWait = False,
    job: cli_slurm.JobId = None,
    journal: cli_slurm.JournalFolder = None,
    fork: Fork = False,
    as_json: AsJson = False,
) -> None:
    """Test claims on this machine, or on the nodes of a job of Slurm: matched runs of the trainer, a verdict with evidence for each."""
    from playbook.cards.load import load_all
    from playbook_bench.run import confirm as harness

    if every == bool(targets) and not job:
        raise PlaybookError("name cards or claims, or say --all (not both); playbook cards list --claims names them")
    chosen = list(load_all()) if every else targets or []
    seconds = _seconds(budget)
    request = cli_slurm.Request(nodes, cluster, show, not no_wait, job, as_json)
    cli_slurm.check_request(launcher, request)
    slurm = cli_slurm.inside(launcher, cluster)
    if fork and launcher != "local":
        raise PlaybookError(f"--fork has no meaning with --launcher {launcher}; leave one of them out")
    if launcher == "slurm":
        for target in chosen:
            harness.tasks_of(target)  # a mistake is told now, not by a job that waited its turn
        words = cli_slurm.confirm_words(chosen, profile, pairs, budget, seed)
        raise typer.Exit(cli_slurm.confirm(words, results, request, journal))
    kept = cli_slurm.journal(journal, slurm, fork)

    def run(progress: TerminalProgress) -> list[Outcome]:
        limits: dict[str, Any] = {"pairs": pairs, "budget_s": seconds, "seed": seed, "fork": fork}
        return harness.run(chosen, profile=profile, results=results, progress=progress, slurm=slurm, journal=kept, **limits)

    _outcomes(run, as_json)


@bench_app.command("run")
def bench_run(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's id, or the path of a case file.")],
    profile: Profile = None,
    results: Results = None,
    pairs: Pairs = None,
    budget: Budget = None,
    seed: Seed = None,
    fork: Fork = False,
    as_json: AsJson = False,
) -> None:
    """Run one case: a verdict for each claim that names it, or the effect alone where none does."""
    from playbook_bench.run import confirm as harness

    limits: dict[str, Any] = {"pairs": pairs, "budget_s": _seconds(budget), "seed": seed, "fork": fork}

    def run(progress: TerminalProgress) -> list[Outcome]:
        return harness.bench_run(case, profile=profile, results=results, progress=progress, **limits)

    _outcomes(run, as_json)


@bench_app.command("list")
def bench_list(as_json: AsJson = False) -> None:
    """List the cases, with the claims that name them."""
    from playbook.cards.load import load_all
    from playbook.records.case import list_cases, load_case
    from playbook_bench.run.confirm import tasks_of_card

    named: dict[str | None, list[str]] = {}
    for card in load_all().values():
        for task in tasks_of_card(card):
            named.setdefault(task.case, []).append(task.claim.id if task.claim else "")
    rows = [
        {"id": c.id, "kind": c.kind, "claims": named.get(c.id, []), "profiles": list(c.profiles), "metric": c.metric, "summary": c.summary}
        for c in map(load_case, list_cases())
    ]
    print_json(rows) if as_json else print_table(rows, ("id", "kind", "claims", "profiles", "summary"))


@bench_app.command("replay")
def bench_replay(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Evidence files.")], as_json: AsJson = False) -> None:
    """Derive verdict and figures again from the recorded runs; exit code 5 where they differ from what was recorded."""
    from playbook_bench.run import replay

    rows = []
    for file in files:
        same, differences = replay.replay(file)
        rows.append({"file": str(file), "same": same, "differences": differences})
        if not as_json:
            say(f"{file}: {'same verdict' if same else 'differs'}")
        for line in differences:
            complain(f"  {line}")
    if as_json:
        print_json(rows)
    raise typer.Exit(0 if all(row["same"] for row in rows) else 5)


@bench_app.command("rejudge")
def bench_rejudge(file: Annotated[Path, typer.Argument(metavar="FILE", help="An evidence record.")], results: Results = None) -> None:
    """Judge a record's runs again by this version's rules; a changed verdict becomes a new record that names the old one."""
    from playbook_bench.run import replay, store

    made = replay.rejudge(file, results or store.DEFAULT_RESULTS)
    say(f"new record {made}" if made else f"{file}: today's rules give the same verdict; nothing was written")


@bench_app.command("aa")
def bench_aa(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's id.")],
    profile: Profile = None,
    results: Results = None,
    pairs: Annotated[int, typer.Option(help="Pairs of identical runs; at least 4.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Measure a case's baseline against itself: the noise that a verdict has to clear on this machine. Exit code 3 where it is contaminated, and not stored."""
    from playbook_bench.run import aa, report

    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    try:
        noise = aa.run(case, profile=profile, results=results, pairs=pairs, progress=progress)
    finally:
        progress.close()
    report.print_noise(noise, out)
    if as_json:
        figures = {"metric": noise.metric, "mean": noise.mean, "deviation": noise.deviation, "contaminated": noise.contaminated}
        print_json(
            {"case": noise.baseline.case, "machine": noise.baseline.machine, **figures, "path": str(noise.path) if noise.path else None}
        )
    raise typer.Exit(3 if noise.contaminated else 0)


@bench_app.command("trace")
def bench_trace(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's id.")],
    profile: Profile = None,
    results: Results = None,
    as_json: AsJson = False,
) -> None:
    """Trace both variants in launches of their own: time per range, with Nsight Systems where it is on PATH, else Kineto."""
    from playbook_bench.trace import collect

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


@app.command()
def gate(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's id; its baseline configuration is what runs.")],
    baseline: Annotated[str, typer.Option(metavar="REF", help="The commit to compare the working tree with.")],
    profile: Profile = None,
    results: Results = None,
    pairs: Annotated[int | None, typer.Option(help="At most this many pairs of launches; more than the case names add looks.")] = None,
    budget: Budget = None,
    as_json: AsJson = False,
) -> None:
    """Compare the working tree with a commit on one case: pass, regression, undecided or error. What cannot be judged does not pass."""
    from playbook_bench.run import gate as harness
    from playbook_bench.run import report

    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    seconds = _seconds(budget)
    try:
        result = harness.run(case, baseline, profile=profile, results=results, pairs=pairs, budget_s=seconds, progress=progress)
    finally:
        progress.close()
    report.print_gate(result, out)
    if as_json:
        print_json(harness.as_json(result))
    raise typer.Exit(result.exit_code)


def _outcomes(run: Callable[[TerminalProgress], Sequence[Outcome]], as_json: bool) -> None:
    """Run with progress, print every verdict, and leave with the exit code that they add up to."""
    from playbook_bench.run import confirm as harness
    from playbook_bench.run import report

    out = report.console(sys.stderr if as_json else None)
    progress = report.TerminalProgress(out)
    try:
        outcomes = run(progress)
    finally:
        progress.close()
    if len(outcomes) > 1:
        out.print()
        report.print_table(outcomes, out)
    report.print_summary(outcomes, out)
    if as_json:
        print_json(report.as_json(outcomes))
    raise typer.Exit(harness.exit_code(outcomes))


# --- schemas, site --------------------------------------------------------------------------------------------------------------------


@schemas_app.command("export")
def schemas_export(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 2 where the files differ.")] = False,
) -> None:
    """Write the JSON Schemas of all files into schemas/."""
    from playbook import schemas
    from playbook.paths import data_root

    folder = data_root("schemas")
    if not check:
        for path in schemas.write(folder, schema_models()):
            say(str(path))
        return
    lines = schemas.drift(folder, schema_models())
    for line in lines:
        complain(f"{folder / line}")
    if lines:
        complain("run `playbook schemas export` and commit the result")
        raise typer.Exit(exit_codes.USAGE)
    say(f"{count(len(schema_models()), 'schema')}: no drift")


def schema_models() -> dict[str, type[BaseModel]]:
    """The model behind each schema, from the package that owns it."""
    from playbook.cards.model import Card
    from playbook.records.case import Case
    from playbook.records.evidence import Evidence, Machine, Run
    from playbook_bench.launch.cluster import Cluster
    from playbook_trainer.config.tree import TrainerConfig

    return {"card": Card, "case": Case, "cluster": Cluster, "evidence": Evidence, "machine": Machine, "run": Run, "trainer": TrainerConfig}


@site_app.command("build")
def site_build(
    out: Annotated[Path | None, typer.Option(help="The folder of the pages; docs/ of this repository, if not given.")] = None,
    results: Results = None,
) -> None:
    """Write the pages that come from cards and evidence; `make docs` then builds the whole site."""
    from playbook.cli.site import reference
    from playbook.paths import data_root, in_package, repo_root
    from playbook.site import build

    if out is None and in_package(data_root("cards")):
        raise PlaybookError("playbook runs from an installed copy, which has no docs/ of a repository; name a folder with --out")
    folders = [data_root("results"), *([results] if results else [])]
    built = build.generate(out or repo_root() / "docs", folders, reference=reference(typer.main.get_command(app)))
    found = ", ".join(f"{number} {status}" for status, number in sorted(built.statuses.items())) or "none yet"
    say(f"{count(len(built.files), 'page')} from {count(len(built.cards), 'card')}; evidence: {found}")


def _seconds(text: str | None) -> float | None:
    """`90s`, `10m` or `1h` in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    if match is None:
        raise PlaybookError(f"--budget is '{text}'; expected a number and s, m or h, such as 10m")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
