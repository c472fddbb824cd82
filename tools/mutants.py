"""Mutants of the code that decides: each changes one operator, constant, condition or result, and the unit tests must notice.

    python tools/mutants.py                            # 250 mutants, drawn from all modules
    python tools/mutants.py --most 0 --only slowdown   # all of one module
    python tools/mutants.py --only verdict:307 --tests tests/whole/test_replay.py   # whether other tests notice those of a line

Nothing is written to the tree: a mutant is compiled in a forked process, which imports it in place of its module. Prints each survivor, then a
table. The exit code is 2 where the tests fail without a mutant, 0 otherwise: somebody has to read the survivors.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import scipy.optimize
import scipy.stats  # noqa: F401  these are imported once, before the forks

import playbook.records.case  # noqa: F401
import playbook_trainer.torch.parallel.axes  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "playbook_bench" / "judge"
_VERDICT = ("test_verdict.py", "test_verdict_edges.py")
TESTS: Mapping[str, tuple[str, ...]] = {
    "verdict": (*_VERDICT, "test_curve.py"),
    "effects": (*_VERDICT, "test_curve.py"),
    "statistics": ("test_stats.py", "test_rules_edges.py", *_VERDICT),
    "rules": ("test_rules_edges.py", *_VERDICT),
    "curve_rules": ("test_rules_edges.py", "test_verdict_edges.py", "test_curve.py"),
    "slowdown": ("test_slowdown.py",),
    "receipt": ("../../trainer/observe/test_receipt.py", *_VERDICT),
    "guards": ("test_gates.py", *_VERDICT),
}
"""The tests that are asked of each module, below tests/bench/judge."""
SIMULATIONS = "is_rare or half_speed or steady_steps or noisiest_variant or truth_at_the_margin or true_effect or mirrors"
"""Left out but for `--simulations`: they take longer than all others together."""
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of a module."""

    module: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}  {self.before}  ->  {self.after}"


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant where its module is asked for."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.mutant = f"playbook_bench.judge.{mutant.module}", mutant

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The mutant's, for its module alone."""
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        """Run its source."""
        exec(compile(self.mutant.source, str(FOLDER / f"{self.mutant.module}.py"), "exec"), module.__dict__)


def mutants(module: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    text = (FOLDER / f"{module}.py").read_text()
    tree = ast.parse(text)
    for node in _code(tree):
        for before, after, undo in _changes(node):
            yield Mutant(module, getattr(node, "lineno", 0), before, after, ast.unparse(tree))
            undo()


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What is executed and decides: no annotations, no messages."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                yield from _code(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, str, object]]:
    """Each change of a node, made; the caller reads the tree and then undoes it."""
    found: list[tuple[object, str | int, object]] = []
    if isinstance(node, ast.Compare):
        found += [(node.ops, i, _SWAPPED[type(op)]()) for i, op in enumerate(node.ops)]
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        found.append((node, "op", _SWAPPED[type(node.op)]()))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        found.append((node, "value", not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        found += [(node, "value", node.value + d) for d in (1, -1)]
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        found.append((node, "test", ast.UnaryOp(ast.Not(), node.test)))
    if isinstance(node, ast.comprehension):
        found += [(node.ifs, i, ast.UnaryOp(ast.Not(), test)) for i, test in enumerate(node.ifs)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        found.append((node, "op", ast.UAdd() if isinstance(node.op, ast.USub) else None))
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        found.append((node, "value", ast.Constant(None)))
    for holder, key, new in found:
        before = _shown(node)
        old = holder[key] if isinstance(holder, list) else getattr(holder, str(key))
        if new is None and isinstance(node, ast.UnaryOp):  # `not x` becomes `not not x`, which is as true as x
            holder, key, old, new = node, "operand", node.operand, ast.UnaryOp(ast.Not(), node.operand)
        _put(holder, key, new)
        yield before, _shown(node), lambda h=holder, k=key, o=old: _put(h, k, o)


def _put(holder: object, key: str | int, value: object) -> None:
    if isinstance(holder, list):
        holder[int(key)] = value
    else:
        setattr(holder, str(key), value)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _shown(node: ast.AST) -> str:
    text = f"for .. if {' if '.join(map(ast.unparse, node.ifs))}" if isinstance(node, ast.comprehension) else ast.unparse(node)
    return " ".join(text.splitlines()[0].split())[:110]


def noticed(made: Sequence[Mutant], asked: argparse.Namespace) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant, and whether a test failed; when the time is over, no more are begun."""
    running: dict[int, Mutant] = {}
    left, until = list(made)[::-1], time.monotonic() + 60 * asked.minutes
    while running or left:
        if left and len(running) < asked.at_once:
            mutant = left.pop()
            if pid := os.fork():
                running[pid] = mutant
            else:
                _in_child(mutant, asked)
            left = left if time.monotonic() < until else []
            continue
        pid, status = os.wait()
        yield running.pop(pid), status != 0


def _in_child(mutant: Mutant, asked: argparse.Namespace) -> None:
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.meta_path.insert(0, _Instead(mutant))
    own = [os.path.normpath(f"tests/bench/judge/{name}") for name in TESTS[mutant.module]]
    which = asked.tests or (own if asked.simulations else [*own, "-k", f"not ({SIMULATIONS})"])
    with tempfile.TemporaryDirectory() as folder:
        ended = pytest.main([*which, "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", f"--basetemp={folder}/tests"])
    os._exit(int(ended != 0))


def main(words: Sequence[str] | None = None) -> int:
    """Make them, run them, print what was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=250, help="how many; 0 for all")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin none after this long")
    parser.add_argument("--only", action="append", default=[], metavar="MODULE[:LINE]", help="those of a module, or of one of its lines")
    parser.add_argument("--tests", action="append", default=[], help="the tests that are asked, instead of the module's own")
    parser.add_argument("--simulations", action="store_true", help="with the tests that simulate error rates too")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(words)
    os.chdir(ROOT)
    every = [m for module in TESTS for m in mutants(module)]
    possible = Counter(m.module for m in every)
    if asked.only:
        every = [m for m in every if m.module in asked.only or f"{m.module}:{m.line}" in asked.only]
    random.Random(0).shuffle(every)
    made = every[: asked.most or None]
    plain = [Mutant(m, 0, "", "", (FOLDER / f"{m}.py").read_text()) for m in sorted({m.module for m in made})]
    if failing := [mutant.module for mutant, failed in noticed(plain, asked) if failed]:
        print(f"the tests of {', '.join(failing)} fail without a mutant")
        return 2
    tried, found = Counter[str](), Counter[str]()
    for mutant, failed in noticed(made, asked):
        tried[mutant.module] += 1
        found[mutant.module] += failed
        if not failed:
            print(f"survives  {mutant}", flush=True)
    print("\n| module | possible | made | noticed |\n|---|---:|---:|---:|")
    for module in tried:
        print(f"| {module} | {possible[module]} | {tried[module]} | {found[module]} |")
    print(f"| all | {possible.total()} | {tried.total()} | {found.total()} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
