"""A dry run with a GPU: the real model of one rank of any world, with its wrapper and its optimizer's state, and what that takes.

torch's fake process group stands for all other ranks, so nothing is sent. Source:
Megatron-LM's `--fake-process-group`, which does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from playbook.errors import ConfigError
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.megatron import engine, groups, wrap

_FUSED = ("deepep", "hybridep")


@dataclass(frozen=True)
class Built:
    """One rank's model, as it was built. Units: bytes."""

    rank: int
    stage: int
    parameters: int
    """Of this rank's share of the model, before data parallelism shards them; counted from the model."""
    expected_parameters: int
    """The same by arithmetic."""
    allocated_bytes: int
    """What model, wrapper and optimizer hold on the GPU."""
    expected_bytes: float
    """State by arithmetic."""
    notes: tuple[str, ...] = ()


def build(config: TrainerConfig, world: int, device: torch.device, stage: int | None = None) -> Built:
    """Build the first rank of a stage, and take it down again; of the stage that is estimated to hold the most, if none is given.

    Raises:
        ConfigError: the configuration cannot run on so many ranks, or this machine cannot build it.
    """
    dry_run(config, world)
    if dist.is_initialized():
        raise ConfigError(
            "a dry run builds one rank in a process of its own, and this one is part of a run already; start it without torchrun"
        )
    chosen, notes = buildable(config)
    report = dry_run(chosen, world)
    estimate = max(report.stages, key=lambda s: s.states) if stage is None else report.stages[stage]
    rank = estimate.stage * world // config.parallel.pp
    engine.require(chosen, device, world)
    with alone(rank, world):
        before = allocated(device)
        groups.initialise(chosen)
        engine.seed(chosen)
        settings = engine.transformer_config(chosen)
        chunks = engine.build_chunks(chosen, settings, device)
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        wrapped = wrap.wrap(chosen, settings, chunks)
        optimizer = wrap.optimizer(chosen, wrapped)
        for part in wrap.parts(optimizer):
            wrap.hold_state(part)
        state_bytes = allocated(device) - before
    return Built(rank, estimate.stage, parameters, estimate.held, state_bytes, estimate.states, notes)


def buildable(config: TrainerConfig) -> tuple[TrainerConfig, tuple[str, ...]]:
    """The configuration without what a model alone cannot have or does not hold yet, and a note on each."""
    buildable_config, notes = config, list[str]()
    name, recipe = config.moe.dispatcher, config.precision.fp8
    if name in _FUSED:
        buildable_config = buildable_config.model_copy(update={"moe": config.moe.model_copy(update={"dispatcher": "alltoall"})})
        notes.append(f"built with alltoall: {name} opens connections of its own, which nobody answers here")
    if recipe != "none" and not config.megatron.fp8_param:
        plain = {"fp8": "none"}
        buildable_config = buildable_config.model_copy(update={"precision": config.precision.model_copy(update=plain)})
        notes.append(f"built without {recipe}: 8-bit copies of weights come with the first forward pass")
    return buildable_config, tuple(notes)


@contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """A block in which this process is one rank of `world`, with no other rank present."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def this_device() -> torch.device:
    """The GPU that a dry run builds on; the CPU, which is refused, where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on the GPU."""
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
