"""A plan as something to start with another trainer: environment, files, and the command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launchable:
    """All that starts one plan with one release of a trainer.

    Files are by name and are written beside the script. `command` is the whole launcher's line as words, for one node; it names those files.
    `notes` become comments above it: what is assumed, and how its log is set beside the prediction.
    """

    target: str
    release: str
    environment: Mapping[str, str]
    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """A shell script that writes the files and starts the run."""
        lines = ["#!/usr/bin/env bash", f"# for {self.release}", *(f"# {note}" for note in self.notes)]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        for name, content in self.files.items():
            lines += [f"cat > {shlex.quote(name)} <<'END'", content.rstrip("\n"), "END"]
        return "\n".join([*lines, _wrapped(self.command)]) + "\n"


def _wrapped(words: tuple[str, ...]) -> str:
    """One flag a line, each line but the last continued."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and groups[-1]:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(group) for group in groups)
