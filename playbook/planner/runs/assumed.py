"""Plans of a run whose table leaves things open: what is unknown is assumed or tried in several ways, and said."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook.planner.choice import space
from playbook.planner.models import file_of, from_file, named, nearest, published
from playbook.planner.options import (
    ATTENTION,
    BACKENDS,
    BASES,
    DEEPSPEED,
    DISPATCHERS,
    FRAMEWORKS,
    HYBRID,
    NODE,
    SHARDING_WORDS,
    Framework,
    Options,
    column,
)
from playbook.planner.plan import LOSSES, Plan, cut
from playbook.planner.runs import spelling
from playbook.planner.runs.table import Run
from playbook.planner.shapes import DEEPEST, Shape
from playbook.planner.time.cluster import Cluster, cluster

_INTERLEAVED = 8
"""Micro-batches for each stage where the batch is unknown and the pipeline interleaves: nobody does so for a short one."""
_NATURAL = 1.2
"""Tokens of the fullest rank over the mean, where routing is not forced to be even: early in training 1.2 to 2."""
_LAYOUT = ("mbs", "gbs", "tp", "pp", "ep", "dp", "fsdp")
_BLACKWELL = ("b200", "b300", "gb200", "gb300")
_VOCAB = 51200
"""Words of a GPT of stated sizes: those of GPT-2, padded."""
_PRECISIONS = {
    "bf16": "",
    "fp16": "",
    "mxfp8": "mxfp8",
    "nvfp4": "mxfp8",
    "fp8": "tensorwise",
    "fp8_cs": "tensorwise",
    "fp8_ds": "delayed",
    "fp8_blockwise": "blockwise",
    "fp8_sc": "blockwise",
}
_STANDS_FOR = {"nvfp4": "mxfp8", "fp16": "bf16"}
_UNMODELLED = {"glm_5": "sparse attention: the time of its indexer is not modelled"}
_FROZEN = ("peft", "lora")
_RANK = 32
"""Of adapters where a table does not say it: their share of the FLOPs is small. Source: Megatron Bridge, `peft/lora.py`."""
_HYBRID_EP_SINCE = "2025-11"
"""Megatron-LM, pull request 2176, and Megatron Bridge, 1367."""
_OVERLAP_SINCE = "2025-09"
"""Overlap of expert communication: Megatron Core 0.14, of which the containers of 25.09 are the first."""
_LOSS_COMPILED_SINCE = "2025-02"
"""torchtitan, pull requests 755 and 859."""
_MEGATRON_LM = "megatron"
"""A table's word for Megatron-LM, whose loss is fused only where a run asks for it; recipes of Megatron Bridge ask, and a table that names
no trainer is taken as theirs. Source: Megatron-LM, `megatron/core/model_parallel_config.py` (`cross_entropy_loss_fusion`)."""
_SHARDING = {
    "": "",
    "0": "optimizer",
    "none": "none",
    "optimizer": "optimizer",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "hsdp": "hsdp",
    "on": "fsdp",
    "fsdp": "fsdp2",
}


@dataclass(frozen=True)
class Assumed:
    """A run as plans that are equally likely, the cluster, and what was taken for granted; `guesses` counts what no other plan tries
    otherwise.
    """

    plans: tuple[Plan, ...]
    cluster: Cluster
    words: tuple[str, ...]
    guesses: int


class Unexpressed(Exception):
    """A run that no plan stands for; the message says why."""


def assumed(run: Run, on: Cluster | None = None) -> Assumed:
    """The plans that a run may have been; `on` is the machine of runs that name its kind of GPU, or none.

    Raises:
        ConfigError: a cell is not what its column holds.
        Unexpressed: something that a plan has no word for.
    """
    words: list[str] = []
    tried: list[str] = []
    machine = _cluster(run, on)
    shape = _shape(run)
    task = run.word("task")
    if is_adapters(task) and not run.word("lora"):
        raise Unexpressed("adapters of unknown rank; state it in a column lora, such as 16")
    if task.startswith("sft") and not is_adapters(task):
        raise Unexpressed("fine-tuning: the table has no lengths of samples, which decide attention and padding")
    if "VL" in run.word("model") or "multimodal" in task:
        raise Unexpressed("images: the table has no sizes of images")
    if not any(run.word(c) for c in _LAYOUT) and (run.count("gpus") or 0) > NODE:
        raise Unexpressed(f"nothing of its layout and batch is known; state some of {', '.join(_LAYOUT)}")
    fp8 = _precision(run, machine, words)
    counts = _degrees(run, shape, words)
    _one_of(run, "backend", BACKENDS | FRAMEWORKS.keys())
    trained_by = column(run.word("backend"))
    if "compiled=false" in trained_by.implied:
        words.append("layers as transformers has them: no run has checked their time")
    heads = run.count("ulysses") or 1
    if shape.heads % (counts["tp"] * heads) or counts["gpus"] % (counts["tp"] * counts["cp"] * counts["pp"] * heads):
        raise Unexpressed(
            f"ulysses {heads} does not divide {shape.heads} heads over tp {counts['tp']}, or {counts['gpus']} GPUs over its layout"
        )
    sharding, instances = _sharding(run, trained_by.backend, counts["gpus"] // counts["pp"])
    unfused = run.word("attention") == "unfused"  # a trainer of that time has no sequence parallelism and no fused loss either
    base = Plan(
        shape,
        run.word("model"),
        gpus=counts["gpus"],
        tp=counts["tp"],
        cp=counts["cp"] * heads,
        pp=counts["pp"],
        ep=counts["ep"],
        etp=counts["etp"],
        seq_len=run.count("seq_len") or _assume(words, "seq_len", 4096),
        grad_bytes=2 if sharding in DEEPSPEED and trained_by.backend == "torch" else 4,
        imbalance=_imbalance(run),
        loss="native" if unfused else _loss(run, trained_by),
        options=Options(
            sharding=sharding,
            fp8=fp8,
            capacity=bool(shape.experts) and _capacity(run),
            backend=trained_by.backend,
            compiled="compiled=false" not in trained_by.implied,
            optimizer_instances=instances,
            cp_comm="" if heads == 1 else "a2a" if counts["cp"] == 1 else "a2a+p2p",
            cp_sizes=(heads, counts["cp"]) if heads > 1 < counts["cp"] else (),
            attention=_one_of(run, "attention", ATTENTION),
            sp=False if unfused else None,
            lora=rank(run),
            lora_targets=tuple(w for w in re.split("[+,; ]+", run.word("lora_targets")) if w),
            base=_one_of(run, "base", BASES),
        ),
    )
    if shape.experts and run.count("ep") is None:
        base = _spread(base, machine, words)
    plans = _open_batch(run, base, machine, words, tried)
    plans = [p for plan in plans for p in _open_options(run, plan, machine, words, tried)]
    if shape.experts and not run.word("routing") and base.imbalance > 1:
        tried.append("routing unknown: even, or natural with 1.2 times the mean on the fullest rank")
        plans = [replace(plan, imbalance=most) for plan in plans for most in (base.imbalance, 1.0)]
    if not (unfused or run.word("loss")) and run.word("backend") == _MEGATRON_LM:
        tried.append("loss unknown: Transformer Engine's, or Megatron-LM's own, its default")
        plans = [replace(plan, loss=loss) for plan in plans for loss in ("te", "native")]
    plans = _fitted(run, plans, machine, words)
    return Assumed(tuple(dict.fromkeys(plans)), machine, (*words, *tried), len(words))


def _loss(run: Run, trained_by: Framework) -> str:
    """The loss of a run: what its framework implies; fused where a source says so."""
    if run.word("loss"):
        return _one_of(run, "loss", LOSSES.keys())
    implied = next((w.partition("=")[2] for w in trained_by.implied if w.startswith("loss=")), "te")
    return "torch" if implied == "compiled" and _before(run, _LOSS_COMPILED_SINCE) else implied


def is_adapters(task: str) -> bool:
    """Whether a task trains adapters beside frozen weights."""
    return any(word in task for word in _FROZEN)


def rank(run: Run) -> int:
    """The rank of a run's adapters; 0 without any."""
    return run.count("lora") or (_RANK if is_adapters(run.word("task")) else 0)


