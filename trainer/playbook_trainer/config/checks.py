"""Refuses configurations before any process starts: layouts that cannot be, and features that the backend lacks."""

from __future__ import annotations

from playbook.errors import ConfigError
from playbook.planner.parameters import total
from playbook_trainer.config import automatic
from playbook_trainer.config import megatron_checks as megatron
from playbook_trainer.config.sections import FREEZABLE, MegatronConfig, broken, shape_of
from playbook_trainer.config.tree import TrainerConfig, dump, flatten


def check(config: TrainerConfig, world: int, *, check_packages: bool = True) -> None:
    """Refuse what cannot run on `world` ranks. `check_packages`: also where a package is missing on this machine.

    Raises:
        ConfigError: every rule that is broken, one per line.
    """
    problems = layout_problems(config, world) + feature_problems(config) + switch_problems(config, world)
    if config.backend == "megatron" and check_packages:
        problems += megatron.package_problems(config)
    if problems:
        listed = f" {problems[0]}" if len(problems) == 1 else "".join(f"\n  - {p}" for p in problems)
        raise ConfigError(f"this configuration cannot run on {world} rank{'s' if world > 1 else ''}:{listed}")


def layout_problems(config: TrainerConfig, world: int) -> list[str]:
    """Violations of the layout arithmetic on `world` ranks, a line for each."""
    if config.backend == "megatron":
        return megatron.layout_problems(config, world)
    model, par, problems = config.model, config.parallel, megatron.arithmetic_problems(config, world, None)
    if model.num_kv_heads % par.tp:
        problems.append(f"{model.num_kv_heads} key-value heads do not divide over tp {par.tp}; this backend does not replicate them")
    problems += megatron.vocabulary_problems(config)
    return problems + _replica_problems(config, world) + _token_problems(config) + _context_problems(config)


def _replica_problems(config: TrainerConfig, world: int) -> list[str]:
    """Copies of the model, of which HSDP shards each, are made of whole data-parallel ranks."""
    par = config.parallel
    dp, over = divmod(world, par.tp * par.pp * par.cp)
    if par.dp_replicate == 1 or over:
        return []
    rules = {
        f"dp_replicate {par.dp_replicate} with fsdp: false, which makes every rank a copy; set parallel.fsdp: true or dp_replicate to 1": (
            not par.fsdp
        ),
        f"dp {dp} does not divide into {par.dp_replicate} copies; set parallel.dp_replicate to a divisor of {dp}": dp % par.dp_replicate,
    }
    return broken(rules)[:1]


def _token_problems(config: TrainerConfig) -> list[str]:
    """Where ranks share out one stream of tokens, or gather several, rows have one length and divide."""
    par, train = config.parallel, config.train
    etp, moe, allgather = par.etp or par.tp, config.model.num_experts > 0, config.moe.dispatcher == "allgather"
    unlike, differs = f"etp {etp} beside tp {par.tp}", moe and etp != par.tp
    cut = broken({"sequence parallelism": par.tp > 1 and par.sequence_parallel, unlike: par.tp > 1 and differs})
    alike = cut + broken({unlike: etp > 1 and differs, "moe.dispatcher allgather": moe and par.ep > 1 and allgather})
    tokens, problems = train.micro_batch_size * config.data.seq_len // par.cp, []
    if cut and tokens % par.tp:
        problems.append(f"{cut[0]} cuts the {tokens} tokens of a rank over tp {par.tp}, which does not divide them; change data.seq_len")
    if alike and not config.data.pad:
        problems.append(f"{alike[0]} needs rows of one length: set data.pad: true")
    return problems


def _context_problems(config: TrainerConfig) -> list[str]:
    """Ulysses shares out heads, so they must divide; with fewer key-value heads than ranks each goes to several."""
    par = config.parallel
    if par.cp == 1 or par.cp_comm != "ulysses":
        return []
    heads, kv_heads = config.model.num_heads // par.tp, config.model.num_kv_heads // par.tp
    rules = {
        f"cp_comm ulysses shares out {heads} attention heads, which do not divide over cp {par.cp}; set parallel.cp_comm: ring": (
            heads % par.cp
        ),
        f"cp_comm ulysses with {kv_heads} key-value heads and cp {par.cp}: one must be a multiple of the other; set parallel.cp_comm: "
        "ring": kv_heads and kv_heads % par.cp and par.cp % kv_heads,
    }
    return broken(rules)


