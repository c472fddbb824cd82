"""Environment variables that a configuration asks for on a platform; they must be set before CUDA starts. Torch-free."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Literal

from playbook.errors import ConfigError
from playbook_trainer.config.tree import TrainerConfig

Platform = Literal["cpu", "hopper", "blackwell", "nvl72"]

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_COLLECTIVE_BLOCKS = "NCCL_MAX_CTAS"
"""NCCL's limit of blocks, each of which takes a multiprocessor, in one collective."""
GROUPED_GEMM = "NVTE_USE_CUTLASS_GROUPED_GEMM"
_HYBRID_EP_RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
DOMAIN: Mapping[Platform, int] = {"cpu": 1, "hopper": 8, "blackwell": 8, "nvl72": 72}
"""Number of GPUs that NVLink connects on each platform."""

_BLACKWELL = 10
_QUERY_S = 20


def variables(config: TrainerConfig, platform: Platform) -> dict[str, str]:
    """The environment variables that the configuration needs on this platform, with their values.

    Source: `CUDA_DEVICE_MAX_CONNECTIONS` by Megatron-LM's checks of its arguments (1 with TP or CP before Blackwell, so that collectives
    start in the order of their launch; never 1 with FSDP) and by the environments of Megatron-Bridge's performance recipes (32 on
    Blackwell, and with a fused dispatcher); `NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN` divides EP and fits the domain (DeepEP's HybridEP);
    `NVTE_CPU_OFFLOAD_V1` with fine-grained offload, and `NCCL_GRAPH_REGISTER` with graphs beside memory that grows in segments, by
    Megatron-LM's checks; `NVTE_USE_CUTLASS_GROUPED_GEMM` is Transformer Engine's own switch; `NVTE_ALLOW_NONDETERMINISTIC_ALGO` by its
    `--deterministic-mode`; the allocator's option for graphs of whole steps by Megatron-Bridge's recipes.
    """
    mg = config.megatron
    megatron = config.backend == "megatron"
    whole = ("full_iteration",) if mg.cuda_graph_impl == "full_iteration" else ()
    environment = needed(
        platform, tp=config.parallel.tp, cp=config.parallel.cp, ep=config.parallel.ep, dispatcher=config.moe.dispatcher, megatron=megatron,
        overlap=megatron and mg.overlap_expert_parallel, sharded=sharded(config),
        graphs=(*whole, *config.train.cuda_graphs) if megatron else (),
        offload=mg.offload_modules if megatron else (),
    )  # fmt: skip
    if platform != "cpu" and megatron and mg.grouped_gemm == "cutlass":
        environment[GROUPED_GEMM] = "1"
    if platform != "cpu" and megatron and config.train.deterministic:
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    return environment


def needed(
    platform: Platform,
    *,
    tp: int,
    cp: int,
    ep: int,
    dispatcher: str,
    overlap: bool,
    sharded: bool,
    megatron: bool,
    graphs: Sequence[str],
    offload: Sequence[str],
) -> dict[str, str]:
    """The variables that a layout and its options ask for. `sharded` is FSDP's, `graphs` are modules or `full_iteration`,
    `offload` modules.
    """
    if platform == "cpu":
        return {}
    one_stream = platform == "hopper" and not sharded and (tp > 1 or cp > 1) and not overlap
    many_streams = dispatcher in ("deepep", "hybridep") or overlap or (megatron and platform in ("blackwell", "nvl72") and not sharded)
    values = {
        CONNECTIONS: "1" if one_stream else "32" if many_streams else "",
        _HYBRID_EP_RANKS: str(_largest_divisor(ep, DOMAIN[platform])) if dispatcher == "hybridep" else "",
        "NVTE_CPU_OFFLOAD_V1": "1" if offload else "",
        "NCCL_GRAPH_REGISTER": "0" if graphs else "",
        ALLOCATOR: "expandable_segments:True,graph_capture_record_stream_reuse:True" if "full_iteration" in graphs else "",
    }
    return {name: value for name, value in values.items() if value}


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def sharded(config: TrainerConfig) -> bool:
    """Whether parameters are gathered and gradients scattered layer by layer, beside the computation."""
    if config.backend == "torch":
        return config.parallel.fsdp
    return config.megatron.data_parallel in ("megatron_fsdp", "fsdp2")


def apply(config: TrainerConfig, environment: MutableMapping[str, str] | None = None, platform: Platform | None = None) -> dict[str, str]:
    """Set what the megatron backend asks for, or the torch backend's limit of collectives, where the environment leaves it open;
    returns what was set.

    Raises:
        ConfigError: the environment serialises what Megatron-FSDP means to overlap,
            or contradicts the configuration about grouped products.
    """
    env = os.environ if environment is None else environment
    if config.backend == "torch":
        needed_variables = {_COLLECTIVE_BLOCKS: str(config.parallel.comm_sms)} if config.parallel.comm_sms else {}
    elif sharded(config) and env.get(CONNECTIONS) == "1":
        raise ConfigError(f"{CONNECTIONS} is 1, which makes FSDP's collectives wait for the computation that they overlap with; unset it")
    elif _contradicts(env.get(GROUPED_GEMM), config):
        raise ConfigError(
            f"{GROUPED_GEMM} is {env[GROUPED_GEMM]!r} and megatron.grouped_gemm is {config.megatron.grouped_gemm}; unset the variable, "
            "which follows from that field"
        )
    else:
        needed_variables = variables(config, platform or this_platform(env))
    changes = {k: v for k, v in needed_variables.items() if k not in env}
    env.update(changes)
    return changes


def _contradicts(value: str | None, config: TrainerConfig) -> bool:
    on = value not in ("", "0")
    return value is not None and config.model.num_experts > 0 and on != (config.megatron.grouped_gemm == "cutlass")


def this_platform(environment: Mapping[str, str]) -> Platform:
    """The platform of this machine: the NVLink domain that its launcher names, else the architecture that nvidia-smi reports."""
    if environment.get("NVLINK_DOMAIN_SIZE") == "72":
        return "nvl72"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    try:
        command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=False).stdout
        return "blackwell" if int(float(output.split()[0])) >= _BLACKWELL else "hopper"
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return "hopper"
