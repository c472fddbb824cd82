"""Runs whose speed and memory were predicted and written down before any: layouts on two or four GPUs, those of the whole Qwen3-30B-A3B on
eight, or the variants of prediction cases.

    python tools/planner/planned_layouts.py run --gpus 8 --budget 560           # each once, shuffled, into planned-layouts-runs.jsonl
    python tools/planner/planned_layouts.py run --gpus 8 --pairs 4              # then the two fastest of each model, in turns
    python tools/planner/planned_layouts.py report                              # errors, winners and misses
    python tools/planner/planned_layouts.py run --gpus 1 --cases predicted-dense-4k-megatron predicted-dense-4k-torch

Predictions and settings are the rows of docs/parity/planned-layouts.jsonl, which stand as they were registered. With `--cases`, `report`
goes likewise.
How far off a prediction is costs one launch; whether its interval holds takes the case's own series (`playbook bench run`).
A call goes on where the last one stopped; a run that failed is run again only with `--again`. Ranks are forks of one process that has
imported torch, megatron-core and Transformer Engine. `--rehearse` trains tiny models with the same layouts on the CPU, which says that the
runner works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer"), str(ROOT / "tools")]

import megatron_table  # noqa: E402
from megatron_table import LEFT_OUT  # noqa: E402

from playbook.records.case import load_case  # noqa: E402
from playbook_bench.machine import detect  # noqa: E402
from playbook_bench.variants import resolve  # noqa: E402
from playbook_trainer import fork_server  # noqa: E402
from playbook_trainer.config import dry_run, tree  # noqa: E402

CONFIG = "trainer/configs/planned.yaml"
FOLDER = ROOT / "docs" / "parity"
REGISTERED, RUNS = "planned-layouts.jsonl", "planned-layouts-runs.jsonl"
USUAL = "h200"
"""The GPU of cases' profiles, and of rows that name none."""
GIB = 2**30
NEAR = 0.05
"""A choice is right if it is this close to the best."""
_SMALL: dict[str, Any] = {
    "data.seq_len": 32,
    "train.dtype": "fp32",
    "train.steps": 2,
    "train.warmup_steps": 1,
    "train.log_every": 1,
    "train.global_batch_size": 8,
    "parallel.sequence_parallel": False,
}


def of_cases(names: Sequence[str], gpus: int) -> Iterator[dict[str, Any]]:
    """The variants of prediction cases as such rows; the memory that they do not state is the dry run's."""
    for case in map(load_case, names):
        predictions = {value.name: value.predicted for value in case.values}
        for variant in case.variants:
            overrides, ranks = resolve.overrides(case, variant, f"{USUAL}x{gpus}")
            predicted, config = predictions.get(variant), resolve.trainer_path(case)
            if predicted is None or case.metric != "useful_tokens_per_s_per_gpu" or case.delta.environment or ranks != gpus:
                raise SystemExit(f"{case.id} {variant}: expected a speed predicted for {gpus} GPUs, without variables of the environment")
            row = {"gpus": gpus, "model": case.id, "layout": variant, "config": str(config), "settings": overrides}
            speed = {"value": predicted.value, "low": predicted.low, "high": predicted.high}
            yield {**row, "predicted": {"tokens_per_s_per_gpu": speed, "memory_gib": round(_held(overrides, gpus, config) / GIB, 1)}}


def _held(overrides: Mapping[str, Any], gpus: int, config: Path) -> float:
    """Bytes of the fullest rank; rows are text, so the vision tower keeps no activations."""
    report = dry_run.dry_run(tree.load(config, overrides), gpus)
    return max(stage.peak - stage.vision for stage in report.stages)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def name_of(row: Mapping[str, Any]) -> str:
    """A configuration in a word, such as `4/moe-128/ep4`, or `h100x4/moe-128/ep4` on other GPUs than the usual."""
    hardware = row.get("hardware", USUAL)
    return f"{'' if hardware == USUAL else f'{hardware}x'}{row['gpus']}/{row['model']}/{row['layout']}"


