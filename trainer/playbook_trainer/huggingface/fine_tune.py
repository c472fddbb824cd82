"""A Qwen3-MoE of Hugging Face transformers with random weights and tokens, trained as its users would; prints a JSON line for each step.

Run by `python -m playbook_trainer.huggingface.fine_tune`; nothing is downloaded. Lines before the steps say what was built, as the
model itself tells: cases find there whether the tested path ran. With `--count` nothing is computed: the most bytes of tensors that are
alive at once are counted over shapes alone, of models that this machine could not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

_SEED = 7
_SPREAD = 0.8
"""Standard deviation of the logarithm of a sample's length, as of chat data: the longest of eight is about twice the mean."""
_IGNORED = -100
"""The label of a token that counts for no loss."""
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--experts": {"default": "grouped_mm", "help": "how transformers computes experts: eager, grouped_mm or batched_mm"},
    "--layers": {"type": int, "default": 4},
    "--hidden": {"type": int, "default": 2048},
    "--num-experts": {"type": int, "default": 128},
    "--vocab": {"type": int, "default": 32_000},
    "--seq-len": {"type": int, "default": 4096},
    "--rows": {"type": int, "default": 1, "help": "of a micro-batch"},
    "--micro-batches": {"type": int, "default": 1, "help": "of a step"},
    "--samples": {"choices": ("none", "padded", "packed"), "default": "none", "help": "samples in place of full rows, and how"},
    "--mean": {"type": int, "default": 600, "help": "tokens of a sample, on average"},
    "--pad-to": {"type": int, "default": 1, "help": "pad rows to a multiple of so many tokens"},
    "--checkpointing": {"action": "store_true", "help": "gradient checkpointing of every layer"},
    "--weights": {"choices": sorted(_DTYPES), "default": None, "help": "bf16 on a GPU and fp32 on a CPU, if not given"},
    "--autocast": {"action": "store_true", "help": "compute in bf16 under autocast"},
    "--master": {"action": "store_true", "help": "float32 weights beside those in 16 bits, which AdamW updates"},
    "--lora": {"choices": ("none", "attention", "experts"), "default": "none", "help": "train adapters of peft alone, on these"},
    "--rank": {"type": int, "default": 16, "help": "of the adapters"},
    "--steps": {"type": int, "default": 10},
    "--trace": {"type": Path, "help": "leave a trace of the last step"},
    "--count": {"action": "store_true", "help": "compute nothing, and count the bytes of live tensors"},
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    return parsed("fine_tune", __doc__, _OPTIONS, words)


