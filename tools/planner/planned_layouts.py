"""Runs whose speed and memory were predicted and written down before any: layouts on two or four GPUs, those of the whole Qwen3-30B-A3B on
eight, or the variants of prediction cases.

    python tools/planner/planned_layouts.py register --hardware h100 --gpus 8   # predictions, into docs/parity/planned-layouts.jsonl
    python tools/planner/planned_layouts.py run --gpus 8 --budget 560           # each once, shuffled, into planned-layouts-runs.jsonl
    python tools/planner/planned_layouts.py run --gpus 8 --pairs 4              # then the two fastest of each model, in turns
    python tools/planner/planned_layouts.py report                              # errors, winners and misses
    python tools/planner/planned_layouts.py run --gpus 1 --cases predicted-dense-4k-megatron predicted-dense-4k-torch

Predictions are not registered once there are runs on such GPUs. With `--cases`, `report` goes likewise.
How far off a prediction is costs one launch; whether its interval holds takes the case's own series (`playbook bench run`).
A call goes on where the last one stopped; a run that failed is run again only with `--again`. Ranks are forks of one process that has
imported torch, megatron-core and Transformer Engine. `--rehearse` trains tiny models with the same layouts on the CPU, which says that the
runner works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
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

from playbook.planner.time.cluster import cluster  # noqa: E402
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
SHARE = 0.85
"""Of a GPU's memory: what the planner does not count, buffers of collectives among it, has to fit beside."""
GIB = 2**30
NEAR = 0.05
"""A choice is right if it is this close to the best."""

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": "qwen3_8b"},
    "moe-128": {"model": "qwen3_30b_a3b"},
    "moe-64": {"model": "qwen3_30b_a3b", "model.num_experts": 64, "model.top_k": 4, "model.expert_ffn_size": 1536},
    "vision": {"model": "qwen3_vl_30b_a3b"},
}
"""Four models of about one width; the wider experts are half as many, of twice the width."""
_SMALL: dict[str, Any] = {
    "data.seq_len": 32,
    "train.dtype": "fp32",
    "train.steps": 2,
    "train.warmup_steps": 1,
    "train.log_every": 1,
    "train.global_batch_size": 8,
    "parallel.sequence_parallel": False,
}

_TP = {"parallel.tp": 2, "parallel.sequence_parallel": True}
_LONG = {"parallel.cp": 2, "data.seq_len": 32768}
_TORCH = {
    "backend": "torch",
    "optimizer.moments_dtype": "bf16",
    "optimizer.master_weights": "remainder",
    "parallel.reduce_dtype": "bf16",
}
_MEGATRON = {"megatron.precision_aware_optimizer": True, "megatron.grad_reduce_dtype": "bf16", "optimizer.moments_dtype": "bf16"}
"""States in 16 bits where a backend can have them: only so does the whole model fit eight GPUs of 80 GB."""
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "fsdp2": {"backend": "torch"},
        "ep4": {"parallel.ep": 4},
        "tp2-ep2": {**_TP, "parallel.ep": 2, "parallel.etp": 1},
        "pp2-ep2": {"parallel.pp": 2, "parallel.ep": 2},
        "cp2-32k": {**_LONG, "parallel.ep": 4},
        "tp2-pp2": {**_TP, "parallel.pp": 2, "parallel.etp": 2},
    },
    2: {
        "fsdp2": {"backend": "torch"},
        "ep2": {"parallel.ep": 2},
        "tp2": {**_TP, "parallel.etp": 2},
        "pp2": {"parallel.pp": 2},
        "cp2-32k": {**_LONG, "parallel.ep": 2},
    },
    8: {
        "fsdp2": _TORCH,
        "ep8-torch": {**_TORCH, "parallel.ep": 8},
        "ep4-fsdp2": {**_TORCH, "parallel.ep": 4},
        "ep8": {**_MEGATRON, "parallel.ep": 8},
        "ep4-pp2": {**_MEGATRON, "parallel.ep": 4, "parallel.pp": 2},
        "tp2-ep8": {**_MEGATRON, **_TP, "parallel.ep": 8, "parallel.etp": 1},
        "megatron-fsdp": {"megatron.data_parallel": "megatron_fsdp", "megatron.grad_reduce_dtype": "bf16"},
        "cp2-ep8-32k": {**_MEGATRON, **_LONG, "parallel.ep": 8},
    },
}
"""By number of GPUs; on eight they are those of one whole model."""
WHOLE = {8: "moe-128"}
"""The model that keeps all its layers, by number of GPUs; what fits is a matter of micro-batch and recompute there."""
_SPARING: tuple[dict[str, Any], ...] = tuple(
    {"train.micro_batch_size": rows, **again}
    for rows in (4, 2, 1)
    for again in (
        {},
        *({"train.recompute": "selective", "train.recompute_modules": ["layernorm", module]} for module in ("moe_act", "moe")),
        {"train.recompute": "full"},
    )
)
"""Micro-batches and recompute to choose from."""
_DENSE = {"ep4": "dp4", "ep2": "dp2", "tp2-ep2": "tp2", "pp2-ep2": "pp2"}
"""What is left of a layout where there are no experts to spread."""
_FUSED = {
    "train.fused_activation": True,
    "train.fused_norms": True,
    "train.fused_loss": True,
    "train.compile.decoder": True,
    "optimizer.fused": True,
    "moe.apply_probs_on": "activation",
    "moe.fused_permutation": True,
    "moe.fused_router": True,
}
"""Kernels of the torch backend that a prediction takes for granted."""


