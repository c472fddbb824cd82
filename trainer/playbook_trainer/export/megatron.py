"""A configuration as fields of megatron-core and of the training loop around it;
Megatron-LM's flags and Megatron-Bridge's overrides share them.

Sources: megatron-core 0.19.2, `megatron/core/transformer/transformer_config.py`,
`megatron/core/distributed/distributed_data_parallel_config.py`, `megatron/core/optimizer/optimizer_config.py`, `megatron/training/config/`,
`megatron/training/arguments.py`; Megatron-Bridge, `src/megatron/bridge/training/config.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from playbook_trainer.config import megatron_fields as fields
from playbook_trainer.config.environment import GROUPED_GEMM, sharded
from playbook_trainer.config.megatron_checks import offloaded_fraction
from playbook_trainer.config.megatron_fields import ATTENTION, FP8_FORMAT, Field, graph_impl, recompute_layers
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.export.sheet import MEGATRON, READING, Sheet, Target

# How a run goes, in fields of megatron-core and of the training loop around it: optimizer, loop and files.

ALONE = "without a distributed optimizer or Megatron-FSDP, which the layout does not choose, its optimizer keeps all in float32"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}


def data_parallel(config: TrainerConfig) -> str:
    """What shards what, by the words of `megatron.data_parallel`."""
    if config.backend == "megatron":
        return config.megatron.data_parallel
    return "megatron_fsdp" if config.parallel.fsdp else "ddp"


def _has_sharded_optimizer(config: TrainerConfig) -> bool:
    """Whether `use_distributed_optimizer` is set there."""
    return data_parallel(config) in ("distributed_optimizer", "megatron_fsdp")


def optimizer(sheet: Sheet) -> None:
    """What the update is, and its learning rate."""
    config, opt, mg = sheet.config, sheet.config.optimizer, sheet.config.megatron
    sheet.table(
        "optimizer",
        ("", "optimizer", "adam"),
        ("optimizer.lr", "lr", opt.lr),
        ("optimizer.min_lr_ratio", "min_lr", float(f"{opt.lr * opt.min_lr_ratio:.12g}")),
        ("optimizer.betas", "adam_beta1", opt.betas[0]),
        ("optimizer.betas", "adam_beta2", opt.betas[1]),
        ("optimizer.eps", "adam_eps", opt.eps),
        ("optimizer.weight_decay", "weight_decay", opt.weight_decay),
        ("optimizer.clip_norm", "clip_grad", opt.clip_norm),
    )
    sheet.put("optimizer.schedule", "scheduler", "lr_decay_style", "WSD" if opt.schedule == "wsd" else opt.schedule)
    if opt.schedule == "wsd":
        sheet.table(
            "scheduler",
            ("optimizer.schedule", "lr_wsd_decay_style", "linear"),
            ("optimizer.decay_ratio", "lr_wsd_decay_iters", round(opt.decay_ratio * config.train.steps)),
        )
    sheet.table(
        "scheduler",
        ("optimizer.warmup_steps", "lr_warmup_iters", opt.warmup_steps),
        # Its warm-up has to end before its decay does; in a run that is all warm-up, the decay never begins.
        ("train.steps optimizer.warmup_steps", "lr_decay_iters", max(config.train.steps, opt.warmup_steps + 1)),
    )
    fraction, keys = offloaded_fraction(config), "offload.optimizer megatron.optimizer_offload_fraction"
    # Its precision-aware optimizer keeps of a master weight the 16 bits that its weight lacks, and alone has a form on the host.
    asks = {
        "megatron.precision_aware_optimizer": mg.precision_aware_optimizer,
        "optimizer.moments_dtype": opt.moments_dtype == "bf16",
        "optimizer.master_weights": opt.master_weights == "remainder",
        "offload.optimizer": fraction > 0,
    }
    aware = any(asks.values()) and _has_sharded_optimizer(config)
    sheet.put("megatron.precision_aware_optimizer optimizer.master_weights", "optimizer", "use_precision_aware_optimizer", aware)
    if not _has_sharded_optimizer(config):
        sheet.lack(" ".join(key for key, is_set in asks.items() if is_set), ALONE)
    if aware:
        moments = _dtype(sheet, opt.moments_dtype)
        sheet.table(
            "optimizer",
            ("optimizer.moments_dtype", "exp_avg_dtype", moments),
            ("optimizer.moments_dtype", "exp_avg_sq_dtype", moments),
            ("megatron.grad_reduce_dtype", "main_grads_dtype", _dtype(sheet, mg.grad_reduce_dtype)),
        )
    elif opt.moments_dtype == "fp32":
        sheet.skip("optimizer.moments_dtype", "without the precision-aware optimizer moments are float32")
    sheet.put(keys, "optimizer", "optimizer_cpu_offload", aware and fraction > 0)
    if aware and fraction:
        sheet.table("optimizer", (keys, "optimizer_offload_fraction", fraction), (keys, "overlap_cpu_optimizer_d2h_h2d", True))


def _dtype(sheet: Sheet, name: str) -> str:
    """A precision by the target's own name."""
    return DTYPES[name] if sheet.target == "megatron-bridge" else name


