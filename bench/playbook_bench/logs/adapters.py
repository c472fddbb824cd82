"""The adapters: one row for each kind of log. The first whose parser finds a row knows the log. Parsers of reinforcement learning (slime,
OpenRLHF and NeMo-RL, and what verl, these and TRL call the phases of a step) stand here as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playbook.diagnosis.rl_step import Step
from playbook.errors import LogError
from playbook_bench.logs import parsers
from playbook_bench.logs.fields import MAX_BYTES, figures, lines, number, shown
from playbook_bench.logs.parsers import VALIDATION, Row

# TensorBoard's event files, by TensorBoard's own reader.

_ITEM = re.compile(r"'([\w./@ -]{1,100})': (?:np\.\w{1,20}\()?([-+]?[\d.]{1,30}(?:e[+-]?\d{1,3})?)")
_SLIME = re.compile(r"\b(perf|rollout) (\d{1,15}): \{")
_OPENRLHF = re.compile(r"\bGlobal step (\d{1,15}): \{")
_NEMO_STEP = re.compile(r"={5,60} Step (\d{1,15})/(\d{1,15}) ={5,60}")
_NEMO_ITEM = re.compile(r"• ([\w ./-]{1,80}): ([-+]?[\d.]{1,30})(?:s\b|$| )")
_NEMO_TOTAL = "Total step time"

NAMES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("timing_s/gen", "perf/rollout_time", "timing/generation", "generation", "exposed_generation", "timing_s/generate"),
    "reward": ("timing_s/reward", "reward_calculation", "timing_s/reward_calculation"),
    "log-probabilities": (
        *("timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv", "timing_s/fwd_logprobs_values_reward"),
        *("perf/log_probs_time", "perf/ref_log_probs_time", "timing/make_experience"),
        *("policy_and_reference_logprobs", "logprob_inference_prep"),
    ),
    "update": (
        *("timing_s/update_actor", "timing_s/update_critic", "timing_s/policy_train", "perf/actor_train_time", "timing/ppo_train"),
        *("policy_training", "training_prep"),
    ),
    "weight transfer": (
        *("timing_s/update_weights", "timing_s/sync_weights", "perf/update_weights_time", "perf/sleep_time", "perf/wake_up_time"),
        *("timing/broadcast", "weight_sync", "prepare_for_generation/total"),
    ),
}
"""For each phase, the names whose seconds add up to it. OpenRLHF's `make_experience` holds rewards as well."""
_WAIT = "perf/train_wait_time"
"""slime: all between two updates of the trainer, the rollout and the transfer among it."""
_TOTALS = ("timing_s/step", "perf/step_time", "timing/step_total", "Total step time", "step_time", "timing_s/total")
_LENGTHS = (
    ("timing_s/agent_loop/generate_sequences/mean", "timing_s/agent_loop/generate_sequences/max"),
    ("response_length/mean", "response_length/max"),
    ("rollout/response_len/mean", "rollout/response_len/max"),
    ("completions/mean_length", "completions/max_length"),
)
"""Mean and longest response: in seconds where turns with tools make tokens no measure, else in tokens."""


def slime(text: str) -> Iterator[Row]:
    """`perf 2: {'perf/rollout_time': 98.6, ...}`, one from the engine and one from the trainer for each rollout, and `rollout 2: {...}`.

    The three are one row.
    """
    rollouts: dict[str, dict[str, Any]] = {}
    for line_number, line in lines(text):
        start = _SLIME.search(line)
        if start is None:
            continue
        row = rollouts.setdefault(start[2], {"step": start[2]})
        row.update(_ITEM.findall(line[start.end() :]))
        if start[1] == "perf" and "perf/step_time" in row:
            yield line_number, rollouts.pop(start[2])
            rollouts.clear()


def openrlhf(text: str) -> Iterator[Row]:
    """`Global step 5: {'policy_loss': ..., 'timing/generation': 41.2, ..., 'timing/step_total': 77.0}`."""
    for line_number, line in lines(text):
        start = _OPENRLHF.search(line)
        if start is not None and (items := dict(_ITEM.findall(line[start.end() :]))):
            yield line_number, {"step": start[1], **items}


def nemo_rl(text: str) -> Iterator[Row]:
    """Blocks of NeMo-RL: a rule with `Step 3/100`, then one figure a line, such as `• policy_training: 25.05s (37.6%)`."""
    row: dict[str, Any] = {}
    first = 0
    for line_number, line in lines(text):
        if head := _NEMO_STEP.search(line):
            if _NEMO_TOTAL in row:
                yield first, row
            first, row = line_number, {"step": head[1], "total_steps": head[2]}
        elif row and (item := _NEMO_ITEM.search(line)):
            row.setdefault(item[1], item[2])
    if _NEMO_TOTAL in row:
        yield first, row


def steps(rows: Iterator[Row]) -> list[Step]:
    """The steps of a log that names phases or lengths of responses; none of one that does not."""
    return [s for s in (_step(row) for _, row in rows) if len(s.phases) > 1 or s.longest is not None]


