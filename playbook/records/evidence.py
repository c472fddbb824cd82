"""What the harness writes down: machine, run, comparison, verdict, evidence. Everything that a reader or a replay needs.

`Measured` holds what was observed and declared; `Derived` holds what follows from it (`playbook_bench.judge.verdict.derive`).
An evidence record is both, so that a replay can compute the second from the first and compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from playbook.cards import model
from playbook.errors import tables_wanted
from playbook.records.case import Case
from playbook.yaml_files import Strict

SCHEMA_VERSION: Literal["evidence/1"] = "evidence/1"
FIRST_REVISION = 1
"""The revision at which each of the trainer's paths began, but for the backends' own."""

Variant = str
"""`baseline` or `candidate` of a pair, a value of a sweep, a cell of an interaction; see `Case.variants`."""
RunOutcome = Literal["ok", "oom", "refused", "nan", "hang", "crash", "killed"]
Role = Literal["burn_in", "aa", "measure"]
Status = Literal["confirmed", "refuted", "inconclusive", "not_applicable", "error", "measured"]
Reason = Literal[
    "margin",  # the interval lies on one side of the claimed margin
    "exact",  # a deterministic metric, an arithmetic statement or an invariant
    "power",  # every look is spent, or the claim is out of reach, and the interval still contains the margin
    "budget",  # time or --pairs ended the series before its last look
    "not_steady",  # step time still drifts after one extension
    "environment",  # two runs of the same configuration differ more than this machine's noise
    "invalid_pair",  # the variants differ in more than the declared delta
    "oom",  # out of memory or refused, in a claim that is not about fitting
    "scope",
    "package",
    "profile",
    "no_case",
    "kind",
    "run_error",  # crash, NaN, hang, killed, short run or missing metric
    "not_activated",  # the path that was to be tested did not run
    "no_claim",  # `bench run` on a case that no claim names
]


class Machine(Strict):
    """The machine, cut down to what a profile may use."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """Folder name of its results, such as `h200x4` or `cpu`."""
    description: str
    gpus: int
    gpu: str | None = None
    gpu_memory_gib: float | None = None
    interconnect: Literal["nvlink", "pcie", "none"] = "none"
    driver: str | None = None
    cpu: str
    cores: int
    memory_gib: float | None = None
    """Memory of the host; None in records from before it was noted."""
    nodes: int = 1


class Fingerprint(Strict):
    """The environment of one run: `strict` must be equal within a series, `context` is only reported, `telemetry` was read while it ran."""

    strict: dict[str, Any] = Field(default_factory=dict)
    context: dict[str, Any] = Field(default_factory=dict)
    telemetry: dict[str, Any] = Field(default_factory=dict)


class Sample(Strict):
    """One training step: a line of metrics.jsonl."""

    step: int
    timed: bool
    loss: float | None = None
    nan: bool = False
    grad_norm: float | None = None
    seconds: float
    useful_tokens: int
    raw_tokens: int
    images: int = 0
    data_seconds: float = 0.0
    peak_memory_bytes: int = 0
    recompiles: float = 0
    compile_seconds: float = 0.0


class CollectiveCount(Strict):
    """Collectives of one kind in the observed step."""

    op: str
    group: str | None = None
    inside: str | None = None
    phase: str | None = None
    count: int
    bytes: int = 0


class Observed(Strict):
    """The receipt of a run: what really ran in its observed step."""

    numbers: dict[str, float] = Field(default_factory=dict)
    ranges: dict[str, int] = Field(default_factory=dict)
    collectives: list[CollectiveCount] = Field(default_factory=list)
    counters: dict[str, float] = Field(default_factory=dict)
    kernels: dict[str, int] = Field(default_factory=dict)
    """GPU kernels by name, without template arguments; empty where none were looked at, which proves nothing about any of them."""
    logs: dict[str, int] = Field(default_factory=dict)
    """Of a command: by pattern, how many of the lines that it printed hold it."""


class Seconds(Strict):
    """Where the seconds of a run, or of a series, went."""

    start_up: float = 0.0
    warm_up: float = 0.0
    timed: float = 0.0
    receipt: float = 0.0
    total: float = 0.0


class Run(Strict):
    """One launch of one variant: the unit of replication."""

    run_id: str
    variant: Variant
    role: Role
    pair: int | None = None
    """Pairs are adjacent runs, numbered before any of them starts; for a sweep or an interaction, the block that holds each variant once.
    None for the burn-in, and for an A/A pair that was set aside because one of its launches stood out."""
    position: int
    """Place in the series, from 0."""
    outcome: RunOutcome
    returncode: int | None = None
    message: str = ""
    """What went wrong, with the end of the log; empty when nothing did."""
    started: str
    wall_s: float
    ranks: int
    steps_wanted: int
    """Timed steps that the configuration asks for."""
    config_sha: str
    strict_sha: str = ""
    data_sha: str | None = None
    performance_revision: int | None = None
    """That of the trainer's backend; None where it was not our trainer, or never ended."""
    revisions: dict[str, int] = Field(default_factory=dict)
    """The performance revision of each other path of the trainer that it took; one that is not named was at FIRST_REVISION."""
    parameters_of: Literal["rank", "model"] = "rank"
    """Whether the counts are of the whole model, or of what rank 0 holds under tensor and pipeline parallelism."""
    num_parameters: int | None = None
    trained_parameters: int | None = None
    seconds: Seconds = Field(default_factory=Seconds)
    samples: list[Sample] = Field(default_factory=list)
    metrics: dict[str, float | None] = Field(default_factory=dict)
    observed: Observed | None = None
    telemetry: dict[str, Any] = Field(default_factory=dict)

    @property
    def raised(self) -> dict[str, int]:
        """Those of `revisions` that are past the first."""
        return {path: number for path, number in self.revisions.items() if number != FIRST_REVISION}


