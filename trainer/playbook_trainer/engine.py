"""The interface between the training loop and a backend; `torch/engine.py` and `megatron/engine.py` implement it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from playbook_trainer.axes import Axes
from playbook_trainer.checkpoint_files import Best
from playbook_trainer.data.batch import Batch


class Saver(Protocol):
    """Saves and restores one run."""

    latest: int | None
    """The step of the newest checkpoint; None before the first."""

    @property
    def writing(self) -> bool:
        """Whether the checkpoint that was saved last is left to the background, beside the steps that follow."""

    @property
    def behind(self) -> bool:
        """Whether the background still writes a checkpoint, so that the next one has to wait for it."""

    def restore(self) -> Any | None:
        """Load the newest complete checkpoint. Returns its header, which has `step`, `data` and `best`,
        or None where there is no checkpoint.
        """

    def save(self, step: int, data: dict[str, Any], best: Best | None) -> str | None:
        """Save weights, optimizer state, `data` (the position in the data) and the best evaluation so far after `step`;
        `best` names a checkpoint to keep.

        Returns the name of a weight or moment that is not finite, and has saved nothing then.
        """

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete."""


class Engine(Protocol):
    """A model on this rank with its optimizer.

    In each step the loop calls `local`, `forward_backward` and `squared_norm`, then `update` or `drop_gradients`.
    """

    axes: Axes
    model: nn.Module
    saver: Saver

    def local(self, batches: list[Batch]) -> list[Any]:
        """This rank's share of each micro-batch, on its device."""

    def forward_backward(self, batches: list[Any], labels: Tensor) -> Tensor:
        """Accumulate gradients of (summed loss / `labels`), where `labels` is the number of labels of the step on all ranks.

        Returns this rank's summed loss, which is zero before the last pipeline stage.
        """

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, float64. All gradients must be complete."""

    def update(self, rate: float, norm: Tensor) -> None:
        """Clip by the global gradient norm `norm`, update at the learning rate `rate`, and set all gradients to None."""

    def drop_gradients(self) -> None:
        """Set all gradients to None, without an update."""

    def count_load(self, on: bool) -> None:
        """From now on count how often each expert is chosen, from zero; or no longer. Only where `moe.load_every` is set."""

    def load(self) -> Tensor:
        """This rank's share of the counts: decoder layers of the whole model by experts; the sum over all ranks counts each token once."""

    def evaluate(self, batches: list[Any]) -> Tensor:
        """Summed loss and number of labels of `batches`, of which this rank counts its share, without building a graph;
        float64 [2] on its device.
        """

    def export(self, folder: Path) -> None:
        """Write the weights as Hugging Face transformers loads them."""

    def count_parameters(self) -> tuple[int, int]:
        """Number of parameters of the whole model, and of those that are trained. Counts the full model even if this rank holds a shard."""

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state on this rank."""

    def moe_layers(self) -> tuple[int, int]:
        """Number of decoder layers on this rank, and how many of them are mixture-of-experts layers."""

    def ranges(self) -> AbstractContextManager[None]:
        """A block inside which the model announces the named ranges of its layers."""