_MOST_PARAMETERS = 10**14
"""A hundred times the largest model that anybody has trained; a typing error, and no machine holds it."""
_MOST_TOKENS = 2**31
"""Places in a micro-batch are counted in 32 bits."""


def _size_problems(config: TrainerConfig) -> list[str]:
    """Sizes, each possible by itself, that together no machine could serve."""
    parameters, tokens = total(shape_of(config.model)), config.train.micro_batch_size * config.data.seq_len
    rules = {
        f"the model has {parameters:.1e} parameters; expected at most {_MOST_PARAMETERS:.0e}: lower its sizes": (
            parameters > _MOST_PARAMETERS
        ),
        f"a micro-batch has {tokens} tokens; expected less than {_MOST_TOKENS}: lower data.seq_len or train.micro_batch_size": (
            tokens >= _MOST_TOKENS
        ),
    }
    return broken(rules)


def feature_problems(config: TrainerConfig) -> list[str]:
    """Features of the configuration that its backend does not support."""
    train = config.train
    rules = {
        "checkpoint.export_dtype source is the precision of init.weights, and there are none: set fp32, bf16 or auto": (
            config.checkpoint.export_dtype == "source" and config.init.weights is None
        ),
        f"train.warmup_steps {train.warmup_steps} leaves none of {train.steps} steps to time; raise train.steps": (
            train.epochs is None and train.warmup_steps >= train.steps and not config.profile.traced
        ),
    }
    problems = _data_problems(config) + _size_problems(config) + broken(rules)
    problems += (warm_up_problems(config) if train.epochs is None else []) + _evaluation_problems(config)
    return problems + (megatron.feature_problems(config) if config.backend == "megatron" else _torch_problems(config))


def warm_up_problems(config: TrainerConfig) -> list[str]:
    """A learning rate that would never be reached."""
    warm_up, steps = config.optimizer.warmup_steps, config.train.steps
    if warm_up <= steps:
        return []
    return [f"optimizer.warmup_steps {warm_up} is longer than the {steps} steps of the run, which would never reach optimizer.lr: lower it"]


def _evaluation_problems(config: TrainerConfig) -> list[str]:
    """Epochs, evaluation data and best checkpoints where there is nothing to count, to evaluate or to keep."""
    data, evals = config.data, config.eval
    endless = data.kind == "mock" or data.source == "generated"
    rules = {
        f"train.epochs: {'mock' if data.kind == 'mock' else 'generated'} data is made up as it is read: set train.steps": (
            endless and config.train.epochs is not None
        ),
        "eval.path: the training data is made up as it is read, so there is no such file: leave it out": (
            endless and evals.path is not None
        ),
        "eval.path is read by evaluations, and there are none: set eval.every": evals.path is not None and not evals.every,
        "checkpoint.keep_best keeps the checkpoint of the lowest evaluation loss: set eval.every and checkpoint.dir": (
            config.checkpoint.keep_best and not (evals.every and config.checkpoint.dir)
        ),
    }
    return broken(rules)


def _torch_problems(config: TrainerConfig) -> list[str]:
    """Features of the configuration that the torch backend does not support."""
    par, dispatcher, vision = config.parallel, config.moe.dispatcher, config.model.vision
    layers_per_chunk, deepstack = config.model.num_layers // (par.pp * par.vpp), len(vision.deepstack_layers) if vision else 0
    rules = {
        "the section megatron belongs to the megatron backend: leave it out, or set backend: megatron": (
            config.megatron != MegatronConfig()
        ),
        "parallel.pipeline_layout belongs to the megatron backend; here all chunks have as many layers": par.pipeline_layout is not None,
        "moe.capacity_factor belongs to the megatron backend; here no token is dropped": config.moe.capacity_factor is not None,
        f"moe.dispatcher '{dispatcher}' belongs to the megatron backend; the torch backend has allgather, alltoall and dedup": (
            dispatcher not in ("allgather", "alltoall", "dedup")
        ),
        f"DeepStack features enter the first {deepstack} decoder layers, which must lie in the first chunk of the pipeline: "
        f"pp {par.pp} x vpp {par.vpp} leaves {layers_per_chunk} layers in a chunk; lower parallel.pp or vpp": layers_per_chunk < deepstack,
        "pp needs rows of one length: set data.pad: true": par.pp > 1 and not config.data.pad,
    }
    return broken(rules) + _model_problems(config)


