"""The tuning itself: what to launch next, from what was launched so far. It launches nothing and reads no clock.

`Tuning` is a function of its setup and of the observations added to it, in order. The harness, its journal, the MCP server and the
simulation all use this one: a journal holds the observations, and adding them to a new `Tuning` gives the same state again.

Two parts. The *race* is cheap and proves nothing: each candidate is launched on top of the best settings so far, between two launches of
these. What does not look better is dropped, mostly after one launch; what clearly does is adopted, and the next candidates are launched on
top of it. What cost much, and what was adopted early, is asked once more beside all that came later: a change may pay only beside another,
or only without it. Then *rounds*: the set of what was adopted, and the set
without each change, on new launches in a drawn order. `proof` says which changes are proven. Where one is not, the worst leaves the set,
and the next round asks the others again. A set whose changes are all proven in it is the answer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from playbook.records.evidence import RunOutcome
from playbook_bench.tune import proof

Settings = tuple[tuple[str, str], ...]
"""Values other than today's by the name of their knob, sorted."""
Why = Literal["warm_up", "start", "best", "candidate", "proof"]

GROUP = 4
"""Candidates between two launches of the best settings."""
_BASES = 3
"""Launches of the start before the first candidate, without the discarded one: they tell the noise."""
_DROPPED = (1.0, 1.5, 2.0, 2.5)
"""After so many launches as the place: standard errors that a candidate has to look better by to stay."""
_ADOPTED = 3.0
"""Standard errors by which a candidate has to look better to be adopted, each of its launches by one."""
_AT_ONCE = 6.0
"""The same after one launch, which may be an outlier."""
_SPREAD = 1.5
"""Variance of a candidate's launch against those around it, in variances of a launch."""
_LEAST_NOISE = 1e-4
"""Launches that repeat to the last digit still differ by so much."""
_PROVABLE = 1.5
"""Standard deviations of a launch: smaller gains would not be proven by the launches of a round."""
_EQUAL_WORK = 1e-3
"""Share by which tokens of a step may differ."""
_ONE_BY_ONE = 2
"""Rounds after which only the worst change leaves: of two that do one thing, the other then shows. Later, all that are not proven leave."""
_AROUND = 2
"""Launches after a candidate before a round begins: of the best before it, and of what was adopted together."""
_CLEAR_GAIN = 0.05
"""Logarithm of the gain that a candidate may turn out to have."""
_LEFT = 0.25
"""Part of its gain that a change has to show beside what was adopted after it, where that is within the noise."""
_TRIES = 2
"""Launches of settings that have run before, of which one has to end well."""


@dataclass(frozen=True)
class Choice:
    """A knob as the tuning sees it: its values, today's first."""

    name: str
    values: Sequence[str]
    excludes: frozenset[str] = frozenset()
    """Knobs that stay at today's value where this one does not."""


@dataclass(frozen=True)
class Setup:
    """What a tuning begins with; it may not change while it goes on."""

    choices: Sequence[Choice]
    candidates: Sequence[tuple[str, str]]
    """Knob and value, in the order in which they are tried."""
    seed: int
    alpha: float = 0.05
    """The chance that what is kept holds a change that does not help."""
    loss: float | None = 0.01
    """Share by which the mean loss may differ from the start's; None: by anything."""
    higher_is_better: bool = False
    any_work: bool = False
    """Whether steps may have different numbers of tokens."""


@dataclass(frozen=True)
class Launch:
    """What to launch next."""

    settings: Settings
    why: Why
    candidate: tuple[str, str] | None = None


@dataclass(frozen=True)
class Observation:
    """What a launch gave."""

    outcome: RunOutcome
    value: float | None = None
    """Of the goal's metric, positive."""
    loss: float | None = None
    """The mean of the timed steps."""
    tokens: float | None = None
    """Of a step."""
    problem: str = ""
    """Why it cannot be compared with the start, in words; for what the caller alone can see, such as a log without proof."""


@dataclass(frozen=True)
class Hurry:
    """In place of an observation: no further candidate is tried, and what was adopted is proven now."""


Event = Observation | Hurry


@dataclass(frozen=True)
class Decision:
    """What became of a candidate."""

    knob: str
    value: str
    kept: bool
    reason: str
    effect: proof.Effect | None = None
    """Of a kept one: with the chance of its round on either side. Of one that was asked in a round and not kept: the same."""
    looked: float | None = None
    """What it looked like in the race, as a share; chosen among many, so it says little."""