class Baseline(Strict):
    """A stored A/A: runs of one configuration against itself, the noise of this machine for this case."""

    schema_version: Literal["baseline/1"] = "baseline/1"
    created: str
    machine: str
    case: str
    profile: str
    noise_key: str
    """Hash of strict environment (without the trainer's source hash), performance revision, configuration and ranks."""
    surroundings: dict[str, str] | None = None
    """Exported variables that steer the libraries, and power limits; one from before they were noted has None, and fits any."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The resolved configuration that its runs share; empty in older ones."""
    place: str | None = None
    """Hash of the host's name and its GPUs' numbers: series in the same place share an A/A for a while."""
    runs: list[Run]


class Plan(Strict):
    """What was fixed before the data: order, looks, error rate, limits."""

    rules: int
    """Version of the rules that turn launches into a verdict."""
    seed: int
    looks: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Error rate over all looks together."""
    pairs_limit: int | None = None
    budget_s: float | None = None
    extended: bool = False
    """The warm-up was extended once because step time was not steady."""
    stopped: Literal["budget", "pairs", "failed", "decided", "out_of_reach", "complete"] = "complete"
    order: list[str] = Field(default_factory=list)
    """Halves of ABBA blocks as run (A is the baseline), or the variants of each block in their order."""


class ClaimRef(Strict):
    """The claim as it stood when it was tested."""

    id: str
    card: str
    card_sha: str
    statement: str
    kind: str
    metric: str
    expect: model.Expect
    comparison: model.Comparison
    scope: dict[str, Any] = Field(default_factory=dict)
    label: str | None = None
    cpu_scope: str | None = None
    mechanism_of: str | None = None
    """The claim whose mechanism this check tests; set for `W9.m` and its like."""


class Missing(Strict):
    """Why a claim does not apply: what this machine lacks for it."""

    reason: Literal["scope", "package", "profile", "no_case", "kind"]
    detail: str


class Check(Strict):
    """One line of an activation receipt, judged."""

    variant: Variant
    rule: str
    """The rule in words, such as `require all_to_all inside dispatch == 4 * layers (16)`."""
    observed: float | None
    expected: str
    ok: bool
    runs: int = 1
    """Number of launches in which the rule was checked; `ok` if it held in all of them."""


class Condition(Strict):
    """One condition that launches must meet before their figures are compared, and whether they do."""

    name: str
    ok: bool
    detail: str = ""


class Comparison(Strict):
    """The effect of the candidate, with its interval and what it rests on."""

    metric: str
    unit: str
    better: Literal["higher", "lower"]
    design: Literal["launches_abba", "deterministic"]
    scale: Literal["log_ratio", "difference"]
    baseline: float
    """Mean over the baseline's launches, in the metric's unit."""
    candidate: float
    effect: float | None
    """How much better the candidate is: a share of the baseline (0.05 is 5 %), or a difference. None where it has no bound."""
    low: float | None = None
    high: float | None = None
    pairs: int
    look: int | None = None
    """Which look (from 1) the interval belongs to; None between looks."""
    alpha_look: float | None = None
    differences: list[float] = Field(default_factory=list)
    """Per pair, positive where the candidate is better, on `scale`."""
    mean: float | None = None
    deviation: float | None = None
    """Of a pair of launches, by the noise that the design leaves over; before version 3, that of `differences`."""
    floor: float | None = None
    """Deviation of the A/A pairs. Version 2 pools it with `deviation`; version 3 has none."""
    mde: float | None = None
    """Least distance from the margin that this many pairs would settle four times out of five, on `scale`."""
    pairs_needed: int | None = None
    """About how many pairs would settle the claim; None if it is settled or no sensible number would."""


class PointFigure(Strict):
    """One value of a sweep, or one cell of an interaction, as measured."""

    variant: Variant
    outcome: Literal["ok", "oom", "refused"]
    launches: int
    value: float | None = None
    """Mean over its launches, in the metric's unit; None where it did not run."""
    effect: float | None = None
    """How much better than the first that ran: a share or a difference. The rule's contrasts carry the intervals."""


