"""`playbook layout`: check a layout, estimate its memory, count its work and traffic."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from playbook.errors import ConfigError, ExitCode
from playbook.planner.choice.plain_data import pipeline_string
from playbook.planner.hardware import machine
from playbook.planner.memory import GIB, StageBytes, estimate, verdict
from playbook.planner.models import find, named
from playbook.planner.plan import Near, Plan, idle, nearest, parse
from playbook.planner.time.cluster import cluster, clusters
from playbook.planner.traffic import traffic
from playbook.text import count, key_of
from playbook_app.cli.options import AsJson, Experts, Layers, commands, cuts
from playbook_app.cli.output import print_json, print_snapshot, print_table, say
from playbook_bench.trace.reports import memory_from_file

_MIB = 1 << 20

app = commands()

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Degrees, batch and options, such as tp=1 ep=8 mbs=2 seq_len=4096.")
]
Model = Annotated[
    str, typer.Option("--model", help="A model's name, such as deepseek_v3, or the path of a config.json; an unknown one lists them all.")
]
_Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs, as gpus=N.")]


@app.command("check")
def layout_check(
    model: Model,
    settings: Settings = None,
    gpus: _Gpus = None,
    layers: Layers = None,
    experts: Experts = None,
    as_json: AsJson = False,
) -> None:
    """Check a layout against every rule and suggest the nearest legal ones; exit code 2 if a rule is broken."""
    plan = _plan(model, [*(settings or []), *cuts(layers, experts)], gpus)
    broken = plan.broken()
    pipeline = None if broken else pipeline_string(plan)
    near = nearest(plan) if broken else []
    if as_json:
        offers = [{"changes": n.changes, "distance": n.distance, "layout": degrees(n.plan)} for n in near]
        print_json({"legal": not broken, "layout": degrees(plan), "broken": broken, "nearest": offers, "pipeline_layout": pipeline})
    elif not broken:
        say(f"legal: {_line(plan)}")
        if pipeline:
            say(f"layers do not divide into {plan.pp * plan.vpp} chunks: it starts with --pipeline-model-parallel-layout '{pipeline}'")
    else:
        _explain(broken, near)
    if broken:
        raise typer.Exit(ExitCode.USAGE)


@app.command("memory")
def layout_memory(
    model: Model,
    settings: Settings = None,
    gpus: _Gpus = None,
    layers: Layers = None,
    experts: Experts = None,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.001, help="GiB of one GPU's memory: says whether the peak fits.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="Kind of GPU, such as h100, or a file of it: says whether the peak fits.")
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option("--snapshot", help="A memory snapshot of PyTorch: what holds its peak, beside the estimate's parts.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate peak allocated memory per rank and pipeline stage, for the layers of megatron-core (a vision tower is split over TP).

    With --memory or --hardware, exit code 2 if it does not fit.
    """
    if hardware is not None:
        memory = machine(hardware).memory_gib
    plan = _plan(model, [*(settings or []), *cuts(layers, experts)], gpus)
    stages = estimate(plan)
    most = max(stages, key=lambda s: s.peak)
    fit = None if memory is None else verdict(most.peak, memory)
    beside = _beside(snapshot, stages) if snapshot else None
    if as_json:
        print_json(
            {
                "layout": degrees(plan),
                "unit": "bytes",
                "peak": most.peak,
                "stage": most.number,
                "memory_gib": memory,
                "verdict": fit,
                **({"snapshot": beside} if beside else {}),
                "stages": [s.row() for s in stages],
            }
        )
    else:
        say(_line(plan))
        print_table([_row(s) for s in stages], tuple(_row(most)))
        say(
            f"peak {most.peak / GIB:.1f} GiB allocated on stage {most.number}, columns in GiB; reserved memory and the driver's are not in"
            " it"
        )
        say(_unnamed(most.peak) if fit is None else f"{fit}: a GPU has {memory:g} GiB")
        if beside:
            say("")
            print_snapshot(beside)
    if fit == "does not fit":
        raise typer.Exit(ExitCode.USAGE)


