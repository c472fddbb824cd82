"""Experiment trackers: TensorBoard and Weights & Biases, with the whole resolved configuration and every line of the metrics."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from playbook.errors import ConfigError
from playbook_trainer.config.tree import TrainerConfig, dump

_CONFIG_TAG = "config"
"""TensorBoard's text with the resolved configuration: YAML, indented by four spaces so that it is shown as it is."""


class Tracker(Protocol):
    """An experiment tracker: receives the figures of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the figures of one step."""

    def close(self, summary: Mapping[str, float]) -> None:
        """Send the figures of the whole run, then close the tracker."""


def check(config: TrainerConfig) -> None:
    """Refuse trackers whose packages are missing.

    Raises:
        ConfigError: with what to install.
    """
    for name, is_chosen in (("tensorboard", config.tracker.tensorboard), ("wandb", config.tracker.wandb)):
        if is_chosen and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracker.{name} needs the package {name}, which is not installed; run pip install '.[trackers]' in a clone of Playbook, "
                f"or set tracker.{name}: false"
            )


def start(config: TrainerConfig, out: Path) -> list[Tracker]:
    """Open the trackers that the configuration names, and send each the whole resolved configuration.

    Raises:
        ConfigError: one of them cannot be reached.
    """
    settings = config.tracker
    trackers: list[Tracker] = [TensorBoard(config, out)] if settings.tensorboard else []
    return [*trackers, WandB(config, out)] if settings.wandb else trackers


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics; what is not finite is NaN, nested ones are joined by a slash."""
    numbers: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            numbers |= {f"{key}/{k}": v for k, v in figures(value).items()}
        elif value is None and key in ("loss", "grad_norm", "eval_loss"):
            numbers[key] = math.nan
        elif isinstance(value, int | float) and key != "step":
            numbers[key] = float(value)
    return numbers


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, config: TrainerConfig, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"))
        text = yaml.safe_dump(dump(config), sort_keys=False)
        self._writer.add_text(_CONFIG_TAG, "".join(f"    {line}\n" for line in text.splitlines()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per figure."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, summary: Mapping[str, float]) -> None:
        """The summary's figures as scalars of step 0, below `summary/`."""
        for name, value in summary.items():
            self._writer.add_scalar(f"summary/{name}", value, 0)
        self._writer.close()


class WandB:
    """A run of Weights & Biases; offline, a folder that `wandb sync` uploads."""

    def __init__(self, config: TrainerConfig, out: Path) -> None:
        import wandb

        settings = config.tracker
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name,
                dir=str(out),
                config=dump(config),
                mode="offline" if settings.offline else "online",
            )
        except (wandb.errors.Error, OSError) as e:
            raise ConfigError(f"tracker.wandb: {e}; log in with `wandb login`, or set tracker.offline: true") from e

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row to the run's history."""
        self._run.log(dict(values), step=step)

    def close(self, summary: Mapping[str, float]) -> None:
        """The summary's figures; waits until all has been written or sent."""
        self._run.summary.update(dict(summary))
        self._run.finish()
