"""Lint rules about labels: words that the named megatron-core version does not know, and settings that exclude each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from playbook.lint.base import Config, Found, Rule, Shelf, configs, gpus_named, show
from playbook.paths import data_root
from playbook.planner.models import MODELS
from playbook.yaml_files import Strict, did_you_mean, load

_WORD = re.compile(r"[a-z0-9_+]+\Z")
_LIST_KEYS = {"recompute": "recompute_modules", "cuda_graph": "cuda_graph_modules"}
"""Short keys of our cards; as lists they hold megatron-core's module names."""
_OWN_KEYS = frozenset({"precision.fp8"})
"""Keys of the trainer whose last part is a key of megatron-core with other words; the trainer's schema judges them."""
_OWN_WORDS = frozenset({("train.recompute_modules", "vision")})
"""The trainer's vision tower is its own code under both backends, and no module of megatron-core."""


class Table(Strict):
    """The labels of one megatron-core version."""

    version: str
    source: str
    keys: dict[str, list[str]]
    unknown_keys: dict[str, str]
    instead: dict[str, dict[str, str]]


@cache
def tables() -> Mapping[str, Table]:
    """The shipped label tables by version, oldest first."""
    found = [load(path, Table)[0] for path in (data_root("tables") / "megatron_core").glob("*.yaml")]
    return {t.version: t for t in sorted(found, key=lambda t: [int(p) for p in t.version.split(".")])}


def table_for(version: Any) -> Table | None:
    """The table of a version, the newest if none is named; None for a version without one."""
    known = tables()
    return list(known.values())[-1] if version is None else known.get(str(version))


def label_problems(values: Mapping[str, Any], table: Table) -> Iterator[tuple[str, str]]:
    """The words that `table` does not know: (key, message) for each. The torch backend has labels of its own; the trainer's schema judges them."""
    torch = values.get("backend") == "torch"
    for key, value in values.items():
        if key in _OWN_KEYS or (torch and key.startswith("train.")):
            continue
        name, words = _words(key, value, table)
        if name in table.unknown_keys and words:
            yield key, f"megatron-core {table.version} has no key '{name}'; {table.unknown_keys[name]}"
            continue
        known = table.keys.get(name, [])
        for word in words if known else ():
            if word not in known and (key, word) not in _OWN_WORDS:
                hint = table.instead.get(name, {}).get(word)
                fix = f"; write {hint}" if hint else did_you_mean(word, known)
                yield key, f"{name}: megatron-core {table.version} does not know '{word}'{fix}"


def _words(key: str, value: Any, table: Table) -> tuple[str, list[str]]:
    """The key by megatron-core's name, and the labels of its value; prose holds none."""
    name = key.rsplit(".", 1)[-1]
    if isinstance(value, list):
        name = _LIST_KEYS.get(name, name)
        if name == "cuda_graph_modules" and name in table.unknown_keys and key.rsplit(".", 1)[-1] == "cuda_graph":
            name = "cuda_graph_scope"
        return name, [v for v in value if isinstance(v, str) and _WORD.match(v)]
    if not isinstance(value, str):
        return name, []
    parts = re.split(r"[\s,]+", value.strip())
    if name.endswith(("_modules", "_scope")) and all(_WORD.match(p) for p in parts):
        return name, parts
    if name == "recompute":
        # `full`, `selective` and prose are fine; a lone module name that exists nowhere is not.
        return "recompute_modules", [p for p in parts if len(parts) == 1 and p in table.instead["recompute_modules"]]
    return name, [value] if _WORD.match(value) else []


def labels(shelf: Shelf) -> Iterator[Found]:
    """Labels in families, decisions and claims that the named version does not know."""
    for config in _configs(shelf):
        version = config.values.get("megatron_core")
        table = table_for(version)
        if table is None:
            message = f"no label table for megatron-core {version}{did_you_mean(str(version), tables())}"
            yield config.entry, (*config.where, "megatron_core"), message
            continue
        for key, message in label_problems(config.values, table):
            yield config.entry, (*config.where, key), f"{config.name}: {message}"


