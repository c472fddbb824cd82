"""Models by name, for statements about them."""

from __future__ import annotations

from playbook.errors import ConfigError
from playbook.planner.models import MODELS
from playbook.planner.shapes import Shape


def shape(model: str) -> Shape:
    """The counts of a model.

    Raises:
        ConfigError: the model is not in the table.
    """
    if model not in MODELS:
        raise ConfigError(f"model '{model[:40]}' is not known; expected one of {', '.join(MODELS)}")
    return MODELS[model]
