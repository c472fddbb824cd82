"""How a run goes, in fields of megatron-core and of the training loop around it: optimizer, loop and files."""

from __future__ import annotations

from playbook_trainer.config.environment import sharded
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.export.sheet import Sheet

ALONE = "without a distributed optimizer or Megatron-FSDP, which the layout does not choose, its optimizer keeps all in float32"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}


def data_parallel(config: TrainerConfig) -> str:
    """What shards what, by the words of `megatron.data_parallel`."""
    if config.backend == "megatron":
        return config.megatron.data_parallel
    return "megatron_fsdp" if config.parallel.fsdp else "ddp"


def has_sharded_optimizer(config: TrainerConfig) -> bool:
    """Whether `use_distributed_optimizer` is set there."""
    return data_parallel(config) in ("distributed_optimizer", "megatron_fsdp")


def offloaded(config: TrainerConfig) -> float:
    """How much of the optimizer is on the host."""
    return config.megatron.optimizer_offload_fraction or (1.0 if config.offload.optimizer else 0.0)


def optimizer(sheet: Sheet) -> None:
    """What the update is, and its learning rate."""
    config, opt, mg = sheet.config, sheet.config.optimizer, sheet.config.megatron
    sheet.put("", "optimizer", "optimizer", "adam")
    sheet.put("optimizer.lr", "optimizer", "lr", opt.lr)
    sheet.put("optimizer.min_lr_ratio", "optimizer", "min_lr", float(f"{opt.lr * opt.min_lr_ratio:.12g}"))
    sheet.put("optimizer.betas", "optimizer", "adam_beta1", opt.betas[0])
    sheet.put("optimizer.betas", "optimizer", "adam_beta2", opt.betas[1])
    sheet.put("optimizer.eps", "optimizer", "adam_eps", opt.eps)
    sheet.put("optimizer.weight_decay", "optimizer", "weight_decay", opt.weight_decay)
    sheet.put("optimizer.clip_norm", "optimizer", "clip_grad", opt.clip_norm)
    sheet.put("optimizer.schedule", "scheduler", "lr_decay_style", "WSD" if opt.schedule == "wsd" else opt.schedule)
    if opt.schedule == "wsd":
        sheet.put("optimizer.schedule", "scheduler", "lr_wsd_decay_style", "linear")
        sheet.put("optimizer.decay_ratio", "scheduler", "lr_wsd_decay_iters", round(opt.decay_ratio * config.train.steps))
    sheet.put("optimizer.warmup_steps", "scheduler", "lr_warmup_iters", opt.warmup_steps)
    # Its warm-up has to end before its decay does; in a run that is all warm-up, the decay never begins.
    last = max(config.train.steps, opt.warmup_steps + 1)
    sheet.put("train.steps optimizer.warmup_steps", "scheduler", "lr_decay_iters", last)
    fraction, keys = offloaded(config), "offload.optimizer megatron.optimizer_offload_fraction"
    # Its precision-aware optimizer keeps of a master weight the 16 bits that its weight lacks, and alone has a form on the host.
    asks = {
        "megatron.precision_aware_optimizer": mg.precision_aware_optimizer,
        "optimizer.moments_dtype": opt.moments_dtype == "bf16",
        "optimizer.master_weights": opt.master_weights == "remainder",
        "offload.optimizer": fraction > 0,
    }
    aware = any(asks.values()) and has_sharded_optimizer(config)
    sheet.put("megatron.precision_aware_optimizer optimizer.master_weights", "optimizer", "use_precision_aware_optimizer", aware)
    if not has_sharded_optimizer(config):
        sheet.lack(" ".join(key for key, asked in asks.items() if asked), ALONE)
    if aware:
        names = DTYPES if sheet.target == "megatron-bridge" else {}
        moments, gradients = names.get(opt.moments_dtype, opt.moments_dtype), names.get(mg.grad_reduce_dtype, mg.grad_reduce_dtype)
        sheet.put("optimizer.moments_dtype", "optimizer", "exp_avg_dtype", moments)
        sheet.put("optimizer.moments_dtype", "optimizer", "exp_avg_sq_dtype", moments)
        sheet.put("megatron.grad_reduce_dtype", "optimizer", "main_grads_dtype", gradients)
    elif opt.moments_dtype == "fp32":
        sheet.skip("optimizer.moments_dtype", "without the precision-aware optimizer moments are float32")
    sheet.put(keys, "optimizer", "optimizer_cpu_offload", aware and fraction > 0)
    if aware and fraction:
        sheet.put(keys, "optimizer", "optimizer_offload_fraction", fraction)
        sheet.put(keys, "optimizer", "overlap_cpu_optimizer_d2h_h2d", True)


