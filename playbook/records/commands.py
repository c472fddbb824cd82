"""What a case of a command has beside what every case has: how its steps are read, what a variant may change, the trace that proves it, and
what of it must not be kept in a record.

Passwords, keys and tokens are told by the name that they have or by their shape. Names are those that detect-secrets 1.5 looks for (its
plugin for keywords, with `auth`), shapes the prefixes that issuers give their tokens. A name says nothing of a value that is a number or a
path; a value of no known shape under a name that says nothing is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field

from playbook.yaml_files import KeyPath, Strict, did_you_mean

_STRONG = ("token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "auth", "authorization", "jwt")
_ENDS = ("token", "secret", "password", "passwd", "credential", "credentials", "apikey")
"""A part may end with these, as in HFTOKEN."""
_QUALIFIED = ("key", "pass", "pwd", "cookie", "dsn")
"""These count as the last part of a name of several, as in WANDB_KEY."""
_SORTS = ("sort", "cache", "public", "foreign", "primary", "group", "partition")
"""Parts before `key` that make it another thing."""
_SHAPES = re.compile(
    r"""
    \b(hf|hf_oauth)_[A-Za-z0-9]{20,}                                  # Hugging Face
    | \b(gh[opusr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})     # GitHub
    | \bglpat-[A-Za-z0-9_-]{20,}                                      # GitLab
    | \b(sk|pk|rk)[-_][A-Za-z0-9_-]{20,}                              # OpenAI, Anthropic, Stripe
    | \b(AKIA|ASIA)[0-9A-Z]{16}\b                                     # AWS
    | \bAIza[0-9A-Za-z_-]{35}                                         # Google
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}                                # Slack
    | \b(npm|nvapi|pypi|dckr_pat|wandb_v1)[-_][A-Za-z0-9_-]{30,}      # npm, NVIDIA, PyPI, Docker, Weights & Biases
    | \beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*    # JSON web tokens
    | (?<=://)[^\s/:@]*:[^\s/@]{3,}(?=@)                              # name and password in a URL
    | \b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{12,}                      # headers of HTTP
    | -----BEGIN[A-Z ]*PRIVATE\ KEY-----(.*?-----END[A-Z ]*PRIVATE\ KEY-----|.*)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z][\w.-]*)(?P<between>[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&<>]*[^\s\"',;&<>:.])")
_FLAG = re.compile(r"(?P<name>--?[A-Za-z][\w.-]*)(?P<between>[\"']?,?\s+[\"']?)(?P<value>[^\s\"',;&<>-][^\s\"',;&<>]*)")
_PLAIN = re.compile(r"[-+]?[\d.,_]+([eE][-+]?\d+)?%?|true|false|none|null|[{$./~].*|.{0,5}", re.IGNORECASE)
"""Values that are no secret: numbers, words of two values, templates, variables, paths, and what is short."""
_DRAWN = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9])[!-~]{8,}")
"""Values that no text holds by chance; a variable such as AUTH=disabled is no reason to hide a word."""
_HIDDEN = "[hidden]"


@lru_cache(4096)
def is_secret(name: str) -> bool:
    """Whether a name, of a variable or an option, says that its value must not be kept."""
    *before, last = re.split(r"[_.-]+", name.lower().strip("_.-"))
    if any(part in _STRONG or part.endswith(_ENDS) for part in (*before, last)):
        return last not in ("file", "path", "dir", "length", "len", "count", "id", "type")
    return last in _QUALIFIED and bool(before) and before[-1] not in _SORTS


def of_words(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Which of a command's words must not be kept and why, without its value; empty where there is none.

    `environment` is this process's, if None.
    """
    secrets = dict(_values(os.environ if environment is None else environment))
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals and word.startswith("-") and i + 1 < len(words):
            value = words[i + 1]
        if value and is_secret(name) and not _PLAIN.fullmatch(value):
            return f"the value of {name}"
        if variable := next((v for v, hidden in secrets.items() if hidden in word), None):
            return f"word {i + 1}, which holds the value of {variable},"
        if _SHAPES.search(word):
            return f"word {i + 1}"
    return ""


def of_variables(variables: Mapping[str, str]) -> str:
    """The first variable that must not be kept, by its name or by the shape of its value; empty where there is none."""
    return next((name for name, value in variables.items() if is_secret(name) or _SHAPES.search(value)), "")


def hidden(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A text with each secret replaced: values of this process's variables by their names, what has the shape of one, and what is
    assigned to a name of one.
    """
    for _, value in sorted(_values(os.environ if environment is None else environment), key=lambda pair: -len(pair[1])):
        text = text.replace(value, _HIDDEN)
    text = _SHAPES.sub(_HIDDEN, text)
    for pattern in (_ASSIGNED, _FLAG):
        text = pattern.sub(_without_value, text)
    return text


def _without_value(match: re.Match[str]) -> str:
    keep = not is_secret(match["name"]) or _PLAIN.fullmatch(match["value"])
    return match[0] if keep else match["name"] + match["between"] + _HIDDEN


def _values(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if is_secret(name) and _DRAWN.fullmatch(value) and not _PLAIN.fullmatch(value):
            yield name, value


DELTAS: Mapping[str, type[Any]] = {
    "arguments": list,
    "environment": dict,
    "files": dict,
    "revision": str,
    "step_tokens": int,
}
"""What a variant of a command may change, besides the values of its template's words. `step_tokens`: of the whole job, where its log
tells none."""
_GIVEN = ("run", "root", "python")
"""Words that every template may use: the launch's own new folder, the folder of the repository, or of the command's start, and the Python
that the harness runs on."""
_MOST_TOKENS = 2**53
_WORD = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


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


def template_problems(texts: Sequence[tuple[KeyPath, str]], values: Sequence[str]) -> Iterator[tuple[KeyPath, str]]:
    """Words of templates that nothing gives a value, and values that no template uses."""
    defined = {*_GIVEN, *values}
    used = {m[1]: where for where, text in texts for m in _WORD.finditer(text)}
    for word, where in used.items():
        if word not in defined:
            yield where, f"nothing gives {{{word}}} a value{did_you_mean(word, defined)}; name it in every profile or variant"
    for word in values:
        if word not in used:
            yield ("command",), f"'{word}' is set and no template uses it; write {{{word}}} in the command, or use arguments"


def secret_word(command: Sequence[str], prepare: Sequence[str], deltas: Mapping[KeyPath, Mapping[str, Any]]) -> tuple[KeyPath, str] | None:
    """What would put a secret into records: words of the command, of its preparation, or of what profiles and variants change."""
    words: list[tuple[KeyPath, Sequence[str]]] = [(("command",), command), (("prepare",), prepare)]
    words += [(where, [f"{k}={v}" for k, v in delta.items() if k not in DELTAS]) for where, delta in deltas.items()]
    words += [(where, [*command[-1:], *delta.get("arguments", [])]) for where, delta in deltas.items()]
    for where, each in words:
        if secret := of_words(each):
            return where, f"{secret} looks like a secret and would be kept in records; export it as a variable for all variants instead"
    return None


def delta_problems(where: KeyPath, delta: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
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
        elif key == "environment" and isinstance(value, Mapping) and (secret := of_variables(value)):
            yield (*where, key), f"{secret} looks like a secret and would be kept in records; export it for both variants instead"
        elif key == "files" and (out := next((p for p in [*value, *parts] if p.startswith("/") or ".." in p.split("/")), None)):
            yield (*where, key), f"'{out}' leads out of the repository; expected a path inside it"
