"""Agent Skills: one folder per task, `<name>/SKILL.md`, that says how to act on cards.

A skill points at cards by id and names commands; figures stay on the cards, where evidence can change them. Checked here: the front
matter by the Agent Skills specification, lengths, links, commands, ids, and that no figure is restated.

Source: https://agentskills.io/specification
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ConfigDict, Field

from playbook.errors import FileError, Finding
from playbook.files import read_bytes
from playbook.yaml_files import MAX_BYTES, Marks, Path_, Strict, did_you_mean, locate, parse, validate

FILE = "SKILL.md"
INDEX = "README.md"
CARDS_KEY = "playbook-cards"
"""The metadata key with the ids of the cards that a skill points at, separated by spaces."""

MAX_LINES, MAX_BODY = 500, 20_000
"""Lines and characters of a body; about 5000 tokens at four characters each. Source: the specification, progressive disclosure."""


class FrontMatter(Strict):
    """The keys that the specification allows, with its limits."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)
    description: str = Field(min_length=1, max_length=1024)
    license: str | None = Field(default=None, min_length=1)
    compatibility: str | None = Field(default=None, min_length=1, max_length=500)
    metadata: dict[str, str] = Field(default_factory=dict)
    allowed_tools: str | None = Field(default=None, alias="allowed-tools", min_length=1)


@dataclass(frozen=True)
class Skill:
    """One skill as it lies in its folder."""

    front: FrontMatter
    lines: tuple[str, ...]
    """All lines of the file, front matter included: line number n is at index n - 1."""
    body_start: int
    """Index of the first line after the front matter."""
    path: Path
    marks: Marks

    @property
    def name(self) -> str:
        """The skill's name, which is its folder's."""
        return self.front.name

    @property
    def cards(self) -> tuple[str, ...]:
        """The ids of the cards that it points at."""
        return tuple(self.front.metadata.get(CARDS_KEY, "").split())

    @property
    def text(self) -> str:
        """The whole file."""
        return "\n".join(self.lines) + "\n"

    def body(self) -> Iterator[tuple[int, str]]:
        """Each line after the front matter with its number."""
        yield from ((i + 1, self.lines[i]) for i in range(self.body_start, len(self.lines)))

    def finding(self, where: Path_ | int, message: str) -> Finding:
        """A finding at a key of the front matter, or at a line."""
        line, column = (where, 1) if isinstance(where, int) else locate(self.marks, where)
        return Finding(str(self.path), line, column, message)


def read_skill(folder: Path) -> Skill:
    """The skill in a folder.

    Raises:
        FileError: no SKILL.md, unreadable, too large, or a front matter that the specification does not allow.
    """
    path = folder / FILE
    lines = _text(path).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    end = next((i for i, line in enumerate(lines) if i and line.rstrip() == "---"), None)
    if not lines or lines[0].rstrip() != "---" or end is None:
        raise FileError([Finding(str(path), 1, 1, "expected front matter between two lines of ---, and the instructions after it")])
    # A blank first line in place of the first ---, so that places in the front matter are places in the file.
    source = "\n" + "\n".join(lines[1:end]) + "\n"
    data, marks = parse(source, str(path))
    front = validate(data, marks, FrontMatter, str(path))
    skill = Skill(front, tuple(lines), end + 1, path, marks)
    findings = [*_front(skill, folder.name), *_flow(skill, source)]
    if findings:
        raise FileError(findings)
    return skill


def read_skills(folder: Path) -> tuple[list[Skill], list[Finding]]:
    """The skills of a folder in order of name, and what is wrong; whatever is neither a skill nor the index is a finding."""
    skills: list[Skill] = []
    findings: list[Finding] = []
    try:
        entries = sorted(folder.iterdir())
    except OSError as e:
        return [], [Finding(str(folder), 1, 1, f"cannot be read: {e.strerror or e}; expected a folder of skills")]
    for entry in entries:
        if entry.name == INDEX:
            continue
        if not entry.is_dir():
            findings.append(Finding(str(entry), 1, 1, "is a file among the skills; expected folders, <name>/SKILL.md; move it elsewhere"))
            continue
        try:
            skills.append(read_skill(entry))
        except FileError as e:
            findings += e.findings
    if not skills and not findings:
        findings.append(Finding(str(folder), 1, 1, "holds no skill; expected at least one <name>/SKILL.md"))
    return skills, findings


