"""A configuration, or a plan with the launcher's line, as a Python file for torchtitan 0.3.0.

Source: torchtitan 0.3.0, `torchtitan/config/configs.py`, `torchtitan/trainer.py`, and the `Config` classes of its components; of plans,
`torchtitan/distributed/{parallel_dims,pipeline_parallel,fsdp}.py`, `torchtitan/models/common/{decoder,moe_sharding}.py`,
`torchtitan/models/deepseek_v3/mtp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from playbook.planner import pipeline
from playbook.planner.models import fields_of, from_preset
from playbook.planner.plan import Plan
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.export import launch, torchtitan_file
from playbook_trainer.export.launch import Launchable
from playbook_trainer.export.sheet import MEGATRON, READING, Setting, Sheet
from playbook_trainer.export.torchtitan_file import DISPATCHERS, FUNCTION, RECOMPUTE, RELEASE, Code, document, stages

_COMPILED = {"decoder": "model", "loss": "loss"}

_WHY = {
    "train.epochs": "it counts steps: set train.steps to the number that this trainer says at its start",
    "eval.path": "its data set has a part for evaluation",
    "checkpoint.keep_best": "it keeps checkpoints by their age",
    "train.freeze": "it freezes no parts of a model",
    "data.pack": "documents always follow each other in a row, without a mask between them",
    "data.pad": "rows have one length",
    "data.pad_to_multiple": "rows have one length",
    "parallel.pipeline_layout": "write its chunks into parallelism.module_fqns_per_model_part",
    "moe.capacity_factor": "no token is dropped",
    "moe.aux_loss_coeff": "it balances by a bias: load_balance_coeff of the layers' builder",
    "moe.bias_update_rate": "set load_balance_coeff of the layers' builder",
    "moe.load_every": "it does not write down the experts' load",
    "moe.fused_permutation": "it permutes in its own way",
    "moe.fused_router": "its router is softmax and topk; compile the model instead",
    "moe.router_dtype": "scores are computed in float32",
    "train.recompute_modules": "its selective mode chooses by operator, not by module",
    "train.compile.vision": "it ships no vision tower of this model",
    "train.compile.dynamic": "shapes do not change there",
    "train.attention": "its model is built for FlexAttention",
    "train.cuda_graphs": "it captures no parts of a layer",
    "train.fused_loss": "compile the loss instead",
    "train.fused_activation": "compile the model instead",
    "train.fused_norms": "compile the model instead",
    "optimizer.master_weights": "its shards are float32 weights, which FSDP casts",
    "parallel.reduce_dtype": "gradients are summed in float32",
    "parallel.comm_sms": "its products take all multiprocessors",
    "offload.activations": "activations stay on the GPU",
    "precision.fp8": "it has rowwise and MXFP8",
    "precision.fp8_modules": "name modules in the converter's filter_fqns or fqns",
    "checkpoint.resume": "it always goes on from the newest checkpoint in its folder",
    "tracker.name": "set WANDB_RUN_NAME in the environment",
    "tracker.offline": "set WANDB_MODE=offline in the environment",
}
"""Why keys cannot be said there, at another value than the neutral one."""
_CONVERTERS = {"rowwise": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}
"""By recipe, what replaces linear layers."""


def sheet_of(config: TrainerConfig) -> Sheet:
    """Every key of the configuration, said in torchtitan's fields where it has one."""
    sheet = Sheet(config, "torchtitan")
    for part in (_model, _data, _parallel, _experts, _training, _switches, _files, _elsewhere):
        part(sheet)
    sheet.settle(_WHY)
    return sheet


def _model(sheet: Sheet) -> None:
    """The model as Python source, with its loss; refused where torchtitan has no such decoder."""
    config = sheet.config
    fields = config.model.model_dump()
    shape = from_preset(fields, config.model.name)
    reasons = list(torchtitan_file.lacking(shape, fields))
    if reasons:
        sheet.lack("model.*", f"it has {'; '.join(reasons)}; {torchtitan_file.HAS}")
        return
    sheet.put("model.*", "model", "", Code("\n".join(torchtitan_file.source(shape, fields, config.data.seq_len))))
    sheet.put("", "loss", "", Code(f"{'MTPLoss' if shape.mtp else 'CrossEntropyLoss'}.Config(global_vocab_size={shape.vocab})"))
    sheet.put("", "model_spec", "attn_backend", "flex")
    _fixed(sheet, torchtitan_file.epsilon(shape))
    par = config.parallel
    for key, words in torchtitan_file.limits(shape, par.tp, par.cp, par.pp):
        sheet.lack(f"parallel.{key}", words)


