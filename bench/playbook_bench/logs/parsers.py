"""From a log's text to rows: for each line about a step, what it calls its figures. What the names mean is in `fields`."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import regex

from playbook.errors import LogError
from playbook_bench.logs import fields
from playbook_bench.logs.fields import figures, lines, shown

Row = tuple[int, dict[str, Any]]
"""A line's number and its figures by the names that it gives them."""
Parser = Callable[[str], Iterator[Row]]

_REGEX_S = 10.0
"""Seconds that a user's pattern may take over a whole log."""
_LONGEST_PATTERN = 2000
_HF_ITEM = re.compile(r"'([\w./|()\[\] -]{1,100})': '?([^'\",{}]{0,100})'?")
_BETWEEN_ITEMS = re.compile(r",\s*(?=')")
_MOST_OBJECT_LINES = 60
"""Over which an object is printed, one figure a line."""
_MEGATRON = re.compile(r"\biteration:?\s+(\d{1,15}) ?/\s*(\d{1,15}) \|")
_MEGATRON_TIMES = ("elapsed time per iteration (ms):", "elapsed_time_per_iteration_ms:")
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
_TORCHTUNE = re.compile(r"^Step (\d{1,15}) \| (?=loss:)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3,6}")
_BAR = re.compile(r"\| (\d{1,15})/(\d{1,15}) \[(?:(\d{1,5}):)?(\d{1,2}):(\d\d)<")
_TITAN = re.compile(r"(?<!validate )\bstep:\s*\d")
_TITAN_ENDS = ("mfu:", "lr:")
"""Of lines since May 2024, and before."""
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


def _objects(text: str) -> Iterator[tuple[int, str, str]]:
    """For each line its number, what stands before an object, and the object, empty where there is none.

    An object that is printed over several lines is joined, under the number of its last line.
    """
    begun: list[str] = []
    before = ""
    for number, line in lines(text):
        if begun and len(begun) < _MOST_OBJECT_LINES and not line.lstrip().startswith("{"):
            begun.append(line.strip())
            whole = "{" + " ".join(begun)[1:].lstrip()
            if whole.count("{") <= whole.count("}"):
                yield number, before, whole
                begun = []
            continue
        begun = []
        start = line.find("{")
        body = line[start:].rstrip() if start >= 0 else ""
        if body.endswith((",", "{")) and body.count("{") > body.count("}"):
            begun, before = [body], line[:start]
        else:
            yield number, line[:start] if start >= 0 else line, body


def json_lines(text: str) -> Iterator[Row]:
    """JSON objects, each at the end of its line, or over several lines; text of a logger may stand before it."""
    for number, _, body in _objects(text):
        if not body:
            continue
        try:
            row = json.loads(body, object_pairs_hook=_once)
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
    return (
        (any(name.endswith("train_runtime") for name in names) and not {"loss", "train/loss"} & set(names))
        or ("loss" not in names and set(names) >= _CLOSING)
        or any(str(row.get(name)).lower() in _OTHER_SPLITS for name in _SPLIT)
        or ("loss" not in figures(dict.fromkeys(names, 0.0)) and any(VALIDATION.match(name) for name in names))
    )


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with seconds that only its other figures tell.

    They are ms-swift's mean speed since the start, before it wrote `elapsed_time`, and mmengine's `time`.
    """
    named, speed = figures(row), fields.number(row.get(_SPEED))
    if "seconds" in named or "clock" in named:
        return row
    if {"time", "data_time"} <= row.keys():
        return {**row, "seconds": row["time"]}
    return {**row, "elapsed": named["step"] / speed} if speed else row


def playbook(text: str) -> Iterator[Row]:
    """Our `metrics.jsonl`. A step without update is marked as not finite as well, and is none the worse for it."""
    for number, row in json_lines(text):
        if {"timed", "useful_tokens"} <= row.keys():
            yield number, {name: value for name, value in row.items() if not (name == "nan" and row.get("skipped"))}


def hugging_face(text: str) -> Iterator[Row]:
    """`trainer_state.json`, or the dictionaries that the Trainer prints."""
    return _trainer_state(text) if text.lstrip()[:1] == "{" and '"log_history"' in text else _trainer_console(text)


def _trainer_state(text: str) -> Iterator[Row]:
    """The entries of the Trainer's history that have a loss.

    Raises:
        LogError: the text is no `trainer_state.json`.
    """
    try:
        state = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as e:
        raise LogError(f"hf: trainer_state.json is damaged ({shown(e)}); expected the file that `trainer.save_state()` writes") from e
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise LogError("hf: 'log_history' is no list; expected the trainer_state.json that `trainer.save_state()` writes")
    closing = next(
        (entry for entry in reversed(history) if isinstance(entry, dict) and "train_runtime" in entry and "loss" not in entry), {}
    )
    mean = _mean(closing, state.get("max_steps"))
    for number, entry in enumerate(history, start=1):
        if isinstance(entry, dict) and "loss" in entry:
            yield number, {"max_steps": state.get("max_steps"), **mean, **entry}


def _mean(closing: dict[str, Any], steps: Any) -> dict[str, float]:
    """Seconds of a step on average, by the Trainer's closing line and its number of steps."""
    runtime, number = fields.number(closing.get("train_runtime")), fields.number(steps)
    return {"seconds by the closing line": runtime / number} if runtime and number and number > 0 else {}


