"""`playbook skills`: list, check, index and export Agent Skills."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from playbook.cards.load import load_all
from playbook.paths import data_root
from playbook.records.case import list_cases
from playbook.skills.export import export
from playbook.skills.model import INDEX, Accepted, Known, check, choose, index, index_findings, load_skills, read_skills
from playbook.text import count
from playbook_app.cli import app as root
from playbook_app.cli.options import AsJson, Wide, commands
from playbook_app.cli.output import print_findings, print_json, print_table, say
from playbook_app.services.standing import stock_here
from playbook_trainer.config.tree import trainer_keys

app = commands()


@app.command("list")
def skills_list(wide: Wide = False, as_json: AsJson = False) -> None:
    """List the skills that come with Playbook, with the question that each answers; in full with --wide, or in a pipe."""
    skills = load_skills(data_root("skills")).values()
    rows = [
        {"name": s.name, "answers": s.title, "description": s.front.description, "cards": list(s.cards), "path": str(s.path)}
        for s in skills
    ]
    if as_json:
        return print_json(rows)
    short = sys.stdout.isatty() and not wide
    print_table(rows, ("name", "answers", *(() if short else ("cards", "description"))), wide=wide)
    if short:
        say("left out for want of room: cards, description; --wide shows all")


@app.command("check")
def skills_check(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="A folder of skills; those that ship, if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check skills: front matter, lengths, links, commands, ids, restated figures, and the index; exit code 2 on a finding."""
    home = data_root("skills")
    place = folder or home
    skills, findings = read_skills(place)
    references = known_here([s.name for s in skills])
    findings += [f for s in skills for f in check(s, references)]
    if not findings:
        findings = index_findings(place, skills, required=place.resolve() == home.resolve())
    print_findings(
        findings,
        {"skills": [s.name for s in skills]},
        count(len(skills), "skill"),
        strict=True,
        as_json=as_json,
        keys=("file", "line", "column", "message"),
    )


@app.command("index")
def skills_index() -> None:
    """Write skills/README.md, the index of the skills."""
    folder = data_root("skills")
    (folder / INDEX).write_text(index(load_skills(folder).values()), encoding="utf-8")
    say(str(folder / INDEX))


@app.command("export")
def skills_export(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the folders go; none of them may exist.")],
    skill: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this skill; may be given several times.")] = None,
) -> None:
    """Write self-contained folders: SKILL.md, card.yaml with the newest verdicts, and copies of what the skill links to."""
    chosen = choose(load_skills(data_root("skills")), skill or [])
    for path in export(chosen, out, stock_here()):
        say(str(path))


def known_here(skills: Sequence[str]) -> Known:
    """All ids, keys and commands that a skill may refer to; `skills` are the names of skills it may mention."""
    return Known(load_all(), set(list_cases()), set(skills), trainer_keys(), parse)


def parse(words: Sequence[str]) -> Accepted | str:
    """Parse a command line without running it; the result, or the error message of the parser."""
    node: Any = typer.main.get_command(root.app)
    path: list[str] = []
    arguments = list(words)
    while arguments and not arguments[0].startswith("-") and hasattr(node, "get_command"):
        command = node.get_command(None, arguments[0])
        if command is None and hasattr(node, "default"):  # a group whose first word need not be a command
            command, arguments = node.get_command(None, node.default), [node.default, *arguments]
        if command is None:
            return f"the command line has no command '{' '.join([*path, arguments[0]])}'"
        node = command
        path.append(arguments.pop(0))
    # The bare name of a command, in a sentence, names it and does not call it.
    if not arguments or arguments == ["--help"]:
        return Accepted("", {})
    # Newer releases of typer carry their own copy of click; this class is UsageError in either.
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        context = node.make_context(" ".join(path), arguments)
    except usage_error as e:
        return str(e.format_message())
    return Accepted(" ".join(path), context.params)
