"""The training loop: set up, step, record, observe one more step, summarise."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from playbook.errors import ConfigError, PlaybookError
from playbook_trainer.axes import Axes
from playbook_trainer.checkpoint_files import Best
from playbook_trainer.config import automatic, checks
from playbook_trainer.config.tree import DataConfig, TrainerConfig
from playbook_trainer.data.batch import Batch
from playbook_trainer.data.loader import Loader, build_loader, data_sha, merge_states, worker_death
from playbook_trainer.engine import Engine
from playbook_trainer.join import meet
from playbook_trainer.observe import receipt
from playbook_trainer.observe.metrics import Recorder, StepStats, write_summary
from playbook_trainer.observe.ranges import KinetoSink, NvtxSink, listening, range_
from playbook_trainer.observe.receipt import Observer, observing
from playbook_trainer.observe.totals import StepTotals, counts
from playbook_trainer.observe.watchdog import Busy, Watchdog, compare, own_ranges
from playbook_trainer.torch import optimizer
from playbook_trainer.torch.engine import TorchEngine

# Ending a run on request: a signal to any rank makes all ranks save and leave after one and the same step.

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill; Slurm's `--signal=USR1@300` sends the second five minutes ahead."""


class StopRequest:
    """Records that a signal asked this rank to stop, and finds out whether any rank was asked."""

    def __init__(self) -> None:
        self.asked = False
        self._copies: list[tuple[Tensor, Any]] = []

    def listen(self) -> None:
        """Handle SIGNALS from now on; a second signal has its usual effect.
        Data workers that start later inherit the handler, so they survive the first signal too.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                signal.signal(signum, self._ask)

    def agreed(self, flag: Tensor) -> bool:
        """Whether `flag`, summed over the ranks in this step, says that one of them was asked; every rank gets the same answer.

        On a GPU the answer is that of the step before, whose copy has arrived: the host need not wait for what it has just issued.
        """
        if not flag.is_cuda:
            return bool(flag.item())
        copy, event = torch.empty(1, dtype=flag.dtype, pin_memory=True), torch.cuda.Event()
        copy.copy_(flag.view(1), non_blocking=True)
        event.record()
        self._copies.append((copy, event))
        if len(self._copies) < 2:
            return False
        copy, event = self._copies.pop(0)
        event.synchronize()
        return bool(copy.item())

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signum, signal.SIG_DFL)


_COLLECT_EVERY = 10
"""Steps between collections of garbage, on all ranks at once, since one that collects makes all wait.
Recomputation leaves cycles of 0.2 MB a step."""
_MAX_SKIPPED = 10
"""Steps in a row without an update, after which the run ends: it would not recover."""


@dataclass
class Trainer:
    """The state of a training run on this rank."""

    config: TrainerConfig
    device: torch.device
    engine: Engine
    loader: Loader
    batches: Iterator[list[Batch]]
    watchdog: Watchdog
    stop: StopRequest = field(default_factory=StopRequest)
    step: int = 0
    held_out: Loader | None = None
    """The loader of evaluations, made for the first one."""
    best: Best | None = None
    """The evaluation with the lowest loss, with `checkpoint.keep_best`."""

    @property
    def axes(self) -> Axes:
        """The parallel axes of this rank."""
        return self.engine.axes


def train(config: TrainerConfig, rank: int, world: int) -> str:
    """Train on this rank from set-up to summary. Returns "ok", "nan" (the run ended on values that are not finite) or "stopped" (by a
    signal).
    """
    # Device and process group, then what `auto` stands for on it, then the model, then the newest checkpoint,
    # then the data from where that stands.
    device = start(config, rank, world)
    target = automatic.here(torch.cuda.get_device_name(device) if device.type == "cuda" else None, world)
    settings_note, config = automatic.told(config, target), automatic.resolved(config, target)
    _prepare_compiler(config)
    engine = _make_engine(config, rank, world, device)
    axes = engine.axes
    resumed = engine.saver.restore()
    loader = build_loader(config, dp_rank=axes.dp.rank, dp_size=axes.dp.size, state=resumed.data if resumed else None)
    trainer = Trainer(config, device, engine, loader, iter(loader), Watchdog(config.train.hang_timeout_s, rank))
    if resumed:
        trainer.step, trainer.best = resumed.step, resumed.best
    if config.checkpoint.dir:
        trainer.stop.listen()

    # From here rank 0 writes; what the user should know is said before the first step.
    recorder = Recorder(config, axes, device, first_step=trainer.step)
    for line in filter(None, (settings_note, *_opening(trainer, resumed=resumed is not None))):
        recorder.say(line)

    # All steps; a checkpoint that is being written is waited for, however they end.
    try:
        outcome = run_steps(trainer, recorder)
        engine.saver.wait()
    except (PlaybookError, RuntimeError, MemoryError) as e:
        # The rank leaves at once after these, and a checkpoint that is being written would be lost with it.
        with suppress(PlaybookError):
            engine.saver.wait()
        if died := worker_death(e):
            raise died from e
        raise
    finally:
        trainer.watchdog.close()

    # After the clock has stopped: exported weights, one observed step for the receipt, and the summary, which comes last.
    if outcome == "ok" and config.checkpoint.export:
        engine.export(Path(config.checkpoint.export))
    extra: dict[str, Any] = {}
    if outcome == "ok" and config.train.receipt and not config.profile.traced:
        began = time.perf_counter()
        extra = _observe_step(trainer)
        recorder.phases["receipt"] = time.perf_counter() - began
    extra["data"] = _data_counters(trainer)
    for line in _left_out(extra["data"], config.data):
        recorder.say(line)
    counts = engine.count_parameters()
    if rank == 0:
        write_summary(config, axes, recorder, counts, extra, outcome, data_sha(config))
    return outcome


def _opening(trainer: Trainer, *, resumed: bool) -> Iterator[str]:
    """What the user should know before the first step."""
    config, train = trainer.config, trainer.config.train
    if config.checkpoint.every and not config.checkpoint.dir:
        yield f"checkpoint.every {config.checkpoint.every} saves nothing, since checkpoint.dir is not set"
    yield from checks.notes(config)
    if train.epochs is not None:
        yield f"train.epochs {train.epochs:g} comes to {train.steps} steps of {train.global_batch_size} rows"
    if resumed:
        hint = "" if trainer.step < last_step(trainer) else "; nothing is left to do, raise train.steps to go on"
        yield f"resumed after step {trainer.step} of {train.steps}{hint}"
    if config.profile.traced:
        yield (
            f"a run to be traced: it ends after step {last_step(trainer)}, whatever train.steps says; "
            "leave out the section profile to train on"
        )


def _make_engine(config: TrainerConfig, rank: int, world: int, device: torch.device) -> Engine:
    """The backend that the configuration names, with its model built and its weights initialised."""
    if config.backend == "megatron":
        from playbook_trainer.megatron.engine import MegatronEngine

        return MegatronEngine(config, rank, world, device)
    return TorchEngine(config, rank, world, device)


def start(config: TrainerConfig, rank: int, world: int) -> torch.device:
    """Set up the process group and the modes of torch. Returns the device of this rank.

    Raises:
        ConfigError: this machine has no GPU for this rank.
    """
    cuda = config.train.device == "cuda" or (config.train.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        num_gpus = torch.cuda.device_count()
        if device.index >= num_gpus:
            raise ConfigError(
                f"local rank {device.index} needs a GPU of its own, and this machine has {num_gpus}; start fewer ranks on it, or set "
                "train.device: cpu"
            )
        torch.cuda.set_device(device)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # 32-bit runs are references: no reduced-precision shortcuts inside them.
    torch.backends.cuda.matmul.allow_tf32 = False
    if dist.is_initialized():
        return device
    if world > 1:
        # With a device every group gets its communicator at once; megatron-core makes one for each purpose, most of which never send, and
        # Megatron-LM names no device either.
        at_once = cuda and config.backend == "torch"
        store = meet(rank, world)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, device_id=device if at_once else None)
    elif config.train.dtype == "bf16" or config.offload.optimizer or config.backend == "megatron":
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def _prepare_compiler(config: TrainerConfig) -> None:
    """Past its limit dynamo falls back to eager in silence; recompiling for ever is slow, but it is visible."""
    regions = config.train.compile
    if any((regions.vision, regions.decoder, regions.loss)) or config.precision.fp8 != "none":
        from torch._dynamo import config as dynamo

        dynamo.recompile_limit = 1_000_000
        dynamo.accumulated_recompile_limit = 1_000_000


def run_steps(trainer: Trainer, recorder: Recorder) -> str:
    """Train until the last step, the first NaN, or the signal to stop. Returns "ok", "nan" or "stopped", as `train`."""
    config = trainer.config
    # A process that goes on from a checkpoint is as cold as one that begins.
    warm, last = trainer.step + config.train.warmup_steps, last_step(trainer)
    skipped = 0
    _freeze()
    gc.disable()  # ranks would collect one after the other, and the others wait for each
    try:
        with trainer.engine.ranges() if config.profile.traced else nullcontext(), _annotated(config, recorder.out) as trace:
            while trainer.step < last:
                if trainer.step == warm:
                    _freeze()  # what was compiled stays
                    trace.begin()
                    recorder.begin_timed()
                stats = _measured_step(trainer, recorder)
                evaluates = config.eval.every > 0 and trainer.step % config.eval.every == 0
                recorder.add(stats, flush=not evaluates)
                if evaluates:
                    loss = _evaluate(trainer)
                    recorder.note_eval(trainer.step, loss)
                    _keep_best(trainer, recorder, loss)
                _name_left_out(trainer)
                if trainer.step % _COLLECT_EVERY == 0:
                    gc.collect()
                skipped = skipped + 1 if stats.skipped else 0
                if (recorder.nan and config.train.on_nan == "stop") or skipped == _MAX_SKIPPED:
                    recorder.flush()
                    return "nan"
                _periodically(trainer, recorder)
                trainer.watchdog.alive(trainer.step)
                if config.checkpoint.dir and trainer.step < last and trainer.stop.agreed(stats.totals.stop_requested):
                    save(trainer, recorder)
                    return "nan" if recorder.nan else "stopped"  # what is not finite was not saved, so there is nothing to go on from
            trace.end()
            recorder.flush()
        return "nan" if recorder.nan else "ok"
    finally:
        trainer.watchdog.rest()  # a checkpoint may still be being written
        gc.enable()
        gc.unfreeze()


def _freeze() -> None:
    """Collect all garbage, then leave what is alive out of later collections, which then take a millisecond."""
    gc.collect()
    gc.freeze()


def last_step(trainer: Trainer) -> int:
    """Number of the last step. Call it before the first step of the run: in a traced run it counts from where the trainer stands."""
    config = trainer.config
    return trainer.step + config.train.warmup_steps + config.profile.steps if config.profile.traced else config.train.steps


def train_step(trainer: Trainer, before_update: Callable[[], None] | None = None) -> StepStats:
    """Run one optimizer step over the global batch. `before_update` is called once all gradients are complete."""
    config, engine, axes = trainer.config, trainer.engine, trainer.axes
    with range_("step"):
        began = time.perf_counter()
        with range_("data"):
            on_cpu = next(trainer.batches)
            batches = engine.local(on_cpu)
        data_seconds = time.perf_counter() - began
        # `full` fills on the device. A copy from the host would make the host wait for the step before.
        labels = torch.full((), float(sum(b.num_loss for b in on_cpu)), device=trainer.device)
        axes.dp.all_reduce(labels)
        labels.clamp_(min=1.0)  # a step whose images are all bad has no labels; its gradient is then zero, not 0 / 0
        loss = engine.forward_backward(batches, labels)
        with range_("optimizer"):
            totals = _sum_over_ranks(trainer, on_cpu, loss)
            rate = optimizer.learning_rate(trainer.step, config.train.steps, config.optimizer)
            if before_update is not None:
                before_update()
            skipped = config.train.on_nan == "skip" and not totals.is_finite()
            if skipped:
                engine.drop_gradients()
            else:
                engine.update(rate, totals.grad_norm)
    trainer.step += 1
    return StepStats(trainer.step, rate, totals, labels, data_seconds, skipped)


def _measured_step(trainer: Trainer, recorder: Recorder) -> StepStats:
    """Run one step, and record what is measured in every so many steps: the time of each rank's own work, and the load of the experts."""

    def due(every: int) -> bool:
        return every > 0 and (trainer.step + 1) % every == 0

    engine, device, loads = trainer.engine, trainer.device, due(trainer.config.moe.load_every)
    busy = Busy(own_ranges(trainer.config.parallel), device) if due(trainer.config.train.straggler_every) else None
    load_counts: list[Tensor] = []
    if loads:
        engine.count_load(True)
    with ExitStack() as stack:
        if busy is not None:
            stack.enter_context(engine.ranges())
            stack.enter_context(listening(busy))
        # The update begins to count anew.
        stats = train_step(trainer, (lambda: load_counts.append(engine.load())) if loads else None)
    if busy is not None:
        recorder.ranks[stats.step] = compare(busy.seconds(), trainer.axes, device)
    if loads:
        engine.count_load(False)
        trainer.axes.world.all_reduce(load_counts[0])
        recorder.loads[stats.step] = load_counts[0]
    return stats


