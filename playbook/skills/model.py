"""Agent Skills: one folder per task, `<name>/SKILL.md`, that says how to act on cards.

A skill points at cards by id and names commands; figures stay on the cards, where evidence can change them. Checked here: the front
matter by the Agent Skills specification, lengths, links, commands, ids, and that no figure is restated.

Source: https://agentskills.io/specification
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import ConfigDict, Field

from playbook.cards.model import Card, by_claim, claim_ids
from playbook.errors import FileError, Finding
from playbook.files import read_bytes
from playbook.paths import KINDS, data_root, shipped
from playbook.yaml_files import MAX_BYTES, KeyPath, Positions, Strict, did_you_mean, locate, parse, validate

FILE = "SKILL.md"
INDEX = "README.md"
_CARDS_KEY = "playbook-cards"
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
    marks: Positions

    @property
    def name(self) -> str:
        """The skill's name, which is its folder's."""
        return self.front.name

    @property
    def title(self) -> str:
        """The question that it answers: its first heading."""
        return next((line.removeprefix("# ") for _, line in self.body() if line.startswith("# ")), "")

    @property
    def cards(self) -> tuple[str, ...]:
        """The ids of the cards that it points at."""
        return tuple(self.front.metadata.get(_CARDS_KEY, "").split())

    def body(self) -> Iterator[tuple[int, str]]:
        """Each line after the front matter with its number."""
        yield from ((i + 1, self.lines[i]) for i in range(self.body_start, len(self.lines)))

    def finding(self, where: KeyPath | int, message: str) -> Finding:
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


def index(skills: Iterable[Skill]) -> str:
    """The index of skills as Markdown."""
    rows = []
    for skill in sorted(skills, key=lambda s: s.name):
        what, _, when = (part.strip() for part in skill.front.description.replace("|", "\\|").partition("Use when "))
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


_LINKABLE = ("cards", "cases", "guide", "schemas", "configs")
"""Kinds of shipped data that a skill may link to outside its folder; an exported skill carries copies."""

LINK = re.compile(r"(?<!!)\[(?P<label>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
"""A Markdown link."""
_SPAN = re.compile(r"`([^`]+)`")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(/[A-Z][A-Z_]*)?\Z")
_CLAIM = re.compile(r"(?<![A-Za-z0-9._-])[A-Z][0-9]{1,3}(?:\.[a-z])?(?![A-Za-z0-9_-])")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+\Z")
_GPUS = frozenset({"A100", "B100", "B200", "B300", "H100", "H200", "H800"})
"""Names of devices that look like the ids of claims."""
_UNIT = (
    r"%|percent|points?\b|-?fold\b|times\b|[munµ]s\b|s\b|sec\b|seconds?\b|min\b|minutes?\b|h\b|hours?\b|"
    r"[KMGT]i?B\b|bytes?\b|[TGPM]?FLOP\w*|tokens?\b|tok\b|tps\b|images?/s|W\b|watts?\b|GHz\b|MHz\b"
)
FIGURE = re.compile(rf"(?<![A-Za-z0-9.])[~<>]?\d[\d.,]*(?:\s*(?:{_UNIT})|[x×](?!\w))", re.IGNORECASE)
"""A number with a unit: a figure that belongs on a card or in evidence."""


@dataclass(frozen=True)
class Accepted:
    """A command line that parses: the command, and the values of its parameters."""

    command: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """Everything that a skill may refer to."""

    cards: Mapping[str, Card]
    cases: Collection[str]
    skills: Collection[str]
    trainer_keys: Collection[str]
    parse: Callable[[Sequence[str]], Accepted | str]
    """Parse the words of a command line; the result, or the reason why it does not parse."""


def check(skill: Skill, references: Known) -> list[Finding]:
    """Findings for everything in a skill that does not exist, does not resolve or restates a figure."""
    findings: list[Finding] = []
    named: set[str] = set()
    for line, words in command_lines(skill):
        findings += [skill.finding(line, m) for m in _command(words, references, named)]
    findings += [skill.finding(line, problem) for line, target in links(skill) if (problem := _link_problem(skill, target))]
    findings += _figures(skill)
    findings += _names(skill, references)
    findings += _cards(skill, references, named)
    return sorted(findings, key=lambda f: f.line)


def links(skill: Skill) -> Iterator[tuple[int, str]]:
    """Every link of the body outside fenced blocks, with its line."""
    for number, line, fenced in _lines(skill):
        yield from ((number, m["target"]) for m in LINK.finditer(line) if not fenced)


def outside(skill: Skill, target: str) -> Path | None:
    """The shipped file that a link outside the skill's folder names, or None where it names none that a skill may link to."""
    plain = PurePosixPath(posixpath.normpath(posixpath.join("skills", skill.name, target.partition("#")[0])))
    return next(filter(None, (shipped(kind, plain) for kind in _LINKABLE)), None)


