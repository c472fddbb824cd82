"""Numbers as people write them on a command line: `64xH100`, `128K`, `25%`, `11,000`."""

from __future__ import annotations

import re

import typer

from playbook.errors import PlaybookError
from playbook.planner.hardware import counted, machine
from playbook.planner.runs.spelling import number, said

_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST_TOKENS = 1e18
_MOST_NUMBERS = 20


def to_tokens(text: str | int) -> int:
    """The value of `--seq`, as tables of runs spell it: `131072`, `131,072`, `128K` or `1M`.

    Raises:
        BadParameter: it is no whole number from 1.
    """
    return _whole("seq_len", str(text), "tokens of a sequence, such as 4096, 128K or 1M")


def machines(gpus: str | None, hardware: str | None) -> tuple[int | None, str | None]:
    """How many GPUs, and of which kind: `64` and `h100`, or both in one, as `64xH100` in either option; a kind may be a file.

    Raises:
        BadParameter: `gpus` is no whole number from 1.
        ConfigError: the two contradict each other, or name a GPU that is not known.
    """
    kind, many = (None, None) if hardware is None else counted(hardware)
    if gpus is None:
        return many, kind
    named, _, more = gpus.lower().partition("x")
    number = _whole("gpus", named.strip(), "a number of GPUs, such as 64 or 64xH100")
    if more and kind and machine(more).name != machine(kind).name:
        raise PlaybookError(f"--gpus {gpus[:40]} and --hardware {kind[:40]} name two kinds of GPU; expected one, or leave one of them out")
    if many not in (None, number):
        raise PlaybookError(f"--gpus says {number} GPUs, and --hardware {many}; expected the same number, or leave one of them out")
    return number, kind or more.strip() or None


def amount(text: str | float) -> float:
    """Tokens of a training, in decimal units: `1T`, `15.6T`, `300B`, `1e12` or `1,000,000`.

    Raises:
        BadParameter: it is no such number, or more than a training has.
    """
    match = re.fullmatch(r"([0-9][0-9,]*\.?[0-9]*(?:[eE]\+?[0-9]{1,2})?)\s?([KMBT]?)", str(text).strip(), re.IGNORECASE | re.ASCII)
    value = float(match[1].replace(",", "")) * _DECIMAL[match[2].upper()] if match else 0.0
    if not 1 <= value <= _MOST_TOKENS:
        raise typer.BadParameter(f"found '{str(text)[:40]}', expected tokens of a training, such as 300B or 1T")
    return value


def several(text: str) -> list[int]:
    """The value of `--scale`: `8,16,32`, in ascending order.

    Raises:
        BadParameter: one is no whole number from 1, or there are none, or too many.
    """
    numbers = sorted({_whole("gpus", part.strip(), "numbers of GPUs, such as 8,16,32") for part in text.split(",") if part.strip()})
    if not 1 <= len(numbers) <= _MOST_NUMBERS:
        raise typer.BadParameter(f"found {len(numbers)} numbers of GPUs, expected 1 to {_MOST_NUMBERS}, such as 8,16,32")
    return numbers


def _whole(column: str, text: str, expected: str) -> int:
    digits = said(column, text)
    if not (digits.isascii() and digits.isdigit() and 1 <= int(digits) <= 1 << 30):
        raise typer.BadParameter(f"found '{text[:40]}', expected {expected}")
    return int(digits)


def percent(text: str | float) -> float:
    """The value of `--mfu`: `25` or `25%`.

    Raises:
        BadParameter: it is no number.
    """
    return _figure(str(text).strip().removesuffix("%"), "percent of the peak, such as 25 or 25%")


def figure(text: str | float) -> float:
    """A measured figure, such as `11000` or `11,000`.

    Raises:
        BadParameter: it is no number.
    """
    return _figure(str(text), "a number, such as 11000 or 11,000")


def _figure(text: str, expected: str) -> float:
    try:
        return float(number(text.strip()))
    except ValueError:
        raise typer.BadParameter(f"found '{text[:40]}', expected {expected}") from None
