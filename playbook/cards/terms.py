"""From text to search terms, and from a question to what it says about the machine. The same rules serve cards and questions.

Text of others: every pattern here is linear in its length.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from playbook.errors import ConfigError, PlaybookError
from playbook.paths import data_root
from playbook.planner.models import MODELS, named, not_known
from playbook.planner.time.cluster import cluster, clusters
from playbook.yaml_files import parse

_SYNONYMS = "synonyms.yaml"
_STOP_WORDS = "stopwords.txt"

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")
_THOUSANDS = re.compile(r"(?<=\d)[,_](?=\d{3}(?!\d))")
_DEGREE = re.compile(r"\b(tp|pp|ep|cp|dp|sp|vpp|etp|edp|fsdp|mbs|gbs)=?(\d{1,5})\b")
_TOKENS = re.compile(r"\b(\d{1,4})\s?([km])\b(?!\s?(?:tokens?|tok)?\s?/|\s?(?:tok|tokens?) per s)")
_GAP = r"(?: [^ ]+){0,5}? "
"""Up to five words, where a phrase of the table has ` * `."""
_FEW_WORDS = 3
_PROSE = 0.8
"""Share of letters and spaces from which on a line is prose; log lines have figures, paths and brackets."""
_WORD = re.compile(r"[a-z0-9]+(?:\.[0-9]+)?")
_IDENTIFIER = re.compile(r"(?<![a-z0-9])[a-z0-9]++(?:_[a-z0-9]+)+")
_COUNT = re.compile(r"\b(\d{1,6})\s?(?:x\s?)?(?:gpus?|cards|accelerators|devices)\b")
_PROFILE = re.compile(r"\b(\d{1,6})\s?x\s?(?:nvidia\s)?([a-z]{1,2}\d{2,3})\b|\b([a-z]{1,2}\d{2,3})\s?x\s?(\d{1,6})\b")
_LENGTH = re.compile(r"\b\d{4,7}\b")

_DENSE = re.compile(r"\bdense (?:model|llm|transformer|\d{1,3}b)\b")
_EXPERTS = re.compile(r"\b(?:moe|experts?)\b")

FAMILIES = {
    "hopper": ("h100", "h200", "h800", "h20", "gh200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
    "nvl72": ("gb200", "gb300"),
    "ampere": ("a100", "a800", "a40", "a30", "a6000"),
    "ada": ("l40", "l40s", "l4"),
    "volta": ("v100",),
}
"""GPUs by architecture and by rack. Source: NVIDIA's data sheets of each."""

GPUS = frozenset(g for names in FAMILIES.values() for g in names)


@dataclass(frozen=True)
class Facts:
    """What a question says about the run. Several GPU names mean any of them; what is None is not said."""

    hardware: tuple[str, ...] = ()
    gpus: int | None = None
    model: str | None = None
    seq_len: int | None = None
    moe: bool | None = None
    """Whether the model has experts, where the question says so and names no model of the table."""

    @property
    def stated(self) -> bool:
        """Whether anything is said."""
        return self != Facts()

    def over(self, found: Facts) -> Facts:
        """These facts, with those of `found` where these say nothing."""
        mine = {k: v for k, v in vars(self).items() if v not in (None, ())}  # no GPU at all is said, too
        return replace(found, **mine)

    def each(self) -> list[dict[str, Any]]:
        """The facts as `playbook.cards.scope` asks for them, once for every GPU name."""
        common: dict[str, Any] = {k: v for k, v in (("gpus", self.gpus), ("seq_len", self.seq_len), ("moe", self.moe)) if v is not None}
        if self.model is not None:
            common["model"] = self.model
            shape = MODELS.get(self.model)
            if shape is not None:
                common |= {"moe": shape.experts > 0, "vision": shape.vision is not None}
        return [{**common, "gpu": name} for name in self.hardware] or [common]


