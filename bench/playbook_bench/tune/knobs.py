"""Knobs: the settings that a tuning may change, from a YAML file, where each of them goes, and in which order candidates are tried: by what
the planner predicts, else by what a claim was seen to bring, else as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from playbook.errors import ConfigError
from playbook.records import commands
from playbook.records.case import Rule
from playbook.records.evidence import digest
from playbook.yaml_files import Strict, did_you_mean, read
from playbook_bench.tune.procedure import Choice, Settings

Value = str | int | float | bool | None | list[str]
MOST_KNOBS, MOST_VALUES, LONGEST = 64, 16, 1000
_NAME = re.compile(r"\w[\w.+-]{0,63}", re.ASCII)
_TARGET = re.compile(r"-{1,2}[A-Za-z0-9][\w.-]*|\$[A-Za-z_]\w*|[A-Za-z_][\w.]*")
"""Where a value goes: an option, a variable by `$NAME`, or a dotted key."""


class Knob(Strict):
    """A setting: its values, today's first, and where they go: `argument`, `environment`, `key`, or `sets` for what only goes together."""

    argument: str | None = Field(default=None, pattern=r"^-{1,2}[A-Za-z0-9][\w.-]*$", max_length=100)
    """An option of the command, such as `--fuse`. `true` is the option alone; `false` and `null` are none."""
    environment: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$", max_length=100)
    """A variable. `null` leaves it out."""
    key: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*$", max_length=100)
    """A dotted key: of our trainer's configuration, of `file`, or, for another command, of a word `key=value`."""
    file: str | None = None
    """The YAML or JSON file that the command names and `key` is changed in; a launch gets a changed copy."""
    values: list[Value] = Field(default_factory=list, max_length=MOST_VALUES)
    """Today's first, then simpler ones before others: of two that do not differ, the earlier one stays."""
    sets: dict[str, dict[str, Value]] = Field(default_factory=dict, max_length=MOST_VALUES)
    """In place of values: by name, today's first, what is set together: options by `--name`, variables by `$NAME`, keys by their own."""
    excludes: list[str] = Field(default_factory=list)
    """Knobs that stay at today's value where this one does not."""
    require: list[Rule] = Field(default_factory=list)
    """What a launch must show where the knob is not at today's value, such as `{log: "fused kernel is on"}`."""
    claim: str | None = Field(default=None, pattern=r"^[A-Z][0-9]{1,3}(\.[a-z])?$")
    """The claim that says what it brings."""
    gain: float | None = Field(default=None, gt=-100, le=10_000)
    """Percent by which it was seen or predicted to help, in the `scope`."""
    scope: str = Field(default="", max_length=200)
    """Where that was, in words."""
    wall: str | None = Field(default=None, pattern=r"^(communication|host|compute|data)$")
    """The part of a step that it can shorten; where a trace says that this part is small, the knob comes last."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        """One kind of place, at least two values, each of which can be said."""
        places = sum(bool(place) for place in (self.argument, self.environment, self.key, self.sets))
        alike = len(set(self.texts)) < len(self.texts) or len({json.dumps(s, sort_keys=True) for s in self.sets.values()}) < len(self.sets)
        long = next((text for text in self.texts if len(text) > LONGEST or not text.isprintable()), "")
        wrong = next((target for each in self.sets.values() for target in each if not _TARGET.fullmatch(target)), None)
        problems = (
            (places != 1, "expected exactly one of argument, environment, key and sets"),
            (bool(self.sets) == bool(self.values), "expected 'values', or 'sets' in place of them"),
            (self.file is not None and self.key is None, "'file' needs the 'key' that is changed in it"),
            (alike or len(self.texts) < 2, "expected at least two different values, today's first"),
            (long, f"value {long[:40]!r} cannot be said in one line; expected at most {LONGEST:,} printable characters"),
            (wrong is not None, f"'{(wrong or '')[:60]}' is no place; expected --option, $VARIABLE or a dotted key"),
        )
        if problem := next((text for applies, text in problems if applies), ""):
            raise ValueError(problem)
        return self

    @property
    def targets(self) -> list[str]:
        """Options, variables and keys that it sets, each with its file."""
        every = dict.fromkeys(target for text in self.texts for target in self.changes(text))
        return [f"{self.file}: {target}" if self.file else target for target in every]

    @property
    def texts(self) -> list[str]:
        """The values in words."""
        return list(self.sets) or [text_of(value) for value in self.values]

    def changes(self, text: str) -> dict[str, Value]:
        """What this value sets, by place: `--option`, `$VARIABLE` or key."""
        if self.sets:
            return self.sets[text]
        target = self.argument or (f"${self.environment}" if self.environment else str(self.key))
        return {target: self.values[self.texts.index(text)]}

    @property
    def place(self) -> str:
        """Where it goes, in words."""
        return ", ".join(self.targets)


class Knobs(Strict):
    """The knobs of one command, or the ready set of a framework."""

    framework: str | None = None
    """For a ready set: whose commands it is for."""
    knobs: dict[str, Knob] = Field(min_length=1, max_length=MOST_KNOBS)

    @model_validator(mode="after")
    def _names(self) -> Self:
        """Names that can be said, places that no two share, exclusions that exist, and no secrets."""
        owners: dict[str, str] = {}
        for name, knob in self.knobs.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name[:70]!r} is no name of a knob; expected up to 64 of letters, digits, _, ., + and -")
            for target in knob.targets:
                other = owners.setdefault(target, name)
                if other != name and other not in knob.excludes and name not in self.knobs[other].excludes:
                    raise ValueError(
                        f"'{other}' and '{name}' both set {target}; make them values of one knob, or let one exclude the other"
                    )
            for other in knob.excludes:
                if other not in self.knobs or other == name:
                    raise ValueError(f"'{name}' excludes '{other}', which is no other knob{did_you_mean(other, self.knobs)}")
            variables = [{k[1:]: text_of(v)} for text in knob.texts for k, v in knob.changes(text).items() if k.startswith("$")]
            if secret := next(filter(None, map(commands.of_variables, variables)), None):
                raise ValueError(f"'{name}': {secret} looks like a secret and would be kept in records")
        return self

    def in_effect(self) -> list[Any]:
        """All of them that a launch depends on, as plain data: what each value sets, what it must show, and the files that are changed.

        Raises:
            ConfigError: a file cannot be read.
        """
        files = {name: digest([read(Path(knob.file))[0]], 16) if knob.file else "" for name, knob in self.knobs.items()}
        return [
            [name, [knob.changes(t) for t in knob.texts], files[name], [r.model_dump(mode="json") for r in knob.require]]
            for name, knob in self.knobs.items()
        ]

    @property
    def choices(self) -> list[Choice]:
        """As the procedure sees them."""
        both = {name: set(knob.excludes) | {n for n, k in self.knobs.items() if name in k.excludes} for name, knob in self.knobs.items()}
        return [Choice(name, tuple(knob.texts), frozenset(both[name])) for name, knob in self.knobs.items()]


def text_of(value: Value) -> str:
    """A value as a command line and a result say it."""
    if value is None:
        return "unset"
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def changes_of(knobs: Knobs, settings: Settings) -> dict[str, Value]:
    """What settings change, by place: `--option`, `$VARIABLE` or key; without what goes into files."""
    chosen = [(knobs.knobs[name], text) for name, text in settings]
    return {target: value for knob, text in chosen if not knob.file for target, value in knob.changes(text).items()}


def words_of(words: Sequence[str], knobs: Knobs, settings: Settings, copies: Path) -> list[str]:
    """A command with the options and keys of settings; changed files are written below `copies`.

    Raises:
        ConfigError: a file cannot be read or is not named by the command.
    """
    out, edits = list(words), dict[str, dict[str, Value]]()
    for target, value in changes_of(knobs, settings).items():
        if target.startswith("-"):
            out = _with_option(out, target, value)
        elif not target.startswith("$"):
            out = _with_key(out, target, value)
    for name, text in settings:
        if file := knobs.knobs[name].file:
            edits.setdefault(file, {}).update(knobs.knobs[name].changes(text))
    for number, (file, changes) in enumerate(edits.items()):
        named = re.compile(rf"(?<![\w./-]){re.escape(file)}(?![\w./-])")
        if not any(named.search(word) for word in words):
            raise ConfigError(f"the command does not name {file}, which a knob changes; expected it among: {' '.join(words)[:200]}")
        copy = str(_edited(file, changes, copies / str(number)))
        out = [named.sub(lambda _, copy=copy: copy, word) for word in out]  # type: ignore[misc]
    return out


def environment_of(knobs: Knobs, settings: Settings) -> dict[str, str]:
    """The variables of settings."""
    return {k[1:]: text_of(v) for k, v in changes_of(knobs, settings).items() if k.startswith("$") and v is not None}


def check_today(words: Sequence[str], knobs: Knobs) -> None:
    """Refuse a knob whose first value is not the one that the command has.

    Raises:
        ConfigError: the command says another one.
    """
    for name, knob in knobs.knobs.items():
        for target, value in ({} if knob.file else knob.changes(knob.texts[0])).items():
            now = _option(words, target) if target.startswith("-") else _key(words, target)
            if now is not None and not _same(now, text_of(value)):
                raise ConfigError(
                    f"knob {name}: the command has {target} {now}, and its first value is {text_of(value)}; put today's first"
                )


_LEFT_OUT = ("unset", "false", "0")


def fits(knob: Knob, words: Sequence[str], environment: Mapping[str, object]) -> bool:
    """Whether a run has the knob's first value, and none of the others; left out counts for what a default is everywhere: off, false, 0,
    unset. `environment`: its variables, or the keys of a case of our trainer.
    """

    def now(target: str) -> str | None:
        if target.startswith("-"):
            return _option(words, target)
        name = target.removeprefix("$")
        return text_of(environment[name]) if name in environment else _key(words, name)  # type: ignore[arg-type]

    def holds(changes: Mapping[str, Value]) -> bool:
        return all(text_of(v) in _LEFT_OUT if (seen := now(k)) is None else _same(seen, text_of(v)) for k, v in changes.items())

    first, *others = (knob.changes(text) for text in knob.texts)
    return holds(first) and not any(changes != first and holds(changes) for changes in others)


def _same(one: str, other: str) -> bool:
    """Whether two values are one: `True` and `true` are."""
    return one == other or one.lower() == other.lower() in ("true", "false")


def _with_option(words: Sequence[str], option: str, value: Value) -> list[str]:
    """Another value of an option: in its place, or at the end. Both `--key value` and `--key=value` are known."""
    out = list(words)
    for i, word in enumerate(out):
        if word == option or word.startswith(f"{option}="):
            takes = word == option and i + 1 < len(out) and not out[i + 1].startswith("--")
            after = out[i + 2 :] if takes else out[i + 1 :]
            return [*out[:i], *_option_words(option, value, joined=word != option), *after]
    return [*out, *_option_words(option, value, joined=False)]


def _option_words(option: str, value: Value, joined: bool) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    return [f"{option}={text_of(value)}"] if joined else [option, text_of(value)]


def _option(words: Sequence[str], option: str) -> str | None:
    for i, word in enumerate(words):
        if word == option:
            following = words[i + 1] if i + 1 < len(words) else "--"
            return "true" if following.startswith("--") else following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _with_key(words: Sequence[str], key: str, value: Value) -> list[str]:
    out = [word for word in words if not word.startswith(f"{key}=")]
    return out if value is None else [*out, f"{key}={text_of(value)}"]


def _key(words: Sequence[str], key: str) -> str | None:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), None)


def _edited(file: str, changes: Mapping[str, Value], copies: Path) -> Path:
    """A copy of a YAML or JSON file with other values of dotted keys."""
    data: Any = read(Path(file))[0]
    for key, value in changes.items():
        *folders, last = key.split(".")
        level = data
        for folder in folders:
            level = level.setdefault(folder, {}) if isinstance(level, dict) else None
        if not isinstance(level, dict):
            raise ConfigError(f"{file} has no mapping for the key {key}; expected one that can hold it")
        level.pop(last, None) if value is None else level.update({last: value})
    copies.mkdir(parents=True, exist_ok=True)
    copy = copies / Path(file).name
    copy.write_text(json.dumps(data, indent=1) if copy.suffix == ".json" else yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return copy.absolute()


UNKNOWN = 0.01
"""What an unknown change counts as, as a share: after what is known to bring more, before what is known to bring less."""
SMALL = 0.05
"""A part of a step below this share leaves a knob that shortens it little to gain."""


@dataclass(frozen=True)
class Predicted:
    """What the planner says of one candidate."""

    gain: float | None = None
    """As a share of the start's speed."""
    refusal: str = ""
    """Why it cannot run, such as too little memory."""


