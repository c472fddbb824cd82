"""The recipes in `trainer/configs/recipes/`: configurations that somebody published, as files, with the GPUs that each is meant for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.yaml_files import Strict, load

INDEX = "index.yaml"
SMALL_GPUS = 4
SMALL_HARDWARE = "H200"
"""What the small version of each recipe is meant for."""


class Hardware(Strict):
    """A kind of GPU."""

    memory_gib: float = Field(gt=0)
    """What the driver reports."""
    gpus_per_node: int = Field(gt=0)
    platform: Literal["hopper", "blackwell", "nvl72"]
    """As the cluster's file names it."""


class Source(Strict):
    """Where a configuration was published."""

    title: str
    origin: str
    date: str = Field(pattern=r"^[0-9]{4}(-[0-9]{2}){0,2}$")


class Recipe(Strict):
    """A configuration file, and what it was made for."""

    file: str = Field(pattern=r"^[a-z0-9_]+\.yaml$")
    title: str
    source: Source
    hardware: str
    gpus: list[int] = Field(min_length=1)
    """World sizes that it runs on; the first is the published one."""
    differs: str | None = None
    """Where the published row cannot exist as written, or leaves something open: what the file has instead."""
    small: dict[str, Any]
    """Overrides that make it fit four H200s."""


class Index(Strict):
    """All recipes, and the hardware that they name."""

    hardware: dict[str, Hardware]
    recipes: list[Recipe]


def folder() -> Path:
    """The folder of the recipes."""
    return data_root("configs") / "recipes"


@cache
def index() -> Index:
    """The index of recipes.

    Raises:
        FileError: it does not fit.
    """
    return load(folder() / INDEX, Index)[0]


def find(file: str) -> Recipe:
    """The entry of a recipe file in the index.

    Raises:
        ConfigError: it has none.
    """
    for recipe in index().recipes:
        if recipe.file == file:
            return recipe
    raise ConfigError(f"{file} is not in {INDEX} of the recipes; add its title, source and GPUs there")
