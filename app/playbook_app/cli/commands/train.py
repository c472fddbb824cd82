"""`playbook train`: run a configuration, or say what each rank would hold."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from playbook.errors import ConfigError, PlaybookError
from playbook.planner.choice.routing import measured
from playbook.planner.hardware import machine
from playbook.planner.memory import GIB, StageBytes, verdict
from playbook.planner.time.step import StepTime
from playbook_app.cli.options import ClusterFile, Imbalance, JobId, LauncherName, Network, Nodes, NoWait, Print, commands
from playbook_app.cli.output import print_json, print_table, say
from playbook_trainer.__main__ import main as run_trainer
from playbook_trainer.config import environment
from playbook_trainer.config.checks import notes
from playbook_trainer.config.dry_run import dry_run, plan_of, predicted
from playbook_trainer.config.megatron_checks import installed
from playbook_trainer.config.tree import TrainerConfig, load, parse_overrides

if TYPE_CHECKING:
    from playbook_trainer.megatron.probe import Built


app = commands()


@app.command()
def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration, such as trainer/configs/qwen3_moe_tiny.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key.path=value", help="key.path=value, such as train.steps=50.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the configuration and print what each rank would hold; runs nothing.")
    ] = False,
    build: Annotated[
        bool, typer.Option("--build", help="With --dry-run, on a GPU: also build the model of one rank of the megatron backend.")
    ] = False,
    gpus: Annotated[int, typer.Option("--gpus", envvar="WORLD_SIZE", min=1, help="GPUs of the dry run.")] = 1,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", help="With --dry-run: kind of GPU, such as h200, or a file of it; says whether it fits, and its predicted speed."
        ),
    ] = None,
    network: Network = "",
    imbalance: Imbalance = "",
    launcher: LauncherName = "local",
    nodes: Nodes = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each node; the cluster file's, if not given.")] = None,
    cluster: ClusterFile = None,
    show: Print = False,
    no_wait: NoWait = False,
    job: JobId = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout, of a dry run or a job.")] = False,
) -> None:
    """Train: on one process, as one rank of torchrun, or with all ranks of a job of Slurm."""
    if dry_run:
        named = context.get_parameter_source("gpus").name != "DEFAULT"
        _show_dry_run(config, overrides or [], gpus if named else None, hardware, network, imbalance, build=build, as_json=as_json)
        return
    if hardware is not None or network or imbalance:
        raise PlaybookError("--hardware is part of a dry run; say --dry-run too")
    if build:
        raise PlaybookError("--build is part of a dry run; say --dry-run too")
    if context.get_parameter_source("gpus").name == "COMMANDLINE":
        raise PlaybookError("--gpus is part of a dry run; say --dry-run too, or start that many ranks with torchrun or --launcher slurm")
    from playbook_app.cli import jobs

    request = jobs.JobRequest(nodes, cluster, show, not no_wait, job, as_json)
    jobs.check_request(launcher, request, ranks_per_node)
    if launcher != "local":
        raise typer.Exit(jobs.train(Path(config), overrides or [], launcher, ranks_per_node, request))
    try:
        code = run_trainer([config, *(overrides or [])])
    except Exception:
        traceback.print_exc()
        code = 1  # the trainer's own code for it, as of `python -m playbook_trainer`; 5 would say that a checkpoint was saved
    raise typer.Exit(code)


def _show_dry_run(
    config: str,
    overrides: Sequence[str],
    gpus: int | None,
    hardware: str | None,
    network: str,
    imbalance: str,
    *,
    build: bool,
    as_json: bool,
) -> None:
    """Print the layout and the estimated memory of each rank, and where hardware is named its predicted speed; with `build`, also the
    memory of one rank that is built here. One GPU if `gpus` is None.

    Raises:
        PlaybookError: the configuration does not load, cannot run on that many GPUs, or cannot be built here.
    """
    if (network or imbalance) and not hardware:
        raise PlaybookError("--network and --imbalance speak of the predicted speed; add --hardware, such as --hardware h100")
    resolved = load(Path(config), parse_overrides(overrides))
    try:
        report = dry_run(resolved, gpus or 1)
    except ConfigError as e:
        raise e if gpus else ConfigError(f"{e}; --gpus N says on how many, without it one is taken") from None
    gpus = gpus or 1
    built = _build(resolved, gpus) if build else None
    most = max(report.stages, key=lambda s: s.peak)
    on = machine(hardware, network) if hardware else None
    routing = measured(imbalance) if imbalance else None
    time = predicted(resolved, gpus, on, routing) if on else None
    fits = verdict(most.peak, on.memory_gib) if on else None
    if as_json:
        speed = {"verdict": fits, "tokens_per_s_per_gpu": asdict(time.tokens_per_s_per_gpu) if time else None} if hardware else {}
        print_json(
            {
                "legal": True,
                "layout": report.layout,
                "num_parameters": report.num_parameters,
                "unit": "bytes",
                "peak": most.peak,
                "stage": most.number,
                **speed,
                "stages": [s.row() for s in report.stages],
                **({"built": {**asdict(built), "stage": built.stage + 1}} if built else {}),
            }
        )
        return

    def cells(stage: StageBytes) -> dict[str, str]:
        figures = ("states", "gathered", "activations", "vision", "loss", "replayed", "workspace", "peak", "host")
        head = {"stage": str(stage.number), "layers": str(stage.layers), "parameters": f"{stage.held / 1e9:.3f} B"}
        return head | {name: f"{getattr(stage, name) / GIB:.2f}" for name in figures}

    say(f"can run: {'  '.join(f'{k} {v}' for k, v in report.layout.items())}")
    print_table([cells(s) for s in report.stages], tuple(cells(most)))
    say(f"{report.num_parameters / 1e9:.3f} B parameters; a rank of stage {most.number} holds {most.peak / GIB:.1f} GiB, columns in GiB")
    say(
        "states follow from the layout; activations are an estimate for fused kernels, those of vision a bound; communication buffers"
        " are not in it"
    )
    if most.grown:
        say("gradients, among the states, come as activations go: of the two the larger counts in the peak")
    for note in notes(resolved):
        say(note)
    if on:
        say(f"{fits}: a GPU has {on.memory_gib:.4g} GiB")
        say(_speed(time))
        if routing:
            say(routing.about(routing.on(plan_of(resolved, gpus)), on))
    if built is not None:
        say(
            f"built rank {built.rank} of {gpus} (stage {built.stage + 1}): {built.parameters / 1e9:.3f} B parameters and"
            f" {built.allocated_bytes / GIB:.2f} GiB of weights, gradients and optimizer state; by arithmetic"
            f" {built.expected_parameters / 1e9:.3f} B and {built.expected_bytes / GIB:.2f} GiB"
        )
        for note in built.notes:
            say(note)


def _speed(time: StepTime | None) -> str:
    """A predicted speed in one line."""
    if time is None:
        return "no speed is predicted: the planner's laws are of BF16, and train.dtype is fp32"
    speed = time.tokens_per_s_per_gpu
    return (
        f"predicted: {speed.value:,.0f} tokens/s/GPU, 80 % between {speed.low:,.0f} and {speed.high:,.0f}, not scaled to"
        f" published runs as the figures of playbook plan are; a step takes {time.seconds.value:.3g} s; " + "; ".join(time.assumptions)
    )


def _build(config: TrainerConfig, gpus: int) -> Built:
    """Build the model of one rank on the GPU of this machine."""
    if config.backend != "megatron":
        raise ConfigError(f"--build builds models of the megatron backend, found {config.backend}; leave it out, or set backend: megatron")
    missing = [name for name in ("torch", "megatron.core") if not installed(name)]
    if missing:
        raise ConfigError(
            f"--build needs {' and '.join(missing)}, which is not installed; run pip install '.[train,megatron]' in a clone of Playbook"
        )
    environment.apply(config)
    from playbook_trainer.megatron.probe import build, this_device

    return build(config, gpus, this_device())
