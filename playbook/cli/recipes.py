"""Recipes beside cards and on the site: what each configuration file is, whether it fits, and how to run it. Part of the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from playbook.cards.load import Cards
from playbook.cards.model import ConfigFamily
from playbook.errors import FileError, Finding
from playbook.yaml_files import did_you_mean
from playbook_trainer.config import recipes
from playbook_trainer.config.dry_run import Report, dry_run
from playbook_trainer.config.tree import TrainerConfig, load

PREFIX = "trainer/configs/recipes/"
GIB = 1 << 30
DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp")
RULES = (("family-recipe", "A family's recipe that does not exist, does not load, or is of another model, layout, length or batch"),)
"""Ids and titles, as `playbook.lint.table` has them."""


def findings(cards: Cards) -> Iterator[Finding]:
    """Families whose recipe is not there, or is not what the family says."""
    for entry in cards.loaded:
        for i, family in enumerate(entry.card.families):
            if family.recipe is not None:
                for message in disagreements(family, family.recipe):
                    at = entry.finding(("families", i, "recipe"), message)
                    yield Finding(at.file, at.line, at.column, at.message, RULES[0][0])


def disagreements(family: ConfigFamily, recipe: str) -> Iterator[str]:
    """Where a recipe is not what its family says."""
    path = recipes.folder() / recipe.removeprefix(PREFIX)
    if not path.is_file():
        have = [PREFIX + p.name for p in recipes.folder().glob("*.yaml") if p.name != recipes.INDEX]
        yield f"recipe '{recipe}' does not exist{did_you_mean(recipe, have)}"
        return
    try:
        config = load(path)
    except FileError as e:
        yield f"recipe '{recipe}' does not load: {e.findings[0].message}"
        return
    gpus = family.gpus or recipes.find(path.name).gpus[0]
    for key, (said, found) in _compared(family, config, gpus).items():
        if said is not None and said != found:
            yield f"recipe '{recipe}' has {key} {found}, and family '{family.name}' says {said}; make them agree"


def _compared(family: ConfigFamily, config: TrainerConfig, gpus: int) -> dict[str, tuple[Any, Any]]:
    """What a family says, and what the configuration has, by key; None where the family is silent."""
    par, settings = config.parallel, family.settings
    etp = par.etp or par.tp
    degrees = {"tp": par.tp, "cp": par.cp, "pp": par.pp, "vpp": par.vpp, "ep": par.ep, "etp": etp}
    degrees |= {"dp": gpus // (par.tp * par.cp * par.pp), "edp": gpus // (etp * par.ep * par.pp)}
    numbers = {
        "seq_len": config.data.seq_len,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        **{key: getattr(config.data, key) for key in ("pack", "pack_buffer", "pad_to_multiple", "cache")},
    }
    dispatcher = settings.get("dispatcher", settings.get("moe_flex_dispatcher_backend"))
    said = settings.get("recompute")
    modules = sorted(config.train.recompute_modules)
    return {
        "model": (family.model, config.model.name),
        **{key: (family.layout.get(key), value) for key, value in degrees.items()},
        **{key: (settings.get(key), value) for key, value in numbers.items()},
        "dispatcher": (dispatcher, config.moe.dispatcher),
        "recompute": (sorted(said) if isinstance(said, list) else None, modules),
        "pipeline": (settings.get("pipeline"), "uneven" if par.pipeline_layout else "even"),
    }


def rows() -> list[dict[str, Any]]:
    """Every recipe with its layout, its estimate and the commands that run it, as plain data."""
    found = recipes.index()
    return [_row(recipe, found) for recipe in found.recipes]


def _row(recipe: recipes.Recipe, index: recipes.Index) -> dict[str, Any]:
    path, hardware = PREFIX + recipe.file, index.hardware[recipe.hardware]
    config = load(recipes.folder() / recipe.file)
    reports = {gpus: dry_run(config, gpus) for gpus in recipe.gpus}
    small = dry_run(load(recipes.folder() / recipe.file, recipe.small), recipes.SMALL_GPUS)
    gpus = recipe.gpus[0]
    words = " ".join(f"{key}={_word(value)}" for key, value in recipe.small.items())
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
        "run": f"torchrun --nproc-per-node {gpus} -m playbook_trainer {path}" if gpus <= hardware.gpus_per_node else None,
        "slurm": f"playbook train {path} --launcher slurm --nodes {-(-gpus // hardware.gpus_per_node)} --ranks-per-node {hardware.gpus_per_node}",
        "dry_run": f"playbook train --dry-run --gpus {gpus} {path}",
        "run_small": f"torchrun --nproc-per-node {recipes.SMALL_GPUS} -m playbook_trainer {path} {words}",
        "platform": hardware.platform,
    }


def peak_gib(report: Report) -> float:
    """The fullest rank's peak."""
    return max(stage.peak_bytes for stage in report.stages) / GIB


def _word(value: Any) -> str:
    """A value as it is typed after `key=` in a shell."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def fits(row: Mapping[str, Any]) -> bool:
    """Whether each stated world, and the small version, is estimated to fit."""
    return bool(max(row["peaks_gib"].values()) < row["memory_gib"] and row["small_peak_gib"] < row["small_memory_gib"])
