"""What can be known to be wrong with a configuration of the megatron backend before any process starts, and without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from playbook.planner import layout
from playbook.planner.options import Options
from playbook.planner.rules import Words
from playbook_trainer.config.row_lengths import unlike_lengths, variable_lengths
from playbook_trainer.config.sections import MegatronConfig, broken, shape_of
from playbook_trainer.config.tree import TrainerConfig, neutral, torch_only

WORDS = Words(
    names={
        **{key: f"parallel.{key}" for key in ("tp", "pp", "vpp", "cp", "ep", "etp")},
        "seq_len": "data.seq_len",
        "gbs": "train.global_batch_size",
        "sp": "parallel.sequence_parallel",
        "dispatcher": "moe.dispatcher",
        "capacity": "moe.capacity_factor",
        "cp_comm": "megatron.cp_comm_type",
        "cp_sizes": "megatron.cp_sizes",
        "optimizer_instances": "parallel.dp_replicate",
        "sharding": "megatron.data_parallel",
        "ep_overlap": "megatron.overlap_expert_parallel",
        "recompute": "train.recompute",
        "graphs": "train.cuda_graphs",
        "offload": "offload.activations",
        "offload_modules": "megatron.offload_modules",
        "fp8": "precision.fp8",
    },
    assignments={
        "capacity=false": "moe.capacity_factor=null",
        "cp_sizes=2,4": "megatron.cp_sizes=[2,4]",
        "graphs=moe_router,moe_preprocess": "train.cuda_graphs=[moe_router,moe_preprocess]",
        "sharding=optimizer": "megatron.data_parallel=distributed_optimizer",
        "sharding=fsdp": "megatron.data_parallel=megatron_fsdp",
    },
)
"""The trainer's names of what layout rules speak of, for both backends."""

SHARDING = {"ddp": "none", "distributed_optimizer": "optimizer", "megatron_fsdp": "fsdp", "fsdp2": "fsdp2"}
"""`megatron.data_parallel` as layout rules name it."""

GRAPH_WARMUP = 3
"""Steps before CUDA graphs are captured."""

_SCORED_EXPERTS = 2
"""Experts whose scores DeepSeek-V3 adds up to the score of a group."""
_CUTLASS_K = 128
"""What Transformer Engine's CUTLASS kernel wants the sums of its products to be a multiple of."""


def options(config: TrainerConfig) -> Options:
    """The features that are chosen, as layout rules name them."""
    par, train, mg, moe = config.parallel, config.train, config.megatron, config.model.num_experts > 0
    modules = tuple(m for m in train.recompute_modules if m != "vision")
    graphs = ("full_iteration",) if mg.cuda_graph_impl == "full_iteration" else ()
    return Options(
        sp=par.sequence_parallel if par.tp > 1 else None,
        uneven=par.pipeline_layout is not None,
        dispatcher=config.moe.dispatcher if moe and config.moe.dispatcher != "dedup" else "",
        cp_comm=mg.cp_comm_type if par.cp > 1 else "",
        cp_sizes=tuple(mg.cp_sizes),
        optimizer_instances=par.dp_replicate,
        sharding=SHARDING[mg.data_parallel],
        precision_aware=mg.precision_aware_optimizer,
        recompute={"none": (), "full": ("full",), "selective": modules}[train.recompute],
        graphs=(*graphs, *train.cuda_graphs),
        capacity=pads_experts(config),
        ep_overlap=mg.overlap_expert_parallel,
        fp8="" if config.precision.fp8 in ("none", "rowwise", "nvfp4") else config.precision.fp8,
        offload=config.offload.activations,
        offload_modules=tuple(m for m in mg.offload_modules if m != "fused_group_mlp"),
    )


def offloaded_fraction(config: TrainerConfig) -> float:
    """The share of the optimizer state that lives, and is updated, on the host: 0 to 1."""
    return config.megatron.optimizer_offload_fraction or (1.0 if config.offload.optimizer else 0.0)


