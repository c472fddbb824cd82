"""The tools that plan (which layouts are legal, what they hold, and which are fastest), each the function behind a command; and
`tune_next`, a tuning whose launches an agent makes: the procedure decides, and whoever launches cannot keep what it did not prove.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, Field

from playbook.diagnosis.answer import diagnose
from playbook.diagnosis.claims import of_layout
from playbook.diagnosis.published import of_plan
from playbook.diagnosis.seen import parsed
from playbook.diagnosis.setting import Figures, measured, setting
from playbook.errors import ConfigError, PlaybookError
from playbook.planner import layout, memory
from playbook.planner.choice import plain_data
from playbook.planner.choice.anchored import anchored
from playbook.planner.choice.search import plan_layouts
from playbook.planner.choice.space import Question
from playbook.planner.hardware import counted, of_text
from playbook.planner.models import MODELS, from_fields, named, not_known
from playbook.planner.plan import Plan, cut, nearest, parse
from playbook.planner.shapes import Shape
from playbook.records.standing import Stock
from playbook_app.mcp.answers import (
    MOST_ROWS,
    DiagnosisAnswer,
    ExportAnswer,
    LayoutAnswer,
    MemoryAnswer,
    PlanAnswer,
)
from playbook_app.services.changes import changed
from playbook_app.services.other_backend import other_backend
from playbook_bench.judge.effects import percent
from playbook_bench.tune.procedure import Choice, Decision, Event, Hurry, Observation, Setup, Tuning
from playbook_trainer.export.plans import SETTINGS, as_run, launchable

_UNSAID = ("grown", "update")
"""Figures of a stage that its peak counts already, and the answer leaves out."""
_ARGUMENTS = {"seq": "seq_len", "gbs": "global_batch_size"}
"""Arguments of `plan_layout` whose option of `playbook plan` has another name."""
Model = Annotated[str, Field(max_length=100_000, description="A preset, a Hugging Face name, or a config.json's text.")]
Gpu = Annotated[str, Field(max_length=200_000, description="Kind of GPU, such as h100, or a calibration's or hardware file's JSON.")]
Network = Annotated[str, Field(max_length=40, description="100GbE, RoCE-200, IB-400, EFA-3200, none.")]
Settings = Annotated[
    list[Annotated[str, Field(max_length=200)]], Field(max_length=20, description='One an item: ["tp=2", "recompute=full"].')
]


def shape_of(model: str) -> Shape:
    """The shape of a preset or a published name, or of the text of a `config.json`.

    Raises:
        PlaybookError: no such model.
    """
    if model.lstrip().startswith("{"):
        try:
            data: Any = json.loads(model)
        except (ValueError, RecursionError) as e:
            raise PlaybookError(f"the model's text is no JSON: {str(e)[:100]}; give a preset's name or a whole config.json") from e
        return from_fields(data, "given")
    name = named(model)
    if not name:
        raise PlaybookError(f"{not_known(model)}; or give the text of a config.json")
    return MODELS[name]


def layout_answer(plan: Plan) -> LayoutAnswer:
    """The rules that a layout breaks, as `playbook layout check` finds them, what follows from its degrees, and the nearest legal
    layouts.
    """
    broken = plan.broken()
    degrees = {k: getattr(plan, k) for k in ("tp", "pp", "cp", "ep", "etp")}
    attention, expert = plan.tp * plan.pp * plan.cp, plan.etp * plan.ep * plan.pp
    whole = min(degrees.values()) > 0
    return LayoutAnswer(
        legal=not broken,
        broken=broken,
        dp=plan.gpus // attention if whole and plan.gpus % attention == 0 else None,
        edp=plan.gpus // expert if whole and plan.gpus % expert == 0 else None,
        min_gpus=layout.min_gpus(**degrees) if whole else 1,
        uneven=None if broken else plain_data.split(plan),
        nearest=[{"changes": n.changes} for n in nearest(plan)] if broken and whole else [],
    )


def memory_answer(plan: Plan, hardware: str | None) -> MemoryAnswer:
    """What `playbook layout memory` says, with a verdict where the GPU is named.

    Raises:
        PlaybookError: the plan breaks a rule, or no such GPU is known.
    """
    stages = memory.estimate(plan)
    most = max(stages, key=lambda s: s.peak)
    gib = of_text(hardware).memory_gib if hardware else None
    verdict = memory.verdict(most.peak, gib) if gib else "no GPU is named: give hardware for a verdict"
    rows = [{k: v for k, v in s.row().items() if k not in _UNSAID} for s in stages]
    return MemoryAnswer(verdict=verdict, gpu_gib=gib, peak=most.peak, stage=most.number, stages=rows)


def plan_of(model: str, gpus: int, settings: Sequence[str]) -> Plan:
    """A plan from words as `plan_layout` answers them.

    Raises:
        PlaybookError: a word is no setting, or names another number of GPUs.
    """
    other = [w for w in settings if w.startswith("gpus=") and w != f"gpus={gpus}"]
    if other:
        raise PlaybookError(f"settings has {other[0][:40]}, and gpus is {gpus}; expected the same number")
    return parse(named(model) or "given", settings, gpus=gpus, shape=shape_of(model))


def export_answer(plan: Plan, target: str, hardware: str) -> ExportAnswer:
    """What `playbook plan --export` prints of a legal layout, with the verdict on that GPU of what this trainer will run.

    Raises:
        PlaybookError: the plan breaks a rule, or the trainer has no words for it.
    """
    gpu = of_text(hardware)
    text = launchable(plan, target, gpu.name).text()
    peak = memory.peak(as_run(plan, target))
    verdict = memory.verdict(peak, gpu.memory_gib)
    by_loss = memory.fits(memory.peak(plan), gpu.memory_gib) and not memory.fits(peak, gpu.memory_gib)
    advice = f"with {target}'s loss; call plan_layout with framework={target}" if by_loss else ""
    return ExportAnswer(target=target, verdict=verdict, memory_gib=peak / memory.GIB, gpu_gib=gpu.memory_gib, advice=advice, text=text)


def _arguments(text: str) -> str:
    """A text that names options of `playbook plan`, with the arguments of `plan_layout` in their place."""
    return re.sub(r"--([a-z]+)", lambda m: _ARGUMENTS.get(m[1], m[1]), text)


@lru_cache(maxsize=64)
def plan_answer(
    model: str,
    gpus: int,
    hardware: str,
    network: str = "",
    *,
    seq_len: int,
    global_batch_size: int,
    goal: str,
    backend: str,
    allow: frozenset[str],
    fix: tuple[str, ...],
    top: int,
) -> PlanAnswer:
    """What `playbook plan` says. A plan depends on nothing that changes, so the same question is answered from memory.

    Raises:
        PlaybookError: the question cannot be asked.
    """
    shape, settings, less = cut(shape_of(model), fix)
    name, gpu = (named(model) or "given") + less, of_text(counted(hardware, gpus)[0], network)
    try:
        question = Question(shape, name, gpu, gpus, seq_len, global_batch_size, goal, backend=backend, fixed=settings, allow=allow)
        chosen = anchored(plan_layouts(question, top))
        runs = of_plan(chosen)
        document = plain_data.document(chosen, runs.beside(chosen) if runs else None)
        other = other_backend(chosen, with_published=True)
    except PlaybookError as e:
        raise PlaybookError(_arguments(str(e))) from e
    shown = ("memory_gib", "tokens_per_s_per_gpu", "mfu", "network_share", "settings")
    near = document["nearest"]
    return PlanAnswer(
        **{k: document["question"][k] for k in ("gpus", "seq_len")},
        global_batch_size=document["question"]["gbs"],
        limit_gib=document["question"]["memory_gib"],
        plans=[{k: p[k] for k in shown} for p in document["plans"]],
        published=document["published"],
        other_backend=other,
        ties=document["ties"],
        runner_up=document["runner_up"],
        nearest=near and {"settings": near["layout"], "memory_gib": near["memory_gib"], "ways": [_arguments(w) for w in near["ways"]]},
        assumptions=document["assumptions"],
    )


def claims_on(answer: PlanAnswer, model: str, hardware: str, network: str, stock: Stock) -> list[dict[str, Any]]:
    """What GPUs have measured of the first plan's layout; asked anew for each answer, since records may come."""
    if not answer.plans:
        return []
    return of_layout(stock, plan_of(model, answer.gpus, answer.plans[0]["settings"]), of_text(counted(hardware, answer.gpus)[0], network))


