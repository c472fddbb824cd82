"""The options of a command that runs series, passed as one object from the command line to the launches."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from playbook.errors import ConfigError
from playbook.paths import default_results
from playbook.records.evidence import Derived, Evidence, Measured
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import Launcher, LocalLauncher
from playbook_bench.launch.slurm import SrunLauncher
from playbook_bench.machine import detect
from playbook_bench.run.journal import Journal, of_command


@dataclass(frozen=True)
class Options:
    """Options of one command.

    Raises:
        ConfigError: a limit leaves room for nothing.
    """

    profile: str | None = None
    """Machine class, such as `h200x4`; None takes the largest that fits."""
    results: Path = field(default_factory=default_results)
    """Folder of evidence, noise estimates, run folders and compile caches."""
    pairs: int | None = None
    """At most this many pairs of launches."""
    budget_s: float | None = None
    """At most this many seconds, counted from when these options were made."""
    seed: int | None = None
    """Seed of the order of launches; None draws one."""
    launcher: Launcher = field(default_factory=lambda: LocalLauncher())
    journal: Journal | None = None
    """What an earlier, stopped command with these options has left."""
    campaign: bool = False
    """Run cases in the order of the targets and start none once the budget holds no usual launch any more, so that the next call continues
    there. Mechanism checks run only if named."""
    trace: bool = False
    """Whether variants are traced once a timed verdict from GPUs is reached."""
    untraced: Mapping[str, Evidence] = field(default_factory=dict)
    """By case, verdicts of earlier commands whose variants are traced first."""
    settles: Callable[[Measured, Derived], bool] = lambda measured, derived: True
    """Decides at a look whether an effect without a claim is known well enough to stop."""
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.pairs is not None and self.pairs < 1:
            raise ConfigError(f"--pairs is {self.pairs}; expected at least 1")
        if self.budget_s is not None and not 0 < self.budget_s < math.inf:
            raise ConfigError(f"--budget is {self.budget_s:g} s; expected more than 0, and an end")
        object.__setattr__(self, "results", Path(self.results).resolve())

    @property
    def deadline(self) -> float | None:
        """When the budget is spent, on the monotonic clock."""
        return None if self.budget_s is None else self.began + self.budget_s

    @property
    def nodes(self) -> int:
        """Nodes that the launcher starts ranks on."""
        return len(self.launcher.allocation.hosts) if isinstance(self.launcher, SrunLauncher) else 1

    @property
    def forks(self) -> bool:
        """Whether ranks are forked from a process that has imported everything."""
        return isinstance(self.launcher, ForkLauncher)

    def journal_of(self, words: Iterable[str], code: Sequence[str] | None) -> Journal | None:
        """The journal that a command of these words keeps by itself for these machines and this `code`; None where nothing tells what code
        it is.
        """
        if code is None:
            return None
        hosts = self.launcher.allocation.hosts if isinstance(self.launcher, SrunLauncher) else detect.place()
        return of_command(self.results, [*words, *code], [*hosts, *["fork"] * self.forks], detect.exported())

    def command(self, words: Sequence[str]) -> str:
        """The command line of a command with these options."""
        budget = None if self.budget_s is None else f"{self.budget_s:g}s"
        return _line(words, {"--profile": self.profile, "--pairs": self.pairs, "--budget": budget}, self.forks)

    def repeated(self, measured: Measured) -> str:
        """The command line that tests this claim alone, without limits; how ranks start matters only where there are runs."""
        claim = measured.claim
        words = ["confirm", f"{claim.card}/{claim.id}" if claim else ""]
        return _line(words, {"--profile": measured.profile}, bool(measured.runs) and self.forks)


def _line(words: Sequence[str], values: Mapping[str, str | int | None], fork: bool) -> str:
    flags = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["playbook", *words, *flags, *["--fork"] * fork])
