"""`playbook config export`: a trainer configuration in the words of another trainer. Part of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from playbook.cli.text import print_json, print_table, say
from playbook.errors import PlaybookError
from playbook.yaml_files import did_you_mean

config_app = typer.Typer(no_args_is_help=True, help="Trainer configurations: published ones, and each in other trainers' words.")

TARGETS = ("megatron-lm", "megatron-bridge", "torchtitan")
PLATFORMS = ("cpu", "hopper", "blackwell", "nvl72")


@config_app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout.")] = False) -> None:
    """List the recipes: published configurations as files, with the GPUs that each is meant for."""
    from playbook_trainer.config import recipes

    folder = recipes.folder()
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    rows = [{**r.model_dump(mode="json"), "file": str(shown / r.file)} for r in recipes.index().recipes]
    if as_json:
        print_json(rows)
    else:
        print_table([{**row, "gpus": " or ".join(map(str, row["gpus"]))} for row in rows], ("file", "gpus", "hardware", "title"))


@config_app.command("export")
def export(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration, such as trainer/configs/qwen3_30b_a3b_24l.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key.path=value", help="key.path=value, such as parallel.ep=8.")] = None,
    to: Annotated[
        str, typer.Option("--to", help="megatron-lm (flags), megatron-bridge (overrides) or torchtitan (a job file).")
    ] = "megatron-lm",
    platform: Annotated[
        str, typer.Option(help="The GPUs that environment variables are for: hopper, blackwell (nodes of eight), nvl72 or cpu.")
    ] = "hopper",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on one line of stdout, with the keys behind each setting.")
    ] = False,
) -> None:
    """Print a configuration as Megatron-LM flags, Megatron-Bridge overrides or a torchtitan job file; what cannot be said there is a comment."""
    from playbook_trainer.config.tree import load, parse_overrides
    from playbook_trainer.export.render import export as exported

    _one_of("--to", to, TARGETS)
    _one_of("--platform", platform, PLATFORMS)
    found = exported(load(Path(config), parse_overrides(overrides or [])), to, platform)  # type: ignore[arg-type]
    if as_json:
        print_json(found.document())
    else:
        say(found.text().rstrip())


def _one_of(option: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise PlaybookError(f"{option} is '{value}'{did_you_mean(value, names)}")