def loop(sheet: Sheet) -> None:
    """What a step is, and what happens beside steps."""
    train, evaluation, profile = sheet.config.train, sheet.config.eval, sheet.config.profile
    sheet.table(
        "train",
        ("train.steps", "train_iters", train.steps),
        ("train.micro_batch_size", "micro_batch_size", train.micro_batch_size),
        ("train.global_batch_size", "global_batch_size", train.global_batch_size),
    )
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
    sheet.table(
        "profiling",
        ("profile.kineto profile.nvtx", "use_pytorch_profiler", profile.kineto),
        ("profile.nvtx", "nvtx_ranges", profile.nvtx),
    )
    if profile.kineto:
        sheet.table(
            "profiling",
            ("profile.kineto", "profile_step_start", train.warmup_steps),
            ("profile.steps", "profile_step_end", train.warmup_steps + profile.steps),
        )
    else:
        sheet.skip("profile.steps", "nothing is traced")


def files(sheet: Sheet) -> None:
    """Checkpoints, weights and logs."""
    config, checkpoint, tracker = sheet.config, sheet.config.checkpoint, sheet.config.tracker
    lm = sheet.target == "megatron-lm"
    full = sharded(config) and (config.backend == "torch" or config.megatron.data_parallel == "megatron_fsdp")
    sheet.table(
        "checkpoint",
        ("", "ckpt_format", "fsdp_dtensor" if full else "torch_dist"),
        ("checkpoint.dir", "save", checkpoint.dir),
        # Where there is a folder, Megatron-LM wants to know how often.
        ("checkpoint.every", "save_interval", checkpoint.every or (config.train.steps if checkpoint.dir else None)),
    )
    if checkpoint.dir is None:
        sheet.skip("checkpoint.resume checkpoint.async_save", "no folder is given")
    else:
        sheet.table(
            "checkpoint",
            ("checkpoint.resume", "load", checkpoint.dir if checkpoint.resume else None),
            ("checkpoint.async_save", "async_save", checkpoint.async_save),
        )
    if lm:
        sheet.skip("checkpoint.keep", "Megatron-LM keeps all checkpoints, or one in every so many")
    else:
        sheet.table(
            "checkpoint",
            ("checkpoint.keep", "most_recent_k", checkpoint.keep),
            ("init.weights", "pretrained_checkpoint", config.init.weights),
            ("checkpoint.export", "also_save_hf_checkpoint", checkpoint.export is not None),
        )
    sheet.table(
        "logger",
        ("", "log_throughput", True),
        ("tracker.tensorboard", "tensorboard_dir", f"{config.output}/tensorboard" if tracker.tensorboard else None),
    )
    if not lm:
        sheet.put("tracker.tensorboard", "logger", "log_throughput_to_tensorboard", tracker.tensorboard)
    if tracker.wandb:
        sheet.table(
            "logger",
            ("tracker.wandb tracker.project", "wandb_project", tracker.project),
            ("tracker.name", "wandb_exp_name", tracker.name or "run"),
        )
    else:
        sheet.skip("tracker.wandb tracker.project tracker.name tracker.offline", "Weights & Biases is not asked for")


