"""`playbook cards rules` and `playbook cards import`, and how findings are printed. Part of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from playbook.cli.text import complain, print_json, print_table, say
from playbook.errors import Finding
from playbook.text import count

USAGE = 2

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout; everything else on stderr.")]


def mount(cards_app: typer.Typer) -> None:
    """Add this module's commands to `playbook cards`."""
    cards_app.command("rules")(rules)
    cards_app.command("import")(import_)


def rules(as_json: AsJson = False) -> None:
    """List the rules of `cards check` and `cards import`."""
    rows = rule_rows()
    print_json(rows) if as_json else print_table(rows, ("id", "weight", "finds"))


def rule_rows() -> list[dict[str, str]]:
    """Every rule: its id, whether it is an error or a warning, and what it finds."""
    from playbook.cli import recipes
    from playbook.cli.check import CASE_RULES
    from playbook.lint import table
    from playbook.skills import foreign

    rows = [{"id": r.id, "weight": "warning" if r.warning else "error", "finds": r.title} for r in table.RULES]
    rows += [
        {"id": i, "weight": "warning" if i == "evidence-old" else "error", "finds": title} for i, title in (*CASE_RULES, *recipes.RULES)
    ]
    return rows + [{"id": i, "weight": "error", "finds": title} for i, title in foreign.RULES]


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A skill folder (SKILL.md, card.yaml), or a folder of such folders.")],
    as_json: AsJson = False,
) -> None:
    """Read skill folders and report what they hold and what is wrong with it; copies no prose, writes nothing."""
    from playbook.skills import foreign

    skills, findings = foreign.read_folder(folder)
    rows = [foreign.summary(s) for s in skills]
    if rows and not as_json:
        print_table(rows, ("skill", "card_keys", "rows", "layouts", "labels", "links"))
    report(findings, {"skills": rows}, count(len(skills), "skill"), strict=True, as_json=as_json)


def report(findings: Sequence[Finding], head: Mapping[str, Any], read: str, *, strict: bool, as_json: bool) -> None:
    """Print findings, and leave with exit code 2 where there are any; warnings count only if `strict`."""
    keys = ("file", "line", "column", "rule", "warning", "message")
    if as_json:
        print_json({**head, "findings": [{k: getattr(f, k) for k in keys} for f in findings]})
    for finding in findings:
        complain(f"{finding}")
    if any(strict or not f.warning for f in findings):
        raise typer.Exit(USAGE)
    if not as_json:
        say(f"{read}: {count(len(findings), 'warning') if findings else 'no findings'}")