def load_skills(folder: Path) -> dict[str, Skill]:
    """Every skill of a folder by name.

    Raises:
        FileError: one of them is invalid.
    """
    skills, findings = read_skills(folder)
    if findings:
        raise FileError(findings)
    return {skill.name: skill for skill in skills}


def choose(skills: Mapping[str, Skill], names: Sequence[str]) -> list[Skill]:
    """The named skills, or all of them where none is named.

    Raises:
        FileError: a name that no skill has.
    """
    unknown = [n for n in names if n not in skills]
    if unknown:
        raise FileError([Finding(n, 1, 1, f"no such skill{did_you_mean(n, skills)}") for n in unknown])
    return [skills[n] for n in dict.fromkeys(names)] or list(skills.values())


def _split_description(skill: Skill) -> tuple[str, str]:
    """The description: what the skill does, and when to use it."""
    what, _, when = skill.front.description.partition("Use when ")
    return what.strip(), when.strip()


def index(skills: Iterable[Skill]) -> str:
    """The index of skills as Markdown."""
    rows = []
    for skill in sorted(skills, key=lambda s: s.name):
        what, when = (part.replace("|", "\\|") for part in _split_description(skill))
        rows.append(f"| [{skill.name}]({skill.name}/{FILE}) | {what} | {when} | {', '.join(skill.cards)} |")
    return "\n".join(
        [
            "# Skills",
            "",
            "<!-- Written by `playbook skills index`; `playbook skills check` fails where it is stale. -->",
            "",
            "One folder per Agent Skill: how to act on cards. A skill points at claims by id and never repeats their figures.",
            "",
            "| skill | what it does | use it when | cards |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def index_findings(folder: Path, skills: Sequence[Skill], required: bool) -> list[Finding]:
    """Whether the folder's index is missing (where it is required) or stale."""
    path = folder / INDEX
    if not path.is_file():
        return [Finding(str(path), 1, 1, "is missing; run `playbook skills index`")] if required else []
    if path.read_text(encoding="utf-8", errors="replace") != index(skills):
        return [Finding(str(path), 1, 1, "differs from the skills; run `playbook skills index` and commit the result")]
    return []


def _text(path: Path) -> str:
    try:
        raw = read_bytes(path, MAX_BYTES)
    except OSError as e:
        raise FileError([Finding(str(path), 1, 1, f"cannot be read: {e.strerror or e}; every folder here holds a {FILE}")]) from e
    if len(raw) > MAX_BYTES:
        raise FileError([Finding(str(path), 1, 1, f"is larger than {MAX_BYTES} bytes")])
    try:
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise FileError([Finding(str(path), 1, 1, f"is not UTF-8 text (byte {e.start}); save it as UTF-8")]) from e


def _front(skill: Skill, folder: str) -> Iterator[Finding]:
    """Checks that the types of the fields cannot express, and the limits on the length of the body."""
    front = skill.front
    if front.name != folder:
        yield skill.finding(("name",), f"name '{front.name}' differs from the folder '{folder}'; make them equal")
    if "Use when " not in front.description:
        yield skill.finding(("description",), "description does not say when to use the skill; add a sentence 'Use when ...'")
    if any(c in front.description for c in "<>"):
        yield skill.finding(("description",), "description holds < or >, which some clients take for markup; write it in words")
    # Readers that split at the first two runs of three hyphens would cut the front matter short.
    yield from (
        skill.finding(i + 1, "the front matter holds ---; some readers end it there; reword it")
        for i in range(1, skill.body_start - 1)
        if "---" in skill.lines[i]
    )
    body = "\n".join(line for _, line in skill.body())
    if not body.strip():
        yield skill.finding(skill.body_start, "has no instructions after the front matter")
    if len(skill.lines) > MAX_LINES:
        yield skill.finding(MAX_LINES, f"has {len(skill.lines)} lines; at most {MAX_LINES}; move detail to references/")
    if len(body) > MAX_BODY:
        yield skill.finding(skill.body_start, f"has {len(body)} characters of instructions; at most {MAX_BODY}; move detail to references/")


def _flow(skill: Skill, source: str) -> Iterator[Finding]:
    """Findings for YAML flow style, which the reference reader of the specification refuses."""
    pending = [yaml.compose(source, Loader=yaml.SafeLoader)]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.nodes.MappingNode | yaml.nodes.SequenceNode):
            if node.flow_style:
                yield skill.finding(node.start_mark.line + 1, "front matter uses {...} or [...]; write one key per line instead")
            pending += [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