def _link_problem(skill: Skill, target: str) -> str | None:
    """Why a link does not resolve, or None."""
    if re.match(r"https://", target):
        return None
    if re.match(r"[a-z][a-z0-9+.-]*:|/|#|@", target, re.IGNORECASE):
        return f"link '{target}' is neither relative nor https; link to a file by its relative path"
    plain, folder = target.partition("#")[0], skill.path.parent
    if not posixpath.normpath(plain).startswith(".."):
        path = folder / plain
        ok = path.is_file() and path.resolve().is_relative_to(folder.resolve())
        return None if ok else f"link '{target}' leads to no file in the skill's folder"
    if folder.parent.resolve() != data_root("skills").resolve():
        return f"link '{target}' leads out of the folder; an exported skill carries what it links to in references/"
    if outside(skill, target) is None:
        return f"link '{target}' leads to no file that ships; expected one below {', '.join(KINDS[k] for k in _LINKABLE)}"
    return None


def command_lines(skill: Skill) -> Iterator[tuple[int, list[str]]]:
    """Every command of `playbook` and `torchrun` in fenced blocks and code spans, as words, with its line."""
    continued: list[str] = []
    for number, line, fenced in _lines(skill):
        for text in [line.strip().removeprefix("$ ")] if fenced else _SPAN.findall(line):
            whole = " ".join([*continued, text])
            if fenced and text.endswith("\\"):
                continued.append(text[:-1])
                continue
            continued = []
            if whole.startswith(("playbook ", "torchrun ")):
                words = split(whole)
                yield number, ["?", whole] if words is None else words