def _imbalance(run: Run) -> float:
    """Tokens of the fullest rank over the mean: runs that show speed alone force their routing to be even."""
    routing = run.word("routing").lower()
    even = re.search(r"\bbalance|_balance|\beven|\bforce", routing) or _capacity(run) or (not routing and "performance" in run.word("task"))
    return 1.0 if even else _NATURAL


def _capacity(run: Run) -> bool:
    """Whether tokens beyond an expert's capacity are dropped."""
    return bool(re.search("drop(?!less)", run.word("routing").lower()))


def _cluster(run: Run, on: Cluster | None) -> Cluster:
    name = run.word("hardware")
    if not name and on is None:
        raise Unexpressed("no hardware is named")
    try:
        return on if on and (not name or cluster(name).name == on.name) else cluster(name)
    except ConfigError as e:
        raise Unexpressed(str(e)) from e


def _shape(run: Run) -> Shape:
    if run.word("hidden"):
        return _gpt(run)
    name = run.word("model")
    if not name:
        raise Unexpressed("no model is named")
    if named(name) in _UNMODELLED:
        raise Unexpressed(_UNMODELLED[named(name)])
    shape = _found(name, str(run.folder))
    sizes = {size: count for size in ("layers", "experts") if (count := run.count(size))}
    for size, count in sizes.items():
        if count > getattr(shape, size):
            raise Unexpressed(f"{count} {size}; {name[:80]} has {getattr(shape, size)}, and `{size}` cuts it")
    return cut(shape, [f"{size}={count}" for size, count in sizes.items()])[0]


