"""What a case or claim needs, and what of it this machine lacks: profiles, scopes, packages, backends. Never imports torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from playbook.cards import scope as scopes
from playbook.errors import NO_TORCH, ConfigError
from playbook.records.case import Case
from playbook.records.evidence import Machine, Missing
from playbook.records.machine import label, short_gpu
from playbook_bench.machine import detect
from playbook_trainer.config.tree import TrainerConfig

BACKENDS: Mapping[str, tuple[str, ...]] = {"torch": (), "megatron": ("megatron.core", "transformer_engine")}
"""Trainer backends that this version can launch, and the packages that each needs beside torch."""
DISPATCHERS: Mapping[str, str] = {"deepep": "deep_ep", "hybridep": "deep_ep.hybrid_ep_buffer"}
"""The module that a dispatcher of the megatron backend comes from. HybridEP lies in a branch of DeepEP, under the same package's name."""
_PROFILE = re.compile(r"([a-z]+[0-9]+)x([0-9]+)\Z")


def choose_profile(case: Case, machine: Machine, requested: str | None = None) -> str | None:
    """The profile that the machine runs: the wanted one, else the largest that fits its GPUs, else cpu; None where there is none."""
    if requested is not None:
        return requested if requested in case.profiles else None
    fits = [(gpus, name) for name in case.profiles for gpu, gpus in [_profile_gpus(name)] if gpus and _has(machine, gpu, gpus)]
    return max(fits)[1] if fits else detect.CPU if detect.CPU in case.profiles else None


def require_profile(case: Case, machine: Machine, requested: str | None = None) -> str:
    """As `choose_profile`, for a command that is about this one case.

    Raises:
        ConfigError: there is none.
    """
    chosen = choose_profile(case, machine, requested)
    if chosen is None:
        missing = f"no profile '{requested}'" if requested else f"no profile for {machine.name}"
        raise ConfigError(f"case '{case.id}' has {missing}; it has {', '.join(sorted(case.profiles)) or 'none'}")
    return chosen


