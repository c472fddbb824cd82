"""What a run records: one line per step, and a summary at the end."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from playbook import files
from playbook.errors import DataError
from playbook_trainer import revision
from playbook_trainer.axes import Axes
from playbook_trainer.config import automatic
from playbook_trainer.config.automatic import config_sha
from playbook_trainer.config.tree import TrainerConfig, dump
from playbook_trainer.observe import trackers as tracker
from playbook_trainer.observe.ranges import elapsed, moment
from playbook_trainer.observe.totals import FORMULA, Ledger, StepTotals, peak
from playbook_trainer.observe.trackers import Tracker, figures

SHOWN_DATA = 0.05
"""The share of a step that the host spends on data from which the step's line says so;
single steps vary more than whole runs, of which pages and verdicts speak."""


@dataclass(frozen=True)
class StepStats:
    """Figures of one step. Tensors stay on the device, since reading one makes the host wait for it."""

    step: int
    lr: float
    totals: StepTotals[Tensor]
    labels: Tensor
    """Number of labels of all ranks, which the loss is divided by."""
    data_seconds: float
    skipped: bool = False
    """No update was made, since loss or gradient norm are not finite."""


def lengths(began: float, ends: Sequence[float]) -> list[float]:
    """Seconds of each step, from the moment the slowest rank ended the previous step to the moment the slowest rank ended this one.

    So steps add up to the time that passed. The longest of the ranks' own lengths would not: where ranks take turns at being late, each
    step would hold somebody's delay twice. `ends` are the latest over the ranks, in seconds from a common start.
    """
    return [end - start for start, end in itertools.pairwise([began, *ends])]


@dataclass
class Recorder:
    """Measures step times without synchronising the device, and writes one line of metrics.jsonl per step, every `log_every` steps."""

    config: TrainerConfig
    axes: Axes
    device: torch.device
    first_step: int = 0
    nan: bool = False
    """Whether an update was made from something that is not finite."""
    nan_steps: int = 0
    skipped_steps: int = 0
    out: Path | None = None
    began: float = field(default_factory=time.time)
    phases: dict[str, float] = field(default_factory=dict)
    pending: list[tuple[StepStats, Any, dict[str, float]]] = field(default_factory=list)
    evals: dict[int, float] = field(default_factory=dict)
    timed_compile: Counter[str] = field(default_factory=Counter)
    timed_seconds: float = 0.0
    timed_steps: int = 0
    peak_memory: tuple[int, int] = (0, 0)
    """Bytes allocated and reserved; of the rank that has the largest."""
    model_flops: Counter[str] = field(default_factory=Counter)
    """Of the timed steps, by class, over all ranks."""
    hardware_flops: Counter[str] = field(default_factory=Counter)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Comparisons of the ranks' own times, by step."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """How often each expert of each layer was chosen, by step; of those that are not written yet."""
    waits: list[float] = field(default_factory=list)
    """Seconds that each save after the warm-up has kept training waiting, on this rank."""
    saves: Counter[str] = field(default_factory=lambda: Counter(checkpoints=0, checkpoints_in_background=0, checkpoints_behind_another=0))
    """Checkpoints of the whole run."""
    trackers: list[Tracker] = field(default_factory=list)
    _own_s: float = 0.0
    """Seconds of this rank since all began to count."""
    _latest_s: float = 0.0
    """The same of the rank that was last to end the step before."""

    def __post_init__(self) -> None:
        """Start the clocks; rank 0 also clears the output folder of an earlier run, and starts the trackers."""
        self.ledger, self.peak = Ledger(self.config), peak(self.device)
        self.phases["start_up"] = self.began - _process_start()
        self._restart()
        self._compiled = compile_counters()
        self._timed = False
        if self.axes.world.rank == 0:
            self.out = Path(self.config.output)
            with writing(self.out):
                self.out.mkdir(parents=True, exist_ok=True)
                if not self.first_step and (aside := _set_aside(self.out)):
                    self.say(f"output {self.out} held the files of an earlier run; they are in {aside} now")
                (self.out / "summary.json").unlink(missing_ok=True)  # of this run until it was stopped, and it may crash now
                _keep_until(self.out / "metrics.jsonl", self.first_step)
                (self.out / "config.yaml").write_text(yaml.safe_dump(dump(self.config), sort_keys=False), encoding="utf-8")
            self.trackers = tracker.start(self.config, self.out)

    def begin_timed(self) -> None:
        """End the warm-up: steps from here on are timed."""
        self.flush()
        self._timed = not self.config.profile.traced
        self.phases["warm_up"] = time.time() - self.began
        self._restart()

    def add(self, stats: StepStats, *, flush: bool = True) -> None:
        """Record a step that the host has issued; the device may still be running it.
        Every `log_every` steps, wait and write, unless not to `flush`.
        """
        counters = compile_counters()
        compiled = {k: counters[k] - self._compiled[k] for k in counters}
        self._compiled = counters
        self.pending.append((stats, moment(self.device.type == "cuda"), compiled))
        if flush and stats.step % self.config.train.log_every == 0:
            self.flush()

    def note_eval(self, step: int, loss: float) -> None:
        """Record the mean loss per label of an evaluation, in the line of its step too. Its time counts for no step."""
        self.evals[step] = loss
        self.flush()
        self.say(f"step {step}  eval loss {loss:.4f}{' (its rows have no label, or it is not finite)' if math.isnan(loss) else ''}")
        self._restart()

    def note_save(self, seconds: float, *, in_background: bool, behind_another: bool) -> None:
        """Record a checkpoint that training has waited `seconds` for; it may be written in the background,
        and may have waited for the one before.
        """
        self.saves.update(checkpoints=1, checkpoints_in_background=int(in_background), checkpoints_behind_another=int(behind_another))
        if self._timed:
            self.waits.append(seconds)

    def pause(self) -> None:
        """Write what is pending, and leave the time since the last step out of all steps."""
        self.flush()
        self._restart()

    def flush(self) -> None:
        """Wait for the device, then write the lines of all pending steps."""
        if not self.pending:
            return
        steps = [stats.totals.read() for stats, _, _ in self.pending]
        rows = [self._row(totals, *entry) for totals, entry in zip(steps, self.pending, strict=True)]
        own_ends = list(itertools.accumulate((r["seconds"] for r in rows), initial=self._own_s))[1:]
        maxima = torch.tensor([*own_ends, *map(float, peak_memory(self.device))], dtype=torch.float64, device=self.device)
        self.axes.world.all_reduce(maxima, dist.ReduceOp.MAX)
        *latest, allocated, reserved = maxima.tolist()
        self.peak_memory = int(allocated), int(reserved)
        lasted = lengths(self._latest_s, latest)
        self._own_s, self._latest_s = own_ends[-1], latest[-1]
        for row, step, seconds in zip(rows, steps, lasted, strict=True):
            row["seconds"], row["peak_memory_bytes"] = seconds, int(allocated)
            row["mfu"] = self.utilisation(row["flops"], seconds)
            self.nan = self.nan or ("nan" in row and "skipped" not in row)
            self.nan_steps += "nan" in row
            self.skipped_steps += "skipped" in row
            if row["timed"]:
                self.timed_seconds += seconds
                self.timed_steps += 1
                self.model_flops.update(self.ledger.model(step))
                self.hardware_flops.update(self.ledger.hardware(step))
                self.timed_compile.update({k: row[k] for k in ("recompiles", "compile_seconds")})
        if self.out is not None:
            with writing(self.out), (self.out / "metrics.jsonl").open("a", encoding="utf-8") as f:
                f.writelines(json.dumps(r) + "\n" for r in rows)
        for row in rows:
            for each in self.trackers:
                each.log(row["step"], figures(row))
        self.say(self._line(rows[-1]))
        if self.device.type == "cuda":
            self._mark = self.pending[-1][1]  # the device's clock runs on while the host writes
        else:
            self._restart()
        self.pending.clear()

    def _row(self, totals: StepTotals[float], stats: StepStats, end: Any, compiled: dict[str, float]) -> dict[str, Any]:
        """The line of metrics of one step, before its seconds are those of the slowest rank."""
        loss, norm = totals.loss / max(1.0, stats.labels.item()), totals.grad_norm
        bad = not (math.isfinite(loss) and math.isfinite(norm))
        seconds, self._mark = elapsed(self._mark, end), end
        return {
            "step": stats.step,
            "timed": self._timed,
            "loss": _finite(loss),
            "grad_norm": _finite(norm),
            **({"nan": True} if bad else {}),
            **({"skipped": True} if stats.skipped else {}),
            **({"eval_loss": _finite(self.evals[stats.step])} if stats.step in self.evals else {}),
            **({"ranks": self.ranks[stats.step]} if stats.step in self.ranks else {}),
            **({"expert_load": spread(self.loads.pop(stats.step).cpu())} if stats.step in self.loads else {}),
            "lr": stats.lr,
            "seconds": seconds,
            "useful_tokens": int(totals.useful_tokens),
            "raw_tokens": int(totals.raw_tokens),
            "images": int(totals.images),
            "flops": int(sum(self.ledger.model(totals).values())),
            "data_seconds": stats.data_seconds,
            **compiled,
        }

    def _restart(self) -> None:
        """All ranks, which have just met or are about to begin, count from here."""
        self._mark = moment(self.device.type == "cuda")
        self._own_s = self._latest_s = 0.0

    def _line(self, row: dict[str, Any]) -> str:
        rate = 1 / max(row["seconds"], 1e-9) / self.axes.world.size
        loss = "nan" if row["loss"] is None else f"{row['loss']:.4f}"
        norm = "nan" if row["grad_norm"] is None else f"{row['grad_norm']:.3f}"
        images = f"  images {row['images'] / row['seconds']:.1f}/s" if row["images"] else ""
        share = row["data_seconds"] / max(row["seconds"], 1e-9)
        data = f"  data {share:.0%}" if share >= SHOWN_DATA else ""
        return (
            f"step {row['step']}  loss {loss}  gnorm {norm}  {1000 * row['seconds']:.0f} ms  useful {row['useful_tokens'] * rate:,.0f} "
            f"tok/s/rank  raw {row['raw_tokens'] * rate:,.0f}{images}{data}  mem {row['peak_memory_bytes'] / 2**30:.1f} GiB"
        )

    def utilisation(self, flops: float, seconds: float) -> float | None:
        """`flops` per `seconds` as a share of the peak of all ranks (0 to 1); None where no peak is known."""
        return flops / seconds / self.axes.world.size / self.peak.flops_per_s if self.peak and seconds > 0 else None

    def flops(self) -> dict[str, Any]:
        """FLOPs of the timed steps: per step by class of operation, and as shares of the peak (mfu, hfu)."""
        steps = max(1, self.timed_steps)
        return {
            "formula": FORMULA,
            "peak": {"name": self.peak.name, "flops_per_s": self.peak.flops_per_s} if self.peak else None,
            "flops_per_step": {name: total / steps for name, total in self.model_flops.items()},
            "hardware_flops_per_step": {name: total / steps for name, total in self.hardware_flops.items()},
            "mfu": self.utilisation(self.model_flops.total(), self.timed_seconds),
            "hfu": self.utilisation(self.hardware_flops.total(), self.timed_seconds),
        }

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.out is not None:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A block in which a failure to write the run's files becomes one message.

    Raises:
        DataError: the disk is full, or the folder has gone or takes no files.
    """
    try:
        yield
    except OSError as e:
        raise DataError(
            f"output {folder} cannot be written: {e.strerror or e}; mend that, or choose another folder: the same command goes on from the "
            "newest checkpoint, if checkpoint.dir is set"
        ) from e


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _set_aside(out: Path) -> Path | None:
    """Move the files of an earlier run into a folder of their own, the first that is free; None where there are none."""
    earlier = [out / name for name in ("metrics.jsonl", "summary.json", "config.yaml", "trace.json") if (out / name).is_file()]
    if not {"metrics.jsonl", "summary.json"} & {p.name for p in earlier}:
        return None
    folder = next(f for n in itertools.count(1) if not (f := out / f"earlier-{n}").exists())
    folder.mkdir()
    for path in earlier:
        path.rename(folder / path.name)
    return folder


