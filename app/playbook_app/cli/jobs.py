"""`--launcher slurm` submits the same command as a job of Slurm, which runs it with `--launcher srun` in its allocation."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from playbook import yaml_files
from playbook.errors import ConfigError, ExitCode, LaunchError, PlaybookError, UnmetRequirement
from playbook.paths import default_results
from playbook_app.cli import app as root
from playbook_app.cli.output import complain, print_json, say
from playbook_bench.launch import local, slurm
from playbook_bench.launch.slurm import Cluster, SrunLauncher, environment, require_tools
from playbook_bench.machine import detect
from playbook_bench.run import store
from playbook_trainer.config import checks
from playbook_trainer.config.tree import TrainerConfig, dump, load, parse_overrides

_LAUNCHERS = ("local", "slurm", "srun")
_RESULT = "result.json"
_POLL_S = 2.0
_LAST_LOOKS = 5
_STOPPED = (-1, 130, 143, 255)
"""Exit codes of an interrupted command, for which no result is written."""


@dataclass(frozen=True)
class JobRequest:
    """The options of a command that concern its job."""

    nodes: int | None
    cluster: Path | None
    show: bool
    wait: bool
    job: str | None
    as_json: bool


def check_request(launcher: str, request: JobRequest, ranks_per_node: int | None = None) -> None:
    """Refuse options of jobs without `--launcher slurm`: ignored, `--job 7` would end with 0 and `--nodes 2` would run on one node.

    Raises:
        PlaybookError: there is no such launcher, or an option does not go with it.
    """
    if launcher not in _LAUNCHERS:
        raise PlaybookError(f"--launcher is '{launcher}'; expected one of {', '.join(_LAUNCHERS)}")
    of_job: dict[str, object] = {"--nodes": request.nodes, "--print": request.show, "--no-wait": not request.wait, "--job": request.job}
    of_both: dict[str, object] = {"--cluster": request.cluster, "--ranks-per-node": ranks_per_node}
    unread = {"slurm": dict[str, object](), "srun": of_job, "local": {**of_job, **of_both}}[launcher]
    named = [option for option, value in unread.items() if value]
    if named:
        raise PlaybookError(f"{', '.join(named)} has no meaning with --launcher {launcher}; say --launcher slurm, or leave it out")


def inside(name: str, cluster: Path | None) -> SrunLauncher | None:
    """The launcher for the allocation that this process runs in; None for local runs.

    Raises:
        PlaybookError: there is no allocation, or the cluster's file is invalid.
    """
    return slurm.launcher(_load_cluster(cluster), detect.detect().gpus) if name == "srun" else None


def confirm(
    targets: Sequence[str], options: Mapping[str, object], results: Path | None, request: JobRequest, journal: Path | None = None
) -> int:
    """Submit `playbook confirm` with these targets and options, by their flags, as one job: all runs of all its series share the
    allocation. Returns the exit code.

    Without a journal of the caller's the job keeps one in its own folder, which no other job finds.
    """
    cluster = _load_cluster(request.cluster)
    if cluster.container is not None:
        raise ConfigError(
            "a container holds ranks of `playbook train` alone: a verdict's record lists the versions of the environment that the harness "
            "itself runs in; name a venv that all nodes see instead"
        )
    folder = (results or default_results()).resolve()
    if request.job is not None:
        return _follow(request.job, folder_of(request.job, folder, "name that folder with --results"), request)
    given = [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
    whole = ["confirm", *targets, *given, "--results", str(folder), "--launcher", "srun", "--json"]
    journal_option = ["--journal", str(journal.resolve())] if journal else []
    return _submit(
        "confirm", [*whole, *journal_option], folder, cluster, environment(cluster), request, [] if journal_option else ["--journal"]
    )


def train(config: Path, overrides: Sequence[str], name: str, ranks_per_node: int | None, request: JobRequest) -> int:
    """Submit a training run as one job, or run it as a step of this job's allocation. Returns the exit code."""
    cluster = _load_cluster(request.cluster)
    if ranks_per_node is not None:
        cluster = cluster.model_copy(update={"ranks_per_node": ranks_per_node})
    if request.job is not None:
        return _follow(
            request.job,
            folder_of(request.job, default_results().resolve(), "wait for it in the folder that it was submitted from"),
            request,
        )
    resolved = load(config, parse_overrides(overrides))
    if name == "srun":
        return _train_here(resolved, cluster)
    per_node = cluster.per_node
    if per_node is None:
        raise ConfigError("how many ranks a node takes is not known; say --ranks-per-node, or gpus_per_node in the cluster's file")
    checks.check(resolved, per_node * (request.nodes or cluster.nodes), check_packages=False)
    if resolved.checkpoint.dir is None:
        complain("note: checkpoint.dir is not set, so a job that is preempted or reaches its time limit starts over")
    frozen = json.dumps(dump(resolved), indent=1) + "\n"
    folder = default_results().resolve()
    return _submit(
        "train", ["train", "--launcher", "srun"], folder, cluster, environment(cluster, resolved), request, ["config.yaml"], frozen
    )