_ROUTER = {
    "norm_topk_prob": True,
    "router_score": "softmax",
    "router_groups": 0,
    "router_group_top_k": 0,
    "router_scale": 1.0,
    "router_bias": False,
}
"""What its Qwen3 decoders do, whose builder has no words for another router."""


def _fixed(sheet: Sheet, epsilon: float) -> None:
    """Keys of a model that its builders do not ask for; its norms have `epsilon`."""
    model = sheet.config.model
    sheet.skip("model.name model.eos_token_id model.pad_token_id", "a name, and marks that its tokenizer knows")
    if model.attention != "mla":
        sheet.skip(
            "model.q_lora_rank model.kv_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim model.v_head_dim", "no latent attention"
        )
        for key, value in _ROUTER.items():
            if model.num_experts:
                sheet.plain(f"model.{key}", value, f"its router has {value}")
            else:
                sheet.skip(f"model.{key}", "the model has no experts")
    else:
        sheet.skip("model.router_bias", "its router of latent attention has a bias wherever experts are balanced by it")
    if model.num_experts and not model.first_dense_layers:
        sheet.skip("model.ffn_size", "no layer is dense")
    sheet.plain("model.rms_norm_eps", epsilon, f"its norms have {epsilon:g}")
    sheet.plain("model.init_std", 0.02, "its builders draw weights in their own way")


def _data(sheet: Sheet) -> None:
    """The data set, the tokenizer and the row length."""
    data = sheet.config.data
    sheet.put("data.seq_len", "training", "seq_len", data.seq_len)
    if data.kind == "mock":
        vocab = sheet.config.model.vocab_size
        sheet.put("data.kind", "dataloader", "", Code(f"RandomTokens.Config(vocab_size={vocab})"))
        sheet.put("data.kind", "tokenizer", "", Code("NoTokenizer.Config()"))
        sheet.skip("data.path data.num_workers data.tokenizer", "random tokens are drawn in place")
        sheet.skip(READING, "it has a reader of its own")
        return
    sheet.put("data.num_workers", "dataloader", "num_workers", data.num_workers)
    if data.path is not None:
        sheet.put("data.path", "dataloader", "dataset_path", data.path)
    else:
        sheet.skip("data.path", "the bundled data is this trainer's own; choose dataloader.dataset")
    say = sheet.skip if data.kind == "text" else sheet.lack
    say("data.kind", "text is what it trains on")
    if data.tokenizer == "byte":
        sheet.lack("data.tokenizer", "give hf_assets_path, a folder with a tokenizer.json")
    else:
        sheet.put("data.tokenizer", "hf_assets_path", "", data.tokenizer.removesuffix("/tokenizer.json"))
    sheet.skip(READING, "it has a reader of its own")


