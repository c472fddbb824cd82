"""Weights of a sharded model from and to a Hugging Face folder; no rank ever holds the whole model.

Loading: each rank reads from the files only the boxes of the tensors that it holds, straight into its shard. Saving: tensor by tensor, the
ranks that hold a part send it to rank 0, which writes shards. Both follow from `sharding.local_boxes`, so they fit every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from playbook.errors import ConfigError
from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.huggingface import weights
from playbook_trainer.huggingface.names import HEAD, Rule, slices
from playbook_trainer.huggingface.weights import source_files
from playbook_trainer.torch.model.decoder import Decoder
from playbook_trainer.torch.parallel.sharding import Box, Put, local_boxes, set_values


@torch.no_grad()
def load(model: Decoder, axes: Axes, folder: Path, write: Put = set_values) -> weights.Files:
    """Fill this rank's shards from the folder; returns the files, which have counted what was read.

    Raises:
        ConfigError: the folder does not hold this model.
    """
    table = {rule.ours: rule for rule in weights.rules(model.config)}
    with ExitStack() as stack:
        files = weights.open_folder(model.config, folder, stack)
        twice = model.config.tie_word_embeddings and HEAD in files.shapes
        for name, param in model.named_parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            for local_box, box in local_boxes(param, name, axes):
                part = table[name].read(files, box)
                if twice and name == "embed.weight" and not torch.equal(part, files.read(HEAD, slices(box))):
                    raise ConfigError(f"{folder}: {HEAD} differs from the embedding; set model.tie_word_embeddings: false")
                write(name, local, slices(local_box), part)
    return files


@torch.no_grad()
def save(
    model: Decoder,
    axes: Axes,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = weights.MAX_SHARD_BYTES,
    masters: Mapping[str, Callable[[], Tensor]] | None = None,
    config: TrainerConfig | None = None,
) -> None:
    """Write the model as transformers stores it; every rank calls this. Rank 0 holds one tensor of ours and one file at a time.

    `masters` give this rank's values of parameters that are not held whole;
    the `config` of a run says what to keep of its source, and in which precision.

    Raises:
        ConfigError: the folder already holds weights.
    """
    rank = axes.world.rank
    agree_on_folder(rank, axes.world.size, folder)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass may have left some units whole
    params = dict(model.named_parameters())
    boxes_of = {name: local_boxes(param, name, axes) for name, param in params.items()}
    holders = axes.world.gathered({name: [box for _, box in boxes] for name, boxes in boxes_of.items()})
    table = weights.rules(model.config)
    dtypes = weights.export_dtypes(config, table, dtype) if config else {rule.ours: dtype for rule in table}
    with ExitStack() as stack:
        writer = None
        if rank == 0:
            nbytes = weights.nbytes(table, dtypes)
            writer = stack.enter_context(
                weights.Writer(model.config, folder, nbytes, max_shard_bytes, source_files(config) if config else None)
            )
        for rule in table:
            values = (masters or {}).get(rule.ours, partial(_local, params.get(rule.ours)))
            read = partial(_part, values, {box: local_box for local_box, box in boxes_of.get(rule.ours, [])})
            whole = collect(rule, read, senders(rule, holders), rank, dtypes[rule.ours])
            if writer is not None and whole is not None:
                for name, tensor in zip(rule.theirs, rule.split(whole), strict=True):
                    writer.add(name, tensor)


def senders(rule: Rule, holders: list[dict[str, list[Box]]]) -> list[tuple[int, Box]]:
    """Which rank gives which box of a parameter: of several that hold the same, the first."""
    chosen: dict[Box, int] = {}
    for rank, boxes in enumerate(holders):
        for box in boxes.get(rule.ours, []):
            chosen.setdefault(box, rank)
    covered = sum(math.prod(b - a for a, b in box) for box in chosen)
    assert covered == math.prod(rule.shape), f"{rule.ours}: the ranks hold {covered} different values of {math.prod(rule.shape)}"
    return [(rank, box) for box, rank in chosen.items()]


def _local(param: Tensor | None) -> Tensor:
    assert param is not None
    return param.to_local() if isinstance(param, DTensor) else param


def _part(values: Callable[[], Tensor], local_boxes: dict[Box, Box], box: Box) -> Tensor:
    """This rank's values of a box of the whole parameter."""
    return values()[slices(local_boxes[box])]


def collect(rule: Rule, read: Callable[[Box], Tensor], boxes: list[tuple[int, Box]], rank: int, dtype: torch.dtype) -> Tensor | None:
    """The whole parameter on rank 0, in host memory; None elsewhere. `read` gives this rank's values of a box that it sends."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    whole = torch.empty(rule.shape, dtype=dtype) if rank == 0 else None
    for sender, box in boxes:
        if sender == rank:
            part = read(box).to(device, dtype).contiguous()
            if whole is None:
                dist.send(part, dst=0)
        elif whole is not None:
            part = torch.empty([b - a for a, b in box], dtype=dtype, device=device)
            dist.recv(part, src=sender)
        if whole is not None:
            whole[slices(box)] = part.cpu()
    return whole


def agree_on_folder(rank: int, ranks: int, folder: Path) -> None:
    """Rank 0 looks whether the folder is free; all ranks learn it, so that none waits for another.

    Raises:
        ConfigError: it is not.
    """
    verdict: list[str | None] = [None]
    if rank == 0:
        try:
            weights.refuse_to_overwrite(folder)
        except ConfigError as e:
            verdict = [str(e)]
    if ranks > 1:
        dist.broadcast_object_list(verdict, src=0)
    if verdict[0] is not None:
        raise ConfigError(verdict[0])