def settings(model: str, layout: str, gpus: int, layers: int) -> dict[str, Any]:
    """What the trainer is told."""
    layout_settings = LAYOUTS[gpus][layout]
    rows = 2 if "data.seq_len" not in layout_settings else 1
    batch = 8 * gpus if rows == 2 else 2 * gpus
    trainer_settings: dict[str, Any] = {
        "backend": "megatron", **MODELS[model], "model.num_layers": layers, "data.seq_len": 4096, "train.micro_batch_size": rows,
        "train.global_batch_size": batch, **layout_settings,
    }  # fmt: skip
    if trainer_settings["backend"] == "torch":
        trainer_settings |= _FUSED
    if model == "dense":
        trainer_settings = {
            k: v for k, v in trainer_settings.items() if k not in ("parallel.ep", "parallel.etp") and not k.startswith("moe.")
        }
    return trainer_settings


def registered(hardware: str, gpus: int) -> Iterator[dict[str, Any]]:
    """Every configuration with its prediction: the deepest model, by twos, that all its layouts hold, or the whole one."""
    capacity = SHARE * cluster(hardware).memory_gib * GIB
    layouts = LAYOUTS[gpus]
    if gpus in WHOLE:
        yield from whole(hardware, gpus, capacity)
    else:
        for model in MODELS:
            layers = 48 if model != "dense" else 36
            while any(_held(settings(model, layout, gpus, layers), gpus) > capacity for layout in layouts):
                layers -= 2
            for layout in layouts:
                trainer_settings = settings(model, layout, gpus, layers)
                name = _DENSE.get(layout, layout) if model == "dense" else layout
                yield _row(hardware, gpus, model, name, trainer_settings)


def whole(hardware: str, gpus: int, capacity: float) -> Iterator[dict[str, Any]]:
    """The layouts of a whole model, each with the micro-batch and the recompute that are predicted to be its fastest of those that fit."""
    model = WHOLE[gpus]
    for layout in LAYOUTS[gpus]:
        fits = [s for spared in _SPARING if _held(s := settings(model, layout, gpus, 48) | spared, gpus) <= capacity]
        rows = [_row(hardware, gpus, model, layout, s) for s in fits]
        yield max(rows, key=lambda row: row["predicted"]["tokens_per_s_per_gpu"]["value"])


def _row(hardware: str, gpus: int, model: str, layout: str, trainer_settings: dict[str, Any]) -> dict[str, Any]:
    row = {"hardware": hardware, "gpus": gpus, "model": model, "layout": layout}
    return {**row, "settings": trainer_settings, "predicted": _predicted(trainer_settings, gpus, hardware)}


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


