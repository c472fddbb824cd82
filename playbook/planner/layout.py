"""Layouts: which combinations of parallel degrees and of recompute, graphs, offload and overlap are possible, and what follows from them.
Pure arithmetic.

`world = tp x cp x pp x dp` for attention and `world = etp x ep x pp x edp` for experts: two grids over the same ranks.
Source: Megatron-LM, `megatron/core/parallel_state.py` and `megatron/training/arguments.py` (the divisibility checks).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import lcm

from playbook.planner import rules
from playbook.planner.options import DEEPSPEED, Options
from playbook.planner.rules import Case, Rule, Words
from playbook.planner.shapes import Shape

_SPARSE = {"moe", "moe_act", "shared_experts"}
_SPARSE_GRAPHS = {"moe", "moe_router"}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# fmt: off
# Sources: Megatron-LM core_v0.19.2, `megatron/core/transformer/transformer_config.py` (`__post_init__`); DeepSpeed 0.19.6,
# `runtime/pipe/engine.py`.
EXCLUSIONS = (
    Rule(
        "recompute-full", lambda c: "full" in c.again and len(c.again) > 1, "recompute",
        lambda c: f"recompute full stands alone, found {', '.join(c.o.recompute)}", "set {set[recompute=full]} or name modules only",
    ),
    Rule(
        "recompute-dense", lambda c: not c.experts and bool(c.again & _SPARSE), "recompute experts",
        lambda c: f"recompute {_listed(c.again & _SPARSE)} on a model without experts", "change {recompute}",
    ),
    Rule(
        "recompute-mla", lambda c: c.shape is not None and c.shape.mla is None and "mla_up_proj" in c.again, "recompute model",
        "recompute mla_up_proj on a model without compressed attention", "change {recompute}",
    ),
    Rule(
        "recompute-gdn", lambda c: c.shape is not None and c.shape.linear is None and "gdn_norm_out" in c.again, "recompute model",
        "recompute gdn_norm_out on a model without linear attention", "change {recompute}",
    ),
    Rule(
        "recompute-shared", lambda c: "shared_experts" in c.again and c.o.shared_overlap, "recompute shared_overlap",
        "recompute shared_experts excludes overlap of shared experts", "change {recompute} or set {set[shared_overlap=false]}",
    ),
    Rule(
        "recompute-delayed", lambda c: c.o.fp8 == "delayed" and bool(c.again & {"moe_act", "layernorm"}), "recompute fp8",
        "recompute of moe_act or layernorm excludes delayed FP8 scaling", "change {recompute} or set {set[fp8=blockwise]}",
    ),
    Rule(
        "graphs-whole", lambda c: "full_iteration" in c.o.graphs and len(set(c.o.graphs)) > 1, "graphs",
        lambda c: f"a graph of the full iteration stands alone, found {', '.join(c.o.graphs)}", "leave the parts out",
    ),
    Rule(
        "graphs-full-recompute", lambda c: bool(c.graphed) and "full" in c.again, "graphs recompute",
        "full recompute excludes per-layer CUDA graphs", "recompute selected modules, or capture the full iteration",
    ),
    Rule(
        "graphs-moe-capacity", lambda c: "moe" in c.graphed and not c.o.capacity, "graphs capacity",
        "graphs moe needs padding to capacity, since dropless routing changes shapes", "set {set[graphs=moe_router,moe_preprocess]}",
    ),
    Rule(
        "graphs-moe-router", lambda c: {"moe", "moe_router"} <= c.graphed, "graphs",
        "graphing 'moe' already covers 'moe_router'", "keep one of the two",
    ),
    Rule(
        "graphs-preprocess", lambda c: "moe_preprocess" in c.graphed and "moe_router" not in c.graphed, "graphs",
        "graphing 'moe_preprocess' needs 'moe_router' beside it", "add it",
    ),
    Rule(
        "graphs-recompute-moe", lambda c: "moe" in c.again and bool(c.graphed & {"moe", "moe_router"}), "graphs recompute",
        "recompute of 'moe' excludes a graph over its router", "recompute moe_act instead, or graph attn alone",
    ),
    Rule(
        "graphs-dense", lambda c: not c.experts and bool(c.graphed & {"moe", "moe_router"}), "graphs experts",
        lambda c: f"graphs {_listed(c.graphed & _SPARSE_GRAPHS)} on a model without experts", "change {graphs}",
    ),
    Rule(
        "graphs-mlp", lambda c: "mlp" in c.graphed and c.shape is not None and not c.shape.dense_layers, "graphs model",
        "graphs mlp on a model without dense layers", "change {graphs}",
    ),
    Rule(
        "graphs-offload", lambda c: bool(c.graphed) and c.o.offload, "graphs offload",
        "offload of layers excludes graphs of modules", "capture the full iteration, or set {set[offload=false]}",
    ),
    Rule(
        "offload-pp", lambda c: c.o.offload and c.pp > 1, "offload pp",
        lambda c: f"offload of layers needs pp 1, found pp {c.pp}", "set {pp} to 1 or {set[offload=false]}",
    ),
    Rule("offload-recompute", lambda c: c.o.offload and bool(c.again), "offload recompute", "offload of layers excludes "
                                                                                            "recompute", "leave one out"),
    Rule(
        "offload-twice", lambda c: c.o.offload and bool(c.o.offload_modules), "offload offload_modules",
        "offload of layers and of modules are two ways to do one thing", "choose one of them",
    ),
    Rule(
        "offload-attn-proj", lambda c: "attn_proj" in c.o.offload_modules and "core_attn" not in c.o.offload_modules, "offload_modules",
        "offloading 'attn_proj' needs 'core_attn' beside it, whose output it is", "add it",
    ),
    Rule(
        "offload-recomputed-moe", lambda c: "moe" in c.again and bool({"expert_fc1", "moe_act"} & set(c.o.offload_modules)),
        "recompute offload_modules", "recompute of 'moe' makes again what offload of 'expert_fc1' and 'moe_act' would take away",
        "leave one of them out",
    ),
    Rule(
        "offload-dense", lambda c: not c.experts and bool({"expert_fc1", "moe_act"} & set(c.o.offload_modules)), "offload_modules experts",
        "offload of 'expert_fc1' and 'moe_act' on a model without experts", "change {offload_modules}",
    ),
    Rule(
        "delay-wgrad", lambda c: c.o.delay_wgrad and not c.o.ep_overlap, "delay_wgrad ep_overlap",
        "delayed weight gradients need overlap of expert communication", "set {set[ep_overlap=true]}",
    ),
    Rule(
        "overlap-ep", lambda c: c.o.ep_overlap and c.ep == 1, "ep_overlap ep",
        "overlap of expert communication needs ep > 1", "raise {ep} or set {set[ep_overlap=false]}",
    ),
    Rule(
        "overlap-vpp", lambda c: c.o.ep_overlap and c.pp > 1 and c.vpp == 1, "ep_overlap pp vpp",
        lambda c: f"overlap of expert communication with pp {c.pp} needs vpp > 1", "raise {vpp}",
    ),
    Rule(
        "overlap-allgather", lambda c: c.o.ep_overlap and c.o.dispatcher == "allgather", "ep_overlap dispatcher",
        "overlap of expert communication needs dispatcher alltoall or flex, found allgather", "change {dispatcher}",
    ),
    Rule(
        "overlap-recompute", lambda c: c.o.ep_overlap and bool(c.again & {"full", "moe"}), "ep_overlap recompute",
        lambda c: f"overlap of expert communication excludes recompute {_listed(c.again & {'full', 'moe'})}", "change {recompute}",
    ),
    Rule(
        "overlap-graphs", lambda c: c.o.ep_overlap and bool({"moe", "mlp"} & set(c.o.graphs)), "ep_overlap graphs",
        "overlap of expert communication excludes graphs of moe and mlp", "change {graphs}",
    ),
    Rule(
        "overlap-shared", lambda c: c.o.ep_overlap and c.o.shared_overlap, "ep_overlap shared_overlap",
        "overlap of expert communication excludes overlap of shared experts", "set {set[shared_overlap=false]}",
    ),
    Rule(
        "overlap-mtp", lambda c: c.o.ep_overlap and c.model.mtp > 1, "ep_overlap model",
        lambda c: f"overlap of expert communication takes one MTP depth at most, the model has {c.model.mtp}",
        "set {set[ep_overlap=false]}",
    ),
    Rule(
        "torch-sharding", lambda c: c.o.backend == "torch" and c.o.sharding == "fsdp", "backend sharding",
        lambda c: f"sharding {c.o.sharding} is megatron's, and the backend is torch", "set {set[sharding=fsdp2]}",
    ),
    Rule(
        "recompute-selective", lambda c: "selective" in c.again and (c.o.backend != "torch" or len(c.again) > 1), "backend recompute",
        "recompute selective is torchtitan's and stands alone", "set {set[backend=torch]} or name modules",
    ),
    Rule(
        "percents", lambda c: max(c.o.optimizer_offload, c.o.offload_percent) > 100, "optimizer_offload offload_percent",
        lambda c: f"optimizer_offload {c.o.optimizer_offload} and offload_percent {c.o.offload_percent} are percents", "set at most 100",
    ),
    Rule(
        "offload-replicas", lambda c: c.o.backend == "torch" and c.o.optimizer_offload > 0 and c.o.sharding == "none",
        "backend optimizer_offload sharding",
        "an optimizer on the host needs data parallelism that shards", "set {set[sharding=fsdp2]} or {set[sharding=zero2]}",
    ),
    Rule(
        "offload-whole", lambda c: c.o.backend == "torch" and c.o.sharding not in DEEPSPEED and c.o.optimizer_offload not in (0, 100),
        "backend optimizer_offload sharding",
        lambda c: f"FSDP2 has all of its shards on the host or none, found optimizer_offload {c.o.optimizer_offload}",
        "set {set[optimizer_offload=100]}",
    ),
    Rule(
        "zero-pipeline", lambda c: c.o.backend == "torch" and c.o.sharding in ("zero2", "zero3") and c.pp > 1, "backend sharding pp",
        lambda c: f"DeepSpeed's {c.o.sharding} excludes a pipeline, found pp {c.pp}", "set {pp} to 1 or {set[sharding=zero1]}",
    ),
    Rule("base-fp8", lambda c: bool(c.o.base) and bool(c.o.fp8), "base fp8", "a base in 4 bits excludes FP8 products", "leave one of them "
                                                                                                                       "out"),
    Rule(
        "lora-experts", lambda c: "experts" in c.o.lora_targets and not c.experts, "lora_targets experts",
        "adapters of experts on a model without experts", "change {lora_targets}",
    ),
    Rule("fp8-params", lambda c: c.o.fp8_params and not c.o.fp8, "fp8 fp8_params", "fp8_params without a recipe",
    "set {set[fp8=blockwise]}"),
    Rule(
        "frozen-vision", lambda c: c.shape is not None and bool(c.o.frozen) and c.shape.vision is None, "frozen model",
        lambda c: f"frozen {', '.join(c.o.frozen)} on a model without a vision tower", "leave {frozen} out",
    ),
)
"""Recompute, graphs, offload and overlap that exclude each other."""
# fmt: on


CP_SHARD_TOKENS = 4096
"""Tokens per CP rank that the published rule aims at, with which L1, L2 and L6 count; the card's own rule is in its `sizes`. Source:
Megatron Bridge, long-context guidance for MoE training."""


_ALL = (*rules.LAYOUT, *rules.LABEL, *rules.FEATURES, *EXCLUSIONS)
_KNOWN = tuple(rule for rule in _ALL if rule not in rules.LABEL)


@lru_cache(maxsize=4096)
def _all_known(options: Options) -> bool:
    """Whether no option has a name that is not known; few sets of options come with many layouts."""
    return not rules.broken(Case(o=options), rules.LABEL)


def check(
    *,
    gpus: int,
    heads: int,
    kv_heads: int,
    layers: int,
    experts: int,
    seq_len: int,
    micro_batch_size: int,
    global_batch_size: int,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    vpp: int = 1,
    options: Options | None = None,
    shape: Shape | None = None,
    words: Words = rules.OWN,
) -> list[str]:
    """The rules that a layout breaks, each as found, expected and what to do; an empty list means that it can run.

    With `options`, the rules of the chosen features are checked too, and with `shape` those that need the model's widths; `words` are the
    caller's names of settings.
    """
    case = Case(
        gpus,
        heads,
        kv_heads,
        layers,
        experts,
        seq_len,
        micro_batch_size,
        global_batch_size,
        tp,
        pp,
        cp,
        ep,
        etp,
        vpp,
        shape,
        options or Options(uneven=False),
    )
    table = rules.LAYOUT if options is None else _KNOWN if _all_known(options) else _ALL
    if options is None and shape is not None:
        table = (*table, *rules.WIDTHS)
    return rules.broken(case, rules.COUNTS, words=words) or rules.broken(case, table, words=words)


def grid(*, gpus: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> list[str]:
    """The rules of the two grids that a layout breaks on this many GPUs."""
    return rules.broken(Case(gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp), rules.GRIDS)


def min_gpus(*, pp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> int:
    """The fewest GPUs that hold one copy: pp times the least common multiple of `tp x cp` and `ep x etp`, so their larger where one divides
    the other.
    """
    return pp * lcm(tp * cp, ep * etp)


def cp_for(seq_len: int, tokens: int = CP_SHARD_TOKENS) -> int:
    """CP by a sizing rule: the sequence over so many tokens for each rank, rounded up to a power of two."""
    return 1 << max(0, -(-seq_len // tokens) - 1).bit_length()
