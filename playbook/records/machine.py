"""What a machine is: its kind decides for whom a verdict speaks, its name is a label."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from playbook.records.evidence import Machine

CPU = "cpu"

Kind = tuple[int, str | None, str, int | None, int, str, int | None, int | None]
"""Number of GPUs, their name, their links, their memory in GiB, number of nodes, CPU model, cores (None if there are GPUs), host memory in GiB."""


def kind(machine: Machine) -> Kind:
    """What makes two machines alike. Beside GPUs, the number of cores is that of a container and says little.

    The host's memory is taken to the nearest power of two, for firmware and kernel keep some of it.
    """
    memory = None if machine.gpu_memory_gib is None else round(machine.gpu_memory_gib)
    cores = None if machine.gpus else machine.cores
    host = 2 ** round(math.log2(machine.memory_gib)) if machine.memory_gib and machine.memory_gib >= 1 else None
    return machine.gpus, machine.gpu, machine.interconnect, memory, machine.nodes, machine.cpu, cores, host


def label(gpu: str | None, gpus: int) -> str:
    """The name of a machine: `h200x4`, or `cpu` without GPUs."""
    return f"{short_gpu(gpu or '')}x{gpus}" if gpus else CPU


def short_gpu(name: str) -> str:
    """`NVIDIA H200` as `h200`: the first word that has a digit, else the last word."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((w for w in words if any(c.isdigit() for c in w) and any(c.isalpha() for c in w)), words[-1] if words else "gpu")


def told_apart(name: str, own: tuple[Any, ...], others: Collection[tuple[Any, ...]]) -> str:
    """A machine's name, with what sets its kind `own` apart where `others` of that name are of another kind: `cpu-amd-epyc-2-cores`."""
    memory = "unknown-memory" if own[3] is None else f"{own[3]}-gib"
    host = "unknown-host-memory" if own[7] is None else f"{own[7]}-gib-host"
    words = (f"{own[0]}-gpus", _slug(own[1] or "no-gpu"), own[2], memory, f"{own[4]}-nodes", _slug(own[5]), f"{own[6]}-cores", host)
    differing = [word for i, word in enumerate(words) if any(other[i] != own[i] for other in others)]
    return "-".join([name, *differing])


def _slug(text: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", text.lower())) or "unknown"
