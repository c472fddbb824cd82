"""A plan as something to start with torchtitan 0.3.0: a Python file with the configuration, and the launcher's line.

Source: torchtitan 0.3.0, `torchtitan/config/configs.py`, `torchtitan/trainer.py`,
`torchtitan/distributed/{parallel_dims,pipeline_parallel,fsdp}.py`, `torchtitan/models/common/{decoder,moe_sharding}.py`,
`torchtitan/models/deepseek_v3/mtp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from playbook.planner import pipeline
from playbook.planner.plan import Plan
from playbook_trainer.export import launch, torchtitan_file
from playbook_trainer.export.launch import Launchable
from playbook_trainer.export.torchtitan_file import DISPATCHERS, FUNCTION, RECOMPUTE, RELEASE, Code, document, stages

_MODULE = "plan_torchtitan"
_EXPRESSED: Mapping[str, tuple[Any, ...]] = {
    "sharding": ("fsdp2", "optimizer", "none"),
    "recompute": ((), ("selective",), ("full",)),
    "dispatcher": ("", "alltoall", "deepep", "hybridep"),
    "cp_comm": ("", "all_gather"),
    "sp": (None, True, False),
}
"""Values of options that it has words for."""
_LOSSES = ("torch", "compiled")
_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Source: torchtitan 0.3.0, `run_train.sh`."""


def launchable(plan: Plan, hardware: str, *, fields: Mapping[str, Any] | None = None, steps: int = 20) -> Launchable:
    """The plan for torchtitan 0.3.0 on random tokens. `fields` are the published configuration of a model that its name does not tell.

    Raises:
        ConfigError: torchtitan has no words for the plan or its model.
    """
    from playbook.planner.models import fields_of

    fields = fields_of(plan.model) if fields is None else fields
    launch.require(plan, RELEASE, _EXPRESSED, _lacks(plan, fields))
    even = "; routing is forced to be even, as the plan supposes" if plan.shape.experts and plan.even_rows else ""
    title = f"{launch.plain(plan.model)} on {plan.gpus} {hardware} GPUs, for {RELEASE}{even}."
    model = torchtitan_file.source(plan.shape, fields, plan.seq_len)
    last = plan.gpus // plan.pp * (plan.pp - 1)  # the first rank of the last stage knows the loss
    each = min(plan.gpus, launch.gpus_per_node(hardware))
    row, nodes = launch.row_of(plan, hardware), launch.nodes(plan, hardware)
    command = [
        "torchrun", *(("--nnodes", str(nodes)) if nodes > 1 else ()), "--nproc-per-node", str(each),
        "--local-ranks-filter", str(last % each), "--role", "rank", "--tee", "3", "-m", "torchtitan.train", "--module", _MODULE,
        "--config", FUNCTION,
    ]  # fmt: skip
    return Launchable(
        "torchtitan", RELEASE, _ENVIRONMENT, tuple(command),
        {f"{_MODULE}.py": document(title, model, _sections(plan, steps), random=True), **({launch.RUNS: row} if row else {})},
        ("torch 2.14 or newer; 2.12 does without a pipeline and HybridEP",
         "the time stamps of its lines are the clock: keep them in the log",
         launch.beside(plan, hardware, "tps of its last lines")),
    )  # fmt: skip


def parallelism(plan: Plan) -> dict[str, Any]:
    """Degrees, sharding and the pipeline's split, by field of `ParallelismConfig`."""
    o, replicas = plan.options, plan.options.sharding == "none"
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp if replicas else 1, "data_parallel_shard_degree": 1 if replicas else plan.dp,
        "fsdp_reshard_after_forward": "never" if o.sharding == "optimizer" else "default", "tensor_parallel_degree": plan.tp,
        "enable_sequence_parallel": o.sp is not False, "context_parallel_degree": plan.cp, "expert_parallel_degree": plan.ep,
        "pipeline_parallel_degree": plan.pp,
    }  # fmt: skip
    if plan.pp > 1:
        fields |= {
            "pipeline_parallel_schedule": "1F1B" if plan.vpp == 1 else "Interleaved1F1B", "pipeline_parallel_microbatch_size": plan.mbs,
            "module_fqns_per_model_part": stages(pipeline.split(plan.shape.layers, plan.pp, plan.vpp)),
        }  # fmt: skip
    return fields


def _sections(plan: Plan, steps: int) -> dict[str, Any]:
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
            "seq_len": plan.seq_len, "steps": steps, "dtype": "float32", "mixed_precision_param": "bfloat16", "disable_cuda_graphs": True,
        },
        "parallelism": parallelism(plan),
        "activation_checkpoint": RECOMPUTE[o.recompute[0] if o.recompute else "none"],
        "compile": {"enable": True, "components": ["model", "loss"] if plan.loss == "compiled" else ["model"]},
        "metrics": {"log_freq": 1, "disable_color_printing": True},
        "debug": {"seed": 0, **({"moe_force_load_balance": True} if routed and plan.even_rows else {})},
    }  # fmt: skip


def _lacks(plan: Plan, fields: Mapping[str, Any]) -> Iterator[str]:
    """What the plan asks for and torchtitan has not, beside options."""
    s, tp, cp, pp = plan.shape, plan.tp, plan.cp, plan.pp
    for words in torchtitan_file.lacking(s, fields):
        yield f"{plan.model} has {words}; {torchtitan_file.HAS}: choose another target"
    if plan.loss not in _LOSSES:
        yield f"loss is {plan.loss}; it has {' and '.join(_LOSSES)}: set one of them with --fix loss="
    if plan.moment_bytes not in (2, 4):
        yield f"moment_bytes is {plan.moment_bytes}; it has 4 and 2"
    yield from (words for _, words in torchtitan_file.limits(s, tp, cp, pp))
    tokens = (1 if plan.options.sp is False else tp) * (2 * cp if cp > 1 else 1)
    if plan.seq_len % tokens:
        yield f"a sequence has {plan.seq_len} tokens; with tp {tp} and cp {cp} it has multiples of {tokens}: change --seq"
    if plan.vpp > 1 and plan.microbatches % max(1, plan.microbatches // pp):
        yield (
            f"{plan.microbatches} micro-batches for vpp {plan.vpp}; Interleaved1F1B has multiples of its rounds: "
            f"make it a multiple of pp {pp}"
        )
    if pp > 1 and plan.microbatches < pp:
        yield f"{plan.microbatches} micro-batches for pp {pp}; it has schedules of at least {pp}: raise gbs or lower pp"
    yield from _lacks_of_experts(plan)


def _lacks_of_experts(plan: Plan) -> Iterator[str]:
    etp = plan.tp if plan.ep == 1 else 1
    if plan.shape.experts and plan.etp != etp:
        yield (
            f"etp is {plan.etp} with tp {plan.tp} and ep {plan.ep}; it splits experts by tp without EP, and not at all with it: "
            f"add --fix etp={etp}"
        )
    if plan.options.dispatcher in ("deepep", "hybridep") and plan.ep == 1:
        yield f"dispatcher is {plan.options.dispatcher} with ep 1; it has that with ep > 1"
    if plan.options.sharding == "none" and (plan.tp * plan.cp) % plan.ep:
        yield f"ep is {plan.ep} over replicas; it takes expert ranks from shards, cp and tp: set sharding=fsdp2"
