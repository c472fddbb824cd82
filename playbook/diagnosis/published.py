"""Published runs nearest to a setting, and the range that they reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from math import log
from typing import Any

from playbook.diagnosis.setting import Measured, Setting
from playbook.errors import ConfigError
from playbook.planner import flops
from playbook.planner.choice.search import Answer
from playbook.planner.choice.space import Question
from playbook.planner.models import named
from playbook.planner.models import published as shape_of
from playbook.planner.options import Options
from playbook.planner.runs.anchor import newest_release_ids
from playbook.planner.runs.assumed import is_adapters, rank
from playbook.planner.runs.predict import Prediction, predict
from playbook.planner.runs.published import cells, link, others, table
from playbook.planner.runs.table import Run
from playbook.planner.shapes import Shape
from playbook.planner.time.cluster import cluster

_SHOWN = 5
_SAME_LENGTH = 2.0
"""Sequences that differ by no more than this factor cost about as much per token."""
_NEAR = 0.05
"""A speed this close to a range lies in it."""
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "mbs", "gbs")
_OPTIONS = ("dispatcher", "recompute", "cuda_graph")
_LIKE = 2.0
"""Models whose work per token differs by no more than this factor are alike."""


@dataclass(frozen=True)
class Row:
    """One published run. Units: tokens per second and GPU; `mfu` is of the precision's peak."""

    id: str
    model: str
    preset: str
    hardware: str
    gpus: int | None
    precision: str
    seq_len: int
    layout: str
    options: tuple[str, ...]
    tokens_per_s_per_gpu: float
    mfu: float
    release: str
    source: str
    link: str
    shape: Shape
    run: Run
    adapters: bool
    """Whether adapters beside frozen weights were trained."""

    @cached_property
    def work(self) -> float:
        """FLOPs of a token."""
        return flops.per_token(self.shape, self.seq_len)

    @cached_property
    def predicted(self) -> float | None:
        """What the planner says of a run that states its batch, where it can: where the batch is a guess, so is the prediction.

        Scaled to the other published runs; those of its configuration do not count.
        """
        prediction = predict(self.run) if self.run.word("mbs") and self.run.word("gbs") else ""
        return others(self.run, prediction) if isinstance(prediction, Prediction) else None

    def other(self, q: Question) -> str:
        """How the run is no run of the question: another GPU, another length."""
        length = "" if _like_length(self, q) else f"{self.seq_len:,} tokens"
        return ", ".join(filter(None, ("" if self.hardware == q.cluster.name else "other GPU", length and f"other length: {length}")))

    def document(self, q: Question) -> dict[str, Any]:
        """The run as plain data."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("shape", "preset", "run", "options", "adapters")}
        return plain | {"predicted": self.predicted, "other": self.other(q), "words": self.words(q)}

    def words(self, q: Question) -> str:
        """The run in one line, beside the question's."""
        predicted, unlike = f" (the planner says {self.predicted:,.0f})" if self.predicted else "", self.other(q)
        return (
            f"{self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{predicted}, {self.seq_len:,} tokens, on {self.gpus or '?'} {self.hardware}"
            f"{f' ({unlike})' if unlike else ''}: {self.layout or 'nothing of its layout is said'} ({self.id})"
        )


@dataclass(frozen=True)
class Published:
    """The rows nearest to a setting, what they share with it, and what they reach; `by` is what compares: `tokens` or `mfu`."""

    rows: tuple[Row, ...]
    shared: str
    by: str
    low: float
    high: float
    count: int

    @property
    def most(self) -> float:
        """Tokens per second and GPU of the fastest; 0 where only MFU compares."""
        return self.high if self.by == "tokens" else 0.0

    @property
    def predicted(self) -> tuple[float, float] | None:
        """The least and the most of what the planner predicts for the shown rows, as a share of what they reach."""
        shares = [r.predicted / r.tokens_per_s_per_gpu for r in self.rows if r.predicted]
        return (min(shares), max(shares)) if shares else None

    def document(self, q: Question) -> dict[str, Any]:
        """The runs and their range as plain data."""
        rows = [r.document(q) for r in self.rows]
        return {"shared": self.shared, "by": self.by, "low": self.low, "high": self.high, "count": self.count, "rows": rows}

    def beside(self, answer: Answer) -> dict[str, Any]:
        """The same with the id of the run that was faster than the answer's first plan is predicted to be, or None."""
        q, best = answer.question, answer.choices[0] if answer.choices else None
        faster = self.ahead(q.gpus, best.speed) if best and q.goal == "tokens/s" else None
        return self.document(q) | {"ahead": faster.id if faster else None}

    def ahead(self, gpus: int, speed: float) -> Row | None:
        """The fastest run on as many GPUs, where it was faster than that many tokens per second and GPU."""
        rows = [r for r in self.rows if self.by == "tokens" and r.gpus == gpus and r.tokens_per_s_per_gpu > speed]
        return max(rows, key=lambda r: r.tokens_per_s_per_gpu, default=None)

    def place(self, speed: Measured) -> int:
        """-1 below the range, 0 in it, 1 above."""
        value = speed.tokens_per_s_per_gpu if self.by == "tokens" else speed.mfu
        return -1 if value < self.low * (1 - _NEAR) else 1 if value > self.high * (1 + _NEAR) else 0


def nearest(where: Setting) -> Published | None:
    """The runs nearest to a setting."""
    return _nearest_to(where.question, where.precision)


