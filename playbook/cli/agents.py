"""`playbook skills` and `playbook mcp`: the interfaces for agents."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playbook import __version__
from playbook.cards.load import load_all
from playbook.cards.model import Card
from playbook.cli import app as root
from playbook.cli.evidence import here, records_here
from playbook.cli.options import AsJson, commands
from playbook.cli.output import complain, print_findings, print_json, print_table, say
from playbook.errors import PlaybookError
from playbook.mcp.answers import Plan, PlannedCase, PlannedProfile
from playbook.paths import data_root, default_results
from playbook.records.case import LAUNCHED_KINDS, Case, list_cases, load_case
from playbook.records.evidence import Baseline
from playbook.records.machine import CPU
from playbook.records.read import Reader
from playbook.skills import foreign
from playbook.skills.check import Accepted, Known, check
from playbook.skills.export import Stock, export
from playbook.skills.model import INDEX, choose, index, index_findings, load_skills, read_skills
from playbook.text import count

if TYPE_CHECKING:
    from playbook.mcp.server import Library

app = commands()
_skills_app = commands()
app.add_typer(_skills_app, name="skills")


@_skills_app.command("list")
def skills_list(as_json: AsJson = False) -> None:
    """List the skills that come with Playbook, with what each is for."""
    skills = load_skills(data_root("skills")).values()
    rows = [{"name": s.name, "description": s.front.description, "cards": list(s.cards), "path": str(s.path)} for s in skills]
    print_json(rows) if as_json else print_table(rows, ("name", "cards", "description"))


@_skills_app.command("check")
def skills_check(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="A folder of skills; those that ship, if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check skills: front matter, lengths, links, commands, ids, restated figures, and the index; exit code 2 on a finding."""
    home = data_root("skills")
    place = folder or home
    skills, findings = read_skills(place)
    known = known_here([s.name for s in skills])
    findings += [f for s in skills for f in check(s, known)]
    if not findings:
        findings = index_findings(place, skills, required=place.resolve() == home.resolve())
    if as_json:
        rows = [{"file": f.file, "line": f.line, "column": f.column, "message": f.message} for f in findings]
        print_json({"skills": [s.name for s in skills], "findings": rows})
    for finding in findings:
        complain(f"{finding}")
    if findings:
        raise typer.Exit(2)
    if not as_json:
        say(f"{count(len(skills), 'skill')}: no findings")


@_skills_app.command("index")
def skills_index() -> None:
    """Write skills/README.md, the index of the skills."""
    folder = data_root("skills")
    (folder / INDEX).write_text(index(load_skills(folder).values()), encoding="utf-8")
    say(str(folder / INDEX))


@_skills_app.command("export")
def skills_export(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the folders go; none of them may exist.")],
    skill: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this skill; may be given several times.")] = None,
) -> None:
    """Write self-contained folders: SKILL.md, card.yaml with the newest verdicts, and copies of what the skill links to."""
    chosen = choose(load_skills(data_root("skills")), skill or [])
    for path in export(chosen, out, stock_here()):
        say(str(path))


@_skills_app.command("report")
def skills_report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A skill folder (SKILL.md, card.yaml), or a folder of such folders.")],
    as_json: AsJson = False,
) -> None:
    """Read skill folders and report what they hold and what is wrong with it; copies no prose, writes nothing."""
    skills, findings = foreign.read_folder(folder)
    rows = [foreign.summary(s) for s in skills]
    if rows and not as_json:
        print_table(rows, ("skill", "card_keys", "rows", "layouts", "labels", "links"))
    print_findings(findings, {"skills": rows}, count(len(skills), "skill"), strict=True, as_json=as_json)


def stock_here() -> Stock:
    """Cards and evidence for an export: records of this folder and of the repository."""
    cards = load_all()
    return Stock(cards, records_here(cards, None), datetime.now(UTC).date(), __version__)


def known_here(skills: Sequence[str]) -> Known:
    """All ids, keys and commands that a skill may refer to; `skills` are the names of skills it may mention."""
    from playbook.cli.check import trainer_keys

    return Known(load_all(), set(list_cases()), set(skills), trainer_keys(), parse)