def todo(rows: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], pairs: int, *, again: bool) -> list[tuple[str, int]]:
    """The runs that are missing, as configuration and turn, in their order.

    Turn 0 is each once, shuffled. The turns after it are those of the two fastest of each model at one length, in alternating order, and
    begin when all of turn 0 have been run.
    """
    finished = {(r["name"], r["turn"]) for r in runs if r["outcome"] == "ok" or not again}
    names = [name_of(r) for r in rows]
    random.Random(0).shuffle(names)
    first = [(name, 0) for name in names if (name, 0) not in finished]
    if first or not pairs:
        return first
    turns = []
    for _, fastest in sorted(_ranked(rows, runs).items()):
        two = [name for name, _ in fastest[:2]]
        turns += [(name, turn) for turn in range(1, pairs + 1) for name in (two if turn % 2 else two[::-1]) if (name, turn) not in finished]
    return turns


def _ranked(rows: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[tuple[str, float]]]:
    """By GPUs and model, the configurations that ran in rows of the usual length, or in those of a case, the fastest first."""
    speeds = speeds_of(runs)
    groups: dict[tuple[str, int, str], list[tuple[str, float]]] = {}
    for row in rows:
        if name_of(row) in speeds and ("config" in row or row["settings"]["data.seq_len"] == 4096):
            key = (row.get("hardware", USUAL), row["gpus"], row["model"])
            groups.setdefault(key, []).append((name_of(row), speeds[name_of(row)]))
    return {key: sorted(each, key=lambda pair: -pair[1]) for key, each in groups.items()}


def speeds_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens per second and GPU of each configuration: the median of its runs."""
    by_name: dict[str, list[float]] = {}
    for run in runs:
        if run["outcome"] == "ok":
            by_name.setdefault(run["name"], []).append(run["tokens_per_s_per_gpu"])
    return {name: statistics.median(values) for name, values in by_name.items()}


def launch(row: Mapping[str, Any], gpus: Sequence[str], limit_s: float, *, rehearse: bool, timed: int | None) -> dict[str, Any]:
    """One run, of so many timed steps if that is said; its figures, or why it has none."""
    overrides, file = dict(row["settings"]), row.get("config", str(ROOT / CONFIG))
    config = tree.load(Path(file), overrides)
    if timed is not None:
        overrides |= {"train.steps": config.train.warmup_steps + timed, "train.log_every": 1}
    if rehearse:
        layout = {k: v for k, v in overrides.items() if k.startswith("parallel.")}
        vision, experts = config.model.vision is not None, config.model.num_experts
        tiny = "qwen3_vl_moe_tiny" if vision else "qwen3_moe_tiny" if experts else "qwen3_tiny"
        overrides, file = {**layout, "model": tiny, **_SMALL}, str(ROOT / CONFIG)
    words = [file, *(f"{k}={json.dumps(v)}" for k, v in overrides.items())]
    return megatron_table.launch(words, gpus, limit_s, lambda folder: megatron_table.measured(folder, len(gpus), ()))


def asked_for(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that the command line is about: those of cases, or the registered ones."""
    return list(of_cases(arguments.cases, arguments.gpus)) if arguments.cases else read(FOLDER / REGISTERED)


def run(arguments: argparse.Namespace) -> int:
    """Run what is missing, as far as the budget goes."""
    began = time.monotonic()
    path = arguments.out / RUNS
    machine = detect.detect()
    gpu = machine.gpu or ""
    hardware = arguments.hardware if arguments.rehearse else next((name for name in ("h100", "h200") if name in gpu.lower()), gpu)
    rows = [
        r
        for r in asked_for(arguments)
        if r["gpus"] == arguments.gpus and r.get("hardware", USUAL) == hardware and all(w in name_of(r) for w in arguments.only)
    ]
    devices = [str(i) for i in range(arguments.gpus)] if arguments.rehearse else detect.device_ids(machine)[: arguments.gpus]
    if len(devices) < arguments.gpus or not fork_server.import_all("torch" if arguments.rehearse else "megatron"):
        print(f"needs {arguments.gpus} GPUs that no import has touched yet, or --rehearse", file=sys.stderr)
        return 2
    by_name, runs, tried = {name_of(r): r for r in rows}, read(path), set[tuple[str, int]]()
    while missing := [each for each in todo(rows, runs, arguments.pairs, again=arguments.again) if each not in tried]:
        if time.monotonic() - began > arguments.budget:
            print(f"the budget leaves out {len(missing)} runs", flush=True)
            return LEFT_OUT
        name, turn = missing[0]
        tried.add((name, turn))
        found = {"name": name, "turn": turn, "rehearsed": arguments.rehearse}
        found |= launch(by_name[name], devices, arguments.limit, rehearse=arguments.rehearse, timed=arguments.timed)
        runs = [r for r in runs if (r["name"], r["turn"]) != (name, turn)] + [found]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in runs), encoding="utf-8")
        figures = f"{found['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" if found["outcome"] == "ok" else found["message"]
        print(f"{name}  turn {turn}  {figures}  [{found['wall_s']} s]", flush=True)
    return 0


