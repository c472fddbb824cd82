"""The answer: where a run stands, which wall is likely and how to tell, and ranked actions; as one document."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from playbook.diagnosis import published
from playbook.diagnosis import seen as sight
from playbook.diagnosis.actions import Action, actions
from playbook.diagnosis.claims import Said, said
from playbook.diagnosis.setting import Measured, Setting
from playbook.planner.choice import plain_data, space
from playbook.planner.choice.anchored import anchored, scale_of, scaled
from playbook.planner.choice.search import Answer, Choice, plan_layouts
from playbook.planner.memory import GIB
from playbook.planner.plan import Plan
from playbook.planner.time.cluster import Cluster
from playbook.planner.time.step import Estimate, StepTime, step_time
from playbook.records.standing import Stock

_LEAST = 0.01
"""A share under this is not told by its name."""


@dataclass(frozen=True)
class Wall:
    """A share of the step, predicted or traced; None where nothing tells. `beyond`: above the threshold from which on it is worth work."""

    name: str
    share: float | None
    threshold: float
    sign: str

    @property
    def beyond(self) -> bool:
        """Whether the share is above its threshold."""
        return self.share is not None and self.share > self.threshold


@dataclass(frozen=True)
class _Kind:
    """How a wall is known: the parts of a predicted step, the share of a trace, the least share that counts, and its sign."""

    parts: tuple[str, ...]
    traced: str
    threshold: float
    sign: str


_KINDS: Mapping[str, _Kind] = {
    "host-bound": _Kind(("host",), "host_idle", 0.10, "the GPU is idle until the next kernel is launched"),
    "exposed communication": _Kind(("tp", "ep", "cp", "pp", "dp"), "exposed", 0.15, "collectives run and nothing is computed beside them"),
    "data wait": _Kind((), "data_wait", 0.10, "the GPU is idle while the host fetches a batch"),
    "idle of unknown cause": _Kind(
        (), "unknown_idle", 0.10, "the GPU is idle though the next kernel was launched, or its launch is not in the trace"
    ),
    "bubble": _Kind(
        ("bubble",), "", 0.05, "the first and the last stage are idle at the ends of a step; more micro-batches make tokens faster"
    ),
    "stragglers": _Kind(("stragglers",), "", 0.10, "the same collective takes longer on some ranks: trace two of them"),
    "memory": _Kind((), "", 0.05, "layers are computed again in the backward pass, or state travels to the host, so that the run fits"),
    "memory-bound kernels": _Kind(("elementwise", "optimizer"), "", 0.25, "most kernels move bytes and multiply nothing"),
    "compute-bound": _Kind(("products", "grouped", "attention"), "", 1.0, "products and attention fill the step"),
}
"""The thresholds of what a trace shows are those of `playbook bench trace --file`; a predicted share is held against the same."""


def predicted_walls(time: StepTime, plan: Plan, cluster: Cluster, shares_seen: Mapping[str, float] = MappingProxyType({})) -> list[Wall]:
    """The walls of a plan, the largest that count first; what was `seen` goes before what is predicted. What the host fetches is not
    predicted.
    """
    parts = sight.composition(time.parts, shares_seen)
    shares = {name: sum(parts.get(p, 0.0) for p in kind.parts) for name, kind in _KINDS.items() if kind.parts}
    lean = sight.changed(parts, time.parts, step_time(_lean(plan), cluster).parts)
    shares["memory"] = max(0.0, sum(parts.values()) - sum(lean.values()))
    seen_walls = sight.walls(shares_seen)
    return _ordered(
        {name: max(seen_walls[name], shares.get(name, 0.0)) if name in seen_walls else shares.get(name) for name in _KINDS}, shares_seen
    )


def traced_walls(trace: Mapping[str, Any]) -> list[Wall]:
    """The walls of a trace as `playbook bench trace --file FILE --json` gives them."""
    shares = {name: trace.get(kind.traced) for name, kind in _KINDS.items() if kind.traced}
    shares["compute-bound"] = trace["computing"]
    slow = " and ".join(each["name"] for each in trace.get("waits_for", ()))
    signs = {"host-bound": f"; most of that passes in {slow}" if slow else ""}
    return [replace(wall, sign=wall.sign + signs.get(wall.name, "")) for wall in _ordered(shares, sight.of_trace(trace))]


def _ordered(shares: Mapping[str, float | None], shares_seen: Mapping[str, float]) -> list[Wall]:
    """Those beyond their thresholds first, each by its share; what nothing tells last."""
    walls = [Wall(name, share, _KINDS[name].threshold, f"{_KINDS[name].sign}{_of_it(name, shares_seen)}") for name, share in shares.items()]
    return sorted(walls, key=lambda w: (not w.beyond, w.share is None, -(w.share or 0.0)))


def _of_it(wall: str, shares_seen: Mapping[str, float]) -> str:
    """What was seen of a wall under names of its own, the largest first."""
    named = {
        name: share for name, share in shares_seen.items() if sight.KINDS[name].wall == wall and name != "communication" and share >= _LEAST
    }
    listed = ", ".join(f"{name} {share:.0%}" for name, share in sorted(named.items(), key=lambda n: -n[1]))
    return f" (seen: {listed})" if listed else ""


def _lean(plan: Plan) -> Plan:
    """The plan with nothing computed again and nothing on the host, whether it fits or not."""
    return replace(plan, options=replace(plan.options, recompute=(), optimizer_offload=0, offload=False, offload_modules=()))


SCHEMA = "diagnosis/1"
_CLAIMS = 3
_MOST = 8
_UNEVEN = 1.2
_EVEN = 0.05
"""A published run that is faster by no more than this is as fast."""


@dataclass(frozen=True)
class Changed:
    """What a change is in the words of a trainer: what it sets, what it leaves out, the environment, and what it cannot say."""

    flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


_Exporter = Callable[[Action, str, str], Changed]
"""An action in the words of a trainer: the action, the trainer and the kind of GPU."""


@dataclass(frozen=True)
class Seen:
    """What was seen of the run beside its speed: the walls of a trace, as plain data, and a log's notes; `uneven` is its 95th percentile
    over its median, `grown` the peak bytes
    at its beginning and its end, where these grew.
    """

    trace: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    uneven: float | None = None
    grown: tuple[float, float] | None = None


_NOTHING = Seen()


def diagnose(where: Setting, speed: Measured | None, stock: Stock, export: _Exporter, observed: Seen = _NOTHING) -> dict[str, Any]:
    """The diagnosis of a setting, `diagnosis/1`; everything that it says follows from its arguments.

    Units: tokens per second and GPU, seconds, GiB; shares of a step or of a peak between 0 and 1.
    """
    where = replace(where, seen={**(sight.of_trace(observed.trace) if observed.trace else {}), **where.seen})
    planned = _planned(where.question)
    best = planned.choices[0] if planned.choices else None
    current = _time(where)
    runs = published.nearest(where)
    walls = _walls(where, current, observed)
    time = current or (best.time if best else None)
    step_shares = sight.composition(time.parts, where.seen) if time else {}
    headroom = max(best.speed, runs.most if runs else 0.0) / speed.tokens_per_s_per_gpu - 1 if best and speed else None
    listed = [_entry(a, where, stock, export, step_shares, headroom) for a in actions(where, best)]
    first = next((w.name for w in walls if w.share is not None), "") if where.seen else ""
    listed.sort(key=partial(_place, first))
    q = where.question
    return {
        "schema": SCHEMA,
        "setting": {
            "model": q.model, "hardware": q.cluster.name, "gpus": q.gpus, "seq_len": q.seq_len, "gbs": q.global_batch,
            "precision": where.precision, "framework": where.framework, "layout": list(where.known) or None, "seen": dict(where.seen),
        },
        "measured": speed and asdict(speed),
        "predicted": {
            "yours": current and {**_predicted(current, where.plan), "fits": where.plan is not None and space.fits(where.plan,
            q.cluster.memory_gib)},
            "best": best and _predicted(best.time, best.plan),
            "nothing_fits": _obstacle(planned),
        },
        "published": runs and runs.document(q),
        "position": _position(speed, current, best, runs),
        "walls": [{**asdict(w), "beyond": w.beyond} for w in walls],
        "walls_from": _walls_from(where, observed),
        "how_to_tell": "" if observed.trace else _how(where),
        "actions": [*_trace_first(where, speed, time), *listed][:_MOST],
        "assumptions": _assumptions(where, current, best, observed),
        "confidence": _confidence(where, speed, current, runs, observed),
    }  # fmt: skip


def _place(wall: str, entry: Mapping[str, Any]) -> tuple[bool, int, float, float]:
    """By the gain to expect; where a wall was seen, first what works on that wall alone, then what else shortens it."""
    on_wall = wall in entry["walls"] and entry["expected"] is not None
    gain = -(entry["expected"] or 0.0), -(entry["planner"] or {"value": 0.0})["value"]
    return bool(wall) and not on_wall, len(entry["walls"]) if wall and on_wall else 0, *gain


@lru_cache(maxsize=16)
def _planned(question: space.Question) -> Answer:
    """The planner's answer; a server is asked about one setting several times."""
    return anchored(plan_layouts(question, 3))


