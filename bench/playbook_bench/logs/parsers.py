"""From a log's text to rows: for each line about a step, what it calls its figures. What the names mean is in `fields`."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import regex

from playbook.errors import LogError
from playbook_bench.logs import fields
from playbook_bench.logs.fields import Lines, figures, lines, shown

Row = tuple[int, dict[str, Any]]
"""A line's number and its figures by the names that it gives them."""
Parser = Callable[[str], Iterator[Row]]

_REGEX_S = 10.0
"""Seconds that a user's pattern may take over a whole log."""
_LONGEST_PATTERN = 2000
_HF_ITEM = re.compile(r"'([\w./|()\[\] -]{1,100})': '?([^'\",{}]{0,100})'?")
_MEGATRON = re.compile(r"\biteration\s+(\d{1,15})/\s*(\d{1,15}) \|")
_MEGATRON_TIME = "elapsed time per iteration (ms):"
_NEMO = re.compile(r"\bTraining epoch \d{1,9}, iteration (\d{1,15})/(\d{1,15}) \|")
_NEMO_END = "consumed_samples"
"""What stands last but for validations: a line without it was cut off."""
_VERL = re.compile(r"\bstep:(\d{1,15}) - ")
_VERL_ITEM = re.compile(r"([^:]{1,100}):(?:np\.\w{1,20}\()?([-+\w.]{1,40})\)?")
_MONITORED = {"train/time": "elapsed", "train|time": "elapsed"}
"""What Lightning's ThroughputMonitor counts from the start of training on, where others mean a step's."""
_SPEED = "train_speed(iter/s)"
VALIDATION = re.compile(r"(?:eval|val|valid|validation|test)(?:$|[_/.])")
"""Names that only a line of a validation has."""
_CLOSING = {"current_steps", "remaining_time"}
"""What the last line of LLaMA-Factory has beside no loss."""
_SPLIT = ("split", "mode", "phase", "stage", "type")
_OTHER_SPLITS = frozenset({"eval", "val", "valid", "validation", "test"})
"""What a line of a validation has under one of those names."""
_NANOGPT = re.compile(r"\biter (?P<step>\d{1,15}): loss (?P<loss>[\w.]{1,20}), time (?P<ms>[\d.]{1,20})ms")
_MODDED = re.compile(
    r"\bstep:(?P<step>\d{1,15})/(?P<total_steps>\d{1,15}) (?:train_loss:(?P<loss>[\w.]{1,20}) )?train_time:(?P<ms_total>[\d.]{1,20})ms step_avg"
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3,6}")
_DEEPSPEED = re.compile(
    r"\bglobal_step=(?P<step>\d{1,15}), RunningAvgSamplesPerSec=[\d.]{1,20}, CurrSamplesPerSec=[\d.]{1,20}, MemAllocated=[\d.]{1,20}GB, "
    r"MaxMemAllocated=(?P<memory_gib>[\d.]{1,20})GB"
)
_OLMO = re.compile(r"\[step=(\d{1,15})/(\d{1,15}),epoch=\d{1,15}[^\]\n]{0,100}\]")
_OLMO_FIGURE = re.compile(r"\s+([\w .()/-]{1,80})=([-+.,\deE]{1,30})")
_BAR = re.compile(r"\| (\d{1,15})/(\d{1,15}) \[(?:(\d{1,5}):)?(\d{1,2}):(\d\d)<")
_TITAN = re.compile(r"(?<!validate )\bstep:\s*\d")
_TITAN_TIME = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3,6})\b")
_TITAN_MEMORY = re.compile(r"([\d.]{1,20})GiB\([\d.]{1,20}%\)")


class Unfinished(LogError):
    """The lines were read, and the one that ends a run is missing."""