def _trainer_console(text: str) -> Iterator[Row]:
    """The dictionaries that the Trainer prints.

    They have no step. Its progress bar has, which it draws anew after each, and so has its closing line.
    """
    rows: list[Row] = []
    bars: list[dict[str, Any] | None] = []
    closing: dict[str, Any] = {}
    for number, before, body in _objects(text):
        bar = _BAR.search(before)
        if bar and bars and bars[-1] is None:
            clock = int(bar[3] or 0) * 3600 + int(bar[4]) * 60 + int(bar[5])
            bars[-1] = {"global_step": bar[1], "max_steps": bar[2], "progress bar's clock": clock}
        if not (body.startswith("{'") and body.endswith("}")):
            continue
        items = [_HF_ITEM.fullmatch(item) for item in _BETWEEN_ITEMS.split(body[1:-1].strip())]
        # What the console shows of `train_runtime` has four digits: no clock.
        row = {item[1]: item[2] for item in items if item and item[1] != "train_runtime"}
        if body.startswith("{'train_runtime'"):
            closing = {item[1]: item[2] for item in items if item}
        complete = len({item[1] for item in items if item}) == len(items)
        if complete and "loss" in row:
            rows.append((number, row))
            bars.append(None)
    if not closing and len(bars) > 1 and all(bars[:-1]) and bars[-1] is None:  # cut off before the bar was drawn anew
        rows.pop()
        bars.pop()
    drawn = all(bars) and len({bar["max_steps"] for bar in bars if bar}) == 1
    steps = (fields.number(closing.get("train_runtime")) or 0.0) * (fields.number(closing.get("train_steps_per_second")) or 0.0)
    ahead = {"steps by the closing line": steps} if steps else {}
    mean = _mean(closing, (bars[0] or {}).get("max_steps") if drawn and bars else steps)
    yield from ((number, mean | row | ((bar or {}) if drawn else ahead)) for (number, row), bar in zip(rows, bars, strict=True))
    if rows and not closing:
        raise Unfinished(
            "hf: the Trainer's closing line {'train_runtime': ...} is missing; expected it after the steps. The run ended early"
        )


def table(text: str) -> Iterator[Row]:
    """CSVLogger's `metrics.csv`, or a table that Weights & Biases exports.

    Rows of one step that hold different figures are one; those of a validation count for nothing.

    Raises:
        LogError: a row has other columns than the header, or two columns hold one figure.
    """
    pending: Row | None = None
    text_rows = [line for _, line in lines(text)]
    try:
        rows = csv.reader(text_rows)
        names = _columns(next(rows, []))
        if len(names) < 2 or not any("step" in figures({name: 0.0}) for name in names) or text_rows[1:2] == [] or "," not in text_rows[1]:
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
    """`step: 10  loss: 7.1  grad_norm: 1.2  memory: 9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%`, the logger's time before it."""
    for number, line in lines(text):
        start = _TITAN.search(line)
        if start is None:
            continue
        words = line[start.start() :].split()
        names, values = words[::2], words[1::2]
        if len(names) != len(values) or not all(n.endswith(":") for n in names) or len(set(names)) < len(names):
            continue
        if names[-1] not in _TITAN_ENDS:
            continue  # cut off, perhaps inside a number
        row: dict[str, Any] = {n[:-1]: v for n, v in zip(names, values, strict=True)}
        if "iter" in row:
            row["seconds"] = row.pop("iter")
        if memory := _TITAN_MEMORY.fullmatch(row.pop("memory", "")):
            row["memory_gib"] = memory[1]
        row |= {n: row[n].replace(",", "") for n in ("tps", "wps", "tflops") if n in row}
        row["tokens_per_s_per_gpu"] = row.pop("tps", row.pop("wps", None))
        if moments := _TITAN_TIME.findall(line[: start.start()]):
            row["timestamp"] = moments[-1]
        yield number, row


