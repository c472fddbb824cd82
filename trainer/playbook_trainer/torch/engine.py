"""The torch backend on one rank: this trainer's own model, FSDP2 and AdamW behind the calls of the loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from playbook_trainer import axes as layout
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import Batch
from playbook_trainer.engine import Saver
from playbook_trainer.observe.receipt import state_bytes
from playbook_trainer.torch import build, optimizer, weights
from playbook_trainer.torch.checkpoint import Checkpointer
from playbook_trainer.torch.model import balance
from playbook_trainer.torch.parallel import context, pipeline, tensor
from playbook_trainer.torch.parallel.pipeline import evaluate, forward_backward
from playbook_trainer.torch.parallel.sharding import count_parameters


class TorchEngine:
    """PyTorch-native training on one rank: the protocol `Engine` by FSDP2, torch.compile and this trainer's parallel layers."""

    def __init__(self, config: TrainerConfig, rank: int, world: int, device: torch.device) -> None:
        """Build this rank's stage of the model, its optimizer, and what saves both."""
        self.config, self.device = config, device
        self.axes = layout.build(world, rank, config.parallel)
        self.model = build.build(config, self.axes, device)
        self.parts = optimizer.shards(self.model, self.axes)
        self.optim = optimizer.make(self.parts, config.optimizer)
        self.frozen = optimizer.Frozen(self.model)
        if config.optimizer.master_weights == "remainder":
            build.initialise(self.model, config, self.axes, device, optimizer.put_into(self.optim, self.parts, self.frozen))
            for part in self.parts:
                if self._is_reduced_again(part):
                    optimizer.add_in_float32(part)
        self.balances = balance.attach(self.model, config, self.axes, device)
        biases = {f"balance.layers.{n}.moe.router.bias": b.bias_E for n, b in self.balances.items() if b.bias_E is not None}
        self.saver: Saver = Checkpointer(config, self.axes, self.model, self.parts, self.optim, self.frozen, biases)

    def _is_reduced_again(self, part: optimizer.Shard) -> bool:
        """Whether something is added to the gradient after FSDP's reduction:
        that of another micro-batch, pipeline stage or tensor-parallel rank.
        """
        train, axes = self.config.train, self.axes
        return train.global_batch_size > train.micro_batch_size * axes.dp.size or axes.pp.size > 1 or part.partial

    def local(self, batches: list[Batch]) -> list[Batch]:
        """This rank's context-parallel and sequence-parallel share of each micro-batch, on its device.
        Only the first stage, which has the tower, gets pixels.
        """
        axes = self.axes
        whole = batches if axes.is_first_stage else [replace(b, vision=None) for b in batches]
        split = (context.split(b, axes.cp, self.config.parallel.cp_comm) for b in whole)
        # Padding matters to the balance of experts alone.
        return [tensor.cut(b if self.balances else replace(b, real_N=None), axes).to(self.device) for b in split]

    def forward_backward(self, batches: list[Batch], labels: Tensor) -> Tensor:
        """Accumulate gradients of (summed loss / labels); return this rank's summed loss.
        The two stages that hold a tied matrix add its gradients up.
        """
        loss = forward_backward(self.model, batches, labels, self.axes)
        pipeline.sum_gradients(self.model, self.axes)
        return loss

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm. Gradients that tensor-parallel ranks have computed in parts are added up
        first.
        """
        optimizer.sum_over_tp(self.parts, self.axes, self.device)
        return optimizer.squared_norm(self.parts, self.device)

    def update(self, rate: float, norm: Tensor) -> None:
        """Clip by `norm`, then update this rank's shards by AdamW at the learning rate `rate`."""
        for group in self.optim.param_groups:
            group["lr"] = rate
        optimizer.step(self.optim, self.parts, norm, self.config.optimizer.clip_norm)
        if self.config.moe.bias_update_rate and self.balances:
            balance.update_biases(list(self.balances.values()), self.config.moe.bias_update_rate, self.axes)

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        optimizer.drop_gradients(self.parts)
        balance.reset(self.balances.values())

    def count_load(self, on: bool) -> None:
        """From now on count how often each expert is chosen, from zero; or no longer, unless the bias needs it."""
        for each in self.balances.values():
            each.is_counting = on or each.bias_E is not None
        balance.reset(self.balances.values())

    def load(self) -> Tensor:
        """This rank's share of the counts: decoder layers of the whole model by experts."""
        return balance.load(self.balances, self.config.model.num_layers, self.axes)

    def evaluate(self, batches: list[Batch]) -> Tensor:
        """This rank's share of summed loss and number of labels over `batches`, without building a graph."""
        return evaluate(self.model, batches, self.axes)

    def export(self, folder: Path) -> None:
        """Write the weights as Hugging Face transformers loads them, gathering one tensor at a time."""
        masters = optimizer.masters(self.optim, self.parts) | self.frozen.wholes()
        weights.save(self.model, self.axes, folder, masters=masters, config=self.config)

    def count_parameters(self) -> tuple[int, int]:
        """Number of parameters of the whole model, and of those that are trained. Counts the full model even if this rank holds a shard."""
        return count_parameters(self.model, self.axes, self.device)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state on this rank. Gradients exist only between the backward pass and the
        update.
        """
        return state_bytes(self.model, self.optim)

    def moe_layers(self) -> tuple[int, int]:
        """Number of decoder layers on this rank, and how many of them are mixture-of-experts layers."""
        layers = len(self.model.layers)
        return layers, layers if self.config.model.num_experts else 0

    def ranges(self) -> AbstractContextManager[None]:
        """A block that does nothing: this model announces the ranges inside its layers at all times."""
        return nullcontext()