def _time(where: Setting) -> StepTime | None:
    """The predicted step of the layout that runs, scaled to published runs."""
    if where.plan is None:
        return None
    time = step_time(where.plan, where.question.cluster)
    return scaled(time, scale_of(where.question, time, fp8=where.precision == "fp8"))


def _predicted(time: StepTime, plan: Plan | None) -> dict[str, Any]:
    return {
        "tokens_per_s_per_gpu": asdict(time.tokens_per_s_per_gpu), "mfu": time.mfu, "seconds": time.seconds.value,
        "memory_gib": space.held(plan) / GIB if plan else 0.0, "settings": plain_data.words(plan) if plan else [],
    }  # fmt: skip


def _obstacle(planned: Answer) -> dict[str, Any] | None:
    near = planned.obstacle
    return {"settings": plain_data.words(near.plan), "memory_gib": near.stage.peak / GIB, "ways": list(near.ways)} if near else None


def _position(speed: Measured | None, current: StepTime | None, best: Choice | None, runs: published.Published | None) -> dict[str, Any]:
    """Where the run stands between what was published and what is predicted, in figures and one sentence."""
    if speed is None:
        return {"of_yours": None, "of_best": None, "where": "unknown", "sentence": "no speed is given: this is what to expect"}
    value = speed.tokens_per_s_per_gpu
    of_yours = value / current.tokens_per_s_per_gpu.value if current else None
    of_best = value / best.speed if best else None
    expected = current.tokens_per_s_per_gpu if current else best.time.tokens_per_s_per_gpu if best else None
    said = []
    place = runs.place(speed) if runs else None
    if runs and place is not None:
        stands = {-1: "below published runs", 0: "where published runs are", 1: "above published runs"}[place]
        more = runs.most / value - 1
        fastest = f", the fastest {more:.0%} faster than you" if more > _EVEN else ""
        said.append(f"you are {stands}: {_range(runs)} {runs.shared}{fastest}")
    if expected:
        share = value / expected.value
        inside = "inside" if expected.low <= value <= expected.high else "below" if value < expected.low else "above"
        said.append(
            f"you reach {share:.0%} of what the planner predicts for {'your layout' if current else 'the fastest layout'},"
            f" {inside} its 80 % interval"
        )
    if current and best:
        said.append(f"you reach {of_best:.0%} of what it predicts for the fastest layout")
    if runs and runs.predicted and expected:
        low, high = (f"{share:.0%}" for share in runs.predicted)
        said.append(f"of the speed of those published runs the planner predicts {low if low == high else f'{low} to {high}'}")
    where = {-1: "below", 0: "published", 1: "above", None: "unknown"}[place]
    return {"of_yours": of_yours, "of_best": of_best, "where": where, "sentence": "; ".join(said) or "nothing to compare with"}


