"""The layouts that are trained against one rank: a set that covers every legal pair of choices, not every product of them.

The test of layouts and the parity table of the documentation read it. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook_trainer import checks
from playbook_trainer.config import TrainerConfig, load, parse_overrides

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"text": "trainer/configs/qwen3_moe_tiny.yaml", "vision": "trainer/configs/qwen3_vl_moe_tiny.yaml"}
COMMON = ("train.steps=10", "train.warmup_steps=1", "train.global_batch_size=4")
MAX_RANKS = 8


@dataclass(frozen=True)
class Layout:
    """One row: a choice for every factor. The number of ranks follows."""

    model: str = "text"
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
        """The choices that are no defaults."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return (
            "-".join(str(v) if k in ("model", "dp", "dispatcher", "cp_comm") else k if v == "full" else f"{k}{v}" for k, v in chosen)
            or "one"
        )

    @property
    def config(self) -> str:
        """The configuration that the overrides apply to."""
        return MODELS[self.model]

    def words(self) -> list[str]:
        """The overrides."""
        par: dict[str, Any] = {"tp": self.tp_size, "cp": self.cp, "pp": self.pp_size, "ep": self.ep}
        par["vpp"] = 2 if self.pp.endswith("vpp") else 1
        par["etp"] = "null" if self.etp == "tp" else self.etp
        par["sequence_parallel"] = str(self.tp.endswith("sp")).lower()
        par["fsdp"] = str(self.dp != "copies").lower()
        par["dp_replicate"] = 2 if self.dp == "hsdp" else 1
        return [
            *COMMON,
            *(["data.num_workers=0"] if self.model == "vision" else []),
            *(f"parallel.{k}={v}" for k, v in par.items()),
            f"parallel.cp_comm={self.cp_comm}",
            f"moe.dispatcher={self.dispatcher}",
            f"train.recompute={self.recompute}",
        ]


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("text", "vision"),
    "dp": ("none", "fsdp", "hsdp", "copies"),
    "tp": ("1", "2", "2+sp"),
    "cp": (1, 2),
    "pp": ("1", "2", "2+vpp"),
    "ep": (1, 2, 4),
    "etp": ("tp", "1", "2"),
    "cp_comm": ("allgather", "ring", "ulysses"),
    "dispatcher": ("alltoall", "allgather", "dedup"),
    "recompute": ("none", "full"),
}

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(layout: Layout) -> set[Pair]:
    """The pairs of choices that a row covers; a choice counts only where it is one: a dispatcher with ep, etp where it says what tp does not."""
    chosen = []
    for name in FACTORS:
        value = getattr(layout, name)
        if (name == "dispatcher" and layout.ep == 1) or (name == "cp_comm" and layout.cp == 1):
            continue
        if name == "etp" and value == str(layout.tp_size):
            continue
        chosen.append((name, value))
    return set(combinations(chosen, 2))


def every_legal() -> Iterator[Layout]:
    """All products of choices on at most MAX_RANKS ranks that the trainer's own checks accept."""
    for choice in product(*FACTORS.values()):
        layout = Layout(*choice)
        if layout.ranks <= MAX_RANKS and is_legal(layout):
            yield layout


def is_legal(layout: Layout) -> bool:
    """Whether the trainer accepts it."""
    par = dict(word.removeprefix("parallel.").split("=") for word in layout.words() if word.startswith("parallel."))
    cp_comm = par.pop("cp_comm")
    values = {k: None if v == "null" else v == "true" if v in ("true", "false") else int(v) for k, v in par.items()}
    base = _base(layout.config)
    config = base.model_copy(
        update={
            "parallel": base.parallel.model_copy(update={**values, "cp_comm": cp_comm}),
            "moe": base.moe.model_copy(update={"dispatcher": layout.dispatcher}),
        }
    )
    try:
        checks.check(config, layout.ranks)
    except ConfigError:
        return False
    return True


@cache
def _base(config: str) -> TrainerConfig:
    return load(ROOT / config, parse_overrides(list(COMMON)))


LAYOUTS: tuple[Layout, ...] = (
    # One choice at a time: when these fail, they say where.
    Layout(dp="fsdp"),
    Layout(tp="2"),
    Layout(cp=2),
    Layout(pp="2"),
    Layout(dp="fsdp", ep=2, dispatcher="allgather"),
    Layout(dp="hsdp"),
    Layout(tp="2+sp", cp=2, ep=4, etp="1", dispatcher="dedup"),
    # The rest covers what is left of the pairs.
    Layout(cp=2, cp_comm="ring", recompute="full"),
    Layout(model="vision", dp="copies", cp=2, ep=2, etp="2", cp_comm="ring", recompute="full"),
    Layout(model="vision", tp="2", cp=2, ep=4, etp="1", cp_comm="ulysses", dispatcher="allgather", recompute="full"),
    Layout(model="vision", dp="hsdp", tp="2+sp", ep=2, dispatcher="dedup", recompute="full"),
    Layout(dp="copies", cp=2, ep=4, cp_comm="ulysses"),
    Layout(tp="2", pp="2", ep=2, etp="1", recompute="full"),
    Layout(dp="hsdp", cp=2, ep=2, etp="2", cp_comm="ring", dispatcher="allgather"),
    Layout(model="vision", dp="copies", tp="2+sp", etp="1", recompute="full"),
    Layout(model="vision", dp="fsdp", tp="2+sp", ep=4, etp="1"),
    Layout(cp=2, pp="2", etp="2", cp_comm="ulysses", recompute="full"),
    Layout(model="vision", dp="fsdp", cp=2, ep=2, etp="2", cp_comm="ulysses", dispatcher="dedup", recompute="full"),
    Layout(model="vision", dp="copies", cp=2, ep=4, dispatcher="allgather"),
    Layout(model="vision", dp="hsdp", pp="2", etp="2", recompute="full"),
    Layout(model="vision", dp="fsdp", cp=2, pp="2", ep=2, etp="2", dispatcher="dedup", recompute="full"),
    Layout(model="vision", tp="2+sp", cp=2, pp="2", ep=4, etp="1", cp_comm="ring", dispatcher="allgather"),
    Layout(model="vision", dp="hsdp", tp="2", cp=2, ep=4, etp="1", recompute="full"),
    Layout(dp="fsdp", tp="2", cp=2, ep=2, cp_comm="ring", dispatcher="dedup"),
    Layout(model="vision", dp="copies", tp="2", pp="2", ep=2, dispatcher="dedup", recompute="full"),
    Layout(dp="hsdp", tp="2+sp", cp=2, ep=2, etp="1", cp_comm="ulysses", dispatcher="dedup", recompute="full"),
    Layout(cp=2, pp="2+vpp", ep=2, cp_comm="ulysses", dispatcher="dedup"),
    Layout(dp="copies", tp="2", pp="2+vpp", ep=4, etp="1", recompute="full"),
    Layout(cp=2, pp="2+vpp", etp="2", cp_comm="ring", recompute="full"),
    Layout(tp="2+sp", cp=2, pp="2+vpp", ep=2, etp="1", dispatcher="allgather", recompute="full"),
    Layout(dp="fsdp", pp="2+vpp", recompute="full"),
    Layout(dp="hsdp", pp="2+vpp", etp="2"),
)
