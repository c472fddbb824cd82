"""Two commands against each other without a file: the case that they make, and the answer of its series.

The series is that of any case: discarded launches, then pairs in an order drawn from the seed, with a look after 4, 6, 8, 10 and 12. It
ends at the first look at which the interval gives an answer, and its record is kept like any other.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from playbook.cards.model import SHORT_METRICS
from playbook.errors import ConfigError, ExitCode, LaunchError
from playbook.records.case import Budget, Case, Delta, Guardrails, Loss
from playbook.records.commands import Steps, Traced, fill, of_variables, of_words
from playbook.records.evidence import Derived, Measured, Variant
from playbook.yaml_files import did_you_mean
from playbook_bench import metrics
from playbook_bench.judge.effects import percent
from playbook_bench.launch.local import LocalLauncher, interruptible
from playbook_bench.machine import detect
from playbook_bench.run import confirm, schedule
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.run.store import Outcome
from playbook_bench.trace.reports import timeline_from_file
from playbook_bench.trace.walls import Tail, Walls, walls
from playbook_bench.variants.command import CommandVariant
from playbook_bench.variants.resolve import resolve_all

Verdict = Literal["faster", "slower", "equivalent", "undecided", "error"]
EXIT_CODES: Mapping[Verdict, int] = {
    "faster": ExitCode.DONE,
    "equivalent": ExitCode.DONE,
    "slower": ExitCode.REFUTED,
    "undecided": ExitCode.UNDECIDED,
    "error": ExitCode.FAILED,
}
ID = "ab"
_ADVISED_OPTIONS = {
    "compare useful tokens per second instead": "--metric tokens_per_s --work any",
    "declare delta.work with a reason": "--work any",
    "mean losses differ": "--loss any",
}
"""For what a guard advises to who writes a case, the options of the command line."""
ALL_DAY_MINUTES = 1440.0
NSYS = "nsys"
_PROFILED = (NSYS, "profile", "-s", "none", "--cpuctxsw=none", "-t", "cuda,nvtx", "-o", "{run}/trace")
_REPORT = "{run}/trace.nsys-rep"


@dataclass(frozen=True)
class CommandPair:
    """What is asked: two commands, and how their logs are read and compared."""

    baseline: Sequence[str]
    candidate: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the candidate."""
    metric: str = "step_time"
    margin: float = 0.02
    """Effects up to it count for nothing, as a share."""
    steps: Steps = field(default_factory=Steps)
    loss: float | None = 0.01
    """How far mean losses may differ, as a share; None: by anything."""
    tokens: tuple[int, int] | None = None
    """Of a step of the whole job, of both commands; None where their logs are to tell them."""
    any_work: bool = False
    """Whether steps may have different numbers of tokens."""
    timeout_s: float = 3600.0


@dataclass(frozen=True)
class AbAnswer:
    """What follows. Shares are positive where the candidate is better."""

    verdict: Verdict
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    noise: float | None = None
    """Deviation of a pair of launches of the baseline, as a share."""


def question(words: Sequence[str], settings: Sequence[str], variables: Sequence[str], **more: Any) -> CommandPair:
    """A question from the words of a command line: CMD_A, with `--vs` and CMD_B, or with settings or variables of the candidate.

    Raises:
        ConfigError: there is no second command, a setting or variable is not NAME=VALUE, or a limit leaves room for nothing.
    """
    split = words.index("--vs") if "--vs" in words else len(words)
    first, second = list(words[:split]), list(words[split + 1 :])
    if not first or (split < len(words) and not second):
        raise ConfigError("a command is missing; write: playbook ab -- CMD_A --vs CMD_B")
    if split == len(words) and not (settings or variables):
        raise ConfigError("there is only one command; write CMD_A --vs CMD_B, or say what the other one changes by --set or --env")
    candidate = second or first
    for setting in settings:
        candidate = _with_setting(candidate, *_key_value(setting, "--set"))
    environment = dict(_key_value(text, "--env") for text in variables)
    of_env = of_variables(environment)
    if secret := f"--env {of_env}" if of_env else of_words(first) or of_words(candidate):
        raise ConfigError(f"{secret} looks like a secret and would be kept in the record; export it for both commands instead")
    pair = CommandPair(first, candidate, environment, **more)
    if pair.loss == 0:
        raise ConfigError("--loss is 0 %, which no two launches keep; expected more, or any")
    if pair.timeout_s <= 0:
        raise ConfigError("--timeout is 0; expected the seconds that a launch may take")
    return pair


