"""Checkpoints: every rank writes its own part, in the background; any layout and world size can read what another has written.

Tensors are stored under names and in shapes of the whole model (`model.<parameter>`, `optimizer.<state>.<parameter>`), in as many boxes as
ranks held them. See `checkpoint_files` for the files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from playbook.errors import ConfigError, DataError
from playbook_trainer.axes import Axes
from playbook_trainer.checkpoint_files import (
    Best,
    Header,
    Index,
    LoadPlanner,
    Reader,
    SavePlanner,
    Writer,
    cause,
    clear_leftovers,
    newest,
    not_finite,
    read_index,
    writing_folder,
)
from playbook_trainer.config.tree import TrainerConfig, dump
from playbook_trainer.huggingface.names import slices
from playbook_trainer.torch.optimizer import Frozen, Shard, ensure_state, masters, put_into
from playbook_trainer.torch.parallel.sharding import full_shape, local_boxes

# A parameter as boxes of the whole tensor: what a checkpoint stores, so that any layout can read what another has written.
# Where a box lies is asked from `sharding.local_boxes`, so the two halves of `w13` under tensor parallelism are two.


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a parameter lies in the whole parameter."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[slice, ...], tuple[int, ...]], ...]
    """Stretches of the rank's own tensor in every dimension, each with where it begins in the whole one."""

    def of(self, values: Tensor) -> Pieces:
        """`values`, of the shape of this rank's part, as pieces of the whole; they share its memory."""
        pieces = self.cut(values)
        return Pieces(self.shape, values.dtype, lambda: pieces)

    def made(self, make: Callable[[], Tensor], dtype: torch.dtype) -> Pieces:
        """As `of`, of values that are made anew whenever they are asked for, so that they take memory for that moment only."""
        return Pieces(self.shape, dtype, lambda: self.cut(make()))

    def cut(self, values: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes of `values`, each with its offsets in the whole tensor."""
        return [(offsets, values[local]) for local, offsets in self.boxes]


class Pieces:
    """What this rank holds of a whole tensor, as torch.distributed.checkpoint asks a tensor for it (the methods with two underscores)."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], list[tuple[tuple[int, ...], Tensor]]]) -> None:
        self.shape, self.dtype, self._make = torch.Size(shape), dtype, make

    @property
    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes, each with where it begins in the whole tensor."""
        return self._make()

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.shape

    def replaced(self, tensors: Iterable[Tensor]) -> Pieces:
        """The same boxes with other memory behind them."""
        pieces = [(offsets, t) for (offsets, _), t in zip(self.pieces, tensors, strict=True)]
        return Pieces(self.shape, self.dtype, lambda: pieces)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), t.size()) for offsets, t in self.pieces]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.shape))
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(t for offsets, t in self.pieces if index.offset == torch.Size(offsets))


def place(name: str, param: Tensor, axes: Axes) -> Place:
    """Where this rank's part of the parameter lies; no boxes where FSDP leaves it nothing."""
    boxes = ((slices(local), tuple(first for first, _ in whole)) for local, whole in local_boxes(param, name, axes))
    return Place(tuple(full_shape(param, name, axes)), tuple(boxes))


State = dict[str, Pieces]


class Checkpointer:
    """Saves and restores one run's model and optimizer."""

    def __init__(
        self,
        config: TrainerConfig,
        axes: Axes,
        model: nn.Module,
        parts: Sequence[Shard],
        optimizer: torch.optim.Optimizer,
        frozen: Frozen,
        more: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Note where this rank's part of each parameter lies; `more` are further tensors, whole on every rank that has them, by name."""
        self._config, self._axes, self._optimizer, self._parts = config, axes, optimizer, parts
        self._masters, self._frozen = masters(optimizer, parts), frozen
        self._put = put_into(optimizer, parts, frozen)
        self._more = more or {}  # whole on every rank that has it, and begun anew where a checkpoint lacks it
        self._params = dict(model.named_parameters())
        self._places = {name: place(name, p, axes) for name, p in self._params.items()}
        self._root = Path(str(config.checkpoint.dir))
        self._group: Any = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: dict[str, list[Tensor]] = {}
        self.latest: int | None = None
        """The step that was saved last."""

    @property
    def writing(self) -> bool:
        """Whether the checkpoint that was saved last is left to the background."""
        return self._pending is not None

    @property
    def behind(self) -> bool:
        """Whether the background still writes a checkpoint, so that the next one has to wait for it."""
        return self._pending is not None and not self._pending.done()

    def restore(self) -> Index | None:
        """Load the newest complete checkpoint into this rank's parts; None where there is none.

        Raises:
            ConfigError: the checkpoint is of another model, or damaged, or there is one that must not be continued.
        """
        folder = newest(self._config.checkpoint, self._axes.world.rank, self._axes.world.size)
        if folder is None:
            return None
        index = read_index(folder)
        _same_model(index, dump(self._config)["model"], folder)
        ensure_state(self._optimizer, self._parts)
        state = self._state()
        whole = self._put_together(state)
        missing = [name for name in state if name.startswith("model.") and name not in index.tensors]
        if missing:
            raise ConfigError(
                f"{folder} lacks {len(missing)} tensors of this model, such as '{missing[0]}'; it was saved by another version"
            )
        if dropped := [name for name in index.tensors if name.startswith("balance.") and name not in state and not self._more]:
            raise ConfigError(
                f"{folder} has biases of routers, such as '{dropped[0]}', and moe.bias_update_rate 0 would drop them: set it to the rate "
                "that they were trained with (1e-12 leaves them as they are)"
            )
        # A parameter that was frozen until now has no moments yet.
        _read({name: pieces for name, pieces in state.items() if name in index.tensors}, folder, index)
        for name, values in whole.items():
            self._put(name, _local(self._params[name]), (), values)
        self.latest = index.step
        return index

    def save(self, step: int, data: dict[str, Any], best: Best | None = None) -> str | None:
        """Write a checkpoint of this moment; with `async_save` only the copy to host memory is waited for.

        Returns the name of a weight or moment of any rank that is not finite, and writes nothing then: nobody could go on from that.

        Raises:
            DataError: this one, or the one before it, could not be written.
        """
        self.wait()
        state = self._state()
        tops = [(name, torch.linalg.vector_norm(t, float("inf"))) for name, p in state.items() for _, t in p.pieces if t.dim()]
        if bad := not_finite(tops, self._axes.world.size):
            return bad
        if self._axes.world.rank == 0:
            clear_leftovers(self._root)
        if self._axes.world.size > 1:
            # Background threads must not share a group with the training: their collectives would mix.
            self._group = self._group or dist.new_group(backend="gloo")
            dist.barrier(group=self._group)
        config = self._config
        header = Header(
            step=step,
            world_size=self._axes.world.size,
            parallel=dump(config)["parallel"],
            model=dump(config)["model"],
            data=data,
            best=best,
        )
        if config.checkpoint.async_save:
            self._pending = self._pool.submit(self._write, self._staged(state), header)
        else:
            self._write(state, header)
        self.latest = step
        return None

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete.

        Raises:
            DataError: it could not be written.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _state(self) -> State:
        """Whatever decides how the run goes on, as pieces of whole tensors; every rank has its own."""
        computed = self._masters | self._frozen.wholes()
        out = {f"model.{name}": self._places[name].of(_local(p)) for name, p in self._params.items() if name not in computed}
        out |= {f"model.{name}": self._places[name].made(make, torch.float32) for name, make in computed.items()}
        for part in self._parts:
            for key, value in self._optimizer.state.get(part.local, {}).items():
                # Weights in two halves are saved whole, and the sign of the second moment is a part of them.
                if part.name in self._masters and key == "exp_avg_sq":
                    out[f"optimizer.{key}.{part.name}"] = self._places[part.name].made(value.abs, value.dtype)
                elif isinstance(value, Tensor) and key != "remainder":
                    out[f"optimizer.{key}.{part.name}"] = _moments(self._places[part.name], part, value)
        out |= {name: place(name, tensor, self._axes).of(tensor) for name, tensor in self._more.items()}
        return {name: pieces for name, pieces in out.items() if pieces.pieces}

    def _put_together(self, state: State) -> dict[str, Tensor]:
        """Give what bf16 does not hold somewhere to be read to: float32 weights, which are returned, and second moments without signs.

        Frozen weights are read to host memory: they may be most of the model, and the GPU has no room for them in float32.
        """
        whole = {name: make() for name, make in self._masters.items() if f"model.{name}" in state}
        whole |= {name: torch.empty(t.shape) for name, t in self._frozen.local.items() if f"model.{name}" in state}
        state |= {f"model.{name}": self._places[name].of(values) for name, values in whole.items()}
        for part in self._parts:
            if part.name in whole:
                state[f"optimizer.exp_avg_sq.{part.name}"] = self._places[part.name].of(self._optimizer.state[part.local]["exp_avg_sq"])
        return whole

    def _staged(self, state: State) -> State:
        """A copy in host memory, in the same buffers every time."""
        out = {}
        for name, pieces in state.items():
            if name not in self._buffers:
                pin = pieces.pieces[0][1].is_cuda
                self._buffers[name] = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pin) for _, t in pieces.pieces]
            for buffer, (_, tensor) in zip(self._buffers[name], pieces.pieces, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            out[name] = pieces.replaced(self._buffers[name])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return out

    def _write(self, state: State, header: Header) -> None:
        writer = Writer(self._root, header, self._config.checkpoint.keep)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=self._group, no_dist=self._group is None)
        except (OSError, dcp.CheckpointException) as e:
            where = writing_folder(self._root, header.step)
            raise DataError(f"the checkpoint of step {header.step} could not be written to {where}: {cause(e)}") from e


