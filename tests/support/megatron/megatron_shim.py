"""megatron-core on a CPU with gloo, for tests of wiring alone: what it asks of CUDA is answered with the nearest thing on the host.

megatron-core wants a GPU in many places even where it was told to initialise on the CPU. `install()` answers for the rest of the process:
the current device is the CPU, streams and events do nothing, CUDA's random state is the CPU's, a literal "cuda" means "cpu", and tensors say
they are CUDA's where the optimizer asks for their type by name. Two defects of 0.16.1 are put right: MLA takes
Transformer Engine for installed, and the all-to-all dispatcher leaves split sizes as tensors on the CPU. Nothing of this belongs into the product, and
`torch.cuda.is_available()` stays false.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

# megatron-core compiles its small fusions as it is imported; on a CPU the compiler takes more time than all steps of a test.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
CPU = torch.device("cpu")


class NullStream:
    """A stream, or an event, that waits for nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream = CPU, 0

    def record_event(self, *_: Any) -> NullStream:
        return self

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = __exit__ = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __enter__(self) -> NullStream:
        return self


def on_host(value: Any) -> Any:
    """The value, with the CPU for every CUDA device."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return CPU if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class OnHost(TorchFunctionMode):
    """Devices in calls of torch, and the few methods that exist for CUDA alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device and isinstance(args[0], str) and args[0].startswith("cuda"):
            return CPU
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        if func is torch.Tensor.to:
            args = [args[0], *map(on_host, args[1:])]
        return func(*args, **kwargs)


def transformer_engine_product(*_: Any, **__: Any) -> Any:
    """What megatron-core's router calls wherever Transformer Engine is installed; layers without it must not."""
    raise AssertionError("layers without Transformer Engine have called its product, which rounds float32 to TF32")


def install() -> None:
    """Answer for CUDA from here to the end of the process."""
    assert not torch.cuda.is_available(), "the shim would hide a GPU that is there"
    stream = NullStream()
    answers = {
        "current_device": lambda: CPU,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        # Not torch.manual_seed: that calls torch.cuda's.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "Stream": NullStream,
        "Event": NullStream,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    OnHost().__enter__()
    made = DeviceMesh.__init__

    def on_cpu(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(self, "cpu", *args, **kwargs)

    DeviceMesh.__init__ = on_cpu
    correct()


def correct() -> None:
    """The places in megatron-core that no answer of torch reaches."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils.te_general_gemm = transformer_engine_product
    multi_latent_attention.HAVE_TE = importlib.util.find_spec("transformer_engine") is not None

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = on_cpu
    # gloo sends from the tensor itself, and later: its memory must stay until then.
    schedules.deallocate_output_tensor = lambda *_, **__: None
    schedules.custom_backward = lambda output, grad: torch.autograd.backward(output, grad_tensors=grad)
    gather_at_once(param_and_grad_buffer)


def gather_at_once(module: Any) -> None:
    """Gathers of Megatron-FSDP end where they begin: it frees and reuses their memory in the order of streams, and here a stream orders nothing."""
    gathering = module._coalescing_manager

    @contextlib.contextmanager
    def waited(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with gathering(*args, **kwargs) as works:
            yield works
        works.wait()

    module._coalescing_manager = waited
