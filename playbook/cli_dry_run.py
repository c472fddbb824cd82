"""`playbook train --dry-run`: what a configuration would be on so many GPUs. Part of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from playbook.cli_text import print_json, print_table, say

GIB = 1 << 30


def show(config: str, overrides: Sequence[str], gpus: int, *, as_json: bool) -> None:
    """Print the layout and what each rank would hold.

    Raises:
        PlaybookError: the configuration does not load, or cannot run on that many GPUs.
    """
    from playbook_trainer.config import load, parse_overrides
    from playbook_trainer.dry_run import dry_run
    from playbook_trainer.stage import Stage

    report = dry_run(load(Path(config), parse_overrides(overrides)), gpus)
    most = max(report.stages, key=lambda s: s.peak_bytes)
    if as_json:
        stages = [s.row() for s in report.stages]
        totals = {"num_parameters": report.num_parameters, "unit": "bytes", "peak_bytes": most.peak_bytes, "stage": most.stage}
        print_json({"legal": True, "layout": report.layout, **totals, "stages": stages})
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