class Contrast(Strict):
    """One comparison among the variants, with an interval that holds together with those of all others."""

    name: str
    """Such as `4 over 2`: how much better 4 is than 2."""
    weights: dict[Variant, float]
    effect: float | None
    """A share of the second (0.05 is 5 %), or a difference; on logarithms a ratio of ratios for an interaction. None without bound."""
    low: float | None = None
    high: float | None = None
    differences: list[float] = Field(default_factory=list)
    """Per block, positive where the first named is better, on `scale`."""
    mean: float | None = None
    deviation: float | None = None
    """Of a block, by the noise that the design leaves over; before version 3, that of `differences`."""
    used: float | None = None
    """The standard deviation behind the interval, whose half-width is t(`freedom`) x used / sqrt(blocks). Scaled to `freedom` where the
    contrast's own has others."""


class Curve(Strict):
    """What a sweep or an interaction found."""

    metric: str
    unit: str
    better: Literal["higher", "lower"]
    design: Literal["launches_blocks", "deterministic"]
    scale: Literal["log_ratio", "difference"]
    points: list[PointFigure]
    contrasts: list[Contrast]
    """Those that the claim's rule asks for; each against the first where there is no claim."""
    blocks: int
    look: int | None = None
    alpha_contrast: float | None = None
    """Error rate of one interval: that of the look, shared among all contrasts of the rule."""
    freedom: int | None = None
    """Degrees of freedom by which `used` counts: launches less variants; before version 3 (variants - 1) x (blocks - 1), and A/A pairs."""
    floor: float | None = None
    """The stored A/A deviation of a difference of two launches; version 3 has none."""
    blocks_needed: int | None = None


class Verdict(Strict):
    """The state of a claim by one record, the reason, and both in a sentence."""

    status: Status
    reason: Reason
    sentence: str


class CaseRef(Strict):
    """The case as it stood when it was run, with a hash of its content."""

    id: str
    sha: str
    content: Case


