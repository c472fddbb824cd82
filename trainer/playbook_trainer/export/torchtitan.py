"""A configuration as a job file of torchtitan 0.2 (TOML).

Source: torchtitan 0.2.2, `torchtitan/config/job_config.py`, `torchtitan/models/qwen3/__init__.py`. Later versions take Python functions instead
of job files; their fields have other names.
"""

from __future__ import annotations

from typing import Any

from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.export.sheet import READING, Sheet

_FLAVOURS = {
    "qwen3_0_6b": ("qwen3", "0.6B"),
    "qwen3_1_7b": ("qwen3", "1.7B"),
    "qwen3_8b": ("qwen3", "8B"),
    "qwen3_30b_a3b": ("qwen3", "30B-A3B"),
    "qwen3_235b_a22b": ("qwen3", "235B-A22B"),
    "deepseek_v3": ("deepseek_v3", "671B"),
}
"""Models that it ships, by name here."""

SIZES = "a flavour has its own sizes; add one to torchtitan's table of flavours for others"
MEGATRON = "a setting of the megatron backend"
_COMPILED = {"decoder": "model", "loss": "loss"}
RECOMPUTE = {"none": "none", "selective": "selective", "full": "full"}

_WHY = {
    "train.epochs": "it counts steps: set train.steps to the number that this trainer says at its start",
    "eval.path": "its data set has a part for evaluation",
    "checkpoint.keep_best": "it keeps checkpoints by their age",
    "train.freeze": "it freezes no parts of a model",
    "data.pack": "documents always follow each other in a row, without a mask between them",
    "data.pad": "rows have one length",
    "data.pad_to_multiple": "rows have one length",
    "parallel.pipeline_layout": "name modules in parallelism.module_fqns_per_model_part instead",
    "moe.capacity_factor": "no token is dropped",
    "moe.aux_loss_coeff": "it balances by a bias: load_balance_coeff of a flavour's moe_args",
    "moe.bias_update_rate": "set load_balance_coeff of the flavour's moe_args",
    "moe.load_every": "it does not write down the experts' load",
    "moe.fused_permutation": "it permutes in its own way",
    "moe.fused_router": "its router is softmax and topk; compile the model instead",
    "moe.router_dtype": "scores are computed in float32",
    "optimizer.moments_dtype": "moments have the type of the weights",
    "train.recompute_modules": "its selective mode chooses by operator, not by module",
    "train.compile.vision": "it ships no vision tower of this model",
    "train.compile.dynamic": "shapes do not change there",
    "train.attention": "a flavour has its kind of attention",
    "train.cuda_graphs": "it captures no parts of a layer",
    "train.fused_loss": "compile the loss instead",
    "train.fused_activation": "compile the model instead",
    "train.fused_norms": "compile the model instead",
    "optimizer.master_weights": "its shards are float32 weights, which FSDP casts",
    "parallel.reduce_dtype": "gradients are summed in float32",
    "parallel.comm_sms": "its products take all multiprocessors",
    "offload.activations": "activations stay on the GPU",
    "precision.fp8": "it has rowwise, tensorwise and MXFP8",
    "precision.fp8_modules": "name modules in the converter's filter_fqns and fqns",
    "checkpoint.resume": "it always goes on from the newest checkpoint in its folder",
    "tracker.name": "set WANDB_RUN_NAME in the environment",
    "tracker.offline": "set WANDB_MODE=offline in the environment",
}
"""Why keys cannot be said there, at another value than the neutral one."""


def sheet_of(config: TrainerConfig) -> Sheet:
    """Every key of the configuration, said in torchtitan's fields where it has one."""
    sheet = Sheet(config, "torchtitan")
    for part in (_model, _data, _parallel, _experts, _training, _switches, _files, _elsewhere):
        part(sheet)
    sheet.settle(_WHY)
    return sheet


def _model(sheet: Sheet) -> None:
    model = sheet.config.model
    if model.name in _FLAVOURS and unchanged(sheet.config):
        name, flavour = _FLAVOURS[model.name]
        sheet.put("model.*", "model", "name", name)
        sheet.put("model.*", "model", "flavor", flavour)
    elif model.vision is not None:
        sheet.lack("model.*", "torchtitan 0.2 ships no Qwen3-VL")
    else:
        sheet.lack("model.*", SIZES)


