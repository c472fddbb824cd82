"""The rows of the tables about the megatron backend: which switch, on how many GPUs, and what has to be seen for it to have run.

A table is a set of short runs of one model; the row `against` is the run that the others are compared with. Each row runs once: a
screening, and no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from playbook.records.case import Rule

CONFIG = "trainer/configs/qwen3_30b_a3b_24l.yaml"

# Random tokens in rows of one document: every run gets the same load on its experts, and graphs may hold attention.
_COMMON: dict[str, Any] = {"backend": "megatron", "data.kind": "mock", "data.pack": False, "train.log_every": 3}
_SHORT = {"model.num_layers": 4, "train.steps": 10, "train.warmup_steps": 4}

_LONG: dict[str, Any] = {
    "train.micro_batch_size": 1,
    "train.steps": 6,
    "train.warmup_steps": 2,
    "train.recompute": "selective",
    "train.recompute_modules": ["layernorm", "moe_act"],
    "megatron.precision_aware_optimizer": True,
    "megatron.grad_reduce_dtype": "bf16",
    "optimizer.moments_dtype": "bf16",
}

# As many experts on each rank as 128 over four, in one kernel, and long micro-batches: a product for each expert and little work in it
# would time the host.
_CUBLAS = {"megatron.grouped_gemm": "cublas"}
_EXPERTS = {"megatron.grouped_gemm": "cutlass"}
TABLES: dict[str, dict[str, Any]] = {
    "one": {
        **_COMMON, **_EXPERTS, **_SHORT, "model.num_experts": 32, "parallel.ep": 1,
        "train.micro_batch_size": 8, "train.global_batch_size": 8
    },
    "two": {
        **_COMMON, **_EXPERTS, **_SHORT, "model.num_experts": 64, "parallel.ep": 2,
        "train.micro_batch_size": 4, "train.global_batch_size": 16
    },
    "four": {**_COMMON, **_EXPERTS, **_SHORT, "parallel.ep": 4, "train.micro_batch_size": 4, "train.global_batch_size": 16},
    "cp": {**_COMMON, **_EXPERTS, **_LONG, "parallel.ep": 4},
    "cp2": {**_COMMON, **_EXPERTS, **_LONG, "parallel.ep": 2},
}  # fmt: skip
"""What all rows of a table share, on top of the configuration file."""

GPUS = {"one": 1, "two": 2, "four": 4, "cp": 4, "cp2": 2}

FUSED_ATTENTION = Rule(kernel="sdpa|flash|fmha|fused_attn", count="layers", op=">=")
GRAPHS = Rule(counter="graph_launches", count="layers", op=">=")
NO_GRAPHS = Rule(counter="graph_launches", count=0)
ONE_KERNEL = Rule(kernel="cutlass.*device_kernel", count="2 * moe_layers * microbatches", op=">=")
NO_KERNEL = Rule(kernel="cutlass.*device_kernel", count=0)


@dataclass(frozen=True)
class Row:
    """One switch, or a set of them."""

    table: str
    name: str
    group: str
    set: dict[str, Any] = field(default_factory=dict)
    proof: tuple[Rule, ...] = ()
    """What the receipt of the run must show; empty where a figure (peak memory) or a refusal is what shows it."""

    @property
    def gpus(self) -> int:
        """GPUs that it takes."""
        return GPUS[self.table]

    @property
    def can_fork(self) -> bool:
        """Whether its ranks may be forks: Transformer Engine reads the variable of fine-grained offload when it is imported."""
        return not any("offload_modules" in key or key == "offload.activations" for key in self.set)

    @property
    def overrides(self) -> dict[str, Any]:
        """All of its settings, on top of the file."""
        return {**TABLES[self.table], **self.set}


def _recompute(*modules: str) -> dict[str, Any]:
    return {"train.recompute": "selective", "train.recompute_modules": list(modules)}


def _megatron(**fields: Any) -> dict[str, Any]:
    return {f"megatron.{k}": v for k, v in fields.items()}


def _fp8(recipe: str, **fields: Any) -> dict[str, Any]:
    return {**_CUBLAS, "precision.fp8": recipe, **_megatron(**fields)}  # the one kernel takes 16-bit numbers


def _one() -> Iterator[Row]:
    """Rows of one GPU: kernels, CUDA graphs, recompute and FP8."""

    def row(name: str, group: str, *proof: Rule, **settings: Any) -> Row:
        return Row("one", name, group, {k.replace("__", "."): v for k, v in settings.items()}, proof)

    norms = Rule(kernel="rmsnorm.*fwd", count="4.5 * layers * microbatches", op="<=")
    yield row("plain", "plain", FUSED_ATTENTION, NO_GRAPHS, norms, ONE_KERNEL, Rule(kernel="fp8|e4m3|e5m2|block_scaled", count=0))
    for parts in (
        ["moe_router"],
        ["moe_router", "moe_preprocess"],
        ["attn"],
        ["attn", "moe_router"],
        ["attn", "moe_router", "moe_preprocess"],
    ):
        yield row(" ".join(parts), "CUDA graphs (Transformer Engine)", GRAPHS, train__cuda_graphs=parts)
    yield Row("one", "a product for each (cuBLAS)", "experts", dict(_CUBLAS), (NO_KERNEL,))
    whole = {**_CUBLAS, **_megatron(cuda_graph_impl="full_iteration"), "moe.capacity_factor": 1.25}
    launched = (Rule(counter="graph_launches", count=1, op=">="),)
    yield Row("one", "full iteration, capacity factor 1.25", "CUDA graphs (full iteration)", whole, launched)
    recomputed = {
        "layernorm": [Rule(kernel="rmsnorm.*fwd", count="4.9 * layers * microbatches", op=">=")],
        "core_attn": [Rule(kernel="sdpa.*fprop|flash_fwd|fmha.*fwd", count="2 * layers * microbatches", op=">=")],
    }
    for module in ("layernorm", "moe_act", "core_attn", "moe"):
        yield Row("one", module, "recompute", _recompute(module), tuple(recomputed.get(module, [])))
    yield Row("one", "layernorm moe_act", "recompute", _recompute("layernorm", "moe_act"))
    yield row("full, each layer", "recompute", train__recompute="full")
    yield row(
        "full, first 2 layers", "recompute", train__recompute="full", megatron__recompute_method="block", megatron__recompute_layers=2
    )
    casts = {
        "blockwise": "block_scaled|blockwise",
        "tensorwise": "amax|cast_transpose|quantize",
        "delayed": "delayed_scaling|amax_and_scale",
    }
    for recipe, kernel in casts.items():
        # Delayed scaling finds all scales of a pass at once.
        cast = Rule(kernel=kernel, count=2 if recipe == "delayed" else "layers", op=">=")
        yield Row("one", recipe, "FP8", _fp8(recipe), (cast,))
    yield Row("one", "delayed, weights in FP8", "FP8", _fp8("delayed", fp8_param=True))
    yield Row("one", "mxfp8", "FP8", _fp8("mxfp8"))
    yield Row("one", "nvfp4", "FP8", _fp8("nvfp4"))
    yield Row("one", "moments BF16", "optimizer", {**_megatron(precision_aware_optimizer=True), "optimizer.moments_dtype": "bf16"})
    yield Row("one", "gradients BF16", "optimizer", _megatron(grad_reduce_dtype="bf16"))
    both = {**_megatron(precision_aware_optimizer=True, grad_reduce_dtype="bf16"), "optimizer.moments_dtype": "bf16"}
    yield Row("one", "moments and gradients BF16", "optimizer", both)
    for names in (["core_attn"], ["moe_act"], ["expert_fc1", "moe_act"]):
        yield Row(
            "one",
            "activations: " + " ".join(names),
            "offload",
            _megatron(offload_modules=names),
            (Rule(counter="copies_to_host", count="layers - 1", op=">="),),
        )
    yield row(
        "activations: all of each layer", "offload", Rule(counter="copies_to_host", count="layers - 1", op=">="), offload__activations=True
    )
    yield Row("one", "half of the optimizer", "offload", _megatron(optimizer_offload_fraction=0.5))
    yield row("whole optimizer", "offload", offload__optimizer=True)
    yield row("flash", "attention", Rule(kernel="flash", count="layers", op=">="), train__attention="flash")
    yield row("cudnn", "attention", Rule(kernel="cudnn.*sdpa", count="layers", op=">="), train__attention="cudnn")
    yield row("plain", "attention", Rule(kernel="sdpa|flash_fwd|fmha", count=0), train__attention="plain")
    yield Row("one", "local", "kernels", {**_CUBLAS, **_megatron(kernels="local")})


def _two() -> Iterator[Row]:
    """Rows of two GPUs: dispatchers, overlap, data parallelism and layouts."""
    a2a = Rule(collective="all_to_all", group="ep", count="4 * moe_layers * microbatches", op=">=")
    no_a2a = Rule(collective="all_to_all", group="ep", count=0)
    yield Row("two", "plain", "plain", {}, (a2a,))
    gathers = Rule(collective="reduce_scatter", group="etp_ep", count="moe_layers * microbatches", op=">=")
    yield Row("two", "allgather", "dispatcher", {"moe.dispatcher": "allgather"}, (gathers, no_a2a))
    deep = Rule(kernel="deep_ep.*dispatch", count="moe_layers * microbatches", op=">=")
    yield Row("two", "deepep", "dispatcher", {"moe.dispatcher": "deepep"}, (deep, no_a2a))
    hybrid = Rule(kernel="hybrid_ep.*dispatch", count="moe_layers * microbatches", op=">=")
    yield Row("two", "hybridep", "dispatcher", {"moe.dispatcher": "hybridep"}, (hybrid, no_a2a))
    yield Row("two", "no overlap of gradient reduction", "overlap", _megatron(overlap_grad_reduce=False, overlap_param_gather=False))
    yield Row("two", "no overlap of parameter gather", "overlap", _megatron(overlap_param_gather=False))
    yield Row("two", "expert parallelism", "overlap", _megatron(overlap_expert_parallel=True), (a2a,))
    yield Row("two", "ddp", "data parallelism", _megatron(data_parallel="ddp"), (Rule(collective="reduce_scatter", count=0),))
    yield Row("two", "distributed_optimizer, EP 1", "data parallelism", {"parallel.ep": 1}, (Rule(collective="reduce_scatter"),))
    regathers = Rule(collective="all_gather", phase="backward", count="layers * microbatches", op=">=")
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        fsdp = _megatron(data_parallel="megatron_fsdp", sharding_strategy=strategy)
        shown = (regathers,) if strategy == "optim_grads_params" else ()
        yield Row("two", f"megatron_fsdp {strategy}, EP 1", "data parallelism", {**fsdp, "parallel.ep": 1}, shown)
    yield Row(
        "two", "megatron_fsdp optim_grads_params, EP 2", "data parallelism", _megatron(data_parallel="megatron_fsdp"), (regathers, a2a)
    )
    yield Row("two", "fsdp2, EP 1", "data parallelism", {**_megatron(data_parallel="fsdp2"), "parallel.ep": 1})
    tp = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.etp": 1}
    gathered = Rule(collective="all_gather", group="tp", count="2 * layers * microbatches", op=">=")
    yield Row("two", "TP 2 with SP, EP 2", "layout", tp, (gathered,))
    yield Row("two", "TP 2 with SP and its collectives beside products", "overlap", {**tp, **_megatron(tp_comm_overlap=True)})
    pp = {"parallel.pp": 2, "parallel.ep": 1}
    sends = Rule(collective="send", group="pp")
    yield Row("two", "PP 2", "layout", pp, (sends,))
    yield Row("two", "PP 2, VPP 2", "layout", {**pp, "parallel.vpp": 2}, (sends,))
    yield Row("two", "PP 2, uneven (3, 1)", "layout", {**pp, "parallel.pipeline_layout": [3, 1]}, (sends,))
    for kind, collective in (("p2p", "send"), ("all_gather", "all_gather"), ("a2a", "all_to_all")):
        exchange = Rule.model_validate({"collective": collective, "group": "cp", "count": "layers * microbatches", "op": ">="})
        yield Row("two", f"CP 2 {kind}", "layout", {"parallel.cp": 2, "megatron.cp_comm_type": kind}, (exchange,))


def _four() -> Iterator[Row]:
    yield Row("four", "plain", "plain", {}, (Rule(collective="all_to_all", group="ep", count="4 * moe_layers * microbatches", op=">="),))
    folded = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.cp": 2, "parallel.ep": 4, "parallel.etp": 1}
    yield Row("four", "TP 2 CP 2 with EP 4 ETP 1", "folding", folded, (Rule(collective="all_to_all", group="ep"),))
    yield Row("four", "TP 2 with EP 4 ETP 1", "folding", {**folded, "parallel.cp": 1}, (Rule(collective="all_to_all", group="ep"),))
    yield Row("four", "EP 2 ETP 2", "folding", {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.ep": 2, "parallel.etp": 2})
    nested = {"parallel.cp": 4, "megatron.cp_comm_type": "a2a+p2p", "megatron.cp_sizes": [2, 2]}
    yield Row("four", "CP 4 a2a+p2p (2 x 2)", "layout", nested)


def _cp(table: str, layers: int, lengths: Sequence[int], most: int) -> Iterator[Row]:
    """Every length with every CP of a table, as long as a rank gets at most `most` tokens of a row."""
    gpus = GPUS[table]
    for length in lengths:
        for cp in (n for n in (1, 2, 4) if n <= gpus and length <= most * n):
            settings = {"model.num_layers": layers, "data.seq_len": length, "parallel.cp": cp, "train.global_batch_size": gpus // cp}
            ring = (Rule(collective="send", group="cp", count="layers * microbatches", op=">="),) if cp > 1 else ()
            yield Row(table, f"{length // 1024}K CP {cp}", f"{length // 1024}K", settings, ring)


def rows() -> list[Row]:
    """All of them, in the order in which they run."""
    # Half as deep on half as many GPUs, so that a rank holds as much of the experts.
    return [
        *_one(),
        *_two(),
        *_four(),
        *_cp("cp", 24, (8192, 32768, 65536, 131072), 65536),
        *_cp("cp2", 12, (8192, 32768, 65536, 98304), 98304),
    ]