def pads_experts(config: TrainerConfig) -> bool:
    """Whether experts get a fixed number of rows, padded where fewer come: graphs that hold them need fixed shapes."""
    whole = config.megatron.cuda_graph_impl == "full_iteration" or "moe" in config.train.cuda_graphs
    return config.moe.capacity_factor is not None and whole


def layout_problems(config: TrainerConfig, world: int) -> list[str]:
    """Broken rules of layout arithmetic and of the features chosen, in the configuration's own words."""
    return arithmetic_problems(config, world, options(config)) + vocabulary_problems(config) + _pipeline_problems(config)


def arithmetic_problems(config: TrainerConfig, world: int, chosen: Options | None) -> list[str]:
    """Broken rules of layout arithmetic, and of the features `chosen`, if any."""
    model, par, train = config.model, config.parallel, config.train
    return layout.check(
        gpus=world, heads=model.num_heads, kv_heads=model.num_kv_heads, layers=model.num_layers, experts=model.num_experts,
        seq_len=config.data.seq_len, micro_batch_size=train.micro_batch_size, global_batch_size=train.global_batch_size,
        tp=par.tp, pp=par.pp, vpp=par.vpp, cp=par.cp, ep=par.ep, etp=par.etp or par.tp, options=chosen, shape=shape_of(model),
        words=WORDS,
    )  # fmt: skip


def vocabulary_problems(config: TrainerConfig) -> list[str]:
    """Embedding and output layer split the vocabulary over TP, and neither backend pads it."""
    size, tp = config.model.vocab_size, config.parallel.tp
    return [f"a vocabulary of {size} does not divide over tp {tp}; pad model.vocab_size"] if size % tp else []


def _pipeline_problems(config: TrainerConfig) -> list[str]:
    """Layer counts per chunk in `parallel.pipeline_layout` that do not fit the stages or the model."""
    par, sizes, layers = config.parallel, config.parallel.pipeline_layout, config.model.num_layers
    chunks = par.pp * par.vpp
    if sizes is None:
        return []
    if par.pp == 1:
        return ["parallel.pipeline_layout needs pp > 1; leave it out or raise parallel.pp"]
    if len(sizes) != chunks or sum(sizes) != layers or min(sizes) < 0:
        return [
            f"parallel.pipeline_layout {sizes} has {len(sizes)} chunks and {sum(sizes)} layers; "
            f"expected {chunks} (pp {par.pp} x vpp {par.vpp}) and {layers}"
        ]
    return [f"parallel.pipeline_layout {sizes}: only the first and the last chunk may be without layers"] if 0 in sizes[1:-1] else []


def feature_problems(config: TrainerConfig) -> list[str]:
    """What this backend does not do, and settings of its section that contradict each other."""
    par, mg, problems = config.parallel, config.megatron, []
    for key in torch_only():
        value, default = attrgetter(key)(config), neutral()[key]
        if value not in (default, "auto"):
            problems.append(f"{key} {_text(value)} belongs to the torch backend; leave it at {_text(default)}")
    rules = {
        "moe.dispatcher 'dedup' belongs to the torch backend; here there are allgather, alltoall, deepep and hybridep": (
            config.moe.dispatcher == "dedup"
        ),
        "megatron-core needs a GPU: set train.device: cuda, or backend: torch": config.train.device == "cpu",
        f"parallel.dp_replicate {par.dp_replicate} needs something that is sharded, found {mg.data_parallel}; set it to 1": (
            par.dp_replicate > 1 and mg.data_parallel not in ("distributed_optimizer", "megatron_fsdp")
        ),
        "checkpoint.dir is not served with megatron.data_parallel fsdp2: set megatron_fsdp or distributed_optimizer": (
            config.checkpoint.dir and mg.data_parallel == "fsdp2"
        ),
        "checkpoint.dir is not served with an optimizer on the host: megatron-core writes its state, but does not restore the copies "
        "that it updates there; leave checkpoint.dir out, or set offload.optimizer: false and megatron.optimizer_offload_fraction: 0": (
            config.checkpoint.dir and _offloads(config)
        ),
        "megatron.data_parallel fsdp2 gathers the embedding where it is looked up, and the tied output layer reads it elsewhere: "
        "set model.tie_word_embeddings: false, or take megatron_fsdp": (mg.data_parallel == "fsdp2" and config.model.tie_word_embeddings),
    }
    return problems + broken(rules) + _row_problems(config) + _vision_problems(config) + _router_problems(config)