@lru_cache(maxsize=256)
def _found(name: str, folder: str) -> Shape:
    if named(name):
        return published(name)
    file = file_of(Path(folder, name))
    if file is not None:
        return from_file(file)
    raise Unexpressed(f"model '{name[:80]}' is not known{nearest(name)}; name a preset, or the path of a config.json beside the table")


@lru_cache(maxsize=4096)
def _gpt_shape(layers: int, heads: int, hidden: int, positions: int) -> Shape:
    return Shape(
        layers, heads, heads, 0, "a GPT of stated sizes", hidden, _VOCAB, head_dim=hidden // heads, ffn=4 * hidden, dense_layers=layers,
        gated=False,
        tied=True, positions=positions, norm_bias=True, mlp_bias=True, attention_bias=True, output_bias=True,
    )  # fmt: skip


def _gpt(run: Run) -> Shape:
    layers, heads, hidden, positions = (run.count(c) or 0 for c in ("layers", "heads", "hidden", "seq_len"))
    if not (layers and heads and positions and hidden) or hidden % heads or layers > DEEPEST:
        raise Unexpressed("layers, heads and hidden size are not those of a GPT")
    return _gpt_shape(layers, heads, hidden, positions)


def _precision(run: Run, machine: Cluster, words: list[str]) -> str:
    """The recipe of 8-bit products that a run's precision stands for, empty for 16 bits; what it is taken for goes to `words`.

    Raises:
        Unexpressed: no plan has it, or the GPU has no 8-bit products.
    """
    precision = re.sub(r"[\s-]+", "_", run.word("precision").lower())
    name = next((k for k in sorted(_PRECISIONS, key=len, reverse=True) if precision.startswith(k)), None)
    if name is None and precision:
        raise Unexpressed(f"precision '{precision[:40]}' is not known; expected one of {', '.join(_PRECISIONS)}")
    if not precision:
        words.append("precision unknown: bf16")
    if name in _STANDS_FOR:
        words.append(f"{name} as {_STANDS_FOR[name]}")
    if "+" in precision:
        words.append(f"{precision} as {name} throughout")
    recipe = _PRECISIONS[name or "bf16"]
    if name == "fp8" and machine.name in _BLACKWELL:
        words.append("fp8 on this GPU: mxfp8")
        recipe = "mxfp8"
    if recipe and not machine.has_fp8:
        raise Unexpressed(f"{machine.name} has no 8-bit products")
    return recipe


def _assume(words: list[str], column: str, value: int) -> int:
    words.append(f"{column} unknown: {value}")
    return value


