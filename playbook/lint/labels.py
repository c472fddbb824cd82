"""Lint rules about the layouts and settings that cards name: degrees that do not divide or are stated wrongly, sizing rules that are wrong,
words that the named megatron-core version does not know, and settings that exclude each other.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from playbook.errors import ConfigError
from playbook.lint.base import CARD_DEGREES, LintInput, LintRule, Problem, configs, each, gpus_named
from playbook.paths import data_root
from playbook.planner.layout import EXCLUSIONS
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import DEGREES, Plan, nearest
from playbook.planner.rules import LAYOUT, WIDTHS, Case, Words, broken
from playbook.planner.shapes import Shape
from playbook.yaml_files import Strict, did_you_mean, load

_WORD = re.compile(r"[a-z0-9_+]{1,64}\Z")
_LIST_KEYS = {"recompute": "recompute_modules", "cuda_graph": "cuda_graph_modules"}
"""Short keys of our cards; as lists they hold megatron-core's module names."""
_OWN_KEYS = frozenset({"precision.fp8"})
"""Keys of the trainer whose last part is a key of megatron-core with other words; the trainer's schema judges them."""
_OWN_WORDS = frozenset({("train.recompute_modules", "vision")})
"""The trainer's vision tower is its own code under both backends, and no module of megatron-core."""


class LabelTable(Strict):
    """The labels of one megatron-core version."""

    version: str
    source: str
    keys: dict[str, list[str]]
    unknown_keys: dict[str, str]
    instead: dict[str, dict[str, str]]


@cache
def tables() -> Mapping[str, LabelTable]:
    """The shipped label tables by version, oldest first."""
    loaded = [load(path, LabelTable)[0] for path in (data_root("tables") / "megatron_core").glob("*.yaml")]
    return {t.version: t for t in sorted(loaded, key=lambda t: [int(p) for p in t.version.split(".")])}


def table_for(version: Any) -> LabelTable | None:
    """The table of a version, the newest if none is named; None for a version without one."""
    by_version = tables()
    return list(by_version.values())[-1] if version is None else by_version.get(str(version))


def label_problems(values: Mapping[str, Any], table: LabelTable) -> Iterator[tuple[str, str]]:
    """The words that `table` does not know: (key, message) for each.

    The torch backend has labels of its own; the trainer's schema judges them.
    """
    torch = values.get("backend") == "torch"
    for key, value in values.items():
        if key in _OWN_KEYS or (torch and key.startswith("train.")):
            continue
        name, words = _words(key, value, table)
        if name in table.unknown_keys and words:
            yield key, f"megatron-core {table.version} has no key '{name}'; {table.unknown_keys[name]}"
            continue
        allowed = table.keys.get(name, [])
        for word in words if allowed else ():
            if word not in allowed and (key, word) not in _OWN_WORDS:
                hint = table.instead.get(name, {}).get(word)
                fix = f"; write {hint}" if hint else did_you_mean(word, allowed)
                yield key, f"{name}: megatron-core {table.version} does not know '{word}'{fix}"


def _words(key: str, value: Any, table: LabelTable) -> tuple[str, list[str]]:
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


def labels(shelf: LintInput) -> Iterator[Problem]:
    """Labels in families, decisions and claims that the named version does not know."""
    for config in configs(shelf.checked):
        version = config.values.get("megatron_core")
        table = table_for(version)
        if table is None:
            yield Problem(
                config.entry,
                (*config.where, "megatron_core"),
                f"no label table for megatron-core {version}{did_you_mean(str(version), tables())}",
            )
            continue
        yield from (
            Problem(config.entry, (*config.where, key), f"{config.name}: {message}")
            for key, message in label_problems(config.values, table)
        )


