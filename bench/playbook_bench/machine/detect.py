"""What machine this is, what it may use under a profile, and what a claim needs that it lacks. Never imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import playbook_trainer
from playbook import files
from playbook.errors import LaunchError
from playbook.paths import repo_root
from playbook.records import commands
from playbook.records.evidence import Machine
from playbook.records.machine import CPU as CPU
from playbook.records.machine import Here, label

# What the NVIDIA driver says of its GPUs, by NVML; nothing where the library or the driver is missing, and callers then ask nvidia-smi.

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
    """A thread that writes a line per second and GPU into a file, as `nvidia-smi --query-gpu=timestamp,... --format=csv,noheader,nounits`
    does.
    """

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


PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "deep-ep",
    "flash-attn",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "numpy",
    "pillow",
)
_ENV = re.compile(r"(NCCL|NVSHMEM|TORCH(INDUCTOR|DYNAMO)?|CUDA|CUBLAS(LT)?|NVTE|PYTORCH|OMP|MKL|TRITON|GLOO|KMP)_[A-Z0-9_]+\Z")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OURS = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_CACHE_AUTOTUNING", _VISIBLE})
_PLACE = re.compile(r"_(CACHE|PIPE|LOG|DEBUG|DUMP|TEMP|EXTENSIONS)_([A-Z]+_)*(DIR|DIRECTORY|PATH|FILE)\Z")
"""Names of variables that say where files go, often in a folder of the job's own, and not how fast anything is."""
_QUERY = "name,memory.total,driver_version,power.limit,uuid"
_TOOL_TIMEOUT_S = 30
_OF_A_HOOK = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX"})


def detect() -> Machine:
    """The machine with the GPUs that this process may use, from NVML or nvidia-smi where one answers, else its CPU alone."""
    gpus = _gpus()
    indices = visible([row[4] if len(row) > 4 else "" for row in gpus], os.environ.get(_VISIBLE))
    topology = _nvidia_smi(["topo", "-m"]) if len(indices) > 1 else ""
    return machine_of([gpus[i] for i in indices], topology, _cpu_model(), cores(), indices, _host_memory_gib())


def _gpus() -> list[list[str]]:
    """Name, MiB, driver, power limit and UUID of each GPU of this machine."""
    by_nvml = gpus()
    if by_nvml is not None:
        return by_nvml
    rows = _nvidia_smi([f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    return [[field.strip() for field in line.split(",")] for line in rows.splitlines() if line.count(",") >= 3]


def visible(uuids: Sequence[str], variable: str | None) -> list[int]:
    """Which of the GPUs CUDA shows to a process with this CUDA_VISIBLE_DEVICES: all without it, none where it is empty.

    As CUDA reads it: indices, or UUIDs that may be cut short; the first entry that names no GPU ends the list, and one that is named
    twice voids it. A MIG instance is a part of a GPU, which no profile stands for, and counts as none.
    """
    if variable is None:
        return list(range(len(uuids)))
    words = [word.strip() for word in variable.split(",")]
    indices: list[int] = []
    for word in words:
        named = [i for i, uuid in enumerate(uuids) if (uuid.startswith(word) if word.startswith("GPU-") else word == str(i))]
        if len(named) != 1 or word.startswith("GPU-") != words[0].startswith("GPU-"):
            break
        indices += named
    return indices if len(set(indices)) == len(indices) else []


def place() -> list[str]:
    """This machine, by host name and GPUs: cloud machines may share a host name, but not their GPUs' UUIDs."""
    return [socket.gethostname(), *sorted(row[4] for row in _gpus() if len(row) > 4 and row[4].startswith("GPU-"))]


def machine_of(
    gpus: Sequence[Sequence[str]],
    topology: str,
    cpu: str,
    num_cores: int,
    which: Sequence[int] | None = None,
    memory_gib: float | None = None,
) -> Machine:
    """A machine record from nvidia-smi's rows (name, MiB, driver, power limit) and its topology matrix; `which` are the rows' places in
    that.
    """
    if not gpus:
        return Machine(name=CPU, description=f"{num_cores} cores, {cpu}", gpus=0, cpu=cpu, cores=num_cores, memory_gib=memory_gib)
    name, memory, driver = gpus[0][0], gpus[0][1], gpus[0][2]
    link = interconnect(topology, len(gpus), which)
    joined = {"nvlink": ", NVLink", "pcie": ", PCIe", "none": ""}[link]
    return Machine(
        name=label(name, len(gpus)),
        description=f"{len(gpus)} x {name}{joined}",
        gpus=len(gpus),
        gpu=name,
        gpu_memory_gib=round(float(memory) / 1024, 1) if re.fullmatch(r"[0-9.]+", memory) else None,
        interconnect=link,
        driver=driver,
        cpu=cpu,
        cores=num_cores,
        memory_gib=memory_gib,
    )


def over_nodes(machine: Machine, nodes: int) -> Machine:
    """As many such machines as an allocation has nodes, as one."""
    if nodes == 1:
        return machine
    gpus = machine.gpus * nodes
    return machine.model_copy(
        update={"name": label(machine.gpu, gpus), "gpus": gpus, "nodes": nodes, "description": f"{nodes} nodes of {machine.description}"}
    )


def gpus_per_node(machine: Machine) -> int:
    """GPUs of one of its nodes."""
    return machine.gpus // machine.nodes


def interconnect(topology: str, gpus: int, which: Sequence[int] | None = None) -> Any:
    """NVLink where every pair of the GPUs in `nvidia-smi topo -m` is joined by it, PCIe where one is not, none for a single GPU."""
    if gpus < 2:
        return "none"
    places = sorted(range(gpus) if which is None else which)
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    rows = [
        r for r in rows if r and r[0] in {f"GPU{i}" for i in places} and len(r) > places[-1] + 1 and not re.fullmatch(r"GPU[0-9]+", r[1])
    ]
    cells = [cell for r in rows for cell in (r[i + 1] for i in places) if cell != "X"]
    return "nvlink" if len(rows) >= gpus and cells and all(re.fullmatch(r"NV[0-9]+", c) for c in cells) else "pcie"


def _cpu_model() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _host_memory_gib() -> float | None:
    """The memory of the host, whatever a container may use of it."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None


def cores() -> int:
    """The cores that this process may use: its affinity, cut by a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))