class _Twice(ValueError):
    """A JSON object names a key twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise _Twice
    return out


def json_lines(text: str) -> Iterator[Row]:
    """JSON objects, each at the end of its line; text of a logger may stand before it."""
    for number, line in lines(text):
        start = line.find("{")
        if start < 0:
            continue
        try:
            row = json.loads(line[start:], object_pairs_hook=_once)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(row, dict)
            and "log_history" not in row
            and not _beside(row)
            and "step" in (named := figures(row))
            and named.keys() - {"epoch", "total", "step"}
        ):
            yield number, _timed(row)


def _beside(row: dict[str, Any]) -> bool:
    """Whether a line is of a validation, or of the run's end."""
    names = [name for name, value in row.items() if value is not None]
    if any(name.endswith("train_runtime") for name in names) and not {"loss", "train/loss"} & set(names):
        return True
    if "loss" not in names and set(names) >= _CLOSING:
        return True
    if any(str(row.get(name)).lower() in _OTHER_SPLITS for name in _SPLIT):
        return True
    return "loss" not in figures(dict.fromkeys(names, 0.0)) and any(VALIDATION.match(name) for name in names)


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    """A line of ms-swift before it wrote `elapsed_time`: its speed is the mean since the start."""
    named, speed = figures(row), fields.number(row.get(_SPEED))
    return {**row, "elapsed": named["step"] / speed} if speed and "clock" not in named and "seconds" not in named else row


def playbook(text: str) -> Iterator[Row]:
    """Our `metrics.jsonl`. A step without update is marked as not finite as well, and is none the worse for it."""
    for number, row in json_lines(text):
        if {"timed", "useful_tokens"} <= row.keys():
            yield number, {name: value for name, value in row.items() if not (name == "nan" and row.get("skipped"))}


def hugging_face(text: str) -> Iterator[Row]:
    """`trainer_state.json`, or the dictionaries that the Trainer prints."""
    return _trainer_state(text) if text.lstrip()[:1] == "{" and '"log_history"' in text else _trainer_console(lines(text))


def _trainer_state(text: str) -> Iterator[Row]:
    try:
        state = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as e:
        raise LogError(f"hf: trainer_state.json is damaged ({shown(e)}); expected the file that `trainer.save_state()` writes") from e
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise LogError("hf: 'log_history' is no list; expected the trainer_state.json that `trainer.save_state()` writes")
    for number, entry in enumerate(history, start=1):
        if isinstance(entry, dict) and "loss" in entry:
            yield number, {"max_steps": state.get("max_steps"), **entry}


def _trainer_console(found: Lines) -> Iterator[Row]:
    """The dictionaries that the Trainer prints. They have no step: its progress bar has, which it draws anew after each, and its closing line."""
    rows: list[Row] = []
    bars: list[dict[str, Any] | None] = []
    closing: dict[str, float] = {}
    for number, line in found:
        start = line.find("{'")
        body = line[start:].rstrip()
        if start < 0 or not body.endswith("}"):
            bar = _BAR.search(line)
            if bar and bars and bars[-1] is None:
                bars[-1] = {"global_step": bar[1], "max_steps": bar[2], "progress bar's clock": _bar_seconds(bar)}
            continue
        items = [_HF_ITEM.fullmatch(item) for item in body[1:-1].split(", ")]
        # What the console shows of `train_runtime` has four digits: no clock.
        row = {item[1]: item[2] for item in items if item and item[1] != "train_runtime"}
        if line.startswith("{'train_runtime'", start):
            closing = {item[1]: fields.number(item[2]) or 0.0 for item in items if item}
        if all(items) and "loss" in row:
            rows.append((number, row))
            bars.append(None)
    if not closing and len(bars) > 1 and all(bars[:-1]) and bars[-1] is None:  # cut off before the bar was drawn anew
        rows.pop()
        bars.pop()
    drawn = all(bars) and len({bar["max_steps"] for bar in bars if bar}) == 1
    steps = closing.get("train_runtime", 0.0) * closing.get("train_steps_per_second", 0.0)
    ahead = {"steps by the closing line": steps} if steps else {}
    yield from ((number, row | ((bar or {}) if drawn else ahead)) for (number, row), bar in zip(rows, bars, strict=True))
    if rows and not closing:
        raise Unfinished(
            "hf: the Trainer's closing line {'train_runtime': ...} is missing; expected it after the steps. The run ended early"
        )


def _bar_seconds(bar: re.Match[str]) -> int:
    return int(bar[3] or 0) * 3600 + int(bar[4]) * 60 + int(bar[5])


