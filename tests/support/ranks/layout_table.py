"""The layouts that are trained against one rank: a set that covers every legal pair of choices, not every product of them.

The tests of layouts, on CPU and on GPUs, read it. No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook_trainer.config import checks
from playbook_trainer.config.tree import TrainerConfig, load, parse_overrides

ROOT = Path(__file__).resolve().parents[3]
MODELS = {"moe": "qwen3_moe_tiny", "dense": "qwen3_tiny", "vl-moe": "qwen3_vl_moe_tiny", "vl-dense": "qwen3_vl_tiny"}
"""The dense ones tie the output layer to the embedding."""
# Choosing experts is a jump: a token whose second and third expert are one rounding error apart goes to either, and a gradient norm then
# differs by 1e-4. With these seeds no two such scores of one rank's run are nearer than 1e-6, ten times as far as rounding takes them.
SMALL = {
    "text": ("data.seq_len=128", "seed=0"),
    "vision": ("data.seq_len=256", "data.max_image_pixels=16384", "seed=2"),
}
ROWS = {"packed": (), "single": ("data.pack=false",), "unpadded": ("data.pad=false",)}
SELECTIVE = {
    "moe": "[layernorm,core_attn,moe_act]",
    "dense": "[layernorm,core_attn,mlp]",
    "vl-moe": "[layernorm,core_attn,moe,vision]",
    "vl-dense": "[layernorm,core_attn,mlp,vision]",
}
STEPS = 10 if os.environ.get("PLAYBOOK_PARITY") else 2
"""Ten for the published table (`make parity`). A wrong layout is apart by the second step, after the first update."""
COMMON = (f"train.steps={STEPS}", "train.warmup_steps=1", "train.global_batch_size=4", "train.receipt=false", "data.num_workers=0")
MAX_RANKS = 8


@dataclass(frozen=True)
class Layout:
    """One row: a choice for every factor. The number of ranks follows."""

    model: str = "moe"
    dp: str = "none"
    """none, fsdp, hsdp (two copies; of two shards where cp does not provide them), copies (no sharding at all)"""
    tp: str = "1"
    """1, 2, 2+sp"""
    cp: int = 1
    pp: str = "1"
    """1, 2, 2+vpp: two chunks of the model on each stage"""
    ep: int = 1
    etp: str = "tp"
    """tp (the default), 1, 2"""
    cp_comm: str = "allgather"
    dispatcher: str = "alltoall"
    recompute: str = "none"
    rows: str = "packed"
    """packed: several samples in each row, filled up. single: one. unpadded: several, and rows of unequal length."""
    micro: int = 1
    """Rows of a micro-batch; the four rows of a step make as many micro-batches as that and dp leave."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return int(self.tp[0])

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return int(self.pp[0])

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        if self.dp == "none":
            return 1
        return 4 if self.dp == "hsdp" and self.cp * self.pp_size * self.tp_size == 1 else 2

    @property
    def ranks(self) -> int:
        """Processes that the layout takes."""
        return self.dp_size * self.tp_size * self.cp * self.pp_size

    @property
    def name(self) -> str:
        """The model, and the choices that are no defaults."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "model" and getattr(self, f.name) != f.default]
        bare = ("dp", "dispatcher", "cp_comm", "rows", "recompute")
        return "-".join([self.model, *(str(v) if k in bare else f"{k}{v}" for k, v in chosen)])

    @property
    def config(self) -> str:
        """The configuration that the overrides apply to."""
        return f"trainer/configs/{MODELS[self.model]}.yaml"

    @property
    def data(self) -> tuple[str, ...]:
        """The overrides that say which rows there are."""
        return (*COMMON, *SMALL["vision" if self.model.startswith("vl") else "text"], *ROWS[self.rows])

    @property
    def alone(self) -> Layout:
        """One rank on the same rows."""
        return Layout(model=self.model, rows=self.rows)

    def parallel(self) -> dict[str, Any]:
        """The section `parallel` of the configuration."""
        return {
            "tp": self.tp_size,
            "cp": self.cp,
            "pp": self.pp_size,
            "vpp": 2 if self.pp.endswith("vpp") else 1,
            "ep": self.ep,
            "etp": None if self.etp == "tp" else int(self.etp),
            "sequence_parallel": self.tp.endswith("sp"),
            "cp_comm": self.cp_comm,
            "fsdp": self.dp != "copies",
            "dp_replicate": 2 if self.dp == "hsdp" else 1,
        }

    def words(self) -> list[str]:
        """The overrides."""
        spelt = {None: "null", True: "true", False: "false"}
        return [
            *self.data,
            *(f"parallel.{k}={spelt[v] if v is None or isinstance(v, bool) else v}" for k, v in self.parallel().items()),
            f"moe.dispatcher={self.dispatcher}",
            f"train.micro_batch_size={self.micro}",
            f"train.recompute={self.recompute}",
            *([f"train.recompute_modules={SELECTIVE[self.model]}"] if self.recompute == "selective" else []),
        ]


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "dp": ("none", "fsdp", "hsdp", "copies"),
    "tp": ("1", "2", "2+sp"),
    "cp": (1, 2, 4),
    "pp": ("1", "2", "2+vpp"),
    "ep": (1, 2, 4),
    "etp": ("tp", "1", "2"),
    "cp_comm": ("allgather", "ring", "ulysses"),
    "dispatcher": ("alltoall", "allgather", "dedup"),
    "recompute": ("none", "full", "selective"),
    "rows": tuple(ROWS),
    "micro": (1, 2),
}

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def choices_of(layout: Layout) -> list[tuple[str, Any]]:
    """What a row chooses, where it is a choice: a dispatcher with ep, a way of communicating with cp, etp where it says what tp does not."""
    absent = {
        "dispatcher": layout.ep == 1,
        "cp_comm": layout.cp == 1,
        "etp": layout.etp == str(layout.tp_size) or (layout.etp != "tp" and layout.model.endswith("dense")),
    }
    return [(name, getattr(layout, name)) for name in FACTORS if not absent.get(name)]


def pairs_of(layout: Layout) -> set[Pair]:
    """The pairs of choices that a row covers."""
    return set(combinations(choices_of(layout), 2))


def candidates() -> Iterator[Layout]:
    """All products of choices on at most MAX_RANKS ranks; recompute, which goes with all, is none."""
    sizes = product(*(FACTORS[name] for name in ("model", "dp", "tp", "cp", "pp", "ep", "etp")))
    for layout in (Layout(*each) for each in sizes):
        if layout.ranks <= MAX_RANKS and layout == plain(layout):
            comms = FACTORS["cp_comm"] if layout.cp > 1 else ("allgather",)
            dispatchers = FACTORS["dispatcher"] if layout.ep > 1 else ("alltoall",)
            for cp_comm, dispatcher, rows, micro in product(comms, dispatchers, FACTORS["rows"], FACTORS["micro"]):
                yield replace(layout, cp_comm=cp_comm, dispatcher=dispatcher, rows=rows, micro=micro)


def plain(layout: Layout) -> Layout:
    """The same layout without choices that are none."""
    chosen = dict(choices_of(layout))
    return replace(Layout(), **chosen)


def every_pair() -> set[Pair]:
    """The pairs of choices that some layout holds which the trainer's own checks accept."""
    pairs: set[Pair] = set()
    for layout in candidates():
        if not pairs_of(layout) <= pairs and is_legal(layout):
            pairs |= pairs_of(layout)
    order = list(FACTORS).index("recompute")
    for choice in {choice for pair in pairs for choice in pair}:
        for value in FACTORS["recompute"]:
            pair = (choice, ("recompute", value))
            if choice[0] != "recompute":
                pairs.add(pair if list(FACTORS).index(choice[0]) < order else pair[::-1])
    return pairs