CP_COMM = {"allgather": "all_gather", "ring": "p2p", "ulysses": "a2a"}
_READER = "the target has readers of its own"
_TORCH = "a setting of the torch backend"
_OTHER = "a setting of the other backend"
_TOWER = "the vision tower is the recipe's own there"
_COMPILE = "megatron-core has fused kernels of its own instead of torch.compile"
_WHY = {
    "train.epochs": "it counts steps: set train.steps to the number that this trainer says at its start",
    "eval.path": "its data set has a part for evaluation",
    "checkpoint.keep_best": "it keeps checkpoints by their age",
    "data.pack": "how samples fill rows is the data set's own matter there",
    "data.pad": "rows have one length there",
    "data.pad_to_multiple": "rows have one length there",
    "parallel.comm_sms": "its products take all multiprocessors, unless NVTE_EXT_MARGIN_SM says otherwise",
    "parallel.reshard_after_forward": "Megatron-FSDP frees gathered parameters after the forward pass",
    "precision.fp8_modules": "a recipe covers projections and experts alike",
    "train.compile.vision": _COMPILE,
    "train.compile.decoder": _COMPILE,
    "train.compile.loss": _COMPILE,
    "moe.bias_update_rate": "a bias goes with scores by sigmoid there: model.router_bias",
    "moe.load_every": "it writes down the loss of every layer instead, with --moe-per-layer-logging",
    "tracker.offline": "set WANDB_MODE=offline in the environment",
}
"""Why keys cannot be said there, at another value than the neutral one."""
_WHY_LM = {
    "train.freeze": "Megatron-LM freezes no parts of a model by flag",
    "init.weights": "convert the folder to a checkpoint of Megatron first, then --load it with --finetune",
    "checkpoint.export": "Megatron-LM writes no folders of Hugging Face; Megatron-Bridge converts them",
}
"""The same of Megatron-LM alone."""


def sheet_of(config: TrainerConfig, target: Target) -> Sheet:
    """Every key of the configuration, said in megatron's fields where they have one."""
    sheet = Sheet(config, target)
    for part in (
        _model,
        _mla,
        _experts,
        _vision,
        _data,
        _parallel,
        _data_parallel,
        optimizer,
        _precision,
        _memory,
        _switches,
        loop,
        files,
    ):
        part(sheet)
    sheet.settle({**_WHY, **(_WHY_LM if target == "megatron-lm" else {"megatron.kernels": "the recipe chooses the layers"})})
    return sheet


def _table(sheet: Sheet, table: Sequence[Field]) -> None:
    """Rows of the table that the run itself is configured by."""
    for field in table:
        sheet.put(field.key, "model", field.name, field.value(sheet.config))


def _model(sheet: Sheet) -> None:
    """Sizes, vocabulary, rotary base and ties of the model."""
    model = sheet.config.model
    _table(sheet, fields.SIZES)
    sheet.put("model.vocab_size", "model", "vocab_size", model.vocab_size)
    if sheet.target == "megatron-lm":
        # Its vocabulary is the tokenizer's, rounded up to 128 x tp rows; weights have as many rows as the model.
        sheet.put("model.vocab_size", "tokenizer", "padded_vocab_size", model.vocab_size)
    if model.rope_theta == int(model.rope_theta):
        sheet.put("model.rope_theta", "model", "rotary_base", int(model.rope_theta))
    else:
        sheet.lack("model.rope_theta", "a rotary base is a whole number there")
    sheet.table(
        "model",
        ("model.tie_word_embeddings", "share_embeddings_and_output_weights", model.tie_word_embeddings),
        ("model.mtp_layers", "mtp_num_layers", model.mtp_layers or None),
        ("", "calculate_per_token_loss", True),
    )
    sheet.skip("model.name model.eos_token_id model.pad_token_id", "the target takes it from the tokenizer or the recipe")


