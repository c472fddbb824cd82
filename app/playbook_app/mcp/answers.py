"""What the MCP server answers from, and its answers: as typed models, each of which becomes an output schema that clients can check, what
confirming a card would run among them (cases, profiles, launches, a rough cost, from files alone); and in short, as a few lines of text
beside each and schemas without what names say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from statistics import median
from typing import Any

from pydantic import BaseModel, Field

from playbook.cards.load import load_all
from playbook.cards.model import Card
from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook.planner.memory import GIB, at_the_limit
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import Evidence
from playbook.records.machine import CPU, Here
from playbook.records.read import Record, RecordReader
from playbook.records.standing import Stock
from playbook.skills.model import Skill, load_skills
from playbook.text import count, pairs
from playbook.yaml_files import did_you_mean
from playbook_app.services import standing
from playbook_bench import metrics
from playbook_bench.run import schedule
from playbook_bench.run.targets import tasks_of_card
from playbook_bench.variants.resolve import overrides


class SearchAnswer(BaseModel):
    """The cards that answer a question, best first; where none does, why, and the ids of the nearest, which may be of no use."""

    hits: list[dict[str, Any]]
    """As `playbook search --json` has them: `claims`, nearest to the question first, with their `standing`, in which an empty list is of a
    claim that was never tested; `why`, the passage that matched best; whether any claim `applies` to the stated machine, true if none was
    stated; `sizes` for the stated run; and `limits`, the claims that do not apply, each with what was found and what its scope expects.
    """
    none: str = ""
    nearest: list[str] = Field(default_factory=list)
    pages: list[dict[str, str]] = Field(default_factory=list)
    """Sections of guides and skills: `source` and `title`."""
    diagnosis: str = ""
    """The command, or the tool's arguments, of the diagnosis that a question about speed asks for."""


class CardList(BaseModel):
    """All cards."""

    cards: list[dict[str, Any]]
    """Of each `id`, `title`, `summary`, `phase`, `wall`, and `claims`: verdicts by claim id with what each rests on, as `confirmed, one
    H200, megatron`; an empty list for a claim that nobody tested."""
    left_out: int = 0


class CardAnswer(BaseModel):
    """A section of a card, as in its file, with the verdicts on its claims."""

    card: dict[str, Any]
    rests_on: list[str]
    """For each decision rule, in their order: `measured`, `refuted` or `hypothesis`."""
    verdicts: dict[str, list[dict[str, Any]]]
    """By claim the newest verdict of each machine: `stands` says what it rests on, `stale` why it no longer counts, null if it does, and
    `repeat` is the command that measures again."""
    more: list[str]
    """The card's other sections."""


class ClaimAnswer(BaseModel):
    """One claim as in the card's file, or the claim that a mechanism check belongs to."""

    card_id: str
    claim: dict[str, Any]
    verdicts: dict[str, list[dict[str, Any]]]
    """Verdicts by id, as those of a card: of the claim, and of its mechanism check."""


class EvidenceList(BaseModel):
    """The records on one claim, newest first; altered ones are listed as `altered`."""

    claim_id: str
    records: list[dict[str, Any]]
    """Each as a verdict of a card, with the day on which it `expires` and its `case`."""
    left_out: int = 0


class LayoutAnswer(BaseModel):
    """Whether a layout is legal, and the degrees that follow from it."""

    legal: bool
    broken: list[str]
    """Each broken rule: what was found, what was expected, what to set."""
    dp: int | None
    """Data-parallel degree; null where the GPUs do not divide."""
    edp: int | None
    """Data-parallel degree of the experts."""
    min_gpus: int
    """The smallest number of GPUs that holds one copy of the model."""
    uneven: list[list[int]] | None
    """Decoder layers of each stage, chunk by chunk, where they are not alike; null where they are."""
    nearest: list[dict[str, Any]]
    """The nearest legal layouts of one that is not, by the `changes` that lead there."""


