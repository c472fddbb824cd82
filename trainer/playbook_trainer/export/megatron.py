"""A configuration as fields of megatron-core and of the training loop around it; Megatron-LM's flags and Megatron-Bridge's overrides share them.

Sources: megatron-core 0.19.2, `megatron/core/transformer/transformer_config.py`, `megatron/core/distributed/distributed_data_parallel_config.py`,
`megatron/core/optimizer/optimizer_config.py`, `megatron/training/config/`, `megatron/training/arguments.py`; Megatron-Bridge,
`src/megatron/bridge/training/config.py`.
"""

from __future__ import annotations

from playbook_trainer.config.environment import GROUPED_GEMM
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.export.megatron_run import (
    DTYPES,
    data_parallel,
    files,
    has_sharded_optimizer,
    loop,
    offloaded,
    optimizer,
)
from playbook_trainer.export.sheet import Sheet, Target
from playbook_trainer.megatron.checks import pads_experts
from playbook_trainer.megatron.recompute import recompute_layers

ATTENTION = {"auto": "auto", "plain": "unfused", "flash": "flash", "cudnn": "fused"}
CP_COMM = {"allgather": "all_gather", "ring": "p2p", "ulysses": "a2a"}
FP8_FORMAT = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
READER = "the target has readers of its own"
TORCH = "a setting of the torch backend"
MEGATRON = "a setting of the megatron backend"
OTHER = "a setting of the other backend"
TOWER = "the vision tower is the recipe's own there"


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
    return sheet


def _model(sheet: Sheet) -> None:
    model = sheet.config.model
    for key, field in {
        "num_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "head_dim": "kv_channels",
        "rms_norm_eps": "layernorm_epsilon",
        "init_std": "init_method_std",
        "qk_norm": "qk_layernorm",
        "vocab_size": "vocab_size",
    }.items():
        sheet.put(f"model.{key}", "model", field, getattr(model, key))
    if sheet.target == "megatron-lm":
        # Its vocabulary is the tokenizer's, rounded up to 128 x tp rows; weights have as many rows as the model.
        sheet.put("model.vocab_size", "tokenizer", "padded_vocab_size", model.vocab_size)
    sheet.put("model.ffn_size", "model", "ffn_hidden_size", model.ffn_size or model.hidden_size)
    if model.rope_theta == int(model.rope_theta):
        sheet.put("model.rope_theta", "model", "rotary_base", int(model.rope_theta))
    else:
        sheet.lack("model.rope_theta", "a rotary base is a whole number there")
    sheet.put("model.tie_word_embeddings", "model", "share_embeddings_and_output_weights", model.tie_word_embeddings)
    sheet.put("model.mtp_layers", "model", "mtp_num_layers", model.mtp_layers or None)
    for field, value in {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "calculate_per_token_loss": True,
    }.items():
        sheet.put("", "model", field, value)
    sheet.skip("model.name model.eos_token_id model.pad_token_id", "the target takes it from the tokenizer or the recipe")


def _mla(sheet: Sheet) -> None:
    model, yarn = sheet.config.model, sheet.config.model.yarn
    if model.attention != "mla":
        sheet.put("model.num_kv_heads", "model", "num_query_groups", model.num_kv_heads)
        keys = "model.attention model.q_lora_rank model.kv_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim model.v_head_dim"
        sheet.skip(keys, "the model has grouped-query attention")
        if yarn is None:
            sheet.skip("model.yarn", "the model's frequencies are not stretched")
        else:
            sheet.lack("model.yarn.*", "stretched frequencies are said for multi-latent attention alone")
        return
    sheet.skip("model.num_kv_heads", "multi-latent attention has as many key-value heads as heads")
    sheet.put("model.attention", "model", "multi_latent_attention", True)
    sheet.put("model.q_lora_rank", "model", "q_lora_rank", model.q_lora_rank or None)
    sheet.put("model.kv_lora_rank", "model", "kv_lora_rank", model.kv_lora_rank)
    sheet.put("model.qk_nope_head_dim", "model", "qk_head_dim", model.qk_nope_head_dim)
    sheet.put("model.qk_rope_head_dim", "model", "qk_pos_emb_head_dim", model.qk_rope_head_dim)
    sheet.put("model.v_head_dim", "model", "v_head_dim", model.v_head_dim)
    sheet.put("model.yarn" if yarn is None else "", "model", "rope_type", "rope" if yarn is None else "yarn")
    if yarn is None:
        return
    sheet.put("model.yarn.factor", "model", "rotary_scaling_factor", yarn.factor)
    sheet.put("model.yarn.mscale", "model", "mscale", yarn.mscale)
    sheet.put("model.yarn.mscale_all_dim", "model", "mscale_all_dim", yarn.mscale_all_dim)
    stretched = {
        "original_seq_len": ("original_max_position_embeddings", 4096),
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
    }
    for key, (field, plain) in stretched.items():
        if sheet.target == "megatron-lm":
            sheet.plain(f"model.yarn.{key}", plain, f"Megatron-LM has no flag for {field} of multi-latent attention")
        else:
            sheet.put(f"model.yarn.{key}", "model", field, getattr(yarn, key))


