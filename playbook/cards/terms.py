"""From text to search terms, and from a question to what it says about the machine. The same rules serve cards and questions.

Text of others: every pattern here is linear in its length.
"""

from __future__ import annotations

import csv
import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from math import log
from typing import Any

from playbook.errors import ConfigError, PlaybookError
from playbook.paths import data_root
from playbook.planner.models import MODELS, named, not_known
from playbook.planner.time.cluster import cluster, clusters
from playbook.yaml_files import shipped_table

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

    def over(self, fallback: Facts) -> Facts:
        """These facts, with those of `found` where these say nothing."""
        stated_facts = {k: v for k, v in vars(self).items() if v not in (None, ())}  # no GPU at all is said, too
        return replace(fallback, **stated_facts)

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
    """What a pasted text asks: its first line of prose and the prose right below.

    Where it has none, its first line, or its last below a heading.
    """
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
    parts = [part.lower() for word in text.split() if not word.islower() and len(pieces := _CAMEL.split(word)) > 1 for part in pieces]
    words = [w for w in [*spaced.split(), *parts] if w not in _stop_words()]
    return [*_stemmer().stemWords(words), *named, *_IDENTIFIER.findall(line)]


def phrases(text: str) -> list[tuple[str, str]]:
    """The phrases of the table of synonyms in a text, each with the term that stands for it."""
    return _phrases(" ".join(_WORD.findall(normal(text))))


def _phrases(spaced: str) -> list[tuple[str, str]]:
    table, starts, gapped, named = _synonyms()
    tokens, matches, place = spaced.split(" "), [], 0
    while place < len(tokens):
        phrase = next((p for p in starts.get(tokens[place], ()) if tokens[place : place + len(p)] == p), None)
        if phrase:
            matches += [(" ".join(phrase), term) for term in table[" ".join(phrase)]]
        place += len(phrase or [""])
    return matches + [(m.group(0), named[m.lastgroup]) for m in gapped.finditer(spaced) if m.lastgroup]


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
    run = facts((hardware or "")[:100])
    if hardware and not run.hardware:
        word = _device(hardware)
        run = Facts((word,), 0 if word == "cpu" else run.gpus)
    return Facts(run.hardware, run.gpus if gpus is None else gpus, preset)


def _device(hardware: str) -> str:
    """`cpu`, or the planner's name of a GPU that stands in no family."""
    if _WORD.findall(normal(hardware[:100])) == ["cpu"]:
        return "cpu"
    try:
        return cluster(hardware).name
    except ConfigError:
        names = ", ".join(sorted({"cpu", *clusters(), *GPUS, *FAMILIES}))
        raise PlaybookError(f"hardware '{hardware[:40]}' is not known; expected one of {names}; or leave it out") from None


def _model(line: str) -> str | None:
    """The model of the table whose whole name stands in the line, the longest where several do."""
    flat = "".join(_WORD.findall(line)).replace(".", "")
    whole = [m for m in MODELS if m.replace("_", "") in flat]
    return max(whole, key=len) if whole else None


@cache
def _synonyms() -> tuple[Mapping[str, list[str]], Mapping[str, list[list[str]]], re.Pattern[str], Mapping[str, str]]:
    """The names of each phrase, the phrases that begin with a word, longest first, and a pattern for phrases with a gap, its groups with
    their names.
    """
    table: dict[str, list[str]] = {}
    gapped: dict[str, tuple[str, str]] = {}
    for name, phrases in shipped_table("synonyms.yaml").items():
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
    return frozenset((data_root("tables") / "stopwords.txt").read_text(encoding="utf-8").split())


@cache
def _stemmer() -> Any:
    import Stemmer

    return Stemmer.Stemmer("english")


# Questions that people asked in public issue threads, with the cards that answer each: by these the search knows what each card is asked,
# and what is beyond all.
# `asked.csv` has them paraphrased; OWNER/REPOSITORY#NUMBER stands for https://github.com/OWNER/REPOSITORY/issues/NUMBER. Cards stand best
# first; none where no card answers. Of the first seven batches only questions whose hash is even belong there: the other half measures
# the search, and stands among the tests. Of the later ones the eighth, ninth and twelfth to fourteenth tune and belong there whole; the
# tenth, the eleventh and the fifteenth to seventeenth measure and stand among the tests whole.

PRIOR = 50.0
"""How many questions of no card in particular stand beside those of each card."""


@dataclass(frozen=True)
class KnownQuestion:
    """One question, paraphrased."""

    text: str
    cards: frozenset[str]
    """Ids of the cards that answer it; none where no card does."""
    thread: str
    """Where it was asked, as OWNER/REPOSITORY#NUMBER."""

    @cached_property
    def said(self) -> frozenset[str]:
        """Its terms."""
        return frozenset(terms(self.text))


@dataclass(frozen=True)
class Likeness:
    """How like a question's terms are to those of the known questions that each card answers."""

    many: Mapping[str, float]
    """Known questions of each card; one with several cards counts in parts."""
    counts: Mapping[str, Mapping[str, float]]
    """For each term, those of each card that have it."""
    share: Mapping[str, float]
    """For each term, the share of all questions with a card that have it."""

    def of(self, question_terms: Iterable[str]) -> dict[str, float]:
        """For each card, the log odds of these terms between its questions and all, as naive Bayes has them."""
        out = dict.fromkeys(self.many, 0.0)
        for term in {t for t in question_terms if t in self.share}:
            counts, share = self.counts[term], self.share[term]
            for card, many in self.many.items():
                out[card] += log((counts.get(card, 0.0) / share + PRIOR) / (many + PRIOR))
        return out