def parsed(module: str, doc: str | None, options: Mapping[str, Mapping[str, Any]], words: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line of a module of this folder, which its first line describes."""
    told = argparse.ArgumentParser(prog=f"python -m playbook_trainer.huggingface.{module}", description=(doc or "").splitlines()[0])
    for name, how in options.items():
        told.add_argument(name, **how)
    return told.parse_args(words)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes. `positions` restart at each sample of a packed row, `mask` says which tokens of a row are no padding."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def sample_lengths(count: int, mean: int, longest: int, generator: torch.Generator) -> list[int]:
    """Lengths of samples in tokens, by a log-normal distribution that is cut at a row."""
    spread = torch.randn(count, generator=generator) * _SPREAD - _SPREAD**2 / 2
    return [int(n) for n in (mean * spread.exp()).round().clamp(2, longest)]


def packed(samples: Sequence[torch.Tensor], seq_len: int) -> list[list[torch.Tensor]]:
    """The samples in rows, each in the first row that has room."""
    rows: list[list[torch.Tensor]] = []
    for sample in samples:
        row = next((r for r in rows if sum(map(len, r)) + len(sample) <= seq_len), None)
        if row is None:
            rows.append(row := [])
        row.append(sample)
    return rows


def micro_batches(told: argparse.Namespace, generator: torch.Generator) -> list[MicroBatch]:
    """What a step trains on: the same samples whether they are padded or packed."""
    if told.samples == "none":
        tokens = torch.randint(0, told.vocab, (told.micro_batches, told.rows, told.seq_len), generator=generator)
        return [MicroBatch(rows, rows) for rows in tokens]
    count = told.rows * told.micro_batches * told.seq_len // told.mean
    samples = [torch.randint(1, told.vocab, (n,), generator=generator) for n in sample_lengths(count, told.mean, told.seq_len, generator)]
    if told.samples == "packed":
        rows, width, per_batch = packed(samples, told.seq_len), told.seq_len, told.rows
    else:
        # As many tokens of a micro-batch, on average, as packed rows have.
        rows, width, per_batch = [[sample] for sample in samples], 0, max(1, told.rows * told.seq_len // (2 * told.mean))
    return [_laid_out(rows[i : i + per_batch], width, told.pad_to) for i in range(0, len(rows), per_batch)]


def _laid_out(rows: Sequence[Sequence[torch.Tensor]], width: int, multiple: int) -> MicroBatch:
    """Rows of samples as tensors of `width` tokens, or of the longest row's, up to a multiple, where that is 0; a sample's first token has
    no label.
    """
    width = width or -(-max(sum(map(len, row)) for row in rows) // multiple) * multiple
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    labels, positions, mask = torch.full_like(tokens, _IGNORED), torch.zeros_like(tokens), torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        at = 0
        for sample in row:
            end = at + len(sample)
            tokens[i, at:end], positions[i, at:end], mask[i, at:end] = sample, torch.arange(len(sample)), 1
            labels[i, at + 1 : end] = sample[1:]
            at = end
        positions[i, at:] = torch.arange(width - at)
    one_a_row = all(len(row) == 1 for row in rows)
    return MicroBatch(tokens, labels, mask=mask) if one_a_row else MicroBatch(tokens, labels, positions)


def build(told: argparse.Namespace, device: torch.device) -> Any:
    """The model with random weights, as it is trained."""
    config = Qwen3MoeConfig(
        hidden_size=told.hidden,
        num_hidden_layers=told.layers,
        num_attention_heads=max(4, told.hidden // 64),
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=max(32, 3 * told.hidden // 8),
        intermediate_size=told.hidden,
        num_experts=told.num_experts,
        num_experts_per_tok=min(8, told.num_experts),
        vocab_size=told.vocab,
    )
    dtype = _DTYPES[told.weights or ("bf16" if device.type == "cuda" or told.count else "fp32")]
    with device, _as_default(dtype):  # billions of random weights take the host most of a minute
        model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(told.experts)
    if told.checkpointing:
        model.gradient_checkpointing_enable()
    say(f"experts are computed by {model.config._experts_implementation}")
    say(f"weights are {next(model.parameters()).dtype}, {'under' if told.autocast else 'without'} autocast")
    if told.lora != "none":
        from peft import LoraConfig, get_peft_model

        of_experts = _EXPERTS if told.lora == "experts" else None
        model.enable_input_require_grads()  # checkpointed layers need an input with a gradient
        with device, _as_default(dtype):
            model = get_peft_model(model, LoraConfig(r=told.rank, target_modules=_ATTENTION, target_parameters=of_experts))
    model.train()
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    say(f"adapters on experts: {sum('lora' in name and 'experts' in name for name in trained)}")
    say(f"adapters on attention: {sum('lora' in name and 'self_attn' in name for name in trained)}")
    say(f"whole weights trained: {sum('lora' not in name for name in trained)}")
    return model


@contextlib.contextmanager
def _as_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def forward_passes(model: Any) -> list[bool]:
    """A list that grows by one entry with each forward pass of the first layer: recomputation shows."""
    passes: list[bool] = []
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    layer.register_forward_pre_hook(lambda *_: passes.append(True))  # a recomputation ends before the layer does
    return passes


def gradients(model: Any, batches: Sequence[MicroBatch], autocast: bool) -> torch.Tensor:
    """The loss of a step, the mean over all of its labels; gradients are left in the model."""
    labels = sum((batch.labels[:, 1:] != _IGNORED).sum() for batch in batches)
    value = torch.zeros((), device=batches[0].tokens.device)
    for batch in batches:
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = model(
                input_ids=batch.tokens,
                labels=batch.labels,
                position_ids=batch.positions,
                attention_mask=batch.mask,
                use_cache=False,
                num_items_in_batch=labels,
            ).loss
        loss.backward()
        value += loss.detach()
    return value


def main(words: Sequence[str] | None = None) -> None:
    """Train on random tokens, and print the time of each step; or count its bytes."""
    told = parse(words)
    device = torch.device("cuda" if torch.cuda.is_available() and not told.count else "cpu")
    torch.manual_seed(_SEED)
    generator = torch.Generator().manual_seed(_SEED)
    if told.count:
        return _count(told, generator)
    model = build(told, device)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    passes = forward_passes(model)
    update = _with_master(trained) if told.master else torch.optim.AdamW(trained, lr=1e-5, fused=True).step
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for step in range(1, told.steps + 1):
        batches = [_on(device, batch) for batch in micro_batches(told, generator)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait()
        began = time.perf_counter()
        traced = told.trace is not None and step == told.steps
        with torch.profiler.profile() if traced else contextlib.nullcontext() as profile:
            with torch.profiler.record_function("step"):
                value = gradients(model, batches, told.autocast)
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                update()
                model.zero_grad()
                loss = value.item()
            wait()
        seconds = time.perf_counter() - began
        if step == 1:
            _proof(batches, passes)
        _row(step, seconds, loss, batches, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
        if profile is not None:
            profile.export_chrome_trace(str(told.trace))


def _with_master(trained: Sequence[torch.Tensor]) -> Callable[[], None]:
    """AdamW on float32 weights beside the model's; a tensor at a time has its gradient in float32."""
    of = {weight: torch.nn.Parameter(weight.detach().float()) for weight in trained}
    each = {weight: torch.optim.AdamW([master], lr=1e-5, fused=True) for weight, master in of.items()}

    def update() -> None:
        for weight, master in of.items():
            if weight.grad is None:
                raise RuntimeError("a trained weight has no gradient; expected one of every weight that needs one")
            master.grad = weight.grad.float()
            each[weight].step()
            weight.data.copy_(master)
            master.grad = None

    return update


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most of them at once. Memory that a kernel takes for itself is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count what it returns that is new."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                size = storage.nbytes()
                self._known[storage] = size
                weakref.finalize(storage, self._freed, size)
                self.now += size
                self.most = max(self.most, self.now)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def _count(told: argparse.Namespace, generator: torch.Generator) -> None:
    """Print for each step the most bytes that were alive in it; its seconds are those of the counting."""
    batches_of = [micro_batches(told, generator) for _ in range(told.steps)]
    told_of: list[tuple[float, int]] = []
    model = build(told, torch.device("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, LiveBytes() as live:
        model.to_empty(device="cpu")
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        update, passes = torch.optim.AdamW(trained, lr=1e-5, fused=True).step, forward_passes(model)
        for batches in batches_of:
            live.most, began = live.now, time.perf_counter()
            gradients(model, [MicroBatch(*(None if t is None else fake.from_tensor(t) for t in vars(b).values())) for b in batches], False)
            update()
            model.zero_grad()
            told_of.append((time.perf_counter() - began, live.most))
    _proof(batches_of[0], passes[: len(passes) // told.steps])
    for step, ((seconds, most), batches) in enumerate(zip(told_of, batches_of, strict=True), 1):
        _row(step, seconds, None, batches, most)


def _on(device: torch.device, batch: MicroBatch) -> MicroBatch:
    return MicroBatch(*(None if tensor is None else tensor.to(device) for tensor in vars(batch).values()))


def _proof(batches: Sequence[MicroBatch], passes: Sequence[bool]) -> None:
    """Say of the first step what its rows and its passes were."""
    say(f"micro-batches with several samples in a row: {sum(b.positions is not None for b in batches)}")
    say(f"lengths of rows that are no multiple of 256: {sum(b.tokens.shape[1] % 256 > 0 for b in batches)}")
    say(f"forward passes of a layer for each micro-batch: {len(passes) // len(batches)}")


def _row(step: int, seconds: float, loss: float | None, batches: Sequence[MicroBatch], memory: int) -> None:
    """Print a step. Tokens are the useful ones: those that are predicted, and the first of each sample."""
    tokens = sum(int((b.labels != _IGNORED).sum()) for b in batches)
    row = {"step": step, "seconds": seconds, "tokens": tokens, "peak_memory_bytes": memory}
    say(json.dumps(row if loss is None else {**row, "loss": loss}))


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