def _experts(sheet: Sheet) -> None:
    config, model, moe = sheet.config, sheet.config.model, sheet.config.moe
    shapes = (
        "model.num_experts model.top_k model.expert_ffn_size model.norm_topk_prob model.first_dense_layers model.shared_expert_ffn_size"
        " model.router_score model.router_groups model.router_group_top_k model.router_scale model.router_bias"
    )
    if not model.num_experts:
        sheet.skip(f"{shapes} moe.*", "the model has no experts")
        sheet.skip("megatron.aux_loss_coeff megatron.grouped_gemm", "the model has no experts")
        return
    fused = moe.dispatcher in ("deepep", "hybridep")
    sheet.skip("moe.apply_probs_on", "megatron-core weighs rows before the second product")
    sheet.skip("megatron.grouped_gemm", f"Transformer Engine reads {GROUPED_GEMM} of the environment")
    if moe.dispatcher == "dedup":
        sheet.lack("moe.dispatcher", "one copy of a token for each rank; alltoall, set instead, sends one for each expert")
    dispatcher = "flex" if fused else "alltoall" if moe.dispatcher == "dedup" else moe.dispatcher
    pattern = [int(i >= model.first_dense_layers) for i in range(model.num_layers)]
    settings = {
        ("model.num_experts", "num_moe_experts"): model.num_experts,
        ("model.top_k", "moe_router_topk"): model.top_k,
        ("model.expert_ffn_size", "moe_ffn_hidden_size"): model.expert_ffn_size,
        ("model.norm_topk_prob", "moe_router_pre_softmax"): not model.norm_topk_prob or model.top_k == 1,
        ("model.first_dense_layers", "moe_layer_freq"): pattern if model.first_dense_layers else 1,
        ("model.shared_expert_ffn_size", "moe_shared_expert_intermediate_size"): model.shared_expert_ffn_size or None,
        ("model.router_score", "moe_router_score_function"): model.router_score,
        ("model.router_groups", "moe_router_num_groups"): model.router_groups or None,
        ("model.router_group_top_k", "moe_router_group_topk"): model.router_group_top_k or None,
        ("model.router_scale", "moe_router_topk_scaling_factor"): model.router_scale if model.router_scale != 1 else None,
        ("model.router_bias", "moe_router_enable_expert_bias"): model.router_bias,
        ("moe.dispatcher", "moe_token_dispatcher_type"): dispatcher,
        ("moe.experts", "moe_grouped_gemm"): moe.experts != "loop",
        ("moe.router_dtype", "moe_router_dtype"): "fp32" if moe.router_dtype == "fp32" else None,
        ("moe.capacity_factor", "moe_expert_capacity_factor"): moe.capacity_factor,
        ("megatron.aux_loss_coeff", "moe_router_load_balancing_type"): "aux_loss" if config.megatron.aux_loss_coeff else "none",
        ("megatron.aux_loss_coeff", "moe_aux_loss_coeff"): config.megatron.aux_loss_coeff,
    }
    for (key, field), value in settings.items():
        sheet.put(key, "model", field, value)
    if pads_experts(config):
        sheet.put("moe.capacity_factor", "model", "moe_pad_expert_input_to_capacity", True)
    if fused:
        sheet.put("moe.dispatcher", "model", "moe_flex_dispatcher_backend", moe.dispatcher)
    if config.backend == "megatron":
        sheet.put("backend", "model", "moe_permute_fusion", True)
        sheet.put("backend", "model", "moe_router_fusion", True)
        sheet.skip("moe.fused_permutation moe.fused_router", TORCH)
    else:
        sheet.put("moe.fused_permutation", "model", "moe_permute_fusion", moe.fused_permutation)
        sheet.put("moe.fused_router", "model", "moe_router_fusion", moe.fused_router)


