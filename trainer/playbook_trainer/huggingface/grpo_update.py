"""The update phase of TRL's GRPOTrainer on recorded rollouts: nothing is generated, so two runs differ in what is compared alone.

Run by `python -m playbook_trainer.huggingface.grpo_update`; the model has random weights and nothing is downloaded. A JSON line for each
step has the seconds from the end of the rollout to the end of the step: rewards that are read from the record, log-probabilities, the
update.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from playbook_trainer.huggingface.fine_tune import forward_passes, parsed, sample_lengths, say

_SEED = 7


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--layers": {"type": int, "default": 12},
    "--hidden": {"type": int, "default": 2048},
    "--vocab": {"type": int, "default": 151_936},
    "--prompts": {"type": int, "default": 4, "help": "of a step"},
    "--group": {"type": int, "default": 4, "help": "recorded responses of a prompt"},
    "--mean": {"type": int, "default": 600, "help": "tokens of a response, on average, where none are recorded"},
    "--longest": {"type": int, "default": 2048, "help": "most tokens of a response"},
    "--rollouts": {"type": Path, "help": "JSON lines with prompt, completions (token ids) and rewards; made by a seed otherwise"},
    "--micro-batch": {"type": int, "default": 4, "help": "responses of a micro-batch"},
    "--no-checkpointing": {"action": "store_true", "help": "leave out the gradient checkpointing that is on by default"},
    "--steps": {"type": int, "default": 8},
}


def recorded(told: argparse.Namespace) -> list[dict[str, Any]]:
    """Rollouts, one a prompt: `prompt` and each of `completions` as token ids, and the `rewards` of these.

    Raises:
        SystemExit: a line of the file is none, or there are fewer responses than a group needs.
    """
    if told.rollouts is not None:
        rows = [json.loads(line) for line in told.rollouts.read_text(encoding="utf-8").splitlines()]
        few = next((i for i, row in enumerate(rows, 1) if not len(row["completions"]) == len(row["rewards"]) == told.group), None)
        if few is not None:
            raise SystemExit(f"{told.rollouts}:{few}: expected {told.group} completions and as many rewards (--group)")
        return rows
    generator = torch.Generator().manual_seed(_SEED)
    rows = []
    for _ in range(told.prompts * told.steps):
        lengths = sample_lengths(told.group, told.mean, told.longest, generator)
        ids = [torch.randint(1, told.vocab, (n,), generator=generator).tolist() for n in (16, *lengths)]
        rewards = [float(i % 2) for i in range(told.group)]
        rows.append({"prompt": ids[0], "completions": ids[1:], "rewards": rewards})
    return rows


class _Steps(TrainerCallback):
    """Prints a line for each step, from what the trainer logs of it."""

    def __init__(self, passes: list[bool]) -> None:
        self.passes, self.began, self.seconds, self.tokens = passes, 0.0, 0.0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop the clock that the end of a rollout has started."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.began

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Print the step that the log speaks of."""
        if not logs or "grad_norm" not in logs:
            return
        if state.global_step == 1:
            say(f"forward passes of a layer for each micro-batch: {len(self.passes) // args.gradient_accumulation_steps}")
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        row = {"step": state.global_step, "seconds": self.seconds, "tokens": self.tokens, "loss": float(logs["loss"])}
        say(json.dumps({**row, "grad_norm": float(logs["grad_norm"]), "peak_memory_bytes": memory}))


def main(words: Sequence[str] | None = None) -> None:
    """Train on the rollouts, and print the time of each update."""
    told = parsed("grpo_update", __doc__, _OPTIONS, words)
    torch.manual_seed(_SEED)
    rows = recorded(told)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=told.hidden,
                num_hidden_layers=told.layers,
                num_attention_heads=max(4, told.hidden // 128),
                num_key_value_heads=4,
                head_dim=128 if told.hidden >= 1024 else 32,
                intermediate_size=3 * told.hidden,
                vocab_size=told.vocab,
            )
        ).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    steps = _Steps(forward_passes(model))

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """The recorded responses of each prompt, which comes once for each of its group."""
        chosen = [(rows[int(prompt)], i % told.group) for i, prompt in enumerate(prompts)]
        ids = [row["prompt"] for row, _ in chosen]
        completions = [row["completions"][i] for row, i in chosen]
        steps.tokens = sum(map(len, ids)) + sum(map(len, completions))
        steps.passes.clear()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        steps.began = time.perf_counter()
        rewards = [row["rewards"][i] for row, i in chosen]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "recorded": rewards}  # type: ignore[dict-item]

    def reward(recorded: list[float], **_: Any) -> list[float]:
        return recorded

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=told.steps,
            per_device_train_batch_size=told.micro_batch,
            gradient_accumulation_steps=told.prompts * told.group // told.micro_batch,
            num_generations=told.group,
            max_completion_length=told.longest,
            gradient_checkpointing=not told.no_checkpointing,
            learning_rate=1e-6,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            bf16=device.type == "cuda",
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(rows))]),
            processing_class=_tokenizer(told.vocab),
            rollout_func=rollout,
            callbacks=[steps],
        )
        trainer.train()


def _tokenizer(vocab: int) -> Any:
    """One word for each token; TRL asks it for the ends of texts alone."""
    by_word = Tokenizer(models.WordLevel({"<pad>": 0, **{f"w{i}": i for i in range(1, vocab)}}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=by_word, eos_token="<pad>", pad_token="<pad>", unk_token="<pad>")


if __name__ == "__main__":
    main()