def _model_problems(config: TrainerConfig) -> list[str]:
    """Parts of a model that the torch backend does not have."""
    model = config.model
    rules = {
        f"attention: {model.attention}": model.attention == "mla",
        "qk_norm: false": not model.qk_norm,
        f"first_dense_layers: {model.first_dense_layers}": model.first_dense_layers > 0,
        f"shared_expert_ffn_size: {model.shared_expert_ffn_size}": model.shared_expert_ffn_size > 0,
        f"router_score: {model.router_score}": model.router_score != "softmax",
        f"router_groups: {model.router_groups}": model.router_groups > 0,
        f"router_scale: {model.router_scale:g}": model.router_scale != 1.0,
        "router_bias: true": model.router_bias,
        f"mtp_layers: {model.mtp_layers}": model.mtp_layers > 0,
        "yarn": model.yarn is not None,
    }
    return [f"model.{setting} belongs to the megatron backend, which has DeepSeek-V3's parts" for setting in broken(rules)]


def switch_problems(config: TrainerConfig, world: int) -> list[str]:
    """Settings of memory and speed that exclude each other on `world` ranks or have nothing to act on, a line for each."""
    if config.backend == "megatron":
        return _freeze_problems(config) + megatron.switch_problems(config)
    problems = _recompute_problems(config) + _freeze_problems(config) + _fp8_problems(config) + _graph_problems(config)
    problems += broken(megatron.still_moments(config)) + automatic.problems(flatten(dump(config)) | {automatic.RANKS: world})
    problems += _router_problems(config) + _idle_problems(config)
    rules = {
        **megatron.narrow_attention(config),
        "offload.optimizer: two stages add their gradients of the tied embedding on the GPU, where they no longer are; set it to false": (
            config.offload.optimizer and config.parallel.pp > 1 and config.model.tie_word_embeddings
        ),
    }
    return problems + broken(rules)


def _idle_problems(config: TrainerConfig) -> list[str]:
    """Settings that would have no effect in this run, a line for each."""
    train, moe, par, model = config.train, config.moe, config.parallel, config.model
    own_settings = {"moe.bias_update_rate": moe.bias_update_rate > 0, "moe.load_every": moe.load_every > 0}
    rules = {
        "moe.router_dtype bf16 leaves the router in train.dtype, which is fp32: set train.dtype: bf16, or router_dtype: fp32": (
            model.num_experts and moe.router_dtype == "bf16" and train.dtype == "fp32"
        ),
        f"train.attention 'cudnn' does not serve cp_comm {par.cp_comm}, whose kernel is flash: set it to auto": (
            train.attention == "cudnn" and par.cp > 1 and par.cp_comm != "ulysses" and model.vision is None
        ),
    }
    return megatron.dense_problems(config, own_settings) + broken(rules)


def notes(config: TrainerConfig) -> list[str]:
    """Settings that have no effect in this run, such as those of a parallel degree of 1; a line for each."""
    name = config.moe.dispatcher
    idle = config.backend == "torch" and config.model.num_experts > 0 and config.parallel.ep == 1 and name != "alltoall"
    return [f"moe.dispatcher {name} has no effect at parallel.ep 1: every rank has all experts, and no dispatcher runs"] if idle else []


