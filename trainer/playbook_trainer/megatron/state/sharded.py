"""Parameters that data parallelism shares out among ranks, by torch's FSDP2 or by Megatron-FSDP: what they are before it does."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard


def settle(model: Any) -> None:
    """Put a wrapped model's shards in the place of its parameters, where a forward pass has left some whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    while isinstance(model, nn.Module):
        if hasattr(model, "_replace_param_with_distributed_if_needed"):  # Megatron-FSDP, which has no name for it in public
            model._replace_param_with_distributed_if_needed()
        model = getattr(model, "module", None)


def local_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor-parallel rank's parameter, before data parallelism shards it."""
    shape = list(tensor.shape)
    for dim, ranks, _ in _cuts(tensor):
        shape[dim] //= ranks
    return tuple(shape)


def gathered(tensor: Tensor) -> Tensor:
    """A tensor-parallel rank's whole parameter, no longer in 8 bits; all ranks that share it out call this."""
    if not isinstance(tensor, DTensor):
        return tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor
    whole = _uneven(tensor) if hasattr(tensor, "__fsdp_param__") else tensor.full_tensor()
    for dim, ranks, rank in _cuts(tensor):
        whole = whole.chunk(ranks, dim=dim)[rank]
    return whole


def _cuts(tensor: Tensor) -> list[tuple[int, int, int]]:
    """Dimension, ranks and this rank of the cuts that Megatron-FSDP knows to be tensor parallelism's: its tensors span both."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    axes = zip(mesh.mesh_dim_names or (), tensor.placements, strict=False)
    found = [(i, placement.dim) for i, (name, placement) in enumerate(axes) if "tp" in name and isinstance(placement, Shard)]
    return [(dim, mesh.size(i), mesh.get_local_rank(i)) for i, dim in found]


def _uneven(tensor: DTensor) -> Tensor:
    """The whole of a tensor whose shards are not those that torch would choose. The function's name changed after megatron-core 0.16."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    if hasattr(uneven_dtensor, "uneven_dtensor_to_full_tensor"):
        whole: Tensor = uneven_dtensor.uneven_dtensor_to_full_tensor(tensor)
        return whole
    return uneven_dtensor.gather_uneven_dtensor_to_full_tensor(tensor).to_local()