def _router_problems(config: TrainerConfig) -> list[str]:
    """Where megatron-core routes otherwise than the model that the weights come from.

    Source: megatron-core, `moe_utils.py` (group_limited_topk, topk_routing_with_score_function); transformers, `DeepseekV3TopkRouter`.
    """
    model, several = config.model, config.model.top_k > 1
    top_groups, scored = model.router_group_top_k, _SCORED_EXPERTS
    best = model.top_k // max(1, top_groups)
    does = "divides the probabilities of the chosen experts by their sum" if several else "leaves the probability of a single expert"
    rules = {
        f"model.top_k {model.top_k} over model.router_group_top_k {top_groups}: DeepSeek-V3 scores a group by its {scored} best "
        f"experts, and megatron-core by its top_k // router_group_top_k = {best} best; set model.top_k to "
        f"{scored * top_groups} or model.router_group_top_k to {max(1, model.top_k // scored)}": (
            top_groups < model.router_groups and best != scored
        ),
        f"model.norm_topk_prob {_text(model.norm_topk_prob)} with router_score sigmoid and top_k {model.top_k}: megatron-core always "
        f"{does}; set it to {_text(several)}": model.router_score == "sigmoid" and model.norm_topk_prob != several,
    }
    return broken(rules)


def _row_problems(config: TrainerConfig) -> list[str]:
    """What the layout and its overlaps ask of the rows."""
    par, mg, data = config.parallel, config.megatron, config.data
    cut_along_tokens = par.tp > 1 and par.sequence_parallel
    unlike = variable_lengths(config) or unlike_lengths(config)
    rules = {
        "pp needs rows of one length: set data.pad: true": par.pp > 1 and not data.pad,
        "cp cuts rows of one length: set data.pad: true": par.cp > 1 and not data.pad,
        "sequence parallelism needs rows of one length: set data.pad: true": cut_along_tokens and not data.pad,
        f"megatron.cp_sizes {mg.cp_sizes} are numbers of ranks: set each to 1 or more, with a product of parallel.cp {par.cp}": (
            any(size < 1 for size in mg.cp_sizes)
        ),
        "megatron.tp_comm_overlap cuts up what sequence parallelism sends: set parallel.tp above 1 and sequence_parallel: true": (
            mg.tp_comm_overlap and not cut_along_tokens
        ),
        "megatron.tp_comm_overlap has buffers of one size, and cp fills packed documents and images up to others: set it to false": (
            mg.tp_comm_overlap and par.cp > 1 and (data.pack or config.model.vision is not None)
        ),
        "moe.dispatcher allgather wants as many tokens on every rank, and rows that are not padded differ, as do packed documents and "
        "images that cp fills up: set moe.dispatcher: alltoall": (
            unlike and config.model.num_experts and config.moe.dispatcher == "allgather"
        ),
        "moe.experts 'grouped' needs the kernels of Transformer Engine: set megatron.kernels: auto": (
            config.moe.experts == "grouped" and mg.kernels == "local"
        ),
    }
    return broken(rules)


