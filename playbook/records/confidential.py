"""What must not be kept in a record: passwords, keys and tokens, told by the name that they have or by their shape.

Names are those that detect-secrets 1.5 looks for (its plugin for keywords, with `auth`), shapes the prefixes that issuers give their
tokens. A name says nothing of a value that is a number or a path; a value of no known shape under a name that says nothing is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

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