def loop(sheet: Sheet) -> None:
    """What a step is, and what happens beside steps."""
    train, evaluation, profile = sheet.config.train, sheet.config.eval, sheet.config.profile
    sheet.put("train.steps", "train", "train_iters", train.steps)
    sheet.put("train.micro_batch_size", "train", "micro_batch_size", train.micro_batch_size)
    sheet.put("train.global_batch_size", "train", "global_batch_size", train.global_batch_size)
    sheet.put("train.log_every", "logger", "log_interval", train.log_every)
    sheet.put("eval.every", "validation", "eval_interval", evaluation.every or None)
    if evaluation.every:
        sheet.put("eval.batches", "validation", "eval_iters", evaluation.batches)
    else:
        sheet.put("eval.every", "validation", "eval_iters", 0)
        sheet.skip("eval.batches", "nothing is evaluated")
    if sheet.config.megatron.cuda_graph_impl == "full_iteration":
        # A loss inside a graph is not looked at, and Megatron-LM wants that said.
        sheet.put("train.on_nan", "rerun_state_machine", "check_for_nan_in_loss", False)
        if train.on_nan != "continue":
            sheet.lack("train.on_nan", "with a graph of the whole iteration the target goes on")
    elif train.on_nan == "skip":
        sheet.lack("train.on_nan", "the target stops, or goes on")
    else:
        sheet.put("train.on_nan", "rerun_state_machine", "check_for_nan_in_loss", train.on_nan == "stop")
    if train.hang_timeout_s is None:
        sheet.skip("train.hang_timeout_s", "nothing is watched")
    else:
        sheet.put("train.hang_timeout_s", "dist", "distributed_timeout_minutes", max(1, round(train.hang_timeout_s / 60)))
    sheet.skip("train.warmup_steps train.receipt train.straggler_every", "how this trainer is measured and watched")
    sheet.skip("train.device backend output", "where this trainer runs and writes")
    sheet.put("profile.kineto profile.nvtx", "profiling", "use_pytorch_profiler", profile.kineto)
    sheet.put("profile.nvtx", "profiling", "nvtx_ranges", profile.nvtx)
    if profile.kineto:
        sheet.put("profile.kineto", "profiling", "profile_step_start", train.warmup_steps)
        sheet.put("profile.steps", "profiling", "profile_step_end", train.warmup_steps + profile.steps)
    else:
        sheet.skip("profile.steps", "nothing is traced")


def files(sheet: Sheet) -> None:
    """Checkpoints, weights and logs."""
    config, checkpoint, tracker = sheet.config, sheet.config.checkpoint, sheet.config.tracker
    lm = sheet.target == "megatron-lm"
    full = sharded(config) and (config.backend == "torch" or config.megatron.data_parallel == "megatron_fsdp")
    sheet.put("", "checkpoint", "ckpt_format", "fsdp_dtensor" if full else "torch_dist")
    sheet.put("checkpoint.dir", "checkpoint", "save", checkpoint.dir)
    # Where there is a folder, Megatron-LM wants to know how often.
    often = checkpoint.every or (config.train.steps if checkpoint.dir else None)
    sheet.put("checkpoint.every", "checkpoint", "save_interval", often)
    if checkpoint.dir is None:
        sheet.skip("checkpoint.resume checkpoint.async_save", "no folder is given")
    else:
        sheet.put("checkpoint.resume", "checkpoint", "load", checkpoint.dir if checkpoint.resume else None)
        sheet.put("checkpoint.async_save", "checkpoint", "async_save", checkpoint.async_save)
    if lm:
        sheet.skip("checkpoint.keep", "Megatron-LM keeps all checkpoints, or one in every so many")
    else:
        sheet.put("checkpoint.keep", "checkpoint", "most_recent_k", checkpoint.keep)
        sheet.put("init.weights", "checkpoint", "pretrained_checkpoint", config.init.weights)
        sheet.put("checkpoint.export", "checkpoint", "also_save_hf_checkpoint", checkpoint.export is not None)
    sheet.put("", "logger", "log_throughput", True)
    sheet.put("tracker.tensorboard", "logger", "tensorboard_dir", f"{config.output}/tensorboard" if tracker.tensorboard else None)
    if not lm:
        sheet.put("tracker.tensorboard", "logger", "log_throughput_to_tensorboard", tracker.tensorboard)
    if tracker.wandb:
        sheet.put("tracker.wandb tracker.project", "logger", "wandb_project", tracker.project)
        sheet.put("tracker.name", "logger", "wandb_exp_name", tracker.name or "run")
    else:
        sheet.skip("tracker.wandb tracker.project tracker.name tracker.offline", "Weights & Biases is not asked for")