def table(text: str) -> Iterator[Row]:
    """CSVLogger's `metrics.csv`, or a table that Weights & Biases exports. Rows of one step that hold different figures are one; those of a validation count for nothing."""
    pending: Row | None = None
    found = [line for _, line in lines(text)]
    try:
        rows = csv.reader(found)
        names = _columns(next(rows, []))
        if len(names) < 2 or not any("step" in figures({name: 0.0}) for name in names) or found[1:2] == [] or "," not in found[1]:
            return
        for number, cells in enumerate(rows, start=2):
            if len(cells) != len(names):
                raise LogError(
                    f"lightning: row {number} of the table has other columns than its header; the file is damaged, or still being written"
                )
            row = {name: cell for name, cell in zip(names, cells, strict=True) if name and cell}
            now, before = figures(row), figures(pending[1]) if pending else {}
            if _beside(row) or not now.keys() - {"epoch", "step"}:
                continue
            if pending and before.get("step") == now.get("step") and not (before.keys() & now.keys()) - {"epoch", "step"}:
                pending[1].update(row)
                continue
            if pending:
                yield pending
            pending = (number, row)
    except csv.Error as e:
        raise LogError(f"lightning: the table is damaged ({shown(e)}); expected a file that CSVLogger writes, or W&B exports") from e
    if pending:
        yield pending


def _columns(header: list[str]) -> list[str]:
    """The figures of a table's columns. W&B's names are `RUN - FIGURE`, with the least and most of averaged points in columns of their own.

    Raises:
        LogError: two columns hold one figure.
    """
    names = [_MONITORED.get(name, name.rpartition(" - ")[2]) for name in header]
    names = ["" if name.endswith(("__MIN", "__MAX")) else name for name in names]
    if double := next((name for name in names if name and names.count(name) > 1), ""):
        raise LogError(f"lightning: the table has several columns {shown(double)}; expected the table of one run")
    return names


def torchtitan(text: str) -> Iterator[Row]:
    """`step: 10  loss: 7.1  grad_norm: 1.2  memory: 9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%`, with the logger's time before it."""
    for number, line in lines(text):
        start = _TITAN.search(line)
        if start is None:
            continue
        words = line[start.start() :].split()
        names, values = words[::2], words[1::2]
        if len(names) != len(values) or not all(n.endswith(":") for n in names) or len(set(names)) < len(names):
            continue
        if names[-1] != "mfu:":
            continue  # cut off, perhaps inside a number
        row: dict[str, Any] = {n[:-1]: v for n, v in zip(names, values, strict=True)}
        if memory := _TITAN_MEMORY.fullmatch(row.pop("memory", "")):
            row["memory_gib"] = memory[1]
        row |= {n: row[n].replace(",", "") for n in ("tps", "wps", "tflops") if n in row}
        row["tokens_per_s_per_gpu"] = row.pop("tps", row.pop("wps", None))
        if moments := _TITAN_TIME.findall(line[: start.start()]):
            row["timestamp"] = _moment(moments[-1])
        yield number, row


def _moment(text: str) -> float | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def megatron(text: str) -> Iterator[Row]:
    """Iteration lines of Megatron-LM since 2020, of Megatron-DeepSpeed, Megatron-Bridge and Primus: `name: value` between bars.

    Primus puts the mean so far behind an iteration's own figure: `elapsed time per iteration (ms): 1200.0/1250.3`.
    """
    for number, line in lines(text):
        start = _MEGATRON.search(line)
        if start is not None and _MEGATRON_TIME in line and (row := _barred(line[start.end() :])) is not None:
            yield number, {"iteration": start[1], "train_iters": start[2], **{name: value.partition("/")[0] for name, value in row.items()}}


def nemo(text: str) -> Iterator[Row]:
    """Lines of NeMo 2, `Training epoch 0, iteration 9/99 | global_batch_size: 8 | ... | train_step_timing in s: 6.08`: steps from 0 to the number behind the bar."""
    for number, line in lines(text):
        start = _NEMO.search(line)
        row = _barred(line[start.end() :]) if start is not None else None
        if start is not None and row is not None and _NEMO_END in row:
            yield number, {"iteration": start[1], "total_steps": int(start[2]) + 1, **row}


