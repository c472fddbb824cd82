"""Sections of guides and skills, which a search names beside cards."""

from __future__ import annotations

import re
from dataclasses import dataclass

from playbook.paths import data_root

_HEADING = re.compile(r"^(#{1,3}) (.+?) *$", re.M)
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_NOT_SEARCHED = frozenset({"glossary", "architecture"})
"""Guides left out of search: they mention every subject, so they would match every question."""


@dataclass(frozen=True)
class Section:
    """One section of a guide or skill."""

    source: str
    """Its file from the repository's root, such as `docs/guide/cluster.md`."""
    title: str
    """The page's title, and the section's."""
    text: str


def load_sections() -> list[Section]:
    """Every section of the guides and skills that ship."""
    guides = [(f"docs/guide/{p.name}", p) for p in sorted(data_root("guide").glob("*.md")) if p.stem not in _NOT_SEARCHED]
    skills = [(f"skills/{p.parent.name}/SKILL.md", p) for p in sorted(data_root("skills").glob("*/SKILL.md"))]
    return [page for source, path in [*guides, *skills] for page in sections(source, path.read_text(encoding="utf-8"))]


def sections(source: str, text: str) -> list[Section]:
    """A file's sections; what stands before its first heading belongs to that."""
    prose = _FENCE.sub("", text)
    found = list(_HEADING.finditer(prose))
    if not found:
        return []
    top = found[0][2]
    ends = [m.start() for m in found[1:]] + [len(prose)]
    out = [Section(source, m[2] if m[2] == top else f"{top}: {m[2]}", prose[m.end() : end]) for m, end in zip(found, ends, strict=True)]
    return [Section(source, out[0].title, prose[: found[0].start()] + out[0].text), *out[1:]]
