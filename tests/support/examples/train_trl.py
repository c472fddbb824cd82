"""A run of TRL's SFTTrainer on a tiny model and words without meaning, as a user's own script would be."""

from __future__ import annotations

import argparse

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = 60


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of `w0` to `w59`."""
    names = [*(f"w{i}" for i in range(WORDS)), "<eos>", "<unk>", "<pad>"]
    by_word = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--output", default="trl-run")
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--logging-steps", type=int, default=2)
    told = arguments.parse_args()
    shape = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    samples = Dataset.from_list([{"text": " ".join(f"w{(i * j) % WORDS}" for j in range(20))} for i in range(2 * told.steps)])
    settings = SFTConfig(
        output_dir=told.output,
        max_steps=told.steps,
        per_device_train_batch_size=2,
        logging_steps=told.logging_steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(model=LlamaForCausalLM(shape), args=settings, train_dataset=samples, processing_class=tokenizer())
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main()