def _parallel(sheet: Sheet) -> None:
    """Degrees and sharding, the pipeline's schedule and its split."""
    par = sheet.config.parallel
    if sheet.config.backend == "megatron" or par.fsdp:
        sheet.table(
            "parallelism",
            ("parallel.dp_replicate", "data_parallel_replicate_degree", par.dp_replicate),
            ("parallel.fsdp", "data_parallel_shard_degree", -1),
            ("parallel.reshard_after_forward", "fsdp_reshard_after_forward", "always" if par.reshard_after_forward else "never"),
        )
    else:
        sheet.lack("parallel.fsdp", "replicas without sharding: set data_parallel_replicate_degree to the number of data-parallel ranks")
        sheet.skip("parallel.dp_replicate parallel.reshard_after_forward", "nothing is sharded")
    sheet.table(
        "parallelism",
        ("parallel.tp", "tensor_parallel_degree", par.tp),
        ("parallel.pp", "pipeline_parallel_degree", par.pp),
        ("parallel.vpp", "pipeline_parallel_schedule", "1F1B" if par.vpp == 1 else "Interleaved1F1B"),
        ("parallel.cp", "context_parallel_degree", par.cp),
        ("parallel.ep", "expert_parallel_degree", par.ep),
    )
    split = par.tp if par.ep == 1 else 1
    if not sheet.config.model.num_experts or (par.etp or par.tp) == split:
        sheet.skip("parallel.etp", "experts are split by tp without EP, and not at all with it")
    else:
        sheet.lack("parallel.etp", f"with tp {par.tp} and ep {par.ep} it splits experts by {split}: set parallel.etp to {split}")
    if par.pp > 1:
        sheet.put("parallel.pp", "parallelism", "pipeline_parallel_microbatch_size", sheet.config.train.micro_batch_size)
    if par.pp > 1 and par.pipeline_layout is None:
        sizes = pipeline.split(sheet.config.model.num_layers, par.pp, par.vpp)
        sheet.put("parallel.pp parallel.vpp", "parallelism", "module_fqns_per_model_part", stages(sizes))
    if par.cp == 1:
        sheet.skip("parallel.cp_comm", "there is no context parallelism")
    else:
        say = sheet.skip if par.cp_comm == "allgather" else sheet.lack
        say("parallel.cp_comm", "keys and values are always gathered")
    sheet.put("parallel.sequence_parallel", "parallelism", "enable_sequence_parallel", par.sequence_parallel)


def _experts(sheet: Sheet) -> None:
    moe = sheet.config.moe
    if not sheet.config.model.num_experts:
        sheet.skip("moe.*", "the model has no experts")
        return
    across = sheet.config.parallel.ep > 1
    if moe.dispatcher in DISPATCHERS and (across or moe.dispatcher == "alltoall"):
        sheet.put("moe.dispatcher", "model_spec", "moe_comm_backend", DISPATCHERS[moe.dispatcher])
    else:
        sheet.lack(
            "moe.dispatcher", f"{moe.dispatcher} with ep {sheet.config.parallel.ep}: it has all-to-all, and with ep > 1 DeepEP and HybridEP"
        )
    sheet.skip("moe.experts moe.apply_probs_on", "experts are one grouped product, weighed in its own way")


def _training(sheet: Sheet) -> None:
    """Batch sizes, steps, precision, the optimizer and its learning rate."""
    config, opt, train = sheet.config, sheet.config.optimizer, sheet.config.train
    # With a pipeline it cuts local_batch_size into micro-batches: as many as there are stages; the rest is accumulated.
    sheet.table(
        "training",
        ("train.micro_batch_size", "local_batch_size", train.micro_batch_size * config.parallel.pp),
        ("train.global_batch_size", "global_batch_size", train.global_batch_size),
        ("train.steps", "steps", train.steps),
        ("optimizer.clip_norm", "max_norm", opt.clip_norm),
        ("train.dtype", "dtype", "float32"),
        ("train.dtype", "mixed_precision_param", "bfloat16" if train.dtype == "bf16" else "float32"),
        ("offload.optimizer", "enable_cpu_offload", config.offload.optimizer),
        ("", "disable_cuda_graphs", True),
    )
    sheet.table(
        "optimizer",
        ("optimizer.lr", "lr", opt.lr),
        ("optimizer.betas", "betas", tuple(opt.betas)),
        ("optimizer.eps", "eps", opt.eps),
        ("optimizer.weight_decay", "weight_decay", opt.weight_decay),
        ("optimizer.moments_dtype", "implementation", "fused_opt_states_bf16" if opt.moments_dtype == "bf16" else "fused"),
    )
    sheet.put("optimizer.warmup_steps", "lr_scheduler", "warmup_steps", opt.warmup_steps)
    if opt.schedule != "constant":
        sheet.table(
            "lr_scheduler",
            ("optimizer.schedule", "decay_type", "cosine" if opt.schedule == "cosine" else "linear"),
            ("optimizer.min_lr_ratio", "min_lr_factor", opt.min_lr_ratio),
        )
        if opt.schedule == "wsd":
            sheet.put("optimizer.decay_ratio", "lr_scheduler", "decay_ratio", opt.decay_ratio)
    else:
        sheet.put("optimizer.schedule", "lr_scheduler", "decay_ratio", 0.0)
        sheet.skip("optimizer.min_lr_ratio", "the rate is constant")
    sheet.table("debug", ("seed", "seed", config.seed), ("train.deterministic", "deterministic", train.deterministic))


