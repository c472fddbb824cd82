"""The page on the megatron backend's switches: one short run each, against the plain one; context parallelism by length; and bare megatron-core.

The rows come from `tools/megatron_table.py` and `tools/beside_bare.py`, on a machine that has the GPUs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from playbook.site.figures.svg import curve
from playbook.site.parity import read_rows
from playbook.site.text import attribute, code, quantity, text

SWITCHES = "megatron-switches.jsonl"
CONTEXT = "megatron-cp.jsonl"
BARE = "megatron-bare.jsonl"

INTRO = """---
hide: [toc]
---

# The megatron backend, switch by switch

One run of each switch on Qwen3-30B-A3B cut down in depth, with random tokens in rows of 4096: a **screening**. It shows that a switch works, roughly what
it costs, and what of it was seen to run. One run says nothing about differences of a few percent; the claims on the cards do, from matched runs.
"""
COMPUTES = "Computes: the share of a step in which the GPU does anything but communicate; the rest is communication, and waiting for the host or for other ranks."
NONE = "No table has been made yet: `python tools/megatron_table.py one two four` makes it on a machine with GPUs."
_TABLES = {
    "one": "On one GPU",
    "two": "On two GPUs, experts over both unless the row says otherwise",
    "four": "On four GPUs, experts over all unless the row says otherwise",
}
_PLAIN = "plain"
_LAYERS = 24
_EACH = {"megatron.grouped_gemm": "cublas"}
"""Settings of rows whose experts are not in one kernel: what they switch shows against a row of the same experts."""
_WANTED = ["table", "group", "name", "gpus", "settings", "outcome"]
_UNMARKED = 2
"""The performance revision of rows that do not name theirs."""


def megatron_page(folder: Path, revision: int | None = None) -> str:
    """The page, from the rows below `folder`; rows of a revision of the trainer before `revision` are marked.

    Raises:
        FileError: rows of another shape.
    """
    rows, lengths = (read_rows(folder / name, _WANTED) for name in (SWITCHES, CONTEXT))
    bare = read_rows(folder / BARE, ["setting", "side", "pair", "gpus", "words", "outcome"])
    parts = [INTRO, *([] if rows else [NONE, ""])]
    for table, title in _TABLES.items():
        parts += _switches([r for r in rows if r["table"] == table], title, revision)
    for _, found in groupby(lengths, key=lambda r: str(r["table"])):
        parts += _lengths(list(found), revision)
    for _, runs in groupby(bare, key=lambda r: (r["gpus"], r["words"])):
        parts += _beside_bare(list(runs), revision)
    return "\n".join(parts)


def _older(rows: Sequence[Mapping[str, Any]], revision: int | None) -> str:
    """What has to be known of rows that the trainer as it is did not make."""
    made = {int(r.get("revision") or _UNMARKED) for r in rows if r["outcome"] == "ok" and r.get("side") != "bare"}
    if revision is None or not made or min(made) >= revision:
        return ""
    return f" **Made before performance revision {revision} of the trainer ({text(min(made))}): its steps have become shorter since, as the log tells.**"


def _beside_bare(rows: Sequence[Mapping[str, Any]], revision: int | None) -> list[str]:
    """The trainer beside a loop of megatron-core's own classes around its own model, in turns."""
    words = ", ".join(code(w) for w in rows[0]["words"])
    out = [
        f"## Beside megatron-core by itself, on {int(rows[0]['gpus'])} GPUs",
        "",
        f"{_software(rows)} The same configuration in turns on the same GPUs: a loop of megatron-core's own classes around its own model, and this trainer. Tokens per "
        "second and GPU over all timed seconds, the median of the launches; the ratio is the geometric mean over pairs, with its interval of 95 % (paired t). Seen: "
        f"what the receipt must show of the dispatcher.{f' With {words}.' if words else ''}{_older(rows, revision)}",
        "",
        "| setting | pairs | by itself | this trainer | ratio | interval | seen |",
        "| --- | --: | --: | --: | --: | --- | --- |",
    ]
    for setting, each in groupby(rows, key=lambda r: str(r["setting"])):
        runs = list(each)
        found = pairs(runs)
        if not found:
            continue
        bare, ours = (statistics.median(side) for side in zip(*found, strict=True))
        mean, low, high = ratio(found)
        seen = next((_seen(r) for r in runs if r.get("proof")), "")
        sure = "one pair has none" if low is None else f"{low:.2f} to {high:.2f}"
        out.append(f"| {text(setting)} | {len(found)} | {bare:,.0f} | {ours:,.0f} | {mean:.3f} | {sure} | {seen} |")
    return [*out, ""]