_AS_PLANNED = {
    "parameters": ("parameters", "fp8_weights"), "gradients": ("gradients",), "optimizer": ("optimizer",),
    "activations": ("activations", "vision", "replayed"), "gathered": ("gathered",), "loss": ("loss",), "workspace": ("workspace",),
}  # fmt: skip
"""The parts of a snapshot, as the estimate counts them."""


def _beside(file: Path, stages: list[StageBytes]) -> dict[str, Any]:
    """A snapshot with the parts of the stage whose peak is nearest; all ranks of a stage hold the same, and a snapshot does not say its
    rank.
    """
    snapshot = memory_from_file(file)
    stage = min(stages, key=lambda s: abs(s.peak - snapshot.peak))
    planned = {part: sum(getattr(stage, name) for name in names) for part, names in _AS_PLANNED.items()}
    return {**asdict(snapshot), "planned": planned, "planned_peak": stage.peak, "stage": stage.number}


def _unnamed(peak: float) -> str:
    """What can be said of a peak where no GPU is named."""
    holders = [name for name in clusters() if peak <= cluster(name).memory_gib * GIB]
    sentence = f"it is under what {', '.join(holders)} have" if holders else "no GPU that is known here has that much"
    return f"no GPU is named: {sentence}; --hardware or --memory says whether it fits"


@app.command("traffic")
def layout_traffic(
    model: Model,
    settings: Settings = None,
    gpus: _Gpus = None,
    layers: Layers = None,
    experts: Experts = None,
    as_json: AsJson = False,
) -> None:
    """Count FLOPs per token, the pipeline's bubble, and the bytes that each rank sends."""
    plan = _plan(model, [*(settings or []), *cuts(layers, experts)], gpus)
    counts = traffic(plan)
    if as_json:
        print_json({"layout": degrees(plan), **counts})
        return
    say(_line(plan))
    say(f"{counts['flops_per_token'] / 1e9:.2f} GFLOP per token, forward and backward; bubble {counts['bubble']:.1%}")
    rows = [
        {**row, "forward MiB": f"{row['forward'] / _MIB:.1f}", "backward MiB": f"{row['backward'] / _MIB:.1f}"} for row in counts["sent"]
    ]
    print_table(rows, ("what", "per", "forward MiB", "backward MiB"))


def _plan(model: str, settings: list[str], gpus: int | None) -> Plan:
    """The plan of a model known by name, or of a configuration file; a file's model goes by the file's name, or that of its folder."""
    path = Path(model)
    name = named(model) or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    plan = parse(name, settings, gpus=gpus, shape=find(model))
    useless = idle(plan, [key_of(word) for word in settings])
    if useless:
        raise ConfigError("; ".join(useless))
    return plan


def degrees(plan: Plan) -> dict[str, Any]:
    """All degrees and batch sizes of a plan, derived ones included."""
    keys = ("model", "gpus", "tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "mbs", "seq_len", "microbatches")
    return {k: getattr(plan, k) for k in keys} | {"layers": plan.shape.layers, "gbs": plan.global_batch}


def _line(plan: Plan) -> str:
    return "  ".join(f"{k} {v}" for k, v in degrees(plan).items())


def _explain(broken: list[str], near: list[Near]) -> None:
    say(f"{count(len(broken), 'broken rule')}")
    for sentence in broken:
        say(f"  - {sentence}")
    say("nearest legal layouts" if near else "no choice of degrees makes this legal: first change the options that the rules above name")
    for layout in near:
        changes = " ".join(f"{k}={str(v).lower()}" for k, v in layout.changes.items())
        say(f"  {changes}    ({_line(layout.plan)})")


def _row(stage: StageBytes) -> dict[str, str]:
    """One row of the table, in GiB; columns that are zero are kept, so that nothing seems forgotten."""
    parts = ("parameters", "gradients", "optimizer", "fp8_weights", "gathered", "activations", "transient", "workspace", "peak", "host")
    figures = stage.row()
    flying = "+".join(map(str, stage.in_flight))
    return {"stage": str(stage.number), "layers": str(stage.layers), "in flight": flying} | {k: f"{figures[k] / GIB:.2f}" for k in parts}
