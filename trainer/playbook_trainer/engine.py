"""What the training loop asks of a backend, and the torch backend's answers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import Batch
from playbook_trainer.observe.receipt import state_bytes
from playbook_trainer.torch import build as setup
from playbook_trainer.torch import optimizer, weights
from playbook_trainer.torch.checkpoint import Checkpointer
from playbook_trainer.torch.parallel import axes as layout
from playbook_trainer.torch.parallel import context, sequence, tied
from playbook_trainer.torch.parallel.axes import Axes
from playbook_trainer.torch.parallel.pipeline import evaluate, forward_backward
from playbook_trainer.torch.parallel.sharding import count_parameters


class Saver(Protocol):
    """Saves and restores one run."""

    latest: int | None
    """The step that was saved last."""

    def restore(self) -> Any | None:
        """Load the newest complete checkpoint; its header (`step` and `data`), or None."""

    def save(self, step: int, data: dict[str, Any]) -> bool:
        """Save this moment; False where a weight or a moment is not finite."""

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete."""


class Engine(Protocol):
    """A model on this rank with its optimizer. The loop calls, in each step: local, forward_backward, squared_norm, then update or drop_gradients."""

    axes: Axes
    model: nn.Module
    saver: Saver

    def local(self, batches: list[Batch]) -> list[Any]:
        """This rank's share of each micro-batch, on its device."""

    def forward_backward(self, batches: list[Any], labels: Tensor) -> Tensor:
        """Accumulate gradients of (summed loss / labels) and return this rank's summed loss; zero before the last pipeline stage."""

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, float64, once gradients are complete."""

    def update(self, rate: float, norm: Tensor) -> None:
        """Clip by the global norm, update at this rate, and drop the gradients."""

    def drop_gradients(self) -> None:
        """Leave this step's update out."""

    def evaluate(self, batches: list[Any]) -> float:
        """The mean loss per label over the batches of all ranks; NaN where no row has a label."""

    def export(self, folder: Path) -> None:
        """Write the weights as Hugging Face transformers loads them."""

    def count_parameters(self) -> tuple[int, int]:
        """Parameters of the whole model, and those of them that are trained."""

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state that this rank holds."""

    def moe_layers(self) -> tuple[int, int]:
        """Decoder layers on this rank, and those of them that have experts."""

    def ranges(self) -> AbstractContextManager[None]:
        """Inside this block, the ranges within a layer are announced."""


class TorchEngine:
    """The torch backend."""

    def __init__(self, config: TrainerConfig, rank: int, world: int, device: torch.device) -> None:
        self.config, self.device = config, device
        self.axes = layout.build(world, rank, config.parallel)
        self.model = setup.build(config, self.axes, device)
        self.parts = optimizer.shards(self.model, self.axes)
        self.optim = optimizer.make(self.parts, config.optimizer)
        if config.optimizer.master == "split":
            setup.initialise(self.model, config, self.axes, device, optimizer.put_into(self.optim, self.parts))
            for part in self.parts:
                if self._is_reduced_again(part):
                    optimizer.add_in_float32(part)
        self.saver: Saver = Checkpointer(config, self.axes, self.model, self.parts, self.optim)

    def _is_reduced_again(self, part: optimizer.Shard) -> bool:
        """Whether a step adds to a gradient after FSDP has reduced it: another micro-batch's, another stage's, another tensor-parallel rank's."""
        train, axes = self.config.train, self.axes
        return train.global_batch_size > train.micro_batch_size * axes.dp.size or axes.pp.size > 1 or part.partial

    def local(self, batches: list[Batch]) -> list[Batch]:
        """Pixels only where the vision tower is, on the first stage."""
        axes = self.axes
        whole = batches if axes.is_first_stage else [replace(b, vision=None) for b in batches]
        split = (context.split(b, axes.cp, self.config.parallel.cp_comm) for b in whole)
        return [sequence.cut(b, axes).to(self.device) for b in split]

    def forward_backward(self, batches: list[Batch], labels: Tensor) -> Tensor:
        """Gradients are sums over ranks, those of tied matrices over the two stages that hold them."""
        loss = forward_backward(self.model, batches, labels, self.axes)
        tied.sum_gradients(self.model, self.axes)
        return loss

    def squared_norm(self) -> Tensor:
        """What tensor-parallel ranks have computed in parts is added up first."""
        optimizer.sum_over_tp(self.parts, self.axes, self.device)
        return optimizer.squared_norm(self.parts, self.device)

    def update(self, rate: float, norm: Tensor) -> None:
        """AdamW on this rank's shards."""
        for group in self.optim.param_groups:
            group["lr"] = rate
        optimizer.step(self.optim, self.parts, norm, self.config.optimizer.clip_norm)

    def drop_gradients(self) -> None:
        """Forget them."""
        optimizer.drop_gradients(self.parts)

    def evaluate(self, batches: list[Batch]) -> float:
        """No gradients are kept."""
        return evaluate(self.model, batches, self.axes)

    def export(self, folder: Path) -> None:
        """Gathered tensor by tensor."""
        weights.save(self.model, self.axes, folder, masters=optimizer.masters(self.optim, self.parts))

    def count_parameters(self) -> tuple[int, int]:
        """Whatever share of them this rank holds."""
        return count_parameters(self.model, self.axes, self.device)

    def state_bytes(self) -> dict[str, int]:
        """Gradients exist only between the backward pass and the update."""
        return state_bytes(self.model, self.optim)

    def moe_layers(self) -> tuple[int, int]:
        """All layers are alike."""
        layers = len(self.model.layers)
        return layers, layers if self.config.model.num_experts else 0

    def ranges(self) -> AbstractContextManager[None]:
        """The model announces its own ranges."""
        return nullcontext()


def build(config: TrainerConfig, rank: int, world: int, device: torch.device) -> Engine:
    """The backend that the configuration names."""
    if config.backend == "megatron":
        from playbook_trainer.megatron.engine import MegatronEngine

        return MegatronEngine(config, rank, world, device)
    return TorchEngine(config, rank, world, device)