def case_of(commands: CommandPair, profile: str) -> Case:
    """The case of a question: words that both commands begin with are its command, the others are arguments.

    Raises:
        ConfigError: the metric is not known.
    """
    if commands.metric not in (*SHORT_METRICS, *metrics.METRICS):
        raise ConfigError(
            f"metric '{commands.metric}' is not known{did_you_mean(commands.metric, SHORT_METRICS)}, or a metric of the playbook"
        )
    metric = SHORT_METRICS.get(commands.metric, commands.metric)
    a, b = list(commands.baseline), list(commands.candidate)
    common = [x for x, y in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]
    variants: list[dict[str, Any]] = [{"arguments": words[max(1, len(common)) :]} for words in (a, b)]
    if not common:
        variants = [{"program": words[0], **delta} for words, delta in zip((a, b), variants, strict=True)]
    if commands.environment:
        variants[1]["environment"] = dict(commands.environment)
    elif a == b:
        variants = [{"side": side, **delta} for side, delta in zip("AB", variants, strict=True)]  # one command against itself
    if commands.tokens:
        variants = [{**delta, "step_tokens": n} for delta, n in zip(variants, commands.tokens, strict=True)]
    return Case(
        id=ID,
        summary="Two commands, compared by playbook ab.",
        command=common or ["{program}"],
        baseline=variants[0],
        candidate=variants[1],
        steps=commands.steps,
        metric=metric,
        profiles={profile: {}},
        delta=Delta(work=True, reason="any work was allowed by --work any") if commands.any_work else Delta(),
        guardrails=Guardrails(loss=Loss(relative=commands.loss, reason=None if commands.loss else "any loss was allowed by --loss any")),
        budget=Budget(minutes=ALL_DAY_MINUTES, launch_timeout_s=commands.timeout_s),
    )


def compare(pair: CommandPair, options: Options, progress: Progress, command: str) -> tuple[Outcome, AbAnswer]:
    """Launch both commands in turn and read their logs, up to the look that gives an answer. `command` is the command line that repeats it.

    Raises:
        LaunchError: a command cannot be started.
        PlaybookError, Interrupted: as `confirm.bench_run`.
    """
    notes: list[str] = []

    def settles(measured: Measured, derived: Derived) -> bool:
        """Whether a look answers; after the first that does not, a note says what effect the launches can show at all."""
        if answer(derived, pair.margin).verdict != "undecided":
            return True
        if not notes and derived.comparison is not None and derived.comparison.look is not None:
            notes.append(schedule.least_shown(measured, derived.comparison))
            progress.note(notes[0])
        return False

    options = replace(options, settles=settles)
    (outcome,) = confirm.bench_run(case_of(pair, options.profile or detect.CPU), options, progress, command)
    return outcome, answer(outcome.evidence.derived, pair.margin)


def answer(derived: Derived, margin: float) -> AbAnswer:
    """The answer at a look; undecided between looks, where the intervals say neither, and where launches cannot be compared."""
    comparison = derived.comparison
    if comparison is None or derived.verdict.status != "measured":
        return AbAnswer("error" if derived.verdict.status == "error" else "undecided")
    exact = comparison.design == "deterministic"
    low, high = (comparison.effect, comparison.effect) if exact else (comparison.low, comparison.high)
    settled = exact or comparison.look is not None
    verdict = _verdict(low, high, margin) if settled and low is not None and high is not None else "undecided"
    return AbAnswer(
        verdict, comparison.effect, low, high, comparison.pairs, comparison.floor if comparison.floor is not None else comparison.deviation
    )


def _verdict(low: float, high: float, margin: float) -> Verdict:
    """An effect and its inverse get mirrored answers: the band is the same on logarithms, from 1 / (1 + margin) to 1 + margin."""
    if 1 / (1 + margin) <= 1 + low and high <= margin:
        return "equivalent"
    return "faster" if low > 0 else "slower" if high < 0 else "undecided"


