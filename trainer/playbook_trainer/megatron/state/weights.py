"""First weights of a megatron-core model, and weights from and to Hugging Face folders; no rank ever holds the whole model.

`pieces` says which numbers of ours each rank holds; reading, drawing and collecting them is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from playbook.errors import ConfigError
from playbook_trainer.config.tree import ModelConfig, TrainerConfig
from playbook_trainer.huggingface import weights
from playbook_trainer.huggingface.kept import kept
from playbook_trainer.huggingface.names import HEAD, Box, sizes, slices
from playbook_trainer.megatron.settings import DTYPES
from playbook_trainer.megatron.state.param_mapping import Held, Place, held
from playbook_trainer.megatron.state.sharded import gathered, settle
from playbook_trainer.torch.parallel.sharding import initial_value
from playbook_trainer.torch.weights import agree_on_folder, collect, senders


def initialise(chunks: Sequence[nn.Module], config: TrainerConfig) -> None:
    """Give the chunks of this rank, not wrapped yet, their first values: those of `init.weights`, or those that the seed gives every layout.

    Raises:
        ConfigError: the folder does not hold this model.
    """
    if config.init.weights is None:
        draw(chunks, config.model, config.seed, DTYPES[config.train.dtype])
    else:
        load(chunks, config.model, Path(config.init.weights))


@torch.no_grad()
def draw(chunks: Sequence[nn.Module], config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """The same values as the torch backend's for this seed: each whole tensor is drawn where the parameter is, and this rank's part kept.

    `dtype` holds them exactly; 8-bit weights, whose optimizer begins with what they were made of, would not be rounded to it otherwise.
    """
    value, shapes = initial_value(config, seed, dtype), {rule.ours: rule.shape for rule in weights.rules(config)}
    drawn: tuple[str, Tensor] = ("", torch.empty(0))

    def read(ours: str, box: Box, device: torch.device) -> Tensor:
        nonlocal drawn
        if drawn[0] != ours:  # a rank's experts are parts of one tensor, and follow each other
            drawn = ("", torch.empty(0))  # not two at once
            drawn = (ours, value(ours, list(shapes[ours]), device))
        return drawn[1][slices(box)]

    for entry in sorted(_entries(chunks, config), key=lambda entry: entry.pieces[0].ours):
        _fill(entry, read)


@torch.no_grad()
def load(chunks: Sequence[nn.Module], config: ModelConfig, folder: Path) -> weights.Files:
    """Fill the chunks of this rank from a Hugging Face folder, of which only its parts are read; returns the files, which have counted them.

    Raises:
        ConfigError: the folder does not hold this model.
    """
    table = {rule.ours: rule for rule in weights.rules(config)}
    with ExitStack() as stack:
        files = weights.open_folder(config, folder, stack)
        twice = config.tie_word_embeddings and HEAD in files.shapes

        def read(ours: str, box: Box, device: torch.device) -> Tensor:
            part = table[ours].read(files, box)
            if twice and ours == "embed.weight" and not torch.equal(part, files.read(HEAD, slices(box))):
                raise ConfigError(f"{folder}: {HEAD} differs from the embedding; set model.tie_word_embeddings: false")
            return part.to(device)

        for entry in _entries(chunks, config):
            _fill(entry, read)
    return files


@torch.no_grad()
def save(
    chunks: Sequence[nn.Module],
    config: ModelConfig,
    folder: Path,
    max_shard_bytes: int = weights.MAX_SHARD_BYTES,
    run: TrainerConfig | None = None,
) -> None:
    """Write the model as transformers stores it, in the precision of its parameters; every rank calls this, with its chunks as they are wrapped.

    Rank 0 holds one tensor of ours and one file at a time. The configuration of a `run` says what to keep of its source, and in which precision.

    Raises:
        ConfigError: the folder already holds weights, or transformers has no such model.
    """
    rank = dist.get_rank()
    weights.hf_config(config)
    agree_on_folder(rank, dist.get_world_size(), folder)
    for chunk in chunks:
        settle(chunk)
    entries = _entries(chunks, config)
    own: dict[str, list[Held]] = {}
    for entry in entries:
        for ours in dict.fromkeys(piece.ours for piece in entry.pieces):
            own.setdefault(ours, []).append(entry)
    holders: list[dict[str, list[Box]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(holders, {name: [p.there for e in held_ for p in e.pieces if p.ours == name] for name, held_ in own.items()})
    table = weights.rules(config)
    dtype = torch.bfloat16 if any(e.tensor.dtype == torch.bfloat16 for e in entries) else torch.float32
    unasked = {rule.ours: torch.float32 if rule.ours.endswith("router.bias") else dtype for rule in table}
    dtypes = weights.export_dtypes(run, table, dtype) if run else unasked
    with ExitStack() as stack:
        writer = None
        if rank == 0:
            nbytes = weights.nbytes(table, dtypes)
            writer = stack.enter_context(weights.Writer(config, folder, nbytes, max_shard_bytes, kept(run) if run else None))
        for rule in table:
            parts = _parts(rule.ours, own.get(rule.ours, []))
            full = collect(rule, parts.__getitem__, senders(rule, holders), rank, dtypes[rule.ours])
            if writer is not None and full is not None:
                for name, tensor in zip(rule.theirs, rule.split(full), strict=True):
                    writer.add(name, tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """The GPTModel inside megatron-core's wrappers."""
    while not hasattr(model, "decoder"):
        model = model.module
    return model


def place() -> Place:
    """This rank on megatron-core's axes."""
    return Place(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _entries(chunks: Sequence[nn.Module], config: ModelConfig) -> list[Held]:
    return [entry for chunk in chunks for entry in held(unwrapped(chunk), config, place())]


def _fill(entry: Held, read: Callable[[str, Box, torch.device], Tensor]) -> None:
    """Set a tensor from its pieces; put together first, since 8-bit parameters take whole values only."""
    tensor = entry.tensor
    values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    for piece in sorted(entry.pieces, key=lambda piece: piece.ours):
        values[slices(piece.here)] = read(piece.ours, piece.there, tensor.device).to(torch.float32).reshape(sizes(piece.here))
    tensor.copy_(values)
    # Transformer Engine keeps the first values of an 8-bit parameter, those of its own construction, for the optimizer to start from.
    kept = tensor.get_high_precision_init_val() if hasattr(tensor, "get_high_precision_init_val") else None
    if kept is not None:
        kept.copy_(values)


def _parts(ours: str, entries: Sequence[Held]) -> dict[Box, Tensor]:
    """What this rank holds of one of our tensors. Ranks that share out a tensor of this list come here together, in the same order."""
    out = {}
    for entry in entries:
        full = gathered(entry.tensor)
        for piece in entry.pieces:
            if piece.ours == ours:
                part = full[slices(piece.here)].reshape(sizes(piece.there))
                out[piece.there] = part if full is entry.tensor else part.clone()
    return out