def _vision_problems(config: TrainerConfig) -> list[str]:
    """What a vision-language model excludes here: DeepStack adds the features of a micro-batch after each of the decoder's first layers."""
    model, par, mg = config.model, config.parallel, config.megatron
    if model.vision is None:
        return []
    deepstack = len(model.vision.deepstack_layers)
    first_chunk_layers = par.pipeline_layout[0] if par.pipeline_layout else model.num_layers // (par.pp * par.vpp)
    rules = {
        f"DeepStack features enter the first {deepstack} decoder layers, which must lie in the first chunk of the pipeline, and that "
        f"has {first_chunk_layers}: lower parallel.pp or vpp, or set parallel.pipeline_layout": first_chunk_layers < deepstack,
        "CUDA graphs of a vision-language model: a graph takes no features of images, which differ from batch to batch; "
        "set train.cuda_graphs: [] and megatron.cuda_graph_impl: none": config.train.cuda_graphs or mg.cuda_graph_impl != "none",
        "megatron.overlap_expert_parallel runs layers in pieces, and DeepStack's features enter whole ones: set it to false for a "
        "vision-language model": mg.overlap_expert_parallel,
        f"model.mtp_layers {model.mtp_layers} beside a vision tower is no model that there is: set it to 0": model.mtp_layers,
        f"model.attention {model.attention} has no positions in three dimensions: a vision-language model has gqa": (
            model.attention != "gqa"
        ),
    }
    return broken(rules)


def _padding_problems(config: TrainerConfig) -> list[str]:
    """Where padding would count in the balance of experts."""
    data = config.data
    padded = (data.pad and data.kind != "mock") or data.pad_to_multiple is not None or config.parallel.cp > 1
    balanced = config.model.num_experts > 0 and (config.moe.aux_loss_coeff > 0 or config.model.router_bias)
    if not (config.megatron.overlap_expert_parallel and padded and balanced):
        return []
    return [
        "megatron.overlap_expert_parallel hands routers no mask, so padding would count in the balance of experts: set it to false, or "
        "data.pad: false"
    ]


def dense_problems(config: TrainerConfig, backend_settings: Mapping[str, bool]) -> list[str]:
    """Settings of experts that a dense model would leave unread: those of both backends, and a backend's own."""
    if config.model.num_experts:
        return []
    idle = {**backend_settings, "moe.experts": config.moe.experts != "auto", "moe.router_dtype": config.moe.router_dtype != "fp32"}
    idle["moe.aux_loss_coeff"] = config.moe.aux_loss_coeff > 0
    return [f"{name} is about experts, and the model is dense: leave it out" for name in broken(idle)]


def switch_problems(config: TrainerConfig) -> list[str]:
    """Switches that do not go together, or that have nothing to act on."""
    problems = _precision_problems(config) + _optimizer_problems(config) + _memory_problems(config) + _graph_problems(config)
    return problems + _padding_problems(config) + dense_problems(config, {"moe.capacity_factor": config.moe.capacity_factor is not None})


def _precision_problems(config: TrainerConfig) -> list[str]:
    """Source of what 8-bit weights ask of the optimizer: Megatron-LM, `megatron/training/arguments.py`."""
    fp8, mg = config.precision.fp8, config.megatron
    rules = {
        "precision.fp8 'rowwise' belongs to the torch backend; here there are tensorwise, delayed, blockwise, mxfp8 and nvfp4": (
            fp8 == "rowwise"
        ),
        f"precision.fp8 {fp8} multiplies into 16-bit results: set train.dtype: bf16": fp8 != "none" and config.train.dtype != "bf16",
        "precision.fp8_modules: a recipe of this backend covers projections and experts alike; leave it at [linear, experts]": (
            fp8 != "none" and set(config.precision.fp8_modules) != {"linear", "experts"}
        ),
        "megatron.fp8_param belongs to a recipe: set precision.fp8, or leave it false": fp8 == "none" and mg.fp8_param,
        "megatron.fp8_param has no 4-bit counterpart: set it to false": fp8 == "nvfp4" and mg.fp8_param,
        f"megatron.fp8_param needs sharded optimizers, found {mg.data_parallel}: set distributed_optimizer, or it to false": (
            mg.fp8_param and mg.data_parallel in ("ddp", "fsdp2")
        ),
        "megatron.fp8_param excludes a precision-aware optimizer on the host: set precision_aware_optimizer: false": (
            mg.fp8_param and mg.precision_aware_optimizer and fp8 != "delayed" and _offloads(config)
        ),
        **narrow_attention(config),
    }
    return broken(rules) + (_cutlass_problems(config) if mg.grouped_gemm == "cutlass" else [])