def likeness(questions: Sequence[KnownQuestion], cards: Collection[str]) -> Likeness:
    """The terms of known questions, counted for each of these cards."""
    answered = [(q.said, q.cards.intersection(cards)) for q in questions if not q.cards.isdisjoint(cards)]
    many = dict.fromkeys(cards, 0.0)
    counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for question_terms, answers in answered:
        for card in answers:
            many[card] += 1 / len(answers)
            for term in question_terms:
                counts[term][card] += 1 / len(answers)
    frequency = Counter(t for question_terms, _ in answered for t in question_terms)
    return Likeness(many, counts, {t: (n + 1) / (len(answered) + 2) for t, n in frequency.items()})


@cache
def load_asked() -> tuple[KnownQuestion, ...]:
    """The questions that ship."""
    with (data_root("tables") / "asked.csv").open(encoding="utf-8", newline="") as file:
        return tuple(KnownQuestion(row["question"], frozenset(row["cards"].split()), row["thread"]) for row in csv.DictReader(file))


# Whether the cards cover a question at all: a logistic regression over a few signs, its weights in a table.
# The signs are what the search knows about its best card, whether the question names a subject that no card names, how its words stand
# among known questions with a card and without, and how many of its words are about an aim of the cards, a fault, files, serving or a
# project. `tools/search/fit_coverage.py` fits the weights on known questions.

WAYS = frozenset({"=lora", "lora", "qlora", "peft", "adapt"})
"""Terms for a way of training that any subject may come with: adapters run out of memory, wait and pad like all weights."""
EXPERTS = frozenset({"expert", "=mixture_of_experts"})
"""Terms for a mixture of experts, whose adapters have claims of their own."""
MOST = 2
"""How many words of a kind, or phrases, count at most, so that a long question says no more than a short one."""
LEAST = -0.7
"""Log odds from which on the search answers: with each sixth of the known questions left out of the fit, one covered question in 33 stays
unanswered."""
_UNSEEN = 0.3
"""What a word counts that is in no known question of a kind, in questions."""


@dataclass(frozen=True)
class Signs:
    """What speaks for and against an answer to one question; each has its weight in the table, under its name."""

    evidence: float
    """Of the card that has most of it, as `playbook.cards.search` counts it."""
    passage: float
    """Logarithm of one more than the best passage's score in the first card."""
    own: float
    """Share of the question's information in title, aliases, symptoms and pitfalls of the first card."""
    beyond: float
    """Phrases that name a subject which no card names, up to two."""
    odds: float
    """Log odds that its words speak against a card."""
    aim: float
    """Words about speed, memory, layout and choice, up to two; so are the next four for what they are about."""
    fault: float
    things: float
    serving: float
    project: float


def covered(signs: Signs) -> float:
    """The log odds that a card answers."""
    weights = load_weights()
    return float(weights["constant"] + sum(weights[name] * value for name, value in asdict(signs).items()))


def kinds(text: str) -> dict[str, float]:
    """How many words of each kind a question has."""
    question_words = _WORD.findall(normal(text))
    return {kind: float(min(MOST, sum(w in kind_words for w in question_words))) for kind, kind_words in load_words().items()}


def neutral(question_terms: Iterable[str], about: Mapping[str, float]) -> frozenset[str]:
    """Terms that speak neither for a card nor against: the way of training, in a question that names no fault and is about speed or memory
    in several words, or in one and about experts.
    """
    aims = about["aim"] + (about["aim"] > 0 and not EXPERTS.isdisjoint(question_terms))
    return WAYS if aims >= MOST and not about["fault"] else frozenset()


def odds(questions: Sequence[KnownQuestion]) -> dict[str, float]:
    """The log odds of each term between the known questions without a card and those with one, as naive Bayes has them; under the empty
    name, of any other.
    """
    counts = {has: Counter(t for q in questions if bool(q.cards) is has for t in q.said) for has in (True, False)}
    many = {has: sum(bool(q.cards) is has for q in questions) + 2 * _UNSEEN for has in counts}
    share = {t: {has: (counts[has][t] + _UNSEEN) / many[has] for has in counts} for t in {*counts[True], *counts[False], ""}}
    return {t: log(s[False] / s[True]) for t, s in share.items()}


def against(log_odds: Mapping[str, float], question_terms: Iterable[str]) -> float:
    """The log odds that these terms speak against a card, each counted once."""
    return float(sum(log_odds.get(t, log_odds[""]) for t in set(question_terms)))


@cache
def load_words() -> Mapping[str, frozenset[str]]:
    """The words of each kind."""
    return {kind: frozenset(kind_words) for kind, kind_words in shipped_table("question_words.yaml").items()}


def load_weights() -> Mapping[str, float]:
    """The weight of each sign, and the constant."""
    return shipped_table("coverage.yaml")