def split(text: str) -> list[str] | None:
    """The words of the first command of a shell line, without comment; None where quotes do not close."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set("|&;<>()"):
                break
            words.append(word)
    except ValueError:
        return None
    return words


def _lines(skill: Skill) -> Iterator[tuple[int, str, bool]]:
    """Each line of the body, its number, and whether it lies in a fenced block; the fences themselves are left out."""
    fence = ""
    for number, line in skill.body():
        match = _FENCE.match(line)
        if match and (not fence or (match[1].startswith(fence) and not line.strip(" `~"))):
            fence = "" if fence else match[1]
            continue
        yield number, line, bool(fence)


def _command(words: Sequence[str], references: Known, named: set[str]) -> Iterator[str]:
    """What is wrong with one command line; ids of cards that it names are added to `named`."""
    shown = shlex.join(words)
    if words[0] == "?":
        yield f"`{words[1]}`: quotes do not close"
        return
    if words[0] == "torchrun":
        yield from _trainer(words[words.index("playbook_trainer") + 1 :] if "playbook_trainer" in words else (), references)
        return
    accepted = references.parse(words[1:])
    if isinstance(accepted, str):
        yield f"`{shown}`: {accepted}"
        return
    values = accepted.values
    if accepted.command == "cards show":
        yield from _target(str(values["target"]), references, named)
    elif accepted.command == "confirm":
        for target in values.get("targets") or ():
            yield from _target(str(target), references, named)
    elif accepted.command == "train":
        yield from _trainer([str(values["config"]), *(values.get("overrides") or ())], references)
    elif isinstance(case := values.get("case"), str) and not _PLACEHOLDER.match(case) and case not in references.cases:
        yield f"case '{case}' does not exist{did_you_mean(case, references.cases)}"


def _target(target: str, references: Known, named: set[str]) -> Iterator[str]:
    """CARD or CARD/CLAIM."""
    card, _, claim = target.partition("/")
    if _PLACEHOLDER.match(target) or _PLACEHOLDER.match(card):
        return
    if card not in references.cards:
        yield f"card '{card}' does not exist{did_you_mean(card, references.cards)}"
        return
    named.add(card)
    ids = claim_ids(references.cards[card])
    if claim and not _PLACEHOLDER.match(claim) and claim not in ids:
        yield f"card '{card}' has no claim '{claim}'{did_you_mean(claim, ids)}"


def _trainer(words: Sequence[str], references: Known) -> Iterator[str]:
    """A trainer configuration that ships, and keys that the trainer has."""
    if not words:
        yield "names no `-m playbook_trainer CONFIG`; that is the one module that a skill launches by torchrun"
        return
    config, *overrides = words
    if not _PLACEHOLDER.match(config) and shipped("configs", PurePosixPath(config)) is None:
        yield f"configuration '{config}' does not ship; expected a file below {KINDS['configs']}"
    for override in overrides:
        key, eq, _ = override.partition("=")
        if not eq or key not in references.trainer_keys:
            yield f"the trainer has no key '{key}'{did_you_mean(key, references.trainer_keys)}"


def _figures(skill: Skill) -> Iterator[Finding]:
    for number, line, fenced in _lines(skill):
        # A command may carry a limit, such as --budget; everything else in code is text like any other.
        text = "" if fenced and _is_command(line) else _SPAN.sub(lambda m: "" if _is_command(m[1]) else m[1], line)
        for match in FIGURE.finditer(text):
            yield skill.finding(number, f"'{match[0].strip()}' is a figure; point at the card that has it (`playbook cards show CARD`)")


def _is_command(text: str) -> bool:
    return text.strip().removeprefix("$ ").startswith(("playbook ", "torchrun ", "srun ", "pip "))


def _names(skill: Skill, references: Known) -> Iterator[Finding]:
    """Ids in the text: claims anywhere, cards, cases and skills in code."""
    claims = by_claim(references.cards)
    everything = {*references.cards, *references.cases, *references.skills}
    where = skill.marks.get(("description",), (1, 1))[0]
    for number, line in [(where, skill.front.description), *((n, text) for n, text, _ in _lines(skill))]:
        for match in _CLAIM.finditer(line):
            if match[0] not in claims and match[0] not in _GPUS:
                yield skill.finding(number, f"claim '{match[0]}' does not exist{did_you_mean(match[0], claims)}")
        for word in _SPAN.findall(line):
            if _SLUG.match(word) and word not in everything:
                yield skill.finding(number, f"'{word}' is no card, case or skill{did_you_mean(word, everything)}")


def _cards(skill: Skill, references: Known, named: Collection[str]) -> Iterator[Finding]:
    """The metadata names existing cards, among them every card that the commands name, so that an export carries them."""
    where = ("metadata", _CARDS_KEY)
    if not skill.cards:
        yield skill.finding(where, f"metadata '{_CARDS_KEY}' names no card; a skill points at the cards it acts on, by id")
    for card in skill.cards:
        if card not in references.cards:
            yield skill.finding(where, f"card '{card}' does not exist{did_you_mean(card, references.cards)}")
    missing = sorted(set(named) - set(skill.cards))
    if missing:
        yield skill.finding(where, f"commands name {', '.join(missing)}, which '{_CARDS_KEY}' does not; add them")