def _barred(text: str) -> dict[str, Any] | None:
    """`name: value` between bars; None where a part is none, or a name is there twice."""
    parts = [part.partition(":") for part in text.split("|") if part.strip()]
    row = {name.strip(): value.strip() for name, _, value in parts}
    return row if len(row) == len(parts) else None


def verl(text: str) -> Iterator[Row]:
    """Lines of verl's console, `step:1 - actor/grad_norm:0.5 - timing_s/step:38.4 - perf/total_num_tokens:18603`; those of a validation alone hold no figure of ours."""
    for number, line in lines(text):
        start = _VERL.search(line)
        items = [_VERL_ITEM.fullmatch(part) for part in line[start.end() :].rstrip().split(" - ")] if start else []
        row = {item[1]: item[2] for item in items if item}
        if start and len(row) == len(items) and figures(row).keys() - {"step", "total", "epoch"}:
            yield number, {"step": start[1], **row}


def nanogpt(text: str) -> Iterator[Row]:
    """`iter 10: loss 2.9, time 345.1ms, mfu 38.2%`, and modded-nanoGPT's `step:10/1750 train_time:1234ms step_avg:123.4ms`, a time since the start."""
    for number, line in lines(text):
        match = _NANOGPT.search(line) or _MODDED.search(line)
        if match is not None:
            yield number, match.groupdict()


def deepspeed(text: str) -> Iterator[Row]:
    """The throughput timer's lines of DeepSpeed, `epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=...`; the logger's time is the clock."""
    for number, line in lines(text):
        match = _DEEPSPEED.search(line)
        if match is not None:
            moments = _DATE.findall(line[: match.start()])
            yield number, match.groupdict() | ({"timestamp": moments[-1]} if moments else {})


def olmo_core(text: str) -> Iterator[Row]:
    """Blocks of OLMo-core's console: `[step=10/1000,epoch=1]`, and below it one figure a line, further in."""
    pending: Row | None = None
    for number, line in lines(text):
        head, figure = _OLMO.search(line), _OLMO_FIGURE.fullmatch(line.rstrip())
        if pending is not None and figure is not None and head is None:
            if figure[1] in pending[1]:
                raise LogError(
                    f"olmo-core: line {number} names {shown(figure[1])} twice for one step; the log is damaged, or two processes write into it"
                )
            pending[1][figure[1]] = figure[2].replace(",", "")
            continue
        if pending is not None:
            yield pending
        moments = _DATE.findall(line[: head.start()]) if head else []
        pending = (number, {"step": head[1], "total_steps": head[2]} | ({"timestamp": moments[-1]} if moments else {})) if head else None
    if pending is not None:
        yield pending


def by_pattern(pattern: str) -> Parser:
    """A parser by a regular expression whose named groups are figures: `step`, `seconds` or `ms`, `loss`, `tokens`, ...

    Raises:
        LogError: the pattern is no regular expression, or names no group `step`; later, that it takes too long.
    """
    try:
        compiled = regex.compile(pattern[:_LONGEST_PATTERN])
    except (regex.error, RecursionError, OverflowError) as e:
        raise LogError(f"regex: {shown(pattern)} is no regular expression ({shown(e)})") from e
    if "step" not in compiled.groupindex or len(pattern) > _LONGEST_PATTERN:
        raise LogError(
            f"regex: {shown(pattern)} has groups {sorted(compiled.groupindex)}; expected named groups `(?P<step>...)` and `(?P<seconds>...)`, "
            f"perhaps loss and tokens, in at most {_LONGEST_PATTERN} characters"
        )

    def parse(text: str) -> Iterator[Row]:
        until = time.monotonic() + _REGEX_S
        for number, line in lines(text):
            try:
                found = compiled.search(line, timeout=max(1e-3, until - time.monotonic()))
            except TimeoutError as e:
                raise LogError(
                    f"regex: {shown(pattern)} took more than {_REGEX_S:g} s, the last on line {number}; avoid repeats inside repeats"
                ) from e
            if found is not None:
                yield number, {name: value for name, value in found.groupdict().items() if value is not None}

    return parse