def _switches(sheet: Sheet) -> None:
    """Recompute, compiled regions and 8-bit products."""
    config, train = sheet.config, sheet.config.train
    sheet.put("train.recompute", "activation_checkpoint", "", RECOMPUTE[train.recompute])
    regions = [target for region, target in _COMPILED.items() if getattr(train.compile, region)]
    sheet.put("train.compile.decoder train.compile.loss", "compile", "enable", bool(regions))
    if regions:
        sheet.put("train.compile.decoder train.compile.loss", "compile", "components", regions)
    sheet.put("train.compile.backend", "compile", "backend", train.compile.backend)
    sheet.skip("optimizer.fused", "its AdamW is torch's fused one")
    sheet.skip("train.loss_chunk", "logits of a micro-batch exist at once there")
    converter = _CONVERTERS.get(config.precision.fp8)
    if converter and not any(s.section == "model" for s in sheet.settings):
        sheet.lack("precision.fp8", "it converts a model, which it lacks")
    elif converter and "linear" in config.precision.fp8_modules:
        sheet.put("precision.fp8", "model_spec", "converters", Code(f"[{converter}.Config(model_compile_enabled={'model' in regions})]"))


def _files(sheet: Sheet) -> None:
    """Output, checkpoints, first weights, trackers, evaluation, traces and the timeout of collectives."""
    config, checkpoint, tracker = sheet.config, sheet.config.checkpoint, sheet.config.tracker
    sheet.put("output", "dump_folder", "", config.output)
    on = checkpoint.dir is not None
    sheet.put("checkpoint.dir", "checkpoint", "enable", on)
    if on:
        sheet.put("checkpoint.dir", "checkpoint", "folder", checkpoint.dir)
    sheet.table(
        "checkpoint",
        ("checkpoint.every", "interval", checkpoint.every or config.train.steps),
        ("checkpoint.keep", "keep_latest_k", max(2, checkpoint.keep)),
        ("checkpoint.async_save", "async_mode", "async" if checkpoint.async_save else "disabled"),
        ("checkpoint.export", "last_save_in_hf", checkpoint.export is not None),
    )
    if config.init.weights is not None:
        sheet.table("checkpoint", ("init.weights", "initial_load_path", config.init.weights), ("init.weights", "initial_load_in_hf", True))
    else:
        sheet.skip("init.weights", "weights are drawn from the seed")
    sheet.table(
        "metrics",
        ("tracker.tensorboard", "enable_tensorboard", tracker.tensorboard),
        ("tracker.wandb", "enable_wandb", tracker.wandb),
        ("train.log_every", "log_freq", config.train.log_every),
    )
    if tracker.wandb:
        sheet.lack("tracker.project", f"set WANDB_PROJECT={tracker.project} in the environment")
    else:
        sheet.skip("tracker.project tracker.name tracker.offline", "Weights & Biases is not asked for")
    sheet.put("eval.every", "validator", "enable", config.eval.every > 0)
    if config.eval.every:
        sheet.table("validator", ("eval.every", "freq", config.eval.every), ("eval.batches", "steps", config.eval.batches))
    else:
        sheet.skip("eval.batches", "nothing is evaluated")
    sheet.put("profile.kineto", "profiler", "enable_profiling", config.profile.kineto)
    if config.profile.kineto:
        sheet.put("profile.steps", "profiler", "profiler_active", config.profile.steps)
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


def file(sheet: Sheet) -> list[str]:
    """The Python file, line by line."""
    sections: dict[str, Any] = {}
    for s in sheet.settings:
        if s.field:
            sections.setdefault(s.section, {})[s.field] = s.value
        else:
            sections[s.section] = s.value if isinstance(s.value, Code) else Code(repr(s.value))
    model = sections.pop("model", Code(""))
    spec = sections.pop("model_spec", {})
    if model:
        arguments = ", ".join(['"plan"', *(f"{k}={_python(v)}" for k, v in spec.items())])
        sections["model_spec"] = Code(f"family.model_registry({arguments})")
    implementation = sections.get("optimizer", {}).pop("implementation", "fused")
    if implementation != "fused":
        adamw = f"default_adamw({', '.join(f'{k}={v!r}' for k, v in sections['optimizer'].items())})"
        sections["optimizer"] = Code(f'replace({adamw}, implementation="{implementation}")')
    title = f"For torchtitan 0.3.0, as NAME.py: torchrun ... -m torchtitan.train --module NAME --config {FUNCTION}"
    return document(title, model.splitlines(), sections, random=sheet.config.data.kind == "mock").splitlines()