def _sum_over_ranks(trainer: Trainer, batches: list[Batch], loss: Tensor) -> StepTotals[Tensor]:
    """The step's totals over all ranks, by one all-reduce. `batches` are those before the split over ranks, `loss` is this rank's sum."""
    axes = trainer.axes
    # Tensor-parallel ranks compute one loss; of the ranks that share a micro-batch one counts its tokens.
    counted = counts(batches) if axes.tp.rank == 0 and axes.cp.rank == 0 and axes.is_last_stage else {}
    own_totals = StepTotals(
        squared_grad_norm=trainer.engine.squared_norm(),
        loss=loss if axes.tp.rank == 0 else 0.0,
        stop_requested=float(trainer.stop.asked),
        **counted,
    )
    packed = own_totals.pack(trainer.device)
    axes.world.all_reduce(packed)
    return StepTotals.unpack(packed)


def _periodically(trainer: Trainer, recorder: Recorder) -> None:
    config, step = trainer.config, trainer.step
    saves = config.checkpoint.every and config.checkpoint.dir
    if saves and (step % config.checkpoint.every == 0 or step == config.train.steps):
        save(trainer, recorder)


def _evaluate(trainer: Trainer) -> float:
    """Mean loss per label over `eval.batches` global batches of held-out samples; NaN, not 0, where no row has a label.

    Each evaluation sees the same batches, and holds one of them at a time.
    """
    config, engine, axes = trainer.config, trainer.engine, trainer.axes
    if trainer.held_out is None:
        trainer.held_out = build_loader(config, dp_rank=axes.dp.rank, dp_size=axes.dp.size, split="eval")
    sums = torch.zeros(2, device=trainer.device, dtype=torch.float64)
    for _, batches in zip(range(config.eval.batches), trainer.held_out, strict=False):
        sums += engine.evaluate(engine.local(batches))
    axes.world.all_reduce(sums)
    loss, labels = sums.tolist()
    return float(loss / labels) if labels else math.nan