def _range(runs: published.Published) -> str:
    low, high = (f"{v:,.0f}" if runs.by == "tokens" else f"{v:.0%}" for v in (runs.low, runs.high))
    unit = "tokens/s/GPU" if runs.by == "tokens" else "MFU"
    return f"{low if low == high else f'{low} to {high}'} {unit}"


def _walls(where: Setting, current: StepTime | None, observed: Seen) -> list[Wall]:
    """The walls of what runs; none where neither its layout is known nor anything was seen of it."""
    if observed.trace:
        return traced_walls(observed.trace)
    if where.plan and current:
        return predicted_walls(current, where.plan, where.question.cluster, where.seen)
    return _ordered(sight.walls(where.seen), where.seen)


def _walls_from(where: Setting, observed: Seen) -> str:
    if observed.trace:
        return "trace"
    of_yours = "the planner's breakdown of your layout"
    if where.seen:
        return f"what you saw{f', and {of_yours} for the rest' if where.plan else ''}"
    return of_yours if where.plan else ""


def _how(where: Setting) -> str:
    """The commands that measure the walls."""
    q = where.question
    command = ["playbook", "diagnose", "--model", where.said, "--gpus", str(q.gpus), "--gpu", q.cluster.option]
    return f"nsys profile -t cuda,nvtx --export=sqlite -o step COMMAND; {shlex.join(command)} --trace step.sqlite"


