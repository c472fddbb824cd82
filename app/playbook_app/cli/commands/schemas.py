"""`playbook schemas export`: the JSON Schemas of all files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from playbook import schemas
from playbook.cards.model import Card
from playbook.errors import ExitCode
from playbook.paths import data_root, in_package
from playbook.planner.hardware import Hardware
from playbook.records.case import Case
from playbook.records.evidence import Evidence, Machine, Run
from playbook.text import count
from playbook_app.cli.options import commands
from playbook_app.cli.output import complain, say
from playbook_bench.launch.slurm import Cluster
from playbook_bench.tune.knobs import Knobs
from playbook_trainer.config import tree

app = commands()


@app.command("export")
def schemas_export(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 2 where the files differ.")] = False,
) -> None:
    """Write the JSON Schemas of all files into schemas/: the repository's, or outside of one a folder here."""
    folder, grown = data_root("schemas"), tree.rendered()
    if not check and in_package(folder):
        folder = Path("schemas")
        folder.mkdir(exist_ok=True)
    values = folder / tree.FILE
    if not check:
        values.write_text(grown, encoding="utf-8")
        for path in (*schemas.write(folder, schema_models()), values):
            say(str(path))
        return
    lines = schemas.drift(folder, schema_models())
    if values.read_text(encoding="utf-8") != grown:
        lines.append(f"{tree.FILE}: differs from the keys of the trainer's tree")
    for line in lines:
        complain(f"{folder / line}")
    if lines:
        complain("run `playbook schemas export` and commit the result")
        raise typer.Exit(ExitCode.USAGE)
    say(f"{count(len(schema_models()), 'schema')}: no drift")


def schema_models() -> dict[str, type[BaseModel]]:
    """The Pydantic model behind each schema, by the name of the schema."""
    return {
        "card": Card,
        "case": Case,
        "cluster": Cluster,
        "evidence": Evidence,
        "hardware": Hardware,
        "knobs": Knobs,
        "machine": Machine,
        "run": Run,
        "trainer": tree.TrainerConfig,
    }
