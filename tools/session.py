"""Work for an hour of rented GPUs: the tasks that are asked for, as many side by side as there are GPUs, within so many seconds.

    python tools/session.py --list
    python tools/session.py --seconds 580 --out DIR bare graphs megatron table       # in this order of preference

Each task gets GPUs of its own and is told how many seconds are left for it; one for which too few are left is not begun. A task that has
come to its end is not done again by the next call with the same folder; one of claims is, since it knows itself which have a verdict, and
its series go on where time has cut them, as long as the machine stands. Tests of layouts need no GPU for each rank: tasks named
`shared-...` run four ranks in turns on one. What tasks write lies below the folder: logs, records (`results`), rows of tables (`parity`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Task:
    """A command for some GPUs. `{left}` in it are the seconds that it has, `{out}` is the folder of the session, `{name}` its own name."""

    gpus: int
    command: str
    least_s: int
    """With fewer seconds left it is not begun."""
    margin_s: int = 12
    """Of the seconds left, it is told so many fewer: what it begins last has to end, too."""
    settled: frozenset[int] = frozenset({0})
    """Exit codes after which it is not to be done again. Commands that their time has cut end with another, and go on when they are called
    again."""
    nodes: int = 0
    """So many ranks of tests take one GPU in turns, as if each were a node (`tests/support/ranks/nodes.py`)."""
    tells: bool = True
    """Whether its rows belong in tables: those of ranks that share a GPU say nothing of time, and little else that others do not say."""


def claims(names: str, gpus: int, least_s: int) -> Task:
    """Verdicts, one after the other; claims with a fresh one are left out, so that the task can be called until nothing is left."""
    options = "--fork --journal {out}/journal/{name} --results {out}/results --budget {left}s"
    return Task(gpus, f"python -m playbook confirm {names} --untested --profile h200x{gpus} {options}", least_s, settled=frozenset())


PYTEST = "python -m pytest -q -s -p no:cacheprovider -m"


def tests(words: str, gpus: int, least_s: int) -> Task:
    """Tests that need GPUs."""
    marker = "gpu" if gpus == 1 else "multigpu"
    return Task(gpus, f"{PYTEST} {marker} {words}", least_s, settled=frozenset({0, 1}))


def shared(words: str, least_s: int) -> Task:
    """Tests that need four GPUs, or four nodes that one GPU stands for."""
    return Task(1, f"{PYTEST} multigpu {words}", least_s, settled=frozenset({0, 1}), nodes=4, tells=False)


def planned(gpus: int) -> Task:
    """Runs of registered predictions: each layout once, then the two fastest of each model in pairs."""
    words = f"--gpus {gpus} --pairs 4 --budget {{left}} --out {{out}}/parity"
    return Task(gpus, f"python tools/planner/planned_layouts.py run {words}", 180, margin_s=120)


STAGES = "(cp or pp or copies or overlap or recompute or fp8) and not folding and not overlapped"
"""About half of the layouts, those of stages and of contexts among them: all of them take longer than a command may."""

HUNDRED = Task(4, f"{PYTEST} multigpu tests/gpu/test_megatron_vl_gpu.py -k hundred", 260, margin_s=45, settled=frozenset({0, 1}))
"""It stops its runs itself when its time is up, and compares those that there are; what it imports before takes 15 s."""

TASKS: dict[str, Task] = {
    "bare": Task(4, "python tools/beside_bare.py --budget {left} --out {out}/parity", 150, 60),
    "bare2": Task(2, "python tools/beside_bare.py --budget {left} --out {out}/parity model.num_layers=16", 150, 45),
    "graphs": claims("cuda-graphs/V6.u", 1, 200),
    "text": claims("torch-trainer-speed/P1 torch-trainer-speed/P1.p", 4, 300),
    "text48": claims("torch-trainer-speed/P2 torch-trainer-speed/P2.p", 4, 300),
    "text32k": claims("torch-trainer-speed/P3 torch-trainer-speed/P3.p", 4, 300),
    "photographs": claims("torch-trainer-speed/P4 torch-trainer-speed/P4.p", 4, 300),
    "photographs-over-text": claims("torch-trainer-speed/P5 torch-trainer-speed/P6.v", 4, 300),
    "text2": claims("torch-trainer-speed/P1.t torch-trainer-speed/P1.u", 2, 300),
    "text32k2": claims("torch-trainer-speed/P3.t", 2, 90),
    "photographs2": claims("torch-trainer-speed/P4.t", 2, 90),
    "photographs-over-text2": claims("torch-trainer-speed/P5.t", 2, 90),
    # The first launch of four megatron-core ranks on one GPU took 110 s.
    "held": claims(
        "megatron-fsdp-vlm/M1 long-context-cp-sizing/W6 megatron-fsdp-vlm/M1.e offloading/L11.b long-context-cp-sizing/L8.s",
        1,
        240,
    ),
    # Claims that share a case with the one before them cost nothing more; cases of three and four variants come last.
    "torch": claims(
        "packed-fine-tuning/S1 checkpoint-stalls/K1 expert-imbalance/E1 recompute/L4 offloading/W16 loss-and-logits/C3 "
        "moe-optimization-workflow/W21 small-micro-batches/N1.t cuda-graphs/V11.n vlm-real-data/T3 cuda-graphs/V15.s cuda-graphs/V6 "
        "vlm-tuning-knobs/V7 vlm-tuning-knobs/V9",
        1,
        90,
    ),
    # More than an 80 GB card holds.
    "large": claims("long-context-memory/L13", 1, 120),
    "megatron": claims(
        "cuda-graphs/V15.b cuda-graphs/V11.b recompute/L4.c recompute/L3.b recompute/W1.d small-micro-batches/N1 dense-models/D1 "
        "dense-models/D2 "
        "dense-models/D3 fp8-recipes/W20.b recompute/W1.f fp8-recipes/W12.f long-context-memory/L13.b fp8-recipes/W14.b "
        "cuda-graphs/V6.u",
        1,
        120,
    ),
    "predicted": claims(" ".join(f"planner-accuracy/A{number}" for number in range(6, 14)), 1, 90),
    "table": Task(1, "python tools/megatron_table.py one --budget {left} --limit 90 --out {out}/parity", 90, 40),
    "table2": Task(2, "python tools/megatron_table.py one two --budget {left} --limit 90 --out {out}/parity", 90, 40),
    "lengths": Task(4, "python tools/megatron_table.py cp --again --budget {left} --limit 150 --out {out}/parity", 150, 90),
    "planned": planned(4),
    "planned2": planned(2),
    "planned8": planned(8),
    "hundred": HUNDRED,
    "hundred2": replace(HUNDRED, gpus=2, least_s=300),
    "layouts": tests("tests/gpu/test_megatron_gpu.py", 4, 200),
    "layouts2": tests("tests/gpu/test_megatron_gpu.py -k 'not resumed'", 2, 420),
    "resumed2": tests("tests/gpu/test_megatron_gpu.py -k resumed", 2, 250),
    "eight-bit": tests("tests/gpu/test_megatron_gpu.py -k 'weights or 8-bit or fsdp'", 1, 120),
    "sharded2": tests("tests/gpu/test_megatron_gpu.py -k 'fsdp and not resumed'", 2, 170),
    "shared-layouts": shared(f"tests/gpu/test_megatron_gpu.py -k 'not resumed and not fsdp and not ({STAGES})'", 230),
    "shared-stages": shared(f"tests/gpu/test_megatron_gpu.py -k 'not resumed and not fsdp and ({STAGES})'", 290),
    "shared-sharded": shared("tests/gpu/test_megatron_gpu.py -k 'fsdp and not resumed'", 180),
    "shared-resumed": shared("tests/gpu/test_megatron_gpu.py -k resumed", 470),
    "shared-images": shared("tests/gpu/test_megatron_vl_gpu.py -k layout", 320),
    "shared-hundred": replace(HUNDRED, gpus=1, least_s=540, nodes=4),
    "shared-torch": shared("tests/gpu/test_layouts_gpu.py tests/gpu/test_megatron_weights_gpu.py tests/gpu/test_operation_gpu.py", 120),
    "data": tests("tests/gpu/test_data_gpu.py tests/gpu/test_fork_gpu.py", 1, 60),
    "models": tests("tests/gpu/test_build_gpu.py tests/gpu/test_megatron_models_gpu.py", 1, 120),
    "trace": Task(4, "python -m playbook bench trace torch-text-4k-vs-megatron --profile h200x4 --results {out}/results", 130),
}


@dataclass
class Running:
    """A task that has begun."""

    name: str
    gpus: list[str]
    process: subprocess.Popen[bytes]
    began: float
    ends: float


def run(names: Sequence[str], tasks: Mapping[str, Task], gpus: Sequence[str], seconds: float, out: Path) -> dict[str, str]:
    """What became of each task: "done before", "left out", "ended at its limit" or its exit code."""
    began, waiting, running = time.monotonic(), list(names), list[Running]()
    became: dict[str, str] = {}
    for name in names:
        if (out / f"{name}.done").exists():
            became[name] = "done before"
            waiting.remove(name)
    try:
        while waiting or running:
            for job in [j for j in running if j.process.poll() is not None or time.monotonic() > j.ends]:
                running.remove(job)
                became[job.name] = _end(job, tasks[job.name], out)
                _say(began, f"{job.name}: {became[job.name]} after {time.monotonic() - job.began:.0f} s")
            for name in list(waiting):
                task, remaining_s = tasks[name], seconds - (time.monotonic() - began)
                used = {gpu for job in running for gpu in job.gpus}
                free = [gpu for gpu in gpus if gpu not in used]
                if remaining_s < task.least_s or task.gpus > len(gpus):
                    became[name] = "left out"
                    _say(began, f"{name}: left out, needs {task.gpus} GPUs and {task.least_s} s")
                    waiting.remove(name)
                elif task.gpus <= len(free):
                    running.append(_begin(name, task, free[: task.gpus], remaining_s, out))
                    waiting.remove(name)
                    _say(began, f"{name}: begins on {', '.join(running[-1].gpus)}, {remaining_s:.0f} s left")
            time.sleep(0.1)
    finally:
        for job in running:
            _end(job, tasks[job.name], out)
    return became


def _begin(name: str, task: Task, gpus: list[str], remaining_s: float, out: Path) -> Running:
    """Start a task on its GPUs, with `remaining_s` seconds for all; it is told its own budget, less its margin."""
    budget_s = max(0, int(remaining_s) - task.margin_s)
    words = [w.format(left=budget_s, out=out, name=name) for w in shlex.split(task.command)]
    path = os.pathsep.join(
        [*map(str, (ROOT, ROOT / "app", ROOT / "bench", ROOT / "trainer")), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PLAYBOOK_SECONDS": str(budget_s)}
    # Tables say what ranks with GPUs of their own found.
    env |= {"PLAYBOOK_NODES": str(task.nodes)} if task.nodes else {}
    env |= {"PLAYBOOK_PARITY": str(out / "parity")} if task.tells else {}
    words[0] = sys.executable if words[0] == "python" else words[0]
    with (out / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    now = time.monotonic()
    return Running(name, gpus, process, now, now + remaining_s)


def _end(job: Running, task: Task, out: Path) -> str:
    code = job.process.poll()
    with suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()
    if code is None:
        return "ended at its limit"
    if code in task.settled:
        (out / f"{job.name}.done").touch()
    return str(code)


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="; ".join(TASKS))
    parser.add_argument("--seconds", type=float, default=580, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("session"), help="folder of logs and results")
    parser.add_argument("--list", action="store_true", help="print the tasks and end")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.list:
        print("\n".join(f"{name:24} {t.gpus} GPUs, {t.least_s} s  {t.command}" for name, t in TASKS.items()))
        return 0
    if wrong := [name for name in arguments.tasks if name not in TASKS]:
        print(f"no task {', '.join(wrong)}; there are {', '.join(TASKS)}", file=sys.stderr)
        return 2
    out = arguments.out.resolve()
    (out / "parity").mkdir(parents=True, exist_ok=True)
    for table in [path for name in ("megatron-*.jsonl", "vl-*.jsonl") for path in (ROOT / "docs" / "parity").glob(name)]:
        if not (out / "parity" / table.name).exists():
            shutil.copy(table, out / "parity" / table.name)  # rows that are there need not be run again
    became = run(arguments.tasks, TASKS, visible(), arguments.seconds, out)
    for name in became:
        if (log := out / f"{name}.log").is_file():
            print(f"== {name}: {became[name]}", *log.read_text(errors="replace").splitlines()[-12:], sep="\n")
    return 0 if set(became.values()) <= {"0", "done before"} else 1


def visible() -> list[str]:
    """The GPUs that may be used."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return list(dict.fromkeys(i for i in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if i))
    tool = shutil.which("nvidia-smi")
    command = [str(tool), "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split() if tool else []


if __name__ == "__main__":
    sys.exit(main())