def narrow_attention(config: TrainerConfig) -> dict[str, bool]:
    """The rule for kernels of attention in 16 bits, of both backends."""
    kernel = config.train.attention
    return {
        f"train.attention '{kernel}' needs 16-bit numbers: set train.dtype: bf16": (
            kernel in ("flash", "cudnn") and config.train.dtype == "fp32"
        )
    }


def _cutlass_problems(config: TrainerConfig) -> list[str]:
    """Where Transformer Engine would go back to a product for each expert and say nothing.

    Source: Transformer Engine, `common/gemm/cublaslt_gemm.cu` (nvte_multi_tensor_gemm).
    """
    key, model = "megatron.grouped_gemm cutlass", config.model
    if not model.num_experts:
        return [f"{key} multiplies experts, and this model is dense: leave it at cublas"]
    ffn = model.expert_ffn_size // (config.parallel.etp or config.parallel.tp)
    rules = {
        f"{key} multiplies 16-bit numbers: set train.dtype: bf16 and precision.fp8: none, or leave it at cublas": (
            config.precision.fp8 != "none" or config.train.dtype != "bf16"
        ),
        f"{key} is for grouped experts: set moe.experts: grouped, or leave it at cublas": config.moe.experts == "loop",
    }
    for name, size in (("model.hidden_size", model.hidden_size), ("a rank's share of model.expert_ffn_size", ffn)):
        rules[f"{key} needs {name} in a multiple of {_CUTLASS_K}, found {size}: leave it at cublas"] = size % _CUTLASS_K > 0
    return broken(rules)


def _optimizer_problems(config: TrainerConfig) -> list[str]:
    """Precisions, shards and offloading of the optimizer that megatron-core does not combine."""
    mg, narrow_moments, narrow_weights = config.megatron, config.optimizer.moments_dtype == "bf16", config.train.dtype == "bf16"
    default = MegatronConfig.model_fields["sharding_strategy"].default
    rules = {
        "optimizer.moments_dtype bf16 needs the precision-aware optimizer: set megatron.precision_aware_optimizer: true": (
            narrow_moments and not mg.precision_aware_optimizer
        ),
        **still_moments(config),
        "megatron.precision_aware_optimizer keeps what 16-bit weights lack: set train.dtype: bf16": (
            mg.precision_aware_optimizer and not narrow_weights
        ),
        "megatron.grad_reduce_dtype bf16 needs 16-bit weights: set train.dtype: bf16": (
            mg.grad_reduce_dtype == "bf16" and not narrow_weights
        ),
        "optimizer.moments_dtype bf16: megatron-core keeps float32 moments in an optimizer on the host; set it to fp32": (
            _offloads(config) and narrow_moments
        ),
        f"the optimizer is offloaded from the distributed optimizer, found {mg.data_parallel}; set megatron.data_parallel": (
            _offloads(config) and mg.data_parallel != "distributed_optimizer"
        ),
        f"megatron.sharding_strategy belongs to megatron_fsdp, found {mg.data_parallel}; leave it out": (
            mg.sharding_strategy != default and mg.data_parallel != "megatron_fsdp"
        ),
        "Megatron-FSDP trains 16-bit weights: set train.dtype: bf16": mg.data_parallel == "megatron_fsdp" and not narrow_weights,
    }
    return broken(rules)