def diagnosis_answer(
    model: str,
    gpus: int,
    hardware: str,
    network: str,
    *,
    seq_len: int,
    global_batch_size: int,
    settings: Sequence[str],
    framework: str,
    saw: Sequence[str],
    figures: Figures,
    stock: Stock,
) -> DiagnosisAnswer:
    """What `playbook diagnose` says, in short.

    Raises:
        PlaybookError: the question cannot be asked, or the figures contradict it.
    """
    shape, runs_with, less = cut(shape_of(model), settings)
    where = setting(
        shape, (named(model) or "given") + less, of_text(counted(hardware, gpus)[0], network), gpus,
        seq_len=seq_len or None, gbs=global_batch_size or None, known=runs_with,
        framework=framework or "megatron-lm", always=SETTINGS.get(framework, ()),
        said="config.json" if model.lstrip().startswith("{") else model,
    )  # fmt: skip
    where = replace(where, seen=parsed(saw))
    diagnosis = diagnose(where, measured(where, figures), stock, changed)
    runs = diagnosis["published"]
    return DiagnosisAnswer(
        position=diagnosis["position"]["sentence"],
        measured=diagnosis["measured"],
        predicted=diagnosis["predicted"],
        published=runs and {**runs, "rows": runs["rows"][:MOST_ROWS]},
        walls=[{k: w[k] for k in ("name", "share", "sign")} for w in diagnosis["walls"] if w["beyond"]] or diagnosis["walls"][:1],
        how_to_tell=diagnosis["how_to_tell"],
        actions=diagnosis["actions"],
        confidence=diagnosis["confidence"],
        assumptions=diagnosis["assumptions"],
    )