class View:
    """A configuration, asked by megatron-core's names whatever the card's spelling is."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values: dict[str, list[Any]] = {}
        for key, value in values.items():
            self.values.setdefault(key.rsplit(".", 1)[-1], []).append(value)

    def get(self, *names: str) -> Any:
        """The value of the first of these keys that is set; dotted prefixes do not count."""
        return next((self.values[n][0] for n in names if n in self.values), None)

    def words(self, *names: str) -> frozenset[str]:
        """All words of these keys."""
        values = [v for n in names for v in self.values.get(n, [])]
        parts = [v if isinstance(v, list) else re.split(r"[\s,]+", v) if isinstance(v, str) else [] for v in values]
        return frozenset(w for part in parts for w in part if isinstance(w, str))

    @property
    def recomputed(self) -> frozenset[str]:
        """The modules that are recomputed, or `full`."""
        lists = [v for k in ("recompute", "recompute_modules") for v in self.values.get(k, []) if isinstance(v, list)]
        full = {"full"} if "full" in (self.get("recompute_granularity"), self.get("recompute")) else set()
        return frozenset(w for v in lists for w in v if isinstance(w, str)) | self.words("recompute_modules") | full

    @property
    def graphed(self) -> frozenset[str]:
        """The modules inside CUDA graphs, or `full_iteration`; `layers` where they are graphed and none is named."""
        lists = [v for v in self.values.get("cuda_graph", []) if isinstance(v, list)]
        named = frozenset(w for v in lists for w in v if isinstance(w, str)) | self.words("cuda_graph_modules", "cuda_graph_scope")
        impl = self.get("cuda_graph_impl")
        if "full_iteration" in (impl, self.get("cuda_graph")):
            return named | {"full_iteration"}
        return named or (frozenset({"layers"}) if impl not in (None, "none") else named)

    def options(self) -> tuple[Options, set[str]]:
        """The settings that rules speak of, and which of them are stated."""
        modules = {"recompute": self.recomputed, "graphs": self.graphed, "offload_modules": self.words("offload_modules")}
        switches = {key: value for key, name in NAMES.items() if isinstance(value := self.get(name), bool)}
        dispatchers = self.words("dispatcher", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
        stated: dict[str, Any] = {k: tuple(sorted(n for n in names if _WORD.match(n))) for k, names in modules.items() if names} | switches
        if dispatchers:
            stated["dispatcher"] = "allgather" if "allgather" in dispatchers else min(dispatchers)
        return Options(**stated), set(stated)


NAMES = {
    "ep_overlap": "overlap_moe_expert_parallel_comm",
    "delay_wgrad": "delay_wgrad_compute",
    "shared_overlap": "moe_shared_expert_overlap",
    "offload": "cpu_offloading",
}
"""Switches as megatron-core names them. Source: Megatron-LM core_v0.19.2, `megatron/core/transformer/transformer_config.py`."""

WORDS = Words(names={**NAMES, "recompute": "recompute_modules", "graphs": "cuda_graph_modules", "dispatcher": "moe_token_dispatcher_type"})


def excluded(values: Mapping[str, Any], layout: Mapping[str, int], model: str = "") -> list[str]:
    """Settings of a configuration that megatron-core refuses together; a rule about a setting that is not stated says nothing."""
    view = View(values)
    options, stated = view.options()
    shape = MODELS.get(model)
    stated |= set(layout) | ({"model", "experts"} if shape else set())
    degrees = {k: v for k, v in layout.items() if k in DEGREES and v > 0}
    case = Case(shape=shape, experts=shape.experts if shape else 0, o=options, **degrees)
    messages = broken(case, EXCLUSIONS, words=WORDS, stated=stated)
    if view.get("cuda_graph_impl") == "transformer_engine" and "full_iteration" in options.graphs:
        messages.append(
            "cuda_graph_impl transformer_engine captures modules, not the full iteration; use local on old versions, full_iteration on"
            " new ones"
        )
    return messages


def incompatible(shelf: LintInput) -> Iterator[Problem]:
    """Settings that exclude each other."""
    for config in configs(shelf.checked):
        yield from (
            Problem(config.entry, config.where, f"{config.name}: {message}")
            for message in excluded(config.values, config.layout, config.model)
        )


def _dispatcher_hardware(shelf: LintInput) -> Iterator[Problem]:
    """Dispatchers named for hardware that they do not run on.

    Source: Megatron Bridge, `src/megatron/bridge/training/flex_dispatcher_backend.py` (DeepEP: compute capability 8.x and 9.0,
    B200 and B300; HybridEP: 8.x, 9.0 and 10.x).
    """
    for config in configs(shelf.checked):
        named = gpus_named(config.hardware)
        if (
            "deepep" in View(config.values).words("dispatcher", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
            and named
            and named <= {"GB200", "GB300"}
        ):
            chips = " and ".join(sorted(named))
            yield Problem(config.entry, config.where, f"{config.name}: DeepEP does not run on {chips}; expected hybridep or alltoall")


RULES = (
    LintRule("label-unknown", "A label that the named megatron-core version does not know (the newest, if none is named)", labels),
    LintRule("label-incompatible", "Recompute, graph, overlap or offload settings that exclude each other", incompatible),
    LintRule("dispatcher-hardware", "A dispatcher on hardware that it does not support", _dispatcher_hardware),
)


_PROBES = (
    {"gpus": 64, "tp": 2, "pp": 2, "cp": 2, "ep": 8, "etp": 1},
    {"gpus": 256, "tp": 1, "pp": 8, "cp": 4, "ep": 32, "etp": 1},
    {"gpus": 128, "tp": 4, "pp": 4, "cp": 4, "ep": 4, "etp": 2},
)
"""Layouts that tell a right sizing rule from a wrong one: in some the attention grid is the larger, in others the expert grid."""

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def layout_problems(name: str, degrees: Mapping[str, int], gpus: int | None = None, model: str = "") -> Iterator[str]:
    """What is impossible about a layout: unknown degrees, grids that do not divide, DP or EDP other than what the GPUs leave.

    Source: Megatron-LM, `megatron/core/parallel_state.py` and `megatron/training/arguments.py`.
    """
    unknown = [k for k in degrees if k not in CARD_DEGREES]
    yield from (f"unknown degree '{k}'{did_you_mean(k, CARD_DEGREES)}" for k in unknown)
    low = [k for k, v in degrees.items() if v < 1]
    yield from (f"degree '{k}' is {degrees[k]}; expected 1 or more" for k in low)
    if unknown or low:
        return
    if gpus is not None and gpus < 1:
        yield f"{name}: gpus is {gpus}; expected 1 or more"
        return
    shape = MODELS.get(model)
    counts: dict[str, Any] = {k: getattr(shape, k) for k in ("heads", "kv_heads", "experts")} if shape else {}
    planned_degrees: dict[str, Any] = {k: v for k, v in degrees.items() if k in DEGREES}
    case = Case(gpus=gpus or 1, shape=shape, **counts, **planned_degrees)
    stated = {*DEGREES, *counts, *({"model"} if shape else ()), *({"gpus"} if gpus else ())}
    broken_rules = broken(case, (*LAYOUT, *WIDTHS), stated=stated)
    instead = _instead(model, shape, planned_degrees, gpus) if broken_rules and shape and gpus else ""
    yield from (f"{name}: {rule}{instead}" for rule in broken_rules)
    if gpus is None or not case.fills:
        return
    data_parallel = {"dp": case.dp, "edp": case.edp}
    yield from (
        f"{name}: {k} is {degrees[k]}, but {gpus} GPUs leave {data_parallel[k]}; expected {data_parallel[k]}"
        for k in data_parallel
        if degrees.get(k, data_parallel[k]) != data_parallel[k]
    )


def _instead(model: str, shape: Shape, degrees: Mapping[str, Any], gpus: int) -> str:
    """The nearest legal layout of a known model, in words; nothing where no choice of degrees makes one."""
    near = next(iter(nearest(replace(Plan(shape, model, gpus=gpus), **degrees), 1)), None)
    return f"; the nearest legal layout has {' '.join(f'{k} {v}' for k, v in near.changes.items())}" if near and near.changes else ""


def evaluate(expression: str, numbers: Mapping[str, float]) -> float:
    """The value of a sizing rule: numbers, names, + - * / //, `min` and `max`.

    Raises:
        ConfigError: anything else, or a division by zero.
    """
    try:
        return _value(ast.parse(expression, mode="eval").body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as e:
        raise ConfigError(f"'{expression}' cannot be evaluated: {e}") from e


def _value(node: ast.expr, numbers: Mapping[str, float]) -> float:
    """The value of an expression's node over named numbers.

    Raises:
        ValueError: it holds anything but numbers, names, arithmetic, min and max.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id in numbers:
        return float(numbers[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("min", "max")
        and node.args
        and not node.keywords
    ):
        values = [_value(arg, numbers) for arg in node.args]
        return min(values) if node.func.id == "min" else max(values)
    name = f" '{node.id}'" if isinstance(node, ast.Name) else ""
    raise ValueError(f"found {type(node).__name__}{name}; expected numbers, min, max, + - * / // and one of {', '.join(sorted(numbers))}")


def _family_layouts(shelf: LintInput) -> Iterator[Problem]:
    """Families whose layout cannot be, on their GPUs or on their model."""
    for entry, i, family in each(shelf.checked, lambda card: card.families):
        for message in layout_problems(family.name, family.layout, family.gpus, family.model):
            yield Problem(entry, ("families", i, "layout"), message)


def _decision_layouts(shelf: LintInput) -> Iterator[Problem]:
    """Decisions and claims that set a layout which cannot be."""
    for config in configs(shelf.checked):
        if config.where[0] == "decide" and config.layout:
            for message in layout_problems(config.name, config.layout, config.gpus, config.model):
                yield Problem(config.entry, config.where, message)


def formulas(shelf: LintInput) -> Iterator[Problem]:
    """Sizing rules that disagree with the arithmetic of the two grids, or ask for more GPUs than the card's own rows have."""
    for entry, i, formula in each(shelf.checked, lambda card: card.formulas):
        rows = [(f"family '{f.name}'", f.gpus, f.layout) for f in entry.card.families if f.gpus and set(f.layout) <= set(CARD_DEGREES)]
        rows += [("a layout that divides", p["gpus"], p) for p in _PROBES]
        try:
            message = next((m for row in rows for m in _disagrees(formula.quantity, formula.expression, *row)), None)
        except ConfigError as e:
            message = str(e)
        if message:
            yield Problem(entry, ("formulas", i, "expression"), message)


def _disagrees(quantity: str, expression: str, name: str, gpus: int, degrees: Mapping[str, int]) -> Iterator[str]:
    d = {k: degrees.get(k, 1) for k in ("tp", "pp", "cp", "ep", "etp")}
    right = {"min_gpus": "pp * max(tp * cp, ep * etp)", "dp": "gpus / (tp * cp * pp)", "edp": "gpus / (etp * ep * pp)"}
    if quantity not in right:
        return  # a guess for a degree is what claims are for
    numbers = {**d, "gpus": gpus}
    computed, expected = evaluate(expression, numbers), evaluate(right[quantity], numbers)
    if computed != expected:
        degrees_shown = " ".join(f"{k} {v}" for k, v in d.items() if v > 1)
        yield (
            f"{quantity} by '{expression}' is {computed:g} for {name} ({degrees_shown}, {gpus} GPUs), expected {expected:g}; write"
            f" '{right[quantity]}'"
        )


LAYOUT_RULES = (
    LintRule(
        "layout-family",
        "A family's degrees do not divide its GPUs, heads or experts, or state a DP, EDP or VPP that cannot be",
        _family_layouts,
    ),
    LintRule("layout-decision", "A decision sets degrees that cannot be", _decision_layouts),
    LintRule("layout-formula", "A sizing rule gives another number than the arithmetic of the two grids", formulas),
)