def parse(words: Sequence[str]) -> Accepted | str:
    """Parse a command line without running it; the result, or the error message of the parser."""
    node: Any = typer.main.get_command(root.app)
    path: list[str] = []
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(node, "get_command"):
        found = node.get_command(None, rest[0])
        if found is None and hasattr(node, "default"):  # a group whose first word need not be a command
            found, rest = node.get_command(None, node.default), [node.default, *rest]
        if found is None:
            return f"the command line has no command '{' '.join([*path, rest[0]])}'"
        node = found
        path.append(rest.pop(0))
    # The bare name of a command, in a sentence, names it and does not call it.
    if not rest or rest == ["--help"]:
        return Accepted("", {})
    # Newer releases of typer carry their own copy of click; this class is UsageError in either.
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        context = node.make_context(" ".join(path), rest)
    except usage_error as e:
        return str(e.format_message())
    return Accepted(" ".join(path), context.params)


@app.command()
def mcp() -> None:
    """Serve cards, evidence and layout rules to an agent over the Model Context Protocol on stdio; read-only."""
    try:
        from playbook.mcp.server import server
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise PlaybookError("the package 'mcp' is not installed; run pip install '.[mcp]' in a clone of Playbook") from e
    serving = server(library_here())
    # A thread of the library waits for the next line and would hold an interrupted server until one comes. It writes nothing, so it may just end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serving.run("stdio")


def library_here() -> Library:
    """Cards and skills that ship, with evidence from this folder's runs and from the repository."""
    from playbook.cli.diagnosis.changes import changed
    from playbook.mcp.server import Library
    from playbook_trainer.export.plans import launchable

    cards, mine, reader = load_all(), here(), Reader()
    return Library(
        cards=cards,
        skills=load_skills(data_root("skills")),
        records=lambda: records_here(cards, mine, reader=reader),
        today=lambda: datetime.now(UTC).date(),
        plan=plan,
        changed=changed,
        exported=lambda plan, target, hardware: launchable(plan, target, hardware).text(),
        version=__version__,
    )


def plan(card: Card) -> Plan:
    """What `playbook confirm CARD` would run on each profile, from files alone; no machine is looked at."""
    from playbook_bench.run.targets import tasks_of_card

    named: dict[str, list[tuple[str, str]]] = {}
    without = []
    for task in tasks_of_card(card):
        if task.claim is None or task.case is None:
            without += [task.claim.id] if task.claim else []
        else:
            named.setdefault(task.case, []).append((task.claim.id, task.claim.metric))
    cases = [_case(load_case(case), claims) for case, claims in named.items()]
    return Plan(card_id=card.id, command=f"playbook confirm {card.id} --json", cases=cases, without_case=without)


def _case(case: Case, claims: Sequence[tuple[str, str]]) -> PlannedCase:
    from playbook_bench.judge import metrics

    launched = case.kind in LAUNCHED_KINDS

    def exact(profile: str) -> bool:
        return all(metrics.on(metric, gpus=profile != CPU).deterministic for _, metric in claims)

    profiles = [_profile(case, name, exact(name)) for name in case.profiles] if launched else []
    return PlannedCase(case=case.id, kind=case.kind, claims=[i for i, _ in claims], requires=case.requires, profiles=profiles)


def _profile(case: Case, profile: str, exact: bool) -> PlannedProfile:
    """Number of launches by the schedule, and their cost by the stored A/A runs of this profile."""
    from playbook_bench.run import schedule
    from playbook_bench.run.variants import overrides

    stored = _baselines(case.id, profile)
    looks, k = case.budget.looks, len(case.variants)
    # An exact metric is compared in one pair or block, without burn-in.
    least, most = (k, k) if exact else (schedule.launches(looks, None, k), k + k * looks[-1])
    walls = [r.wall_s for b in stored for r in b.runs if r.outcome == "ok"]
    each = median(walls) if walls else None
    limit = 60 * case.budget.minutes
    noise = "exact metric, no noise" if exact else "that of the launches that are compared"
    return PlannedProfile(
        profile=profile,
        ranks=max(overrides(case, v, profile)[1] for v in case.variants),
        launches_least=least,
        launches_most=most,
        seconds_per_launch=each,
        seconds_least=None if each is None else min(limit, least * each),
        seconds_most=None if each is None else min(limit, most * each),
        limit_s=limit,
        noise=noise,
    )


def _baselines(case: str, profile: str) -> list[Baseline]:
    """The stored A/A runs of a case on a profile, in any software environment."""
    from playbook_bench.run.store import load_baseline

    folders: list[Path] = [default_results() / "baselines", data_root("baselines")]
    found = [load_baseline(p) for folder in folders for p in sorted(folder.glob(f"*/{case}.*.json"))]
    return [b for b in found if b.case == case and b.profile == profile]
