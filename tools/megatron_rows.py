"""The rows of the tables about the megatron backend: which switch, on how many GPUs, and what has to be seen for it to have run.

A table is a set of short runs of one model; the row `against` is the run that the others are compared with. Each row runs once: a
screening, and no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
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
}  # fmt: skip
"""What all rows of a table share, on top of the configuration file."""

GPUS = {"one": 1, "two": 2, "four": 4, "cp": 4}

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


def _one() -> list[Row]:
    """Rows of one GPU: kernels, CUDA graphs, recompute and FP8."""

    def row(name: str, group: str, *proof: Rule, **settings: Any) -> Row:
        return Row("one", name, group, {k.replace("__", "."): v for k, v in settings.items()}, proof)

    norms = Rule(kernel="rmsnorm.*fwd", count="4.5 * layers * microbatches", op="<=")
    normed_again = Rule(kernel="rmsnorm.*fwd", count="4.9 * layers * microbatches", op=">=")
    attended_again = Rule(kernel="sdpa.*fprop|flash_fwd|fmha.*fwd", count="2 * layers * microbatches", op=">=")
    whole = {**_CUBLAS, **_megatron(cuda_graph_impl="full_iteration"), "moe.capacity_factor": 1.25}
    copies = Rule(counter="copies_to_host", count="layers - 1", op=">=")
    moments = {"optimizer.moments_dtype": "bf16"}
    return [
        row("plain", "plain", FUSED_ATTENTION, NO_GRAPHS, norms, ONE_KERNEL, Rule(kernel="fp8|e4m3|e5m2|block_scaled", count=0)),
        *(
            row(" ".join(parts), "CUDA graphs (Transformer Engine)", GRAPHS, train__cuda_graphs=parts)
            for parts in (
                ["moe_router"],
                ["moe_router", "moe_preprocess"],
                ["attn"],
                ["attn", "moe_router"],
                ["attn", "moe_router", "moe_preprocess"],
            )
        ),
        Row("one", "a product for each (cuBLAS)", "experts", dict(_CUBLAS), (NO_KERNEL,)),
        Row(
            "one",
            "full iteration, capacity factor 1.25",
            "CUDA graphs (full iteration)",
            whole,
            (Rule(counter="graph_launches", count=1, op=">="),),
        ),
        Row("one", "layernorm", "recompute", _recompute("layernorm"), (normed_again,)),
        Row("one", "moe_act", "recompute", _recompute("moe_act")),
        Row("one", "core_attn", "recompute", _recompute("core_attn"), (attended_again,)),
        Row("one", "moe", "recompute", _recompute("moe")),
        Row("one", "layernorm moe_act", "recompute", _recompute("layernorm", "moe_act")),
        row("full, each layer", "recompute", train__recompute="full"),
        row("full, first 2 layers", "recompute", train__recompute="full", megatron__recompute_method="block", megatron__recompute_layers=2),
        Row("one", "blockwise", "FP8", _fp8("blockwise"), (Rule(kernel="block_scaled|blockwise", count="layers", op=">="),)),
        Row("one", "tensorwise", "FP8", _fp8("tensorwise"), (Rule(kernel="amax|cast_transpose|quantize", count="layers", op=">="),)),
        # It finds all scales of a pass at once.
        Row("one", "delayed", "FP8", _fp8("delayed"), (Rule(kernel="delayed_scaling|amax_and_scale", count=2, op=">="),)),
        Row("one", "delayed, weights in FP8", "FP8", _fp8("delayed", fp8_param=True)),
        Row("one", "mxfp8", "FP8", _fp8("mxfp8")),
        Row("one", "nvfp4", "FP8", _fp8("nvfp4")),
        Row("one", "moments BF16", "optimizer", {**_megatron(precision_aware_optimizer=True), **moments}),
        Row("one", "gradients BF16", "optimizer", _megatron(grad_reduce_dtype="bf16")),
        Row(
            "one",
            "moments and gradients BF16",
            "optimizer",
            {**_megatron(precision_aware_optimizer=True, grad_reduce_dtype="bf16"), **moments},
        ),
        *(
            Row("one", f"activations: {' '.join(names)}", "offload", _megatron(offload_modules=names), (copies,))
            for names in (["core_attn"], ["moe_act"], ["expert_fc1", "moe_act"])
        ),
        row("activations: all of each layer", "offload", copies, offload__activations=True),
        Row("one", "half of the optimizer", "offload", _megatron(optimizer_offload_fraction=0.5)),
        row("whole optimizer", "offload", offload__optimizer=True),
        row("flash", "attention", Rule(kernel="flash", count="layers", op=">="), train__attention="flash"),
        row("cudnn", "attention", Rule(kernel="cudnn.*sdpa", count="layers", op=">="), train__attention="cudnn"),
        row("plain", "attention", Rule(kernel="sdpa|flash_fwd|fmha", count=0), train__attention="plain"),
        Row("one", "local", "kernels", {**_CUBLAS, **_megatron(kernels="local")}),
    ]


def _two() -> list[Row]:
    """Rows of two GPUs: dispatchers, overlap, data parallelism and layouts."""
    a2a = Rule(collective="all_to_all", group="ep", count="4 * moe_layers * microbatches", op=">=")
    no_a2a = Rule(collective="all_to_all", group="ep", count=0)
    gathers = Rule(collective="reduce_scatter", group="etp_ep", count="moe_layers * microbatches", op=">=")
    deep = Rule(kernel="deep_ep.*dispatch", count="moe_layers * microbatches", op=">=")
    hybrid = Rule(kernel="hybrid_ep.*dispatch", count="moe_layers * microbatches", op=">=")
    regathers = Rule(collective="all_gather", phase="backward", count="layers * microbatches", op=">=")
    gathered = Rule(collective="all_gather", group="tp", count="2 * layers * microbatches", op=">=")
    sends = Rule(collective="send", group="pp")
    exchange = {"group": "cp", "count": "layers * microbatches", "op": ">="}
    fsdp = _megatron(data_parallel="megatron_fsdp")
    tp = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.etp": 1}
    pp = {"parallel.pp": 2, "parallel.ep": 1}
    return [
        Row("two", "plain", "plain", {}, (a2a,)),
        Row("two", "allgather", "dispatcher", {"moe.dispatcher": "allgather"}, (gathers, no_a2a)),
        Row("two", "deepep", "dispatcher", {"moe.dispatcher": "deepep"}, (deep, no_a2a)),
        Row("two", "hybridep", "dispatcher", {"moe.dispatcher": "hybridep"}, (hybrid, no_a2a)),
        Row("two", "no overlap of gradient reduction", "overlap", _megatron(overlap_grad_reduce=False, overlap_param_gather=False)),
        Row("two", "no overlap of parameter gather", "overlap", _megatron(overlap_param_gather=False)),
        Row("two", "expert parallelism", "overlap", _megatron(overlap_expert_parallel=True), (a2a,)),
        Row("two", "ddp", "data parallelism", _megatron(data_parallel="ddp"), (Rule(collective="reduce_scatter", count=0),)),
        Row("two", "distributed_optimizer, EP 1", "data parallelism", {"parallel.ep": 1}, (Rule(collective="reduce_scatter"),)),
        *(
            Row(
                "two",
                f"megatron_fsdp {strategy}, EP 1",
                "data parallelism",
                {**fsdp, **_megatron(sharding_strategy=strategy), "parallel.ep": 1},
                shown,
            )
            for strategy, shown in {"optim": (), "optim_grads": (), "optim_grads_params": (regathers,)}.items()
        ),
        Row("two", "megatron_fsdp optim_grads_params, EP 2", "data parallelism", fsdp, (regathers, a2a)),
        Row("two", "fsdp2, EP 1", "data parallelism", {**_megatron(data_parallel="fsdp2"), "parallel.ep": 1}),
        Row("two", "TP 2 with SP, EP 2", "layout", tp, (gathered,)),
        Row("two", "TP 2 with SP and its collectives beside products", "overlap", {**tp, **_megatron(tp_comm_overlap=True)}),
        Row("two", "PP 2", "layout", pp, (sends,)),
        Row("two", "PP 2, VPP 2", "layout", {**pp, "parallel.vpp": 2}, (sends,)),
        Row("two", "PP 2, uneven (3, 1)", "layout", {**pp, "parallel.pipeline_layout": [3, 1]}, (sends,)),
        *(
            Row(
                "two",
                f"CP 2 {kind}",
                "layout",
                {"parallel.cp": 2, "megatron.cp_comm_type": kind},
                (Rule.model_validate({**exchange, "collective": collective}),),
            )
            for kind, collective in (("p2p", "send"), ("all_gather", "all_gather"), ("a2a", "all_to_all"))
        ),
    ]


def _four() -> list[Row]:
    folded = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.cp": 2, "parallel.ep": 4, "parallel.etp": 1}
    a2a = Rule(collective="all_to_all", group="ep")
    nested = {"parallel.cp": 4, "megatron.cp_comm_type": "a2a+p2p", "megatron.cp_sizes": [2, 2]}
    return [
        Row("four", "plain", "plain", {}, (Rule(collective="all_to_all", group="ep", count="4 * moe_layers * microbatches", op=">="),)),
        Row("four", "TP 2 CP 2 with EP 4 ETP 1", "folding", folded, (a2a,)),
        Row("four", "TP 2 with EP 4 ETP 1", "folding", {**folded, "parallel.cp": 1}, (a2a,)),
        Row("four", "EP 2 ETP 2", "folding", {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.ep": 2, "parallel.etp": 2}),
        Row("four", "CP 4 a2a+p2p (2 x 2)", "layout", nested),
    ]


def _cp() -> Iterator[Row]:
    """Every length with every CP, as long as a rank gets at most 65,536 tokens of a row."""
    for length in (8192, 32768, 65536, 131072):
        for cp in (n for n in (1, 2, 4) if length <= 65536 * n):
            settings = {"model.num_layers": 24, "data.seq_len": length, "parallel.cp": cp, "train.global_batch_size": GPUS["cp"] // cp}
            ring = (Rule(collective="send", group="cp", count="layers * microbatches", op=">="),) if cp > 1 else ()
            yield Row("cp", f"{length // 1024}K CP {cp}", f"{length // 1024}K", settings, ring)


def rows() -> list[Row]:
    """All of them, in the order in which they run."""
    return [*_one(), *_two(), *_four(), *_cp()]