def normal(text: str) -> str:
    """Lower case, compatible characters as one, no control characters, 128k and 131,072 as 131072, EP4 as ep 4."""
    if not (text.isascii() and text.isprintable()):
        plain = (c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
        text = "".join(c if c.isprintable() else " " for c in plain)
    return _DEGREE.sub(r"\1 \2", _TOKENS.sub(_power, _THOUSANDS.sub("", text.lower())))


def _power(match: re.Match[str]) -> str:
    return str(int(match[1]) * (1 << (10 if match[2] == "k" else 20)))


def opening(text: str) -> str:
    """What a pasted text asks: its first line of prose and the prose right below. Where it has none, its first line, or its last below a heading."""
    lines = [line.strip() for line in text.splitlines()]
    start = next((i for i, line in enumerate(lines) if _is_prose(line)), None)
    if start is None:
        written = [line for line in lines if line] or [""]
        return written[-1 if written[0].endswith(":") else 0]
    return " ".join([lines[start], *itertools.takewhile(_is_prose, lines[start + 1 :])])


def _is_prose(line: str) -> bool:
    """Whether a line is written for people: three words or more, hardly anything but letters, and no heading of what follows."""
    letters = sum(c.isalpha() or c.isspace() for c in line)
    return len(line.split()) >= _FEW_WORDS and letters >= _PROSE * len(line) and not line.endswith(":")


def terms(text: str) -> list[str]:
    """The terms of a text: stems of its words, identifiers whole, and the names that the table of synonyms gives to its phrases."""
    line = normal(text)
    spaced = " ".join(_WORD.findall(line))
    named = [term for _, term in _phrases(spaced)]
    parts = [part.lower() for word in text.split() if not word.islower() and len(found := _CAMEL.split(word)) > 1 for part in found]
    words = [w for w in [*spaced.split(), *parts] if w not in _stop_words()]
    return [*_stemmer().stemWords(words), *named, *_IDENTIFIER.findall(line)]


def words(text: str) -> list[str]:
    """The words of a text as they stand, in lower case; identifiers in their parts."""
    return _WORD.findall(normal(text))


def phrases(text: str) -> list[tuple[str, str]]:
    """The phrases of the table of synonyms in a text, each with the term that stands for it."""
    return _phrases(" ".join(_WORD.findall(normal(text))))


def _phrases(spaced: str) -> list[tuple[str, str]]:
    table, starts, gapped, named = _synonyms()
    said, found, place = spaced.split(" "), [], 0
    while place < len(said):
        phrase = next((p for p in starts.get(said[place], ()) if said[place : place + len(p)] == p), None)
        if phrase:
            found += [(" ".join(phrase), term) for term in table[" ".join(phrase)]]
        place += len(phrase or [""])
    return found + [(m.group(0), named[m.lastgroup]) for m in gapped.finditer(spaced) if m.lastgroup]


def tables(texts: Iterable[str]) -> dict[str, Any]:
    """What makes terms of a question elsewhere: the table of phrases, stop words, and the stem of each word that texts and phrases have."""
    table, _, gapped, named = _synonyms()
    surfaces = {w for text in texts for w in _WORD.findall(normal(text))} | {w for phrase in table for w in phrase.split()}
    stems = {w: stem for w in sorted(surfaces) if (stem := _stemmer().stemWord(w)) != w}
    return {
        "stems": stems,
        "stop": sorted(_stop_words()),
        "phrases": table,
        "gapped": gapped.pattern,
        "gaps": named,
    }


def foreign_share(text: str) -> float:
    """The share of a text's letters that are not Latin: an ideograph counts for three of an alphabet, since it says as much."""
    letters = [c for c in unicodedata.normalize("NFKD", text) if c.isalpha()]
    other = sum(3 if unicodedata.category(c) == "Lo" else 1 for c in letters if not unicodedata.name(c, "").startswith("LATIN"))
    latin = sum(unicodedata.name(c, "").startswith("LATIN") for c in letters)
    return other / (other + latin) if letters else 0.0


def facts(text: str) -> Facts:
    """What a question says about GPUs, model and sequence length; nothing where it names several lengths."""
    line = normal(text)
    words = set(_WORD.findall(line))
    hardware = [g for g in sorted(GPUS) if g in words or f"{g}s" in words]
    gpus = [int(m[1]) for m in _COUNT.finditer(line)]
    for match in _PROFILE.finditer(line):
        name, number = match[2] or match[3], int(match[1] or match[4])
        if name in GPUS:
            hardware, gpus = [*hardware, name], [*gpus, number]
    hardware += [g for family, members in FAMILIES.items() if family in words for g in members]
    lengths = {int(n) for n in _LENGTH.findall(line) if int(n) % 1024 == 0}
    return Facts(
        hardware=tuple(dict.fromkeys(hardware)),
        gpus=gpus[0] if len(set(gpus)) == 1 else None,
        model=_model(line),
        seq_len=lengths.pop() if len(lengths) == 1 else None,
        moe=False if _DENSE.search(line) and not _EXPERTS.search(line) else None,
    )


def stated(hardware: str | None, model: str | None, gpus: int | None) -> Facts:
    """A run as named by options; hardware is `h200`, `h200x4`, `4 x H200`, `hopper`, `cpu`, or another GPU that the planner knows.

    Raises:
        PlaybookError: no preset has the model, by its own or a published name, or no such hardware is known.
    """
    preset = None if model is None else named(model)
    if model is not None and not preset:
        raise PlaybookError(f"{not_known(model)}; or leave the model out")
    found = facts((hardware or "")[:100])
    if hardware and not found.hardware:
        word = _device(hardware)
        found = Facts((word,), 0 if word == "cpu" else found.gpus)
    return Facts(found.hardware, found.gpus if gpus is None else gpus, preset)


def _device(hardware: str) -> str:
    """`cpu`, or the planner's name of a GPU that stands in no family."""
    if _WORD.findall(normal(hardware[:100])) == ["cpu"]:
        return "cpu"
    try:
        return cluster(hardware).name
    except ConfigError:
        known = ", ".join(sorted({"cpu", *clusters(), *GPUS, *FAMILIES}))
        raise PlaybookError(f"hardware '{hardware[:40]}' is not known; expected one of {known}; or leave it out") from None


def _model(line: str) -> str | None:
    """The model of the table whose whole name stands in the line, the longest where several do."""
    flat = "".join(_WORD.findall(line)).replace(".", "")
    whole = [m for m in MODELS if m.replace("_", "") in flat]
    return max(whole, key=len) if whole else None


@cache
def _synonyms() -> tuple[Mapping[str, list[str]], Mapping[str, list[list[str]]], re.Pattern[str], Mapping[str, str]]:
    """The names of each phrase, the phrases that begin with a word, longest first, and a pattern for phrases with a gap, its groups with their names."""
    groups: Mapping[str, Sequence[str]] = parse((data_root("tables") / _SYNONYMS).read_text(encoding="utf-8"), _SYNONYMS)[0]
    table: dict[str, list[str]] = {}
    gapped: dict[str, tuple[str, str]] = {}
    for name, phrases in groups.items():
        for phrase in [name.replace("_", " "), *phrases]:
            parts = [" ".join(_WORD.findall(normal(part))) for part in phrase.split(" * ")]
            if len(parts) == 1:
                names = table.setdefault(parts[0], [])
                names += [] if f"={name}" in names else [f"={name}"]
            else:
                gapped[f"g{len(gapped)}"] = (f"={name}", _GAP.join(map(re.escape, parts)))
    starts: dict[str, list[list[str]]] = {}
    for phrase in sorted(table, key=len, reverse=True):
        starts.setdefault(phrase.split()[0], []).append(phrase.split())
    return (
        table,
        starts,
        re.compile(r"(?<![^ ])(?:" + "|".join(f"(?P<{g}>{pattern})" for g, (_, pattern) in gapped.items()) + r")(?![^ ])"),
        {g: name for g, (name, _) in gapped.items()},
    )


@cache
def _stop_words() -> frozenset[str]:
    return frozenset((data_root("tables") / _STOP_WORDS).read_text(encoding="utf-8").split())


@cache
def _stemmer() -> Any:
    import Stemmer

    return Stemmer.Stemmer("english")