def _trace_first(where: Setting, speed: Measured | None, time: StepTime | None) -> list[dict[str, Any]]:
    """Where a run is slower than its prediction allows for, something holds it back that no plan knows: that comes before all else."""
    if where.seen or speed is None or time is None or speed.tokens_per_s_per_gpu >= time.tokens_per_s_per_gpu.low:
        return []
    title = "trace three steps first: the run is slower than its layout's prediction allows for"
    if where.plan is None:
        title = "name the layout, and trace three steps: the run is slower than the fastest layout's prediction allows for"
    return [
        {
            "id": "trace", "title": title, "walls": [], "expected": None, "at_most": False, "planner": None, "record": None,
            "in_plan": False, "memory_gib": None, "claims": [], "settings": [],
            **{k: list(v) for k, v in asdict(Changed()).items()}, "test": [_how(where)],
            "note": "waits for data, paths that are not fused, slow ranks and throttled clocks are not predicted",
        }
    ]  # fmt: skip


def _entry(
    action: Action, where: Setting, stock: Stock, export: _Exporter, step_shares: Mapping[str, float], headroom: float | None
) -> dict[str, Any]:
    """One action as plain data.

    It is judged by what claims say, by the share of the predicted step by part, and by the headroom: the relative gain in tokens/s to the
    fastest layout, or to a faster published run.
    """
    measures = said(stock, action.measures, action.on, where.question.cluster)
    shown = [*measures, *said(stock, action.also, action.on, where.question.cluster)]
    record = next((s for s in measures if s.comparable), None)
    measured_gain = Estimate(*record.effect) if record and record.effect else None
    changed = export(action, where.framework, where.question.cluster.name)
    return {
        "id": action.id,
        "title": action.title,
        "walls": list(action.walls),
        "expected": _expected_gain(action, measured_gain, step_shares, headroom),
        "at_most": _limited_by_headroom(action, headroom),
        "planner": action.gain and asdict(action.gain),
        "record": {**asdict(measured_gain), "claim": record.id, "machine": record.machine,
        "evidence": record.evidence} if record and measured_gain else None,
        "in_plan": action.done,
        "memory_gib": None if action.peak_bytes is None else action.peak_bytes / GIB,
        "claims": [_claim(s) for s in sorted(shown, key=lambda s: s.rank)[:_CLAIMS]],
        "settings": plain_data.words(action.on) if action.on != action.off else [],
        **{k: list(v) for k, v in asdict(changed).items()},
        "test": _tests(action, shown, changed),
        "note": action.note,
    }  # fmt: skip