def words(setting: Setting) -> str:
    """One setting as a flag of the command line, or as a piece of Python where only the file says it."""
    value = setting.value
    section, name = setting.section, setting.field
    if section in _CALLS:
        return f"{_CALLS[section]}({name}={_python(value)})"
    if isinstance(value, Code):
        return f"{'.'.join(filter(None, (section, name)))}={' '.join(value.split())}"
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no-'}{name}"
    shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{section}.{name} {shown}" if name else f"--{section} {shown}"


_CALLS: Mapping[str, str] = {"model_spec": "model_registry", "optimizer": "default_adamw"}
"""Sections that only the file says, by what builds them."""


def _python(value: Any) -> str:
    return value if isinstance(value, Code) else repr(value)


_MODULE = "plan_torchtitan"
_EXPRESSED: Mapping[str, tuple[Any, ...]] = {
    "sharding": ("fsdp2", "optimizer", "none"),
    "recompute": ((), ("selective",), ("full",)),
    "dispatcher": ("", "alltoall", "deepep", "hybridep"),
    "cp_comm": ("", "all_gather"),
    "sp": (None, True, False),
}
"""Values of options that it has words for."""
_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Source: torchtitan 0.3.0, `run_train.sh`."""


def launchable(plan: Plan, hardware: str) -> Launchable:
    """The plan for torchtitan 0.3.0 on random tokens.

    Raises:
        ConfigError: torchtitan has no words for the plan or its model.
    """
    fields = fields_of(plan.model)
    launch.require(plan, RELEASE, _EXPRESSED, _lacks(plan, fields))
    even = "; routing is forced to be even, as the plan supposes" if plan.shape.experts and plan.even_rows else ""
    title = f"{launch.plain(plan.model)} on {plan.gpus} {hardware} GPUs, for {RELEASE}{even}."
    model = torchtitan_file.source(plan.shape, fields, plan.seq_len)
    last = plan.gpus // plan.pp * (plan.pp - 1)  # the first rank of the last stage knows the loss
    each = min(plan.gpus, launch.gpus_per_node(hardware))
    nodes = launch.nodes(plan, hardware)
    command = [
        "torchrun", *(("--nnodes", str(nodes)) if nodes > 1 else ()), "--nproc-per-node", str(each),
        "--local-ranks-filter", str(last % each), "--role", "rank", "--tee", "3", "-m", "torchtitan.train", "--module", _MODULE,
        "--config", FUNCTION,
    ]  # fmt: skip
    return Launchable(
        "torchtitan", RELEASE, _ENVIRONMENT, tuple(command),
        {f"{_MODULE}.py": document(title, model, _sections(plan), random=True), **launch.table_of(plan, hardware)},
        ("torch 2.14 or newer; 2.12 does without a pipeline and HybridEP",
         "the time stamps of its lines are the clock: keep them in the log",
         launch.beside(plan, hardware, "tps of its last lines")),
    )  # fmt: skip


def parallelism(plan: Plan) -> dict[str, Any]:
    """Degrees, sharding and the pipeline's split, by field of `ParallelismConfig`."""
    o, replicas = plan.options, plan.options.sharding == "none"
    return {
        "data_parallel_replicate_degree": plan.dp if replicas else 1, "data_parallel_shard_degree": 1 if replicas else plan.dp,
        "fsdp_reshard_after_forward": "never" if o.sharding == "optimizer" else "default", "tensor_parallel_degree": plan.tp,
        "enable_sequence_parallel": o.sp is not False, "context_parallel_degree": plan.cp, "expert_parallel_degree": plan.ep,
        "pipeline_parallel_degree": plan.pp,
        **launch.chosen((plan.pp > 1, {
            "pipeline_parallel_schedule": "1F1B" if plan.vpp == 1 else "Interleaved1F1B", "pipeline_parallel_microbatch_size": plan.mbs,
            "module_fqns_per_model_part": stages(pipeline.split(plan.shape.layers, plan.pp, plan.vpp)),
        })),
    }  # fmt: skip