def still_moments(config: TrainerConfig) -> dict[str, bool]:
    """The rule for second moments of 16 bits, of both backends."""
    beta = config.optimizer.betas[1]
    return {
        f"optimizer.moments_dtype bf16 with a second beta of {beta}: a step moves the second moment by less than "
        "half a unit of its last place, so it would stand still; keep it at 0.996 or below, or set moments_dtype: fp32": (
            config.optimizer.moments_dtype == "bf16" and beta > 1 - 2**-8
        )
    }


def _offloads(config: TrainerConfig) -> bool:
    """Whether some of the optimizer is on the host."""
    return config.offload.optimizer or config.megatron.optimizer_offload_fraction > 0


def _memory_problems(config: TrainerConfig) -> list[str]:
    """Recompute and offloading of activations that megatron-core does not combine, or that name nothing."""
    train, mg, mtp, full = config.train, config.megatron, config.model.mtp_layers, config.train.recompute == "full"
    rules = {
        **named_modules(config),
        "megatron.recompute_layers and recompute_method shape full recompute: set train.recompute: full, or leave them out": (
            not full and (mg.recompute_layers is not None or mg.recompute_method != "uniform")
        ),
        f"megatron.recompute_layers {mg.recompute_layers} with model.mtp_layers {mtp}: megatron-core makes depths "
        "of multi-token prediction again one by one; leave megatron.recompute_layers out": (
            full and mg.recompute_method == "uniform" and mg.recompute_layers not in (None, 1) and mtp
        ),
        "train.recompute full with model.mtp_layers: megatron-core cannot make depths of multi-token prediction again where documents "
        "are packed; set train.recompute: selective, or data.pack: false and data.pad: true": (
            full and mtp and (config.data.pack or not config.data.pad)
        ),
        "train.recompute_modules 'vision': the model has no vision tower": (
            "vision" in train.recompute_modules and config.model.vision is None
        ),
        "megatron.offload_modules fused_group_mlp is of an operator fuser that this trainer does not use; name expert_fc1 and moe_act": (
            "fused_group_mlp" in mg.offload_modules
        ),
    }
    return broken(rules)


def named_modules(config: TrainerConfig) -> dict[str, bool]:
    """The rules for selective recompute and the modules that it names, of both backends."""
    mode, names = config.train.recompute, config.train.recompute_modules
    return {
        "train.recompute selective names no modules: set train.recompute_modules, for example [layernorm, moe_act]": (
            mode == "selective" and not names
        ),
        f"train.recompute_modules needs train.recompute: selective; it is {mode}": mode != "selective" and bool(names),
    }


def _graph_problems(config: TrainerConfig) -> list[str]:
    """What keeps megatron-core from capturing CUDA graphs, or makes captured ones wrong."""
    names, impl, sharding = config.train.cuda_graphs, config.megatron.cuda_graph_impl, config.megatron.data_parallel
    experts, capacity = config.model.num_experts, config.moe.capacity_factor
    captured = names or impl == "full_iteration"
    most = experts / max(1, config.model.top_k)
    rules = {
        f"megatron.cuda_graph_impl {impl} captures the parts that train.cuda_graphs names, and it names none": (
            impl in ("transformer_engine", "local") and not names
        ),
        f"train.cuda_graphs are captured after {GRAPH_WARMUP} steps: set train.warmup_steps to at least {GRAPH_WARMUP + 1}": (
            (names or impl != "none") and config.train.warmup_steps <= GRAPH_WARMUP
        ),
        "megatron.cuda_graph_impl local captures whole layers, and in those with experts the host waits for the router and sizes "
        "follow it: set it to transformer_engine": impl == "local" and experts,
        "train.cuda_graphs: megatron-core captures parts with 16-bit inputs: set train.dtype: bf16": (
            names and impl in ("none", "transformer_engine") and config.train.dtype != "bf16"
        ),
        f"train.cuda_graphs: parameters must stay where a graph saw them, and {sharding} gathers them anew: "
        "set megatron.data_parallel: distributed_optimizer": captured and sharding in ("megatron_fsdp", "fsdp2"),
        "train.cuda_graphs: shapes must not change from batch to batch: set data.pad: true": captured and not config.data.pad,
        "train.cuda_graphs: places of documents inside a row change from batch to batch: set data.pack: false": (
            captured and config.data.pack
        ),
        "train.cuda_graphs moe_preprocess: the host waits there for the numbers of tokens that moe.capacity_factor leaves; "
        "leave out moe_preprocess or moe.capacity_factor": (
            "moe_preprocess" in names and capacity and not pads_experts(config) and config.moe.dispatcher == "alltoall"
        ),
        f"moe.capacity_factor {capacity or 0:g} makes room for more tokens than there are, and what no token fills is not "
        f"cleared, so gradients become NaN: set it to at most num_experts / top_k = {most:g}": (
            pads_experts(config) and (capacity or 0) > most
        ),
        "megatron.cuda_graph_impl full_iteration with experts needs shapes that do not depend on routing: set moe.capacity_factor": (
            impl == "full_iteration" and experts and capacity is None
        ),
    }
    return broken(rules)