def _read(state: State, folder: Path, index: Index) -> None:
    for name, pieces in state.items():
        if list(pieces.shape) != index.tensors[name].shape:
            saved, expected = index.tensors[name].shape, list(pieces.shape)
            raise ConfigError(f"{folder}: '{name}' has the shape {saved}; expected {expected}: the checkpoint is of another model")
    try:
        # Each rank plans and reads for itself; nothing needs agreeing.
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(dict(state), storage_reader=Reader(folder, index), planner=LoadPlanner(), no_dist=True)
    except (OSError, dcp.CheckpointException) as e:
        raise ConfigError(f"{folder} cannot be read: {cause(e)}; move it elsewhere to go on from an older checkpoint") from e


def _local(param: Tensor) -> Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def _moments(where: Place, part: Shard, value: Tensor) -> Pieces:
    """Optimizer state of a parameter: cut like it, or a single number (its count of steps)."""
    if value.dim() == 0:
        return Pieces((), value.dtype, lambda: [((), value)])
    assert value.shape == part.local.shape, f"optimizer state of {part.name} has another shape than the parameter"
    return where.of(value)


def _same_model(index: Index, model: dict[str, Any], folder: Path) -> None:
    other = [k for k in model if k != "name" and k in index.model and index.model[k] != model[k]]
    if other:
        differences = ", ".join(f"{k} {index.model[k]} where this run has {model[k]}" for k in other[:3])
        raise ConfigError(f"{folder} is a checkpoint of another model: {differences}. Choose another checkpoint.dir")