def _step_of(line: str, place: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise DataError(
            f"{place}: no line of a run's metrics ({line[:60].strip()!r}); take it out, or choose another output: the run goes on from its "
            "checkpoint"
        ) from e


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`: a resumed run does them again.

    Raises:
        DataError: a line is of something else.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if step and path.is_file() else []
    # A killed run may have left half a line at the end, a machine that lost power anything.
    whole = [line for line in lines if line.endswith("\n")]
    # Under another name first: a full disk, or an end in between, must not take what it held.
    lines_kept = [line for n, line in enumerate(whole, start=1) if _step_of(line, f"{path}:{n}") <= step]
    files.replace(path, "".join(lines_kept))


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Peak bytes: allocated and reserved on the GPU; on the CPU both are what was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,) * 2


def compile_counters() -> dict[str, float]:
    """Graphs compiled so far, and the seconds that took; zeros where torch.compile was never loaded."""
    if "torch._dynamo" not in sys.modules:
        return {"recompiles": 0, "compile_seconds": 0.0}
    from torch._dynamo.utils import calculate_time_spent, counters

    return {"recompiles": counters["stats"]["unique_graphs"], "compile_seconds": calculate_time_spent().get("total_wall_time", 0.0)}


def _process_start() -> float:
    """When this process began, seconds since the epoch; now, where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])
        up = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


@cache
def source_sha() -> str:
    """A hash of the trainer's sources: two runs of one series must have run the same code."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """Versions and device names that only a rank can read, for the run's fingerprint."""
    cuda = device.type == "cuda"
    strict: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "device_name": torch.cuda.get_device_name(device) if cuda else "cpu",
        "collectives": "none" if world == 1 else ("nccl" if cuda else "gloo"),
        "threads": torch.get_num_threads(),
    }
    return {"strict": strict, "context": {"host_os": platform.platform()}}


def write_summary(
    config: TrainerConfig,
    axes: Axes,
    recorder: Recorder,
    parameters: tuple[int, int],
    extra: dict[str, Any],
    outcome: str,
    data_sha: str,
) -> None:
    """Write summary.json, atomically and last: its presence says that the run came to its end."""
    assert recorder.out is not None
    rows = [json.loads(line) for line in (recorder.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [r for r in rows if r["timed"] and r["step"] > recorder.first_step]
    compiled = recorder.timed_compile
    allocated, reserved = recorder.peak_memory if any(recorder.peak_memory) else peak_memory(recorder.device)
    metrics = {
        **extra.get("metrics", {}),
        "nan_steps": recorder.nan_steps,
        "skipped_steps": recorder.skipped_steps,
        "peak_memory_bytes": allocated,
        "peak_reserved_bytes": reserved,
        **({"checkpoint_seconds": statistics.fmean(recorder.waits)} if recorder.waits else {}),
        "recompiles": int(compiled["recompiles"]),
        "recompiles_per_step": compiled["recompiles"] / len(timed) if timed else 0.0,
        "compile_time_share": compiled["compile_seconds"] / recorder.timed_seconds if recorder.timed_seconds else 0.0,
    }
    flops = recorder.flops()
    metrics |= {name: flops[name] for name in ("mfu", "hfu") if flops[name] is not None}
    if config.model.vision is not None and (total := recorder.model_flops.total()):
        metrics["flops_vision_share"] = (recorder.model_flops["vision"] + recorder.model_flops["projector"]) / total
    receipt = extra.get("receipt", {"numbers": {}, "ranges": {}, "collectives": [], "counters": {}})
    now = time.time()
    summary = {
        "schema": "summary/1",
        "outcome": outcome,
        "world_size": axes.world.size,
        "backend": config.backend,
        "device": recorder.device.type,
        "config_sha": config_sha(
            config,
            automatic.here(torch.cuda.get_device_name(recorder.device) if recorder.device.type == "cuda" else None, axes.world.size),
        ),
        "source_sha": source_sha(),
        "performance_revision": revision.PATHS[config.backend].revision,
        "revisions": revision.beside_backend(dump(config), axes.world.size),
        "data_sha": data_sha,
        "parameters_of": "model",
        "num_parameters": parameters[0],
        "trained_parameters": parameters[1],
        "seconds": {
            "start_up": recorder.phases["start_up"],
            "warm_up": recorder.phases.get("warm_up", 0.0),
            "timed": recorder.timed_seconds,
            "receipt": recorder.phases.get("receipt", 0.0),
            "total": now - recorder.began + recorder.phases["start_up"],
        },
        "window": {"first": timed[0]["step"], "last": timed[-1]["step"]} if timed else None,
        "eval": [{"step": s, "loss": _finite(v)} for s, v in recorder.evals.items()],
        "data": extra.get("data", {}),
        "metrics": metrics,
        "flops": flops,
        "stragglers": stragglers(recorder.ranks),
        "receipt": {
            **receipt,
            "counters": {
                **receipt["counters"],
                **recorder.saves,
                "recompiles": metrics["recompiles"],
                "graphs_compiled": int(compile_counters()["recompiles"]),
            },
        },
        "env": environment(recorder.device, axes.world.size),
    }
    with writing(recorder.out):
        files.replace(recorder.out / "summary.json", json.dumps(summary, indent=1))
    for each in recorder.trackers:
        each.close(figures(metrics))


def stragglers(ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
    """How often each rank was the slowest, and the largest ratio of the slowest rank's time to the median; None without comparisons."""
    if not ranks:
        return None
    slowest = Counter(str(times["slowest"]) for times in ranks.values())
    worst = max(times["max"] / times["median"] if times["median"] else 1.0 for times in ranks.values())
    return {"samples": len(ranks), "slowest": dict(slowest.most_common()), "max_over_median": worst}


def spread(load_LE: Tensor) -> dict[str, float]:
    """How uneven the choices of a step are: the largest load over the mean, the least entropy as a share of that of an even load,
    experts without a token.

    `ep2`, `ep4` and so on are the fullest rank's load over the mean on so many ranks, the mean of all layers:
    at each layer all wait for the fullest.
    """
    share_LE = load_LE.double() / load_LE.sum(1, keepdim=True).clamp(min=1)
    experts, used = load_LE.shape[1], (load_LE.sum(1) > 0).sum().clamp(min=1)
    entropy_L = torch.special.entr(share_LE).sum(1) / torch.tensor(float(experts)).log()
    degrees = [n for n in range(2, experts + 1) if experts % n == 0]
    return {
        "max_over_mean": float(share_LE.max()) * experts,
        "entropy": float(entropy_L.min()),
        "idle": float((load_LE == 0).sum()),
        **{f"ep{n}": float(share_LE.unflatten(1, (n, -1)).sum(2).amax(1).sum() / used) * n for n in degrees},
    }