class Measured(Strict):
    """Everything observed or declared; verdict and figures follow from this alone."""

    claim: ClaimRef | None = None
    case: CaseRef | None = None
    machine: Machine
    profile: str | None = None
    facts: dict[str, Any] = Field(default_factory=dict)
    missing: list[Missing] = Field(default_factory=list)
    plan: Plan | None = None
    strict: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Strict environments by hash; runs refer to them."""
    context: dict[str, Any] = Field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Resolved configurations by hash."""
    runs: list[Run] = Field(default_factory=list)
    failed_before: dict[RunOutcome, int] = Field(default_factory=dict)
    """How launches ended that failed under earlier commands on this series' journal and were launched again; no runs of this one."""
    aa: Baseline | None = None

    @property
    def sharing(self) -> int:
        """How many ranks took turns on the one GPU; 0 where each had its own, or none was used."""
        ranks = max((run.ranks for run in self.runs), default=0)
        return ranks if 0 < self.machine.gpus < ranks else 0


class Derived(Strict):
    """What follows from `Measured`."""

    comparison: Comparison | None = None
    curve: Curve | None = None
    receipts: list[Check] = Field(default_factory=list)
    gates: list[Condition] = Field(default_factory=list)
    """The conditions for a comparison; records and `--json` have them under this name."""
    figures: dict[str, Any] = Field(default_factory=dict)
    """What an arithmetic statement or an invariant computed."""
    verdict: Verdict


class Evidence(Strict):
    """One verdict with everything behind it, written once."""

    schema_version: Literal["evidence/1"] = SCHEMA_VERSION
    evidence_id: str = Field(pattern=r"^[0-9A-HJKMNP-TV-Z]{26}$")
    created: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")
    expires: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    command: str
    """The command line that repeats the measurement."""
    measured: Measured
    derived: Derived
    seconds: Seconds
    """Totals over the series, A/A included."""
    sha256: str = ""
    """Hash of everything else in this record."""

    @property
    def gpu_seconds(self) -> float | None:
        """What the verdict cost: the wall seconds of its launches, burn-ins and A/A included, times the GPUs of each; None where no GPU
        was used or a launch has no time.
        """
        runs = [*self.measured.runs, *(self.measured.aa.runs if self.measured.aa else [])]
        costs = [run.wall_s * min(run.ranks, self.measured.machine.gpus) for run in runs]
        return sum(costs) if costs and all(c > 0 for c in costs) else None

    @property
    def timed_on_gpus(self) -> bool:
        """Whether the verdict is one of launches whose time tells something: of GPUs that no other rank shared. Those are traced."""
        judged = self.derived.verdict.reason in ("margin", "power", "no_claim")
        return judged and bool(self.measured.machine.gpus) and not self.measured.sharing


def canonical(data: Any) -> str:
    """`data` as the one JSON text that is hashed: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(data: Any, length: int = 64) -> str:
    """The first `length` hex digits of the SHA-256 of `data`'s canonical JSON."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:length]


def seal(evidence: Evidence) -> Evidence:
    """The record with its own hash filled in."""
    return evidence.model_copy(update={"sha256": stored_sha(evidence.model_dump(mode="json"))})


def stored_sha(data: Mapping[str, Any]) -> str:
    """The hash of a record as it lies in its file, so that fields which later versions add do not count as alterations."""
    return digest({k: v for k, v in data.items() if k != "sha256"})


def noise_key(run: Run, strict: Mapping[str, Mapping[str, Any]]) -> str:
    """What a stored A/A must share with a series: environment, performance revisions, configuration and ranks.

    The trainer's source hash is left out: a commit that does not move a performance revision does not move the noise either. So is the
    host's memory, which no A/A from before knows.
    """
    env = {k: dict(v) if isinstance(v, Mapping) else v for k, v in strict.get(run.strict_sha, {}).items()}
    for part, left_out in (("trainer", "source_sha"), ("machine", "memory_gib")):
        if isinstance(env.get(part), dict):
            env[part].pop(left_out, None)
    raised = {"revisions": run.raised} if run.raised else {}
    return digest({"env": env, "config": run.config_sha, "ranks": run.ranks, **raised}, 16)