def unchanged(config: TrainerConfig) -> bool:
    """Whether the model is its preset, without fields that replace the preset's."""
    from playbook.paths import data_root
    from playbook.yaml_files import read
    from playbook_trainer.config.model import ModelConfig

    path = data_root("configs") / "models" / f"{config.model.name}.yaml"
    return path.is_file() and ModelConfig.model_validate({"name": config.model.name, **read(path)[0]}) == config.model


def _data(sheet: Sheet) -> None:
    data = sheet.config.data
    sheet.put("data.seq_len", "training", "seq_len", data.seq_len)
    sheet.put("data.num_workers", "training.dataloader", "num_workers", data.num_workers)
    if data.path is not None:
        sheet.put("data.path", "training", "dataset_path", data.path)
    else:
        sheet.skip("data.path", "the bundled data is this trainer's own; choose training.dataset")
    if data.kind == "text":
        sheet.skip("data.kind", "text is what it trains on")
    else:
        sheet.lack("data.kind", "text is what it trains on")
    if data.tokenizer == "byte":
        sheet.lack("data.tokenizer", "give model.hf_assets_path, a folder with a tokenizer.json")
    else:
        sheet.put("data.tokenizer", "model", "hf_assets_path", data.tokenizer.removesuffix("/tokenizer.json"))
    sheet.skip(READING, "it has a reader of its own")


def _parallel(sheet: Sheet) -> None:
    par = sheet.config.parallel
    if sheet.config.backend == "megatron" or par.fsdp:
        sheet.put("parallel.dp_replicate", "parallelism", "data_parallel_replicate_degree", par.dp_replicate)
        sheet.put("parallel.fsdp", "parallelism", "data_parallel_shard_degree", -1)
        sheet.put(
            "parallel.reshard_after_forward",
            "parallelism",
            "fsdp_reshard_after_forward",
            "always" if par.reshard_after_forward else "never",
        )
    else:
        sheet.lack("parallel.fsdp", "replicas without sharding: set data_parallel_replicate_degree to the number of data-parallel ranks")
        sheet.skip("parallel.dp_replicate parallel.reshard_after_forward", "nothing is sharded")
    sheet.put("parallel.tp", "parallelism", "tensor_parallel_degree", par.tp)
    sheet.put("parallel.pp", "parallelism", "pipeline_parallel_degree", par.pp)
    sheet.put("parallel.vpp", "parallelism", "pipeline_parallel_schedule", "1F1B" if par.vpp == 1 else "Interleaved1F1B")
    sheet.put("parallel.cp", "parallelism", "context_parallel_degree", par.cp)
    sheet.put("parallel.ep", "parallelism", "expert_parallel_degree", par.ep)
    etp = par.etp or par.tp
    if etp in (1, par.tp):
        sheet.put("parallel.etp", "parallelism", "expert_tensor_parallel_degree", etp)
    else:
        sheet.lack("parallel.etp", f"etp {etp} is neither 1 nor tp {par.tp}")
    if par.pp > 1:
        sheet.put("parallel.pp", "parallelism", "pipeline_parallel_microbatch_size", sheet.config.train.micro_batch_size)
    if par.pp > 1 and par.pipeline_layout is None:
        # It derives the number of stages from the layers of each, and makes the first and the last one layer shorter unless told not to.
        layers = sheet.config.model.num_layers // (par.pp * par.vpp)
        sheet.put("parallel.vpp", "parallelism", "pipeline_parallel_layers_per_stage", layers)
        sheet.put("parallel.pp", "parallelism", "pipeline_parallel_first_stage_less_layers", 0)
        sheet.put("parallel.pp", "parallelism", "pipeline_parallel_last_stage_less_layers", 0)
    if par.cp == 1:
        sheet.skip("parallel.cp_comm", "there is no context parallelism")
    elif par.cp_comm == "allgather":
        sheet.put("parallel.cp_comm", "parallelism", "context_parallel_rotate_method", "allgather")
    else:
        sheet.lack("parallel.cp_comm", "keys and values are gathered, or shuffled by all-to-all")
    sheet.skip("parallel.sequence_parallel", "with tensor parallelism the sequence is always cut")


