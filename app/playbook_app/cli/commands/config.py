"""`playbook config`: list and export trainer configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from playbook.errors import PlaybookError
from playbook.paths import shipped
from playbook.planner.models import named
from playbook.yaml_files import did_you_mean
from playbook_app.cli.options import AsJson, Wide, commands
from playbook_app.cli.output import print_json, print_table, say
from playbook_trainer.config import recipes
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.export.render import export as exported

TARGETS = ("megatron-lm", "megatron-bridge", "torchtitan")
PLATFORMS = ("cpu", "hopper", "blackwell", "nvl72")

app = commands()


@app.command("list")
def config_list(wide: Wide = False, as_json: AsJson = False) -> None:
    """List the recipes: published configurations as files, with the GPUs that each is meant for."""
    rows = [{**r.model_dump(mode="json"), "file": str(_recipes() / r.file)} for r in recipes.index().recipes]
    if as_json:
        print_json(rows)
    else:
        print_table(
            [{**row, "file": Path(row["file"]).name, "gpus": " or ".join(map(str, row["gpus"]))} for row in rows],
            ("file", "gpus", "hardware", "title"),
            ("hardware", "gpus"),
            wide,
        )
        say(f"they lie in {_recipes()}")


def _recipes() -> Path:
    """The folder of the recipes, as seen from here where it lies below."""
    folder = recipes.folder()
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


@app.command("export")
def config_export(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration, such as trainer/configs/qwen3_30b_a3b_24l.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key.path=value", help="key.path=value, such as parallel.ep=8.")] = None,
    to: Annotated[
        str, typer.Option("--to", help="megatron-lm (flags), megatron-bridge (overrides) or torchtitan (a Python file).")
    ] = "megatron-lm",
    platform: Annotated[
        str, typer.Option(help="The GPUs that environment variables are for: hopper, blackwell (nodes of eight), nvl72 or cpu.")
    ] = "hopper",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on one line of stdout, with the keys behind each setting.")
    ] = False,
) -> None:
    """Print a configuration as Megatron-LM flags, Megatron-Bridge overrides or a torchtitan Python file; what the other trainer lacks
    becomes a comment.
    """
    _one_of("--to", to, TARGETS)
    _one_of("--platform", platform, PLATFORMS)
    _refuse_name(config, to)
    export = exported(load(Path(config), parse_overrides(overrides or [])), to, platform)  # type: ignore[arg-type]
    if as_json:
        print_json(export.document())
    else:
        say(export.text().rstrip())


def _refuse_name(config: str, to: str) -> None:
    """Refuse a name that is no file: of a published configuration, or of a model.

    Raises:
        PlaybookError: it is one; the message says what to write instead.
    """
    if os.path.lexists(config) or shipped("configs", Path(config)):
        return
    file = f"{Path(config).name.removesuffix('.yaml')}.yaml"
    if file in {r.file for r in recipes.index().recipes}:
        raise PlaybookError(f"{config} is no file; expected that of the published configuration: {_recipes() / file}")
    if model := named(config):
        raise PlaybookError(
            f"{config} is a model, expected the file of a configuration; `playbook config list` names published ones,"
            f" and `playbook plan {model} --gpus N --export {to}` prints the fastest layout"
        )


def _one_of(option: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise PlaybookError(f"{option} is '{value}'{did_you_mean(value, names)}")
