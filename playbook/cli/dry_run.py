"""`playbook train --dry-run`: what a configuration would be on so many GPUs. Part of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from playbook.cli.text import print_json, print_table, say
from playbook.errors import ConfigError

if TYPE_CHECKING:
    from playbook_trainer.config.stage_memory import Stage
    from playbook_trainer.config.tree import TrainerConfig
    from playbook_trainer.megatron.probe import Built

GIB = 1 << 30


def show(config: str, overrides: Sequence[str], gpus: int | None, *, build: bool, as_json: bool) -> None:
    """Print the layout and what each rank would hold, and with `build` what one rank of it does hold once it is built here; one GPU if none are named.

    Raises:
        PlaybookError: the configuration does not load, cannot run on that many GPUs, or cannot be built here.
    """
    from playbook_trainer.config.checks import notes
    from playbook_trainer.config.dry_run import dry_run
    from playbook_trainer.config.tree import load, parse_overrides

    resolved = load(Path(config), parse_overrides(overrides))
    try:
        report = dry_run(resolved, gpus or 1)
    except ConfigError as e:
        raise e if gpus else ConfigError(f"{e}; --gpus N says on how many, without it one is taken") from None
    gpus = gpus or 1
    built = _build(resolved, gpus) if build else None
    most = max(report.stages, key=lambda s: s.peak_bytes)
    if as_json:
        stages = [s.row() for s in report.stages]
        totals = {"num_parameters": report.num_parameters, "unit": "bytes", "peak_bytes": most.peak_bytes, "stage": most.stage}
        print_json({"legal": True, "layout": report.layout, **totals, "stages": stages, **({"built": asdict(built)} if built else {})})
        return

    def cells(stage: Stage) -> dict[str, str]:
        figures = ("state", "gathered", "activation", "vision", "loss", "replayed", "workspace", "peak", "host")
        own = {"stage": str(stage.stage), "layers": str(stage.layers), "parameters": f"{stage.parameters / 1e9:.3f} B"}
        return own | {name: f"{getattr(stage, f'{name}_bytes') / GIB:.2f}" for name in figures}

    say(f"can run: {'  '.join(f'{k} {v}' for k, v in report.layout.items())}")
    print_table([cells(s) for s in report.stages], tuple(cells(most)))
    say(
        f"{report.num_parameters / 1e9:.3f} B parameters; a rank of stage {most.stage} holds {most.peak_bytes / GIB:.1f} GiB, columns in GiB"
    )
    say(
        "states follow from the layout; activations are an estimate for fused kernels, those of vision a bound; communication buffers are not in it"
    )
    for note in notes(resolved):
        say(note)
    if built is not None:
        say(
            f"built rank {built.rank} of {gpus} (stage {built.stage}): {built.parameters / 1e9:.3f} B parameters and {built.allocated_bytes / GIB:.2f} GiB "
            f"of weights, gradients and optimizer state; by arithmetic {built.expected_parameters / 1e9:.3f} B and {built.expected_bytes / GIB:.2f} GiB"
        )
        for note in built.notes:
            say(note)


def _build(config: TrainerConfig, gpus: int) -> Built:
    """One rank's model, on this machine's GPU."""
    if config.backend != "megatron":
        raise ConfigError(f"--build builds models of the megatron backend, found {config.backend}; leave it out, or set backend: megatron")
    from playbook_trainer.megatron.checks import installed

    missing = [name for name in ("torch", "megatron.core") if not installed(name)]
    if missing:
        raise ConfigError(
            f"--build needs {' and '.join(missing)}, which is not installed; install perf-playbook with the extras train and megatron"
        )
    from playbook_trainer.config import environment

    environment.apply(config)
    from playbook_trainer.megatron.probe import build, this_device

    return build(config, gpus, this_device())
