"""Rules on features: what a layout also has to satisfy once its dispatcher, sharding, recompute and graphs are chosen.

Each rule is a function of a layout and its options that gives the sentence of what is broken, or nothing. The docstring of each names
the file of Megatron-LM that enforces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from playbook.planner.shapes import Shape

FLEX = frozenset({"flex", "deepep", "hybridep", "ncclep"})
DISPATCHERS = frozenset({"allgather", "alltoall"}) | FLEX
RECOMPUTE = frozenset({"full", "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"})
GRAPH_MODULES = frozenset({"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"})
CP_COMM = frozenset({"p2p", "all_gather", "a2a", "a2a+p2p"})
SHARDING = frozenset({"none", "optimizer", "fsdp", "fsdp2"})
FP8 = frozenset({"blockwise", "mxfp8", "tensorwise", "delayed"})
LABELS: Mapping[str, frozenset[str]] = {
    "dispatcher": DISPATCHERS,
    "cp_comm": CP_COMM,
    "sharding": SHARDING,
    "recompute": RECOMPUTE,
    "graphs": GRAPH_MODULES | {"full_iteration"},
    "fp8": FP8,
}
"""The names that each option takes."""


@dataclass(frozen=True)
class Options:
    """What is chosen beside the degrees. The defaults are silent: a rule about something that nobody chose is not checked.

    `sharding` says what data parallelism shards: `none`, the `optimizer` state, or everything by Megatron-FSDP (`fsdp`) or torch's
    `fsdp2`. `uneven` is an explicit pipeline layout. `graphs` are modules; `full_iteration` stands alone.
    """

    sp: bool | None = None
    uneven: bool = False
    overlap_p2p: bool = True
    rank_order: str = "tp-cp-ep-dp-pp"
    dispatcher: str = ""
    cp_comm: str = ""
    cp_sizes: tuple[int, ...] = ()
    optimizer_instances: int = 1
    sharding: str = "optimizer"
    precision_aware: bool = False
    recompute: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    capacity: bool = False
    ep_overlap: bool = False
    delay_wgrad: bool = False
    shared_overlap: bool = False
    fp8: str = ""
    offload: bool = False


@dataclass(frozen=True)
class Degrees:
    """The degrees of a layout with the counts that feature rules ask for; `shape` where the model is known."""

    gpus: int
    heads: int
    kv_heads: int
    experts: int
    seq_len: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int
    shape: Shape | None


Rule = Callable[[Degrees, Options], Iterator[str]]


def broken(degrees: Degrees, options: Options) -> list[str]:
    """The feature rules that a layout breaks, each as found, expected and what to do."""
    return [sentence for rule in RULES for sentence in rule(degrees, options)]


def labels(d: Degrees, o: Options) -> Iterator[str]:
    """Every name is one that megatron-core knows. Source: `megatron/core/transformer/transformer_config.py`."""
    given = {
        "dispatcher": {o.dispatcher} - {""},
        "cp_comm": {o.cp_comm} - {""},
        "sharding": {o.sharding},
        "recompute": set(o.recompute),
        "graphs": set(o.graphs),
        "fp8": {o.fp8} - {""},
    }
    for key, found in given.items():
        if found - LABELS[key]:
            yield f"{key} {', '.join(sorted(found - LABELS[key]))} is not known; set {key} to one of {', '.join(sorted(LABELS[key]))}"
    if sorted(o.rank_order.split("-")) != ["cp", "dp", "ep", "pp", "tp"]:
        yield f"rank order {o.rank_order} does not name tp, cp, ep, dp and pp once each; set it to tp-cp-ep-dp-pp"


def sequence_parallel(d: Degrees, o: Options) -> Iterator[str]:
    """SP splits the sequence of a CP rank over TP, and experts need it at TP > 1.

    Source: `megatron/core/tensor_parallel/mappings.py` and `megatron/core/transformer/moe/moe_layer.py`.
    """
    if d.tp > 1 and d.experts and o.sp is False:
        yield f"tp {d.tp} with experts trains only with sequence parallelism; set sp=true or tp to 1"
    if d.tp > 1 and o.sp and d.seq_len % (d.tp * d.cp):
        yield f"seq_len {d.seq_len} is not a multiple of tp {d.tp} x cp {d.cp} = {d.tp * d.cp} (sequence parallelism splits it); change seq_len"


def widths(d: Degrees, o: Options) -> Iterator[str]:
    """MLPs split their width over TP, experts over ETP, linear attention its heads over TP x CP.

    Source: `megatron/core/tensor_parallel/layers.py` (`divide`) and `megatron/core/transformer/transformer_config.py`.
    """
    if d.shape is None:
        return
    for what, width, axis, degree in (
        ("an expert width", d.shape.expert_ffn, "etp", d.etp),
        ("an MLP width", d.shape.ffn if d.shape.dense_layers else 0, "tp", d.tp),
        ("a shared-expert width", d.shape.shared_ffn, "tp", d.tp),
    ):
        if width % degree:
            yield f"{what} of {width} does not divide over {axis} {degree}; set {axis} to a divisor of {width}"
    gdn, both = d.shape.linear, d.tp * d.cp
    if gdn is not None and (gdn.key_heads % both or gdn.value_heads % both):
        yield f"{gdn.key_heads} key and {gdn.value_heads} value heads of linear attention do not divide over tp x cp = {both}; change tp or cp"


def experts_grid(d: Degrees, o: Options) -> Iterator[str]:
    """With another rank order, both grids must have the same pipeline groups. Source: `megatron/core/parallel_state.py`."""
    if o.rank_order.endswith("pp") or d.pp == 1 or d.gpus % (d.tp * d.cp * d.pp) or d.gpus % (d.etp * d.ep * d.pp):
        return
    dp, edp = d.gpus // (d.tp * d.cp * d.pp), d.gpus // (d.etp * d.ep * d.pp)
    if dp != edp:
        yield f"rank order {o.rank_order} with pp {d.pp} needs edp = dp, found edp {edp} and dp {dp}; set an order that ends in pp"


def pipeline(d: Degrees, o: Options) -> Iterator[str]:
    """Interleaving on two stages needs overlapped point-to-point transfers. Source: `megatron/training/arguments.py`."""
    if d.vpp > 1 and d.pp == 2 and not o.overlap_p2p:
        yield f"vpp {d.vpp} on pp 2 needs overlap_p2p; set overlap_p2p=true or raise pp"


def dispatcher(d: Degrees, o: Options) -> Iterator[str]:
    """The flex back ends need more than one rank among the experts, and shared experts something to run beside.

    Source: `megatron/core/transformer/moe/token_dispatcher.py` and `megatron/core/transformer/transformer_config.py`.
    """
    if o.dispatcher in FLEX and d.etp * d.ep == 1:
        yield f"dispatcher {o.dispatcher} needs etp x ep > 1; raise ep or set dispatcher=alltoall"
    if o.dispatcher == "deepep" and o.capacity:
        yield "dispatcher deepep excludes padding to capacity; set capacity=false or dispatcher=alltoall"
    if o.dispatcher == "allgather" and o.shared_overlap and (d.shape is None or d.shape.shared_ffn):
        yield "overlap of shared experts runs beside the dispatcher alltoall, found allgather; set dispatcher=alltoall or shared_overlap=false"
    if o.dispatcher and not d.experts:
        yield f"dispatcher {o.dispatcher} on a model without experts; change model or leave dispatcher out"


def context(d: Degrees, o: Options) -> Iterator[str]:
    """Ulysses-style CP shards heads, those of keys and values too; hierarchical sizes multiply to CP.

    Source: `megatron/core/transformer/transformer_config.py` and `megatron/core/parallel_state.py`; Transformer Engine,
    `transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py` (heads of keys and values).
    """
    held = max(d.kv_heads // d.tp, 1)
    if o.cp_comm == "a2a" and d.heads % (d.tp * d.cp):
        yield f"{d.heads} heads do not divide over tp {d.tp} x cp {d.cp} for cp_comm a2a; set cp_comm=p2p or change cp"
    elif o.cp_comm == "a2a" and held % d.cp:
        yield f"the {held} key-value heads of a tp rank do not divide over cp {d.cp} for cp_comm a2a; set cp_comm=p2p or change cp"
    if o.cp_comm == "a2a+p2p" and not o.cp_sizes:
        yield "cp_comm a2a+p2p needs the sizes of its two levels; set cp_sizes, such as cp_sizes=2,4"
    if o.cp_sizes and prod(o.cp_sizes) != d.cp:
        yield f"cp_sizes {'x'.join(map(str, o.cp_sizes))} = {prod(o.cp_sizes)} is not cp {d.cp}; change cp_sizes"


def sharding(d: Degrees, o: Options) -> Iterator[str]:
    """What each kind of sharding excludes; instances of the optimizer divide both grids, the experts' of a dense model too.

    Source: `megatron/training/arguments.py`, `megatron/core/optimizer/optimizer_config.py`, `megatron/core/parallel_state.py`.
    """
    shards, experts, instances = d.gpus // (d.tp * d.pp), d.etp * d.ep * d.pp, o.optimizer_instances
    if shards % instances:
        yield f"dp x cp = {shards} does not divide into {instances} optimizer instances; change optimizer_instances"
    elif not d.gpus % experts and d.gpus // experts % instances:
        yield f"edp {d.gpus // experts} does not divide into {instances} optimizer instances; set optimizer_instances=1, or change ep or etp"
    if o.sharding == "fsdp2" and (d.pp > 1 or d.ep > 1):
        yield f"torch FSDP2 in megatron needs pp 1 and ep 1, found pp {d.pp} and ep {d.ep}; set sharding=fsdp or change the degrees"
    if o.precision_aware and o.sharding not in ("optimizer", "fsdp"):
        yield f"the precision-aware optimizer needs the distributed optimizer, found sharding {o.sharding}; set sharding=optimizer"


def recompute(d: Degrees, o: Options) -> Iterator[str]:
    """Modules that the model does not have cannot be recomputed. Source: `megatron/core/transformer/transformer_config.py`."""
    wanted = set(o.recompute)
    if "full" in wanted and len(wanted) > 1:
        yield f"recompute full stands alone, found {', '.join(o.recompute)}; set recompute=full or name modules only"
    if not d.experts and wanted & {"moe", "moe_act", "shared_experts"}:
        yield f"recompute {', '.join(sorted(wanted & {'moe', 'moe_act', 'shared_experts'}))} on a model without experts; change recompute"
    if d.shape is not None and d.shape.mla is None and "mla_up_proj" in wanted:
        yield "recompute mla_up_proj on a model without compressed attention; change recompute"
    if d.shape is not None and d.shape.linear is None and "gdn_norm_out" in wanted:
        yield "recompute gdn_norm_out on a model without linear attention; change recompute"
    if "shared_experts" in wanted and o.shared_overlap:
        yield "recompute shared_experts excludes overlap of shared experts; change recompute or set shared_overlap=false"
    if o.fp8 == "delayed" and wanted & {"moe_act", "layernorm"}:
        yield "recompute of moe_act or layernorm excludes delayed FP8 scaling; change recompute or set fp8=blockwise"


def graphs(d: Degrees, o: Options) -> Iterator[str]:
    """Graph modules that exclude each other or other features. Source: `megatron/core/transformer/transformer_config.py`."""
    modules, again = set(o.graphs), set(o.recompute)
    if not modules:
        return
    if "full_iteration" in modules:
        if len(modules) > 1:
            yield f"graphs full_iteration stands alone, found {', '.join(o.graphs)}; set graphs=full_iteration"
        return
    if "full" in again:
        yield "recompute full excludes graphs of modules; set graphs=full_iteration or change recompute"
    if "moe" in modules and not o.capacity:
        yield "graphs moe needs padding to capacity, since dropless routing changes shapes; set graphs=moe_router,moe_preprocess"
    if "moe" in modules and "moe_router" in modules:
        yield "graphs moe already holds moe_router; change graphs to one of them"
    if "moe_preprocess" in modules and "moe_router" not in modules:
        yield "graphs moe_preprocess needs moe_router; change graphs"
    if "moe_router" in modules and "moe" in again:
        yield "recompute moe excludes graphs of moe_router; change one of them"
    if not d.experts and modules & {"moe", "moe_router"}:
        yield f"graphs {', '.join(sorted(modules & {'moe', 'moe_router'}))} on a model without experts; change graphs"
    if "mlp" in modules and d.shape is not None and not d.shape.dense_layers:
        yield "graphs mlp on a model without dense layers; change graphs"
    if o.offload:
        yield "offload of layers excludes graphs of modules; set graphs=full_iteration or offload=false"


def offload(d: Degrees, o: Options) -> Iterator[str]:
    """Layer offload excludes pipelines and recompute. Source: `megatron/core/transformer/transformer_config.py`."""
    if o.offload and d.pp > 1:
        yield f"offload of layers needs pp 1, found pp {d.pp}; set pp to 1 or offload=false"
    if o.offload and o.recompute:
        yield "offload of layers excludes recompute; set one of them"


def overlap(d: Degrees, o: Options) -> Iterator[str]:
    """Overlap of expert communication. Source: `megatron/core/transformer/transformer_config.py`."""
    if o.delay_wgrad and not o.ep_overlap:
        yield "delay_wgrad needs ep_overlap; set ep_overlap=true"
    if not o.ep_overlap:
        return
    if d.ep == 1:
        yield "ep_overlap needs ep > 1; raise ep or set ep_overlap=false"
    if d.pp > 1 and d.vpp == 1:
        yield f"ep_overlap with pp {d.pp} needs vpp > 1; raise vpp"
    if o.dispatcher == "allgather":
        yield "ep_overlap needs dispatcher alltoall or flex, found allgather; change dispatcher"
    if {"full", "moe"} & set(o.recompute):
        yield f"ep_overlap excludes recompute {', '.join(sorted({'full', 'moe'} & set(o.recompute)))}; change recompute"
    if {"moe", "mlp"} & set(o.graphs):
        yield "ep_overlap excludes graphs of moe and mlp; change graphs"
    if o.shared_overlap:
        yield "ep_overlap excludes overlap of shared experts; set shared_overlap=false"
    if d.shape is not None and d.shape.mtp > 1:
        yield f"ep_overlap takes one MTP depth at most, the model has {d.shape.mtp}; set ep_overlap=false"


RULES: tuple[Rule, ...] = (
    labels,
    sequence_parallel,
    widths,
    experts_grid,
    pipeline,
    dispatcher,
    context,
    sharding,
    recompute,
    graphs,
    offload,
    overlap,
)
"""Every feature rule."""