class MemoryAnswer(BaseModel):
    """Peak allocated memory. Units: bytes per GPU; GiB where the name says so."""

    verdict: str
    """fits, tight or does not fit, where the GPU is named."""
    gpu_gib: float | None
    peak: float
    stage: int
    """The pipeline stage with the highest peak."""
    stages: list[dict[str, Any]]
    """What the ranks of each pipeline stage hold, as in `playbook layout memory --json`; `stage`, `layers`, `in_flight` and `held` are
    counts."""


class PlanAnswer(BaseModel):
    """The fastest plans that fit, best first, and the GPUs that they take: the fewest, where those were asked for."""

    gpus: int
    seq_len: int
    global_batch_size: int
    limit_gib: float
    """What a plan may allocate of a GPU's memory."""
    plans: list[dict[str, Any]]
    """Units: GiB, tokens per second and GPU with their 80 % interval. `network_share` is what of the step the network between nodes costs,
    `settings` what `playbook layout memory` takes."""
    published: dict[str, Any] | None
    """The nearest published runs of the model on the GPU: what was measured, the prediction for each without its own figure, and which of
    them is `ahead` of the first plan.
    """
    other_backend: dict[str, Any] | None
    """The best plan of the backend that was not asked for, how far it is from the first, and which trainers run it."""
    claims: list[dict[str, Any]] = Field(default_factory=list)
    """What GPUs have measured of the first plan's layout: claims with their verdicts."""
    ties: list[int]
    """Places of plans that cannot be told from the first, from 1."""
    runner_up: str | None
    """Why the second lost."""
    nearest: dict[str, Any] | None
    """Where nothing fits: what comes nearest, and what would fit."""
    assumptions: list[str]


class ExportAnswer(BaseModel):
    """A layout in the words of a trainer."""

    target: str
    verdict: str
    """fits, tight or does not fit, on the GPU that is named, with the loss that this trainer runs."""
    memory_gib: float
    gpu_gib: float
    advice: str
    """What to do where the planned loss would fit and this trainer's does not."""
    text: str
    """A shell script: environment, files and the launcher's line."""


class DiagnosisAnswer(BaseModel):
    """Where a run stands, which wall is likely, and what to try, best first.

    Units: tokens per second and GPU, seconds, GiB; shares of 1.
    """

    position: str
    measured: dict[str, Any] | None
    predicted: dict[str, Any]
    """The run's own layout where it is known, and the fastest, each with settings; what comes nearest where nothing fits."""
    published: dict[str, Any] | None
    """The nearest published runs, and the range that all of their kind reach."""
    walls: list[dict[str, Any]]
    """Those above their thresholds, the largest first; the largest where none is."""
    how_to_tell: str
    actions: list[dict[str, Any]]
    """Each with the gain to expect and where it comes from, claims with verdicts, flags, and the commands that test it."""
    confidence: dict[str, Any]
    assumptions: list[str]


MOST_ROWS = 3
"""Published runs that an agent reads of."""


@dataclass(frozen=True)
class Library:
    """The data behind the answers. Evidence files may appear while the server runs, so every answer reads new and changed ones."""

    cards: Mapping[str, Card]
    skills: Mapping[str, Skill]
    machine: Here
    day: date | None = None
    """By which verdicts are stale; the day of the question, if not given."""
    reader: RecordReader = field(default_factory=RecordReader)

    @property
    def today(self) -> date:
        """The day of an answer."""
        return self.day or standing.today()

    def records(self) -> Sequence[Record]:
        """The evidence that exists now.

        Raises:
            FileError: a file is no record.
        """
        return standing.records_here(self.cards, self.machine, reader=self.reader)

    def stock(self) -> Stock:
        """Cards with the evidence that exists now."""
        return Stock(self.cards, self.records(), self.today)

    def card(self, card_id: str) -> Card:
        """The card with this id; an unknown id raises an error that names the nearest ones."""
        if card_id not in self.cards:
            raise PlaybookError(f"card '{card_id}' does not exist{did_you_mean(card_id, self.cards)}")
        return self.cards[card_id]


