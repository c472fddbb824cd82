"""Starting one run on the nodes of a Slurm allocation: the ranks are one step of `srun`, and every end of it is an outcome.

The harness itself runs on the allocation's first node, so that all runs of a series are steps of one allocation: matched runs share
their nodes, and the order of the plan is kept. The run's folder lies on a file system that all nodes see.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from playbook.errors import ConfigError, LaunchError
from playbook.paths import repo_root, sources
from playbook.processes import die_with_parent
from playbook.yaml_files import Strict
from playbook_bench.launch.local import (
    DRAIN_S,
    TRAINER,
    Interrupted,
    Spec,
    Watch,
    deferred_signals,
    import_paths,
    rank_environment,
    retry_if_port_taken,
    write_config,
)
from playbook_bench.launch.outcome import Ended, Result, judge, read_summary, tail
from playbook_trainer.config.environment import ALLOCATOR, CONNECTIONS, DOMAIN, Platform, variables
from playbook_trainer.config.tree import TrainerConfig

GRACE_S = 20.0
"""How long a step may take to end; Slurm kills what ignores SIGTERM after its own KillWait."""
_POLL_S = 0.25
_TOOL_TIMEOUT_S = 60
_END_OF_JOB_S = 120.0
_SIGNALLED = 128
_NODE_FAILURE = re.compile(r"error: Node failure on (\S+)")
_TASK_KILLED = re.compile(r"error: (\S+: tasks? (\S+): (?:Killed|Out Of Memory))")
_TASK_UNKNOWN = re.compile(r"StepId=\S+ tasks? (\S+): unknown")
_RANK = """\
trap : TERM
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"
folder="$1"; shift
if [ "$RANK" = 0 ]; then echo "$SLURM_STEP_ID" > "$folder/step"; fi
"$@"
code=$?
echo "$code" > "$folder/rank$RANK.exit"
exit "$code"
"""
"""What each task of a step runs. The shell outlives SIGTERM, so that the rank may end in order; its code is written where srun would merge
all."""


@dataclass(frozen=True)
class Allocation:
    """The nodes that Slurm gave to this job, the harness's own first."""

    job: str
    hosts: tuple[str, ...]
    address: str
    """Where the first node can be reached from the others."""


def allocation() -> Allocation:
    """The allocation that this process runs in.

    Raises:
        ConfigError: there is none, or this is not its first node.
    """
    job, nodes = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        raise ConfigError(
            "--launcher srun runs inside an allocation, and SLURM_JOB_ID is not set here; submit with --launcher slurm instead"
        )
    require_tools("srun", "scontrol", "squeue", "scancel")
    hosts = tuple(_tool(["scontrol", "show", "hostnames", nodes]).split())
    if os.environ.get("SLURMD_NODENAME") != hosts[0]:
        raise ConfigError(f"--launcher srun runs on the allocation's first node, {hosts[0]}; submit with --launcher slurm instead")
    match = re.search(r"\bNodeAddr=(\S+)", _tool(["scontrol", "--oneliner", "show", "node", hosts[0]]))
    return Allocation(job, hosts, match[1] if match else hosts[0])


def require_tools(*names: str) -> None:
    """Slurm's commands are on PATH.

    Raises:
        ConfigError: one is not.
    """
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise ConfigError(f"Slurm's {', '.join(missing)} is not on PATH; run this where Slurm is installed, or leave --launcher out")


