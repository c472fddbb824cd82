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
        etp=par.tp,
    )
    if model.num_kv_heads % par.tp:
        problems.append(f"{model.num_kv_heads} key-value heads do not divide over tp {par.tp}; this backend does not replicate them")
    if model.vocab_size % par.tp:
        problems.append(f"a vocabulary of {model.vocab_size} does not divide over tp {par.tp}; pad model.vocab_size")
    if (model.expert_ffn_size if model.num_experts else model.ffn_size) % par.tp:
        problems.append(f"the MLP width does not divide over tp {par.tp}")
    return problems + interleaving_problems(config, world) + context_problems(config)


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
    if config.moe.dispatcher not in ("allgather", "alltoall"):
        problems.append(
            f"moe.dispatcher '{config.moe.dispatcher}' belongs to the megatron backend; the torch backend has allgather and alltoall"
        )
    if config.model.vision is not None and par.tp * par.ep > 1:
        problems.append("a vision-language model runs without tensor and expert parallelism: set parallel.tp and ep to 1")
    held, deepstack = config.model.num_layers // (par.pp * par.vpp), len(config.model.vision.deepstack_layers) if config.model.vision else 0
    if held < deepstack:
        problems.append(
            f"DeepStack features enter the first {deepstack} decoder layers, which must lie in the first chunk of the pipeline: "
            f"pp {par.pp} x vpp {par.vpp} leaves {held} layers in a chunk; lower parallel.pp or vpp"
        )
    if par.ep > 1 and par.tp > 1:
        problems.append("ep and tp together are not supported: choose one of them")
    if par.pp > 1 and not config.data.pad:
        problems.append("pp needs rows of one length: set data.pad: true")
    if config.train.warmup_steps >= config.train.steps and not (config.profile.nvtx or config.profile.kineto):
        problems.append(
            f"train.warmup_steps {config.train.warmup_steps} leaves none of {config.train.steps} steps to time; raise train.steps"
        )
    return problems
