"""A run of Lightning on a tiny model, as a user's own script would be, with CSVLogger, and TensorBoard's where that is asked for."""

from __future__ import annotations

import argparse
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 64


class Model(lightning.LightningModule):
    """Learns to copy its input, and logs loss, step time and tokens."""

    def __init__(self, log_time: bool) -> None:
        super().__init__()
        self.log_time = log_time
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.before = time.perf_counter()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.inner(batch[0]), batch[0])
        self.log("train_loss", loss, on_step=True)
        if self.log_time:
            now = time.perf_counter()
            self.log("step_time", now - self.before, on_step=True)
            self.before = now
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.inner(batch[0]), batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--output", default="lightning-run")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--monitor", action="store_true", help="Lightning's own clock instead of a step time")
    arguments.add_argument("--tensorboard", action="store_true", help="write events, with a validation between logged steps")
    told = arguments.parse_args()
    lightning.seed_everything(7)
    data = DataLoader(TensorDataset(torch.randn(told.steps * 8, WIDTH)), batch_size=8)
    callbacks: list[Any] = []
    if told.monitor:
        callbacks = [lightning.pytorch.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))]
    trainer = lightning.Trainer(
        max_steps=told.steps,
        logger=[kind(told.output, name="", version="") for kind in (CSVLogger, *([TensorBoardLogger] if told.tensorboard else []))],
        log_every_n_steps=2 if told.tensorboard else 1,
        val_check_interval=3 if told.tensorboard else None,
        callbacks=callbacks,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(not told.monitor), data, data if told.tensorboard else None)


if __name__ == "__main__":
    main()
