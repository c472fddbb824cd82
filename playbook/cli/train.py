"""`playbook config` and `playbook train`: read, check, export and run trainer configurations."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from playbook.cli import slurm
from playbook.cli.options import AsJson, ClusterFile, Imbalance, JobId, LauncherName, Network, Nodes, NoWait, Print, commands
from playbook.cli.output import print_json, print_table, say
from playbook.errors import NO_TORCH, ConfigError, PlaybookError
from playbook.paths import shipped
from playbook.yaml_files import did_you_mean

if TYPE_CHECKING:
    from playbook.planner.memory import StageBytes
    from playbook.planner.time.step import StepTime
    from playbook_trainer.config.tree import TrainerConfig
    from playbook_trainer.megatron.probe import Built

GIB = 1 << 30
TARGETS = ("megatron-lm", "megatron-bridge", "torchtitan")
PLATFORMS = ("cpu", "hopper", "blackwell", "nvl72")

app = commands()
_config_app = commands()
app.add_typer(_config_app, name="config")


@_config_app.command("list")
def config_list(as_json: AsJson = False) -> None:
    """List the recipes: published configurations as files, with the GPUs that each is meant for."""
    from playbook_trainer.config import recipes

    rows = [{**r.model_dump(mode="json"), "file": str(_recipes() / r.file)} for r in recipes.index().recipes]
    if as_json:
        print_json(rows)
    else:
        print_table([{**row, "gpus": " or ".join(map(str, row["gpus"]))} for row in rows], ("file", "gpus", "hardware", "title"))


def _recipes() -> Path:
    """The folder of the recipes, as seen from here where it lies below."""
    from playbook_trainer.config import recipes

    folder = recipes.folder()
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


@_config_app.command("export")
def config_export(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration, such as trainer/configs/qwen3_30b_a3b_24l.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key.path=value", help="key.path=value, such as parallel.ep=8.")] = None,
    to: Annotated[
        str, typer.Option("--to", help="megatron-lm (flags), megatron-bridge (overrides) or torchtitan (a Python file).")
    ] = "megatron-lm",
    platform: Annotated[
        str, typer.Option(help="The GPUs that environment variables are for: hopper, blackwell (nodes of eight), nvl72 or cpu.")
    ] = "hopper",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on one line of stdout, with the keys behind each setting.")
    ] = False,
) -> None:
    """Print a configuration as Megatron-LM flags, Megatron-Bridge overrides or a torchtitan Python file; what the other trainer lacks becomes a comment."""
    from playbook_trainer.config.tree import load, parse_overrides
    from playbook_trainer.export.render import export as exported

    _one_of("--to", to, TARGETS)
    _one_of("--platform", platform, PLATFORMS)
    _refuse_name(config, to)
    found = exported(load(Path(config), parse_overrides(overrides or [])), to, platform)  # type: ignore[arg-type]
    if as_json:
        print_json(found.document())
    else:
        say(found.text().rstrip())


def _refuse_name(config: str, to: str) -> None:
    """Refuse a name that is no file: of a published configuration, or of a model.

    Raises:
        PlaybookError: it is one; the message says what to write instead.
    """
    from playbook.planner.models import named
    from playbook_trainer.config import recipes

    if os.path.lexists(config) or shipped("configs", Path(config)):
        return
    file = f"{Path(config).name.removesuffix('.yaml')}.yaml"
    if file in {r.file for r in recipes.index().recipes}:
        raise PlaybookError(f"{config} is no file; expected that of the published configuration: {_recipes() / file}")
    if model := named(config):
        raise PlaybookError(
            f"{config} is a model, expected the file of a configuration; `playbook config list` names published ones,"
            f" and `playbook plan {model} --gpus N --export {to}` prints the fastest layout"
        )


def _one_of(option: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise PlaybookError(f"{option} is '{value}'{did_you_mean(value, names)}")


@app.command()
def calibrate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, such as h200.json.")],
    budget: Annotated[float, typer.Option(help="Seconds; kernels that do not fit are named in the file.")] = 300.0,
) -> None:
    """Measure what this GPU reaches on the kernels that a training step is made of, and what collectives take where there are several; about 80 seconds on an H200."""
    if find_spec("torch") is None:
        raise PlaybookError(NO_TORCH)
    from playbook_trainer.calibrate import main as measure

    raise typer.Exit(measure([str(out), "--budget", str(budget)]))


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
    request = slurm.Request(nodes, cluster, show, not no_wait, job, as_json)
    slurm.check_request(launcher, request, ranks_per_node)
    if launcher != "local":
        raise typer.Exit(slurm.train(Path(config), overrides or [], launcher, ranks_per_node, request))
    from playbook_trainer.__main__ import main as run

    try:
        code = run([config, *(overrides or [])])
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
    """Print the layout and the estimated memory of each rank, and where hardware is named its predicted speed; with `build`, also the memory of one rank that is built here. One GPU if `gpus` is None.

    Raises:
        PlaybookError: the configuration does not load, cannot run on that many GPUs, or cannot be built here.
    """
    from playbook.planner.choice.routing import measured
    from playbook.planner.hardware.named import machine
    from playbook.planner.memory import verdict
    from playbook_trainer.config.checks import notes
    from playbook_trainer.config.dry_run import dry_run, plan_of, predicted
    from playbook_trainer.config.tree import load, parse_overrides

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
        stages = [s.row() for s in report.stages]
        totals = {"num_parameters": report.num_parameters, "unit": "bytes", "peak": most.peak, "stage": most.stage}
        print_json(
            {"legal": True, "layout": report.layout, **totals, **speed, "stages": stages, **({"built": asdict(built)} if built else {})}
        )
        return

    def cells(stage: StageBytes) -> dict[str, str]:
        figures = ("states", "gathered", "activations", "vision", "loss", "replayed", "workspace", "peak", "host")
        own = {"stage": str(stage.stage), "layers": str(stage.layers), "parameters": f"{stage.held / 1e9:.3f} B"}
        return own | {name: f"{getattr(stage, name) / GIB:.2f}" for name in figures}

    say(f"can run: {'  '.join(f'{k} {v}' for k, v in report.layout.items())}")
    print_table([cells(s) for s in report.stages], tuple(cells(most)))
    say(f"{report.num_parameters / 1e9:.3f} B parameters; a rank of stage {most.stage} holds {most.peak / GIB:.1f} GiB, columns in GiB")
    say(
        "states follow from the layout; activations are an estimate for fused kernels, those of vision a bound; communication buffers are not in it"
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
            f"built rank {built.rank} of {gpus} (stage {built.stage}): {built.parameters / 1e9:.3f} B parameters and {built.allocated_bytes / GIB:.2f} GiB "
            f"of weights, gradients and optimizer state; by arithmetic {built.expected_parameters / 1e9:.3f} B and {built.expected_bytes / GIB:.2f} GiB"
        )
        for note in built.notes:
            say(note)


def _speed(time: StepTime | None) -> str:
    """A predicted speed in one line."""
    if time is None:
        return "no speed is predicted: the planner's laws are of BF16, and train.dtype is fp32"
    speed = time.tokens_per_s_per_gpu
    return (
        f"predicted: {speed.value:,.0f} tokens/s/GPU, 80 % between {speed.low:,.0f} and {speed.high:,.0f}; a step takes {time.seconds.value:.3g} s; "
        + "; ".join(time.assumptions)
    )


def _build(config: TrainerConfig, gpus: int) -> Built:
    """Build the model of one rank on the GPU of this machine."""
    if config.backend != "megatron":
        raise ConfigError(f"--build builds models of the megatron backend, found {config.backend}; leave it out, or set backend: megatron")
    from playbook_trainer.megatron.checks import installed

    missing = [name for name in ("torch", "megatron.core") if not installed(name)]
    if missing:
        raise ConfigError(
            f"--build needs {' and '.join(missing)}, which is not installed; run pip install '.[train,megatron]' in a clone of Playbook"
        )
    from playbook_trainer.config import environment

    environment.apply(config)
    from playbook_trainer.megatron.probe import build, this_device

    return build(config, gpus, this_device())