def _predicted(overrides: Mapping[str, Any], gpus: int, hardware: str) -> dict[str, Any]:
    speed = dry_run.predicted(tree.load(ROOT / CONFIG, overrides), gpus, cluster(hardware))
    assert speed is not None
    figures = speed.tokens_per_s_per_gpu
    tokens = {k: float(f"{getattr(figures, k):.4g}") for k in ("value", "low", "high")}
    return {"tokens_per_s_per_gpu": tokens, "memory_gib": round(_held(overrides, gpus) / GIB, 1)}


def _held(overrides: Mapping[str, Any], gpus: int, config: Path = ROOT / CONFIG) -> float:
    """Bytes of the fullest rank; rows are text, so the vision tower keeps no activations."""
    report = dry_run.dry_run(tree.load(config, overrides), gpus)
    return max(stage.peak - stage.vision for stage in report.stages)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def name_of(row: Mapping[str, Any]) -> str:
    """A configuration in a word, such as `4/moe-128/ep4`, or `h100x4/moe-128/ep4` on other GPUs than the usual."""
    return f"{_machine(row.get('hardware', USUAL), row['gpus'])}/{row['model']}/{row['layout']}"


def _machine(hardware: str, gpus: int) -> str:
    return str(gpus) if hardware == USUAL else f"{hardware}x{gpus}"


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


def _hardware(device: str | None) -> str:
    """The planner's word for a GPU by its device name; the name itself where it has none."""
    return next((name for name in ("h100", "h200") if name in (device or "").lower()), device or "")


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
        overrides, file = (
            {**{k: v for k, v in overrides.items() if k.startswith("parallel.")}, "model": _tiny(config), **_SMALL},
            str(ROOT / CONFIG),
        )
    words = [file, *(f"{k}={json.dumps(v)}" for k, v in overrides.items())]
    return megatron_table.launch(words, gpus, limit_s, lambda folder: megatron_table.measured(folder, len(gpus), ()))


def _tiny(config: tree.TrainerConfig) -> str:
    """The model that stands for the configuration's in a rehearsal."""
    model = config.model
    return "qwen3_vl_moe_tiny" if model.vision is not None else "qwen3_moe_tiny" if model.num_experts else "qwen3_tiny"


def asked_for(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that the command line is about: those of cases, or the registered ones."""
    return list(of_cases(arguments.cases, arguments.gpus)) if arguments.cases else read(FOLDER / REGISTERED)


def run(arguments: argparse.Namespace) -> int:
    """Run what is missing, as far as the budget goes."""
    began = time.monotonic()
    path = arguments.out / RUNS
    machine = detect.detect()
    hardware = arguments.hardware if arguments.rehearse else _hardware(machine.gpu)
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
    parser.add_argument("command", choices=("register", "run", "report"))
    parser.add_argument("--gpus", type=int, choices=(1, *sorted(LAYOUTS)), default=4, help="8: the whole Qwen3-30B-A3B")
    parser.add_argument("--hardware", choices=("h100", "h200"), default=USUAL, help="the GPUs to predict for, or to rehearse")
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
    runs = read(arguments.out / RUNS)
    if arguments.command == "register":
        return register(arguments, runs)
    print(report(asked_for(arguments), runs))
    return 0


def register(arguments: argparse.Namespace, runs: Sequence[Mapping[str, Any]]) -> int:
    """Write the predictions of one kind and number of GPUs, beside those of others; never after a run on them."""
    rows = read(arguments.out / REGISTERED)
    machine = _machine(arguments.hardware, arguments.gpus)
    if any(r["name"].partition("/")[0] == machine for r in runs):
        print(
            f"{arguments.out / RUNS} holds runs on {arguments.gpus} {arguments.hardware}: predictions are not changed after them",
            file=sys.stderr,
        )
        return 1
    others = [row for row in rows if _machine(row.get("hardware", USUAL), row["gpus"]) != machine]
    text = "".join(json.dumps(row) + "\n" for row in (*others, *registered(arguments.hardware, arguments.gpus)))
    (arguments.out / REGISTERED).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
