"""megatron-core by itself: one rank of a loop of its own classes around its own model, for the trainer to be compared with.

It reads the trainer's configuration for sizes, layout and the few switches below, and nothing else of the trainer: no mapping, no engine,
no recorder. Tokens are random. What it cannot say it refuses. `beside_bare.py` starts it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playbook.errors import ConfigError
from playbook_trainer.config.tree import TrainerConfig, dump, load, parse_overrides

RESULT = "bare.json"


def main(words: list[str]) -> int:
    """Train `train.steps` steps and write seconds, tokens and memory into the folder `output` (rank 0)."""
    config = load(Path(words[0]), parse_overrides(words[1:]))
    refuse(config)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = joined()
    train = build(config, device)
    warm, steps, losses = config.train.warmup_steps, config.train.steps, []
    for _ in range(warm):
        losses.append(train())
    everyone_is_here(device)
    began = time.perf_counter()
    for _ in range(warm, steps):
        losses.append(train())
    everyone_is_here(device)
    seconds = (time.perf_counter() - began) / (steps - warm)
    if rank == 0:
        tokens = config.train.global_batch_size * config.data.seq_len / world
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        found = {
            "step_s": seconds,
            "tokens_per_s_per_gpu": tokens / seconds,
            "peak_memory_bytes": memory,
            "losses": [float(x) for x in losses],
        }
        (Path(config.output) / RESULT).write_text(json.dumps(found))
    return 0


def joined() -> torch.device:
    """The device of this rank, which has joined the others."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def everyone_is_here(device: torch.device) -> None:
    """Returns once all ranks have called it and their devices have nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


READ = {
    *(f"data.{k}" for k in ("kind", "pack", "seq_len")),
    *(f"parallel.{k}" for k in ("tp", "cp", "ep", "etp", "sequence_parallel")),
    *(f"moe.{k}" for k in ("dispatcher", "router_dtype", "aux_loss_coeff")),
    *(f"optimizer.{k}" for k in ("lr", "weight_decay", "clip_norm", "schedule", "moments_dtype")),
    *(f"megatron.{k}" for k in ("precision_aware_optimizer", "grad_reduce_dtype")),
    *(f"train.{k}" for k in ("steps", "warmup_steps", "micro_batch_size", "global_batch_size", "dtype", "recompute", "recompute_modules")),
    *("backend", "seed", "output"),
    "megatron.grouped_gemm",  # by the environment, as the trainer too
}
"""What this script makes of the configuration, beside the model."""
NO_MATTER = {"train.log_every", "train.receipt", "train.straggler_every", "train.hang_timeout_s", "data.num_workers"}
"""What changes nothing in a step."""
MODEL = {"qk_norm", "num_experts", "top_k", "expert_ffn_size", "ffn_size", "rms_norm_eps", "rope_theta", "tie_word_embeddings"}
"""Of the model, what it reads beside the sizes that every model has."""
IDS = {"eos_token_id", "pad_token_id"}


def refuse(config: TrainerConfig) -> None:
    """Stop at whatever the configuration asks for that this script would leave out.

    Raises:
        ConfigError: names the keys.
    """
    usual = flat(dump(TrainerConfig(model=config.model)))
    wrong = [k for k, v in flat(dump(config)).items() if v != usual.get(k) and k not in READ | NO_MATTER and not k.startswith("model.")]
    for name, field in type(config.model).model_fields.items():
        if (
            name not in MODEL | IDS
            and not field.is_required()
            and getattr(config.model, name) != field.get_default(call_default_factory=True)
        ):
            wrong.append(f"model.{name}")
    fine = {
        "data.kind": config.data.kind == "mock",
        "data.pack": not config.data.pack,
        "model.num_experts": config.model.num_experts > 0,
        "optimizer.schedule": config.optimizer.schedule == "constant",
        "train.recompute": config.train.recompute in ("none", "selective"),
        "moe.dispatcher": config.moe.dispatcher in ("alltoall", "allgather"),
    }
    if wrong := [*wrong, *(name for name, holds in fine.items() if not holds)]:
        raise ConfigError(f"bare megatron-core is not told: {', '.join(wrong)}")


def flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by their keys with dots."""
    by_key: dict[str, Any] = {}
    for key, value in data.items():
        by_key |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return by_key