def pairs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Tokens per second and GPU of bare megatron-core and of this trainer, for each pair of one setting of which both have come to their end."""
    speeds = {(r["side"], r["pair"]): float(r["tokens_per_s_per_gpu"]) for r in rows if r["outcome"] == "ok"}
    return [
        (speed, speeds[("ours", pair)]) for (side, pair), speed in sorted(speeds.items()) if side == "bare" and ("ours", pair) in speeds
    ]


def ratio(found: Sequence[tuple[float, float]]) -> tuple[float, float | None, float | None]:
    """How many times faster the second of each pair is: the geometric mean, and the paired t interval of 95 % where there are two pairs or more."""
    logs = [math.log(ours / bare) for bare, ours in found]
    mean, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return math.exp(mean), None, None
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(logs) / math.sqrt(n)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _switches(rows: Sequence[Mapping[str, Any]], title: str, revision: int | None) -> list[str]:
    if not rows:
        return []
    plain = next((r for r in rows if r["group"] == r["name"] == _PLAIN and r["outcome"] == "ok"), {})
    cublas = next((r for r in rows if r["settings"] == _EACH and r["outcome"] == "ok"), plain)
    beside = [r for r in rows if r["settings"].items() > _EACH.items()]
    names = list(dict.fromkeys(text(r["group"]) for r in beside))
    note = f" {', '.join(names)}: with a product for each expert by cuBLAS, and against the row that has nothing else." if names else ""
    out = [
        f"## {title}",
        "",
        f"{_software(rows)} Step time and memory against the row `plain`, in which one CUTLASS kernel has all experts; loss: the largest relative difference of any step's "
        f"loss from the row that it stands against; gradient norm: the same of the first step alone.{note} Seen: how many "
        f"of the things that must have happened (kernels, collectives, graph launches, copies) the receipt of the run holds. {COMPUTES}{_older(rows, revision)}",
        "",
        '<div class="pb-wide" markdown="1">',
        "",
        "| switch | step | change | computes | peak memory | change | loss | gradient norm | seen |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for group, each in groupby(rows, key=lambda r: str(r["group"])):
        if group != _PLAIN:
            out.append(f"| **{text(group)}** | | | | | | | | |")
        out += [_switch(r, cublas if r in beside else plain) for r in each]
    told = [
        f"- {text(r['group'])}, {text(r['name'])}: {text(_short(str(r['message'])))}"
        for r in rows
        if r["outcome"] != "ok" and r.get("message")
    ]
    return [*out, "", "</div>", "", *told, ""]


def _switch(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    begin = f"| {text(row['name'])} |"
    if row["outcome"] != "ok":
        return f"{begin} {text(row['outcome'])} | | | | | | | |"
    step, memory = float(row["step_s"]), float(row["peak_memory_bytes"])
    own = row is plain or not plain
    slower = "" if own else f"{100 * (step / float(plain['step_s']) - 1):+.1f} %"
    computes = _computes(row)
    more = "" if own else f"{(memory - float(plain['peak_memory_bytes'])) / 2**30:+.1f} GiB"
    differs = " | " if own else f"{_loss(row, plain)} | {_gradient(row, plain)}"
    return f"{begin} {1000 * step:.0f} ms | {slower} | {computes} | {memory / 2**30:.1f} GiB | {more} | {differs} | {_seen(row)} |"


def _computes(row: Mapping[str, Any]) -> str:
    share = row.get("gpu_computing_percent")
    return f"{share:.0f} %" if isinstance(share, int | float) else ""


def _loss(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    pairs = [(a, b) for a, b in zip(row["losses"], plain["losses"], strict=False) if a is not None and b]
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}" if pairs else ""


def _gradient(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """How far the first step's gradient norm is from the other row's: a loss of the first few steps hardly shows what went wrong in a backward pass."""
    ours, theirs = (r.get("grad_norm") for r in (row, plain))
    return f"{abs(ours / theirs - 1):.1e}" if isinstance(ours, int | float) and isinstance(theirs, int | float) and theirs else ""


def _seen(row: Mapping[str, Any]) -> str:
    proof = row.get("proof") or []
    missing = [p for p in proof if not p["ok"]]
    if not proof:
        return ""
    return f"{len(proof) - len(missing)}&nbsp;of&nbsp;{len(proof)}" + "".join(
        f"; not {code(p['rule'])} (found {text(p['observed'])}, expected {text(p['expected'])})" for p in missing
    )


def _lengths(rows: Sequence[Mapping[str, Any]], revision: int | None) -> list[str]:
    gpus, layers = int(rows[0]["gpus"]), int(rows[0]["settings"].get("model.num_layers", _LAYERS))
    out = [
        f"## Context parallelism by length, on {gpus} GPUs",
        "",
        f"{_software(rows)} Qwen3-30B-A3B cut to {layers} layers over {gpus} GPUs, EP {gpus}, norms and expert activations recomputed; each rank of dp reads "
        f"one row a step, so CP 1 reads {gpus} rows and CP {gpus} one. Out of memory is a result. {COMPUTES}{_older(rows, revision)}",
        "",
        "| length | CP | tokens/s per GPU | step | computes | peak memory |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        length, cp = row["settings"]["data.seq_len"], row["settings"]["parallel.cp"]
        if row["outcome"] == "ok":
            figures = f"{row['tokens_per_s_per_gpu']:,.0f} | {row['step_s']:.2f} s | {_computes(row)} | {row['peak_memory_bytes'] / 2**30:.1f} GiB |"
        else:
            figures = f"{_outcome(row)} | | | |"
        out.append(f"| {length:,} | {cp} | {figures}")
    out += ["", _largest(rows), ""]
    for group, found in groupby(rows, key=lambda r: str(r["group"])):
        points = list(found)
        speed = [_point(r, "tokens_per_s_per_gpu", "tokens/s") for r in points]
        memory = [_point(r, "peak_memory_bytes", "bytes") for r in points]
        for svg, label in ((curve(speed, "tokens/s per GPU"), "tokens/s per GPU"), (curve(memory, "peak memory"), "peak memory")):
            if svg:
                out += [
                    f'<figure class="pb-figure">{svg}<figcaption>{attribute(group)} tokens per row: {label}, from zero</figcaption></figure>',
                    "",
                ]
    return out


def _largest(rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest length that fitted, for each size of the group."""
    said = []
    for cp in sorted({int(r["settings"]["parallel.cp"]) for r in rows}):
        tried = {int(r["settings"]["data.seq_len"]): r["outcome"] == "ok" for r in rows if r["settings"]["parallel.cp"] == cp}
        most = max((n for n, fits in tried.items() if fits), default=0)
        more = " (the longest in this table)" if most == max(tried) else ""
        said.append(f"CP {cp} {most:,} tokens{more}" if most else f"CP {cp} none")
    return "The longest row that fitted: " + "; ".join(said) + "."


def _point(row: Mapping[str, Any], key: str, unit: str) -> tuple[str, float | None, str]:
    name = f"CP {row['settings']['parallel.cp']}"
    return (name, float(row[key]), quantity(round(row[key]), unit)) if row["outcome"] == "ok" else (name, None, _outcome(row))


def _outcome(row: Mapping[str, Any]) -> str:
    return "out of memory" if row["outcome"] == "oom" else text(row["outcome"])


def _software(rows: Sequence[Mapping[str, Any]]) -> str:
    """On what the rows were taken."""
    row = next((r for r in rows if r.get("versions")), None)
    if row is None:
        return ""
    device = next((str(r["device"]) for r in rows if r.get("device")), "unknown device")
    return f"{text(device)}, " + ", ".join(f"{text(k)} {text(v)}" for k, v in row["versions"].items()) + "."


def _short(message: str) -> str:
    return message if len(message) <= 160 else message[:157] + "..."