def _degrees(run: Run, shape: Shape, words: list[str]) -> dict[str, int]:
    """GPUs and degrees of parallelism by name; those that are silent are 1, and said in `words`.

    Raises:
        Unexpressed: they do not divide one another, the GPUs, or the model.
    """
    cells = {k: run.count(k) for k in ("gpus", "tp", "cp", "pp", "vpp", "ep", "etp", "dp")}
    by_name = {k: cells[k] or 1 for k in ("tp", "cp", "pp")}
    gpus = cells["gpus"] or (cells["dp"] * by_name["tp"] * by_name["cp"] * by_name["pp"] if cells["dp"] else None)
    if gpus is None:
        raise Unexpressed("the number of GPUs is unknown")
    silent = [k for k in ("tp", "cp", "pp") if cells[k] is None]
    if silent:
        words.append(f"{', '.join(silent)} unknown: 1")
    ep = cells["ep"] or 1
    etp = cells["etp"]
    if etp is None:
        etp = by_name["tp"] if shape.experts and gpus % (by_name["tp"] * ep * by_name["pp"]) == 0 else 1
        if by_name["tp"] > 1 and shape.experts:
            words.append(f"etp unknown: {etp}, as megatron-core takes it")
    degrees = {**by_name, "gpus": gpus, "ep": ep if shape.experts else 1, "etp": etp if shape.experts else 1}
    for names in (("tp", "cp", "pp"), ("ep", "etp", "pp")):
        if gpus % prod(degrees[n] for n in names):
            raise Unexpressed(f"{gpus} GPUs do not divide into {' x '.join(f'{n} {degrees[n]}' for n in names)}")
    if shape.heads % degrees["tp"]:
        raise Unexpressed(f"{shape.heads} attention heads do not divide over tp {degrees['tp']}")
    if shape.experts and shape.experts % degrees["ep"]:
        raise Unexpressed(f"{shape.experts} experts do not divide over ep {degrees['ep']}")
    return degrees


def _spread(plan: Plan, machine: Cluster, words: list[str]) -> Plan:
    """The plan with the least expert parallelism from 8 on that fits; the most, where none does."""
    degrees = [n for n in (8, 16, 32, 64) if plan.shape.experts % n == 0 and plan.gpus % (n * plan.etp * plan.pp) == 0] or [1]
    ep = next((n for n in degrees if space.fits(replace(plan, ep=n), machine.memory_gib)), degrees[-1])
    words.append(f"ep unknown: {ep}")
    return replace(plan, ep=ep)


def _one_of(run: Run, column: str, known: Set[str]) -> str:
    """A cell that is one of several words; empty where it is unknown."""
    cell = run.word(column)
    if cell and cell not in known:
        raise Unexpressed(f"{column} '{cell[:40]}' is not known; expected one of {', '.join(sorted(known))}")
    return cell