def _router_problems(config: TrainerConfig) -> list[str]:
    """What evens out the experts' load beside graphs and exports."""
    moe = config.moe
    rules = {
        "train.cuda_graphs moe_router hides the scores that moe.aux_loss_coeff, bias_update_rate and load_every read: leave it out": (
            "moe_router" in config.train.cuda_graphs and (moe.aux_loss_coeff or moe.bias_update_rate or moe.load_every)
        ),
        "moe.bias_update_rate: Hugging Face's model has no such bias, so exported weights would route otherwise: "
        "set moe.aux_loss_coeff instead, or leave out checkpoint.export": moe.bias_update_rate and config.checkpoint.export,
    }
    return broken(rules)


def _recompute_problems(config: TrainerConfig) -> list[str]:
    """Modules of selective recompute that are missing, have no counterpart in this model, or contain one another."""
    names, model, moe = config.train.recompute_modules, config.model, config.model.num_experts > 0
    absent = {
        "moe": None if moe else "the model is dense: its MLP is 'mlp'",
        "moe_act": None if moe else "the model is dense: it has no experts whose activation could be made again; its MLP is 'mlp'",
        "mlp": None if model.dense_layers else "every layer has experts instead of a dense MLP: they are 'moe'",
        "shared_experts": None if model.shared_expert_ffn_size else "the model has no shared experts",
        "mla_up_proj": None if model.attention == "mla" else "the model has grouped-query attention, not multi-latent attention",
        "vision": None if model.vision is not None else "the model has no vision tower",
    }
    problems = broken(megatron.named_modules(config))
    problems += [f"train.recompute_modules '{n}': {absent[n]}" for n in names if absent.get(n)]
    if {"moe", "moe_act"} <= set(names):
        problems.append("train.recompute_modules 'moe' runs the experts' activation again already: leave out 'moe_act'")
    return problems


def _freeze_problems(config: TrainerConfig) -> list[str]:
    """Parts that cannot be frozen, because the model lacks them or nothing would be left to train."""
    frozen = config.train.freeze
    if not frozen:
        return []
    kind = config.data.kind
    rules = {
        f"train.freeze {frozen} names parts of a vision-language model, and this model has no vision tower": config.model.vision is None,
        "train.freeze names every part, so nothing is left to train: take one out": set(frozen) == set(FREEZABLE),
        f"train.freeze language_model with data.kind {kind}, which has no images, leaves nothing to train: set data.kind: vqa": (
            "language_model" in frozen and kind not in ("vqa", "chat")
        ),
        "train.recompute_modules 'vision': the tower is frozen, so it keeps nothing that could be made again: leave it out": (
            "vision" in frozen and "vision" in config.train.recompute_modules
        ),
        "train.freeze language_model leaves nothing to train on the pipeline stages after the first: set parallel.pp: 1": (
            "language_model" in frozen and config.parallel.pp > 1
        ),
    }
    return broken(rules)[:1]


def _graph_problems(config: TrainerConfig) -> list[str]:
    """What keeps the parts in `train.cuda_graphs` from being captured on the torch backend."""
    train, par, names = config.train, config.parallel, config.train.cuda_graphs
    if not names:
        return []
    rules = {
        "a GPU is needed, and train.device is cpu": train.device == "cpu",
        "shapes must not change from batch to batch: set data.pad: true": not config.data.pad,
        "recompute of whole layers would replay a graph whose memory is still wanted: "
        "set train.recompute: selective or none": train.recompute == "full",
        "recompute of 'moe' would run the router again: leave it out, or leave out moe_router": "moe" in train.recompute_modules
        and "moe_router" in names,
        "graphs read the 16-bit weights that FSDP hands out: set train.dtype: bf16": train.dtype == "fp32",
        "collectives are not captured, and passes must alternate: set parallel.tp, pp and cp to 1": max(par.tp, par.pp, par.cp) > 1,
        "what a graph keeps lives in its own memory, so nothing could leave: set offload.activations: false": config.offload.activations,
        "train.compile.decoder fuses the same operators: choose one of them": train.compile.decoder is True,
        "8-bit casts are compiled: leave out attn, or take linear out of precision.fp8_modules": config.precision.fp8 != "none"
        and "linear" in config.precision.fp8_modules
        and "attn" in names,
        "the model has no router: leave out moe_router": "moe_router" in names and not config.model.num_experts,
        "moe_preprocess sorts what moe_router has chosen: name both": "moe_preprocess" in names and "moe_router" not in names,
        "moe_preprocess is the sort of the dispatcher alltoall: set moe.dispatcher: alltoall": "moe_preprocess" in names
        and par.ep > 1
        and config.moe.dispatcher != "alltoall",
        "moe_preprocess sorts a rank's own tokens: set parallel.etp: 1": "moe_preprocess" in names and (par.etp or par.tp) > 1,
        "experts get another number of rows in every batch: leave out moe": "moe" in names,
        "mlp is three kernels, too few to be worth a graph's memory: leave it out": "mlp" in names,
    }
    return [f"train.cuda_graphs {names}: {rule}" for rule in broken(rules)]


