"""The tool `tune_next`: a tuning whose launches an agent makes.

The procedure decides; whoever launches cannot keep what it did not prove.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from playbook.errors import ConfigError
from playbook_bench.tune.procedure import Choice, Decision, Event, Hurry, Observation, Setup, Tuning
from playbook_bench.tune.record import percent

_KNOB = re.compile(r"([\w.$-]{1,64})=([^|]{1,64}(?:\|[^|]{1,64}){1,15})")
_RUN = re.compile(r"(?P<value>[0-9.eE+-]{1,24})(?: loss=(?P<loss>[0-9.eE+-]{1,24}))?(?: tokens=(?P<tokens>[0-9.eE+-]{1,24}))?")
_ENDINGS = ("oom", "crash", "nan", "hang", "killed", "refused")

Knobs = Annotated[
    list[Annotated[str, Field(max_length=1200)]],
    Field(min_length=1, max_length=32, description="name=today|other|..., in the order to try, such as fuse=off|on."),
]
Seen = Annotated[
    list[Annotated[str, Field(max_length=100)]],
    Field(
        max_length=600,
        description="What each launch so far gave, in order: '0.512 loss=2.31 tokens=4096' (seconds of a step), oom, crash, nan, hang,"
        " or 'time up' to try no more.",
    ),
]


class TuneRow(BaseModel):
    """What became of a value. Percentages are of speed."""

    knob: str
    value: str
    reason: str
    low: float | None
    effect: float | None
    high: float | None


class TuneAnswer(BaseModel):
    """What to launch next, or what is proven."""

    launch: dict[str, str] | None
    """Values other than today's, for one launch; null once the tuning has ended."""
    why: str
    kept: list[TuneRow]
    refused: list[TuneRow]
    launches: int
    at_least: int
    """Launches that the proof of what looks better now would take."""


def tune_answer(knobs: Sequence[str], seen: Sequence[str], seed: int, false_keep_percent: float) -> TuneAnswer:
    """The state of a tuning after these launches.

    Raises:
        ConfigError: a knob or a launch is not of the form.
    """
    choices = [_choice(text) for text in knobs]
    if len({choice.name for choice in choices}) < len(choices):
        raise ConfigError("two knobs have one name; expected each once")
    candidates = [(choice.name, value) for choice in choices for value in choice.values[1:]]
    tuning = Tuning(Setup(choices, candidates, seed, false_keep_percent / 100))
    for number, text in enumerate(seen, 1):
        if tuning.due is None:
            raise ConfigError(f"the tuning has ended after {number - 1} launches; expected no more")
        tuning.add(_event(text))
    due, why = tuning.due, ""
    if due is not None:
        why = {
            "warm_up": "discarded",
            "start": "the start, for its noise",
            "best": "the best so far",
            "candidate": "a candidate",
            "proof": "proof",
        }[due.why]
    elif tuning.problem:
        why = f"the start does not run: {tuning.problem}"
    else:
        why = "ended; compare the kept set with the start by playbook ab" if tuning.kept else "ended; nothing is proven to help"
    rows = [[_row(d) for d in tuning.decisions.values() if d.kept is kept] for kept in (True, False)]
    launch = None if due is None else dict(due.settings)
    return TuneAnswer(launch=launch, why=why, kept=rows[0], refused=rows[1], launches=len(tuning.launched), at_least=tuning.to_prove)


def _choice(text: str) -> Choice:
    match = _KNOB.fullmatch(text)
    if match is None or len(set(match[2].split("|"))) < len(match[2].split("|")):
        raise ConfigError(f"knob {text[:60]!r} is not known; expected name=today|other, with different values")
    return Choice(match[1], tuple(match[2].split("|")))


def _event(text: str) -> Event:
    """What an agent says of one launch, as the procedure takes it.

    Raises:
        ConfigError: the text is neither figures nor one of the endings.
    """
    if text == "time up":
        return Hurry()
    for ending in _ENDINGS:
        if text == ending:
            return Observation(ending)  # type: ignore[arg-type]
    match = _RUN.fullmatch(text)
    try:
        numbers = {name: float(word) for name, word in match.groupdict().items() if word} if match else {}
    except ValueError:
        numbers = {}
    if not numbers:
        raise ConfigError(
            f"launch {text[:60]!r} is not known; expected seconds of a step, such as '0.512 loss=2.31', or one of {', '.join(_ENDINGS)}"
        )
    return Observation("ok", numbers["value"], numbers.get("loss"), numbers.get("tokens"))


def _row(decision: Decision) -> TuneRow:
    low, effect, high = (
        (None, None, None) if decision.effect is None else (decision.effect.low, decision.effect.value, decision.effect.high)
    )
    return TuneRow(
        knob=decision.knob, value=decision.value, reason=decision.reason, low=percent(low), effect=percent(effect), high=percent(high)
    )
