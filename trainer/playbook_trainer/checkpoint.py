"""Checkpoints: each rank saves its own part; a checkpoint exists once its folder has its final name.

    <dir>/step_00000020/rank_0.pt ...   complete
    <dir>/.writing-00000040/            being written; ignored and replaced

Resuming needs the same layout and world size; the files are read with weights_only, so a hostile file cannot run code.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playbook.errors import ConfigError
from playbook_trainer.config import CheckpointConfig
from playbook_trainer.optimizer import Shard
from playbook_trainer.parallel.axes import Axes

_NAME = re.compile(r"step_(\d{8})\Z")


def save(
    config: CheckpointConfig, step: int, parts: list[Shard], optimizer: torch.optim.Optimizer, data: dict[str, Any], axes: Axes
) -> None:
    """Write every rank's part, then give the folder its name; older ones beyond `keep` go."""
    root = Path(str(config.dir))
    writing, final = root / f".writing-{step:08d}", root / f"step_{step:08d}"
    if axes.world.rank == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    _barrier(axes)
    state = {
        "step": step,
        "world_size": axes.world.size,
        "model": {p.name: p.local.detach() for p in parts},
        "optimizer": optimizer.state_dict(),
        "data": data,
    }
    torch.save(state, writing / f"rank_{axes.world.rank}.pt")
    _barrier(axes)
    if axes.world.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        for old in complete(root)[: -config.keep]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier(axes)


def complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in root.glob("step_*") if _NAME.match(p.name)) if root.is_dir() else []


def restore(config: CheckpointConfig, parts: list[Shard], optimizer: torch.optim.Optimizer, axes: Axes) -> dict[str, Any] | None:
    """Load the newest complete checkpoint into this rank's parts; None where there is none.

    Raises:
        ConfigError: the checkpoint belongs to another world size, layout or model.
    """
    found = complete(Path(str(config.dir)))
    if not found:
        return None
    path = found[-1] / f"rank_{axes.world.rank}.pt"
    if not path.is_file():
        raise ConfigError(f"{found[-1]} has no {path.name}: it was saved by fewer ranks; resume on the same number of ranks")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    shapes = {p.name: tuple(p.local.shape) for p in parts}
    saved = {name: tuple(t.shape) for name, t in state["model"].items()}
    if state["world_size"] != axes.world.size or shapes != saved:
        raise ConfigError(
            f"{found[-1]} was saved by {state['world_size']} ranks in another layout or of another model; "
            f"this run has {axes.world.size} ranks. Resume with the layout that saved it, or set checkpoint.resume=false"
        )
    with torch.no_grad():
        for part in parts:
            part.local.copy_(state["model"][part.name])
    optimizer.load_state_dict(state["optimizer"])
    return {"step": state["step"], "data": state["data"]}


def _barrier(axes: Axes) -> None:
    if axes.world.size > 1:
        dist.barrier()