def is_legal(layout: Layout) -> bool:
    """Whether the trainer accepts it."""
    base = _base(layout.config, (*layout.data, f"train.micro_batch_size={layout.micro}"))
    update = {
        "parallel": base.parallel.model_copy(update=layout.parallel()),
        "moe": base.moe.model_copy(update={"dispatcher": layout.dispatcher}),
    }
    try:
        checks.check(base.model_copy(update=update), layout.ranks)
    except ConfigError:
        return False
    return True


@cache
def _base(config: str, words: tuple[str, ...]) -> TrainerConfig:
    return load(ROOT / config, parse_overrides(list(words)))


LAYOUTS: tuple[Layout, ...] = (
    # One choice at a time: when these fail, they say where.
    Layout(dp="fsdp"),
    Layout(dp="fsdp", ep=2),
    Layout(tp="2"),
    Layout(cp=2),
    Layout(pp="2"),
    Layout(dp="hsdp"),
    Layout(model="vl-moe", dp="fsdp", ep=2, dispatcher="dedup"),
    # The rest covers what is left of the pairs.
    Layout(model="vl-moe", dp="fsdp", etp="2", rows="single", micro=2),
    Layout(
        model="vl-moe", tp="2+sp", cp=2, ep=4, etp="1", cp_comm="ulysses", dispatcher="allgather", recompute="full", rows="single", micro=2
    ),
    Layout(dp="copies", cp=2, ep=2, etp="2", cp_comm="ring", recompute="selective", rows="single", micro=2),
    Layout(cp=4, ep=4, cp_comm="ulysses", dispatcher="dedup", recompute="selective", rows="unpadded"),
    Layout(model="dense", cp=2, pp="2+vpp", cp_comm="ring", recompute="full", micro=2),
    Layout(tp="2", pp="2+vpp", ep=2, etp="1", dispatcher="allgather", recompute="full", rows="single"),
    Layout(model="vl-dense", dp="copies", tp="2+sp", rows="single", micro=2),
    Layout(model="vl-moe", dp="fsdp", cp=2, ep=4, recompute="full", rows="unpadded", micro=2),
    Layout(model="dense", dp="copies", cp=2, cp_comm="ulysses", rows="unpadded"),
    Layout(model="vl-dense", dp="hsdp", cp=2, recompute="selective", rows="single"),
    Layout(model="vl-moe", dp="hsdp", cp=2, ep=2, cp_comm="ulysses", dispatcher="dedup", recompute="full", rows="unpadded"),
    Layout(model="dense", dp="fsdp", tp="2", recompute="full", rows="unpadded"),
    Layout(model="vl-dense", dp="copies", pp="2", recompute="full"),
    Layout(dp="fsdp", pp="2+vpp", ep=2, dispatcher="dedup"),
    Layout(dp="copies", pp="2+vpp", ep=2, dispatcher="allgather"),
    Layout(model="dense", dp="hsdp", pp="2"),
    Layout(tp="2", cp=2, cp_comm="ulysses"),
    Layout(model="vl-moe", dp="hsdp", tp="2", pp="2", ep=4, etp="1", recompute="selective", micro=2),
    Layout(model="vl-moe", cp=4, pp="2", ep=2, etp="2", dispatcher="dedup", recompute="full", rows="single", micro=2),
    Layout(model="vl-moe", dp="hsdp", cp=4, ep=4, etp="2", cp_comm="ring", dispatcher="allgather"),
    Layout(dp="fsdp", tp="2+sp", cp=2, ep=2, etp="1", cp_comm="ring", dispatcher="dedup", recompute="selective"),
    Layout(cp=4, pp="2+vpp", ep=2, etp="2", cp_comm="ulysses"),
    Layout(model="vl-moe", dp="copies", tp="2", cp=2, ep=4, etp="1", dispatcher="dedup", micro=2),
    Layout(model="vl-dense", tp="2", cp=4, cp_comm="ring", recompute="selective", rows="unpadded", micro=2),
    Layout(model="vl-moe", dp="fsdp", cp=2, pp="2", ep=2, cp_comm="ulysses", dispatcher="allgather", recompute="selective", rows="single"),
    Layout(model="dense", tp="2+sp", cp=2, pp="2+vpp", recompute="selective", rows="single"),
    Layout(dp="hsdp", tp="2+sp", pp="2+vpp", ep=4, etp="1"),
    Layout(tp="2+sp", cp=2, pp="2", etp="1", cp_comm="ring"),
    Layout(tp="2+sp", cp=4, ep=2, etp="1", dispatcher="allgather"),
    Layout(model="vl-dense", dp="fsdp", cp=4, cp_comm="ulysses"),
    Layout(model="dense", dp="copies", cp=4),
)