def _expected_gain(
    action: Action, measured_gain: Estimate | None, step_shares: Mapping[str, float], headroom: float | None
) -> float | None:
    """Expected relative gain in tokens/s (0.1 = 10 % faster), None where nothing tells.

    It is the smallest of the planner's gain, the measured gain (for an action with `part`, carried to the whole step by Amdahl's law) and,
    where `_limited_by_headroom`, the headroom to the fastest layout or published run. A part that the step lacks gains 0.
    """
    affected_share = step_shares.get(action.part, 0.0) if action.part else 1.0
    gains = [action.gain.value] if action.gain else []
    gains += [1 / (1 - affected_share * (1 - 1 / (1 + measured_gain.value))) - 1] if measured_gain and measured_gain.value > -1 else []
    if _limited_by_headroom(action, headroom):
        gains.append(max(0.0, headroom or 0.0))
    return min(gains) if gains else None


def _limited_by_headroom(action: Action, headroom: float | None) -> bool:
    """Whether the fastest layout has the action too, and what is known to be faster lies nearer than its gain."""
    new_fp8 = action.on.options.fp8 and not action.off.options.fp8
    beyond = action.on.options.graphs or new_fp8 or action.on.global_batch != action.off.global_batch
    return action.gain is not None and headroom is not None and not beyond and headroom < action.gain.value


def _claim(claim: Said) -> dict[str, Any]:
    return {k: v for k, v in asdict(claim).items() if k not in ("effect", "case", "statement", "model")} | {"limits": list(claim.limits)}


def _tests(action: Action, claims: list[Said], changed: Changed) -> list[str]:
    """The commands that test an action: on the trainer of the run, and the claim that speaks for it where one has a case."""
    words = " ".join(changed.flags)
    without = f" (without {' '.join(changed.without)})" if changed.without else ""
    variables = f"env {' '.join(changed.environment)} " if changed.environment else ""
    commands = [f"playbook ab -- COMMAND --vs {variables}COMMAND {words}{without}".rstrip()] if words or without or variables else []
    case = next((s for s in claims if s.case and s.id in (*action.measures, *action.also)), None)
    return [*commands, *([f"playbook confirm {case.card}/{case.id}"] if case else [])]


def _assumptions(where: Setting, current: StepTime | None, best: Choice | None, observed: Seen) -> list[str]:
    time = current or (best.time if best else None)
    unknown_layout = [] if where.known else ["your layout is unknown: compared with the fastest; name what you run, such as tp=2 and ep=8"]
    return list(dict.fromkeys([*unknown_layout, *where.assumed, *observed.notes, *(time.assumptions if time else ())]))


def _confidence(
    where: Setting, speed: Measured | None, current: StepTime | None, runs: published.Published | None, observed: Seen
) -> dict[str, Any]:
    """How much is known, and what would raise it."""
    lacks = [
        *(["a speed"] if speed is None else []),
        *(["the layout"] if current is None else []),
        *(["a trace"] if not where.seen else []),
        *(["a published run of this model on this GPU at a like length"] if runs is None or runs.by != "tokens" else []),
    ]
    warnings = []
    if observed.uneven and observed.uneven > _UNEVEN:
        warnings.append(f"steps are uneven: the slowest twentieth takes {observed.uneven:.1f} times the median")
    if observed.grown:
        first, last = (n / GIB for n in observed.grown)
        warnings.append(f"memory grew from {first:.1f} to {last:.1f} GiB within the log: a run that goes on so ends out of memory")
    doubts = []
    over = space.over(where.plan, where.question.cluster.memory_gib) if where.plan else ""
    if over:
        doubts.append(f"your layout {over}: is it what runs?")
    if current and speed and speed.tokens_per_s_per_gpu > current.tokens_per_s_per_gpu.high:
        doubts.append("the run is faster than its layout is predicted to be: is that layout what runs?")
    level = "low" if doubts else ("high", "medium", "medium", "low", "low")[len(lacks)]
    return {"level": level, "unknown": lacks, "warnings": [*warnings, *doubts]}