@dataclass(frozen=True)
class Ranked:
    """One candidate in the order."""

    knob: str
    value: str
    place: str
    gain: float | None
    why: str
    skipped: bool = False
    """Whether it is never launched."""


def ranked(knobs: Knobs, predicted: Mapping[tuple[str, str], Predicted], small: Mapping[str, str]) -> list[Ranked]:
    """Every candidate, the most expected gain for a second of the machine first; those that cannot run last.

    A launch of a candidate that gains `g` takes 1 / (1 + g) of the start's time. `small`: walls that are a small part of the current step,
    with the words that say so; a knob that shortens one comes after the others.
    """
    rows = []
    for name, knob in knobs.knobs.items():
        for text in knob.texts[1:]:
            of = predicted.get((name, text), Predicted())
            gain, why = (of.gain, "predicted by the planner") if of.gain is not None else _known(knob)
            if of.refusal:
                rows.append((3, 0.0, Ranked(name, text, knob.place, gain, of.refusal, skipped=True)))
                continue
            worth = UNKNOWN if gain is None else gain
            if reason := small.get(knob.wall or "", ""):
                why = f"{reason}; {why}"
            rows.append((1 if reason else 0, -worth * (1 + max(worth, -0.9)), Ranked(name, text, knob.place, gain, why)))
    return [row for _, _, row in sorted(rows, key=lambda each: each[:2])]


def _known(knob: Knob) -> tuple[float | None, str]:
    """The gain that a claim or the file names, and whose it is."""
    where = f" ({knob.scope})" if knob.scope else ""
    if knob.gain is None:
        return None, f"unknown: claim {knob.claim}{where}" if knob.claim else f"unknown{where}"
    return knob.gain / 100, (f"claim {knob.claim}" if knob.claim else "as the file says") + where
