"""Names that do not say what they hold, and long functions that do not say what they do.

`python tools/names.py` prints both for the product and exits with 1 if placeholders are more than `SHARE` of the bindings, or if a
function of `LINES` lines or more has no docstring. `--list` names every placeholder with its place.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("playbook", "app/playbook_app", "bench/playbook_bench", "trainer/playbook_trainer")
# fmt: off
PLACEHOLDERS = frozenset((
    "found", "own", "kept", "held", "said", "told", "here", "there", "mine", "same", "given", "made", "asked", "left", "rest", "once",
    "again", "taken", "seen", "known", "wanted", "put",
))
# fmt: on
SHARE = 0.015
"""The most placeholders among bindings: names that are stored to, and arguments."""
LINES = 15


@dataclass(frozen=True)
class Names:
    """What one module binds, and its functions of `LINES` lines or more without a docstring; places are `file:line`."""

    bindings: int
    placeholders: Sequence[tuple[str, str]]
    undocumented: Sequence[tuple[str, str]]


def bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every binding of a module with its line, without `self`, `cls` and `_`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name not in ("self", "cls", "_"):
            yield name, node.lineno


def undocumented(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Functions of `LINES` lines or more without a docstring, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= LINES and not ast.get_docstring(node):
                yield node.name, node.lineno


def read(source: str, file: str) -> Names:
    """The names of a module's source."""
    tree = ast.parse(source)
    bindings = list(bound(tree))
    placeholders = [(name, f"{file}:{line}") for name, line in bindings if name in PLACEHOLDERS]
    return Names(len(bindings), placeholders, [(name, f"{file}:{line}") for name, line in undocumented(tree)])


def faults(modules: Sequence[Names]) -> list[str]:
    """What is wrong with the product's names, one message each; empty where nothing is."""
    bindings = sum(m.bindings for m in modules)
    words = Counter(name for m in modules for name, _ in m.placeholders)
    messages = [f"{place}: {name} has {LINES} lines or more and no docstring" for m in modules for name, place in m.undocumented]
    if words.total() > SHARE * bindings:
        common = ", ".join(f"{name} {count}" for name, count in words.most_common(5))
        messages.append(
            f"{words.total() / bindings:.1%} of {bindings:,} bindings are placeholders ({common}), expected at most {SHARE:.1%};"
            " name each after what it holds (python tools/names.py --list has their places)"
        )
    return messages


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the product, or the files and folders that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; the product, if none is named")
    parser.add_argument("--list", action="store_true", help="name every placeholder with its place")
    options = parser.parse_args(arguments)
    roots = options.paths or [ROOT / package for package in PACKAGES]
    files = [file for root in roots for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    modules = [read(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)) for file in files]
    if options.list:
        print("\n".join(f"{place}: {name}" for module in modules for name, place in module.placeholders))
    bindings, placeholders = sum(m.bindings for m in modules), sum(len(m.placeholders) for m in modules)
    print(f"{placeholders} of {bindings:,} bindings are placeholders, {placeholders / max(bindings, 1):.2%}")
    messages = faults(modules)
    print("\n".join(messages), file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
