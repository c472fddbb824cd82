"""`playbook skills`: list, check, index and export Agent Skills. Part of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playbook import __version__
from playbook.cli.text import complain, print_json, print_table, say
from playbook.text import count

if TYPE_CHECKING:
    from playbook.skills.check import Accepted, Known
    from playbook.skills.export import Stock

skills_app = typer.Typer(no_args_is_help=True, help="Agent Skills: how to act on cards, one folder per task.")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")]


@skills_app.command("list")
def skills_list(as_json: AsJson = False) -> None:
    """List the skills that ship, with what they are for."""
    from playbook.paths import data_root
    from playbook.skills.model import load_skills

    skills = load_skills(data_root("skills")).values()
    rows = [{"name": s.name, "description": s.front.description, "cards": list(s.cards), "path": str(s.path)} for s in skills]
    print_json(rows) if as_json else print_table(rows, ("name", "cards", "description"))


@skills_app.command("check")
def skills_check(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="A folder of skills; those that ship, if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check skills: front matter, lengths, links, commands, ids, restated figures, and the index; exit code 2 on a finding."""
    from playbook.paths import data_root
    from playbook.skills.check import check
    from playbook.skills.model import index_findings, read_skills

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


@skills_app.command("index")
def skills_index() -> None:
    """Write skills/README.md, the index of the skills that ship."""
    from playbook.paths import data_root
    from playbook.skills.model import INDEX, index, load_skills

    folder = data_root("skills")
    (folder / INDEX).write_text(index(load_skills(folder).values()), encoding="utf-8")
    say(str(folder / INDEX))


@skills_app.command("export")
def skills_export(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the folders go; none of them may exist.")],
    skill: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this skill; may be given several times.")] = None,
) -> None:
    """Write self-contained folders: SKILL.md, card.yaml with the newest verdicts, and copies of what the skill links to."""
    from playbook.paths import data_root
    from playbook.skills.export import export
    from playbook.skills.model import choose, load_skills

    chosen = choose(load_skills(data_root("skills")), skill or [])
    for path in export(chosen, out, stock_here()):
        say(str(path))


def stock_here() -> Stock:
    """Cards, and evidence from this folder's runs and from the repository."""
    from datetime import UTC, datetime

    from playbook.cards.load import load_all
    from playbook.cli.evidence import records_here
    from playbook.skills.export import Stock

    cards = load_all()
    return Stock(cards, records_here(cards, None), datetime.now(UTC).date(), __version__)


def known_here(skills: Sequence[str]) -> Known:
    """What the shipped cards, cases, trainer and this command line know; `skills` are the names that may be mentioned."""
    from playbook.cards.load import load_all
    from playbook.cli.check import trainer_keys
    from playbook.records.case import list_cases
    from playbook.skills.check import Known

    return Known(load_all(), set(list_cases()), set(skills), trainer_keys(), parse)


def parse(words: Sequence[str]) -> Accepted | str:
    """A command line as this version takes it, or its own complaint; nothing is run."""
    from playbook.cli.app import app
    from playbook.skills.check import Accepted

    node: Any = typer.main.get_command(app)
    path: list[str] = []
    rest = list(words)
    while rest and not rest[0].startswith("-") and (children := getattr(node, "commands", None)):
        if rest[0] not in children:
            return f"the command line has no command '{' '.join([*path, rest[0]])}'"
        node = children[rest[0]]
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
