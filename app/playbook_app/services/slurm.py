"""Jobs of Slurm: the cluster's file, the allocation of a job, its script, and what the queue says of it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError, LaunchError, PlaybookError, UnmetRequirement
from playbook.yaml_files import load
from playbook_bench.launch import batch_job, local
from playbook_bench.launch.batch_job import Cluster
from playbook_bench.launch.slurm import SrunLauncher, require_tools
from playbook_bench.machine import detect
from playbook_bench.run import store

SAVING_S = 90
"""How long ranks may take to save a checkpoint before the time limit."""


def load_cluster(path: Path | None) -> Cluster:
    """The cluster's file, or the defaults where there is none.

    Raises:
        FileError: it is invalid.
    """
    if path is None and not Path("cluster.yaml").is_file():
        return Cluster()
    return load(path or Path("cluster.yaml"), Cluster)[0]


def allocation(cluster: Path | None) -> SrunLauncher:
    """The launcher for the allocation that this process runs in.

    Raises:
        PlaybookError: there is no allocation, or the cluster's file is invalid.
    """
    return batch_job.launcher(load_cluster(cluster), detect.detect().gpus)


def submit(job: Any, folder: Path, cluster: Cluster, parameters: Mapping[str, Any], config: str | None = None) -> str:
    """Submit `job`, which submitit calls on the first node, and return its number. The folder is removed if sbatch refuses the job.

    Raises:
        LaunchError: Slurm is not there, or refuses the job.
    """
    submitit = library()
    try:
        store.replace(folder / "cluster.yaml", cluster.model_dump_json(exclude_defaults=True) + "\n")
        if config is not None:
            store.replace(folder / "config.yaml", config)
        executor = submitit.SlurmExecutor(folder, max_num_timeout=cluster.timeouts, python=f"exec {shlex.quote(batch_job.python(cluster))}")
        executor.update_parameters(**parameters)
        with contextlib.redirect_stderr(io.StringIO()):  # what sbatch says is in the error as well
            return str(executor.submit(job).job_id)
    except submitit.core.utils.FailedJobError as e:
        shutil.rmtree(folder, ignore_errors=True)
        lines = [line.removeprefix("sbatch: error: ") for line in str(e).splitlines() if line.strip()]
        raise LaunchError(f"Slurm refused the job: {lines[-1] if lines else 'sbatch failed'}") from e
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def new_folder(results: Path, name: str) -> Path:
    """A new folder below `results` for a job's script, log and result.

    Raises:
        LaunchError: Slurm is not installed here.
    """
    require_tools("sbatch", "srun", "squeue")
    return local.new_folder(results / "jobs", name)


def check_folder(results: Path) -> None:
    """Refuse a results folder with characters that sbatch interprets in the path of a log: % and backslash.

    Raises:
        ConfigError: it has one.
    """
    if any(c in "%\\" or not c.isprintable() for c in str(results)):
        raise ConfigError(
            f"the results folder {str(results)!r} has a character that Slurm does not take as it is in the path of a log (%, backslash, "
            "line break); choose another with --results, or submit from another folder"
        )


def script(cluster: Cluster, folder: Path, parameters: Mapping[str, Any]) -> str:
    """The batch script as submitit writes it, on a machine with or without Slurm."""
    command = f"exec {shlex.quote(batch_job.python(cluster))} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return str(library().slurm.slurm._make_sbatch_string(command=command, folder=folder, **parameters)).rstrip()


def library() -> Any:
    """The package submitit.

    Raises:
        UnmetRequirement: it is not installed.
    """
    try:
        import submitit
    except ImportError as e:
        raise UnmetRequirement("package submitit is not installed; run pip install '.[slurm]' in a clone of Playbook") from e
    return submitit


def folder_of(job: str, results: Path, advice: str) -> Path:
    """The folder of a job that was submitted with this results folder.

    Raises:
        PlaybookError: there is none; `advice` says what to do.
    """
    found = sorted(results.glob(f"jobs/*/{job}_submission.sh")) if job.isdigit() else []
    if not found:
        raise PlaybookError(f"job '{job}' was not submitted with the results folder {results}; {advice}")
    return found[-1].parent


def let_the_steps_save(job: str) -> None:
    """Send SIGTERM to the ranks of all steps and wait until they have ended."""
    command = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"]
    deadline = time.monotonic() + SAVING_S
    told: set[str] = set()
    while time.monotonic() < deadline:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        steps = {step for step in listed if step.rpartition(".")[2].isdigit()}
        if not steps:
            return
        for step in steps - told:
            subprocess.run(["scancel", "--signal=TERM", step], capture_output=True, check=False)
        told |= steps
        time.sleep(1)


def end_of(job: str) -> str:
    """The final state of a job that has left the queue, such as NODE_FAIL; an empty string if Slurm has forgotten it."""
    try:
        done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    if found is None:
        return ""
    return " (NODE_FAIL: one of its nodes went away)" if found[1] == "NODE_FAIL" else f" ({found[1]})"


def state_of(job: str) -> str | None:
    """The state of the job in the queue, such as `pending (Resources)`; an empty string after it has left, None if squeue fails."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %R"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    state, _, rest = done.stdout.strip().partition(" ")
    if done.returncode:
        return "" if "Invalid job id" in done.stderr else None
    return f"{state.lower()} {'on ' if rest[:1] not in ('', '(') else ''}{rest}".strip()