@dataclass(frozen=True)
class SrunLauncher:
    """Ranks as the tasks of one step, filling the allocation's nodes in order."""

    allocation: Allocation
    ranks_per_node: int | None = None
    """How many ranks a node takes; spread evenly over all nodes where it is not given."""
    srun: Sequence[str] = ()
    """Further options of srun, such as a container's image."""
    command: Sequence[str] = TRAINER
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set for every rank, over everything else."""
    end_together: bool = True
    """End all ranks as soon as one ends badly; otherwise the others have `drain_s` seconds to end in order."""
    grace_s: float = GRACE_S
    drain_s: float = DRAIN_S

    def run(self, spec: Spec, on_step: Callable[[int], None] | None = None) -> Result:
        """Run the step to its end, and leave no task behind.

        Raises:
            ConfigError: the ranks are to share a GPU.
            LaunchError: srun could not start the ranks, or the run's folder cannot be written.
            Interrupted: the job itself is being ended.
        """
        if spec.shared:
            raise ConfigError(f"{spec.ranks} ranks are to share one GPU, which srun gives to one of them; leave --launcher out")
        return retry_if_port_taken(lambda: self._once(spec, on_step), spec.folder)

    def step(self, ranks: int, folder: Path, command: Sequence[str]) -> list[str]:
        """The command line of a step."""
        per_node = self.per_node(ranks)
        nodes = -(-ranks // per_node)
        if nodes > len(self.allocation.hosts):
            raise ConfigError(
                f"{ranks} ranks at {per_node} a node need {nodes} nodes, and the allocation has {len(self.allocation.hosts)}; "
                "ask for more with --nodes"
            )
        return [
            "srun",
            f"--nodes={nodes}",
            f"--nodelist={','.join(self.allocation.hosts[:nodes])}",
            f"--ntasks={ranks}",
            f"--ntasks-per-node={per_node}",
            "--distribution=block",
            "--cpu-bind=none",
            f"--kill-on-bad-exit={int(self.end_together)}",
            f"--wait={max(1, round(self.drain_s))}",
            "--input=none",
            # The default is what the job itself was submitted with: after `sbatch --export=NONE`, ranks would know nothing of each other.
            "--export=ALL",
            f"--output={str(folder).replace('%', '%%')}/rank%t.log",
            *self.srun,
            *("/bin/sh", "-c", _RANK, "rank", str(folder), *command),
        ]

    def per_node(self, ranks: int) -> int:
        """Ranks of a full node."""
        return self.ranks_per_node or -(-ranks // len(self.allocation.hosts))

    def environment(self, spec: Spec) -> dict[str, str]:
        """What srun hands on to every rank; the shell in front of each adds its number."""
        local = str(min(spec.ranks, self.per_node(spec.ranks)))
        place = {"MASTER_ADDR": self.allocation.address, "WORLD_SIZE": str(spec.ranks), "LOCAL_WORLD_SIZE": local}
        return {**rank_environment(spec), **place, **spec.environment, **self.variables}

    def _once(self, spec: Spec, on_step: Callable[[int], None] | None) -> Result:
        """Run one step of srun to its end, and judge it: by its ranks, by what srun says, and by the nodes that Slurm has lost."""
        config = write_config(spec)
        command = self.step(spec.ranks, spec.folder, [*self.command, str(config)])
        started, clock = time.time(), time.monotonic()
        process = start(command, spec.folder, self.environment(spec))
        watch = Watch(spec, on_step)
        hung = ""
        try:
            while not hung and not _ended(process, _POLL_S):
                hung = watch.look(clock)
            watch.look(clock)
        finally:
            srun_log = tail(spec.folder / "srun.log")  # before what ends here is killed
            end(process, self.allocation.job, spec.folder, self.grace_s)
        wall = time.monotonic() - clock
        if hung:
            return self._with_loss(Result("hang", None, f"{hung}\n{tail(spec.folder / 'rank0.log')}", started, wall), srun_log, spec.ranks)
        result = self._result(process.returncode, srun_log, spec, started, wall)
        if result.outcome not in ("ok", "nan", "refused"):
            _wait_where_the_job_ends(self.allocation.job)
        return self._with_loss(result, srun_log, spec.ranks)

    def _with_loss(self, result: Result, srun_log: str, ranks: int) -> Result:
        """The result, with what went away under the ranks where Slurm knows: the others then wait for it, or lose their connections to
        it.
        """
        if result.outcome not in ("hang", "crash", "killed"):
            return result
        loss = self._lost_node(srun_log, ranks) or _lost_rank(srun_log)
        return replace(result, outcome="killed", message=f"{loss}\n{result.message}") if loss else result

    def _lost_node(self, srun_log: str, ranks: int) -> str:
        """The first node of this step that Slurm has lost, with its ranks, or nothing."""
        per_node = self.per_node(ranks)
        hosts = self.allocation.hosts[: -(-ranks // per_node)]
        for host, sign in _lost_nodes(srun_log, hosts):
            first, last = hosts.index(host) * per_node, min((hosts.index(host) + 1) * per_node, ranks) - 1
            return f"node {host} with rank {first}{f' to {last}' if last > first else ''} went away: {sign}"
        return ""

    def _result(self, code: int, srun_log: str, spec: Spec, started: float, wall: float) -> Result:
        ranks = exits(spec.folder, spec.ranks)
        if not any(r.log.exists() or r.exit_code is not None for r in ranks):
            _wait_where_the_job_ends(self.allocation.job)
            raise LaunchError(f"srun could not start the ranks: {srun_log.splitlines()[-1] if srun_log else f'exit code {code}'}")
        # Where a node's daemon is gone srun may end with 0.
        unknown = any(r.exit_code is None for r in ranks) and read_summary(spec.written) is None
        if (code or unknown) and not any(r.exit_code for r in ranks):
            late = [str(r.index) for r in ranks if r.exit_code is None]
            if len(late) < len(ranks):
                text = f"rank {', '.join(late)} did not end within {self.drain_s:g} s of the others"
                return Result("hang", None, f"{text}\n{tail(ranks[0].log)}", started, wall)
            return Result("killed", code, f"the step was ended from outside: {srun_log}\n{tail(ranks[0].log)}", started, wall)
        return judge(ranks, spec.written, started, wall)


def start(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start srun, in a session of its own and ended with this process; what it says goes to `srun.log`.

    Raises:
        LaunchError: there is no srun.
    """
    try:
        with (folder / "srun.log").open("wb") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),
            )
    except OSError as e:
        raise LaunchError(f"srun could not be started: {e.strerror or e}") from e