def _mla(sheet: Sheet) -> None:
    """Key-value heads, or the ranks and the stretched frequencies of multi-latent attention."""
    model, yarn = sheet.config.model, sheet.config.model.yarn
    if model.attention != "mla":
        sheet.put("model.num_kv_heads", "model", "num_query_groups", model.num_kv_heads)
        if yarn is not None:
            sheet.lack("model.yarn.*", "stretched frequencies are said for multi-latent attention alone")
        return
    sheet.skip("model.num_kv_heads", "multi-latent attention has as many key-value heads as heads")
    _table(sheet, fields.MLA)
    sheet.put("model.yarn" if yarn is None else "", "model", "rope_type", "rope" if yarn is None else "yarn")
    if yarn is None:
        return
    _table(sheet, fields.YARN)
    if sheet.target == "megatron-lm":
        plain = type(yarn).model_fields
        for key, default in {
            "original_seq_len": 4096,
            "beta_fast": plain["beta_fast"].default,
            "beta_slow": plain["beta_slow"].default,
        }.items():
            sheet.plain(f"model.yarn.{key}", default, "Megatron-LM has no flag for it of multi-latent attention")
    else:
        _table(sheet, fields.YARN_CORE)


def _experts(sheet: Sheet) -> None:
    """Experts, their router and their dispatcher."""
    config, moe = sheet.config, sheet.config.moe
    shapes = (
        "model.num_experts model.top_k model.expert_ffn_size model.norm_topk_prob model.first_dense_layers model.shared_expert_ffn_size"
        " model.router_score model.router_groups model.router_group_top_k model.router_scale model.router_bias"
    )
    if not config.model.num_experts:
        sheet.skip(f"{shapes} moe.* megatron.grouped_gemm", "the model has no experts")
        return
    sheet.skip("moe.apply_probs_on", "megatron-core weighs rows before the second product")
    sheet.skip("megatron.grouped_gemm", f"Transformer Engine reads {GROUPED_GEMM} of the environment")
    if moe.dispatcher == "dedup":
        sheet.lack("moe.dispatcher", "one copy of a token for each rank; alltoall, set instead, sends one for each expert")
    _table(sheet, [*fields.EXPERTS, *(field for field in fields.EXPERT_SWITCHES if field.asks(config))])
    sheet.put("moe.experts", "model", "moe_grouped_gemm", moe.experts != "loop")
    if config.backend == "megatron":
        sheet.table("model", ("backend", "moe_permute_fusion", True), ("backend", "moe_router_fusion", True))
        sheet.skip("moe.fused_permutation moe.fused_router", _TORCH)
    else:
        sheet.table(
            "model",
            ("moe.fused_permutation", "moe_permute_fusion", moe.fused_permutation),
            ("moe.fused_router", "moe_router_fusion", moe.fused_router),
        )


def _vision(sheet: Sheet) -> None:
    """The vision tower, its special tokens, and what of a vision-language model is frozen."""
    model, freeze, lm = sheet.config.model, sheet.config.train.freeze, sheet.target == "megatron-lm"
    ids = "model.image_token_id model.vision_start_token_id model.vision_end_token_id"
    if model.vision is None:
        sheet.skip("train.freeze", "the model has no vision tower")
        sheet.put("", "model", "position_embedding_type", "rope")
        return
    sheet.table(
        "model",
        ("model.mrope_section", "position_embedding_type", "mrope"),
        ("model.mrope_section", "mrope_section", model.mrope_section),
    )
    if lm:
        sheet.lack("model.vision.*", "Megatron-LM has no Qwen3-VL; Megatron-Bridge has, with --to megatron-bridge")
        sheet.skip(ids, "what the vision tower needs")
        return
    sheet.skip(f"model.vision.* {ids}", _TOWER)
    for part, field in {"language_model": "language_model", "vision": "vision_model", "projector": "vision_projection"}.items():
        sheet.put("train.freeze", "model", f"freeze_{field}", part in freeze)


