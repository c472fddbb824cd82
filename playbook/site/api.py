"""The API page: public names of each module with their docstrings, read from the source without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from playbook.site.text import block, code, front_matter, link, table, text

_HIDDEN = re.compile(r"(^|\.)(_|cli|site|lint_|mcp_|skills_)")
"""Modules that serve one other module: parts of the command line, of the site, of the linter, of the server."""

_SECTION = re.compile(r"^(Shapes|Units|Raises|Source|Sources|Args|Returns): ?(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A public function or class."""

    name: str
    signature: str
    doc: str
    members: list[tuple[str, str]]
    """Methods, properties and fields of a class, each with the first paragraph of its text."""


def api_pages(packages: Mapping[str, Path]) -> dict[str, str]:
    """One page per package, and an index of all modules."""
    pages, rows = {}, []
    for package, folder in packages.items():
        modules = dict(_modules(package, folder))
        target = f"api-{package.replace('_', '-')}.md"
        pages[f"_generated/{target}"] = _page(package, modules)
        rows += [[link(code(name), f"{target}#{_anchor(name)}"), _inline(_first(tree))] for name, tree in modules.items()]
    intro = (
        "What the three packages offer to Python. Everything here is also reachable from the [command line](commands.md), which is the stabler "
        "of the two. `playbook` needs neither torch nor a GPU."
    )
    index = "\n\n".join([front_matter("API", search="boost: 0.2"), "# API", intro, table(["Module", "What it is for"], rows)]) + "\n"
    return {"_generated/api.md": index, **pages}


def _modules(package: str, folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """The modules of a package that have public names, in the order of their names."""
    for path in sorted(folder.rglob("*.py")):
        parts = [*path.relative_to(folder).with_suffix("").parts]
        name = ".".join([package, *(p for p in parts if p != "__init__")])
        if _HIDDEN.search(".".join(parts).removesuffix("__init__")) or parts[-1] == "__main__":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(True for _ in entries(tree)):
            yield name, tree


def entries(tree: ast.Module) -> Iterator[Entry]:
    """Public functions and classes of a module, in its own order."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield Entry(node.name, _signature(node), ast.get_docstring(node) or "", [])
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(ast.unparse(b) for b in node.bases)
            head = f"class {node.name}" + (f"({bases})" if bases else "")
            yield Entry(node.name, head, ast.get_docstring(node) or "", list(_members(node)))


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            prop = any(isinstance(d, ast.Name) and d.id in ("property", "cached_property") for d in item.decorator_list)
            yield (item.name if prop else _signature(item)), _paragraph(ast.get_docstring(item))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            value = after.value if isinstance(after, ast.Expr) else None
            doc = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
            yield f"{item.target.id}: {ast.unparse(item.annotation)}", _paragraph(doc)


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def _page(package: str, modules: Mapping[str, ast.Module]) -> str:
    parts = [front_matter(f"API: {package}", search="exclude: true"), f"# {text(package)}"]
    for name, tree in modules.items():
        parts += [f"## {text(name)} {{ #{_anchor(name)} }}", _doc(ast.get_docstring(tree) or "")]
        for entry in entries(tree):
            parts += [
                f"### {text(entry.name)} {{ #{_anchor(name)}-{entry.name} }}",
                block(_wrapped(entry.signature), "python"),
                _doc(entry.doc),
            ]
            if entry.members:
                parts.append(table(["Member", "Meaning"], [[code(m), _inline(doc)] for m, doc in entry.members]))
    return "\n\n".join(p for p in parts if p) + "\n"


def _wrapped(signature: str) -> str:
    """A long signature with one parameter a line."""
    found = re.match(r"(\w+)\((.*)\)( -> .*)?$", signature)
    if len(signature) <= 100 or not found:
        return signature
    return f"{found[1]}(\n    " + ",\n    ".join(_split(found[2])) + f",\n){found[3] or ''}"


def _split(arguments: str) -> list[str]:
    """Parameters as written, cut at commas outside every bracket and quotation mark."""
    out, depth, quote = [""], 0, ""
    for c in arguments:
        quote = "" if c == quote else c if not quote and c in "'\"" else quote
        depth += 0 if quote else (c in "([{") - (c in ")]}")
        if c == "," and not depth and not quote:
            out.append("")
        else:
            out[-1] += c
    return [p.strip() for p in out]


def _doc(doc: str) -> str:
    """A docstring as Markdown: paragraphs, with its sections named."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", doc.strip()):
        found = _SECTION.match(paragraph.strip())
        parts.append(f"*{found[1]}:* {_inline(found[2])}" if found else _inline(paragraph))
    return "\n\n".join(p for p in parts if p)


def _inline(words: str) -> str:
    """Text with what stands between backticks as code."""
    pieces = re.split(r"`+([^`]+)`+", words)
    return "".join(code(p) if i % 2 else _between(p) for i, p in enumerate(pieces)).strip()


def _between(piece: str) -> str:
    """Text as it stands between two pieces of code, with the spaces at its ends."""
    if not piece.strip():
        return " " if piece else ""
    return (" " if piece[0].isspace() else "") + text(piece) + (" " if piece[-1].isspace() else "")


def _paragraph(doc: str | None) -> str:
    return re.split(r"\n\s*\n", (doc or "").strip())[0]


def _first(tree: ast.Module) -> str:
    return _paragraph(ast.get_docstring(tree))


def _anchor(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")
