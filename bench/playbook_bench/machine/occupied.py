"""One harness at a time on a GPU: two would measure each other. On a CPU that is said, and not refused."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from playbook import files
from playbook.errors import LaunchError
from playbook.records.evidence import Machine
from playbook_bench.machine import detect


def claim(machine: Machine) -> str:
    """Take the machine's GPUs until this process ends. A warning where it has none and another harness measures on the CPU, else "".

    Raises:
        LaunchError: another harness has one of the GPUs.
    """
    if not machine.gpus:
        who = _take("cpu")
        return f"another harness measures on this CPU ({who}): both will find more noise" if who else ""
    for device in detect.device_ids(machine):
        if who := _take(f"gpu-{device}"):
            raise LaunchError(
                f"GPU {device} is in use by another harness ({who}); wait until it has ended, or choose others by CUDA_VISIBLE_DEVICES"
            )
    return ""


def _take(name: str) -> str:
    """Take a lock. Returns who holds it already, or "" if it is ours now or the file system has no locks."""
    folder = Path(tempfile.gettempdir()) / f"playbook-{os.getuid()}" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return files.take(folder)
    except OSError:
        return ""
