"""Skill folders of others (SKILL.md beside card.yaml, of any schema): what they hold and what is wrong with it.

Nothing of their prose is kept or printed: only names, keys, labels, degrees and places. The folders are hostile input: files are
bounded, symbolic links are not followed, and no path leaves the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from playbook.errors import FileError, Finding, PlaybookError
from playbook.lint.figures import is_text_number
from playbook.lint.labels import excluded, label_problems, table_for
from playbook.lint.layout import layout_problems
from playbook.yaml_files import MAX_BYTES, Marks, Path_, locate, parse

RULES = (
    ("import-file", "A skill folder without a readable SKILL.md or card.yaml"),
    ("import-front-matter", "Front matter outside the Agent Skills specification"),
    ("import-length", "A SKILL.md longer than the specification recommends"),
    ("import-link", "A link to a file that does not exist, or that leads out of the skill's folder"),
    ("import-label", "A label that megatron-core does not know, or settings that exclude each other"),
    ("import-layout", "A layout that does not divide, or states DP or EDP wrongly"),
    ("import-number", "A number written as text"),
)
"""What `playbook skills report` finds: id and title."""

FIELDS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
"""The front matter that exists. Source: Agent Skills specification, https://agentskills.io/specification."""

MAX_LINES = 500
_MAX_SKILLS = 1000
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_LINK = re.compile(r"\[[^\]\n]{0,300}\]\(([^)\s]{1,500})(?:\s+\"[^\"\n]{0,200}\")?\)")
_DEGREE = re.compile(r"(?<![A-Za-z0-9])(ETP|EDP|VPP|TP|PP|CP|EP|DP)\s?[=:]?\s?([0-9]{1,5})(?![0-9])", re.IGNORECASE)
_GPUS = re.compile(
    r"(?<![A-Za-z0-9])([0-9]{1,6})\s?(?:[x×]\s?(?:G?[BH][0-9]{3}|A100)\b|(?:[GH]?[A-Z]?[0-9]{2,3}\s)?GPUs?\b)", re.IGNORECASE
)
_GPU_KEYS = ("gpus", "num_gpus", "gpu_count", "total_gpus", "world_size")
_LONG = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "virtual_pipeline_model_parallel_size": "vpp",
}
_SHORT = ("tp", "pp", "cp", "ep", "etp", "edp", "dp", "vpp")


@dataclass
class ForeignSkill:
    """The contents of one skill folder, without its prose."""

    path: Path
    front_matter: list[str] = field(default_factory=list)
    card_keys: list[str] = field(default_factory=list)
    rows: int = 0
    layouts: int = 0
    labels: int = 0
    links: int = 0


def summary(skill: ForeignSkill) -> dict[str, Any]:
    """One row of a table: the name of the skill and its counts."""
    return {
        "skill": _plain(skill.path.name),
        "front_matter": skill.front_matter,
        "card_keys": len(skill.card_keys),
        "keys": skill.card_keys,
        "rows": skill.rows,
        "layouts": skill.layouts,
        "labels": skill.labels,
        "links": skill.links,
    }


def read_folder(folder: Path) -> tuple[list[ForeignSkill], list[Finding]]:
    """The skills of a folder, or the folder itself as one, and everything that is wrong with them.

    Raises:
        PlaybookError: there is no such folder, or no skill in it.
    """
    if not folder.is_dir():
        raise PlaybookError(f"'{folder}' is no folder; expected a skill folder, or a folder of them")
    is_skill = _holds_skill(folder)
    skill_folders = [folder] if is_skill else sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and _holds_skill(p))
    if not skill_folders:
        raise PlaybookError(f"'{folder}' holds no skill; expected SKILL.md or card.yaml in it, or in its subfolders")
    if len(skill_folders) > _MAX_SKILLS:
        raise PlaybookError(f"'{folder}' holds {len(skill_folders)} skills; at most {_MAX_SKILLS} are read at once")
    skills, findings = [], []
    for path in skill_folders:
        skill = ForeignSkill(path)
        findings += [*_skill_md(skill), *_card(skill)]
        skills.append(skill)
    return skills, findings


def _holds_skill(path: Path) -> bool:
    return any((path / name).is_file() or (path / name).is_symlink() for name in ("SKILL.md", "card.yaml"))


