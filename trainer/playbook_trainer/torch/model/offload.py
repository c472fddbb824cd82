"""Activation offload: what a decoder layer saves for its backward pass waits in host memory.

    trip = Trip(device, keep=[cos, sin])           # one forward pass
    x = trip.through(layer, x, seq)                # large saved tensors leave while the layers behind are computed
    x = trip.through(last, x, seq, stays=True)     # the last layer is differentiated at once, so what it saves stays
    trip.end(x)

Whole storages travel, each once however many views of it are saved, on a stream of their own. The tensors of at most two layers are on
their way out at a time; in the backward pass, those of one layer are on their way back while the layer behind it is differentiated.
Parameters stay, and so do tensors that are kept anyway. A tensor must not be written to after it has been saved;
nothing in a layer does that.

The mechanism is that of `torch.autograd.graph.save_on_cpu`, which copies on the stream that computes, and every view by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from playbook_trainer.observe.ranges import range_, tally

SMALLEST = 1 << 16
"""Bytes from which a storage travels; smaller ones are not worth a copy."""


class Trip:
    """Activation offload of one forward pass: copies what each layer saves to host memory, and back for the backward pass."""

    def __init__(self, device: torch.device, keep: Iterable[Tensor]) -> None:
        self.device = device
        self.side = _side_stream(device) if device.type == "cuda" else None
        self.kept = {t.untyped_storage().data_ptr() for t in keep}
        self.last: _Load | None = None
        self.leaving: list[_Load] = []

    def through(self, layer: nn.Module, run: Any, *args: Any, stays: bool = False) -> Tensor:
        """`run(*args)`, a layer's output; what it saves goes to the host unless it `stays`."""
        if not torch.is_grad_enabled():
            x: Tensor = run(*args)
            return x
        before = self.last
        if stays:
            x = run(*args)
        else:
            with self._sending(list(layer.modules())):
                x = run(*args)
        if before is not None and x.requires_grad:
            # The backward pass comes to this layer: the load of the one before it starts on its way back.
            x.register_hook(lambda _: before.fetch())
        return x

    def end(self, x: Tensor) -> None:
        """End the forward pass: release the device memory of all offloaded activations."""
        last = self.last
        if last is not None and x.requires_grad:
            x.register_hook(lambda _: last.fetch())
        for load in self.leaving:
            load.gone()
        self.leaving.clear()

    @contextmanager
    def _sending(self, modules: list[nn.Module]) -> Iterator[None]:
        """Send what the block saves for the backward pass to the host, except what belongs to `modules`."""
        load = _Load(self.side)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(t: Tensor) -> Any:
            if self._travels(t, modules):
                return load.send(t)
            if outer is not None:
                return outer[0](t)
            # An output that its own node saves would keep that node alive, were there no backward pass.
            return t if t.grad_fn is None else t.detach()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _Ticket):
                return saved.redeem()
            return saved if outer is None else outer[1](saved)

        # Only the innermost pair of hooks is called, so what stays is handed to the pair outside.
        with range_("offload"), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        load.depart()
        self.leaving.append(load)
        if len(self.leaving) > 1:
            self.leaving.pop(0).gone()
        self.last = load

    def _travels(self, t: Tensor, modules: list[nn.Module]) -> bool:
        if isinstance(t, nn.Parameter | DTensor) or t.device.type != self.device.type:
            return False
        storage = t.untyped_storage()
        if storage.nbytes() < SMALLEST or storage.data_ptr() in self.kept:
            return False
        # FSDP swaps gathered parameters in and out, so their set is of this moment.
        parameters = (p for m in modules for p in m._parameters.values() if p is not None and not isinstance(p, DTensor))
        return all(p.untyped_storage().data_ptr() != storage.data_ptr() for p in parameters)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream that carries the copies of a device."""
    return torch.cuda.Stream(device)


class _Load:
    """The storages that one layer has sent."""

    def __init__(self, side: torch.cuda.Stream | None) -> None:
        self.side = side
        self.open: dict[int, _Box] = {}
        self.boxes: list[_Box] = []
        self.out: torch.cuda.Event | None = None

    def send(self, t: Tensor) -> _Ticket:
        """Start the copy of a tensor's storage, unless it is on its way already."""
        storage = t.untyped_storage()
        box = self.open.get(storage.data_ptr())
        if box is None:
            box = self.open[storage.data_ptr()] = _Box(_bytes(t), self.side)
            tally("offloaded_activation_bytes", storage.nbytes())
        box.tickets += 1
        return _Ticket(box, t)

    def depart(self) -> None:
        """The layer is done; after it, an address may belong to another storage."""
        if self.side is not None:
            self.out = self.side.record_event()
        self.boxes = list(self.open.values())
        self.open.clear()

    def gone(self) -> None:
        """Give the memory on the device back; what is computed from here on waits until the copies are done."""
        if self.out is not None:
            torch.cuda.current_stream().wait_event(self.out)
        for box in self.boxes:
            box.source = None

    def fetch(self) -> None:
        """Bring back what is still to be read, behind what the side stream is doing."""
        if self.boxes:
            with range_("prefetch"):
                for box in self.boxes:
                    if box.tickets:
                        box.fetch()
        # The tickets hold the boxes that are still to be read.
        self.boxes.clear()


def _bytes(t: Tensor) -> Tensor:
    """A tensor's whole storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


class _Box:
    """One storage: on the device, on the host, and on the device again."""

    def __init__(self, source: Tensor, side: torch.cuda.Stream | None) -> None:
        self.side, self.device, self.tickets = side, source.device, 0
        self.source: Tensor | None = source
        self.back: Tensor | None = None
        self.ready: torch.cuda.Event | None = None
        if side is None:
            self.host = source.clone()
            return
        self.host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.host.copy_(source, non_blocking=True)

    def fetch(self) -> None:
        """Start the copy to the device, unless it is there or on its way."""
        if self.back is not None:
            return
        # The memory is the computing stream's; the side stream writes it once that stream has come to this moment.
        self.back = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
        if self.side is None:
            self.back.copy_(self.host)
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.back.copy_(self.host, non_blocking=True)
        self.back.record_stream(self.side)
        self.ready = self.side.record_event()

    def take(self) -> Tensor:
        """The bytes, ready to be read; the last ticket lets go of them."""
        self.fetch()
        back, self.tickets = self.back, self.tickets - 1
        assert back is not None
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
        if self.tickets <= 0:
            self.back = None
        return back


class _Ticket:
    """A view of a storage that travels, to be made again when it is asked for."""

    __slots__ = ("box", "dtype", "offset", "size", "stride")

    def __init__(self, box: _Box, t: Tensor) -> None:
        self.box, self.dtype = box, t.dtype
        self.size, self.stride, self.offset = t.size(), t.stride(), t.storage_offset()

    def redeem(self) -> Tensor:
        place = self.box.take()
        return torch.empty(0, dtype=self.dtype, device=place.device).set_(place.untyped_storage(), self.offset, self.size, self.stride)