def _sections(plan: Plan) -> dict[str, Any]:
    """The sections of torchtitan's configuration, by name."""
    o, vocab, routed = plan.options, plan.shape.vocab, plan.shape.experts > 0
    backend = f', moe_comm_backend="{DISPATCHERS[o.dispatcher]}"' if routed else ""
    adamw = "default_adamw(lr=0.0003)"
    return {
        "model_spec": Code(f'family.model_registry("plan", attn_backend="flex"{backend})'),
        "loss": Code(f"{'MTPLoss' if plan.shape.mtp else 'CrossEntropyLoss'}.Config(global_vocab_size={vocab})"),
        "tokenizer": Code("NoTokenizer.Config()"),
        "dataloader": Code(f"RandomTokens.Config(vocab_size={vocab})"),
        "optimizer": Code(adamw if plan.moment_bytes == 4 else f'replace({adamw}, implementation="fused_opt_states_bf16")'),
        "lr_scheduler": {"warmup_steps": 2},
        "training": {
            # In a pipeline all micro-batches of a step pass in one go; elsewhere they are accumulated one by one.
            "local_batch_size": plan.mbs * (plan.microbatches if plan.pp > 1 else 1), "global_batch_size": plan.global_batch,
            "seq_len": plan.seq_len, "steps": launch.STEPS, "dtype": "float32", "mixed_precision_param": "bfloat16",
            "disable_cuda_graphs": True,
        },
        "parallelism": parallelism(plan),
        "activation_checkpoint": RECOMPUTE[o.recompute[0] if o.recompute else "none"],
        "compile": {"enable": True, "components": ["model", "loss"] if plan.loss == "compiled" else ["model"]},
        "metrics": {"log_freq": 1, "disable_color_printing": True},
        "debug": {"seed": 0, **({"moe_force_load_balance": True} if routed and plan.even_rows else {})},
    }  # fmt: skip


def _lacks(plan: Plan, fields: Mapping[str, Any]) -> Iterator[str]:
    """What the plan asks for and torchtitan has not, beside options."""
    s, tp, cp, pp, ep = plan.shape, plan.tp, plan.cp, plan.pp, plan.ep
    micro_batches, dispatcher = plan.microbatches, plan.options.dispatcher
    tokens = (1 if plan.options.sp is False else tp) * (2 * cp if cp > 1 else 1)
    etp = tp if ep == 1 else 1
    lacking: list[tuple[object, str]] = [
        *((True, f"{plan.model} has {has}; {torchtitan_file.HAS}: choose another target") for has in torchtitan_file.lacking(s, fields)),
        (
            plan.loss not in launch.LOSSES,
            f"loss is {plan.loss}; it has {' and '.join(launch.LOSSES)}: set one of them with --fix loss=",
        ),
        (plan.moment_bytes not in (2, 4), f"moment_bytes is {plan.moment_bytes}; it has 4 and 2"),
        *((True, words) for _, words in torchtitan_file.limits(s, tp, cp, pp)),
        (
            plan.seq_len % tokens,
            f"a sequence has {plan.seq_len} tokens; with tp {tp} and cp {cp} it has multiples of {tokens}: change --seq",
        ),
        (
            plan.vpp > 1 and micro_batches % max(1, micro_batches // pp),
            f"{micro_batches} micro-batches for vpp {plan.vpp}; Interleaved1F1B has multiples of its rounds: make it a multiple of pp {pp}",
        ),
        (
            pp > 1 and micro_batches < pp,
            f"{micro_batches} micro-batches for pp {pp}; it has schedules of at least {pp}: raise gbs or lower pp",
        ),
        (
            s.experts and plan.etp != etp,
            f"etp is {plan.etp} with tp {tp} and ep {ep}; it splits experts by tp without EP, and not at all with it: add --fix etp={etp}",
        ),
        (dispatcher in ("deepep", "hybridep") and ep == 1, f"dispatcher is {dispatcher} with ep 1; it has that with ep > 1"),
        (
            plan.options.sharding == "none" and (tp * cp) % ep,
            f"ep is {ep} over replicas; it takes expert ranks from shards, cp and tp: set sharding=fsdp2",
        ),
    ]
    yield from (words for holds, words in lacking if holds)