def _data(sheet: Sheet) -> None:
    """The data set, the tokenizer, the row length and the seed."""
    config, data, lm = sheet.config, sheet.config.data, sheet.target == "megatron-lm"
    sheet.put("data.seq_len", "model", "seq_length", data.seq_len)
    section, field = ("model", "max_position_embeddings") if lm else ("dataset", "seq_length")
    sheet.put("data.seq_len", section, field, data.seq_len)
    sheet.put("data.num_workers", "dataset", "num_workers", data.num_workers)
    if data.kind == "mock" and lm:
        sheet.put("data.kind", "dataset", "mock_data", True)
    elif data.kind == "text":
        sheet.skip("data.kind", "text is what the target trains on")
    else:
        sheet.lack("data.kind", "choose the data set with the recipe" if not lm else "Megatron-LM trains on text alone")
    if data.kind == "text":
        sheet.table("dataset", ("data.pack", "reset_position_ids", data.pack), ("data.pack", "reset_attention_mask", data.pack))
    if lm and data.kind == "text":
        sheet.lack("data.path", "give --data-path: .bin and .idx files made by tools/preprocess_data.py of Megatron-LM")
    else:
        sheet.skip("data.path", "the data set comes with the recipe" if not lm else _READER)
    if data.tokenizer == "byte" and not lm:
        sheet.skip("data.tokenizer", "the recipe has the model's tokenizer")
    elif data.tokenizer == "byte":
        sheet.put("data.tokenizer", "tokenizer", "tokenizer_type", "NullTokenizer")
    else:
        sheet.table(
            "tokenizer",
            ("data.tokenizer", "tokenizer_type", "HuggingFaceTokenizer"),
            ("data.tokenizer", "tokenizer_model", data.tokenizer),
        )
    sheet.skip(READING, _READER)
    sheet.put("seed", "rng", "seed", config.seed)


def _parallel(sheet: Sheet) -> None:
    """Degrees of tensor, pipeline, context and expert parallelism, and what they overlap."""
    config, par, mg = sheet.config, sheet.config.parallel, sheet.config.megatron
    megatron = config.backend == "megatron"
    _table(sheet, fields.PARALLEL)
    if par.tp > 1:
        sheet.put("parallel.sequence_parallel", "model", "sequence_parallel", par.sequence_parallel)
    else:
        sheet.skip("parallel.sequence_parallel", "there is no tensor parallelism")
    if par.pipeline_layout is None:
        sheet.put("parallel.vpp", "model", "virtual_pipeline_model_parallel_size", par.vpp if par.vpp > 1 else None)
    else:
        sheet.put("parallel.pipeline_layout parallel.vpp", "model", "pipeline_model_parallel_layout", layout(config))
    read_key, unread_key = ("megatron.cp_comm_type", "parallel.cp_comm") if megatron else ("parallel.cp_comm", "megatron.cp_comm_type")
    sheet.put(read_key, "model", "cp_comm_type", mg.cp_comm_type if megatron else CP_COMM[par.cp_comm])
    sheet.skip(unread_key, _OTHER)
    sheet.put("megatron.cp_sizes", "model", "hierarchical_context_parallel_sizes", mg.cp_sizes or None)
    if par.vpp > 1:
        sheet.put("parallel.vpp", "model", "overlap_p2p_comm", True)
    overlaps = "model" if sheet.target == "megatron-lm" else "comm_overlap"
    for field in fields.OVERLAPS:
        if field.asks(config):
            sheet.put(field.key, overlaps, field.name, True)


def layout(config: TrainerConfig) -> str:
    """The chunks of a pipeline as megatron-core writes them: `Et|tt|tL` with E for the embedding, t for a layer, m for MTP,
    L for the loss.
    """
    chunks = ["t" * n for n in config.parallel.pipeline_layout or []]
    return "E" + "|".join(chunks) + "m" * config.model.mtp_layers + "L"


