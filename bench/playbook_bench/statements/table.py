"""The functions that a case of kind `arithmetic` or `invariant` may name: those of three folders, loaded when they are called.

Adding one is adding a module to `arithmetic/`, `numerics/` or `invariants/` with a function of its name, which returns a `Statement`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil

from playbook.errors import ConfigError
from playbook.records.case import Case
from playbook.yaml_files import did_you_mean
from playbook_bench.judge.verdict import Statement
from playbook_bench.statements import arithmetic, invariants, numerics

_FOLDERS = {"arithmetic": (arithmetic, numerics), "invariant": (invariants,)}


def names(kind: str) -> list[str]:
    """The functions for cases of this kind."""
    return sorted(_homes(kind))


def _homes(kind: str) -> dict[str, str]:
    """By function, the package that its module lies in."""
    return {module.name: folder.__name__ for folder in _FOLDERS[kind] for module in pkgutil.iter_modules(folder.__path__)}


def run(case: Case) -> Statement:
    """Whether the case's statement holds, the sentence that says so, and the figures behind it.

    Raises:
        ConfigError: there is no such function, or its arguments do not fit.
    """
    name, known = case.function or "", _homes(case.kind)
    if name not in known:
        raise ConfigError(f"case '{case.id}': function '{name}' is not known{did_you_mean(name, known)}")
    function = getattr(importlib.import_module(f"{known[name]}.{name}"), name)
    try:
        holds, sentence, figures = function(**case.arguments)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
        raise ConfigError(f"case '{case.id}': {name} does not take these arguments: {type(e).__name__}: {e}") from e
    return bool(holds), sentence, json.loads(json.dumps(figures))
