"""Every error that a user can cause, as one tree.

    PlaybookError
      +-- FileError         a card, case, configuration or evidence file is invalid (carries Findings)
      +-- ConfigError       the trainer's configuration or layout cannot run
      +-- DataError         training data is missing or unreadable
      +-- UnmetRequirement  the machine lacks what a claim needs
      +-- LaunchError       a run could not be started
      +-- LogError          a run's log does not say, or not soundly, what its steps took
      +-- StoreError        evidence could not be written or does not check out

A message says what was found, what was expected and what to do next. The command line catches PlaybookError once,
prints the message and exits with 2; a traceback is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

NO_TORCH = (
    "package torch is not installed; run pip install '.[train]' in a clone of Playbook, or pip install 'FILE.whl[train]' with a wheel"
)
"""Said by whatever trains or measures kernels."""


class ExitCode(IntEnum):
    """How a command ends, for all commands; `docs/guide/exit-codes.md` has them for readers."""

    DONE = 0
    """Confirmed, passed or done."""
    REFUTED = 1
    """Refuted, slower, a regression, a fault of the machine."""
    USAGE = 2
    """Wrong usage, an invalid file, or a fault that a check found."""
    UNDECIDED = 3
    INAPPLICABLE = 4
    """What was asked cannot be tried on this machine."""
    FAILED = 5
    """A run failed, a replay differs, or playbook itself is at fault."""


class PlaybookError(Exception):
    """The root of every error that a user can cause."""


@contextmanager
def tables_wanted() -> Iterator[None]:
    """Around imports of pandas and pyarrow, which few commands need and which are three fifths of what they would install with Playbook.

    Raises:
        PlaybookError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        raise PlaybookError(f"the package '{e.name}' is not installed; run pip install '.[tables]' in a clone of Playbook") from e


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in one place of a file."""

    file: str
    line: int
    column: int
    message: str
    rule: str = ""
    """The lint rule behind it; empty where the file itself does not read."""
    warning: bool = False
    """Worth knowing, and not wrong: time has passed."""

    def __str__(self) -> str:
        word = "warning: " if self.warning else ""
        return f"{self.file}:{self.line}:{self.column}: {word}{self.message}" + (f" [{self.rule}]" if self.rule else "")


class FileError(PlaybookError):
    """A file is invalid; `findings` holds each problem with its place."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(str(f) for f in findings))
        self.findings = tuple(findings)


class ConfigError(PlaybookError):
    """The trainer's configuration or layout cannot run as written."""


class DataError(PlaybookError):
    """Training data is missing or unreadable."""


class UnmetRequirement(PlaybookError):
    """This machine lacks something that the claim or the run needs."""


class LaunchError(PlaybookError):
    """A run of the trainer could not be started."""


class LogError(PlaybookError):
    """A run's log is damaged, incomplete, or lacks what a verdict needs."""


class StoreError(PlaybookError):
    """An evidence record could not be written, or does not check out."""
