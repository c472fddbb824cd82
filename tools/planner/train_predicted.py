"""Train rows of `playbook/_tables/predictions.csv` on one GPU with plain transformers, peft, bitsandbytes and DeepSpeed, random weights and
random tokens.

    python tools/planner/train_predicted.py one-llama31-8b-lora16 one-llama31-8b-16-layers-zero2

Each row runs in a process of its own and ends in one JSON line: tokens/s (median of the timed steps), GiB allocated and reserved at the
peak, and the seconds of every step. Nothing of the playbook takes part in a run. `--smoke` trains narrow models on a CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[2] / "playbook" / "_tables" / "predictions.csv"
WARM_UP, TIMED = 3, 8
MODELS: dict[str, dict[str, Any]] = {
    "Llama3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3_8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
}
"""Their `config.json` on Hugging Face: meta-llama/Llama-3.1-8B, Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B."""
NARROW = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts": 8,
}  # fmt: skip
TARGETS = {
    "": ("q", "k", "v", "o", "gate", "up", "down"),
    "q+v": ("q", "v"),
    "attention": ("q", "k", "v", "o"),
}
"""Of column `lora_targets`; nothing is every product of the layer outside of experts."""


def model_of(row: dict[str, str], device: str, *, smoke: bool) -> Any:
    """The row's model with random weights: float32 ones where all are trained under autocast, bfloat16 ones under adapters and
    DeepSpeed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(MODELS[row["model"]])
    if row["layers"]:
        fields["num_hidden_layers"] = int(row["layers"])
    if smoke:
        fields |= {key: value for key, value in NARROW.items() if key in fields or key == "head_dim"}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, tie_word_embeddings=False, use_cache=False)
    own_master = row["backend"] == "accelerate" and not row["lora"]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if own_master else torch.bfloat16, attn_implementation="sdpa",
            **({"experts_implementation": "grouped_mm"} if "num_experts" in fields else {}),
        ).train()  # fmt: skip
    if row["base"] == "nf4":
        quantise(model)
    if row["lora"]:
        model = adapted(model, int(row["lora"]), TARGETS[row["lora_targets"]])
    if row["recompute"] == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def quantise(model: Any) -> None:
    """The products of the layers in four bits, a float32 scale for 64 weights; norms, embedding and output layer stay as they are."""
    import bitsandbytes as bnb
    import torch

    for name, linear in [m for m in model.model.layers.named_modules() if isinstance(m[1], torch.nn.Linear)]:
        parent, _, last = name.rpartition(".")
        small = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=False,
            quant_type="nf4",
            device="meta",
        )
        small.weight = bnb.nn.Params4bit(
            linear.weight.data.cpu(), requires_grad=False, compress_statistics=False, quant_type="nf4", module=small
        )
        setattr(model.model.layers.get_submodule(parent), last, small.to(linear.weight.device))
    model.is_loaded_in_4bit = True


def adapted(model: Any, rank: int, targets: tuple[str, ...]) -> Any:
    """The model under LoRA as peft has it: a frozen base, adapters in float32."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[f"{t}_proj" for t in targets], task_type="CAUSAL_LM")
    )


def by_accelerate(row: dict[str, str], model: Any, device: str) -> Any:
    """A step as the Hugging Face Trainer with `bf16` takes it on one GPU: autocast, clipping, fused AdamW."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")

    def step(batches: list[Any]) -> float:
        total = 0.0
        for ids in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def by_deepspeed(row: dict[str, str], model: Any, device: str) -> Any:
    """A step of DeepSpeed: weights and gradients in bfloat16, AdamW of torch on float32 ones."""
    import deepspeed

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    os.environ.update(alone)
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if row["offload"] else {}
    config = {
        "train_micro_batch_size_per_gpu": int(row["mbs"]),
        "gradient_accumulation_steps": int(row["gbs"]) // int(row["mbs"]),
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(row["fsdp"].removeprefix("zero")), **offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, **({} if offload else {"torch_adam": True})}},
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config)

    def step(batches: list[Any]) -> float:
        total = 0.0
        for ids in batches:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total += float(loss) / len(batches)
        return total

    return step


def train(row: dict[str, str], steps: int, *, smoke: bool) -> dict[str, Any]:
    """Run the row's steps; its speed and peak."""
    import torch

    device = "cpu" if smoke else "cuda"
    torch.manual_seed(0)
    began = time.perf_counter()
    model = model_of(row, device, smoke=smoke)
    step = {"accelerate": by_accelerate, "deepspeed": by_deepspeed}[row["backend"]](row, model, device)
    length, micro, batch = 64 if smoke else int(row["seq_len"]), int(row["mbs"]), int(row["gbs"])
    vocab = model.config.vocab_size
    seconds, losses = [], []
    for _ in range(WARM_UP + (2 if smoke else steps)):
        batches = [torch.randint(vocab, (micro, length), device=device) for _ in range(batch // micro)]
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(batches))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    gib = (
        {}
        if smoke
        else {
            "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
            "gpu": torch.cuda.get_device_name(),
        }
    )
    return {
        "tokens_per_s": round(batch * length / statistics.median(seconds[WARM_UP:]), 1), **gib,
        "seconds": [round(s, 4) for s in seconds], "losses": [round(losses[0], 3), round(losses[-1], 3)],
        "total_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def main() -> None:
    """Train every row that is named, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, default=TIMED, help="timed steps of each row")
    parser.add_argument("--timeout", type=int, default=240, help="seconds of one row")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = {row["id"]: row for row in csv.DictReader(TABLE.open(encoding="utf-8"))}
    if unknown := [name for name in options.rows if name not in rows]:
        parser.error(f"no row {', '.join(unknown)} in {TABLE.name}; rows of one GPU: {', '.join(n for n in rows if n.startswith('one-'))}")
    if options.here:
        print(json.dumps({"row": options.rows[0], **train(rows[options.rows[0]], options.steps, smoke=options.smoke)}), flush=True)
        return
    for name in options.rows:
        command = [sys.executable, __file__, "--here", name, "--steps", str(options.steps), *(["--smoke"] if options.smoke else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
            text = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
            print(*(text or [json.dumps({"row": name, "error": done.stderr[-1500:]})]), flush=True)
        except subprocess.TimeoutExpired:
            print(json.dumps({"row": name, "error": f"more than {options.timeout} s"}), flush=True)


if __name__ == "__main__":
    main()
