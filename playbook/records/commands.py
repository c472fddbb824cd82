"""What a case of a command has beside what every case has: how its steps are read, what a variant may change, and the trace that proves
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from playbook.records import confidential
from playbook.yaml_files import Strict, did_you_mean

DELTAS: Mapping[str, type[Any]] = {
    "arguments": list,
    "environment": dict,
    "files": dict,
    "revision": str,
    "step_tokens": int,
}
"""What a variant of a command may change, besides the values of its template's words. `step_tokens`: of the whole job, where its log
tells none."""
_GIVEN = ("run", "root")
"""Words that every template may use: the launch's own new folder, and the folder of the repository, or of the command's start."""
_MOST_TOKENS = 2**53
_WORD = re.compile(r"\{([a-z_][a-z0-9_]*)\}")

Place = tuple[str | int, ...]


class Steps(Strict):
    """Where a command's steps are told, how many there are, and from which on they are timed."""

    log: str | None = None
    """The adapter, such as jsonl, hf, megatron or regex:PATTERN; found out from the log where None."""
    file: str | None = None
    """The file that tells them, as a template; what the command prints, where None."""
    count: int | None = Field(default=None, ge=2)
    """Steps that a launch makes; a log that tells others is an error. Where None, all launches must tell as many as the first."""
    warm_up: int | None = Field(default=None, ge=0)
    """Steps that are not timed; the first fifth, and at least one line of the log, where None."""

    def first_timed(self, lines: int, every: int = 1, longer: bool = False) -> int:
        """How many lines of a log come before the timed ones, where a line is of `every` steps; `longer` adds half of the others."""
        first = max(1, lines // 5) if self.warm_up is None else -(-self.warm_up // every)
        return first + (lines - first) // 2 if longer else first


class Traced(Strict):
    """The trace that the first, discarded launch of each variant leaves: a Chrome trace of torch.profiler, or an SQLite export of nsys."""

    file: str
    arguments: list[str] = Field(default_factory=list)
    """Added to the command in that launch alone, so that timed launches are not profiled."""


def fill(text: str, values: Mapping[str, Any]) -> str:
    """A template with its words replaced; words without a value stay as they are."""
    return _WORD.sub(lambda m: str(values[m[1]]) if m[1] in values else m[0], text)


def template_problems(texts: Sequence[tuple[Place, str]], values: Sequence[str]) -> Iterator[tuple[Place, str]]:
    """Words of templates that nothing gives a value, and values that no template uses."""
    defined = {*_GIVEN, *values}
    used = {m[1]: where for where, text in texts for m in _WORD.finditer(text)}
    for word, where in used.items():
        if word not in defined:
            yield where, f"nothing gives {{{word}}} a value{did_you_mean(word, defined)}; name it in every profile or variant"
    for word in values:
        if word not in used:
            yield ("command",), f"'{word}' is set and no template uses it; write {{{word}}} in the command, or use arguments"


def secret_word(command: Sequence[str], prepare: Sequence[str], deltas: Mapping[Place, Mapping[str, Any]]) -> tuple[Place, str] | None:
    """What would put a secret into records: words of the command, of its preparation, or of what profiles and variants change."""
    words: list[tuple[Place, Sequence[str]]] = [(("command",), command), (("prepare",), prepare)]
    words += [(where, [f"{k}={v}" for k, v in delta.items() if k not in DELTAS]) for where, delta in deltas.items()]
    words += [(where, [*command[-1:], *delta.get("arguments", [])]) for where, delta in deltas.items()]
    for where, each in words:
        if secret := confidential.of_words(each):
            return where, f"{secret} looks like a secret and would be kept in records; export it as a variable for all variants instead"
    return None


def delta_problems(where: Place, delta: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """What is wrong with what one variant, or one profile, changes."""
    for key, value in delta.items():
        expected_type = DELTAS.get(key)
        if expected_type is None:
            if not isinstance(value, str | int | float):
                yield (*where, key), f"'{key}' is {type(value).__name__}; expected a text or a number"
            continue
        if key == "step_tokens":
            if type(value) is not int or not 0 < value < _MOST_TOKENS:
                yield (*where, key), f"'{key}' is {value!r}; expected the tokens of a step of the whole job, a whole number from 1"
            continue
        parts = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        if not isinstance(value, expected_type) or not all(isinstance(part, str) for part in parts):
            shape = {"list": "a list of texts", "dict": "a mapping of texts", "str": "a text"}[expected_type.__name__]
            yield (*where, key), f"'{key}' is {type(value).__name__}; expected {shape}"
        elif key == "environment" and isinstance(value, Mapping) and (secret := confidential.of_variables(value)):
            yield (*where, key), f"{secret} looks like a secret and would be kept in records; export it for both variants instead"
        elif key == "files" and (out := next((p for p in [*value, *parts] if p.startswith("/") or ".." in p.split("/")), None)):
            yield (*where, key), f"'{out}' leads out of the repository; expected a path inside it"