def transformer(config: TrainerConfig, with_engine: bool) -> Any:
    """megatron-core's configuration, as its users write it."""
    from megatron.core.transformer import TransformerConfig

    model, par = config.model, config.parallel
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    selective = {"recompute_granularity": "selective", "recompute_modules": list(config.train.recompute_modules)}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size or model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=par.tp,
        sequence_parallel=par.sequence_parallel and par.tp > 1,
        context_parallel_size=par.cp,
        expert_model_parallel_size=par.ep,
        expert_tensor_parallel_size=par.etp or par.tp,
        num_moe_experts=model.num_experts,
        moe_ffn_hidden_size=model.expert_ffn_size,
        moe_router_topk=model.top_k,
        moe_router_dtype="fp32" if config.moe.router_dtype == "fp32" else None,
        moe_router_load_balancing_type="aux_loss" if config.moe.aux_loss_coeff else "none",
        moe_aux_loss_coeff=config.moe.aux_loss_coeff,
        moe_token_dispatcher_type=config.moe.dispatcher,
        moe_grouped_gemm=with_engine,
        bf16=config.train.dtype == "bf16",
        params_dtype=dtype,
        autocast_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=with_engine,
        bias_dropout_fusion=with_engine,
        apply_rope_fusion=with_engine,
        moe_permute_fusion=with_engine,
        moe_router_fusion=with_engine,
        cross_entropy_loss_fusion=with_engine,
        cross_entropy_fusion_impl="te" if with_engine else "native",
        **(selective if config.train.recompute == "selective" else {}),
    )


def build(config: TrainerConfig, device: torch.device) -> Any:
    """A function that trains one step and returns its loss."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    par, low = config.parallel, config.train.dtype == "bf16"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=par.tp,
        context_parallel_size=par.cp,
        expert_model_parallel_size=par.ep,
        expert_tensor_parallel_size=par.etp or par.tp,
    )
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    settings = transformer(config, with_engine=device.type == "cuda")
    model = GPTModel(
        config=settings,
        transformer_layer_spec=get_gpt_decoder_block_spec(settings, use_transformer_engine=device.type == "cuda"),
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.data.seq_len,
        position_embedding_type="rope",
        rotary_base=int(config.model.rope_theta),
        share_embeddings_and_output_weights=config.model.tie_word_embeddings,
    )
    model = model.to(device=device, dtype=torch.bfloat16 if low else torch.float32)
    overlap = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    wrapped = DistributedDataParallel(
        settings, DistributedDataParallelConfig(grad_reduce_in_fp32=config.megatron.grad_reduce_dtype == "fp32", **overlap), model
    )
    halves: dict[str, Any] = {}
    if config.megatron.precision_aware_optimizer:
        moments = torch.bfloat16 if config.optimizer.moments_dtype == "bf16" else torch.float32
        grads = torch.bfloat16 if config.megatron.grad_reduce_dtype == "bf16" else torch.float32
        halves = {"use_precision_aware_optimizer": True, "main_grads_dtype": grads, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    rate = config.optimizer.lr
    adam = OptimizerConfig(
        optimizer="adam",
        lr=rate,
        min_lr=rate,
        weight_decay=config.optimizer.weight_decay,
        clip_grad=config.optimizer.clip_norm,
        bf16=low,
        params_dtype=settings.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        **halves,
    )
    optimizer = get_megatron_optimizer(adam, [wrapped])
    settings.finalize_model_grads_func = finalize_model_grads
    settings.grad_scale_func = optimizer.scale_loss
    settings.no_sync_func = wrapped.no_sync
    schedule = get_forward_backward_func()
    random = torch.Generator(device=device)
    random.manual_seed(config.seed + parallel_state.get_data_parallel_rank())
    rows, length = config.train.micro_batch_size, config.data.seq_len
    shares = parallel_state.get_data_parallel_world_size() * rows

    def forward(_: Any, chunk: Any) -> Any:
        shape = (rows, length // par.cp)
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=random, device=device)
        places = torch.arange(shape[1], device=device).expand(shape)
        return chunk(tokens, places, None, labels=tokens.roll(-1, 1)), mean

    def step() -> torch.Tensor:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward,
            data_iterator=None,
            model=[wrapped],
            num_microbatches=config.train.global_batch_size // shares,
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        optimizer.step()
        return torch.stack([each["loss"] for each in losses]).mean()

    return step


def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss that gradients are of, and what is reported."""
    average = losses.float().mean()
    return average, {"loss": average.detach().clone()}
