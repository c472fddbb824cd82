"""Whom a series, and the command that runs it, tell what happens."""

from __future__ import annotations

from playbook.records.evidence import Machine
from playbook.records.trace import TraceResult
from playbook_bench.run.schedule import RunSpec
from playbook_bench.run.store import Outcome


class Progress:
    """Shows nothing; who shows something overrides what it is about."""

    def machine(self, machine: Machine) -> None:
        """Called once, before anything runs."""

    def series(self, label: str, launches: int) -> None:
        """A series begins; `launches` are expected up to its first look."""

    def launch(self, number: int, total: int, spec: RunSpec) -> None:
        """Launch `number` of `total` begins."""

    def step(self, step: int, steps: int) -> None:
        """The launch has done `step` of its `steps`."""

    def note(self, text: str) -> None:
        """Something that a reader should know now."""

    def finished(self, outcome: Outcome) -> None:
        """A claim has its verdict."""

    def traced(self, trace: TraceResult) -> None:
        """The variants of the claims that were last finished have been traced."""
