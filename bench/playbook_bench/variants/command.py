"""One variant of a case that launches a command: its words, its variables, its files, and what of them goes into the record."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playbook.errors import ConfigError, LaunchError
from playbook.records.case import Case
from playbook.records.commands import DELTAS, Steps, Traced, fill
from playbook.records.evidence import Machine, Missing, Variant, digest
from playbook_bench.launch.outcome import Result
from playbook_bench.logs import reading
from playbook_bench.machine import requirements
from playbook_bench.variants import checkout

if TYPE_CHECKING:
    from playbook_bench.launch.local import Launcher


@dataclass(frozen=True)
class CommandVariant:
    """One variant, ready to launch: what `playbook_bench.variants.resolve.Resolved` is for a configuration of our trainer."""

    variant: Variant
    words: tuple[str, ...]
    """Filled but for the launch's own folder."""
    ranks: int
    environment: dict[str, str]
    declared: Mapping[str, Any]
    """What the case says of it, as plain data."""
    step_settings: Steps
    patterns: tuple[str, ...] = ()
    """What to count in the lines that it prints."""
    traced: Traced | None = None
    files: checkout.TreeFiles | None = None
    """The files that it runs in; those of `here`, where None."""
    started_in: Path = Path()
    tokens: int | None = None
    """Of a step of the whole job; None where its log is to tell them."""
    longer: bool = False
    proves: bool = False
    cache: Path = Path()
    """Where files of commits are kept."""

    @classmethod
    def of(
        cls, case: Case, variant: Variant, values: Mapping[str, Any], ranks: int, started_in: Path, tree: str | None = None
    ) -> CommandVariant:
        """The variant with `values` of profile and deltas, started in `started_in`, or there in the files of its revision, or of `tree`.

        Raises:
            ConfigError: its revision is no commit of the repository here, or the gate has chosen another one.
            LogError: no adapter has the name that its steps give.
        """
        if case.steps and case.steps.log:
            reading.named(case.steps.log)
        overlay, revision = dict(values.get("files", {})), values.get("revision")
        if tree and revision:
            raise ConfigError(f"case '{case.id}': '{variant}' names a revision; the gate chooses commits by itself, leave it out there")
        files = checkout.files(started_in, tree, revision, case.prepare, overlay) if tree or revision or overlay else None
        root = files.repository if files else started_in
        plain = {k: v for k, v in values.items() if k not in DELTAS}
        placeholders = {**plain, "root": str(root), "python": sys.executable}
        words = tuple(fill(text, placeholders) for text in (*case.command, *values.get("arguments", [])))
        environment = {**values.get("environment", {}), **case.delta.environment.get(variant, {})}
        step_settings = case.steps or Steps()
        rules = [rule for name in case.variants for receipt in [case.activation.of(name)] for rule in (*receipt.require, *receipt.forbid)]
        declared = {"command": case.command, "steps": step_settings.model_dump(mode="json"), **values}
        return cls(
            variant,
            words,
            ranks,
            {k: fill(v, placeholders) for k, v in environment.items()},
            declared,
            step_settings.model_copy(update={"file": fill(step_settings.file, placeholders)}) if step_settings.file else step_settings,
            tuple(dict.fromkeys(r.log for r in rules if r.log is not None)),
            case.trace,
            files,
            started_in,
            values.get("step_tokens"),
        )

    @property
    def dump(self) -> Mapping[str, Any]:
        """What the case says of it, and whether its warm-up was made longer."""
        return {**self.declared, **({"longer_warm_up": True} if self.longer else {})}

    @property
    def sha(self) -> str:
        """The hash of that. The files are told by the launches' environment."""
        return digest(self.dump, 16)

    @property
    def steps(self) -> int:
        """0: while it runs, only the lines that it prints are counted."""
        return 0

    def timed_steps(self, first: int) -> int:
        """As many as the first launch had; after a longer warm-up half of them. Only a log tells, since a line of it may be of several
        steps.
        """
        return first - first // 2 if self.longer else first

    @property
    def host_works(self) -> bool:
        """Never asked: the harness leaves a command's threads to itself."""
        return False

    def settings(self, threads: int, cache: Path) -> dict[str, str]:
        """None: what it runs in is the user's own environment."""
        return {}

    def facts(self, machine: Machine) -> dict[str, Any]:
        """The machine and the number of ranks."""
        return requirements.facts(machine) | {"ranks": self.ranks, "backend": "command"}

    def missing(self) -> list[Missing]:
        """Nothing that can be known before it runs."""
        return []

    def extended(self) -> CommandVariant:
        """The same number of steps, of which half of the timed ones become warm-up."""
        return replace(self, longer=True)

    def ready(self, cache: Path, proves: bool) -> CommandVariant:
        """What one launch runs: with the arguments that leave a trace, where it `proves`."""
        return replace(self, cache=cache, proves=proves and self.traced is not None)

    def launch(
        self,
        launcher: Launcher,
        folder: Path,
        environment: Mapping[str, str],
        timeout_s: float,
        on_step: Callable[[int], None] | None = None,
    ) -> Result:
        """Run it once, in its files, as a process of this machine.

        Raises:
            ConfigError: another launcher than the local one was asked for.
            LaunchError: it cannot be started.
        """
        # Commands that only read records start nothing.
        from playbook_bench.launch.local import LocalLauncher
        from playbook_bench.variants.program import Program, keep_trace, start

        if type(launcher) is not LocalLauncher:
            raise ConfigError("a command is started as it stands; leave out --fork and --launcher, and start ranks in the command itself")
        cwd, paths = self.started_in, dict[str, str]()
        source = checkout.source_of(self.started_in) if self.files is None else self.files.tree
        if self.files is not None:
            try:
                cwd, paths = self.files.place(self.cache)
            except LaunchError as e:
                return Result("crash", None, f"its files cannot be made ready: {e}", time.time(), 0.0)
        placeholders = {"run": str(folder)}
        traced = self.traced if self.proves else None
        program = Program(
            words=[fill(word, placeholders) for word in (*self.words, *(traced.arguments if traced else []))],
            cwd=cwd,
            environment={**environment, **paths, **{k: fill(v, placeholders) for k, v in self.environment.items()}},
            source=source,
            ranks=self.ranks,
            timeout_s=timeout_s,
            step_settings=self.step_settings.model_copy(update={"file": fill(self.step_settings.file, placeholders)})
            if self.step_settings.file
            else self.step_settings,
            tokens=self.tokens,
            longer=self.longer,
            patterns=self.patterns,
            trace=cwd / fill(traced.file, placeholders) if traced else None,
        )
        result = start(program, folder, on_step)
        if program.trace and result.outcome == "ok":
            keep_trace(program.trace, self.cache.parent / "traces", folder.name)
        return result
