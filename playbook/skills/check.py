"""Checks of skills: links resolve, commands parse, ids of cards, claims, cases and skills exist, and no figure is restated."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from playbook.cards.model import Card
from playbook.errors import Finding
from playbook.paths import KINDS, data_root, shipped
from playbook.skills.model import CARDS_KEY, Skill
from playbook.yaml_files import did_you_mean

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

    def claims(self) -> set[str]:
        """The ids of all claims and mechanism checks."""
        return {i for card in self.cards.values() for i in claim_ids(card)}


def claim_ids(card: Card) -> list[str]:
    """The ids of a card's claims and mechanism checks, in order."""
    return [i for c in card.claims for i in (c.id, c.mechanism_check.id if c.mechanism_check else None) if i]


def check(skill: Skill, known: Known) -> list[Finding]:
    """Findings for everything in a skill that does not exist, does not resolve or restates a figure."""
    found: list[Finding] = []
    named: set[str] = set()
    for line, words in command_lines(skill):
        found += [skill.finding(line, m) for m in _command(words, known, named)]
    for line, target in links(skill):
        if problem := _link_problem(skill, target):
            found.append(skill.finding(line, problem))
    found += _figures(skill)
    found += _names(skill, known)
    found += _cards(skill, known, named)
    return sorted(found, key=lambda f: f.line)


def links(skill: Skill) -> Iterator[tuple[int, str]]:
    """Every link of the body outside fenced blocks, with its line."""
    for number, line in _prose(skill):
        yield from ((number, m["target"]) for m in LINK.finditer(line))


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
    plain = target.partition("#")[0]
    folder = skill.path.parent
    inside = not posixpath.normpath(plain).startswith("..")
    if inside:
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


def _prose(skill: Skill) -> Iterator[tuple[int, str]]:
    yield from ((number, line) for number, line, fenced in _lines(skill) if not fenced)


def _command(words: Sequence[str], known: Known, named: set[str]) -> Iterator[str]:
    """What is wrong with one command line; ids of cards that it names are added to `named`."""
    shown = shlex.join(words)
    if words[0] == "?":
        yield f"`{words[1]}`: quotes do not close"
        return
    if words[0] == "torchrun":
        yield from _trainer(words[words.index("playbook_trainer") + 1 :] if "playbook_trainer" in words else (), known)
        return
    accepted = known.parse(words[1:])
    if isinstance(accepted, str):
        yield f"`{shown}`: {accepted}"
        return
    values = accepted.values
    if accepted.command == "cards show":
        yield from _target(str(values["target"]), known, named)
    elif accepted.command == "confirm":
        for target in values.get("targets") or ():
            yield from _target(str(target), known, named)
    elif accepted.command == "train":
        yield from _trainer([str(values["config"]), *(values.get("overrides") or ())], known)
    elif isinstance(case := values.get("case"), str) and not _PLACEHOLDER.match(case) and case not in known.cases:
        yield f"case '{case}' does not exist{did_you_mean(case, known.cases)}"


def _target(target: str, known: Known, named: set[str]) -> Iterator[str]:
    """CARD or CARD/CLAIM."""
    card, _, claim = target.partition("/")
    if _PLACEHOLDER.match(target) or _PLACEHOLDER.match(card):
        return
    if card not in known.cards:
        yield f"card '{card}' does not exist{did_you_mean(card, known.cards)}"
        return
    named.add(card)
    ids = claim_ids(known.cards[card])
    if claim and not _PLACEHOLDER.match(claim) and claim not in ids:
        yield f"card '{card}' has no claim '{claim}'{did_you_mean(claim, ids)}"


def _trainer(words: Sequence[str], known: Known) -> Iterator[str]:
    """A trainer configuration that ships, and keys that the trainer has."""
    if not words:
        yield "names no `-m playbook_trainer CONFIG`; that is the one module that a skill launches by torchrun"
        return
    config, *overrides = words
    if not _PLACEHOLDER.match(config) and shipped("configs", PurePosixPath(config)) is None:
        yield f"configuration '{config}' does not ship; expected a file below {KINDS['configs']}"
    for override in overrides:
        key, eq, _ = override.partition("=")
        if not eq or key not in known.trainer_keys:
            yield f"the trainer has no key '{key}'{did_you_mean(key, known.trainer_keys)}"


def _figures(skill: Skill) -> Iterator[Finding]:
    for number, line, fenced in _lines(skill):
        # A command may carry a limit, such as --budget; everything else in code is text like any other.
        text = "" if fenced and _is_command(line) else _SPAN.sub(lambda m: "" if _is_command(m[1]) else m[1], line)
        for match in FIGURE.finditer(text):
            yield skill.finding(number, f"'{match[0].strip()}' is a figure; point at the card that has it (`playbook cards show CARD`)")


def _is_command(text: str) -> bool:
    return text.strip().removeprefix("$ ").startswith(("playbook ", "torchrun ", "srun ", "pip "))


def _names(skill: Skill, known: Known) -> Iterator[Finding]:
    """Ids in the text: claims anywhere, cards, cases and skills in code."""
    claims = known.claims()
    everything = {*known.cards, *known.cases, *known.skills}
    where = skill.marks.get(("description",), (1, 1))[0]
    for number, line in [(where, skill.front.description), *((n, text) for n, text, _ in _lines(skill))]:
        for match in _CLAIM.finditer(line):
            if match[0] not in claims and match[0] not in _GPUS:
                yield skill.finding(number, f"claim '{match[0]}' does not exist{did_you_mean(match[0], claims)}")
        for word in _SPAN.findall(line):
            if _SLUG.match(word) and word not in everything:
                yield skill.finding(number, f"'{word}' is no card, case or skill{did_you_mean(word, everything)}")


def _cards(skill: Skill, known: Known, named: Collection[str]) -> Iterator[Finding]:
    """The metadata names existing cards, among them every card that the commands name, so that an export carries them."""
    where = ("metadata", CARDS_KEY)
    if not skill.cards:
        yield skill.finding(where, f"metadata '{CARDS_KEY}' names no card; a skill points at the cards it acts on, by id")
    for card in skill.cards:
        if card not in known.cards:
            yield skill.finding(where, f"card '{card}' does not exist{did_you_mean(card, known.cards)}")
    missing = sorted(set(named) - set(skill.cards))
    if missing:
        yield skill.finding(where, f"commands name {', '.join(missing)}, which '{CARDS_KEY}' does not; add them")
