"""A Qwen3-MoE of Hugging Face transformers with random weights and tokens, trained as its users would; prints a JSON line for each step.

`--experts` names how transformers computes the experts: `grouped_mm` or `eager`. `--master` keeps float32 weights beside those in 16 bits,
which AdamW updates with float32 moments. `--trace FILE` leaves a trace of the last step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def main() -> None:
    """Train a small Qwen3-MoE of transformers on random tokens, and print the time of each step."""
    words = argparse.ArgumentParser()
    words.add_argument("--experts", default="grouped_mm")
    words.add_argument("--layers", type=int, default=4)
    words.add_argument("--hidden", type=int, default=2048)
    words.add_argument("--num-experts", type=int, default=128)
    words.add_argument("--seq-len", type=int, default=4096)
    words.add_argument("--vocab", type=int, default=32_000)
    words.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    words.add_argument("--micro-batches", type=int, default=1, help="of a step")
    words.add_argument("--master", action="store_true")
    words.add_argument("--steps", type=int, default=30)
    words.add_argument("--trace", type=Path)
    arguments = words.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(4, arguments.hidden // 64),
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=max(32, 3 * arguments.hidden // 8),
        intermediate_size=arguments.hidden,
        num_experts=arguments.num_experts,
        num_experts_per_tok=min(8, arguments.num_experts),
        vocab_size=arguments.vocab,
    )
    with device:  # billions of random weights take the host most of a minute
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.set_experts_implementation(arguments.experts)
    print("experts are computed by", model.config._experts_implementation, flush=True)
    update = with_master(model) if arguments.master else torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for step in range(1, arguments.steps + 1):
        tokens = torch.randint(0, config.vocab_size, (arguments.micro_batches, arguments.rows, arguments.seq_len), device=device)
        wait()
        began = time.perf_counter()
        traced = arguments.trace is not None and step == arguments.steps
        with torch.profiler.profile() if traced else contextlib.nullcontext() as profile:
            with torch.profiler.record_function("step"):
                value = torch.zeros((), device=device)
                for rows in tokens:
                    loss = model(input_ids=rows, labels=rows).loss / len(tokens)
                    loss.backward()
                    value += loss.detach()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                update()
                model.zero_grad()
                value = value.item()
            wait()
        seconds = time.perf_counter() - began
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        row = {"step": step, "seconds": seconds, "loss": value, "tokens": tokens.numel(), "peak_memory_bytes": memory}
        print(json.dumps(row), flush=True)
        if profile is not None:
            profile.export_chrome_trace(str(arguments.trace))


def with_master(model: torch.nn.Module) -> Callable[[], None]:
    """AdamW on float32 weights beside the model's; a tensor at a time has its gradient in float32."""
    of = {weight: torch.nn.Parameter(weight.detach().float()) for weight in model.parameters()}
    each = {weight: torch.optim.AdamW([master], lr=1e-5, fused=True) for weight, master in of.items()}

    def update() -> None:
        for weight, master in of.items():
            master.grad = weight.grad.float()
            each[weight].step()
            weight.data.copy_(master)
            master.grad = None

    return update


if __name__ == "__main__":
    main()
