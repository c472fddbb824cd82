"""The rules of layouts, in one table: what the two grids need, and which features exclude each other.

The grids are the two ways to divide the same GPUs: TP x CP x DP x PP for everything but the experts, ETP x EP x EDP x PP for the experts.
A rule is a condition that must not hold, the settings that it speaks of, and its message. Callers have other names for the same settings,
so a sentence is a template: `{tp}` is the caller's name of a setting, `{set[sp=true]}` the caller's way to set it, `{c.tp}` a value of the
case.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from playbook.planner.options import FLEX, LABELS, Options
from playbook.planner.shapes import Shape


@dataclass(frozen=True)
class Case:
    """The layout that rules are asked about, with its options and the counts of its model. Not a case of the harness."""

    gpus: int = 1
    heads: int = 1
    kv_heads: int = 1
    layers: int = 1
    experts: int = 0
    seq_len: int = 1
    micro_batch_size: int = 1
    global_batch_size: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    shape: Shape | None = None
    """The whole model; None where only the counts are known."""
    o: Options = field(default_factory=Options)

    @property
    def attention(self) -> int:
        """Number of ranks that hold one copy of everything but the experts: TP x PP x CP."""
        return self.tp * self.pp * self.cp

    @property
    def expert(self) -> int:
        """Number of ranks that hold one copy of the experts: ETP x EP x PP."""
        return self.etp * self.ep * self.pp

    @property
    def fills(self) -> bool:
        """Whether both grids fill the GPUs."""
        return self.gpus % self.attention == 0 and self.gpus % self.expert == 0

    @property
    def dp(self) -> int:
        """Data-parallel degree of everything but the experts."""
        return self.gpus // self.attention

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts."""
        return self.gpus // self.expert

    @property
    def shards(self) -> int:
        """Number of ranks over which optimizer state can be sharded: DP x CP."""
        return self.gpus // (self.tp * self.pp)

    @property
    def chunks(self) -> int:
        """Pieces that the pipeline cuts the decoder into."""
        return self.pp * self.vpp

    @property
    def rows(self) -> int:
        """Samples in one micro-batch, over all data-parallel ranks."""
        return self.micro_batch_size * self.dp

    @property
    def held(self) -> int:
        """Number of key-value heads that a TP rank holds, at least 1."""
        return max(self.kv_heads // self.tp, 1)

    @property
    def apart(self) -> int:
        """Context-parallel ranks that share out heads."""
        return self.o.heads_apart(self.cp)

    @property
    def again(self) -> set[str]:
        """The modules that are recomputed, or `full`."""
        return set(self.o.recompute)

    @property
    def graphed(self) -> set[str]:
        """The modules that have CUDA graphs of their own; empty where one graph holds the whole iteration."""
        return set() if "full_iteration" in self.o.graphs else set(self.o.graphs)

    def unknown(self, key: str) -> list[str]:
        """Names given for an option that it does not take."""
        value = getattr(self.o, key)
        return sorted(({value} - {""} if isinstance(value, str) else set(value)) - LABELS[key])

    @property
    def model(self) -> Shape:
        """The model's widths; all are 0 where it is not known."""
        return self.shape or Shape(0, 0, 0, 0, "")

    @property
    def linear_heads(self) -> tuple[int, int]:
        """Key and value heads of linear attention, or groups and heads of Mamba."""
        linear, mamba = self.model.linear, self.model.mamba
        return (mamba.groups, mamba.heads) if mamba else (linear.key_heads, linear.value_heads) if linear else (0, 0)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step."""
        return self.global_batch_size // self.rows


@dataclass(frozen=True)
class Rule:
    """Settings that do not go together."""

    id: str
    holds: Callable[[Case], bool]
    """Whether a case breaks the rule."""
    keys: str
    """The settings that the rule speaks of, separated by spaces."""
    found: str | Callable[[Case], str]
    """The first half of the message: what was found and what was expected."""
    advice: str
    """The second half: what to do, as a template."""


@dataclass(frozen=True)
class Words:
    """A caller's names of settings, where they are not the planner's own, and assignments that are not `name=value`."""

    names: Mapping[str, str] = field(default_factory=dict)
    assignments: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, assignment: str) -> str:
        key, _, value = assignment.partition("=")
        return self.assignments.get(assignment) or f"{self.name(key)}={value}"

    def name(self, key: str) -> str:
        """The caller's name of a setting."""
        return self.names.get(key, key)

    def say(self, rule: Rule, case: Case) -> str:
        """What a rule says about a case: what was found, and what to do."""
        what = rule.found if isinstance(rule.found, str) else rule.found(case)
        return f"{what}; {rule.advice.format_map(_Names(case, self))}"


@dataclass(frozen=True)
class _Names:
    """What advice may speak of: `c`, the case; `set`, assignments; anything else is the name of a setting."""

    case: Case
    words: Words

    def __getitem__(self, key: str) -> Any:
        return {"c": self.case, "set": self.words}.get(key) or self.words.name(key)


OWN = Words()
"""The planner's own names: those of `playbook layout`."""


def broken(case: Case, rules: Iterable[Rule], *, words: Words = OWN, stated: Container[str] | None = None) -> list[str]:
    """The rules that a case breaks, each as found, expected and what to do.

    `stated` are the settings that are known; a rule that speaks of another one is left out.
    """
    stated_rules = rules if stated is None else (rule for rule in rules if all(key in stated for key in rule.keys.split()))
    return [words.say(rule, case) for rule in stated_rules if rule.holds(case)]


def _low(key: str) -> Rule:
    return Rule(f"low-{key}", lambda c: getattr(c, key) < 1, key, lambda c: f"{key} is {getattr(c, key)}", "set it to 1 or more")


# fmt: off
COUNTS = tuple(_low(key) for key in ("gpus", "tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size"))
"""Degrees and counts start at 1; no other rule makes sense where one does not."""

# Sources: Megatron-LM, `megatron/core/parallel_state.py` and `megatron/training/arguments.py` (the grids, the pipeline),
# `megatron/core/transformer/transformer_config.py` (heads), `megatron/core/transformer/pipeline_parallel_layer_layout.py` (a listed layout
# may
# give embedding and output layer a chunk of their own), `megatron/core/transformer/moe/moe_layer.py` (experts),
# `megatron/core/num_microbatches_calculator.py` and `megatron/core/pipeline_parallel/schedules.py` (the batch).
GRIDS = (
    Rule(
        "grid", lambda c: c.gpus % c.attention > 0, "gpus tp pp cp",
        lambda c: f"{c.gpus} ranks do not divide into tp {c.tp} x pp {c.pp} x cp {c.cp} = {c.attention}", "start a multiple of "
                                                                                                          "{c.attention} ranks",
    ),
    Rule(
        "expert-grid", lambda c: c.gpus % c.expert > 0, "gpus ep etp pp",
        lambda c: f"{c.gpus} ranks do not divide into ep {c.ep} x etp {c.etp} x pp {c.pp} = {c.expert}", "start a multiple of {c.expert} "
                                                                                                         "ranks",
    ),
)
"""Both grids fill the GPUs."""

LAYOUT = (
    *GRIDS,
    Rule(
        "heads", lambda c: c.heads % c.tp > 0, "heads tp",
        lambda c: f"{c.heads} attention heads do not divide over tp {c.tp}", "set {tp} to a divisor of {c.heads}",
    ),
    Rule(
        "kv-heads", lambda c: c.kv_heads % c.tp > 0 and c.tp % c.kv_heads > 0 and c.heads % c.tp == 0, "heads kv_heads tp",
        lambda c: f"{c.kv_heads} key-value heads and tp {c.tp}: one must be a multiple of the other", "change {tp}",
    ),
    Rule(
        "chunks-listed", lambda c: c.o.uneven is not False and c.chunks > c.layers + 2, "layers uneven",
        lambda c: f"{c.layers} layers, embedding and output do not fill pp {c.pp} x vpp {c.vpp} = {c.chunks} chunks", "change {pp}",
    ),
    Rule(
        "chunks", lambda c: c.o.uneven is False and c.layers % c.chunks > 0, "layers uneven",
        lambda c: f"{c.layers} layers do not divide into pp {c.pp} x vpp {c.vpp} = {c.chunks} chunks", "change {pp}",
    ),
    Rule("vpp-alone", lambda c: c.vpp > 1 and c.pp == 1, "vpp pp", lambda c: f"vpp {c.vpp} needs pp > 1", "set {vpp} to 1 or raise {pp}"),
    Rule("ep-dense", lambda c: c.ep > 1 and not c.experts, "experts ep", lambda c: f"ep {c.ep} on a model without experts",
    "set {ep} to 1"),
    Rule(
        "experts", lambda c: c.experts % c.ep > 0, "experts ep",
        lambda c: f"{c.experts} experts do not divide over ep {c.ep}", "set {ep} to a divisor of {c.experts}",
    ),
    Rule(
        "cp-chunks", lambda c: c.cp > 1 and c.seq_len % (2 * c.cp) > 0, "seq_len cp",
        lambda c: f"seq_len {c.seq_len} is not a multiple of 2 x cp = {2 * c.cp} (each rank takes two chunks)", "change {seq_len}",
    ),
    Rule(
        "batch", lambda c: c.gpus % c.attention == 0 and c.global_batch_size % c.rows > 0, "gbs mbs",
        lambda c: f"global batch {c.global_batch_size} is not a multiple of micro batch {c.micro_batch_size} x dp {c.dp} = {c.rows}",
        "set {gbs} to a multiple of {c.rows}",
    ),
    # The interleaved schedule takes micro-batches in groups of pp.
    Rule(
        "batch-interleaved",
        lambda c: c.gpus % c.attention == 0 and c.global_batch_size % c.rows == 0 and c.vpp > 1 and c.microbatches % c.pp > 0,
        "gbs mbs vpp",
        lambda c: f"vpp {c.vpp} needs micro-batches in a multiple of pp {c.pp}, and a step has {c.microbatches}", "change {gbs} or set "
                                                                                                                  "{vpp} to 1",
    ),
)
"""Degrees divide what they share out."""


def _unknown(key: str) -> Rule:
    return Rule(
        f"label-{key}", lambda c: bool(c.unknown(key)), key,
        lambda c: f"{key} {', '.join(c.unknown(key))} is not known", f"set {{{key}}} to one of {', '.join(sorted(LABELS[key]))}",
    )


# Source: Megatron-LM, `megatron/core/transformer/transformer_config.py`.
LABEL = (
    *(_unknown(key) for key in LABELS),
    Rule(
        "rank-order", lambda c: sorted(c.o.rank_order.split("-")) != ["cp", "dp", "ep", "pp", "tp"], "rank_order",
        lambda c: f"rank order {c.o.rank_order} does not name tp, cp, ep, dp and pp once each", "set it to tp-cp-ep-dp-pp",
    ),
)
"""Every name is one that megatron-core knows."""

# Sources: Megatron-LM, `megatron/core/tensor_parallel/layers.py` (`divide`), `megatron/core/transformer/transformer_config.py`.
WIDTHS = (
    Rule(
        "width-experts", lambda c: c.model.expert_ffn % c.etp > 0, "model etp",
        lambda c: f"an expert width of {c.model.expert_ffn} does not divide over etp {c.etp}", "set {etp} to a divisor of "
                                                                                               "{c.model.expert_ffn}",
    ),
    Rule(
        "width-mlp", lambda c: c.model.dense_layers > 0 and c.model.ffn % c.tp > 0, "model tp",
        lambda c: f"an MLP width of {c.model.ffn} does not divide over tp {c.tp}", "set {tp} to a divisor of {c.model.ffn}",
    ),
    Rule(
        "width-shared", lambda c: c.model.shared_ffn % c.tp > 0, "model tp",
        lambda c: f"a shared-expert width of {c.model.shared_ffn} does not divide over tp {c.tp}", "set {tp} to a divisor of "
                                                                                                   "{c.model.shared_ffn}",
    ),
    Rule(
        "width-linear",
        lambda c: c.linear_heads[0] % (c.tp * c.cp) > 0 or c.linear_heads[1] % (c.tp * c.cp) > 0,
        "model tp cp",
        lambda c: f"{c.linear_heads[0]} key and {c.linear_heads[1]} value heads of linear attention do not divide over tp x cp = "
                  f"{c.tp * c.cp}",
        "change {tp} or {cp}",
    ),
    Rule(
        "bias-etp", lambda c: c.model.expert_bias and c.etp > 1, "model etp",
        lambda c: f"experts with biases are not split, found etp {c.etp}", "set {etp} to 1",
    ),
)
"""MLPs split their width over TP, experts over ETP, linear attention its heads over TP x CP."""

# Sources: Megatron-LM, `megatron/core/tensor_parallel/mappings.py`, `megatron/core/transformer/moe/moe_layer.py`,
# `megatron/core/transformer/moe/token_dispatcher.py`, `megatron/core/transformer/transformer_config.py`, `megatron/core/parallel_state.py`,
# `megatron/training/arguments.py`, `megatron/core/optimizer/optimizer_config.py`; Transformer Engine,
# `transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py` (heads of keys and values); DeepSpeed 0.19.6,
# `runtime/sequence_parallel/ulysses_sp.py` (repeated ones).
FEATURES = (
    Rule(
        "sp-experts", lambda c: c.tp > 1 and c.experts > 0 and c.o.sp is False, "tp sp experts",
        lambda c: f"tp {c.tp} with experts trains only with sequence parallelism", "set {set[sp=true]} or {tp} to 1",
    ),
    Rule(
        "sp-length", lambda c: c.tp > 1 and bool(c.o.sp) and c.seq_len % (c.tp * c.cp) > 0, "tp cp sp seq_len",
        lambda c: f"seq_len {c.seq_len} is not a multiple of tp {c.tp} x cp {c.cp} = {c.tp * c.cp} (sequence parallelism splits "
                  f"it)", "change {seq_len}",
    ),
    *WIDTHS,
    Rule(
        "rank-order-pp", lambda c: not c.o.rank_order.endswith("pp") and c.pp > 1 and c.fills and c.dp != c.edp, "rank_order pp",
        lambda c: f"rank order {c.o.rank_order} with pp {c.pp} needs edp = dp, found edp {c.edp} and dp {c.dp}", "set an order that ends "
                                                                                                                 "in pp",
    ),
    Rule(
        "vpp-two-stages", lambda c: c.vpp > 1 and c.pp == 2 and not c.o.overlap_p2p, "vpp pp overlap_p2p",
        lambda c: f"vpp {c.vpp} on pp 2 needs overlap of its transfers", "set {set[overlap_p2p=true]} or raise {pp}",
    ),
    Rule(
        "flex-alone", lambda c: c.o.dispatcher in FLEX and c.etp * c.ep == 1, "dispatcher ep etp",
        lambda c: f"dispatcher {c.o.dispatcher} needs etp x ep > 1", "raise {ep} or set {set[dispatcher=alltoall]}",
    ),
    Rule(
        "deepep-capacity", lambda c: c.o.dispatcher == "deepep" and c.o.capacity, "dispatcher capacity",
        "dispatcher deepep excludes padding to capacity", "set {set[capacity=false]} or {set[dispatcher=alltoall]}",
    ),
    Rule(
        "allgather-shared",
        lambda c: c.o.dispatcher == "allgather" and c.o.shared_overlap and (c.shape is None or c.shape.shared_ffn > 0),
        "dispatcher shared_overlap",
        "overlap of shared experts runs beside the dispatcher alltoall, found allgather",
        "set {set[dispatcher=alltoall]} or {set[shared_overlap=false]}",
    ),
    Rule(
        "dispatcher-dense", lambda c: bool(c.o.dispatcher) and not c.experts, "dispatcher experts",
        lambda c: f"dispatcher {c.o.dispatcher} on a model without experts", "change model or leave {dispatcher} out",
    ),
    # Ulysses-style CP shards heads, those of keys and values too; trainers on torch repeat these where they are fewer.
    Rule(
        "a2a-heads", lambda c: c.o.cp_comm.startswith("a2a") and c.heads % (c.tp * c.apart) > 0, "cp_comm heads tp cp",
        lambda c: f"{c.heads} heads do not divide over tp {c.tp} x cp {c.apart} for cp_comm {c.o.cp_comm}", "set {set[cp_comm=p2p]} or "
                                                                                                            "change {cp}",
    ),
    Rule(
        "a2a-kv-heads",
        lambda c: c.heads % (c.tp * c.apart) == 0 and c.held % c.apart > 0 and (c.o.backend != "torch" or c.apart % c.held > 0),
        "cp_comm kv_heads tp cp",
        lambda c: f"the {c.held} key-value heads of a tp rank do not divide over cp {c.apart} for cp_comm {c.o.cp_comm}",
        "set {set[cp_comm=p2p]} or change {cp}",
    ),
    Rule(
        "cp-levels", lambda c: c.o.cp_comm == "a2a+p2p" and not c.o.cp_sizes, "cp_comm cp_sizes",
        "cp_comm a2a+p2p needs the sizes of its two levels", "set {cp_sizes}, such as {set[cp_sizes=2,4]}",
    ),
    Rule(
        "cp-sizes", lambda c: bool(c.o.cp_sizes) and prod(c.o.cp_sizes) != c.cp, "cp_sizes cp",
        lambda c: f"cp_sizes {'x'.join(map(str, c.o.cp_sizes))} = {prod(c.o.cp_sizes)} is not cp {c.cp}", "change {cp_sizes}",
    ),
    # Instances of the optimizer divide both grids, the experts' of a dense model too.
    Rule(
        "instances", lambda c: c.shards % c.o.optimizer_instances > 0, "gpus tp pp optimizer_instances",
        lambda c: f"dp x cp = {c.shards} does not divide into {c.o.optimizer_instances} optimizer instances",
        "change {optimizer_instances}",
    ),
    Rule(
        "instances-experts",
        lambda c: c.shards % c.o.optimizer_instances == 0 and c.gpus % c.expert == 0 and c.edp % c.o.optimizer_instances > 0,
        "gpus ep etp pp optimizer_instances",
        lambda c: f"edp {c.edp} does not divide into {c.o.optimizer_instances} optimizer instances",
        "set {set[optimizer_instances=1]}, or change {ep} or {etp}",
    ),
    Rule(
        "fsdp2-degrees", lambda c: c.o.sharding == "fsdp2" and c.o.backend != "torch" and (c.pp > 1 or c.ep > 1), "sharding pp ep",
        lambda c: f"torch FSDP2 in megatron needs pp 1 and ep 1, found pp {c.pp} and ep {c.ep}",
        "with {pp} 1 set {set[sharding=fsdp]}, or change the degrees",
    ),
    Rule(
        "fsdp-stages", lambda c: c.o.sharding == "fsdp" and c.o.backend != "torch" and c.pp > 1, "sharding pp",
        lambda c: f"Megatron-FSDP lays its mesh over all ranks and has no stages in it, found pp {c.pp}",
        "set {pp} to 1 or {set[sharding=optimizer]}",
    ),
    Rule(
        "precision-aware", lambda c: c.o.precision_aware and c.o.sharding not in ("optimizer", "fsdp"), "precision_aware sharding",
        lambda c: f"the precision-aware optimizer needs the distributed optimizer, found sharding {c.o.sharding}",
        "set {set[sharding=optimizer]}",
    ),
)
"""What the chosen features ask of the degrees and of the model."""
# fmt: on