def workload(run: Run, config: Mapping[str, Any]) -> str:
    """What an A/A of another configuration must share with a series in its neighbourhood: environment, ranks, backend, and whether rows
    hold images.

    The environment counts to the last bit, the trainer's source included: such an A/A is minutes old.
    """
    data, model = config.get("data"), config.get("model")
    images = isinstance(data, Mapping) and data.get("kind") == "vqa", isinstance(model, Mapping) and model.get("vision") is not None
    return digest({"env": run.strict_sha, "ranks": run.ranks, "backend": config.get("backend"), "images": images}, 16)


if TYPE_CHECKING:
    import pandas as pd

_SUMS = ("seconds", "useful_tokens", "raw_tokens", "images", "data_seconds", "compile_seconds", "recompiles")


def to_frame(records: Iterable[Evidence], per: Literal["launch", "step"] = "launch") -> pd.DataFrame:
    """One row for each launch of the records, or for each of its steps, in the order in which they ran.

    Shapes: columns that name the record (`evidence`, `claim`, `card`, `case`, `machine`, `gpu`, `gpus`, `profile`, `status`, `created`),
    then those that name the launch (`run_id`, `variant`, `role`, `pair`, `position`, `outcome`, `ranks`, `config_sha`, `strict_sha`). A
    row for a launch goes on with `started`, `wall_s`, `num_parameters`, `timed_steps`, the sums over its timed steps (`timed_seconds`,
    `timed_useful_tokens`, ...), its `peak_memory_bytes`, and one column `metric.NAME` for each figure that the trainer reported. A row
    for a step goes on with the fields of `playbook.records.evidence.Sample`. Launches of a stored A/A that a record cites are not among
    its rows. Units: seconds and bytes; token counts are of all ranks together.
    """
    with tables_wanted():
        import pandas as pd  # a third of a second, which no other command needs

    make = _launch_rows if per == "launch" else _step_rows
    rows = [row for record in records for run in record.measured.runs for row in make(_identity(record, run), run)]
    return pd.DataFrame(rows, columns=None if rows else _columns(per))


_LAUNCH = ("run_id", "variant", "role", "pair", "position", "outcome", "ranks", "config_sha", "strict_sha")


def _identity(record: Evidence, run: Run) -> dict[str, Any]:
    """The columns that name a record and a launch: the same in the launch's row and in those of its steps."""
    measured = record.measured
    return {
        "evidence": record.evidence_id,
        "claim": measured.claim.id if measured.claim else None,
        "card": measured.claim.card if measured.claim else None,
        "case": measured.case.id if measured.case else None,
        "machine": measured.machine.name,
        "gpu": measured.machine.gpu,
        "gpus": measured.machine.gpus,
        "profile": measured.profile,
        "status": record.derived.verdict.status,
        "created": record.created,
        **{name: getattr(run, name) for name in _LAUNCH},
    }


def _launch_rows(identity: dict[str, Any], run: Run) -> Iterator[dict[str, Any]]:
    """The one row of a launch: `identity`, the columns that name record and launch, then its figures and the sums over its timed steps."""
    timed = [s for s in run.samples if s.timed]
    yield {
        **identity,
        "started": run.started,
        "wall_s": run.wall_s,
        "num_parameters": run.num_parameters,
        "timed_steps": len(timed),
        **{f"timed_{name}": sum(getattr(s, name) for s in timed) for name in _SUMS},
        "peak_memory_bytes": max((s.peak_memory_bytes for s in timed), default=None),
        **{f"metric.{name}": value for name, value in run.metrics.items()},
    }


def _step_rows(identity: dict[str, Any], run: Run) -> Iterator[dict[str, Any]]:
    """A row for each step of a launch: `identity`, the columns that name record and launch, then the fields of the step's sample."""
    return ({**identity, **{name: getattr(sample, name) for name in Sample.model_fields}} for sample in run.samples)


def _columns(per: Literal["launch", "step"]) -> list[str]:
    """The columns of a table without rows, so that what selects some of them works on it too."""
    identity = ["evidence", "claim", "card", "case", "machine", "gpu", "gpus", "profile", "status", "created", *_LAUNCH]
    launch = ["started", "wall_s", "num_parameters", "timed_steps", *(f"timed_{name}" for name in _SUMS), "peak_memory_bytes"]
    return identity + (launch if per == "launch" else list(Sample.model_fields))
