"""Lint rules about layouts: degrees that do not divide, degrees stated wrongly, and sizing rules that are wrong."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from playbook.errors import ConfigError
from playbook.lint.base import Config, LintInput, LintRule, Problem, configs
from playbook.planner.models import MODELS
from playbook.planner.nearest_layouts import nearest
from playbook.planner.plan import DEGREES as PLANNED
from playbook.planner.plan import Plan
from playbook.planner.rules import LAYOUT, WIDTHS, Case, broken
from playbook.planner.shapes import Shape
from playbook.yaml_files import did_you_mean

DEGREES = ("tp", "pp", "cp", "ep", "etp", "edp", "dp", "vpp")
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
    unknown = [k for k in degrees if k not in DEGREES]
    yield from (f"unknown degree '{k}'{did_you_mean(k, DEGREES)}" for k in unknown)
    low = [k for k, v in degrees.items() if v < 1]
    yield from (f"degree '{k}' is {degrees[k]}; expected 1 or more" for k in low)
    if unknown or low:
        return
    if gpus is not None and gpus < 1:
        yield f"{name}: gpus is {gpus}; expected 1 or more"
        return
    shape = MODELS.get(model)
    counts: dict[str, Any] = {k: getattr(shape, k) for k in ("heads", "kv_heads", "experts")} if shape else {}
    planned_degrees: dict[str, Any] = {k: v for k, v in degrees.items() if k in PLANNED}
    case = Case(gpus=gpus or 1, shape=shape, **counts, **planned_degrees)
    stated = {*PLANNED, *counts, *({"model"} if shape else ()), *({"gpus"} if gpus else ())}
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
        tree = ast.parse(expression, mode="eval")
        return _value(tree.body, numbers)
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
    for entry in shelf.checked:
        for i, family in enumerate(entry.card.families):
            for message in layout_problems(family.name, family.layout, family.gpus, family.model):
                yield Problem(entry, ("families", i, "layout"), message)


def _decision_layouts(shelf: LintInput) -> Iterator[Problem]:
    """Decisions and claims that set a layout which cannot be."""
    for config in _others(shelf):
        for message in layout_problems(config.name, config.layout, config.gpus, config.model):
            yield Problem(config.entry, config.where, message)


def _others(shelf: LintInput) -> Iterator[Config]:
    for entry in shelf.checked:
        yield from (c for c in configs(entry) if c.where[0] == "decide" and c.layout)


def formulas(shelf: LintInput) -> Iterator[Problem]:
    """Sizing rules that disagree with the arithmetic of the two grids, or ask for more GPUs than the card's own rows have."""
    for entry in shelf.checked:
        for i, formula in enumerate(entry.card.formulas):
            where = ("formulas", i, "expression")
            rows = [(f"family '{f.name}'", f.gpus, f.layout) for f in entry.card.families if f.gpus and set(f.layout) <= set(DEGREES)]
            rows += [("a layout that divides", p["gpus"], p) for p in _PROBES]
            try:
                message = next((m for row in rows for m in _disagrees(formula.quantity, formula.expression, *row)), None)
            except ConfigError as e:
                message = str(e)
            if message:
                yield Problem(entry, where, message)


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


RULES = (
    LintRule(
        "layout-family",
        "A family's degrees do not divide its GPUs, heads or experts, or state a DP, EDP or VPP that cannot be",
        _family_layouts,
    ),
    LintRule("layout-decision", "A decision sets degrees that cannot be", _decision_layouts),
    LintRule("layout-formula", "A sizing rule gives another number than the arithmetic of the two grids", formulas),
)