def _read(path: Path) -> str:
    """A bounded regular file as text.

    Raises:
        FileError: missing, a link, not a file, too large, or not UTF-8.
    """
    name = str(path)
    try:
        if path.is_symlink() or not path.is_file():
            raise FileError([Finding(name, 1, 1, "is missing, or no plain file; expected one", "import-file")])
        if path.stat().st_size > MAX_BYTES:
            raise FileError([Finding(name, 1, 1, f"is larger than {MAX_BYTES} bytes; split it", "import-file")])
        return path.read_bytes().decode("utf-8")
    except OSError as e:
        raise FileError([Finding(name, 1, 1, f"cannot be read: {e.strerror}", "import-file")]) from e
    except UnicodeDecodeError as e:
        raise FileError([Finding(name, 1, 1, f"is not UTF-8 text (byte {e.start}); save it as UTF-8", "import-file")]) from e


def _skill_md(skill: ForeignSkill) -> Iterator[Finding]:
    """Findings in a SKILL.md: its front matter, its length and its links."""
    path = skill.path / "SKILL.md"
    try:
        text = _read(path)
    except FileError as e:
        yield from e.findings
        return
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if lines[0].rstrip() != "---" or end is None:
        message = "has no front matter; expected '---', name and description, '---' at its top"
        yield Finding(str(path), 1, 1, message, "import-front-matter")
    else:
        yield from _front_matter(skill, path, "\n".join(lines[1:end]))
    body = len(lines) - (end + 1 if end is not None else 0)
    if body > MAX_LINES:
        yield Finding(
            str(path), 1, 1, f"has {body} lines of body; expected at most {MAX_LINES}, move detail to references/", "import-length"
        )
    yield from _links(skill, path, lines)


def _front_matter(skill: ForeignSkill, path: Path, text: str) -> Iterator[Finding]:
    try:
        data, marks = parse(text, str(path))
    except FileError as e:
        yield from (Finding(f.file, f.line + 1, f.column, _no_prose(f.message), "import-front-matter") for f in e.findings)
        return
    if not isinstance(data, dict):
        yield Finding(str(path), 2, 1, "front matter is no mapping; expected name and description", "import-front-matter")
        return
    skill.front_matter = [_plain(k) for k in data]
    for key, message in _front_matter_problems(data, skill.path.resolve().name):
        line, column = locate(marks, (key,)) if key in data else (0, 1)
        yield Finding(str(path), line + 1, column, message, "import-front-matter")


def _front_matter_problems(data: Mapping[str, Any], folder: str) -> Iterator[tuple[str, str]]:
    """Violations of the Agent Skills specification as pairs (key, message).

    Source: https://agentskills.io/specification.
    """
    for key in data:
        if key not in FIELDS:
            yield key, f"field '{_plain(key)}' does not exist; expected only {', '.join(FIELDS)}; put extensions under metadata"
    name, description = data.get("name"), data.get("description")
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > 64:
        yield "name", "name is missing or malformed; expected 1 to 64 of a-z, 0-9 and single hyphens"
    elif name != folder:
        yield "name", f"name '{_plain(name)}' differs from its folder '{_plain(folder)}'; make them equal"
    if not isinstance(description, str) or not description.strip():
        yield "description", "description is missing; expected what the skill does and when to use it"
    elif len(description) > 1024:
        yield "description", f"description has {len(description)} characters; expected at most 1024"
    compatibility = data.get("compatibility")
    if "compatibility" in data and not (isinstance(compatibility, str) and 1 <= len(compatibility) <= 500):
        yield "compatibility", "compatibility is no text of 1 to 500 characters; shorten it, or leave it out"
    metadata = data.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        yield "metadata", "metadata is no mapping of text to text; quote its values"
    for key in ("license", "allowed-tools"):
        if key in data and not isinstance(data[key], str):
            yield key, f"{key} is no text; expected one string"


def _links(skill: ForeignSkill, path: Path, lines: list[str]) -> Iterator[Finding]:
    fenced = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        for match in () if fenced or len(line) > 20_000 else _LINK.finditer(line):
            target = match[1].split("#")[0]
            if not target or re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", target):
                continue
            skill.links += 1
            message = _link_problem(skill.path, target)
            if message:
                yield Finding(str(path), number, match.start() + 1, message, "import-link")


def _link_problem(folder: Path, target: str) -> str | None:
    parts = PurePosixPath(target).parts
    depth = 0
    for part in parts:
        depth += -1 if part == ".." else 0 if part in (".", "/") else 1
        if depth < 0 or target.startswith("/"):
            return f"link to '{_plain(target)}' leads out of the skill's folder; an installed skill cannot reach it, copy the file in"
    try:
        exists = (folder / target).exists()
    except (OSError, ValueError):
        exists = False
    return None if exists else f"link to '{_plain(target)}' leads nowhere; expected a file in the skill's folder"