def _sharding(run: Run, backend: str, ranks: int) -> tuple[str, int]:
    """What data parallelism shards, and the copies of it: those of `hsdp` have a node each."""
    cell = run.word("fsdp").lower()
    usual = "fsdp2" if backend == "torch" else "fsdp"
    if (cell.isascii() and cell.isdigit() and int(cell[:10]) > 1) or cell.startswith("fsdp"):
        return usual, 1
    sharding = _SHARDING.get(cell)
    if sharding is None:
        raise Unexpressed(
            f"fsdp '{cell[:40]}' is not known; expected nothing, 0, ddp, optimizer, zero1, zero2, zero3, hsdp, fsdp or a degree"
        )
    if not sharding:
        implied = next((w.partition("=")[2] for w in column(run.word("backend")).implied if w.startswith("sharding=")), "")
        sharding = implied or ("fsdp2" if backend == "torch" else "optimizer")
    return SHARDING_WORDS[backend].get(sharding, sharding), max(1, ranks // NODE) if sharding == HYBRID else 1


def _open_batch(run: Run, plan: Plan, machine: Cluster, words: list[str], tried: list[str]) -> list[Plan]:
    """Batches and chunks that a run may have had."""
    mbs = run.count("mbs") or 0
    if not mbs:
        mbs = 1
        if plan.options.sharding == "fsdp2" and run.count("gbs") is None:
            mbs = next((n for n in (8, 4, 2) if space.fits(replace(plan, mbs=n), machine.memory_gib)), 1)
        _assume(words, "mbs", mbs)
    gbs, vpp = run.count("gbs"), run.count("vpp") if plan.pp > 1 else 1
    dp = max(plan.dp, 1)
    if gbs is None and plan.options.sharding == "fsdp2" and plan.pp == 1:
        gbs = mbs * dp
        words.append(f"gbs unknown: {gbs}, one micro-batch")
    if gbs is None:
        each = _INTERLEAVED if (vpp or 1) > 1 else 1
        gbs = mbs * dp * plan.pp * each
        words.append(f"gbs unknown: {gbs}, {each} micro-batch{'es' if each > 1 else ''} for each stage")
    if plan.pp > 1 and mbs > 1 and plan.options.backend == "torch" and run.count("gbs") is None:
        gbs, mbs = mbs * dp, max(1, mbs // plan.pp)
        words.append(f"mbs is a rank's whole batch: micro-batches of {mbs}, as many as stages")
    elif plan.pp > 1 and mbs > 1 and gbs is not None and mbs * dp == gbs:
        words.append(f"mbs {mbs} is all of a rank's batch: micro-batches of 1 through the pipeline")
        mbs = 1
    if gbs is not None and mbs * dp > gbs:
        mbs = max(1, gbs // dp)
        words.append(f"mbs {run.word('mbs')} is more than the global batch holds: {mbs}")
    chunks = [vpp or 1]
    if plan.pp > 1 and vpp is None:
        chunks = list(space.chunks(replace(plan, mbs=mbs, gbs=gbs)))
        if chunks != [1]:
            (tried if len(chunks) > 1 else words).append(f"vpp unknown: {' or '.join(map(str, chunks))}")
    return [replace(plan, mbs=mbs, gbs=gbs, vpp=v) for v in chunks]


def _open_options(run: Run, plan: Plan, machine: Cluster, words: list[str], tried: list[str]) -> list[Plan]:
    """Dispatchers and graphs that a run may have had; graphs and HybridEP are Megatron's."""
    torch = plan.options.backend == "torch"
    options: dict[str, Any] = {
        "recompute": spelling.recompute(run.word("recompute"), plan.options.backend),
        "optimizer_offload": _offloaded(run, words),
    }
    dispatchers = [_one_of(run, "dispatcher", DISPATCHERS | {"custom"}).replace(*spelling.CUSTOM)]
    if plan.ep * plan.etp == 1:
        dispatchers = [""]
    elif not dispatchers[0] and plan.ep > 1:
        inside = ["alltoall"] if torch or _before(run, _HYBRID_EP_SINCE) else ["alltoall", "hybridep"]
        outside = ["alltoall"] if torch or plan.options.capacity else ["deepep"]  # DeepEP excludes padding to capacity
        dispatchers = inside if plan.ep * plan.etp <= machine.domain else outside
        _once(tried if len(dispatchers) > 1 else words, f"dispatcher unknown: {' or '.join(dispatchers)}")
    graphs = [spelling.graphs(run.word("cuda_graph"))]
    graph_cell = run.word("cuda_graph")
    if not (graph_cell or torch) and machine.name in _BLACKWELL and plan.shape.experts:
        graphs = [(), ("full_iteration",) if machine.domain > NODE else space.GRAPHS[True]]
        _once(tried, f"CUDA graphs unknown: none, or {', '.join(graphs[1])}, as recipes for this GPU have them")
    overlaps = [False]
    shown = plan.ep * plan.etp > machine.domain and not _before(run, _OVERLAP_SINCE)
    if plan.ep > 1 and shown and (plan.pp == 1 or plan.vpp > 1) and "full" not in options["recompute"]:
        overlaps = [False, True]
        _once(tried, "overlap of expert communication unknown: with and without")
    return [
        replace(plan, options=replace(plan.options, dispatcher=d, graphs=g, ep_overlap=e, **options))
        for d, g, e in product(dispatchers, graphs, overlaps)
    ]


def _before(run: Run, month: str) -> bool:
    """Whether a run is older than a month; releases are named by theirs, and what has no date is new."""
    return len(run.release_date) >= len(month) and run.release_date[: len(month)] < month


def _once(words: list[str], word: str) -> None:
    if word not in words:
        words.append(word)


def _offloaded(run: Run, words: list[str]) -> int:
    """Percent of the optimizer's state in host memory."""
    cell = run.word("offload")
    if cell in ("", "none"):
        return 0
    share = re.search(r"optimizer\D{0,20}(\d{1,3})\s?%", cell)
    if share:
        return min(100, int(share[1]))
    if "optimizer" in cell:
        _once(words, "share of the optimizer's state in host memory unknown: half of it")
        return 50
    raise Unexpressed(f"offload '{cell[:40]}' is not known; expected none, or optimizer with a percentage")


def _fitted(run: Run, plans: list[Plan], machine: Cluster, words: list[str]) -> list[Plan]:
    """The plans that fit, with what the table leaves open of memory; all of them where none does."""
    stated = ("recompute",) if run.word("recompute") else ()
    candidates = [space.fitted(plan, machine.memory_gib, stated) for plan in plans]
    candidates = [f for f in candidates if space.fits(f[0], machine.memory_gib)] or candidates
    first, assumptions = candidates[0]
    words += [word for word in (*assumptions, space.over(first, machine.memory_gib)) if word]
    return [plan for plan, _ in candidates]