def _experts(sheet: Sheet) -> None:
    moe = sheet.config.moe
    if not sheet.config.model.num_experts:
        sheet.skip("moe.*", "the model has no experts")
        return
    if moe.dispatcher in ("alltoall", "deepep"):
        backend = "deepep" if moe.dispatcher == "deepep" else "standard"
        sheet.put("moe.dispatcher", "parallelism", "expert_parallel_comm_backend", backend)
    else:
        sheet.lack("moe.dispatcher", f"{moe.dispatcher}: it has all-to-all and DeepEP")
    sheet.skip("moe.experts moe.apply_probs_on", "experts are one grouped product, weighed in its own way")


def _training(sheet: Sheet) -> None:
    config, opt, train = sheet.config, sheet.config.optimizer, sheet.config.train
    # With a pipeline it cuts local_batch_size into micro-batches: as many as there are stages; the rest is accumulated.
    sheet.put("train.micro_batch_size", "training", "local_batch_size", train.micro_batch_size * config.parallel.pp)
    sheet.put("train.global_batch_size", "training", "global_batch_size", train.global_batch_size)
    sheet.put("train.steps", "training", "steps", train.steps)
    sheet.put("optimizer.clip_norm", "training", "max_norm", opt.clip_norm)
    sheet.put("train.dtype", "training", "dtype", "float32")
    sheet.put("train.dtype", "training", "mixed_precision_param", "bfloat16" if train.dtype == "bf16" else "float32")
    sheet.put("offload.optimizer", "training", "enable_cpu_offload", config.offload.optimizer)
    sheet.put("", "optimizer", "name", "AdamW")
    sheet.put("optimizer.lr", "optimizer", "lr", opt.lr)
    sheet.put("optimizer.betas", "optimizer", "beta1", opt.betas[0])
    sheet.put("optimizer.betas", "optimizer", "beta2", opt.betas[1])
    sheet.put("optimizer.eps", "optimizer", "eps", opt.eps)
    sheet.put("optimizer.weight_decay", "optimizer", "weight_decay", opt.weight_decay)
    sheet.put("optimizer.warmup_steps", "lr_scheduler", "warmup_steps", opt.warmup_steps)
    if opt.schedule != "constant":
        sheet.put("optimizer.schedule", "lr_scheduler", "decay_type", "cosine" if opt.schedule == "cosine" else "linear")
        sheet.put("optimizer.min_lr_ratio", "lr_scheduler", "min_lr_factor", opt.min_lr_ratio)
        if opt.schedule == "wsd":
            sheet.put("optimizer.decay_ratio", "lr_scheduler", "decay_ratio", opt.decay_ratio)
    else:
        sheet.put("optimizer.schedule", "lr_scheduler", "decay_ratio", 0.0)
        sheet.skip("optimizer.min_lr_ratio", "the rate is constant")
    sheet.put("seed", "debug", "seed", config.seed)
    sheet.put("train.deterministic", "debug", "deterministic", train.deterministic)


def _switches(sheet: Sheet) -> None:
    config, train = sheet.config, sheet.config.train
    sheet.put("train.recompute", "activation_checkpoint", "mode", RECOMPUTE[train.recompute])
    if train.recompute == "selective":
        sheet.put("train.recompute", "activation_checkpoint", "selective_ac_option", "op")
    regions = [target for region, target in _COMPILED.items() if getattr(train.compile, region)]
    sheet.put("train.compile.decoder train.compile.loss", "compile", "enable", bool(regions))
    if regions:
        sheet.put("train.compile.decoder train.compile.loss", "compile", "components", regions)
    sheet.put("train.compile.backend", "compile", "backend", train.compile.backend)
    sheet.skip("optimizer.fused", "its AdamW is torch's fused one")
    sheet.skip("train.loss_chunk", "logits of a micro-batch exist at once there")
    if config.precision.fp8 in ("rowwise", "tensorwise") and "linear" in config.precision.fp8_modules:
        sheet.put("precision.fp8", "model", "converters", ["quantize.linear.float8"])
        sheet.put("precision.fp8", "quantize.linear.float8", "recipe_name", config.precision.fp8)
    elif config.precision.fp8 == "mxfp8":
        sheet.put("precision.fp8", "model", "converters", ["quantize.linear.mx"])
        sheet.put("precision.fp8", "quantize.linear.mx", "recipe_name", "mxfp8_cublas")