def _keep_best(trainer: Trainer, recorder: Recorder, loss: float) -> None:
    """Save after an evaluation whose loss, the same on all ranks, is below all before it."""
    if trainer.config.checkpoint.keep_best and (math.isfinite(loss) if trainer.best is None else loss < trainer.best.loss):
        before, trainer.best = trainer.best, Best(step=trainer.step, loss=loss)
        save(trainer, recorder)
        if trainer.engine.saver.latest != trainer.step:
            trainer.best = before  # a state that is not finite was not saved


def save(trainer: Trainer, recorder: Recorder) -> None:
    """Save a checkpoint after this step, unless there is one already. Saving counts for no step's time."""
    if trainer.engine.saver.latest == trainer.step:
        return
    recorder.flush()
    # However long files take to write, that is no hang; ranks that wait for one that is gone have the limits of their process groups.
    trainer.watchdog.rest()
    saver, began = trainer.engine.saver, time.perf_counter()
    behind = saver.behind
    if bad := saver.save(trainer.step, _data_state(trainer), trainer.best):
        recorder.say(f"step {trainer.step}  {bad} is not finite: no checkpoint")
    else:
        recorder.note_save(time.perf_counter() - began, in_background=saver.writing, behind_another=behind)
    recorder.pause()


def _data_state(trainer: Trainer) -> dict[str, Any]:
    """Where the data stream stands, for all data-parallel ranks: each knows its own lanes, and any layout may resume."""
    return merge_states(trainer.axes.dp.gathered(trainer.loader.state()))