@dataclass(eq=False)
class Racer:
    """A candidate in the race."""

    knob: str
    value: str
    gains: list[float] = field(default_factory=list)
    """Logarithms of how much better its launches were than those of the best settings around them."""
    asked_again: bool = False
    """Whether it had lost before others were adopted."""

    @property
    def gain(self) -> float:
        """The mean."""
        return statistics.fmean(self.gains)


def changed(settings: Settings, choice: Choice, value: str) -> Settings:
    """Settings with another value of a knob; what it excludes goes back to today's."""
    out = {k: v for k, v in settings if k != choice.name}
    if value != choice.values[0]:
        out = {k: v for k, v in out.items() if k not in choice.excludes} | {choice.name: value}
    return tuple(sorted(out.items()))


class Tuning:
    """A tuning while it goes on: `due` is the next launch, `add` takes what it gave."""

    def __init__(self, setup: Setup) -> None:
        """Nothing is launched yet; `setup` is what the journal repeats."""
        self.setup = setup
        self.choices: Mapping[str, Choice] = {choice.name: choice for choice in setup.choices}
        self.best: Settings = ()
        """The start with what was adopted; at the end, the answer."""
        self.decisions: dict[tuple[str, str], Decision] = {}
        self.launched: list[tuple[Launch, Observation]] = []
        self.round = 0
        self.hurried = False
        self.problem = ""
        """Why it ended without an answer: the start does not run."""
        self._racers = [Racer(knob, value) for knob, value in setup.candidates]
        self.waiting = deque(self._racers)
        self._dropped: dict[Racer, Settings] = {}
        """Candidates that clearly lost or were out of memory, and beside what."""
        self.adopted: dict[str, Racer] = {}
        """By knob, in the order in which they were adopted."""
        self._group_gains: list[float] = []
        """Of the candidates of this group that were launched, against the launch before it."""
        self._latest: set[str] = set()
        """Knobs that were adopted last, at once."""
        self._round_began = 0
        """How many launches there were before it."""
        self._steps = self._all()
        self.due: Launch | None = next(self._steps, None)

    def add(self, event: Event) -> None:
        """Take what the due launch gave, or that there is no more time for candidates.

        Raises:
            ValueError: nothing is due.
        """
        if self.due is None:
            raise ValueError("the tuning has ended; nothing is due")
        if isinstance(event, Hurry):
            self.hurried = True
            if self.due.why != "candidate":
                return  # what is being launched is of use in any case
        else:
            self.launched.append((self.due, event))
        try:
            self.due = self._steps.send(event)
        except StopIteration:
            self.due = None

    @property
    def to_end(self) -> int:
        """Launches up to the end of the next round, if no candidate follows one that is due, and it and those of its group that look
        better are adopted.
        """
        gains = [self.adopted[knob].gain for knob, _ in self.best]
        around = int(self.due is not None and self.due.why == "candidate")
        if self.due is not None and self.due.candidate:
            maybe = [gain for gain in self._group_gains if gain > 0]
            gains, around = [*gains, *maybe, max([*maybe, _CLEAR_GAIN])], 1 + _AROUND
        made = len(self.launched) - self._round_began if self.due is not None and self.due.why == "proof" else 0
        return max(1, around + sum(self._sizes(gains)) - made) if gains else 0

    def _sizes(self, gains: Sequence[float]) -> tuple[int, ...]:
        return proof.sizes(proof.levels(self.setup.alpha, self.round), gains, self.noise)

    @property
    def kept(self) -> list[Decision]:
        """What is proven."""
        return [d for d in self.decisions.values() if d.kept]

    def _all(self) -> Generator[Launch, Event, None]:
        yield from self._race()
        if not self.problem:
            yield from self._screen()
            yield from self._rounds()

    # --- the race --------------------------------------------------------------------------------------------------------------------

    def _race(self) -> Generator[Launch, Event, None]:
        """Launch the start, then each candidate between two launches of the best settings, and adopt the best until none is left."""
        for count in range(1 + _BASES):
            if (yield from self._running((), "warm_up" if count == 0 else "start")) is None:
                return
        while self.waiting and not self.hurried:
            before = yield from self._base()
            if before is None:
                continue
            group = [self.waiting.popleft() for _ in range(min(GROUP, len(self.waiting)))]
            values = yield from self._group(group, before)
            after = before if self.hurried else (yield from self._running(self.best, "best"))
            if after is None:
                continue
            for place, (racer, value) in enumerate(values, 1):
                share = place / (len(values) + 1)
                racer.gains.append((1 - share) * before + share * after - value)
            if picked := self._weigh([racer for racer, _ in values]):
                self._latest = {racer.knob for racer in picked}
                yield from self._together(picked, after)
            if not self.waiting:
                self._ask_again()
        for racer in self.waiting:
            if (racer.knob, racer.value) not in self.decisions:
                self._refuse(racer, "not tried to the end: the time was up")
        self.waiting.clear()

    def _ask_again(self) -> None:
        """Let those that were dropped run beside what was adopted since, which may have freed memory, or be what they need. One that lost
        runs once more, one that was out of memory as often as the best settings change. What neither gained nor lost does not: it seems to
        do nothing here, and asking all of these took a quarter more launches.
        """
        old = [racer for racer, best in self._dropped.items() if best != self.best]
        again = [racer for racer in old if not racer.gains or self._displaces_nothing(racer)]
        for racer in again:
            if racer.gains:
                racer.asked_again = True
                racer.gains.clear()
                del self._dropped[racer]
            else:
                self._dropped[racer] = self.best
        self.waiting.extend(again)

    def _base(self) -> Generator[Launch, Event, float | None]:
        """The cost of the best settings right before a group: that of the last launch, or of a new one."""
        launch, observation = self.launched[-1]
        if launch.settings == self.best and observation.outcome == "ok":
            return self._cost(observation)
        return (yield from self._running(self.best, "best"))

    def _group(self, group: Sequence[Racer], before: float) -> Generator[Launch, Event, list[tuple[Racer, float]]]:
        """Launch each once. Those that do not run, or are not the same training, are refused here."""
        values: list[tuple[Racer, float]] = []
        for racer in group:
            self._group_gains = [before - value for _, value in values]
            settings = changed(self.best, self.choices[racer.knob], racer.value)
            event = Hurry() if self.hurried else (yield Launch(settings, "candidate", (racer.knob, racer.value)))
            if isinstance(event, Hurry):
                self.waiting.append(racer)
                continue
            if problem := self._problem_of(event):
                self._refuse(racer, problem)
                if event.outcome == "oom":
                    self._dropped.setdefault(racer, self.best)
            else:
                self._dropped.pop(racer, None)
                values.append((racer, self._cost(event)))
        return values

    def _weigh(self, group: Sequence[Racer]) -> list[Racer]:
        """Drop those that do not look better, adopt those that clearly do, the best of them first, and let the others run again."""
        error = self.noise * math.sqrt(_SPREAD)
        staying = []
        for racer in group:
            z = racer.gain * math.sqrt(len(racer.gains)) / error
            if z > _DROPPED[len(racer.gains) - 1]:
                staying.append((z, racer))
            else:
                self._refuse(racer, "did not look better" if racer.gain <= 0 else "looked better by no more than launches vary")
                if z < -_ADOPTED and not racer.asked_again:
                    self._dropped[racer] = self.best
        clear = [
            racer
            for z, racer in staying
            if z > (_AT_ONCE if len(racer.gains) == 1 else _ADOPTED) and min(racer.gains) > error and racer.gain > _PROVABLE * self.noise
        ]
        picked: list[Racer] = []
        while best := self._simplest(clear, error):
            self._adopt(best)
            picked.append(best)
            clear = [racer for racer in clear if racer.knob != best.knob and self._displaces_nothing(racer)]
        for racer in (racer for _, racer in staying if racer not in picked):
            if picked:
                racer.gains.clear()  # they were against other settings
            if len(racer.gains) < len(_DROPPED):
                self.waiting.appendleft(racer)
            else:
                self._refuse(racer, "a gain, if there is one, is too small to prove at this noise")
        return picked

    def _displaces_nothing(self, racer: Racer) -> bool:
        return set(self.best) <= set(changed(self.best, self.choices[racer.knob], racer.value))

    def _together(self, picked: Sequence[Racer], alone: float) -> Generator[Launch, Event, None]:
        """Launch what was adopted at once. Where it does not run, or gains less than its changes did one by one, so that one of them may
        be of no use beside another, only the best stays, and the others run again beside it.
        """
        if len(picked) < 2:
            return
        expected, least = math.fsum(racer.gain for racer in picked), min(racer.gain for racer in picked)
        cost, _ = yield from self._tried(self.best, "best")
        error = self.noise * math.sqrt(_SPREAD * len(picked) + 2)
        if cost is not None and expected - (alone - cost) <= max(least / 2, _ADOPTED * error):
            return
        for racer in reversed(picked[1:]):
            self.best = changed(self.best, self.choices[racer.knob], self.choices[racer.knob].values[0])
            del self.adopted[racer.knob]
            racer.gains.clear()
            self.waiting.appendleft(racer)

    def _screen(self) -> Generator[Launch, Event, None]:
        """Launch once more without each change that others were adopted after, and drop what shows no gain beside them: a launch here
        saves a round that fails by it.
        """
        early = [knob for knob in self.adopted if knob not in self._latest]
        best = (yield from self._base()) if early and not self.hurried else None
        if best is None:
            return
        for knob in early:
            racer = self.adopted[knob]
            event = yield Launch(changed(self.best, self.choices[knob], self.choices[knob].values[0]), "candidate")
            if isinstance(event, Hurry):
                return
            if self._problem_of(event):
                continue
            without = self._cost(event)
            if without - best < min(_LEFT * racer.gain, self.noise * math.sqrt(2)):
                self._drop(knob, "did not look better beside what was adopted after it")
                best = without

    def _simplest(self, clear: Sequence[Racer], error: float) -> Racer | None:
        """The best, or the first value of its knob that is not clearly worse."""
        best = max(clear, key=lambda racer: racer.gain, default=None)
        if best is None:
            return None
        values = self.choices[best.knob].values
        alike = [racer for racer in clear if racer.knob == best.knob and racer.gain > best.gain - _ADOPTED * error]
        return min(alike, key=lambda racer: values.index(racer.value))

    def _adopt(self, racer: Racer) -> None:
        before, self.best = self.best, changed(self.best, self.choices[racer.knob], racer.value)
        for knob, value in before:
            if (knob, value) not in self.best:
                self._refuse(self.adopted.pop(knob), f"{racer.knob}={racer.value} is better")
        self.adopted[racer.knob] = racer
        self.decisions.pop((racer.knob, racer.value), None)

    def _drop(self, knob: str, reason: str, effect: proof.Effect | None = None) -> None:
        """Take an adopted change back."""
        self.best = changed(self.best, self.choices[knob], self.choices[knob].values[0])
        self._refuse(self.adopted.pop(knob), reason, effect)

    def _refuse(self, racer: Racer, reason: str, effect: proof.Effect | None = None) -> None:
        self._decide(racer, False, reason, effect)

    def _decide(self, racer: Racer, proven: bool, reason: str, effect: proof.Effect | None) -> None:
        looked = math.expm1(racer.gain) if racer.gains else None
        self.decisions[racer.knob, racer.value] = Decision(racer.knob, racer.value, proven, reason, effect, looked)

    @property
    def noise(self) -> float:
        """Standard deviation of a launch on the logarithmic scale, from neighbours of one setting and from repeated candidates."""
        last: dict[Settings, float] = {}
        squares = []
        for launch, observation in self.launched:
            if launch.why in ("start", "best") and not self._problem_of(observation):
                value = self._cost(observation)
                if launch.settings in last:
                    squares.append((value - last[launch.settings]) ** 2 / 2)
                last[launch.settings] = value
        for racer in self._racers:
            if len(racer.gains) > 1:
                squares += [statistics.variance(racer.gains) / _SPREAD] * (len(racer.gains) - 1)
        return max(_LEAST_NOISE, math.sqrt(statistics.fmean(squares))) if squares else math.nan

    @property
    def provable(self) -> float:
        """The least gain, as a share, that a round can prove at this noise."""
        return math.expm1(_PROVABLE * self.noise)

    # --- rounds ----------------------------------------------------------------------------------------------------------------------

    def _rounds(self) -> Generator[Launch, Event, None]:
        while self.best:
            decided = yield from self._round()
            self.round += 1
            if decided is None:
                continue  # the set itself does not run, and has lost its last change
            unproven = {knob: effect for knob, (clear, effect) in decided.items() if not clear}
            if len(decided) == len(self.best) and not unproven:
                for knob, (_, effect) in decided.items():
                    self._decide(self.adopted[knob], True, "proven" if effect else "the others do not run without it", effect)
                return
            worst = sorted(unproven, key=lambda knob: _value(unproven[knob]))
            for knob in worst if self.round > _ONE_BY_ONE else worst[:1]:
                self._drop(knob, "not proven in the set of all that looked better", unproven[knob])

    def _round(self) -> Generator[Launch, Event, dict[str, tuple[bool, proof.Effect | None]] | None]:
        """Which changes of the set are proven in it, with their effects; None where the set does not run."""
        self._round_began = len(self.launched)
        bound = proof.levels(self.setup.alpha, self.round)
        without = {knob: changed(self.best, self.choices[knob], self.choices[knob].values[0]) for knob, _ in self.best}
        looks: dict[str, list[proof.Look]] = {knob: [] for knob in without}
        decided: dict[str, tuple[bool, proof.Effect | None]] = {}
        for number in range(2):
            due = [knob for knob in without if knob not in decided]
            sets = [self.best, *(without[knob] for knob in due)]
            values: list[list[tuple[float, float]]] = [[] for _ in sets]
            sizes = self._sizes([self.adopted[knob].gain for knob in due])
            for which in proof.drawn((self.setup.seed * 64 + self.round) * 2 + number, sizes):
                if which and due[which - 1] in decided:
                    continue
                value = yield from self._running(sets[which], "proof")
                if value is not None:
                    values[which].append((len(self.launched), value))
                elif which:
                    decided[due[which - 1]] = True, None
                else:
                    return None
            for knob, mine in zip(due, values[1:], strict=True):
                if knob not in decided:
                    looks[knob].append(_look(values[0], mine))
                    if (clear := proof.proven(looks[knob], bound)) is not None:
                        decided[knob] = clear, proof.estimate_speedup(looks[knob], bound.first)
            if len(decided) == len(without) or not all(clear for clear, _ in decided.values()):
                break  # where one has to leave, a second look at the others would be of a set that is no more
        return decided

    # --- launches --------------------------------------------------------------------------------------------------------------------

    def _running(self, settings: Settings, why: Why) -> Generator[Launch, Event, float | None]:
        """The cost of settings that should run. None where they do not, twice in a row: the best settings then lose what was adopted
        last.
        """
        cost, problem = yield from self._tried(settings, why)
        if cost is not None:
            return cost
        if settings == self.best and settings:
            self._drop(list(self.adopted)[-1], f"with the changes before it: {problem}")
        elif not settings and why in ("warm_up", "start"):
            self.problem = problem
        return None

    def _tried(self, settings: Settings, why: Why) -> Generator[Launch, Event, tuple[float | None, str]]:
        """The cost of settings and no problem; or none, and the problem of the last launch."""
        problem = ""
        for _ in range(_TRIES):
            event = yield Launch(settings, why)
            assert isinstance(event, Observation)  # `add` answers only candidates' launches with a Hurry
            if not (problem := self._problem_of(event)):
                return self._cost(event), ""
        return None, problem

    def _problem_of(self, observation: Observation) -> str:
        """Why a launch cannot be compared with the start; empty where it can."""
        setup = self.setup
        if observation.outcome != "ok":
            return _ENDINGS[observation.outcome] + (f": {observation.problem}" if observation.problem else "")
        if observation.problem:
            return observation.problem
        if observation.value is None or not (math.isfinite(observation.value) and observation.value > 0):
            return "its log tells no figure to compare"
        starts = [o for launch, o in self.launched if not launch.settings and o.outcome == "ok" and o is not observation]
        if not setup.any_work and (off := _share(observation.tokens, [o.tokens for o in starts])) and off > _EQUAL_WORK:
            return f"tokens of a step differ by {100 * off:.2g} %"
        if setup.loss is not None and (off := _share(observation.loss, [o.loss for o in starts])) and off > setup.loss:
            return f"the loss differs by {100 * off:.2g} %, at most {100 * setup.loss:g} % is allowed"
        return ""

    def _cost(self, observation: Observation) -> float:
        """The logarithm of the metric, so that less is better."""
        value = math.log(observation.value or math.nan)
        return -value if self.setup.higher_is_better else value


_ENDINGS: Mapping[RunOutcome, str] = {
    "oom": "out of memory",
    "crash": "crashed",
    "nan": "printed a NaN loss",
    "hang": "stopped making progress",
    "killed": "was killed",
    "refused": "was refused",
}


def _look(best: Sequence[tuple[float, float]], without: Sequence[tuple[float, float]]) -> proof.Look:
    rows = sorted([(at, value, True) for at, value in best] + [(at, value, False) for at, value in without])
    return proof.Look([value for _, value, _ in rows], [on for _, _, on in rows], [at for at, _, _ in rows])


def _share(value: float | None, others: Sequence[float | None]) -> float:
    """How far a figure is from the mean of others, as a share; 0 where nothing tells it."""
    known = [x for x in others if x is not None]
    if value is None or not known:
        return 0.0
    mean = statistics.fmean(known)
    return abs(value - mean) / max(abs(value), abs(mean), 1e-12)


def _value(effect: proof.Effect | None) -> float:
    return -math.inf if effect is None else effect.value