def package_problems(config: TrainerConfig) -> list[str]:
    """Packages that this configuration needs and that are not installed, in one line each."""
    mg, dispatcher, needs = config.megatron, config.moe.dispatcher, _needs_transformer_engine(config)
    local, engine, settings = mg.kernels == "local", installed("transformer_engine"), ", ".join(needs)
    flash = installed("flash_attn") or installed("flash_attn_interface")
    rules = {
        "backend megatron needs megatron-core, which is not installed; run pip install '.[megatron]' in a clone of Playbook": (
            not installed("megatron.core")
        ),
        f"{settings}: of Transformer Engine, and megatron.kernels is local; set it to auto": needs and local,
        f"{settings}: of Transformer Engine, which is not installed; run pip install '.[gpu]' in a clone of Playbook": (
            needs and not local and not engine
        ),
        f"moe.dispatcher '{dispatcher}' needs the package deep_ep, which is not installed; set moe.dispatcher: alltoall": (
            dispatcher in ("deepep", "hybridep") and config.model.num_experts and not installed("deep_ep")
        ),
        "train.attention 'flash' needs the package flash-attn, which is not installed; set train.attention: cudnn or auto": (
            config.train.attention == "flash" and not local and engine and not flash
        ),
        "megatron.data_parallel megatron_fsdp needs the package einops, which is not installed": (
            mg.data_parallel == "megatron_fsdp" and not installed("einops")
        ),
    }
    return broken(rules)


def _needs_transformer_engine(config: TrainerConfig) -> list[str]:
    """Settings that only Transformer Engine serves."""
    mg, train = config.megatron, config.train
    needs = {
        "megatron.kernels transformer_engine": mg.kernels == "transformer_engine",
        f"parallel.cp {config.parallel.cp}": config.parallel.cp > 1,
        f"precision.fp8 {config.precision.fp8}": config.precision.fp8 != "none",
        "train.cuda_graphs": bool(train.cuda_graphs) and mg.cuda_graph_impl != "local",
        "moe.experts grouped": config.moe.experts == "grouped",
        "megatron.tp_comm_overlap": mg.tp_comm_overlap,
        "megatron.grouped_gemm cutlass": mg.grouped_gemm == "cutlass",
        "megatron.offload_modules": bool(mg.offload_modules),
        "megatron.precision_aware_optimizer": mg.precision_aware_optimizer,
        "offload.activations": config.offload.activations,
        "moe.dispatcher " + config.moe.dispatcher: config.moe.dispatcher in ("deepep", "hybridep") and config.model.num_experts > 0,
        "train.recompute_modules moe_act": "moe_act" in train.recompute_modules,
    }
    return broken(needs)


def installed(module: str) -> bool:
    """Whether a module is here, asked without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