def _data_parallel(sheet: Sheet) -> None:
    """What data-parallel ranks shard, the precision of their reductions, and what they overlap."""
    config, par, mg = sheet.config, sheet.config.parallel, sheet.config.megatron
    megatron = config.backend == "megatron"
    kind = data_parallel(config)
    key = "megatron.data_parallel" if megatron else "parallel.fsdp"
    whole, sharded = kind == "megatron_fsdp", _has_sharded_optimizer(config)
    sheet.put(key, "ddp", "use_distributed_optimizer", sharded)
    sheet.table("dist", (key, "use_megatron_fsdp", whole), (key, "use_torch_fsdp2", kind == "fsdp2"))
    if sheet.target == "megatron-bridge":
        sheet.put(key, "ddp", "use_megatron_fsdp", whole)
    if whole:
        sheet.put("megatron.sharding_strategy" if megatron else key, "ddp", "data_parallel_sharding_strategy", mg.sharding_strategy)
        sheet.put(key, "model", "init_model_with_meta_device", mg.sharding_strategy != "no_shard")
    else:
        sheet.skip("megatron.sharding_strategy", "of Megatron-FSDP, which is not chosen")
    if megatron:
        sheet.skip("parallel.fsdp parallel.reshard_after_forward parallel.reduce_dtype parallel.comm_sms", _TORCH)
    else:
        sheet.skip("megatron.data_parallel megatron.sharding_strategy megatron.grad_reduce_dtype", MEGATRON)
    sheet.put("parallel.dp_replicate", "ddp", "num_distributed_optimizer_instances", par.dp_replicate if sharded else 1)
    dtype, name = (mg.grad_reduce_dtype, "megatron.grad_reduce_dtype") if megatron else (par.reduce_dtype, "parallel.reduce_dtype")
    sheet.put(name, "ddp", "grad_reduce_in_fp32", dtype == "fp32")
    if whole:  # Megatron-FSDP has a field of its own for that, and does not read the other
        sheet.put(name, "ddp", "megatron_fsdp_main_grads_dtype", _dtype(sheet, dtype))
    gather = sharded and mg.overlap_param_gather
    sheet.table(
        "ddp",
        ("megatron.overlap_grad_reduce", "overlap_grad_reduce", mg.overlap_grad_reduce),
        ("megatron.overlap_param_gather", "overlap_param_gather", gather and mg.overlap_grad_reduce),
    )
    if gather and not mg.overlap_grad_reduce:
        sheet.lack("megatron.overlap_param_gather", "gathers are overlapped together with reductions, or not at all")


def _precision(sheet: Sheet) -> None:
    """Precision of weights and products: 16 bits, and recipes of 8 and 4 bits."""
    config, mg, recipe = sheet.config, sheet.config.megatron, sheet.config.precision.fp8
    sheet.put("train.dtype", "model", "bf16", config.train.dtype == "bf16")
    if sheet.target == "megatron-bridge":
        dtype = DTYPES[config.train.dtype]
        sheet.put("train.dtype", "", "mixed_precision", None)
        sheet.table("model", ("train.dtype", "params_dtype", dtype), ("train.dtype", "pipeline_dtype", dtype))
    if recipe == "nvfp4":
        sheet.table("model", ("precision.fp8", "fp4", "e2m1"), ("precision.fp8", "fp4_recipe", "nvfp4"))
    elif recipe == "rowwise":
        sheet.lack("precision.fp8", "Transformer Engine scales by tensor or by block, not by row")
    else:
        sheet.put("precision.fp8", "model", "fp8", FP8_FORMAT.get(recipe))
        if recipe != "none":
            sheet.put("precision.fp8", "model", "fp8_recipe", recipe)
    why = _no_fp8_param(config)
    sheet.put("megatron.fp8_param", "ddp" if sheet.target == "megatron-lm" else "model", "fp8_param", mg.fp8_param and not why)
    if mg.fp8_param and why:
        sheet.lack("megatron.fp8_param", why)