def _train_here(config: TrainerConfig, cluster: Cluster) -> int:
    """Run all ranks of the allocation as one step of srun; every start has its own folder of logs."""
    step = replace(slurm.launcher(cluster, detect.detect().gpus), end_together=False, drain_s=_SAVING_S)
    per_node = step.per_node(len(step.allocation.hosts))
    ranks = per_node * len(step.allocation.hosts)
    output = Path(config.output).resolve()
    folder = local.new_folder(output / "launches", step.allocation.job)
    forever = float("inf")
    say(f"{ranks} ranks on {', '.join(step.allocation.hosts)}; logs in {folder}")
    result = step.run(
        local.Spec(config, ranks, folder, timeout_s=forever, stall_s=forever, threads=max(1, detect.cores() // per_node), output=output)
    )
    if result.outcome == "ok":
        return 0
    complain(f"{result.outcome}: {result.message}")
    return max(result.returncode or 1, 1)  # the rank's own code, as docs/trainer-files.md lists them


# --- the job ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """The job as submitit runs it on the first node: a command line whose JSON output is kept beside the log."""

    words: list[str]
    folder: str

    def __call__(self) -> int:
        """Run the command and write its result; an interrupted command writes none."""

        def app(words: list[str], **how: Any) -> Any:
            try:
                return root.app(words, **how)
            except library().core.utils.UncompletedJobError as e:  # raised by its handler of the signal before the time limit
                goes_on = (
                    f"with --journal {words[words.index('--journal') + 1]}"
                    if "--journal" in words
                    else "from checkpoint.dir, if that is set"
                )
                raise SystemExit(f"error: the job is given up ({e}); the same command goes on {goes_on}") from e

        answer = io.StringIO()
        with contextlib.redirect_stdout(answer):
            code = root.run_command(app, self.words)
        if code in _STOPPED:
            raise SystemExit(code)
        lines = [line for line in answer.getvalue().splitlines() if line.startswith("{")]
        document = json.loads(lines[-1]) if lines else {}
        result = {"schema": "job/1", "job": os.environ["SLURM_JOB_ID"], "folder": self.folder, "exit_code": code, **document}
        store.replace(Path(self.folder) / _RESULT, json.dumps(result) + "\n")
        return code

    def checkpoint(self) -> Any:
        """Called before the time limit: let training save a checkpoint, then queue the same command again.

        `confirm` continues from its journal.
        """
        if self.words[0] == "train":
            _let_the_steps_save(os.environ["SLURM_JOB_ID"])
        return library().helpers.DelayedSubmission(self)


def _submit(
    name: str,
    words: Sequence[str],
    results: Path,
    cluster: Cluster,
    variables: Mapping[str, str],
    request: JobRequest,
    job_files: Sequence[str],
    config: str | None = None,
) -> int:
    """Write the folder of the job, submit it with sbatch, and wait."""
    library()  # a missing package is told before anything is written
    check_folder(results)
    nodes, folder = request.nodes or cluster.nodes, results / "jobs" / "NAME"
    job, parameters = _job(name, words, folder, cluster, nodes, variables, job_files)
    if request.show:
        say(script(cluster, folder, parameters))
        return 0
    require_tools("sbatch", "srun", "squeue")
    folder = local.new_folder(results / "jobs", name)
    job, parameters = _job(name, words, folder, cluster, nodes, variables, job_files)
    number = submit(job, folder, cluster, parameters, config)
    complain(f"job {number} submitted; its script, log and result are in {folder}")
    if not request.wait:
        if request.as_json:
            print_json({"schema": "job/1", "job": number, "folder": str(folder)})
        return 0
    return _follow(number, folder, request)


def _job(
    name: str, words: Sequence[str], folder: Path, cluster: Cluster, nodes: int, variables: Mapping[str, str], job_files: Sequence[str]
) -> tuple[Job, dict[str, Any]]:
    """The job, with the paths of its folder filled in, and its parameters for submitit."""
    paths = {"--journal": ["--journal", str(folder / "journal")], "config.yaml": [str(folder / "config.yaml")]}
    whole = [*words, "--cluster", str(folder / "cluster.yaml"), *(word for o in job_files for word in paths[o])]
    shown = shlex.join(["playbook", *whole])
    return Job(whole, str(folder)), slurm.parameters(cluster, nodes, name, {"SUBMITIT_LOG_LEVEL": "WARNING", **variables}, shown)


def _follow(job: str, folder: Path, request: JobRequest) -> int:
    """Print the log of the job until it has a result. Ctrl-C stops printing, not the job."""
    log, result = folder / f"{job}_0_log.out", folder / _RESULT
    out = sys.stderr if request.as_json else sys.stdout
    shown, state, gone = 0, "", 0
    if not result.exists():
        require_tools("squeue")
    try:
        while not result.exists():
            shown = _echo(log, shown, out)
            now = state_of(job)
            gone = gone + 1 if now == "" else 0
            if gone > _LAST_LOOKS:
                complain(f"job {job} ended without a result{end_of(job)}; its log is {log}")
                return ExitCode.FAILED
            if now and now != state:
                complain(f"job {job} is {now}")
            state = now or state
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        complain(f"job {job} goes on; wait for it again with --job {job}, or end it with scancel {job}")
        return 130
    _echo(log, shown, out)
    answer = json.loads(result.read_text(encoding="utf-8"))
    if request.as_json:
        print_json(answer)
    return int(answer["exit_code"])


def _echo(log: Path, shown: int, out: TextIO) -> int:
    """Print the new part of the log; returns how many bytes of it have been shown."""
    try:
        with log.open("rb") as f:
            f.seek(shown)
            new = f.read()
    except OSError:
        return shown
    whole = new[: new.rfind(b"\n") + 1]
    out.write(whole.decode("utf-8", "replace"))
    out.flush()
    return shown + len(whole)


# Jobs of Slurm: the cluster's file, the allocation of a job, its script, and what the queue says of it.

_SAVING_S = 90
"""How long ranks may take to save a checkpoint before the time limit."""


def _load_cluster(path: Path | None) -> Cluster:
    """The cluster's file, or the defaults where there is none.

    Raises:
        FileError: it is invalid.
    """
    if path is None and not Path("cluster.yaml").is_file():
        return Cluster()
    return yaml_files.load(path or Path("cluster.yaml"), Cluster)[0]


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
        executor = submitit.SlurmExecutor(folder, max_num_timeout=cluster.timeouts, python=f"exec {shlex.quote(slurm.python(cluster))}")
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
    command = f"exec {shlex.quote(slurm.python(cluster))} -u -m submitit.core._submit {shlex.quote(str(folder))}"
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
    scripts = sorted(results.glob(f"jobs/*/{job}_submission.sh")) if job.isdigit() else []
    if not scripts:
        raise PlaybookError(f"job '{job}' was not submitted with the results folder {results}; {advice}")
    return scripts[-1].parent


def _let_the_steps_save(job: str) -> None:
    """Send SIGTERM to the ranks of all steps and wait until they have ended."""
    command = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"]
    deadline = time.monotonic() + _SAVING_S
    signalled: set[str] = set()
    while time.monotonic() < deadline:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        steps = {step for step in listed if step.rpartition(".")[2].isdigit()}
        if not steps:
            return
        for step in steps - signalled:
            subprocess.run(["scancel", "--signal=TERM", step], capture_output=True, check=False)
        signalled |= steps
        time.sleep(1)


def end_of(job: str) -> str:
    """The final state of a job that has left the queue, such as NODE_FAIL; an empty string if Slurm has forgotten it."""
    try:
        done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    match = re.search(r"\bJobState=(\w+)", done.stdout)
    if match is None:
        return ""
    return " (NODE_FAIL: one of its nodes went away)" if match[1] == "NODE_FAIL" else f" ({match[1]})"


def state_of(job: str) -> str | None:
    """The state of the job in the queue, such as `pending (Resources)`; an empty string after it has left, None if squeue fails."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %R"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    state, _, reason = done.stdout.strip().partition(" ")
    if done.returncode:
        return "" if "Invalid job id" in done.stderr else None
    return f"{state.lower()} {'on ' if reason[:1] not in ('', '(') else ''}{reason}".strip()