_KNOB = re.compile(r"([\w.$-]{1,64})=([^|]{1,64}(?:\|[^|]{1,64}){1,15})")
_RUN = re.compile(r"(?P<value>[0-9.eE+-]{1,24})(?: loss=(?P<loss>[0-9.eE+-]{1,24}))?(?: tokens=(?P<tokens>[0-9.eE+-]{1,24}))?")
_ENDINGS = ("oom", "crash", "nan", "hang", "killed", "refused")


class TuneAnswer(BaseModel):
    """What to launch next, or what is proven."""

    launch: dict[str, str] | None
    """Values other than today's, for one launch; null once the tuning has ended."""
    why: str
    kept: list[dict[str, Any]]
    """Values with the `reason`, and the `effect` with its ends `low` and `high` in percent of speed, null where there is none."""
    refused: list[dict[str, Any]]
    launches: int
    at_least: int
    """Launches up to the end of the proof of what looks better now."""


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
            "candidate": "a candidate" if due.candidate else "whether a change still helps beside those adopted after it",
            "proof": "proof",
        }[due.why]
    elif tuning.problem:
        why = f"the start does not run: {tuning.problem}"
    else:
        why = "ended; compare the kept set with the start by playbook ab" if tuning.kept else "ended; nothing is proven to help"
    rows = [[_row(d) for d in tuning.decisions.values() if d.kept is kept] for kept in (True, False)]
    launch = None if due is None else dict(due.settings)
    return TuneAnswer(launch=launch, why=why, kept=rows[0], refused=rows[1], launches=len(tuning.launched), at_least=tuning.to_end)


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


def _row(decision: Decision) -> dict[str, Any]:
    """What became of a value."""
    found = decision.effect
    low, effect, high = (None, None, None) if found is None else (percent(found.low), percent(found.value), percent(found.high))
    return {"knob": decision.knob, "value": decision.value, "reason": decision.reason, "low": low, "effect": effect, "high": high}