def report(rows: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """Each configuration beside its run, the errors, and for each model whether the layout that the planner would choose is near the
    best."""
    speeds = speeds_of(runs)
    memory_gib = {r["name"]: r["peak_memory_bytes"] / GIB for r in runs if r["outcome"] == "ok"}
    failed = {r["name"]: r["message"] for r in runs if r["outcome"] != "ok"}
    lines = [
        "| configuration | predicted | 80 % | measured | error | predicted GiB | measured GiB | error |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    errors: list[tuple[float, float, bool]] = []
    for row in rows:
        name, prediction = name_of(row), row["predicted"]
        tokens, gib = prediction["tokens_per_s_per_gpu"], prediction["memory_gib"]
        start = f"| {name} | {tokens['value']:,.0f} | {tokens['low']:,.0f} to {tokens['high']:,.0f} |"
        if name not in speeds:
            lines.append(f"{start} {failed.get(name, 'not run')} | | {gib} | | |")
            continue
        off, memory_off = tokens["value"] / speeds[name] - 1, gib / memory_gib[name] - 1
        errors.append((abs(off), abs(memory_off), tokens["low"] <= speeds[name] <= tokens["high"]))
        lines.append(f"{start} {speeds[name]:,.0f} | {100 * off:+.1f} % | {gib} | {memory_gib[name]:.1f} | {100 * memory_off:+.1f} % |")
    if errors:
        middle, memory, inside = (
            statistics.median(e[0] for e in errors),
            statistics.median(e[1] for e in errors),
            sum(e[2] for e in errors),
        )
        lines += [
            "",
            f"{len(errors)} of {len(rows)} configurations: median error {100 * middle:.1f} % of speed, {100 * memory:.1f} % of memory; "
            f"{inside} in the interval",
        ]
    predicted = {name_of(r): r["predicted"]["tokens_per_s_per_gpu"] for r in rows}
    for (hardware, gpus, model), ranked in sorted(_ranked(rows, runs).items()):
        chosen = max((name for name, _ in ranked), key=lambda n: predicted[n]["value"])
        behind = ranked[0][1] / speeds[chosen] - 1
        tie = predicted[ranked[0][0]]["high"] >= predicted[chosen]["low"]
        verdict = "right" if behind <= NEAR else "in the tie set" if tie else "wrong"
        lines.append(
            f"{model} on {gpus} {hardware.upper()}s: chosen {chosen}, fastest {ranked[0][0]}, {100 * behind:.1f} % behind: {verdict}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4, 8), default=4, help="8: the whole Qwen3-30B-A3B")
    parser.add_argument("--hardware", choices=("h100", "h200"), default=USUAL, help="the GPUs to rehearse for")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="variants of these cases, instead of the registered layouts")
    parser.add_argument("--timed", type=int, help="timed steps of a run, instead of its configuration's")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the runs")
    parser.add_argument("--budget", type=float, default=560, help="seconds after which nothing is started")
    parser.add_argument("--limit", type=float, default=180, help="seconds that a run may take")
    parser.add_argument("--pairs", type=int, default=0, help="turns more of the two fastest of each model")
    parser.add_argument("--only", nargs="*", default=[], help="words that a configuration's name must hold")
    parser.add_argument("--again", action="store_true", help="run again what failed")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    arguments = parser.parse_args(argv)
    if arguments.command == "run":
        return run(arguments)
    print(report(asked_for(arguments), read(arguments.out / RUNS)))
    return 0


if __name__ == "__main__":
    megatron_table.leave(main())