def _vision(sheet: Sheet) -> None:
    model, freeze, lm = sheet.config.model, sheet.config.train.freeze, sheet.target == "megatron-lm"
    ids = "model.image_token_id model.vision_start_token_id model.vision_end_token_id"
    if model.vision is None:
        sheet.skip(f"model.vision {ids} train.freeze model.mrope_section", "the model has no vision tower")
        sheet.put("", "model", "position_embedding_type", "rope")
        return
    sheet.put("model.mrope_section", "model", "position_embedding_type", "mrope")
    sheet.put("model.mrope_section", "model", "mrope_section", model.mrope_section)
    if lm:
        sheet.lack("model.vision.*", "Megatron-LM has no Qwen3-VL; Megatron-Bridge has, with --to megatron-bridge")
        sheet.skip(ids, "what the vision tower needs")
        sheet.plain("train.freeze", [], "Megatron-LM freezes no parts of a model by flag")
        return
    sheet.skip(f"model.vision.* {ids}", TOWER)
    for part, field in {"language_model": "language_model", "vision": "vision_model", "projector": "vision_projection"}.items():
        sheet.put("train.freeze", "model", f"freeze_{field}", part in freeze)


def _data(sheet: Sheet) -> None:
    config, data, lm = sheet.config, sheet.config.data, sheet.target == "megatron-lm"
    sheet.put("data.seq_len", "model", "seq_length", data.seq_len)
    if lm:
        sheet.put("data.seq_len", "model", "max_position_embeddings", data.seq_len)
    else:
        sheet.put("data.seq_len", "dataset", "seq_length", data.seq_len)
    sheet.put("data.num_workers", "dataset", "num_workers", data.num_workers)
    if data.kind == "mock" and lm:
        sheet.put("data.kind", "dataset", "mock_data", True)
    elif data.kind == "text":
        sheet.skip("data.kind", "text is what the target trains on")
    else:
        sheet.lack("data.kind", "choose the data set with the recipe" if not lm else "Megatron-LM trains on text alone")
    if data.kind == "text":
        sheet.put("data.pack", "dataset", "reset_position_ids", data.pack)
        sheet.put("data.pack", "dataset", "reset_attention_mask", data.pack)
    else:
        sheet.plain("data.pack", True, "how samples fill rows is the data set's own matter there")
    if lm and data.kind == "text":
        sheet.lack("data.path", "give --data-path: .bin and .idx files made by tools/preprocess_data.py of Megatron-LM")
    else:
        sheet.skip("data.path", "the data set comes with the recipe" if not lm else READER)
    if data.tokenizer == "byte" and not lm:
        sheet.skip("data.tokenizer", "the recipe has the model's tokenizer")
    elif data.tokenizer == "byte":
        sheet.put("data.tokenizer", "tokenizer", "tokenizer_type", "NullTokenizer")
    else:
        sheet.put("data.tokenizer", "tokenizer", "tokenizer_type", "HuggingFaceTokenizer")
        sheet.put("data.tokenizer", "tokenizer", "tokenizer_model", data.tokenizer)
    sheet.plain("data.pad", True, "rows have one length there")
    sheet.plain("data.pad_to_multiple", None, "rows have one length there")
    reading = (
        "source subset text_key pack_buffer images fixed_image_size max_image_pixels max_source_pixels max_images_per_sample on_bad_image"
    )
    sheet.skip(" ".join(f"data.{name}" for name in f"{reading} cache cache_gib generated.*".split()), READER)
    sheet.put("seed", "rng", "seed", config.seed)


def _parallel(sheet: Sheet) -> None:
    config, par, mg = sheet.config, sheet.config.parallel, sheet.config.megatron
    megatron = config.backend == "megatron"
    sheet.put("parallel.tp", "model", "tensor_model_parallel_size", par.tp)
    sheet.put("parallel.pp", "model", "pipeline_model_parallel_size", par.pp)
    sheet.put("parallel.cp", "model", "context_parallel_size", par.cp)
    sheet.put("parallel.ep", "model", "expert_model_parallel_size", par.ep)
    sheet.put("parallel.etp", "model", "expert_tensor_parallel_size", (par.etp or par.tp) if config.model.num_experts else None)
    if par.tp > 1:
        sheet.put("parallel.sequence_parallel", "model", "sequence_parallel", par.sequence_parallel)
    else:
        sheet.skip("parallel.sequence_parallel", "there is no tensor parallelism")
    if par.pipeline_layout is None:
        sheet.put("parallel.vpp", "model", "virtual_pipeline_model_parallel_size", par.vpp if par.vpp > 1 else None)
        sheet.skip("parallel.pipeline_layout", "all chunks have as many layers")
    else:
        sheet.put("parallel.pipeline_layout parallel.vpp", "model", "pipeline_model_parallel_layout", layout(config))
    own, other = ("megatron.cp_comm_type", "parallel.cp_comm") if megatron else ("parallel.cp_comm", "megatron.cp_comm_type")
    sheet.put(own, "model", "cp_comm_type", mg.cp_comm_type if megatron else CP_COMM[par.cp_comm])
    sheet.skip(other, OTHER)
    sheet.put("megatron.cp_sizes", "model", "hierarchical_context_parallel_sizes", mg.cp_sizes or None)
    if par.vpp > 1:
        sheet.put("parallel.vpp", "model", "overlap_p2p_comm", True)
    overlaps = "model" if sheet.target == "megatron-lm" else "comm_overlap"
    fields = {
        "tp_comm_overlap": "tp_comm_overlap",
        "overlap_expert_parallel": "overlap_moe_expert_parallel_comm",
        "delay_wgrad": "delay_wgrad_compute",
    }
    for key, field in fields.items():
        if getattr(mg, key):
            sheet.put(f"megatron.{key}", overlaps, field, True)
        else:
            sheet.skip(f"megatron.{key}", "at false it asks for nothing")