def _step(row: Mapping[str, Any]) -> Step:
    values = {name: value for name, raw in row.items() if (value := number(raw)) is not None and value >= 0}
    phases = {phase: sum(values[n] for n in names if n in values) for phase, names in NAMES.items() if any(n in values for n in names)}
    if "rollout" not in phases and _WAIT in values:
        phases["rollout"] = max(0.0, values[_WAIT] - phases.get("weight transfer", 0.0))
    total = next((values[n] for n in _TOTALS if n in values), figures(row).get("seconds"))
    mean, longest = next(((values[a], values[b]) for a, b in _LENGTHS if a in values and b in values), (None, None))
    return Step(total, phases, mean, longest)


_FRAME_BYTES = 16
"""Length and checksums around each record."""
_Points = Sequence[tuple[int, float, float]]
"""Step, value and moment of each scalar under a tag."""
_NO_FIGURES = frozenset({"step", "total", "epoch"})
"""What tags need not say: an event has its step, and epochs are written beside validations as well."""


def read(name: str) -> Iterator[Row]:
    """The steps of one event file: those at which the loss was written, or, where it hardly was, the most frequent figure.

    Other figures count at those steps alone: validations are written at steps of their own, and the end of a run writes some figures again.
    Where no figure is a time, the moments at which scalars were written are the clock.

    Raises:
        LogError: TensorBoard is not installed, or the file cannot be read to its end.
    """
    tags = _by_figure(_scalars(Path(name)))
    if not tags:
        return
    most = max(tags, key=lambda figure: len(tags[figure][1]))
    leading = "loss" if "loss" in tags and 2 * len(tags["loss"][1]) >= len(tags[most][1]) else most
    others = [(tag, {step: value for step, value, _ in reversed(points)}) for figure, (tag, points) in tags.items() if figure != leading]
    tag, points = tags[leading]
    for line, (step, value, moment) in enumerate(points, start=1):
        yield line, {"step": step, "wall_time": moment, tag: value, **{name: at[step] for name, at in others if step in at}}


def _by_figure(tags: Mapping[str, _Points]) -> dict[str, tuple[str, _Points]]:
    """For each figure of a step the tag that is read as it, and its points; of several tags, the one with most points."""
    chosen: dict[str, tuple[str, _Points]] = {}
    for tag, points in tags.items():
        figure = next(iter(figures({tag: 0.0}).keys() - _NO_FIGURES), None)
        if figure and not VALIDATION.match(tag) and (figure not in chosen or len(points) > len(chosen[figure][1])):
            chosen[figure] = (tag, points)
    return chosen