def megatron(text: str) -> Iterator[Row]:
    """Iteration lines of Megatron-LM since 2020, of Megatron-DeepSpeed, Megatron-Bridge, Primus and nanotron: `name: value` between bars.

    Primus puts the mean so far behind an iteration's own figure: `elapsed time per iteration (ms): 1200.0/1250.3`.
    """
    names: list[str] = []
    for number, line in lines(text):
        start = _MEGATRON.search(line)
        timed = any(name in line for name in _MEGATRON_TIMES)
        if start is not None and timed and (row := _barred(line[start.end() :])) is not None:
            if _MEGATRON_TIMES[1] in line:  # nanotron ends a line with no bar: one that was cut off lacks names
                names = names or list(row)
                if list(row) != names:
                    continue
            yield number, {"iteration": start[1], "train_iters": start[2], **{name: value.partition("/")[0] for name, value in row.items()}}


def nemo(text: str) -> Iterator[Row]:
    """Lines of NeMo 2, `Training epoch 0, iteration 9/99 | global_batch_size: 8 | ... | train_step_timing in s: 6.08`.

    Steps go from 0 to the number behind the stroke.
    """
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
    """Lines of verl's console, `step:1 - actor/grad_norm:0.5 - timing_s/step:38.4 - perf/total_num_tokens:18603`.

    Those of a validation alone hold no figure of ours.
    """
    for number, line in lines(text):
        start = _VERL.search(line)
        items = [_VERL_ITEM.fullmatch(part) for part in line[start.end() :].rstrip().split(" - ")] if start else []
        row = {item[1]: item[2] for item in items if item}
        if start and len(row) == len(items) and figures(row).keys() - {"step", "total", "epoch"}:
            yield number, {"step": start[1], **row}


def _matching(*patterns: re.Pattern[str]) -> Parser:
    """A parser of lines that one of these patterns finds; the last date before the match is a clock."""

    def parse(text: str) -> Iterator[Row]:
        for number, line in lines(text):
            match = next((m for each in patterns if (m := each.search(line))), None)
            if match is not None:
                moments = _DATE.findall(line[: match.start()])
                row = {name: value for name, value in match.groupdict().items() if value is not None}
                timed = row.keys() & {"ms", "ms_total", "seconds"} or not moments
                yield number, row if timed else row | {"timestamp": moments[-1]}

    return parse


nanogpt = _matching(
    re.compile(r"\biter (?P<step>\d{1,15}): loss (?P<loss>[\w.]{1,20}), time (?P<ms>[\d.]{1,20})ms"),
    re.compile(
        r"\bstep:(?P<step>\d{1,15})/(?P<total_steps>\d{1,15}) (?:train_loss:(?P<loss>[\w.]{1,20}) )?"
        r"train_time:(?P<ms_total>[\d.]{1,20})ms step_avg"
    ),
)
"""`iter 10: loss 2.9, time 345.1ms, mfu 38.2%`, and modded-nanoGPT's `step:10/1750 train_time:1234ms step_avg:123.4ms`, since the start."""
deepspeed = _matching(
    re.compile(
        r"\bglobal_step=(?P<step>\d{1,15}), RunningAvgSamplesPerSec=[\d.]{1,20}, CurrSamplesPerSec=[\d.]{1,20}, "
        r"MemAllocated=[\d.]{1,20}GB, MaxMemAllocated=(?P<memory_gib>[\d.]{1,20})GB"
    ),
    re.compile(r"\b\d{1,15}/(?P<step>\d{1,15}), (?:RunningAvg)?SamplesPerSec=[\d.]{1,20}"),
)
"""The throughput timer's lines, `.../global_step=10, RunningAvgSamplesPerSec=...`, and those of 2022, `0/10, SamplesPerSec=...`."""
mmengine = _matching(
    re.compile(
        r"\b(?:Iter\(train\)\s+|Epoch\(train\)\s+\[(?P<epoch>\d{1,9})\])\[\s*(?P<step>\d{1,15})/\d{1,15}\] .{1,200} "
        r"time: (?P<seconds>\d{1,9}\.\d{4})  ?data_time: \d{1,9}\.\d{4} .{0,80}"
        r"\bmemory: (?P<memory_mib>\d{1,9})  .{0,80}\bloss: (?P<loss>\d{1,9}\.\d{4})\b"
    ),
)
"""`Epoch(train) [1][50/300]  lr: 2e-2  time: 0.5012  data_time: 0.0012  memory: 3512  loss: 1.2345`, and `Iter(train) [50/80000] ...`."""
timm = _matching(
    re.compile(
        r"\bTrain: (?P<epoch>\d{1,9}) \[\s*(?P<step>\d{1,15})/\d{1,15} \(\s*\d{1,3}%\)\]\s+Loss:\s+(?P<loss>[\d.]{1,20}) \([\d.]{1,20}\)\s+"
        r"Time: (?P<seconds>[\d.]{1,20})s,\s+[\d.]{1,20}/s .{1,120}Data: [\d.]{1,20} \([\d.]{1,20}\)"
    ),
)
"""`Train: 0 [  50/1251 (  4%)]  Loss: 6.914 (6.93)  Time: 0.512s, 500.1/s  (0.530s, ...)  LR: 1.000e-05  Data: 0.010 (0.012)`."""


