"""Mutants of the code that decides: each changes one operator, constant, condition or result, and the tests must notice.

    python tools/mutants.py                                # every mutant, one at a time
    python tools/mutants.py --only judge.slowdown          # those of a module, or of one of its lines: judge.slowdown:97
    python tools/mutants.py --most 100                     # a draw

Nothing is written to the tree. The tests are collected once and run once to learn which of them reach which lines, and how long each takes.
Each mutant then has a forked process, in which the functions and constants that it changes are replaced; the tests that reach its line run,
the shortest first, until one fails. A process that takes too long has failed. Prints each survivor, then a table. The exit code is 2 where
the tests fail without a mutant, 0 otherwise: somebody has to read the survivors.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import operator
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
import scipy.optimize
import scipy.stats  # noqa: F401  these are imported once, before the forks
from _pytest.tmpdir import tmppath_result_key

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "playbook_bench"
MODULES: Mapping[str, tuple[str, ...]] = {
    "judge.verdict": (),
    "judge.effects": (),
    "judge.design": (),
    "judge.statistics": (),
    "judge.verdict_rules": (),
    "judge.slowdown": (),
    "judge.receipt": (),
    "judge.guards": (),
    "run.gate": (
        "Limits", "GateResult", "_as_gate_case", "_resolve", "_differences", "_plan", "_measure", "_settled", "_against",
        "_slowdowns", "_judge_all", "_judge", "_effect", "_judge_exact", "_sentence", "_alike", "_problem", "as_json",
    ),
}  # fmt: skip
"""The modules that decide; of the gate, what decides in it."""
TESTS = ("tests/bench/judge", "tests/trainer/observe/test_receipt.py", "tests/bench/run/test_gate_decision.py")
_GRACE_S = 20
"""A mutant that makes its tests take so much longer is noticed."""
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of a module."""

    module: str
    line: int
    lines: frozenset[int] | None
    """The lines of its statement; None where it is executed when the module is imported."""
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}  {self.before}  ->  {self.after}"


def file_of(module: str) -> Path:
    """Where a module's source lies."""
    return ROOT / "bench" / PACKAGE / f"{module.replace('.', '/')}.py"


