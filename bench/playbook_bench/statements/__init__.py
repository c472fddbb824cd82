"""The functions that a case of kind `arithmetic` or `invariant` may name: those of the modules below that return a `Statement`.

Adding one is adding such a function to the module of its subject.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable

from playbook.errors import ConfigError
from playbook.records.case import Case
from playbook.yaml_files import did_you_mean
from playbook_bench.judge.verdict import Statement

_MODULES = {"arithmetic": ("layouts", "numerics", "utilization"), "invariant": ("rules", "training")}
"""By kind of case. They are imported when a function is asked for: commands that list or judge runs need none of them."""


def names(kind: str) -> list[str]:
    """The functions for cases of this kind."""
    return sorted(_functions(kind))


def _functions(kind: str) -> dict[str, Callable[..., Statement]]:
    modules = [importlib.import_module(f"playbook_bench.statements.{name}") for name in _MODULES[kind]]
    every = {name: value for module in modules for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    return {name: value for name, value in every.items() if getattr(value, "__annotations__", {}).get("return") == "Statement"}


def run(case: Case) -> Statement:
    """Whether the case's statement holds, the sentence that says so, and the figures behind it.

    Raises:
        ConfigError: there is no such function, or its arguments do not fit.
    """
    name, functions = case.function or "", _functions(case.kind)
    if name not in functions:
        raise ConfigError(f"case '{case.id}': function '{name}' is not known{did_you_mean(name, functions)}")
    try:
        holds, sentence, figures = functions[name](**case.arguments)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
        raise ConfigError(f"case '{case.id}': {name} does not take these arguments: {type(e).__name__}: {e}") from e
    return bool(holds), sentence, json.loads(json.dumps(figures))
