"""`playbook train`: the trainer here, its dry run, or all its ranks as a job of Slurm."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated

import typer

from playbook.cli import slurm
from playbook.errors import PlaybookError


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
    launcher: slurm.LauncherName = "local",
    nodes: slurm.Nodes = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each node; the cluster file's, if not given.")] = None,
    cluster: slurm.ClusterFile = None,
    show: slurm.Print = False,
    no_wait: slurm.NoWait = False,
    job: slurm.JobId = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on one line of stdout, of a dry run or a job.")] = False,
) -> None:
    """Train: one rank alone, this rank of a torchrun launch, or all ranks of a job of Slurm."""
    if dry_run:
        from playbook.cli import dry_run as cli_dry_run

        named = context.get_parameter_source("gpus").name != "DEFAULT"
        cli_dry_run.show(config, overrides or [], gpus if named else None, build=build, as_json=as_json)
        return
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