@dataclass(frozen=True)
class View:
    """A configuration, asked by megatron-core's names whatever the card's spelling is."""

    values: Mapping[str, Any]
    layout: Mapping[str, int]
    model: str
    hardware: str

    def get(self, *names: str) -> Any:
        """The value of the first of these keys that is set; dotted prefixes do not count."""
        return next((v for n in names for k, v in self.values.items() if k.rsplit(".", 1)[-1] == n), None)

    def words(self, *names: str) -> frozenset[str]:
        """All words of these keys."""
        found = [v for n in names for k, v in self.values.items() if k.rsplit(".", 1)[-1] == n]
        parts = [v if isinstance(v, list) else re.split(r"[\s,]+", v) if isinstance(v, str) else [] for v in found]
        return frozenset(w for part in parts for w in part if isinstance(w, str))

    @property
    def full(self) -> bool:
        """Whether whole layers are recomputed."""
        return "full" in (self.get("recompute_granularity"), self.get("recompute"))

    @property
    def recomputed(self) -> frozenset[str]:
        """The modules that are recomputed."""
        listed = [self.get(k) for k in ("recompute", "recompute_modules")]
        return frozenset(w for v in listed if isinstance(v, list) for w in v if isinstance(w, str)) | self.words("recompute_modules")

    @property
    def graphed(self) -> frozenset[str]:
        """The modules inside CUDA graphs."""
        listed = self.get("cuda_graph")
        own = frozenset(w for w in listed if isinstance(w, str)) if isinstance(listed, list) else frozenset()
        return own | self.words("cuda_graph_modules", "cuda_graph_scope")

    @property
    def full_iteration(self) -> bool:
        """Whether one graph holds the whole iteration."""
        return "full_iteration" in self.graphed or "full_iteration" in (self.get("cuda_graph_impl"), self.get("cuda_graph"))

    @property
    def graphs(self) -> bool:
        """Whether anything is graphed."""
        return bool(self.graphed) or self.get("cuda_graph_impl") not in (None, "none")

    @property
    def dispatchers(self) -> frozenset[str]:
        """The dispatcher with its backend, as words."""
        return self.words("dispatcher", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend")

    @property
    def overlap(self) -> bool:
        """Whether expert-parallel communication overlaps with computation."""
        return self.get("overlap_moe_expert_parallel_comm") is True


@dataclass(frozen=True)
class Exclusion:
    """Two settings that do not go together."""

    holds: Callable[[View], bool]
    message: str


def exclusions() -> Sequence[Exclusion]:
    """Settings that megatron-core refuses together.

    Source: Megatron-LM core_v0.19.2, `megatron/core/transformer/transformer_config.py` (`__post_init__`) and
    `megatron/training/arguments.py`.
    """
    return (
        Exclusion(
            lambda v: v.full and v.graphs and not v.full_iteration,
            "full recompute excludes per-layer CUDA graphs; recompute selected modules, or capture the full iteration",
        ),
        Exclusion(
            lambda v: "moe" in v.recomputed and bool(v.graphed & {"moe_router", "moe"}),
            "recompute of 'moe' excludes a graph over its router; recompute moe_act instead, or graph attn alone",
        ),
        Exclusion(lambda v: {"moe", "moe_router"} <= v.graphed, "graphing 'moe' already covers 'moe_router'; keep one of the two"),
        Exclusion(
            lambda v: "moe_preprocess" in v.graphed and "moe_router" not in v.graphed,
            "graphing 'moe_preprocess' needs 'moe_router' beside it; add it",
        ),
        Exclusion(
            lambda v: v.get("cuda_graph_impl") == "full_iteration" and bool(v.graphed - {"full_iteration"}),
            "a full-iteration graph takes no module list; remove the list",
        ),
        Exclusion(
            lambda v: v.get("cuda_graph_impl") == "transformer_engine" and "full_iteration" in v.graphed,
            "cuda_graph_impl transformer_engine captures modules, not the full iteration; use local on old versions, full_iteration on new ones",
        ),
        Exclusion(
            lambda v: v.overlap and (v.full or bool(v.recomputed & {"moe"})),
            "overlap of expert-parallel communication excludes full recompute and recompute of 'moe'; recompute other modules",
        ),
        Exclusion(
            lambda v: v.overlap and "allgather" in v.dispatchers,
            "overlap of expert-parallel communication needs the alltoall or flex dispatcher; change the dispatcher",
        ),
        Exclusion(
            lambda v: v.overlap and v.layout.get("ep") == 1,
            "overlap of expert-parallel communication needs ep > 1; raise ep or turn it off",
        ),
        Exclusion(
            lambda v: v.overlap and v.layout.get("pp", 1) > 1 and v.layout.get("vpp") == 1,
            "overlap of expert-parallel communication with pp > 1 needs vpp > 1; set vpp",
        ),
        Exclusion(
            lambda v: v.get("delay_wgrad_compute") is True and v.get("overlap_moe_expert_parallel_comm") is False,
            "delay_wgrad_compute needs overlap_moe_expert_parallel_comm; turn that on as well",
        ),
        Exclusion(
            lambda v: "shared_experts" in v.recomputed and v.get("moe_shared_expert_overlap") is True,
            "recompute of 'shared_experts' excludes moe_shared_expert_overlap; turn one off",
        ),
        Exclusion(
            lambda v: v.get("cpu_offloading") is True and (v.layout.get("pp", 1) > 1 or v.full or bool(v.recomputed)),
            "cpu_offloading of activations needs pp 1 and no recompute; use offload_modules instead",
        ),
        Exclusion(
            lambda v: "attn_proj" in v.words("offload_modules") and "core_attn" not in v.words("offload_modules"),
            "offloading 'attn_proj' needs 'core_attn' beside it; add it",
        ),
        Exclusion(
            lambda v: "mla_up_proj" in v.recomputed and v.model in MODELS and MODELS[v.model].mla is None,
            "recompute of 'mla_up_proj' needs a model with latent attention; remove it for this model",
        ),
    )


def refused_together(*, megatron_core: str, rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str, dict[str, Any]]:
    """Whether megatron-core refuses exactly the settings that `rows` mark as refused, by the rules of `exclusions`.

    Each row has `settings` (as a configuration family writes them) and `refused`. The labels must be those of the named version.
    """
    table = table_for(megatron_core)
    if table is None:
        raise ValueError(f"no label table for megatron-core {megatron_core}{did_you_mean(megatron_core, tables())}")
    wrong, reasons = [], {}
    for row in rows:
        settings, words = row["settings"], ", ".join(f"{k} {show(v)}" for k, v in row["settings"].items())
        unknown = [message for _, message in label_problems(settings, table)]
        if unknown:
            raise ValueError("; ".join(unknown))
        found = [rule.message for rule in exclusions() if rule.holds(View(settings, {}, "", ""))]
        reasons[words] = found
        if bool(found) != row["refused"]:
            wrong.append(f"{words} is {'refused' if found else 'accepted'}")
    refused = sum(bool(r) for r in reasons.values())
    sentence = f"megatron-core {megatron_core} refuses {refused} of {len(rows)} settings" + (
        f"; against the claim: {'; '.join(wrong)}" if wrong else ""
    )
    return not wrong, sentence, {"settings": [{"settings": k, "refused_because": v} for k, v in reasons.items()]}


def incompatible(shelf: Shelf) -> Iterator[Found]:
    """Settings that exclude each other."""
    table = exclusions()
    for config in _configs(shelf):
        view = View(config.values, config.layout, config.model, config.hardware)
        yield from ((config.entry, config.where, f"{config.name}: {rule.message}") for rule in table if rule.holds(view))


def dispatcher_hardware(shelf: Shelf) -> Iterator[Found]:
    """Dispatchers named for hardware that they do not run on.

    Source: Megatron Bridge, `src/megatron/bridge/training/flex_dispatcher_backend.py` (DeepEP: compute capability 8.x and 9.0,
    B200 and B300; HybridEP: 8.x, 9.0 and 10.x).
    """
    for config in _configs(shelf):
        view = View(config.values, config.layout, config.model, config.hardware)
        named = gpus_named(config.hardware)
        if "deepep" in view.dispatchers and named and named <= {"GB200", "GB300"}:
            chips = " and ".join(sorted(named))
            yield config.entry, config.where, f"{config.name}: DeepEP does not run on {chips}; expected hybridep or alltoall"


def _configs(shelf: Shelf) -> Iterator[Config]:
    for entry in shelf.checked:
        yield from configs(entry)


RULES = (
    Rule("label-unknown", "A label that the named megatron-core version does not know (the newest, if none is named)", labels),
    Rule("label-incompatible", "Recompute, graph, overlap or offload settings that exclude each other", incompatible),
    Rule("dispatcher-hardware", "A dispatcher on hardware that it does not support", dispatcher_hardware),
)