_FP8_ELSEWHERE = {
    "tensorwise": "belongs to the megatron backend; here there are rowwise and blockwise, which round less",
    "delayed": "belongs to the megatron backend; here scales come from the values themselves, never from earlier steps",
    "mxfp8": "needs units for blocks of 32, which GPUs have from Blackwell on, and belongs to the megatron backend",
    "nvfp4": "needs 4-bit units, which GPUs have from Blackwell on, and belongs to the megatron backend",
}


def _fp8_problems(config: TrainerConfig) -> list[str]:
    """Recipes and modules of `precision.fp8` that the torch backend cannot multiply, and widths on a rank that its scales do not divide."""
    precision, model, par = config.precision, config.model, config.parallel
    if precision.fp8 == "none":
        return []
    if precision.fp8 in _FP8_ELSEWHERE:
        return [f"precision.fp8 '{precision.fp8}' {_FP8_ELSEWHERE[precision.fp8]}; set rowwise, blockwise or none"]
    names, moe = precision.fp8_modules, model.num_experts > 0
    experts = "experts" in names and moe
    widths: dict[str, int] = {"model.hidden_size": model.hidden_size}
    if "linear" in names:
        widths["query columns"] = model.num_heads * model.head_dim // par.tp
        widths["key-value columns"] = model.num_kv_heads * model.head_dim // par.tp
        if not moe:
            widths["model.ffn_size"] = model.ffn_size // par.tp
    if experts:
        widths["model.expert_ffn_size"] = model.expert_ffn_size // (par.etp or par.tp)
    unit = 16 if precision.fp8 == "rowwise" else 128
    odd = ", ".join(f"{k} {v}" for k, v in widths.items() if v % unit)
    rules = {
        f"precision.fp8_modules {names} leaves nothing to do in 8 bits: name linear{' or experts' if moe else ''}": (
            not names or (names == ["experts"] and not moe)
        ),
        "precision.fp8 blockwise does not serve experts: torch has no grouped product with scales per block; "
        "set precision.fp8_modules: [linear], or precision.fp8: rowwise": precision.fp8 == "blockwise" and experts,
        "precision.fp8 multiplies all experts in one grouped product: set moe.experts: auto": experts and config.moe.experts == "loop",
        f"precision.fp8 {precision.fp8} needs widths in multiples of {unit} on each rank, and there is {odd}; leave it at none": odd,
    }
    return broken(rules)


def _data_problems(config: TrainerConfig) -> list[str]:
    """Data options that contradict each other."""
    data, weights, multiple = config.data, config.data.generated.images_per_sample, config.data.pad_to_multiple
    rules = {
        "data.pad already fills every row to seq_len: set data.pad: false for data.pad_to_multiple to have an effect": (
            multiple and data.pad
        ),
        f"data.seq_len {data.seq_len} is no multiple of data.pad_to_multiple {multiple}, so full rows would not fit": (
            multiple and data.seq_len % multiple
        ),
        "data.kind mock has no source of its own: leave data.source out, or set data.kind to text or vqa": (
            data.kind == "mock" and data.source == "generated"
        ),
        f"data.generated.images_per_sample is {weights}; expected weights of one, two, ... images, such as [0.8, 0.2]": (
            not weights or min(weights) < 0 or sum(weights) <= 0
        ),
    }
    return broken(rules)
