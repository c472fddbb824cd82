"""What a cluster's file says, and the batch job that follows from it. The script itself is written by submitit."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from playbook.paths import repo_root, sources
from playbook.yaml_files import Strict
from playbook_bench.launch.local import TRAINER, import_paths
from playbook_bench.launch.slurm import SrunLauncher, allocation
from playbook_trainer.config.environment import ALLOCATOR, CONNECTIONS, DOMAIN, Platform, variables
from playbook_trainer.config.tree import TrainerConfig

_SIGNAL_S = 120
"""How long before its time limit a job is told, so that it can save and queue itself again; Slurm may tell it a minute sooner than asked."""
_LEAST_MINUTES = 5
"""Of a shorter job that notice leaves nothing: it would queue itself again as soon as it starts."""
_Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Option = Annotated[str, Field(pattern=r"^[a-z][a-z-]*$")]
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-9]{2})(?::([0-9]{2}))?\Z")
_SHORT = re.compile(r"([0-9]+)([mh])\Z")
_OURS = frozenset(("job-name", "output", "error", "open-mode", "signal", "requeue", "nodes", "time", "array", "ntasks", "ntasks-per-node"))

_GPU = {ALLOCATOR: "expandable_segments:True", "NCCL_NVLS_ENABLE": "0"}
PLATFORMS: Mapping[Platform, Mapping[str, str]] = {
    "cpu": {},
    "hopper": {**_GPU, "NVLINK_DOMAIN_SIZE": str(DOMAIN["hopper"]), "USE_MNNVL": "0"},
    "blackwell": {**_GPU, "NVLINK_DOMAIN_SIZE": str(DOMAIN["blackwell"]), "USE_MNNVL": "0"},
    "nvl72": {**_GPU, "NVLINK_DOMAIN_SIZE": str(DOMAIN["nvl72"]), "USE_MNNVL": "1"},
}
"""Variables of every run on a platform.

Source: the environments of Megatron-Bridge's performance recipes for H100, B200 and GB200 (memory that grows in segments, no NVLS buffers, the
NVLink domain for HybridEP). `playbook_trainer.config.environment` adds what a configuration asks for.
"""


class Container(Strict):
    """An image for the ranks, started by the pyxis plugin of srun."""

    image: _Line
    mounts: list[_Line] = Field(default_factory=list)
    """`SOURCE:TARGET` each. The results and the data must be seen under the same path as outside."""
    python: _Line = "python3"
    """The image's Python, which has perf-playbook installed."""


class Cluster(Strict):
    """A cluster: where jobs go, what they run in, and which variables its platform wants."""

    SCHEMA = "cluster"
    partition: _Line | None = None
    account: _Line | None = None
    qos: _Line | None = None
    time: _Line = "1h"
    """Time limit of a job: `90m`, `2h`, `HH:MM:SS` or `D-HH:MM:SS`, at least 5m. A job that reaches it queues itself again and goes on."""
    timeouts: int = Field(default=10, ge=0)
    """How often a job may reach its time limit before it is given up."""
    nodes: int = Field(default=1, gt=0)
    gpus_per_node: int | None = Field(default=None, gt=0)
    ranks_per_node: int | None = Field(default=None, gt=0)
    """The GPUs of a node, if not given; without GPUs ranks are spread evenly over the nodes."""
    exclusive: bool = True
    """Whole nodes: another job on the same node would disturb what is measured."""
    platform: Platform = "hopper"
    venv: _Line | None = None
    """A virtual environment that all nodes see; the one that submits, if not given."""
    container: Container | None = None
    setup: list[_Line] = Field(default_factory=list)
    """Shell lines before anything runs, such as `module load cuda/13`."""
    environment: dict[Name, _Line] = Field(default_factory=dict)
    """Variables of every run; they go before the platform's."""
    sbatch: dict[Option, _Line] = Field(default_factory=dict)
    """Further options of sbatch, such as `reservation: name`."""

    @field_validator("time")
    @classmethod
    def _a_time(cls, value: str) -> str:
        if minutes(value) < _LEAST_MINUTES:
            raise ValueError(f"a job is told two to three minutes before its limit; expected at least {_LEAST_MINUTES}m, found '{value}'")
        return value

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, value: dict[str, str]) -> dict[str, str]:
        taken = sorted(_OURS & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} is set from the other keys or from the command line; leave it out")
        return value

    @property
    def per_node(self) -> int | None:
        """Ranks of a full node, where the file says."""
        return self.ranks_per_node or self.gpus_per_node


