"""What is tuned: a command or a case, and the launches of it with other settings."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError
from playbook.records.case import Activation, Case, Receipt
from playbook.records.evidence import Run, digest
from playbook_bench import metrics
from playbook_bench.judge import guards, receipt
from playbook_bench.run.schedule import RunSpec
from playbook_bench.run.series import Series
from playbook_bench.tune import knobs
from playbook_bench.tune.knobs import Knobs
from playbook_bench.tune.procedure import Launch, Observation, Settings
from playbook_bench.variants.command import CommandVariant
from playbook_bench.variants.resolve import resolve

CASE_ID = "tune"
_MESSAGE = 300
"""Characters of a launch's message that an observation has."""


@dataclass(frozen=True)
class Subject:
    """A run that is tuned: a case whose baseline is the start, on one profile, with the knobs that may change it."""

    case: Case
    profile: str
    knobs: Knobs
    copies: Path
    """Folder of changed configuration files."""
    here: Path = field(default_factory=Path.cwd)

    def _copies(self, settings: Settings) -> Path:
        """Where changed files of these settings lie."""
        return self.copies / digest([list(pair) for pair in settings], 16)

    def in_words(self, settings: Settings) -> str:
        """What to paste: the command with these settings, or the keys for our trainer."""
        if not self.case.command:
            changes = knobs.changes_of(self.knobs, settings)
            return " ".join(f"{target.removeprefix('$')}={knobs.text_of(value)}" for target, value in changes.items())
        run = resolve(self.with_settings(settings), "candidate", self.profile, self.here)
        assert isinstance(run, CommandVariant)
        return shlex.join([*(["env", *(f"{k}={v}" for k, v in run.environment.items())] if run.environment else []), *run.words])

    def with_settings(self, settings: Settings, before: Settings = ()) -> Case:
        """The case whose baseline is the start with the settings `before`, and whose candidate is the start with these.

        Raises:
            ConfigError: a knob does not fit the case.
        """
        case, sides, environment = self.case, dict[str, dict[str, Any]](), dict[str, Any]()
        start, command = dict(case.baseline), list[str]()
        both = {"baseline": before, "candidate": settings}
        variables = {side: knobs.environment_of(self.knobs, of) for side, of in both.items()}
        if not case.command:
            changes = {side: knobs.changes_of(self.knobs, of) for side, of in both.items()}
            if options := [target for of in changes.values() for target in of if target.startswith("-")]:
                raise ConfigError(f"{options[0]} is an option, and case '{case.id}' runs our trainer; name its configuration's key")
            sides = {side: {**start, **{k: v for k, v in of.items() if not k.startswith("$")}} for side, of in changes.items()}
            already = case.delta.environment.get("baseline", {})
            if already or any(variables.values()):
                environment = {side: {**already, **of} for side, of in variables.items()}
        else:
            words = [*case.command, *start.pop("arguments", [])]
            changed = {side: knobs.words_of(words, self.knobs, of, self._copies(of)) for side, of in both.items()}
            command = [x for x, y in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*changed.values(), strict=False))]
            sides = {
                side: {
                    **start,
                    **({"arguments": each[len(command) :]} if each[len(command) :] else {}),
                    **({"environment": {**start.get("environment", {}), **variables[side]}} if variables[side] else {}),
                }
                for side, each in changed.items()
            }
        delta = case.delta.model_copy(update={"environment": environment, "reason": case.delta.reason or "the settings that were tuned"})
        rules = [rule for name, _ in settings for rule in self.knobs.knobs[name].require]
        activation = Activation(candidate=Receipt(require=rules), every=case.activation.every)
        return Case.model_validate(
            {
                **case.model_dump(),
                **sides,
                "id": CASE_ID,
                "command": command,
                "delta": delta.model_dump(),
                "activation": activation.model_dump(),
                "trace": None,
            }
        )


@dataclass
class Launcher:
    """Launches settings within one series, and says what each launch gave."""

    subject: Subject
    series: Series
    metric: str
    names: dict[Settings, str] = field(default_factory=dict)

    def launch(self, due: Launch, words: str) -> tuple[Observation, Run]:
        """Launch once; `words` say to whoever watches what of.

        Raises:
            ConfigError: the settings cannot be resolved.
            LaunchError: the launch cannot be started.
        """
        case = self.subject.with_settings(due.settings)
        name = self.names.setdefault(due.settings, f"set{len(self.names)}" if due.settings else "start")
        variant = "candidate" if due.settings else "baseline"
        if name not in self.series.variants:
            runnable = resolve(case, variant, self.subject.profile, self.subject.here)
            self.series.variants = {**self.series.variants, name: runnable}
        run = self.series.run(RunSpec(name, "burn_in" if due.why == "warm_up" else "measure"), words)
        return self.observation(case, run, variant), run

    def observation(self, case: Case, run: Run, variant: str) -> Observation:
        """What a run says, for the tuning."""
        if run.outcome != "ok":
            line = next((line.strip() for line in run.message.splitlines() if line.strip()), "")
            return Observation(run.outcome, problem=line[:_MESSAGE])
        value = metrics.get(self.metric).value(run)
        problem = self._problem(case, run, variant)[:_MESSAGE]
        return Observation("ok", value, guards.mean_loss(run), guards.tokens_per_step(run) or None, problem)

    def _problem(self, case: Case, run: Run, variant: str) -> str:
        """Why a run cannot be compared with the start, by the same guards that a pair has."""
        metric = metrics.get(self.metric)
        if problem := guards.complete(run, metric):
            return problem
        renamed = run.model_copy(update={"variant": variant})
        if variant == "candidate" and (unmet := [c for c in receipt.judge_run(case.activation, renamed) if not c.ok]):
            return receipt.in_words(unmet[0], "it did not run as meant: ")
        start = next((r for r in self.series.launched if r.variant == "start" and r.outcome == "ok"), None)
        if start is None or start is run:
            return ""
        pair = [(start, run)]
        failed = [
            g
            for g in (guards.data(case, pair), guards.parameters(case, pair), guards.work(case, metric, pair), guards.loss(case, pair))
            if not g.ok
        ]
        return f"not the same training: {failed[0].detail}" if failed else ""


def goal(name: str) -> tuple[str, bool]:
    """The metric of a goal, and whether more of it is better.

    Raises:
        ConfigError: it is none.
    """
    if name not in _GOALS:
        raise ConfigError(f"--goal is '{name[:40]}'; expected one of {', '.join(_GOALS)}")
    metric = metrics.get(_GOALS[name])
    return metric.name, metric.better == "higher"


_GOALS: Mapping[str, str] = {
    "step_time": "step_seconds",
    "tokens_per_s": "useful_tokens_per_s_per_gpu",
    "peak_memory": "peak_memory_bytes",
}
"""What can be tuned for, with its metric."""