def _nearest_to(q: Question, precision: str) -> Published | None:
    """Runs of the same model, GPU and precision at a like sequence, that train the same: adapters, or all weights; else what comes nearest
    to it, of like models the five nearest.

    None where nothing is comparable: on another GPU, or of another model, the work per token must be alike.
    """
    adapters = q.base.options.lora > 0
    rows = [r for r in _rows() if r.precision == precision and r.adapters == adapters]
    of_model = [r for r in rows if r.preset == q.model and r.shape.layers == q.shape.layers]
    on_hardware = [r for r in of_model if r.hardware == q.cluster.name]
    of_length = [r for r in on_hardware if _like_length(r, q)]
    work = flops.per_token(q.shape, q.seq_len)
    alike = [r for r in rows if abs(log(r.work / work)) <= log(_LIKE)]
    of_family = [r for r in of_model if _family(r.hardware) == _family(q.cluster.name) and _like_length(r, q)]
    like_it = "LoRA of " * adapters
    like = [r for r in alike if r.hardware == q.cluster.name and bool(r.shape.experts) == bool(q.shape.experts)]
    model, gpu = q.model, q.cluster.name
    for matching, shared, by in (
        (of_length, f"of {like_it}{model} on {gpu} in {precision}", "tokens"),
        (on_hardware, f"of {like_it}{model} on {gpu} at other sequence lengths", "mfu"),
        (of_family, f"of {like_it}{model} on other boards of {_family(gpu)} in {precision}", "mfu"),
        (like, f"of {like_it}like models on {gpu}", "mfu"),
        ([r for r in alike if r in of_model], f"of {like_it}{model} on other GPUs", "mfu"),
    ):
        if matching:
            near = sorted(matching, key=lambda r: (_far(r, q), -r.mfu))
            counted = near[:_SHOWN] if matching is like else near
            values = [r.tokens_per_s_per_gpu if by == "tokens" else r.mfu for r in counted]
            return Published(tuple(near[:_SHOWN]), shared, by, min(values), max(values), len(counted))
    return None


def of_plan(answer: Answer) -> Published | None:
    """The runs nearest to an answer of the planner, of its model on its GPU, or else on another board of that GPU."""
    q = answer.question
    runs = _nearest_to(q, "fp8" if answer.choices and answer.choices[0].plan.options.fp8 else "bf16")
    return runs if runs and all(r.preset == q.model and _family(r.hardware) == _family(q.cluster.name) for r in runs.rows) else None


def _family(gpu: str) -> str:
    """What boards of one GPU share in their names: `h100` of `h100_pcie`."""
    return gpu.partition("_")[0]


def _like_length(row: Row, q: Question) -> bool:
    return abs(log(row.seq_len / q.seq_len)) <= log(_SAME_LENGTH)


def _far(row: Row, q: Question) -> float:
    """How far a run is from the question: in the GPU's peak, work per token, length and number of GPUs, by logarithms."""
    peak = cluster(row.hardware).bf16_flops_per_s / q.cluster.bf16_flops_per_s
    work = flops.per_token(row.shape, row.seq_len) / flops.per_token(q.shape, q.seq_len)
    return abs(log(peak)) + abs(log(work)) + abs(log(row.seq_len / q.seq_len)) / 2 + abs(log((row.gpus or q.gpus) / q.gpus)) / 2


@cache
def _rows() -> Sequence[Row]:
    """Runs of known models that train all weights from the start, or adapters, and whose speed is known: the newest release of each
    configuration.
    """
    about = cells()
    latest = newest_release_ids(run for run, _ in table())
    by_key: dict[tuple[object, ...], Row] = {}  # one run may stand on several pages of one publisher: that which says most of it counts
    for run, shown in table():
        task, name = run.word("task"), run.word("model")
        if (
            run.id not in latest
            or not shown.ran
            or not (task.startswith("pretrain") or is_adapters(task))
            or "multimodal" in task
            or not named(name)
        ):
            continue
        try:
            machine = cluster(run.word("hardware"))
        except ConfigError:
            continue  # a table may name no GPU that is known here
        shape, seq_len = shape_of(name), run.count("seq_len") or 4096
        precision_cell = run.word("precision").lower()
        precision = "bf16" if precision_cell in ("", "bf16") else "fp8"
        work = flops.trained_per_token(shape, seq_len, Options(lora=rank(run)))
        tokens = shown.tokens_per_s_per_gpu or (shown.tflops_per_gpu or 0.0) * 1e12 / work
        peak = machine.bf16_flops_per_s if precision == "bf16" else machine.fp8_flops_per_s
        if not tokens or about[run.id]["quality"] == "low":
            continue
        degrees, options = (_said(run, keys) for keys in (_DEGREES, _OPTIONS))
        row = Row(
            run.id, name, named(name), machine.name, run.count("gpus"), precision, seq_len, " ".join((*degrees, *options)), options, tokens,
            tokens * work / peak, run.word("release_or_date"), about[run.id]["source"],
            link(run.word("source_group"), about[run.id]["source"]), shape, run, is_adapters(task),
        )  # fmt: skip
        key = (row.preset, row.hardware, row.gpus, precision, seq_len, degrees, round(tokens))
        by_key[key] = max(by_key.get(key, row), row, key=lambda r: len(r.layout))
    return list(by_key.values())


def _said(run: Run, columns: Sequence[str]) -> tuple[str, ...]:
    """What a run sets in these columns, without what is at its default."""
    return tuple(f"{column}={run.word(column).rpartition(':')[2]}" for column in columns if run.word(column) not in ("", "1", "none"))
