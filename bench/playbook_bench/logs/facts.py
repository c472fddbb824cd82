"""What the lines around the steps say of the whole run: its global batch, its sequences, its GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

_MOST = 2**40
_ARGUMENT = r"{0}(?<![\w-]{0}) \.{{3,}} (\d{{1,12}})\s*$"
"""A line of the arguments that Megatron-LM prints at its start. Patterns begin with letters, so that long logs are searched fast."""


def _patterns(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns)


_NAMED = {
    "gbs": _patterns(
        _ARGUMENT.format("global_batch_size"),
        r"global batch size (\d{1,12}), grad",
        r"Total train batch size \([^)\n]{1,80}\) = ([\d,]{1,15})\s*$",
    ),
    "seq": _patterns(_ARGUMENT.format("seq_length"), r"sequence length (\d{1,12}),"),
    "gpus": _patterns(
        _ARGUMENT.format("world_size"),
        r"Building device mesh with parallelism: pp=(\d{1,6}), dp_replicate=(\d{1,6}), dp_shard=(\d{1,6}), cp=(\d{1,6}), tp=(\d{1,6})",
    ),
}
"""For each fact the lines of Megatron-LM, torchtitan and the Hugging Face Trainer that state it; several numbers are multiplied."""


@dataclass(frozen=True)
class Facts:
    """Samples of a step of the whole job, tokens of a sequence, GPUs; None: the log does not say, or says two things."""

    gbs: int | None = None
    seq: int | None = None
    gpus: int | None = None


def of(text: str) -> Facts:
    """The facts that a log states."""
    return Facts(**{name: _stated(text, patterns) for name, patterns in _NAMED.items()})


def _stated(text: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    values = {prod(int(group.replace(",", "") or 0) for group in match.groups()) for each in patterns for match in each.finditer(text)}
    return values.pop() if len(values) == 1 and 0 < max(values) < _MOST else None