def layout(config: TrainerConfig) -> str:
    """The chunks of a pipeline as megatron-core writes them: `Et|tt|tL` with E for the embedding, t for a layer, m for MTP, L for the loss."""
    chunks = ["t" * n for n in config.parallel.pipeline_layout or []]
    return "E" + "|".join(chunks) + "m" * config.model.mtp_layers + "L"


def _data_parallel(sheet: Sheet) -> None:
    config, par, mg = sheet.config, sheet.config.parallel, sheet.config.megatron
    megatron = config.backend == "megatron"
    kind = data_parallel(config)
    key = "megatron.data_parallel" if megatron else "parallel.fsdp"
    whole, sharded = kind == "megatron_fsdp", has_sharded_optimizer(config)
    sheet.put(key, "ddp", "use_distributed_optimizer", sharded)
    sheet.put(key, "dist", "use_megatron_fsdp", whole)
    sheet.put(key, "dist", "use_torch_fsdp2", kind == "fsdp2")
    if sheet.target == "megatron-bridge":
        sheet.put(key, "ddp", "use_megatron_fsdp", whole)
    if whole:
        sheet.put("megatron.sharding_strategy" if megatron else key, "ddp", "data_parallel_sharding_strategy", mg.sharding_strategy)
        sheet.put(key, "model", "init_model_with_meta_device", mg.sharding_strategy != "no_shard")
    else:
        sheet.skip("megatron.sharding_strategy", "of Megatron-FSDP, which is not chosen")
    if megatron:
        sheet.skip("parallel.fsdp parallel.reshard_after_forward parallel.reduce_dtype parallel.comm_sms", TORCH)
    else:
        sheet.skip("megatron.data_parallel megatron.sharding_strategy megatron.grad_reduce_dtype", MEGATRON)
        sheet.plain("parallel.comm_sms", 0, "its products take all multiprocessors, unless NVTE_EXT_MARGIN_SM says otherwise")
        sheet.plain("parallel.reshard_after_forward", True, "Megatron-FSDP frees gathered parameters after the forward pass")
    sheet.put("parallel.dp_replicate", "ddp", "num_distributed_optimizer_instances", par.dp_replicate if sharded else 1)
    dtype, name = (mg.grad_reduce_dtype, "megatron.grad_reduce_dtype") if megatron else (par.reduce_dtype, "parallel.reduce_dtype")
    sheet.put(name, "ddp", "grad_reduce_in_fp32", dtype == "fp32")
    if whole:  # Megatron-FSDP has a field of its own for that, and does not read the other
        sheet.put(name, "ddp", "megatron_fsdp_main_grads_dtype", DTYPES[dtype] if sheet.target == "megatron-bridge" else dtype)
    sheet.put("megatron.overlap_grad_reduce", "ddp", "overlap_grad_reduce", mg.overlap_grad_reduce)
    gather = sharded and mg.overlap_param_gather
    sheet.put("megatron.overlap_param_gather", "ddp", "overlap_param_gather", gather and mg.overlap_grad_reduce)
    if gather and not mg.overlap_grad_reduce:
        sheet.lack("megatron.overlap_param_gather", "gathers are overlapped together with reductions, or not at all")