def minutes(text: str) -> int:
    """A time limit in minutes, rounded up.

    Raises:
        ValueError: it is none.
    """
    if short := _SHORT.match(text):
        found = int(short[1]) * {"m": 1, "h": 60}[short[2]]
    elif full := _TIME.match(text):
        days, hours, mins, seconds = (int(part or 0) for part in full.groups())
        found = (days * 24 + hours) * 60 + mins + (seconds > 0)
    else:
        raise ValueError(f"expected a time such as 90m, 2h, 02:30:00 or 1-00:00:00, found '{text}'")
    if found < 1:
        raise ValueError("a time limit is at least a minute")
    return found


def environment(cluster: Cluster, config: TrainerConfig | None = None) -> dict[str, str]:
    """The variables of a job: the platform's, those that the layout of `config` asks for, and the file's own over both.

    Matched runs share one environment, so a case's variants get the platform's alone; a case declares what else differs.
    """
    found = {**PLATFORMS[cluster.platform], **(variables(config, cluster.platform) if config else {})}
    return {**found, **cluster.environment}


def launcher(cluster: Cluster, gpus: int) -> SrunLauncher:
    """Steps of the allocation that this process runs in; `gpus` are those of this node.

    Raises:
        ConfigError: this is no allocation.
    """
    own = SrunLauncher(allocation(), cluster.per_node or gpus or None)
    image = cluster.container
    if image is None:
        return own
    mounts = [f"--container-mounts={','.join(image.mounts)}"] if image.mounts else []
    # The image brings packages of its own; those outside may be built for another Python.
    return replace(
        own, srun=(f"--container-image={image.image}", *mounts), command=(image.python, *TRAINER[1:]), variables={"PYTHONPATH": ""}
    )


def python(cluster: Cluster) -> str:
    """The Python of the job's own process."""
    return sys.executable if cluster.venv is None else str(Path(cluster.venv).expanduser() / "bin" / "python")


def parameters(cluster: Cluster, nodes: int, name: str, env: Mapping[str, str], shown: str) -> dict[str, Any]:
    """The job as submitit's parameters.

    The process of the job replaces the batch script's shell (`exec`), and the signal before the time limit goes to it alone (`B:`):
    the ranks are its steps, and it ends them itself.
    """
    # A named environment has Playbook installed; this process's own packages would hide it, and may be built for another Python.
    own = {} if cluster.venv else {"PYTHONPATH": ":".join(dict.fromkeys([*import_paths(), *sources(repo_root())]))}
    exports = {**own, "PYTHONSAFEPATH": "1", **env}
    forget = [f"unset {CONNECTIONS}"] if CONNECTIONS not in env else []
    # A word with a line break would end the comment, and its rest would run.
    comment = "# " + " ".join(shown.splitlines())
    lines = [comment, *forget, *(f"export {key}={shlex.quote(value)}" for key, value in exports.items()), *cluster.setup]
    given: dict[str, Any] = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "gpus_per_node": cluster.gpus_per_node,
        "exclusive": cluster.exclusive or None,
    }
    return {
        "job_name": f"playbook-{name}",
        "time": minutes(cluster.time),
        "nodes": nodes,
        **{key: value for key, value in given.items() if value is not None},
        "setup": lines,
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
        "additional_parameters": {"requeue": True, "signal": f"B:USR2@{_SIGNAL_S}", **cluster.sbatch},
    }