def _scalars(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    scalars: dict[str, list[tuple[int, float, float]]] = {}
    for event in _events(path):
        for value in event.summary.value:
            scalar = _scalar(value)
            if scalar is not None:
                scalars.setdefault(value.tag, []).append((event.step, scalar, event.wall_time))
    return scalars


def _events(path: Path) -> Iterator[Any]:
    """The records of an event file, by TensorBoard's own reader.

    Raises:
        LogError: TensorBoard is not installed, or the file is too large, damaged, or still being written.
    """
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as e:
        raise LogError(
            f"{path}: is an event file for TensorBoard, which is not installed; run pip install '.[trackers]' in a clone of Playbook"
        ) from e
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise LogError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; expected the event file of one run's scalars")
        done = 0
        for raw in RawEventFileLoader(str(path)).Load():
            done += len(raw) + _FRAME_BYTES
            yield Event.FromString(raw)
    except (OSError, DecodeError, ValueError) as e:
        raise LogError(f"{path}: cannot be read as an event file ({shown(e)}); expected what a SummaryWriter wrote") from e
    if done != size:
        raise LogError(
            f"{path}: is damaged after byte {done} of {size}, or still being written; expected a whole event file. "
            "Let the run close its writer"
        )


def _scalar(value: Any) -> float | None:
    values = [value.simple_value] if value.HasField("simple_value") else value.tensor.float_val
    return float(values[0]) if len(values) == 1 else None


@dataclass(frozen=True)
class Adapter:
    """How one trainer's log is known and read, and how the trainer is made to log each step with its time."""

    name: str
    reads: str
    files: tuple[str, ...]
    """Names of the files that it reads in a folder, as patterns."""
    parse: parsers.Parser
    each_step: str
    timed: str
    printed: bool = True
    """Whether lines appear as the run goes, so that their arrival can be a clock."""
    binary: bool = False
    """Whether `parse` takes the file's name rather than its text."""


ADAPTERS: tuple[Adapter, ...] = (
    Adapter(
        "playbook",
        "`metrics.jsonl` of `playbook train`",
        ("metrics.jsonl",),
        parsers.playbook,
        "it always does",
        "metrics.jsonl holds it",
    ),
    Adapter(
        "jsonl",
        'JSON lines with named fields: `{"step": 1, "seconds": 0.5, "loss": 2.3, "tokens": 4096}`; those of ms-swift and LLaMA-Factory',
        ("log.jsonl", "logging.jsonl", "trainer_log.jsonl"),
        parsers.json_lines,
        "one line printed for each step",
        "Print `seconds` of the step, or `elapsed` since the start",
    ),
    Adapter(
        "megatron",
        "iteration lines of Megatron-LM, Megatron-DeepSpeed, Megatron-Bridge, Primus and nanotron",
        (),
        parsers.megatron,
        "`--log-interval 1`; Megatron-Bridge: `logger.log_interval=1`; nanotron: `iteration_step_info_interval: 1`",
        "iteration lines hold it",
    ),
    Adapter(
        "nemo",
        "`Training epoch 0, iteration 9/99` lines of NeMo 2",
        (),
        parsers.nemo,
        "`log_every_n_steps=1` of the Trainer",
        "`TimingCallback` writes `train_step_timing in s`",
    ),
    Adapter(
        "verl",
        "`step:1 - actor/grad_norm:... - timing_s/step:...` lines of verl",
        (),
        parsers.verl,
        "it always does, with `console` in `trainer.logger`",
        "lines hold it",
    ),
    Adapter(
        "slime",
        "`perf 0: {'perf/rollout_time': ...}` lines of slime and miles",
        (),
        slime,
        "it always does",
        "lines hold it",
    ),
    Adapter(
        "openrlhf",
        "`Global step 1: {'timing/generation': ...}` lines of OpenRLHF",
        (),
        openrlhf,
        "`--logger.logging_steps 1`",
        "lines hold it",
    ),
    Adapter(
        "nemo-rl",
        "blocks of NeMo-RL's console, `Step 1/100` between rules and `Total step time: 66.55s` below it",
        (),
        nemo_rl,
        "it always does",
        "lines hold it",
    ),
    Adapter(
        "torchtitan",
        "`step: 10  loss: ...  tps: ...` lines of torchtitan",
        (),
        parsers.torchtitan,
        "`--metrics.log_freq 1`",
        "Keep the logger's time stamps before the lines",
    ),
    Adapter(
        "nanogpt",
        "`iter 10: loss ..., time ...ms` lines of nanoGPT, and `step:10/1750 train_time:...ms` lines of modded-nanoGPT",
        (),
        parsers.nanogpt,
        "`--log_interval=1`",
        "lines hold it",
    ),
    Adapter(
        "olmo-core",
        "blocks of OLMo-core's console, `[step=10/1000,epoch=1]` and one figure a line below it",
        (),
        parsers.olmo_core,
        "`metrics_log_interval=1` of ConsoleLoggerCallback",
        "Keep the logger's time stamps before the lines",
    ),
    Adapter(
        "hf",
        "`trainer_state.json` of the Hugging Face Trainer, or the dictionaries that it prints",
        ("trainer_state.json",),
        parsers.hugging_face,
        "`logging_steps=1`",
        "With `include_num_input_tokens_seen='all'`, trainer_state.json holds `train_runtime` and tokens for each step logged",
    ),
    Adapter(
        "deepspeed",
        "`epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=...` lines of DeepSpeed",
        (),
        parsers.deepspeed,
        '`"steps_per_print": 1`',
        "Keep the logger's time stamps before the lines",
    ),
    Adapter(
        "composer",
        "blocks of Composer's console, `[batch=10/1000]:` and one figure a line below it",
        (),
        parsers.composer,
        "`console_log_interval: 1ba`",
        "The SpeedMonitor callback logs `time/train`",
    ),
    Adapter(
        "mmengine",
        "`Epoch(train) [1][50/300] ... time: 0.5012 ...` lines of mmengine, and its `Iter(train)` lines",
        (),
        parsers.mmengine,
        "`interval=1` of LoggerHook",
        "lines hold it",
    ),
    Adapter(
        "timm",
        "`Train: 0 [  50/1251 (  4%)]  Loss: ...  Time: 0.512s, ...` lines of timm",
        (),
        parsers.timm,
        "`--log-interval 1`",
        "lines hold it",
    ),
    Adapter(
        "torchtune",
        "lines of torchtune, `loss:1.68 lr:2e-05 tokens_per_second_per_gpu:...` after `Step 10` and a bar",
        (),
        parsers.torchtune,
        "`log_every_n_steps: 1`",
        "`tokens_per_second_per_gpu` is the rate; let its StdoutLogger print the lines",
    ),
    Adapter(
        "lightning",
        "`metrics.csv` of Lightning's CSVLogger, and tables that Weights & Biases exports",
        ("metrics.csv",),
        parsers.table,
        "`log_every_n_steps=1`",
        "Log `step_time` in seconds in the module, or add the ThroughputMonitor callback",
        printed=False,
    ),
    Adapter(
        "tensorboard",
        "TensorBoard's event files, given as a path",
        ("events.out.tfevents.*",),
        read,
        "scalars written at each step",
        "The moments at which scalars were written are the clock",
        printed=False,
        binary=True,
    ),
)
