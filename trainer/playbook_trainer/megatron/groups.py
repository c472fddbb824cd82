"""megatron-core's process groups, and the same as this trainer's axes."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config.tree import TrainerConfig

_AXES = ("tp", "cp", "pp", "dp", "dp_cp", "ep", "etp", "edp")


class Groups(Axes):
    """The axes, with names for the groups that only megatron-core has."""

    def group_names(self) -> dict[str, str]:
        """Process-group names as c10d reports them, to what they serve; where one serves two purposes, the plainer one."""
        return {group.group_name: name for name, group in reversed(_named_groups().items())}


def initialise(config: TrainerConfig) -> None:
    """Create every process group; those of an earlier run in this process are dropped."""
    par = config.parallel
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": par.tp,
        "pipeline_model_parallel_size": par.pp,
        "virtual_pipeline_model_parallel_size": par.vpp if par.vpp > 1 else None,
        "context_parallel_size": par.cp,
        "expert_model_parallel_size": par.ep,
        "expert_tensor_parallel_size": par.etp or par.tp,
        "num_distributed_optimizer_instances": par.dp_replicate,
    }
    if config.megatron.cp_sizes:
        sizes["hierarchical_context_parallel_sizes"] = config.megatron.cp_sizes
    if "create_gloo_process_groups" in inspect.signature(parallel_state.initialize_model_parallel).parameters:
        sizes["create_gloo_process_groups"] = False
    parallel_state.initialize_model_parallel(**sizes)


def axes(config: TrainerConfig) -> Groups:
    """The axes of this rank, in megatron-core's groups."""
    world = Axis("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, tuple(range(dist.get_world_size())))
    by_name = {name: _axis(name, group) for name, group in _named_groups().items() if name in _AXES}
    cut = config.parallel.sequence_parallel and config.parallel.tp > 1
    return Groups(world=world, **by_name, shard=by_name["dp_cp"], edp_shard=by_name["edp"], sequence_parallel=cut)


def _named_groups() -> dict[str, Any]:
    """Groups of this rank by what they serve, the plainest purposes first."""
    state = parallel_state
    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "dp_cp": state.get_data_parallel_group(with_context_parallel=True),
        "ep": state.get_expert_model_parallel_group(),
        "etp": state.get_expert_tensor_parallel_group(),
        "edp": state.get_expert_data_parallel_group(),
        "etp_ep": state.get_expert_tensor_and_model_parallel_group(),
        "tp_cp": state.get_tensor_and_context_parallel_group(),
        "tp_dp_cp": state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "tp_pp": state.get_model_parallel_group(),
        "etp_ep_pp": state.get_expert_tensor_model_pipeline_parallel_group(),
        "optimizer_shard": state.get_intra_distributed_optimizer_instance_group(),
        "optimizer_replicate": _instances(),
        "dp_cp_shard": state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        "edp_shard": state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
        "embedding": state.get_embedding_group(check_initialized=False),
        "world": dist.group.WORLD,
    }
    return {name: group for name, group in groups.items() if group is not None}


def _instances() -> Any:
    """Ranks that hold the same shard of the optimizer; the version may have no group where there is one instance."""
    try:
        return parallel_state.get_inter_distributed_optimizer_instance_group()
    except AssertionError:
        return None


def _axis(name: str, group: Any) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), ranks.index(dist.get_rank()), group, ranks)
