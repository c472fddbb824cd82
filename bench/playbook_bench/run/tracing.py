"""Where the time of a step goes: traced launches of both variants of a case, and the table of time per range.

A traced launch is never timed and a timed launch is never traced; both have the same configuration hash. Nsight Systems observes
rank 0 where it is installed and the run uses a GPU; elsewhere torch.profiler (Kineto) does. The table names the one that did.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError, PlaybookError
from playbook.paths import default_results
from playbook.records.case import LAUNCHED_KINDS, Case, load_case
from playbook.records.evidence import Evidence, Variant, digest
from playbook.records.machine import mapping_of
from playbook.records.trace import Collector, ReportFile, TraceResult, TraceTable, VariantTrace
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.launch.local import Launcher, LocalLauncher, Spec, interruptible, new_folder
from playbook_bench.launch.outcome import read_summary
from playbook_bench.launch.slurm import SrunLauncher
from playbook_bench.machine import detect, requirements
from playbook_bench.run import store
from playbook_bench.run.options import Options
from playbook_bench.run.series import threads_per_rank
from playbook_bench.trace import ranks, reports
from playbook_bench.trace.dumps import Hang, Snapshot, hang, is_snapshot, read_snapshot
from playbook_bench.trace.table import STEP, build
from playbook_bench.trace.walls import Difference, Walls, difference, walls
from playbook_bench.variants.resolve import Resolved, configurations
from playbook_trainer.config.tree import ProfileConfig

FOLDER = "traces"
_LONGER = 1.5
"""How much longer a traced launch may take than a timed one, its table included."""
NSYS = ("nsys", "profile", "-s", "none", "--cpuctxsw=none", "-t", "cuda,nvtx", "-c", "cudaProfilerApi", "--capture-range-end=stop")


def run(
    case_id: str,
    *,
    profile: str | None = None,
    results: Path | None = None,
    launcher: Launcher | None = None,
    progress: Callable[[str], None] | None = None,
    case: Case | None = None,
) -> TraceResult:
    """Trace every variant of a case, and write the record to `<results>/traces/<case>-<profile>-<id>.json`.

    `launcher` starts the ranks where Kineto observes: forked ones always, for nsys has to start a process itself. `progress` gets one line
    per stage. A launch that fails is an outcome in the record.

    Raises:
        ConfigError: the case has nothing to launch, or not on this machine.
        FileError: there is no such case, or its file is invalid.
        StoreError: the record cannot be written.
    """
    case = case or load_case(case_id)
    if case.kind not in LAUNCHED_KINDS:
        raise ConfigError(f"case '{case.id}' is of kind '{case.kind}' and launches nothing; there is nothing to trace")
    whole_machine = detect.detect()
    chosen = requirements.require_profile(case, whole_machine, profile)
    machine = requirements.restrict(whole_machine, chosen)
    launcher = launcher or LocalLauncher()
    forks = isinstance(launcher, ForkLauncher)
    collector: Collector = "nsys" if machine.gpus and not forks and shutil.which("nsys") else "kineto"
    results = results or default_results()
    folder = new_folder(results / FOLDER, f"{case.id}-{chosen}")
    say = progress or (lambda line: None)
    launches: dict[Variant, VariantTrace] = {}
    with interruptible():
        variants = configurations(case, chosen)
        threads = threads_per_rank(machine, [*variants.values()])
        for variant, resolved in variants.items():
            say(f"{variant}: tracing {resolved.config.profile.steps} steps on {resolved.ranks} ranks with {collector}")
            environment = {
                **detect.visible_devices(machine, chosen),
                **resolved.settings(threads, results / "cache"),
                **resolved.environment,
            }
            launches[variant] = _variant(
                case, resolved, environment, threads, _by(launcher, collector, folder / variant), collector, folder
            )
            say(f"{variant}: {_summary(launches[variant])}")
    result = TraceResult(
        trace_id=folder.name.rsplit("-", 1)[1],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        case=case.id,
        profile=chosen,
        machine=machine,
        collector=collector,
        collector_version=_collector_version(collector, launches),
        command=shlex.join(["playbook", "bench", "trace", case_id, "--profile", chosen]),
        variants=launches,
    )
    sealed = result.model_copy(update={"sha256": digest(result.model_dump(mode="json", exclude={"sha256"}))})
    store.write_once(folder.with_suffix(".json"), json.dumps(sealed.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")
    return sealed


def of_file(path: Path) -> tuple[Walls, TraceTable | None] | ranks.Ranks | Hang | Snapshot:
    """The walls of a trace that somebody else made, with the table of its ranges where they are ours; of several ranks, how they compare;
    of the flight recorder's dumps, which rank never came to which collective; of a memory snapshot, what holds the peak.

    Raises:
        PlaybookError: there is no report, or it is damaged.
    """
    summaries, dumps, unread, alone = [], [], [], None
    for name, each in reports.contents(path):
        if isinstance(each, PlaybookError):
            unread.append(each)
        elif isinstance(each, dict) and is_snapshot(each):
            return read_snapshot(each)
        elif isinstance(each, dict):
            dumps.append((name, each))
        else:
            summaries.append(ranks.summary(name, each))
            framed = len(summaries) == 1 and each.ops and any(span.name == STEP for span in each.spans)
            alone = build(each) if framed else None
    notes = [f"not read: {error}" for error in unread]
    if dumps:
        return hang(dumps, [*notes, *([f"{len(summaries)} traces beside the dumps are not part of this answer"] if summaries else [])])
    if not summaries:
        raise unread[0] if unread else PlaybookError(f"{path}: holds no trace; expected a report of nsys or Chrome traces")
    if len(summaries) == 1:
        return replace(summaries[0].walls, notes=(*summaries[0].walls.notes, *notes)), alone
    return ranks.compare(summaries, notes)


def between(before: Path, after: Path) -> Difference:
    """Where the time of a step went between two traces, each of one rank.

    Raises:
        PlaybookError: one of them is no report, or damaged, or of several ranks.
    """
    first, second = (walls(reports.timeline_from_file(path)) for path in (before, after))
    if {first.wall == "no GPU", second.wall == "no GPU"} == {True, False}:
        raise PlaybookError(f"only one of {before} and {after} was traced on a GPU; expected two traces of the same kind")
    return difference(first, second)


def follow_up(case: Case, records: Sequence[Evidence], options: Options, note: Callable[[str], None]) -> TraceResult | None:
    """Trace the variants once more where a timed verdict from GPUs has been reached: what its effect is made of. A trace changes no
    verdict.
    """
    measured = records[0].measured
    if not any(r.timed_on_gpus for r in records) or case.command or isinstance(options.launcher, SrunLauncher):
        return None
    took = {r.variant: r.wall_s for r in measured.runs if r.outcome == "ok"}
    needed = _LONGER * sum(took.values())
    if options.deadline is not None and time.monotonic() + needed > options.deadline:
        note(f"no time is left to trace its variants (about {needed:.0f} s): playbook bench trace {case.id} does")
        return None
    try:
        return run(case.id, profile=measured.profile, results=options.results, launcher=options.launcher, progress=note, case=case)
    except PlaybookError as e:
        note(f"no trace: {e}")
        return None


def _variant(
    case: Case,
    resolved: Resolved,
    environment: Mapping[str, str],
    threads: int,
    launcher: Launcher,
    collector: Collector,
    folder: Path,
) -> VariantTrace:
    """Launch one variant under the collector, and read what it saw. A report that cannot be read is a message, not a traceback."""
    steps = resolved.config.profile.steps
    config = resolved.config.model_copy(
        update={"profile": ProfileConfig(nvtx=collector == "nsys", kineto=collector == "kineto", steps=steps)}
    )
    run_folder = folder / f"{resolved.variant}-run"
    limit = case.budget.launch_timeout_s + (reports.WRITE_S if collector == "nsys" else 60.0)
    spec = Spec(config, resolved.ranks, run_folder, environment, timeout_s=limit, stall_s=limit, threads=threads, shared=resolved.shared)
    launched = launcher.run(spec)
    summary = read_summary(run_folder) or {}
    out = VariantTrace(
        outcome=launched.outcome,
        message=launched.message,
        config_sha=resolved.sha,
        ranks=resolved.ranks,
        versions=_versions(summary),
    )
    if launched.outcome != "ok":
        return out
    try:
        report = _report(run_folder, collector, folder / resolved.variant)
        table = reports.table_from_file(report)
    except (PlaybookError, OSError) as e:
        return out.model_copy(update={"outcome": "crash", "message": f"the run ended well, but its trace is unusable: {e}"})
    shutil.rmtree(run_folder, ignore_errors=True)
    return out.model_copy(update={"table": table, "files": _files(folder, resolved.variant)})


def _by(launcher: Launcher, collector: Collector, report: Path) -> Launcher:
    """What launches a variant under the collector."""
    if collector == "kineto" or not isinstance(launcher, LocalLauncher):
        return launcher
    # The other ranks end at once; rank 0 ends only when its report is written.
    wrap = lambda rank, words: [*NSYS, "-o", str(report), *words] if rank == 0 else words  # noqa: E731
    return LocalLauncher(launcher.command, drain_s=reports.WRITE_S, wrap=wrap)


def _report(run_folder: Path, collector: Collector, target: Path) -> Path:
    """The file to read, at its final place.

    Raises:
        PlaybookError: the collector left none.
    """
    if collector == "kineto":
        source, packed = run_folder / "trace.json", target.with_name(target.name + ".trace.json.gz")
        if not source.is_file():
            raise PlaybookError("the run wrote no trace.json; expected one with profile.kineto")
        with source.open("rb") as plain, gzip.open(packed, "wb", compresslevel=5) as f:
            shutil.copyfileobj(plain, f)
        return packed
    exported, original = target.with_name(target.name + ".sqlite"), target.with_name(target.name + ".nsys-rep")
    if not original.is_file():
        raise PlaybookError(f"nsys left no {original.name}; its output is in {run_folder / 'rank0.log'}")
    return exported if exported.is_file() else reports.exported(original, exported)


def _files(folder: Path, variant: str) -> list[ReportFile]:
    """The collector's files of one variant, with hashes."""
    out = []
    for path in sorted(folder.glob(f"{variant}.*")):
        with path.open("rb") as f:
            sha = hashlib.file_digest(f, "sha256").hexdigest()
        out.append(ReportFile(name=f"{folder.name}/{path.name}", sha256=sha, num_bytes=path.stat().st_size))
    return out


def _versions(summary: Mapping[str, Any]) -> dict[str, str]:
    """Library versions as the run reported them."""
    strict = mapping_of(mapping_of(summary.get("env")).get("strict"))
    return {k: v for k, v in strict.items() if isinstance(v, str)}


def _collector_version(collector: Collector, launches: Mapping[Variant, VariantTrace]) -> str:
    if collector == "kineto":
        return next((f"torch {v.versions['torch']}" for v in launches.values() if "torch" in v.versions), "unknown")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nsys", "--version"], capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
    return "unknown"


def _summary(traced: VariantTrace) -> str:
    if traced.table is None:
        return f"{traced.outcome}: {traced.message[:300]}"
    t = traced.table
    shares = [
        f"{name} {share:.0%}" for name, share in (("forward", t.coverage.forward), ("backward", t.coverage.backward)) if share is not None
    ]
    return f"{t.span_ms:.1f} ms a step, {t.measures} busy {t.busy_ms:.1f} ms, in named parts: {', '.join(shares) or 'none'}"