def _precision(sheet: Sheet) -> None:
    config, mg, recipe = sheet.config, sheet.config.megatron, sheet.config.precision.fp8
    half = config.train.dtype == "bf16"
    sheet.put("train.dtype", "model", "bf16", half)
    if sheet.target == "megatron-bridge":
        sheet.put("train.dtype", "", "mixed_precision", None)
        sheet.put("train.dtype", "model", "params_dtype", DTYPES[config.train.dtype])
        sheet.put("train.dtype", "model", "pipeline_dtype", DTYPES[config.train.dtype])
    if recipe == "nvfp4":
        sheet.put("precision.fp8", "model", "fp4", "e2m1")
        sheet.put("precision.fp8", "model", "fp4_recipe", "nvfp4")
    elif recipe == "rowwise":
        sheet.lack("precision.fp8", "Transformer Engine scales by tensor or by block, not by row")
    else:
        sheet.put("precision.fp8", "model", "fp8", FP8_FORMAT.get(recipe))
        if recipe != "none":
            sheet.put("precision.fp8", "model", "fp8_recipe", recipe)
    sheet.plain("precision.fp8_modules", ["linear", "experts"], "a recipe covers projections and experts alike")
    why = _no_fp8_param(config)
    sheet.put("megatron.fp8_param", "ddp" if sheet.target == "megatron-lm" else "model", "fp8_param", mg.fp8_param and not why)
    if mg.fp8_param and why:
        sheet.lack("megatron.fp8_param", why)


def _no_fp8_param(config: TrainerConfig) -> str:
    """Why weights cannot be gathered in 8 bits, or nothing."""
    if data_parallel(config) == "ddp":
        return "without shards nothing is gathered"
    if offloaded(config) and config.precision.fp8 != "delayed":
        return f"with the optimizer on the host it takes the recipe delayed alone, found {config.precision.fp8}"
    return ""


def _memory(sheet: Sheet) -> None:
    config, train, mg = sheet.config, sheet.config.train, sheet.config.megatron
    modules = [m for m in train.recompute_modules if m != "vision"]
    sheet.put(
        "train.recompute",
        "model",
        "recompute_granularity",
        {"full": "full", "selective": "selective" if modules else None}.get(train.recompute),
    )
    if train.recompute == "full":
        sheet.put("megatron.recompute_method", "model", "recompute_method", mg.recompute_method)
        sheet.put("megatron.recompute_layers", "model", "recompute_num_layers", recompute_layers(config))
    else:
        sheet.skip("megatron.recompute_method megatron.recompute_layers", "of full recompute, which is not chosen")
    if modules:
        sheet.put("train.recompute_modules", "model", "recompute_modules", modules)
    else:
        sheet.skip("train.recompute_modules", "names nothing of the decoder")
    if "vision" in train.recompute_modules:
        sheet.lack("train.recompute_modules", f"'vision': {TOWER}")
    sheet.put("megatron.offload_modules", "model", "fine_grained_activation_offloading", bool(mg.offload_modules))
    if mg.offload_modules:
        sheet.put("megatron.offload_modules", "model", "offload_modules", mg.offload_modules)
    if config.offload.activations:
        sheet.put("offload.activations", "model", "cpu_offloading", True)
        sheet.put("offload.activations", "model", "cpu_offloading_num_layers", config.model.num_layers - 1)
    else:
        sheet.skip("offload.activations", "at false it asks for nothing")


def _switches(sheet: Sheet) -> None:
    config, train, mg = sheet.config, sheet.config.train, sheet.config.megatron
    impl = "transformer_engine" if mg.cuda_graph_impl == "none" and train.cuda_graphs else mg.cuda_graph_impl
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
        sheet.skip("train.fused_loss", TORCH)
    # Megatron-LM refuses Transformer Engine's kernel for the loss.
    sheet.put("backend", "model", "cross_entropy_fusion_impl", "te" if loss and sheet.target != "megatron-lm" else "native")
    # For multi-latent attention the fused kernel of the rotary embedding knows stretched frequencies only.
    plain = config.model.attention == "mla" and config.model.yarn is None
    sheet.put("backend", "model", "apply_rope_fusion", not plain)
    for field in ("bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion"):
        sheet.put("backend", "model", field, True)
    if sheet.target == "megatron-lm":
        sheet.put("megatron.kernels", "model", "transformer_impl", "local" if mg.kernels == "local" else "transformer_engine")
    else:
        sheet.plain("megatron.kernels", "auto", "the recipe chooses the layers")
    sheet.put("train.deterministic", "model", "deterministic_mode", train.deterministic)
    for region in ("vision", "decoder", "loss"):
        sheet.plain(f"train.compile.{region}", False, "megatron-core has fused kernels of its own instead of torch.compile")
    sheet.skip("train.compile.backend train.compile.dynamic", "of torch.compile, which the target leaves out")
    sheet.skip("train.fused_activation train.fused_norms optimizer.fused", f"{TORCH}; megatron-core's are fused")
    sheet.skip("train.loss_chunk", f"{TORCH}; logits of a micro-batch exist at once there")
