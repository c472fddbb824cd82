"""What can be known to be wrong before any process starts: the layout, and what this backend does not do yet."""

from __future__ import annotations

from playbook import layout
from playbook.errors import ConfigError
from playbook_trainer.config import TrainerConfig


def check(config: TrainerConfig, world: int) -> None:
    """Refuse what cannot run on `world` ranks.

    Raises:
        ConfigError: every rule that is broken, one per line.
    """
    problems = layout_problems(config, world) + feature_problems(config)
    if problems:
        raise ConfigError(
            f"this configuration cannot run on {world} rank{'s' if world > 1 else ''}:\n" + "\n".join(f"  - {p}" for p in problems)
        )


def layout_problems(config: TrainerConfig, world: int) -> list[str]:
    """Broken rules of layout arithmetic."""
    model, par, train = config.model, config.parallel, config.train
    problems = layout.check(
        gpus=world,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        layers=model.num_layers,
        experts=model.num_experts,
        seq_len=config.data.seq_len,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        tp=par.tp,
        pp=par.pp,
        vpp=par.vpp,
        cp=par.cp,
        ep=par.ep,
        etp=par.etp or par.tp,
    )
    if model.num_kv_heads % par.tp:
        problems.append(f"{model.num_kv_heads} key-value heads do not divide over tp {par.tp}; this backend does not replicate them")
    if model.vocab_size % par.tp:
        problems.append(f"a vocabulary of {model.vocab_size} does not divide over tp {par.tp}; pad model.vocab_size")
    etp = par.etp or par.tp
    if model.num_experts and model.expert_ffn_size % etp:
        problems.append(f"an expert width of {model.expert_ffn_size} does not divide over etp {etp}; set parallel.etp to 1")
    if not model.num_experts and model.ffn_size % par.tp:
        problems.append(f"an MLP width of {model.ffn_size} does not divide over tp {par.tp}; set parallel.tp to a divisor of it")
    return (
        problems
        + replica_problems(config, world)
        + token_problems(config)
        + interleaving_problems(config, world)
        + context_problems(config)
    )


def replica_problems(config: TrainerConfig, world: int) -> list[str]:
    """Copies of the model, of which HSDP shards each, are made of whole data-parallel ranks."""
    par = config.parallel
    dp, over = divmod(world, par.tp * par.pp * par.cp)
    if par.dp_replicate == 1 or over:
        return []
    if not par.fsdp:
        return [
            f"dp_replicate {par.dp_replicate} with fsdp: false, which makes every rank a copy; set parallel.fsdp: true or dp_replicate to 1"
        ]
    if dp % par.dp_replicate:
        return [f"dp {dp} does not divide into {par.dp_replicate} copies; set parallel.dp_replicate to a divisor of {dp}"]
    return []


def token_problems(config: TrainerConfig) -> list[str]:
    """Where ranks share out one stream of tokens, or gather several, rows have one length and divide."""
    par, train = config.parallel, config.train
    etp, moe = par.etp or par.tp, config.model.num_experts > 0
    reasons = []
    if par.tp > 1 and par.sequence_parallel:
        reasons.append("sequence parallelism")
    elif par.tp > 1 and moe and etp != par.tp:
        reasons.append(f"etp {etp} beside tp {par.tp}")
    problems = []
    tokens = train.micro_batch_size * config.data.seq_len // par.cp
    if reasons and tokens % par.tp:
        problems.append(
            f"{reasons[0]} cuts the {tokens} tokens of a rank over tp {par.tp}, which does not divide them; change data.seq_len"
        )
    if moe and etp > 1 and etp != par.tp:
        reasons.append(f"etp {etp} beside tp {par.tp}")
    if moe and par.ep > 1 and config.moe.dispatcher == "allgather":
        reasons.append("moe.dispatcher allgather")
    if reasons and not config.data.pad:
        problems.append(f"{reasons[0]} needs rows of one length: set data.pad: true")
    return problems


def interleaving_problems(config: TrainerConfig, world: int) -> list[str]:
    """The interleaved schedule takes micro-batches in groups of pp. Source: Megatron-LM, arXiv 2104.04473, section 2.2."""
    par, train = config.parallel, config.train
    microbatches = train.global_batch_size * par.tp * par.pp * par.cp // (train.micro_batch_size * world)
    if par.vpp == 1 or not microbatches % par.pp:
        return []
    return [
        f"vpp {par.vpp} needs micro-batches in a multiple of pp {par.pp}, and a step has {microbatches}; "
        "change train.global_batch_size or set parallel.vpp: 1"
    ]


def context_problems(config: TrainerConfig) -> list[str]:
    """Ulysses shares out heads, so they must divide; with fewer key-value heads than ranks each goes to several."""
    par, problems = config.parallel, []
    if par.cp == 1 or par.cp_comm != "ulysses":
        return []
    heads, kv_heads = config.model.num_heads // par.tp, config.model.num_kv_heads // par.tp
    if heads % par.cp:
        problems.append(
            f"cp_comm ulysses shares out {heads} attention heads, which do not divide over cp {par.cp}; set parallel.cp_comm: ring"
        )
    if kv_heads and kv_heads % par.cp and par.cp % kv_heads:
        problems.append(
            f"cp_comm ulysses with {kv_heads} key-value heads and cp {par.cp}: one must be a multiple of the other; set parallel.cp_comm: ring"
        )
    return problems


def feature_problems(config: TrainerConfig) -> list[str]:
    """What the torch backend does not do."""
    par, problems = config.parallel, []
    if config.backend != "torch":
        problems.append(f"backend '{config.backend}' is not part of this version; set backend: torch")
    if config.moe.dispatcher not in ("allgather", "alltoall", "dedup"):
        problems.append(
            f"moe.dispatcher '{config.moe.dispatcher}' belongs to the megatron backend; the torch backend has allgather, alltoall and dedup"
        )
    held, deepstack = config.model.num_layers // (par.pp * par.vpp), len(config.model.vision.deepstack_layers) if config.model.vision else 0
    if held < deepstack:
        problems.append(
            f"DeepStack features enter the first {deepstack} decoder layers, which must lie in the first chunk of the pipeline: "
            f"pp {par.pp} x vpp {par.vpp} leaves {held} layers in a chunk; lower parallel.pp or vpp"
        )
    if par.pp > 1 and not config.data.pad:
        problems.append("pp needs rows of one length: set data.pad: true")
    if config.train.warmup_steps >= config.train.steps and not (config.profile.nvtx or config.profile.kineto):
        problems.append(
            f"train.warmup_steps {config.train.warmup_steps} leaves none of {config.train.steps} steps to time; raise train.steps"
        )
    return problems
