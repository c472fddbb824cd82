"""A configuration's model as the arithmetic of `playbook` knows it."""

from __future__ import annotations

from playbook.planner.models import from_preset
from playbook.planner.shapes import Shape
from playbook_trainer.config.model import ModelConfig


def shape_of(model: ModelConfig) -> Shape:
    """A model's counts, by the same reader as those of the presets."""
    return from_preset(model.model_dump(), model.name)