def _files(sheet: Sheet) -> None:
    config, checkpoint, tracker = sheet.config, sheet.config.checkpoint, sheet.config.tracker
    sheet.put("output", "job", "dump_folder", config.output)
    on = checkpoint.dir is not None
    sheet.put("checkpoint.dir", "checkpoint", "enable", on)
    if on:
        sheet.put("checkpoint.dir", "checkpoint", "folder", checkpoint.dir)
    sheet.put("checkpoint.every", "checkpoint", "interval", checkpoint.every or config.train.steps)
    sheet.put("checkpoint.keep", "checkpoint", "keep_latest_k", max(2, checkpoint.keep))
    sheet.put("checkpoint.async_save", "checkpoint", "async_mode", "async" if checkpoint.async_save else "disabled")
    sheet.put("checkpoint.export", "checkpoint", "last_save_in_hf", checkpoint.export is not None)
    if config.init.weights is not None:
        sheet.put("init.weights", "checkpoint", "initial_load_path", config.init.weights)
        sheet.put("init.weights", "checkpoint", "initial_load_in_hf", True)
    else:
        sheet.skip("init.weights", "weights are drawn from the seed")
    sheet.put("tracker.tensorboard", "metrics", "enable_tensorboard", tracker.tensorboard)
    sheet.put("tracker.wandb", "metrics", "enable_wandb", tracker.wandb)
    if tracker.wandb:
        sheet.lack("tracker.project", f"set WANDB_PROJECT={tracker.project} in the environment")
    else:
        sheet.skip("tracker.project tracker.name tracker.offline", "Weights & Biases is not asked for")
    sheet.put("train.log_every", "metrics", "log_freq", config.train.log_every)
    sheet.put("eval.every", "validation", "enable", config.eval.every > 0)
    if config.eval.every:
        sheet.put("eval.every", "validation", "freq", config.eval.every)
        sheet.put("eval.batches", "validation", "steps", config.eval.batches)
    else:
        sheet.skip("eval.batches", "nothing is evaluated")
    sheet.put("profile.kineto", "profiling", "enable_profiling", config.profile.kineto)
    if config.profile.kineto:
        sheet.put("profile.steps", "profiling", "profiler_active", config.profile.steps)
    else:
        sheet.skip("profile.steps", "nothing is traced")
    timeout = config.train.hang_timeout_s
    if timeout is None:
        sheet.lack("train.hang_timeout_s", "a collective always ends after comm.train_timeout_seconds")
    else:
        sheet.put("train.hang_timeout_s", "comm", "train_timeout_seconds", round(timeout))


def _elsewhere(sheet: Sheet) -> None:
    if sheet.config.backend == "megatron":
        sheet.lack("megatron.*", f"{MEGATRON}; torchtitan shards by FSDP2")
        sheet.skip("parallel.fsdp", "megatron.data_parallel says what is sharded")
    else:
        sheet.skip("megatron.*", MEGATRON)
    sheet.skip("backend train.device train.warmup_steps train.receipt train.straggler_every", "how this trainer runs and is watched")
    sheet.skip("profile.nvtx", "ranges are its own")
    sheet.plain("train.on_nan", "continue", "it goes on after a loss that is not finite")


def toml(sheet: Sheet) -> list[str]:
    """The job file, section by section."""
    sections: dict[str, list[str]] = {}
    for setting in sheet.settings:
        sections.setdefault(setting.section, []).append(f"{setting.field} = {_value(setting.value)}")
    return [line for name, lines in sections.items() for line in (f"[{name}]", *dict.fromkeys(lines), "")][:-1]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