def torchtune(text: str) -> Iterator[Row]:
    """`Step 10 | loss:1.68 lr:2e-05 tokens_per_second_per_gpu:1234.5 peak_memory_active:14.2`, with the same names in each line."""
    names: list[str] = []
    for number, line in lines(text):
        if (start := _TORCHTUNE.search(line)) is not None:
            items = [item.partition(":") for item in line[start.end() :].split()]
            names = names or [name for name, _, _ in items]
            if [name for name, _, _ in items] == names:
                yield number, {"step": start[1], **{name: value for name, _, value in items}}


def _blocks(adapter: str, head: re.Pattern[str], figure: re.Pattern[str]) -> Parser:
    """A parser of blocks: a line with step and number of steps, and below it one figure a line, further in."""

    def parse(text: str) -> Iterator[Row]:
        """One row for each block, under the number of its head."""
        pending: Row | None = None
        for number, line in lines(text):
            begins, item = head.search(line.rstrip()), figure.fullmatch(line.rstrip())
            if pending is not None and item is not None and begins is None:
                if item[1] in pending[1]:
                    raise LogError(
                        f"{adapter}: line {number} names {shown(item[1])} twice for one step; "
                        "the log is damaged, or two processes write into it"
                    )
                pending[1][item[1]] = item[2].replace(",", "")
                continue
            if pending is not None:
                yield pending
            moments = _DATE.findall(line[: begins.start()]) if begins else []
            pending = (
                (number, {"step": begins[1], "total_steps": begins[2]} | ({"timestamp": moments[-1]} if moments else {}))
                if begins
                else None
            )
        if pending is not None:
            yield pending

    return parse


olmo_core = _blocks(
    "olmo-core",
    re.compile(r"\[step=(\d{1,15})/(\d{1,15}),epoch=\d{1,15}[^\]\n]{0,100}\]"),
    re.compile(r"\s+([\w .()/-]{1,80})=([-+.,\deE]{1,30})"),
)
"""Blocks of OLMo's and OLMo-core's console: `[step=10/1000,epoch=1]`, and below it figures such as `train/CE loss=2.5`."""
composer = _blocks(
    "composer",
    re.compile(r"^(?:\[epoch=\d{1,9}\])?\[batch=(\d{1,15})/(\d{1,15})\]:$"),
    re.compile(r"\s+Train ([\w ./-]{1,100}): ([-+.,\deE]{1,30})"),
)
"""Blocks of Composer's console: `[batch=10/1000]:`, and below it figures such as `Train loss/train/total: 2.5`."""


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
            f"regex: {shown(pattern)} has groups {sorted(compiled.groupindex)}; "
            "expected named groups `(?P<step>...)` and `(?P<seconds>...)`, perhaps loss and tokens, "
            f"in at most {_LONGEST_PATTERN} characters"
        )

    def parse(text: str) -> Iterator[Row]:
        until = time.monotonic() + _REGEX_S
        for number, line in lines(text):
            try:
                match = compiled.search(line, timeout=max(1e-3, until - time.monotonic()))
            except TimeoutError as e:
                raise LogError(
                    f"regex: {shown(pattern)} took more than {_REGEX_S:g} s, the last on line {number}; avoid repeats inside repeats"
                ) from e
            if match is not None:
                yield number, {name: value for name, value in match.groupdict().items() if value is not None}

    return parse
