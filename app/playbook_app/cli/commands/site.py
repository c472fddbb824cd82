"""`playbook site build`: pages from models, cards, evidence and commands."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from playbook import schemas
from playbook.errors import PlaybookError
from playbook.paths import data_root, in_package, repo_root
from playbook.planner.memory import GIB
from playbook.text import count
from playbook_app.cli import app as root
from playbook_app.cli.options import Results, commands
from playbook_app.cli.output import say
from playbook_app.services.check import RECIPES
from playbook_app.services.standing import present
from playbook_app.site import build
from playbook_app.site.reference import CommandHelp, field_docs
from playbook_bench import metrics
from playbook_trainer.config import recipes, sections
from playbook_trainer.config import tree as trainer
from playbook_trainer.config.dry_run import Report, dry_run
from playbook_trainer.export.render import change

DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp")

app = commands()


@app.command("build")
def site_build(
    out: Annotated[Path | None, typer.Option(help="The folder of the pages; docs/ of this repository, if not given.")] = None,
    results: Results = None,
) -> None:
    """Write the pages that come from cards and evidence; `make docs` then builds the whole site."""
    if out is None and in_package(data_root("cards")):
        raise PlaybookError("playbook runs from an installed copy, which has no docs/ of a repository; name a folder with --out")
    target = out or repo_root() / "docs"
    target.mkdir(parents=True, exist_ok=True)  # a folder that cannot be had is said before seconds of work
    folders = [data_root("results"), *([results] if results else [])]
    built = build.generate(target, folders, reference=reference())
    evidence = ", ".join(f"{number} {status}" for status, number in sorted(built.statuses.items())) or "none yet"
    say(f"{count(len(built.files), 'page')} from {count(len(built.cards), 'card')}; evidence: {evidence}")


def reference() -> build.Reference:
    """Metrics, commands and configuration keys of the trainer as plain data, for the pages of the site."""
    rows = [{f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "value"} for row in metrics.METRICS.values()]
    docs = {k: v for m in (trainer, sections) for k, v in field_docs(Path(inspect.getfile(m)).read_text(encoding="utf-8")).items()}
    return build.Reference(
        metrics=rows,
        commands=list(walk(typer.main.get_command(root.app), "playbook")),
        schema=schemas.schema("trainer", trainer.TrainerConfig),
        field_docs=docs,
        present=present(None),
        recipes=recipe_rows(),
        flags=change,
    )


def walk(node: Any, name: str) -> Iterator[CommandHelp]:
    """Every command below a node of the command tree, depth first; hidden ones are left out."""
    if node.hidden:
        return
    context = node.make_context(name, [], resilient_parsing=True)
    if hasattr(node, "list_commands"):
        for child in sorted(node.list_commands(context)):
            yield from walk(node.get_command(context, child), f"{name} {child}")
    else:
        usage = " ".join([name, *node.collect_usage_pieces(context)])
        yield CommandHelp(name=name, summary=inspect.cleandoc(node.help or ""), usage=usage, options=list(_options(node)))


def _options(node: Any) -> Iterator[tuple[str, str]]:
    for parameter in node.params:
        if parameter.param_type_name == "argument":
            yield parameter.metavar or parameter.name.upper(), getattr(parameter, "help", "") or ""
        else:
            yield ", ".join([*parameter.opts, *parameter.secondary_opts]), parameter.help or ""


def recipe_rows() -> list[dict[str, Any]]:
    """Every recipe with its layout, its estimate and the commands that run it, as plain data."""
    index = recipes.index()
    return [_row(recipe, index) for recipe in index.recipes]


def _row(recipe: recipes.Recipe, index: recipes.Index) -> dict[str, Any]:
    """One recipe as plain data: layout, estimated peaks in GiB, and the commands that run it."""
    path, hardware = RECIPES + recipe.file, index.hardware[recipe.hardware]
    config = trainer.load(recipes.folder() / recipe.file)
    reports = {gpus: dry_run(config, gpus) for gpus in recipe.gpus}
    small = dry_run(trainer.load(recipes.folder() / recipe.file, recipe.small), recipes.SMALL_GPUS)
    gpus = recipe.gpus[0]
    words = " ".join(f"{key}={_word(value)}" for key, value in recipe.small.items())
    per_node = hardware.gpus_per_node
    return {
        **recipe.model_dump(mode="json"),
        "path": path,
        "backend": config.backend,
        "model": config.model.name,
        "num_parameters": reports[gpus].num_parameters,
        "layout": {k: reports[gpus].layout[k] for k in DEGREES if reports[gpus].layout[k] > 1},
        "memory_gib": hardware.memory_gib,
        "peaks_gib": {n: peak_gib(report) for n, report in reports.items()},
        "small_peak_gib": peak_gib(small),
        "small_memory_gib": index.hardware[recipes.SMALL_HARDWARE].memory_gib,
        "run": f"torchrun --nproc-per-node {gpus} -m playbook_trainer {path}" if gpus <= per_node else None,
        "slurm": f"playbook train {path} --launcher slurm --nodes {-(-gpus // per_node)} --ranks-per-node {per_node}",
        "dry_run": f"playbook train --dry-run --gpus {gpus} {path}",
        "run_small": f"torchrun --nproc-per-node {recipes.SMALL_GPUS} -m playbook_trainer {path} {words}",
        "platform": hardware.platform,
    }


def peak_gib(report: Report) -> float:
    """Peak memory of the fullest rank. Units: GiB."""
    return max(stage.peak for stage in report.stages) / GIB


def _word(value: Any) -> str:
    """A value in the notation of `key=value` on a command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
