"""How the packages hang together: no circle of imports, small folders, rules without exceptions, and no public name that nobody uses."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from playbook.paths import repo_root
from playbook_app.cli import app

ROOT = repo_root()
PACKAGES = ("playbook", "app/playbook_app", "bench/playbook_bench", "trainer/playbook_trainer")
MODULES = 20
"""The most in one folder, besides `__init__`."""
LINES = 600
"""The most in one module."""
EXCEPTIONS = 2
"""The most that import-linter's rules may have, together."""
LATE = 20
"""Fewer than so many imports of the faces stand in functions: what only one command of several in its module needs."""
COMMANDS = ("command", "callback", "tool", "validator", "serializer")
"""A decorator with one of these words calls the function by itself: Typer, MCP and pydantic."""


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for types count as well."""
    graph = grimp.build_graph(*(Path(p).name for p in PACKAGES), exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("package", [Path(p).name for p in PACKAGES])
def test_the_rooms_of_a_package_import_one_way(package: str) -> None:
    """A room is a folder of the package, or a module beside them."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    rooms: dict[str, set[str]] = {}
    for module in graph.modules:
        room = ".".join(module.split(".")[:2])
        others = {".".join(other.split(".")[:2]) for other in graph.find_modules_directly_imported_by(module)}
        rooms.setdefault(room, set()).update(others - {room})
    TopologicalSorter(rooms).prepare()


@pytest.mark.parametrize("top", [*PACKAGES, "tests", "tools"])
def test_no_folder_has_more_modules_than_a_reader_takes_in(top: str) -> None:
    folders = {path.parent for path in (ROOT / top).rglob("*.py")}
    counts = {str(folder.relative_to(ROOT)): len({*folder.glob("*.py")} - {folder / "__init__.py"}) for folder in folders}
    assert {folder: n for folder, n in counts.items() if n > MODULES} == {}


def test_no_module_is_longer_than_a_reader_follows() -> None:
    lines = {
        str(path.relative_to(ROOT)): path.read_bytes().count(b"\n")
        for top in (*PACKAGES, "tests", "tools")
        for path in (ROOT / top).rglob("*.py")
    }
    assert {path: n for path, n in lines.items() if n > LINES} == {}


def test_rules_of_imports_have_hardly_an_exception() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    exceptions = [words for contract in settings["contracts"] for words in contract.get("ignore_imports", [])]
    assert len(exceptions) <= EXCEPTIONS, exceptions
    assert not [words for words in exceptions if "*" in words]


def test_every_command_has_a_module_of_its_name_or_of_the_command_it_builds_on() -> None:
    modules = {path.stem for path in (ROOT / "app/playbook_app/cli/commands").glob("*.py")} - {"__init__"}
    assert modules == set(app.COMMANDS) - set(app.BESIDE) - {"version"}
    assert set(app.BESIDE.values()) <= modules


def test_faces_import_at_the_top() -> None:
    """A command's module is imported when it is called, so that its own imports need not wait."""
    late = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "app").rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(set(late)) < LATE, late


def public_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and constants of a module, without those that a decorator puts to use."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not any(
            word in ast.dump(decorator) for decorator in node.decorator_list for word in COMMANDS
        ):
            yield node.name


def words_used(tree: ast.Module) -> set[str]:
    """Every name that code reads or imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name.rpartition(".")[2])
    return found


TEXT = ("*.md", "docs/**/*.md", "bench/cases/*.yaml", "pyproject.toml", "mkdocs.yml", "tests/**/*.py", "tools/*.py", "docs/*.py")
"""What may name a function or a constant besides the product's own modules."""


def test_no_public_name_goes_unused() -> None:
    """A class is used somewhere in the product, and a function or constant outside its own module, or a page, case, test or tool names it."""
    trees = {path: ast.parse(path.read_text()) for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    used = {path: words_used(tree) for path, tree in trees.items()}
    named = set().union(*(re.findall(r"\w+", path.read_text()) for pattern in TEXT for path in ROOT.glob(pattern)))
    modules = Counter(name for words in used.values() for name in words)
    unused = []
    for path, tree in trees.items():
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in public_names(tree):
            elsewhere = modules[name] - (name in used[path] and name not in classes)
            if not name.startswith("_") and name not in named and not elsewhere:
                unused.append((str(path.relative_to(ROOT)), name))
    assert unused == []