def library_here() -> Library:
    """Cards and skills that ship, with evidence from this folder's runs and from the repository."""
    return Library(load_all(), load_skills(data_root("skills")), standing.here())


def shortened(schema: Any) -> Any:
    """A JSON Schema without titles, and without the null that an argument takes when it is left out."""
    if isinstance(schema, list):
        return [shortened(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    short = {k: v if k == "default" else shortened(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    options = [o for o in short.get("anyOf", ()) if o != {"type": "null"}]
    if len(options) == 1 and short.get("default", "") is None:
        short = {**options[0], **{k: v for k, v in short.items() if k not in ("anyOf", "default")}}
    return short


def shallow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's schema to the depth of one level; below that an answer says the names of its fields itself."""

    def kind(each: Mapping[str, Any]) -> dict[str, Any]:
        if "$ref" in each:
            return {"type": "object"}
        if "items" in each:
            item = kind(each["items"])
            return {"type": "array", **({} if item == {"type": "object"} else {"items": item})}  # an object says its fields itself
        return {k: v for k, v in each.items() if k == "type"}

    fields = {name: kind(each) for name, each in schema["properties"].items()}
    return {"type": "object", "properties": fields}


def _verdicts(verdicts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One line for each claim."""
    return [f"{claim}: {'; '.join(map(_stands, standing)) or 'untested'}" for claim, standing in verdicts.items()]


def _stands(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['stands']} ({verdict['sentence']})"


def _search(answer: Mapping[str, Any]) -> str:
    lines = [
        *([f"a speed is judged by: {answer['diagnosis']}"] if answer["diagnosis"] else []),
        *([answer["none"]] if answer["none"] else []),
        *([f"nearest, perhaps of no use: {', '.join(answer['nearest'])}"] if answer["nearest"] else []),
    ]
    for hit in answer["hits"]:
        stands = "; ".join(f"{i} {', '.join(hit['standing'][i]) or 'untested'}" for i in hit["claims"][:3])
        lines.append(f"{hit['id']}: {hit['title']}{'' if hit['applies'] else ' [does not apply]'}. {stands}")
        lines += [f"size: {line}" for line in hit["sizes"]]
    return "\n".join(lines)


def _cards(answer: Mapping[str, Any]) -> str:
    return "\n".join(f"{c['id']}: {c['title']}" for c in answer["cards"])


def _card(answer: Mapping[str, Any]) -> str:
    card = answer["card"]
    rules = [
        f"{basis}: when {pairs(d['when'])}: set {pairs(d.get('set', {}))} (because {', '.join(d['because'])})"
        for d, basis in zip(card.get("decide", ()), answer["rests_on"], strict=True)
    ]
    head = [card["title"], card["summary"]] if "title" in card else [f"{', '.join(card) or 'nothing'} of the card"]
    return "\n".join([*head, *rules, *_verdicts(answer["verdicts"]), f"other sections: {', '.join(answer['more'])}"])


def _claim(answer: Mapping[str, Any]) -> str:
    return "\n".join([answer["claim"]["statement"], *_verdicts(answer["verdicts"])])


def _evidence(answer: Mapping[str, Any]) -> str:
    lines = [f"{r['created']}  {_stands(r)}" for r in answer["records"]]
    return "\n".join([*lines, f"{answer['left_out']} older left out"] if answer["left_out"] else lines) or "no records"


def _confirmation(answer: Mapping[str, Any]) -> str:
    return f"{answer['command']}: {count(len(answer['cases']), 'case')}, {', '.join(c['case'] for c in answer['cases'])}"


def _layout(answer: Mapping[str, Any]) -> str:
    if not answer["legal"]:
        near = [f"nearest: {pairs(n['changes'])}" for n in answer["nearest"]]
        return "\n".join([*answer["broken"], *near])
    return f"legal: DP {answer['dp']}, expert DP {answer['edp']}; at least {count(answer['min_gpus'], 'GPU')}"


def _memory(answer: Mapping[str, Any]) -> str:
    of = f" of {answer['gpu_gib']:g} GiB" if answer["gpu_gib"] else ""
    return f"{answer['verdict']}: peak {answer['peak'] / GIB:.1f} GiB per GPU{of}, on stage {answer['stage']} of {len(answer['stages'])}"


def _plans(answer: Mapping[str, Any]) -> str:
    """What was asked, a line for each plan, then what they are set against: published runs, the other backend's best, claims."""
    if not answer["plans"]:
        near = answer["nearest"]
        return (
            f"nothing fits; nearest {near['memory_gib']:.1f} GiB; fits with {', or '.join(near['ways'])}" if near else "no layout is legal"
        )
    limit = answer["limit_gib"]
    near = [" (at the limit)" if at_the_limit(p["memory_gib"], limit) else "" for p in answer["plans"]]
    lines = [f"{_speed(p)}, {p['memory_gib']:.0f} GiB{so}: {' '.join(p['settings'])}" for p, so in zip(answer["plans"], near, strict=True)]
    asked = f"{answer['seq_len']:,} tokens, global batch {answer['global_batch_size']:,}, at most {limit:.1f} GiB of a GPU"
    tied = ", ".join(map(str, answer["ties"]))
    other = answer["other_backend"]
    beside = [
        *([f"cannot be told apart: plans {tied}"] if len(answer["ties"]) > 1 else []),
        *_ran(answer["published"]),
        *([other["sentence"]] if other else []),
        *(f"claim {c['words']}" for c in answer["claims"]),
    ]
    return "\n".join([asked, *lines, *beside])


def _ran(published: Mapping[str, Any] | None) -> list[str]:
    """The nearest published runs, that which was faster than the first plan is predicted to be first, and named as that."""
    if not published:
        return ["no published run of this model on this GPU"]
    rows = sorted(published["rows"], key=lambda r: r["id"] != published["ahead"])[:MOST_ROWS]
    return [f"{'ahead of plan 1, ' if r['id'] == published['ahead'] else ''}published: {r['words']}" for r in rows]


def _export(answer: Mapping[str, Any]) -> str:
    advice = f" {answer['advice']}" if answer["advice"] else ""
    return f"{answer['verdict']}: {answer['memory_gib']:.1f} of {answer['gpu_gib']:g} GiB{advice}\n{answer['text']}"


def _diagnosis(answer: Mapping[str, Any]) -> str:
    """The position, the walls, one line for each action, and the fastest plan."""
    lines = [answer["position"], f"wall: {', '.join(w['name'] for w in answer['walls']) or 'unknown'}"]
    for action in answer["actions"]:
        gain = "" if action["expected"] is None else f" {'at most' if action['at_most'] else 'about'} {action['expected']:+.0%}"
        gain += ", if your run leaves it out:" if gain and action["in_plan"] else ""
        changes = [
            f"{word} {' '.join(action[key])}"
            for word, key in (("set", "flags"), ("unset", "without"), ("env", "environment"))
            if action[key]
        ]
        stands = "; ".join(f"{c['id']} {c['standing']}" for c in action["claims"])
        lines.append(f"{action['title']}:{gain} {', '.join(changes)} [{stands or 'no claim'}]")
    best = answer["predicted"]["best"]
    lines += [f"fastest: {_speed(best)}, {' '.join(best['settings'])}"] if best else []
    return "\n".join(lines)


def _tuning(answer: Mapping[str, Any]) -> str:
    launch = answer["launch"]
    first = f"{answer['launches']} launches; next ({answer['why']}): {launch or 'as today'}" if launch is not None else answer["why"]
    kept = [
        f"kept {r['knob']}={r['value']}" + (f" {r['effect']:+.1f} % [{r['low']:.1f}, {r['high']:.1f}]" if r["effect"] is not None else "")
        for r in answer["kept"]
    ]
    return "\n".join([first, *kept, *(f"refused {r['knob']}={r['value']}: {r['reason']}" for r in answer["refused"])])


def _speed(predicted: Mapping[str, Any]) -> str:
    tokens = predicted["tokens_per_s_per_gpu"]
    return f"{tokens['value']:.0f} tokens/s/GPU [{tokens['low']:.0f}, {tokens['high']:.0f}]"


SUMMARIES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "search": _search,
    "list_cards": _cards,
    "get_card": _card,
    "get_claim": _claim,
    "list_evidence": _evidence,
    "plan_confirmation": _confirmation,
    "check_layout": _layout,
    "estimate_memory": _memory,
    "plan_layout": _plans,
    "export_layout": _export,
    "diagnose": _diagnosis,
    "tune_next": _tuning,
}
"""The text of each tool's answer; the whole of it is the structured content. A tool without one sends the whole as text too."""


class ConfirmationPlan(BaseModel):
    """What confirming a card would run, worked out without running anything."""

    card_id: str
    command: str
    cases: list[dict[str, Any]]
    """Each with the claims that it settles, and by profile what it would run; none for a case that launches no training run.

    Launches up to the first look at the results, the earliest end, and up to the last, the latest; a series whose step time drifts starts
    over once, which is not counted. Seconds of a launch are the median of those recorded on the profile, null where there are none;
    `limit_s` is the case's time budget, after which the series ends; `noise` says where the noise of launches is known from.
    """
    without_case: list[str] = Field(default_factory=list)
    """Ids of claims that have no case."""


def plan(card: Card, records: Sequence[Record]) -> ConfirmationPlan:
    """What `playbook confirm CARD` would run on each profile, from files alone; no machine is looked at."""
    named: dict[str, list[tuple[str, str]]] = {}
    without = []
    for task in tasks_of_card(card):
        if task.claim is None or task.case is None:
            without += [task.claim.id] if task.claim else []
        else:
            named.setdefault(task.case, []).append((task.claim.id, task.claim.metric))
    cases = [_case(load_case(case), claims, records) for case, claims in named.items()]
    return ConfirmationPlan(card_id=card.id, command=f"playbook confirm {card.id} --json", cases=cases, without_case=without)


def _case(case: Case, claims: Sequence[tuple[str, str]], records: Sequence[Record]) -> dict[str, Any]:
    launched = case.kind in LAUNCHED_KINDS

    def exact(profile: str) -> bool:
        return all(metrics.on(metric, gpus=profile != CPU).deterministic for _, metric in claims)

    profiles = [_profile(case, name, exact(name), records) for name in case.profiles] if launched else []
    return {
        "case": case.id,
        "kind": case.kind,
        "claims": [i for i, _ in claims],
        "requires": case.requires,
        "profiles": profiles,
    }


def _profile(case: Case, profile: str, exact: bool, records: Sequence[Record]) -> dict[str, Any]:
    """Number of launches by the schedule, and their cost by the recorded launches of this case and profile."""
    looks, k = case.budget.looks, len(case.variants)
    # An exact metric is compared in one pair or block, without burn-in.
    least, most = (k, k) if exact else (schedule.launches(looks, None, k), k + k * looks[-1])
    found = [r.content.measured for r in records if isinstance(r.content, Evidence) and not r.altered]
    walls = [r.wall_s for m in found if m.case and (m.case.id, m.profile) == (case.id, profile) for r in m.runs if r.outcome == "ok"]
    each = median(walls) if walls else None
    limit = 60.0 * case.budget.minutes
    noise = "exact metric, no noise" if exact else "that of the launches that are compared"
    return {
        "profile": profile,
        "ranks": max(overrides(case, v, profile)[1] for v in case.variants),
        "launches_least": least,
        "launches_most": most,
        "seconds_per_launch": each,
        "seconds_least": None if each is None else min(limit, least * each),
        "seconds_most": None if each is None else min(limit, most * each),
        "limit_s": limit,
        "noise": noise,
    }