def exits(folder: Path, ranks: int) -> list[Ended]:
    """How each rank ended. Where one ended with a code of its own, those that a signal ended were ended with it and say nothing."""
    codes = [_code(folder / f"rank{index}.exit") for index in range(ranks)]
    decided = any(code is not None and code > 0 for code in codes)
    own_codes = [None if code is not None and code < 0 and (decided or code == -signal.SIGTERM) else code for code in codes]
    return [Ended(index, code, folder / f"rank{index}.log") for index, code in enumerate(own_codes)]


def _lost_nodes(srun_log: str, hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Those of these nodes that Slurm has lost, and by what that is seen: srun's own words, or the state of the node."""
    failed = [(host, f"Slurm says 'Node failure on {host}'") for host in _NODE_FAILURE.findall(srun_log) if host in hosts]
    if failed:
        return failed
    lines = _tool(["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T"]).splitlines()
    states = [(host, state) for host, _, state in (line.partition(" ") for line in lines) if host in hosts]
    return [(h, f"it does not respond, its state is '{state}'") for h, state in states if state.endswith("*") or state.startswith("down")]


def _lost_rank(srun_log: str) -> str:
    """The ranks that went away together with the shell in front of them, which wrote no code, by srun's words; or nothing."""
    # What it says behind these lines is about ranks that it has killed itself.
    before = re.split(r"First task exited|Terminating StepId", srun_log)[0]
    if match := _TASK_KILLED.search(before):
        return f"rank {match[2]} went away: Slurm says '{match[1]}'"
    if match := _TASK_UNKNOWN.search(srun_log):
        return f"rank {match[1]} went away: Slurm does not know what has become of it"
    return ""


def _code(path: Path) -> int | None:
    """The code in a file that a rank's shell wrote; a signal is negative."""
    try:
        code = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return _SIGNALLED - code if code > _SIGNALLED else code


def end(process: subprocess.Popen[bytes], job: str, folder: Path, grace_s: float) -> None:
    """End what is left of a step: SIGTERM, and after a grace, which a signal cuts short, the step is cancelled with every task."""
    with deferred_signals() as signals:
        if process.poll() is not None:
            return
        process.terminate()
        deadline = time.monotonic() + grace_s
        while not signals and time.monotonic() < deadline:
            if _ended(process, min(_POLL_S, grace_s)):
                return
        with contextlib.suppress(OSError):
            _tool(["scancel", "--signal=KILL", f"{job}.{(folder / 'step').read_text(encoding='ascii').strip()}"])
        if not _ended(process, grace_s):
            process.kill()
            process.wait()


def _wait_where_the_job_ends(job: str) -> None:
    """A run that broke because its job is being ended, by a preemption for one, says nothing; the signal that follows ends this process.

    Raises:
        Interrupted: the job is not running any more, and no signal came.
    """
    if _tool(["squeue", "--noheader", f"--jobs={job}", "--format=%T"]).strip() in ("RUNNING", ""):
        return
    time.sleep(_END_OF_JOB_S)
    raise Interrupted(signal.SIGTERM)


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _tool(command: Sequence[str]) -> str:
    """What a command of Slurm prints; nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# What a cluster's file says, and the batch job that follows from it. The script itself is written by submitit.

_SIGNAL_S = 120
"""How long before its time limit a job is told, so that it can save and queue itself again; Slurm may tell it a minute sooner than
asked."""
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

Source: the environments of Megatron-Bridge's performance recipes for H100, B200 and GB200 (memory that grows in segments, no NVLS buffers,
the NVLink domain for HybridEP). `playbook_trainer.config.environment` adds what a configuration asks for.
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
        reserved = sorted(_OURS & value.keys())
        if reserved:
            raise ValueError(f"{', '.join(reserved)} is set from the other keys or from the command line; leave it out")
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
        total = int(short[1]) * {"m": 1, "h": 60}[short[2]]
    elif full := _TIME.match(text):
        days, hours, mins, seconds = (int(part or 0) for part in full.groups())
        total = (days * 24 + hours) * 60 + mins + (seconds > 0)
    else:
        raise ValueError(f"expected a time such as 90m, 2h, 02:30:00 or 1-00:00:00, found '{text}'")
    if total < 1:
        raise ValueError("a time limit is at least a minute")
    return total


def environment(cluster: Cluster, config: TrainerConfig | None = None) -> dict[str, str]:
    """The variables of a job: the platform's, those that the layout of `config` asks for, and the file's own over both.

    Matched runs share one environment, so a case's variants get the platform's alone; a case declares what else differs.
    """
    values = {**PLATFORMS[cluster.platform], **(variables(config, cluster.platform) if config else {})}
    return {**values, **cluster.environment}


def launcher(cluster: Cluster, gpus: int) -> SrunLauncher:
    """Steps of the allocation that this process runs in; `gpus` are those of this node.

    Raises:
        ConfigError: this is no allocation.
    """
    base = SrunLauncher(allocation(), cluster.per_node or gpus or None)
    image = cluster.container
    if image is None:
        return base
    mounts = [f"--container-mounts={','.join(image.mounts)}"] if image.mounts else []
    # The image brings packages of its own; those outside may be built for another Python.
    return replace(
        base, srun=(f"--container-image={image.image}", *mounts), command=(image.python, *TRAINER[1:]), variables={"PYTHONPATH": ""}
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
    import_environment = {} if cluster.venv else {"PYTHONPATH": ":".join(dict.fromkeys([*import_paths(), *sources(repo_root())]))}
    exports = {**import_environment, "PYTHONSAFEPATH": "1", **env}
    forget = [f"unset {CONNECTIONS}"] if CONNECTIONS not in env else []
    # A word with a line break would end the comment, and its rest would run.
    comment = "# " + " ".join(shown.splitlines())
    lines = [comment, *forget, *(f"export {key}={shlex.quote(value)}" for key, value in exports.items()), *cluster.setup]
    optional: dict[str, Any] = {
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
        **{key: value for key, value in optional.items() if value is not None},
        "setup": lines,
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
        "additional_parameters": {"requeue": True, "signal": f"B:USR2@{_SIGNAL_S}", **cluster.sbatch},
    }