def restrict(machine: Machine, profile: str | None) -> Machine:
    """The machine as a profile may use it: `cpu` uses no GPU, `h200x2` two of them.

    Raises:
        ConfigError: the machine does not have what the profile names.
    """
    if profile is None:
        return machine
    if profile == detect.CPU:
        return detect.over_nodes(detect.machine_of([], "", machine.cpu, machine.cores, memory_gib=machine.memory_gib), machine.nodes)
    check_name(profile)
    gpu, gpus = _profile_gpus(profile)
    if not _has(machine, gpu, gpus):
        raise ConfigError(f"profile '{profile}' needs {gpus} x {gpu.upper()}; this machine has {machine.description}")
    if gpus == machine.gpus:
        return machine
    joined = "none" if gpus == 1 else machine.interconnect
    nodes = max(1, gpus // detect.gpus_per_node(machine))
    suffix = {"nvlink": ", NVLink", "pcie": ", PCIe", "none": ""}[joined]
    over = f"{nodes} nodes, " if nodes > 1 else ""
    description = f"{over}{gpus} x {machine.gpu}{suffix}"
    return machine.model_copy(
        update={"name": label(machine.gpu, gpus), "gpus": gpus, "nodes": nodes, "interconnect": joined, "description": description}
    )


def shares_a_gpu(profile: str, ranks: int) -> bool:
    """Whether that many ranks of a profile take turns on its one GPU: what they count holds, and their times say nothing."""
    return _profile_gpus(profile)[1] == 1 < ranks


def check_name(profile: str) -> None:
    """Refuse a name that no machine has.

    Raises:
        ConfigError: it is neither `cpu` nor of the form `h200x4`.
    """
    if profile != detect.CPU and not _profile_gpus(profile)[1]:
        raise ConfigError(f"profile '{profile}' is neither cpu nor of the form h200x4")


def _profile_gpus(profile: str) -> tuple[str, int]:
    match = _PROFILE.match(profile)
    return (match[1], int(match[2])) if match else ("", 0)


def _has(machine: Machine, gpu: str, gpus: int) -> bool:
    """A part of one node, or whole nodes."""
    if machine.gpu is None or machine.gpus < gpus or short_gpu(machine.gpu) != gpu:
        return False
    return gpus <= detect.gpus_per_node(machine) or gpus % detect.gpus_per_node(machine) == 0


def facts(machine: Machine, config: TrainerConfig | None = None, ranks: int = 1) -> dict[str, Any]:
    """What a scope may ask about: the machine, and the layout and model of a resolved configuration."""
    out: dict[str, Any] = {
        "gpus": machine.gpus,
        "gpu": machine.gpu or "none",
        "interconnect": machine.interconnect,
        "gpu_memory_gib": machine.gpu_memory_gib or 0,
        "nodes": machine.nodes,
    }
    if config is None:
        return out
    p = config.parallel
    return out | {
        "ranks": ranks,
        "tp": p.tp,
        "pp": p.pp,
        "cp": p.cp,
        "ep": p.ep,
        "dp": ranks // (p.tp * p.pp * p.cp),
        "seq_len": config.data.seq_len,
        "top_k": config.model.top_k,
        "backend": config.backend,
        "model": config.model.name,
        "vision": config.model.vision is not None,
        "moe": config.model.num_experts > 0,
    }


def unmet_scope(scope: Mapping[str, Any], run_facts: Mapping[str, Any], waive_machine: bool) -> list[Missing]:
    """The parts of a claim's scope that this machine and run do not meet.

    Without a resolved configuration only the machine's part is asked: nothing is known about the rest.
    A claim that says what a verdict on a CPU may speak for is tried there without the machine's part.
    """
    applicable = {k: v for k, v in scope.items() if k in run_facts or "seq_len" in run_facts}
    waive = scopes.MACHINE_KEYS if waive_machine else frozenset[str]()
    try:
        return [Missing(reason="scope", detail=text) for text in scopes.unmet(applicable, run_facts, waive)]
    except ValueError as e:
        raise ConfigError(str(e)) from e


def unmet_requirements(requires: Sequence[str], trains: bool = True) -> list[Missing]:
    """The packages and backends of a case that are not here; every case that runs our trainer needs the trainer's own."""
    out = []
    if trains and not installed("torch"):
        out.append(Missing(reason="package", detail=NO_TORCH))
    for name in requires:
        kind, _, backend = name.partition(":")
        if kind == "backend" and backend:
            if backend not in BACKENDS:
                out.append(Missing(reason="package", detail=f"backend {backend} is not offered by this trainer"))
            out += _absent(BACKENDS.get(backend, ()), f"backend {backend}: ")
        else:
            out += _absent([name])
    return out


def unmet_by(config: TrainerConfig) -> list[Missing]:
    """What a resolved configuration needs and this machine lacks, whether or not its case says so."""
    if config.backend != "megatron":
        return []
    out = _absent(BACKENDS["megatron"] if config.megatron.kernels != "local" else BACKENDS["megatron"][:1], "backend megatron: ")
    if config.moe.dispatcher in DISPATCHERS and config.parallel.ep > 1:
        out += _absent([DISPATCHERS[config.moe.dispatcher]], f"dispatcher {config.moe.dispatcher}: ")
    return out


def _absent(modules: Iterable[str], purpose: str = "") -> list[Missing]:
    return [Missing(reason="package", detail=f"{purpose}package {m} is not installed") for m in modules if not installed(m)]


def installed(package: str) -> bool:
    """Whether a package, or a module of one, is here, asked without importing any of it."""
    first, *submodules = package.replace("-", "_").split(".")
    try:
        spec = importlib.util.find_spec(first)
        for i in range(len(submodules)):
            inside = [] if spec is None else list(spec.submodule_search_locations or [])
            spec = importlib.machinery.PathFinder.find_spec(".".join([first, *submodules[: i + 1]]), inside)
    except (ImportError, ValueError):
        return False
    return spec is not None