def versions() -> dict[str, str]:
    """Versions of what can move a step time, for packages that are installed."""
    out = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[name] = importlib.metadata.version(name)
    return out


def here() -> Here:
    """This machine, as verdicts from one like it are compared with it."""
    machine = detect()
    return Here(machine.gpu, versions(), machine.driver)


def strict_environment(machine: Machine, environment: Mapping[str, str]) -> dict[str, Any]:
    """The parent's part of the strict fingerprint: hardware, driver, versions and the variables that steer the libraries."""
    return {
        "machine": machine.model_dump(mode="json", exclude={"name", "description"}),
        "packages": versions(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "env": _steering(environment),
    }


def _steering(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in sorted(environment.items()) if _ENV.match(k) and k not in _OURS and not commands.of_variables({k: v})}


def exported() -> dict[str, str]:
    """The variables that steer the libraries, as every rank has them from this process; the harness sets the number of threads itself."""
    return {k: v for k, v in _steering(os.environ).items() if k != "OMP_NUM_THREADS" and not _PLACE.search(k)}


def context() -> dict[str, Any]:
    """Reported with the evidence, never compared: where it ran, from which commit, and which variables all its runs had from their
    surroundings.
    """
    slurm = {k: os.environ[f"SLURM_JOB_{v}"] for k, v in (("job", "ID"), ("nodes", "NODELIST")) if f"SLURM_JOB_{v}" in os.environ}
    about = {"commit": commit(), "host": socket.gethostname(), "kernel": platform.release(), "python": platform.python_version()}
    return {**about, **slurm, "env": _steering(os.environ)}


def digest_of(texts: Sequence[str]) -> str:
    """A hash of texts in their order."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:16]


def commit(folder: Path | None = None) -> str | None:
    """The repository's commit, with `+` where files are changed; None outside a repository."""
    root, environment = folder or repo_root(), git_environment()
    head = _tool(["git", "-C", str(root), "rev-parse", "HEAD"], environment).strip()
    if not head:
        return None
    return head + ("+" if _tool(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"], environment).strip() else "")


def trainer_digest() -> str:
    """A hash of the trainer's source files, by name, size and time: another one for any edit."""
    stats = [(path, path.stat()) for path in sorted(Path(playbook_trainer.__file__).parent.rglob("*.py"))]
    return digest_of([f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats])


def git_environment() -> dict[str, str]:
    """This process's environment without what git hands to its hooks.

    There, `-C` would not choose the repository, and a new worktree would be written into the index of the commit that is being made.
    """
    return {k: v for k, v in os.environ.items() if k not in _OF_A_HOOK}


def device_ids(machine: Machine) -> list[str]:
    """The GPUs of a node that the machine, or what a profile leaves of it, stands for: the first of those that CUDA_VISIBLE_DEVICES names,
    where it is set.
    """
    gpus = gpus_per_node(machine)
    variable = os.environ.get(_VISIBLE)
    have = [str(i) for i in range(gpus)] if variable is None else [word.strip() for word in variable.split(",") if word.strip()]
    return have[:gpus]


def visible_devices(machine: Machine, profile: str) -> dict[str, str]:
    """The variable that hides from the ranks what the profile may not use."""
    return {_VISIBLE: "" if profile == CPU else ",".join(device_ids(machine))}


def _nvidia_smi(arguments: Sequence[str]) -> str:
    return _tool(["nvidia-smi", *arguments]) if shutil.which("nvidia-smi") else ""


def _tool(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a read-only tool prints, or nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# One harness at a time on a GPU: two would measure each other. On a CPU that is said, and not refused.


def claim(machine: Machine) -> str:
    """Take the machine's GPUs until this process ends. A warning where it has none and another harness measures on the CPU, else "".

    Raises:
        LaunchError: another harness has one of the GPUs.
    """
    if not machine.gpus:
        who = _take("cpu")
        return f"another harness measures on this CPU ({who}): both will find more noise" if who else ""
    for device in device_ids(machine):
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