def _no_fp8_param(config: TrainerConfig) -> str:
    """Why weights cannot be gathered in 8 bits, or nothing."""
    if data_parallel(config) == "ddp":
        return "without shards nothing is gathered"
    if offloaded_fraction(config) and config.precision.fp8 != "delayed":
        return f"with the optimizer on the host it takes the recipe delayed alone, found {config.precision.fp8}"
    return ""


def _memory(sheet: Sheet) -> None:
    """Recompute and offloading of activations."""
    config, train, mg = sheet.config, sheet.config.train, sheet.config.megatron
    modules = [m for m in train.recompute_modules if m != "vision"]
    sheet.put(
        "train.recompute",
        "model",
        "recompute_granularity",
        {"full": "full", "selective": "selective" if modules else None}.get(train.recompute),
    )
    if train.recompute == "full":
        sheet.table(
            "model",
            ("megatron.recompute_method", "recompute_method", mg.recompute_method),
            ("megatron.recompute_layers", "recompute_num_layers", recompute_layers(config)),
        )
    if modules:
        sheet.put("train.recompute_modules", "model", "recompute_modules", modules)
    if "vision" in train.recompute_modules:
        sheet.lack("train.recompute_modules", f"'vision': {_TOWER}")
    sheet.put("megatron.offload_modules", "model", "fine_grained_activation_offloading", bool(mg.offload_modules))
    if mg.offload_modules:
        sheet.put("megatron.offload_modules", "model", "offload_modules", mg.offload_modules)
    if config.offload.activations:
        sheet.table(
            "model",
            ("offload.activations", "cpu_offloading", True),
            ("offload.activations", "cpu_offloading_num_layers", config.model.num_layers - 1),
        )


def _switches(sheet: Sheet) -> None:
    """CUDA graphs, kernels of attention, loss and elementwise work, and determinism."""
    config, train, mg = sheet.config, sheet.config.train, sheet.config.megatron
    impl = graph_impl(config)
    sheet.put("megatron.cuda_graph_impl train.cuda_graphs", "model", "cuda_graph_impl", impl)
    if train.cuda_graphs:
        sheet.put("train.cuda_graphs", "model", "cuda_graph_modules", train.cuda_graphs)
    if impl != "none":
        sheet.put("megatron.cuda_graph_impl", "rng", "te_rng_tracker", True)
    sheet.put("train.attention", "model", "attention_backend", ATTENTION[train.attention])
    megatron = config.backend == "megatron"
    loss = not train.deterministic if megatron else train.fused_loss
    sheet.put("backend" if megatron else "train.fused_loss", "model", "cross_entropy_loss_fusion", loss)
    if megatron:
        sheet.skip("train.fused_loss", _TORCH)
    sheet.table(
        "model",
        # Megatron-LM refuses Transformer Engine's kernel for the loss.
        ("backend", "cross_entropy_fusion_impl", "te" if loss and sheet.target != "megatron-lm" else "native"),
        # For multi-latent attention the fused kernel of the rotary embedding knows stretched frequencies only.
        ("backend", "apply_rope_fusion", not (config.model.attention == "mla" and config.model.yarn is None)),
        *(("backend", field, True) for field in ("bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion")),
    )
    if sheet.target == "megatron-lm":
        sheet.put("megatron.kernels", "model", "transformer_impl", "local" if mg.kernels == "local" else "transformer_engine")
    sheet.put("train.deterministic", "model", "deterministic_mode", train.deterministic)
    sheet.skip("train.compile.backend train.compile.dynamic", "of torch.compile, which the target leaves out")
    sheet.skip("train.fused_activation train.fused_norms optimizer.fused", f"{_TORCH}; megatron-core's are fused")
    sheet.skip("train.loss_chunk", f"{_TORCH}; logits of a micro-batch exist at once there")