def _card(skill: ForeignSkill) -> Iterator[Finding]:
    """Findings in a skill's card.yaml, and its keys noted on the skill."""
    path = skill.path / "card.yaml"
    if not path.is_symlink() and not path.exists():
        return  # half of the known skills have none
    try:
        data, marks = parse(_read(path), str(path))
    except FileError as e:
        yield from (Finding(f.file, f.line, f.column, _no_prose(f.message), "import-file") for f in e.findings)
        return
    if not isinstance(data, dict):
        yield Finding(str(path), 1, 1, "is no mapping of keys to values", "import-file")
        return
    skill.card_keys = [_plain(k) for k in data]
    for where, row in _mappings(data, ()):
        yield from _row(skill, path, marks, where, row)
    for where, message in _text_numbers(data, ()):
        line, column = locate(marks, where)
        yield Finding(str(path), line, column, message, "import-number")


def _row(skill: ForeignSkill, path: Path, marks: Marks, where: Path_, row: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings in one mapping of a card.yaml: degrees that do not divide, words that megatron-core does not know."""
    degrees, gpus = _layout(row, where)
    table = table_for(None)
    assert table is not None  # at least one table ships
    labelled = {
        k: v for k, v in row.items() if isinstance(v, str | list) and k.rsplit(".", 1)[-1] in {*table.keys, "recompute", "cuda_graph"}
    }
    skill.rows += bool(degrees or labelled)
    skill.layouts += bool(degrees)
    skill.labels += len(labelled)
    line, column = locate(marks, where)
    name = ".".join(_plain(str(p)) for p in where) or "the card"
    for message in layout_problems(name, degrees, gpus) if degrees else ():
        yield Finding(str(path), line, column, message, "import-layout")
    for key, message in label_problems(labelled, table):
        at = locate(marks, (*where, key))
        yield Finding(str(path), *at, _no_prose(message), "import-label")
    yield from (Finding(str(path), line, column, f"{name}: {_no_prose(message)}", "import-label") for message in excluded(row, degrees))


def _layout(row: Mapping[str, Any], where: Path_) -> tuple[dict[str, int], int | None]:
    """The degrees and GPU count of a row, from its keys and from its texts such as 'TP2 EP64 PP8 on 256 GPUs' or TP2_PP2_EP4."""
    degrees: dict[str, int] = {}
    gpus: int | None = None
    texts = [str(where[-1])] if where and isinstance(where[-1], str) else []
    for key, value in row.items():
        name = _LONG.get(key, key.lower())
        if isinstance(value, int) and not isinstance(value, bool):
            if name in _SHORT:
                degrees[name] = value
            elif name in _GPU_KEYS:
                gpus = value
        elif isinstance(value, str) and len(value) <= 300:
            texts.append(value)
    for text in texts:
        named = {m[1].lower(): int(m[2]) for m in _DEGREE.finditer(text.replace("_", " "))}
        if len(named) >= 2:
            degrees = {**named, **degrees}
        counts = {int(m[1]) for m in _GPUS.finditer(text)}
        if gpus is None and len(counts) == 1:
            gpus = counts.pop()
    return degrees, gpus


def _mappings(value: Any, where: Path_) -> Iterator[tuple[Path_, Mapping[str, Any]]]:
    """Every mapping in a document with its place; a text in a list counts as a mapping of its own."""
    if isinstance(value, dict):
        yield where, value
        for key, child in value.items():
            yield from _mappings(child, (*where, key))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _mappings({"": child} if isinstance(child, str) and len(_DEGREE.findall(child[:300])) >= 2 else child, (*where, i))


def _text_numbers(value: Any, where: Path_) -> Iterator[tuple[Path_, str]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _text_numbers(child, (*where, key))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _text_numbers(child, (*where, i))
    elif isinstance(value, str) and is_text_number(value):
        yield (
            where,
            f"'{_plain(str(where[-1]) if where else '')}' is a number written as text ('{_plain(value)}'); write {{value, unit, approx}}",
        )


def _plain(text: str) -> str:
    """A short printable form of a name from an untrusted file."""
    printable = "".join(c if c.isprintable() else "?" for c in text)
    return printable if len(printable) <= 64 else printable[:61] + "..."


def _no_prose(message: str) -> str:
    """A message without long quotations from the file."""
    return re.sub(r"'([^']{65,})'", "'...'", message)
