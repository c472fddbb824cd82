"""A run of the Hugging Face Trainer on a tiny model, as a user's own script would be.

`--collate-ms` makes the collator slow. `--faster` batches the same samples with one product instead of one for each position.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

WIDTH, VOCABULARY, LENGTH = 64, 128, 32


class Samples(Dataset[Tensor]):
    """Random tokens, the same in every run."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Tensor:
        return self.tokens[i]


class Model(nn.Module):
    """Predicts each token from itself: enough for a loss that falls."""

    def __init__(self, faster: bool) -> None:
        super().__init__()
        self.faster = faster
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        if self.faster:
            hidden = torch.relu(self.inner(hidden))
        else:
            hidden = torch.stack([torch.stack([torch.relu(self.inner(token)) for token in row]) for row in hidden])
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--output", default="hf-run")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--batch", type=int, default=4)
    arguments.add_argument("--logging-steps", type=int, default=1)
    arguments.add_argument("--collate-ms", type=float, default=0.0)
    arguments.add_argument("--learning-rate", type=float, default=1e-2)
    arguments.add_argument("--faster", action="store_true")
    arguments.add_argument("--tensorboard", action="store_true", help="write events, with a validation between logged steps")
    told = arguments.parse_args()
    set_seed(7)
    if told.faster:
        print("one product for all tokens")

    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        time.sleep(told.collate_ms / 1000)
        tokens = torch.stack(samples)
        return {"input_ids": tokens, "labels": tokens}

    settings = TrainingArguments(
        output_dir=told.output,
        max_steps=told.steps,
        per_device_train_batch_size=told.batch,
        logging_steps=told.logging_steps,
        include_num_input_tokens_seen="all",
        save_strategy="no",
        report_to="tensorboard" if told.tensorboard else "none",
        eval_strategy="steps" if told.tensorboard else "no",
        eval_steps=3,
        use_cpu=True,
        learning_rate=told.learning_rate,
    )
    samples = Samples(told.batch * 16)
    trainer = Trainer(model=Model(told.faster), args=settings, train_dataset=samples, eval_dataset=samples, data_collator=collate)
    trainer.train()
    Path(told.output).mkdir(parents=True, exist_ok=True)
    trainer.save_state()


if __name__ == "__main__":
    main()
