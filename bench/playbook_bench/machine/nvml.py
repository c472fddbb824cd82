"""What the NVIDIA driver says of its GPUs, by NVML; nothing where the library or the driver is missing, and callers then ask nvidia-smi."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_PERIOD_S = 1.0


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    """The library, initialised; None where it, or a driver, is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not answer: each has an error of its own
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[list[str]] | None:
    """Name, MiB, driver, power limit in W and UUID of each GPU, as nvidia-smi writes them; None where NVML does not answer."""
    with _library() as nvml:
        if nvml is None:
            return None
        try:
            return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:
            return None


def _gpu(nvml: Any, handle: Any) -> list[str]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20
    return [
        nvml.nvmlDeviceGetName(handle),
        str(memory),
        nvml.nvmlSystemGetDriverVersion(),
        _power_limit(nvml, handle),
        nvml.nvmlDeviceGetUUID(handle),
    ]


def _power_limit(nvml: Any, handle: Any) -> str:
    """In W, with two decimals as nvidia-smi has them."""
    try:
        return f"{nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000:.2f}"
    except nvml.NVMLError:
        return "[N/A]"


class Sampler:
    """A thread that writes a line per second and GPU into a file, as `nvidia-smi --query-gpu=timestamp,... --format=csv,noheader,nounits` does."""

    def __init__(self, devices: Sequence[str], path: Path) -> None:
        self._devices, self._path = devices, path
        self._stop, self._ready, self._works = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> bool:
        """Whether NVML answers for all of these GPUs; nothing is written where it does not."""
        self._thread.start()
        self._ready.wait()
        return self._works

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with _library() as nvml:
                if nvml is not None:
                    with contextlib.suppress(nvml.NVMLError, OSError):
                        self._sample(nvml)
        finally:
            self._ready.set()

    def _sample(self, nvml: Any) -> None:
        handles = [_handle(nvml, device) for device in self._devices]
        lines = [_line(nvml, h) for h in handles]
        with self._path.open("w", encoding="ascii") as out:
            while True:
                out.writelines(lines)
                out.flush()
                self._works = True
                self._ready.set()
                if self._stop.wait(_PERIOD_S):
                    return
                lines = [_line(nvml, h) for h in handles]


def _handle(nvml: Any, device: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdigit() else nvml.nvmlDeviceGetHandleByUUID(device)


def _line(nvml: Any, handle: Any) -> str:
    now = datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    power = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    heat = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    return f"{now}, {clock}, {power:.2f}, {heat}, 0x{nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle):016x}\n"