def hint(outcome: Outcome, result: AbAnswer) -> str:
    """What helps where nothing was decided: the option that lets launches be compared which do different work, or what effect they can
    show; else empty.
    """
    derived, measured = outcome.evidence.derived, outcome.evidence.measured
    details = [gate.detail for gate in derived.gates if not gate.ok]
    option = next((option for words, option in _ADVISED_OPTIONS.items() if any(words in each for each in details)), "")
    if option:
        return f"where that is meant: {option}"
    comparison = derived.comparison
    if result.verdict != "undecided" or comparison is None or derived.verdict.status != "measured":
        return ""
    return "; ".join(filter(None, (schedule.order_matters(comparison), schedule.least_shown(measured, comparison))))


def as_json(pair: CommandPair, result: AbAnswer, record: str, sentence: str) -> dict[str, Any]:
    """The answer as plain data. The sentence has the reason of an error, and what the verdict does not vouch for."""
    return {
        "schema": "ab/1",
        "verdict": result.verdict,
        "sentence": sentence,
        "metric": pair.metric,
        "effect_percent": {"value": percent(result.effect), "low": percent(result.low), "high": percent(result.high)},
        "margin_percent": percent(pair.margin),
        "pairs": result.pairs,
        "aa_percent": percent(result.noise),
        "record": record,
    }


def walls_of(case: Case, profile: str, tracer: Traced) -> dict[Variant, Walls]:
    """The walls that both commands run into, by one more launch of each, with a trace. Launches that are timed are never traced. Where the
    file of `tracer` is `nsys`, that profiles them; else they write the file themselves when its arguments are added.

    Raises:
        ConfigError: nsys is to profile and is not on PATH.
        LaunchError: a launch failed.
        PlaybookError: it left no trace, or one that cannot be read.
    """
    by_nsys = tracer.file == NSYS
    if by_nsys and not shutil.which(NSYS):
        raise ConfigError(
            "--trace nsys: nsys is not on PATH; install it, or let the command write a trace of torch.profiler: --trace "
            "'{run}/trace.json' --trace-with --profile"
        )
    traced = case if by_nsys else case.model_copy(update={"trace": tracer})
    by_variant: dict[Variant, Walls] = {}
    with interruptible(), TemporaryDirectory(prefix="playbook-trace-") as name:
        for variant, run in resolve_all(traced, profile).items():
            assert isinstance(run, CommandVariant)
            folder = Path(name) / variant
            folder.mkdir()
            if by_nsys:
                run = replace(run, words=(*_PROFILED, *run.words))
            ended = run.ready(Path(name) / "cache", proves=True).launch(LocalLauncher(), folder, {}, case.budget.launch_timeout_s)
            if ended.outcome != "ok":
                raise LaunchError(f"the traced launch of the {variant} failed: {ended.message}")
            report = run.started_in / fill(_REPORT if by_nsys else tracer.file, {"run": str(folder)})
            by_variant[variant] = walls(timeline_from_file(report), _timed(folder))
    return by_variant


def _timed(folder: Path) -> Tail:
    """The timed steps at the end of a run, from its own figures."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    strict = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["env"]["strict"]
    timed = [row["seconds"] for row in rows if row["timed"]]
    return Tail(strict["log_every"] * len(timed), strict["log_every"] * sum(timed))


def _key_value(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"{option} is '{text}'; expected {'NAME=VALUE' if option == '--env' else 'key=value'}")
    return name, value


def _with_setting(words: Sequence[str], key: str, value: str) -> list[str]:
    """The command with another value of `key`: in the last `key=` or `--key=`, or the word after `--key`; added where it has none."""
    flags = {key} if key.startswith("-") else {f"--{key}", f"--{key.replace('_', '-')}"}
    out = list(words)
    for i in range(len(out) - 1, 0, -1):
        name, equals, _ = out[i].partition("=")
        if name in {key, *flags} and equals:
            out[i] = f"{name}={value}"
            return out
        if out[i] in flags and i + 1 < len(out):
            out[i + 1] = value
            return out
    long = any(word.startswith("--") for word in words[1:]) or key.startswith("-")
    return [*out, f"--{key.lstrip('-')}={value}" if long else f"{key}={value}"]