def mutants(module: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(file_of(module).read_text())
    names = MODULES[module]
    for top in tree.body:
        if names and getattr(top, "name", None) not in names:
            continue
        for node, lines in _code(top, None):
            for before, after, undo in _changes(node):
                yield Mutant(module, getattr(node, "lineno", 0), lines, before, after, ast.unparse(tree))
                undo()


def _code(node: ast.AST, lines: frozenset[int] | None, inside: bool = False) -> Iterator[tuple[ast.AST, frozenset[int] | None]]:
    """What is executed and decides, with the lines of its statement: no annotations, no messages."""
    if inside and isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno
        lines = frozenset(range(node.lineno, max(node.lineno, end or 0) + 1))
    yield node, lines
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        within = inside or (isinstance(node, ast.FunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                yield from _code(child, lines, within)


def _changes(node: ast.AST) -> Iterator[tuple[str, str, Any]]:
    """Each change of a node, made; the caller reads the tree and then undoes it. What is changed is a list, or the node's own fields."""
    changes: list[tuple[Any, str | int, Any]] = []
    own = vars(node)
    if isinstance(node, ast.Compare):
        changes += [(node.ops, i, _SWAPPED[type(op)]()) for i, op in enumerate(node.ops)]
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        changes.append((own, "op", _SWAPPED[type(node.op)]()))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changes.append((own, "value", not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        changes += [(own, "value", node.value + d) for d in (1, -1)]
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        changes.append((own, "test", ast.UnaryOp(ast.Not(), node.test)))
    if isinstance(node, ast.comprehension):
        changes += [(node.ifs, i, ast.UnaryOp(ast.Not(), test)) for i, test in enumerate(node.ifs)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        changes.append((own, "op", ast.UAdd()))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):  # `not x` becomes `not not x`, which is as true as x
        changes.append((own, "operand", ast.UnaryOp(ast.Not(), node.operand)))
    if isinstance(node, ast.Return) and node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        changes.append((own, "value", ast.Constant(None)))
    for holder, key, new in changes:
        before, old = _shown(node), holder[key]
        holder[key] = new
        yield before, _shown(node), partial(operator.setitem, holder, key, old)


def _shown(node: ast.AST) -> str:
    text = f"for .. if {' if '.join(map(ast.unparse, node.ifs))}" if isinstance(node, ast.comprehension) else ast.unparse(node)
    return " ".join(text.splitlines()[0].split())[:110]


def put_in_place(mutant: Mutant) -> None:
    """Give the functions, classes and constants of the module that is in use what the mutant's have."""
    module = importlib.import_module(f"{PACKAGE}.{mutant.module}")
    new = {"__name__": module.__name__, "__package__": module.__package__, "__file__": module.__file__}
    exec(compile(mutant.source, str(file_of(mutant.module)), "exec"), new)
    for name, value in new.items():
        if not name.startswith("__"):
            _replace(module, name, getattr(module, name), value)


def _replace(holder: ModuleType | type, name: str, old: Any, new: Any) -> None:
    """Put a value of the mutated module in place of the old one, wherever the package uses that: functions by their code, classes by their
    members."""
    old, new = _plain(old), _plain(new)
    if old is new:  # imported from elsewhere
        return
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        if old.__module__ == new.__module__ and len(old.__code__.co_freevars) == len(new.__code__.co_freevars):
            old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
    elif isinstance(old, type) and isinstance(new, type):
        for key, value in list(vars(new).items()):
            if key not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__") and "pydantic" not in key:
                _replace(old, key, vars(old).get(key), value)
    elif isinstance(old, dict) and isinstance(new, dict):
        old.clear()
        old.update(new)
    elif isinstance(new, bool | int | float | str | tuple | frozenset) and (type(old), old) != (type(new), new):
        users = [] if isinstance(holder, type) else [m for n, m in list(sys.modules.items()) if n.startswith(PACKAGE)]
        for place in [holder, *users]:
            if vars(place).get(name, place) is old:
                setattr(place, name, new)


def _plain(value: Any) -> Any:
    """The function inside a property, a method of the class, or a cache, which is emptied."""
    if hasattr(value, "cache_clear"):
        value.cache_clear()
    return getattr(value, "fget", None) or getattr(value, "__func__", None) or getattr(value, "__wrapped__", None) or value


class Reached(NamedTuple):
    """What one test has executed, and how long it took."""

    seconds: float
    lines: frozenset[tuple[str, int]]


class _Mutating:
    """A plugin that runs the collected tests for each mutant, in place of once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.code = arguments, 0

    @cached_property
    def made(self) -> list[Mutant]:
        """The mutants that are asked for."""
        only = self.arguments.only
        chosen = [m for module in MODULES for m in mutants(module) if not only or m.module in only or f"{m.module}:{m.line}" in only]
        if self.arguments.most and self.arguments.most < len(chosen):
            chosen = random.Random(0).sample(chosen, self.arguments.most)
        return chosen

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of one run of the tests."""
        began = time.monotonic()
        reached = _reached(session.items)
        if isinstance(reached, str):
            print(reached)
            self.code = 2
            return True
        short = [i for i in sorted(reached, key=lambda i: reached[i].seconds) if reached[i].seconds <= self.arguments.slowest]
        print(f"{len(reached)} tests reach the code, {len(short)} are asked; {time.monotonic() - began:.0f} s", flush=True)
        gc.freeze()  # what a child does not collect, it does not copy
        began, tried, noticed_by_module = time.monotonic(), Counter[str](), Counter[str]()

        def noticed(mutant: Mutant) -> tuple[bool, int]:
            file = str(file_of(mutant.module))
            tests = [i for i in short if any(f == file and (mutant.lines is None or n in mutant.lines) for f, n in reached[i].lines)]
            return _noticed(mutant, [session.items[i] for i in tests], _GRACE_S + 3 * sum(reached[i].seconds for i in tests)), len(tests)

        for module in sorted({m.module for m in self.made}):
            if noticed(Mutant(module, 0, None, "", "", file_of(module).read_text()))[0]:
                print(f"the tests of {module} fail where it is put in place unchanged")
                self.code = 2
                return True
        for mutant in self.made:
            failed, tests = noticed(mutant)
            tried[mutant.module] += 1
            noticed_by_module[mutant.module] += failed
            if not failed:
                print(f"survives {tests:3} tests  {mutant}", flush=True)
        print("\n| module | mutants | noticed |\n|---|---:|---:|")
        for module in tried:
            print(f"| {module} | {tried[module]} | {noticed_by_module[module]} |")
        print(
            f"| all | {tried.total()} | {noticed_by_module.total()} |\n\n{(time.monotonic() - began) / max(1, tried.total()):.2f} s a "
            "mutant"
        )
        return True


def _reached(items: Sequence[pytest.Item]) -> dict[int, Reached] | str:
    """By its place, what each test that executes deciding code executes of it; which one fails, where one does."""
    files = {str(file_of(module)) for module in MODULES}
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "reached"
        if (pid := os.fork()) == 0:
            with _a_child():
                try:
                    result: Any = {i: r for i, r in enumerate(_traced(items, files)) if r.lines}
                except RuntimeError as e:
                    result = str(e)
                into.write_bytes(pickle.dumps(result))
        os.waitpid(pid, 0)
        reached: dict[int, Reached] | str = pickle.loads(into.read_bytes())
        return reached


def _traced(items: Sequence[pytest.Item], files: Iterable[str]) -> Iterator[Reached]:
    """Run each test once, and yield the deciding lines that it executes.

    Raises:
        RuntimeError: a test fails without a mutant.
    """
    executed: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        executed.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    for number, item in enumerate(items):
        executed.clear()
        began = time.monotonic()
        threading.settrace(trace)
        sys.settrace(trace)
        failed = _fails(items, number)
        sys.settrace(None)
        if failed:
            raise RuntimeError(f"{item.nodeid} fails without a mutant")
        yield Reached(time.monotonic() - began, frozenset(executed))


def _noticed(mutant: Mutant, items: Sequence[pytest.Item], seconds: float) -> bool:
    if (pid := os.fork()) == 0:
        with _a_child():
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(2 * seconds))
            put_in_place(mutant)
            os._exit(int(any(_fails(items, number) for number in range(len(items)))))
    return os.waitpid(pid, 0)[1] != 0


@contextlib.contextmanager
def _a_child() -> Iterator[None]:
    """A forked process: it says nothing, and ends here, with 1 where anything is raised."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    try:
        yield
    except BaseException:
        os._exit(1)
    os._exit(0)


def _fails(items: Sequence[Any], number: int) -> bool:
    """Run one test without a report, which takes longer than most tests; the fixtures that the next one shares stay."""
    item, after = items[number], items[number + 1] if number + 1 < len(items) else None
    item._initrequest()
    item.stash[tmppath_result_key] = {}
    try:
        item.config.hook.pytest_runtest_setup(item=item)
        item.config.hook.pytest_runtest_call(item=item)
        item.config.hook.pytest_runtest_teardown(item=item, nextitem=after)
    except pytest.skip.Exception:
        item.config.hook.pytest_runtest_teardown(item=item, nextitem=after)
    except BaseException:
        return True
    return False


def main(words: Sequence[str] | None = None) -> int:
    """Make them, run them, print what was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="MODULE[:LINE]", help="those of a module, or of one of its lines")
    parser.add_argument("--most", type=int, default=0, help="draw so many")
    parser.add_argument("--slowest", type=float, default=3.0, metavar="SECONDS", help="leave tests out that take longer")
    arguments = parser.parse_args(words)
    os.chdir(ROOT)
    plugin = _Mutating(arguments)
    with tempfile.TemporaryDirectory() as folder:
        quiet = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout=0",
            "--assert=plain",
            f"--basetemp={folder}/tests",
            "-m",
            "not gpu and not multigpu and not slow",
        ]
        ended = pytest.main([*TESTS, *quiet, "-s"], plugins=[plugin])
    return int(ended) if ended == pytest.ExitCode.USAGE_ERROR else plugin.code


if __name__ == "__main__":
    sys.exit(main())