def _name_left_out(trainer: Trainer) -> None:
    """Name samples that were left out, on one of the ranks that read them."""
    axes = trainer.axes
    for line in trainer.loader.take_news():
        if axes.tp.rank == axes.cp.rank == axes.pp.rank == 0:
            sys.stderr.write(f"rank {axes.world.rank}: {line}\n")


def _left_out(counters: Mapping[str, int], data: DataConfig) -> list[str]:
    """A line for each reason for which samples were left out."""
    reasons = {
        "samples_dropped": f"too long (data.on_long_sample: {data.on_long_sample})",
        "samples_bad": f"bad (data.on_bad_sample: {data.on_bad_sample})",
    }
    return [f"samples left out since they are {why}: {counters[name]}" for name, why in reasons.items() if counters[name]]


def _data_counters(trainer: Trainer) -> dict[str, int]:
    """What the loaders of all data-parallel ranks have counted."""
    counters = trainer.loader.counters()
    counts = torch.tensor(list(counters.values()), device=trainer.device)
    trainer.axes.dp.all_reduce(counts)
    return dict(zip(counters, counts.tolist(), strict=True))


def _observe_step(trainer: Trainer) -> dict[str, Any]:
    """Run one more step after the timed ones, under observation. Returns the activation receipt,
    bytes of saved activations and bytes of state.
    """
    config, engine, axes = trainer.config, trainer.engine, trainer.axes
    observer = Observer(engine.model, axes.group_names())
    state_bytes: dict[str, int] = {}
    before = trainer.loader.counters()
    with engine.ranges(), observing(observer):
        # Gradients exist only between the backward pass and the update.
        stats = train_step(trainer, lambda: state_bytes.update(engine.state_bytes()))
    counters: dict[str, float] = {name: count - before[name] for name, count in trainer.loader.counters().items()}
    if trainer.device.type == "cuda":
        # A step of its own: under observation the host is too slow for the GPU's timeline to mean anything.
        with receipt.watching_kernels() if axes.world.rank == 0 else nullcontext() as kernels:
            train_step(trainer)
        if kernels is not None:
            observer.kernels, counters = kernels.names, counters | kernels.counters
        counters["expandable_segments"] = sum(bool(s.get("is_expandable")) for s in torch.cuda.memory_snapshot())
    highest = {**state_bytes, "saved_activation_bytes_per_rank": observer.saved.peak}
    if axes.world.size > 1:
        values = torch.tensor([float(v) for v in highest.values()], device=trainer.device, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        highest = dict(zip(highest, (int(v) for v in values.tolist()), strict=True))
    train, totals = config.train, stats.totals.read()
    layers, moe_layers = engine.moe_layers()
    microbatches = train.global_batch_size // (train.micro_batch_size * axes.dp.size)
    numbers = {
        "layers": layers,
        "moe_layers": moe_layers,
        "microbatches": microbatches,
        "ranks": axes.world.size,
        "steps": 1,
        "images": int(totals.images),
        "tokens_per_rank": int(totals.raw_tokens) // (axes.dp.size * axes.cp.size * (axes.tp.size if axes.expert_tokens_cut else 1)),
    }
    return {
        "metrics": {**highest, **_dispatch_bytes(observer, numbers)},
        "receipt": {"numbers": numbers, **observer.as_dict(), "counters": {**counters, **observer.counters}},
    }


def _dispatch_bytes(observer: Observer, numbers: dict[str, int]) -> dict[str, float]:
    """Bytes that rank 0 sends per token and layer to dispatch and combine in the forward pass."""
    rows = [r for r in observer.as_dict()["collectives"] if r["inside"] in ("dispatch", "combine") and r["phase"] == "forward"]
    cells = numbers["tokens_per_rank"] * numbers["moe_layers"]
    return {"dispatch_bytes_per_token_layer": sum(r["bytes"] for r in rows) / cells} if cells else {}


class _Trace:
    """Begins after the warm-up and ends with the last step; does nothing in a timed run."""

    def __init__(self, config: TrainerConfig, out: Path | None, profiler: Any) -> None:
        self.cuda = config.profile.nvtx and torch.cuda.is_available()
        self.profiler, self.out = profiler, out

    def begin(self) -> None:
        """Start the collectors."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        if self.profiler is not None:
            self.profiler.start()

    def end(self) -> None:
        """Stop the collectors and write the trace (rank 0)."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        if self.profiler is not None:
            self.profiler.stop()
            if self.out is not None:
                self.profiler.export_chrome_trace(str(self.out / "trace.json"))


@contextmanager
def _annotated(config: TrainerConfig, out: Path | None) -> Iterator[_Trace]:
    """A block in which the model's ranges go to the collectors that `profile` names; yields what starts and stops them."""
    with ExitStack() as stack:
        profiler = None
        if config.profile.nvtx:
            stack.enter_context(listening(NvtxSink()))
        if config.profile.kineto:
            stack.enter_context(listening(KinetoSink()))
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            profiler = torch.profiler.profile(activities=activities)
        yield _Trace(config, out, profiler)
