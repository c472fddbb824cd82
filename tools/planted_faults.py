"""Faults that the fast tests must find: each is put into a copy of this tree, and the tests of its place are run there.

    python tools/planted_faults.py                 # every fault, against the tests of its place, then against all fast tests
    python tools/planted_faults.py --only gate     # those whose file or reason has this word
    python tools/planted_faults.py --check         # only whether every text is still found exactly once

Says `found` or `NOT FOUND` for each, and how many were found; the exit code is 1 where fewer than 45 of 50 were, 2 where a text is gone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from playbook.paths import sources

ROOT = Path(__file__).resolve().parents[1]
LEAST = 45 / 50
"""The share that the fast tests must find."""


class Fault(NamedTuple):
    """One line that is wrong."""

    file: str
    text: str
    """Stands once in the file."""
    wrong: str
    why: str
    """What a user would get."""
    tests: tuple[str, ...]
    """Where it should be found first, below tests/."""


JUDGE, RUN, LAUNCH, TRACE = (
    "bench/playbook_bench/judge/",
    "bench/playbook_bench/run/",
    "bench/playbook_bench/launch/",
    "bench/playbook_bench/trace/",
)
PLANNER, CARDS, TRAINER = "playbook/planner/", "playbook/cards/", "trainer/playbook_trainer/"
VERDICTS = ("bench/judge/test_verdict.py", "bench/judge/test_carry_over.py", "bench/judge/test_verdict_edges.py")
STATISTICS = ("bench/judge/test_stats.py",)

FAULTS = (
    # Verdicts and their statistics.
    Fault(
        JUDGE + "effects.py",
        "least <= low and high <= most",
        "least <= high and high <= most",
        "noise confirms a claim",
        VERDICTS,
    ),
    Fault(
        JUDGE + "effects.py",
        "all(least <= low and high <= most",
        "all(least <= low or high <= most",
        "unequal counts as equal",
        VERDICTS,
    ),
    Fault(JUDGE + "verdict.py", "if curve.look is None or n < 2:", "if n < 2:", "a series is judged after any pair", VERDICTS),
    Fault(JUDGE + "verdict.py", "        if quiet and not quiet.ok:", "        if False:", "a noisy machine gives verdicts", VERDICTS),
    Fault(JUDGE + "verdict.py", "        elif not steady.ok:", "        elif False:", "a drifting series gives verdicts", VERDICTS),
    Fault(JUDGE + "verdict.py", "    if other is not None:", "    if False:", "a crash counts as out of memory", VERDICTS),
    Fault(
        JUDGE + "statistics.py",
        "rate = alpha * (look / looks[-1]) ** SPENDING - spent",
        "rate = alpha",
        "each look spends the whole error rate",
        STATISTICS,
    ),
    Fault(
        JUDGE + "design.py",
        "after = code[[variants if",
        "after = 0 * code[[variants if",
        "what a launch leaves behind counts as an effect",
        VERDICTS,
    ),
    Fault(
        JUDGE + "statistics.py",
        "return _ppf(1 - alpha / 2, freedom)",
        "return _ppf(1 - alpha, freedom)",
        "intervals of half the error rate",
        STATISTICS,
    ),
    Fault(
        JUDGE + "statistics.py",
        "return most if off[most] > t_q",
        "return None if off[most] > t_q",
        "an odd launch of the noise stays",
        STATISTICS,
    ),
    Fault(
        JUDGE + "design.py",
        "variant_variance = residual_sums_of_squares / variant_dof",
        "variant_variance = 0 * residual_sums_of_squares + (residual_sums_of_squares / variant_dof).min(axis=-1, keepdims=True)",
        "a noisier candidate is held to the noise of the baseline",
        STATISTICS,
    ),
    # Receipts.
    Fault(
        JUDGE + "receipt.py",
        "return check if run.observed is not None else",
        "return check if True else",
        "absence is proven by no receipt",
        ("trainer/observe/test_receipt.py", *VERDICTS),
    ),
    Fault(
        JUDGE + "receipt.py",
        "if c.op == rule.collective\n",
        "if True\n",
        "any collective proves any feature",
        ("trainer/observe/test_receipt.py", *VERDICTS),
    ),
    Fault(
        JUDGE + "receipt.py",
        "rule.group is None or rule.group == c.group",
        "True",
        "a collective of another group proves it",
        ("trainer/observe/test_receipt.py", *VERDICTS),
    ),
    # Guards.
    Fault(
        JUDGE + "guards.py", "equal = worst <= WORK_TOLERANCE", "equal = True", "less work counts as speed", ("bench/judge/test_guards.py",)
    ),
    Fault(
        JUDGE + "guards.py",
        "ok = len(shas) == 1 and None not in shas",
        "ok = True",
        "other data counts as the same",
        ("bench/judge/test_guards.py",),
    ),
    Fault(JUDGE + "guards.py", "ok=worst <= band", "ok=True", "a broken loss counts as fast", ("bench/judge/test_guards.py",)),
    Fault(
        JUDGE + "guards.py",
        'ok=not keys, detail=f"undeclared',
        'ok=True, detail=f"undeclared',
        "variants may differ in anything",
        ("bench/judge/test_guards.py",),
    ),
    Fault(
        JUDGE + "guards.py",
        "statistics.contaminated(fresh, deviation, len(stored)) if fresh",
        "False if fresh",
        "stored noise is never checked",
        ("bench/judge/test_guards.py", *VERDICTS),
    ),
    # The regression gate.
    Fault(
        JUDGE + "slowdown.py",
        "    if low > limit:",
        "    if False:",
        "a slower commit is never a regression",
        ("bench/judge", "whole/test_gate.py"),
    ),
    Fault(
        JUDGE + "slowdown.py",
        "return loss > allowed * abs(baseline)",
        "return loss > 2 + allowed * abs(baseline)",
        "an exact metric may get worse",
        ("bench/judge", "whole/test_gate.py"),
    ),
    # Records.
    Fault("playbook/files.py", "os.link(temporary, path)", "temporary.rename(path)", "a record is replaced", ("bench/run/test_store.py",)),
    Fault(
        RUN + "store.py",
        "[] if sha == evidence.sha256 else",
        "[] if sha else",
        "an altered record counts",
        ("bench/run/test_store.py", "records", "whole/test_replay.py"),
    ),
    Fault(
        RUN + "replay.py",
        "return [] if a == b else",
        "return [] if True else",
        "any figures replay",
        ("bench/run/test_store.py", "whole/test_replay.py"),
    ),
    Fault("playbook/records/consistency.py", "if plan.looks != looks:", "if False:", "a record chooses its own looks", ("records",)),
    Fault(
        "playbook/records/machine.py",
        "if _minor(was) != _minor(reader.packages[name])",
        "if was is None",
        "verdicts outlive their libraries",
        ("records/test_staleness.py",),
    ),
    Fault(JUDGE + "design.py", "slow = (at - at.mean())[:, None]", "slow = 0 * at[:, None]", "a drift counts as an effect", STATISTICS),
    # Traces.
    Fault(
        TRACE + "table.py",
        "_PRIORITY[ops[i].kind], ops[i].start",
        "0, ops[i].start",
        "hidden communication counts as exposed",
        ("bench/trace/test_table.py",),
    ),
    Fault(
        TRACE + "table.py",
        'Place("recompute", tower + inside)',
        'Place("backward", tower + inside)',
        "recompute counts as backward",
        ("bench/trace/test_table.py",),
    ),
    Fault(
        TRACE + "walls.py",
        "return (begins[0], begins[-1]), len(begins) - 1",
        "return (begins[0], begins[-1]), len(begins)",
        "steps are shorter than they are",
        ("bench/trace/test_walls.py",),
    ),
    Fault(
        TRACE + "ranks.py",
        "sum(map(min, zip(*runs, strict=True)))",
        "sum(map(max, zip(*runs, strict=True)))",
        "the rank that all wait for is another",
        ("bench/trace/test_ranks.py",),
    ),
    Fault(
        TRACE + "dumps.py",
        "if last[rank] < sequence",
        "if last[rank] > sequence",
        "a hang is laid to a rank that waits",
        ("bench/trace/test_flight.py",),
    ),
    Fault(TRACE + "dumps.py", "if i > most_at:", "if i >= most_at:", "the peak misses what makes it", ("bench/trace/test_snapshot.py",)),
    # The planner.
    Fault(
        PLANNER + "layout.py", "pp * lcm(tp * cp, ep * etp)", "pp * max(tp * cp, ep * etp)", "too few GPUs are called enough", ("planner",)
    ),
    Fault(PLANNER + "rules.py", "c.vpp > 1 and c.microbatches % c.pp > 0", "False", "a batch that the schedule cannot cut", ("planner",)),
    Fault(
        PLANNER + "rules.py",
        "c.tp > 1 and c.experts > 0 and c.o.sp is False",
        "False",
        "TP with experts and no SP is accepted",
        ("planner",),
    ),
    Fault(PLANNER + "layout.py", 'bool(c.graphed) and "full" in c.again', "False", "graphs with full recompute are accepted", ("planner",)),
    Fault(
        PLANNER + "memory.py",
        "+ 2 * plan.moment_bytes) * each(trained, over)",
        "+ plan.moment_bytes) * each(trained, over)",
        "one moment is forgotten",
        ("planner/test_memory.py",),
    ),
    Fault(
        PLANNER + "pipeline.py",
        "min(microbatches, pp - stage + (",
        "min(microbatches, pp + (",
        "every stage holds what the first does",
        ("planner",),
    ),
    Fault(
        PLANNER + "flops.py",
        "shape.top_k * shape.expert_ffn",
        "shape.experts * shape.expert_ffn",
        "experts that do not run count in MFU",
        ("planner", "trainer/observe/test_ledger.py"),
    ),
    Fault(
        PLANNER + "flops.py",
        "return seq_len / 2\n",
        "return seq_len\n",
        "causal attention counts twice in MFU",
        ("planner", "trainer/observe/test_ledger.py"),
    ),
    # Cards, search, lint, MCP.
    Fault(
        CARDS + "load.py",
        "elif claim not in claims:",
        "elif False:",
        "advice rests on claims that do not exist",
        ("cards/test_findings.py",),
    ),
    Fault(
        CARDS + "scope.py",
        "set(_words(part)) <= have",
        "set(_words(part)) & have",
        "a claim for GB200 NVL72 applies elsewhere",
        ("cards/test_scope.py", "lint"),
    ),
    Fault(
        CARDS + "search.py",
        "    if any(h.applies for h in hits):\n",
        "    if hits:\n",
        "cards for other machines answer",
        ("cards/test_retrieval.py", "mcp"),
    ),
    Fault(
        "playbook/lint/figures.py",
        "if max(low_a, low_b) > min(high_a, high_b):",
        "if False:",
        "two peaks of one chip stand side by side",
        ("lint",),
    ),
    Fault(
        "app/playbook_app/mcp/server.py", "if properties is not None and unknown:", "if False:", "a misspelt degree counts as 1", ("mcp",)
    ),
    # The trainer.
    Fault(
        TRAINER + "data/packing.py",
        "if length(each) <= room)",
        "if length(each) <= room + 1)",
        "rows are a token too long",
        ("trainer/data/test_plan.py",),
    ),
    Fault(
        TRAINER + "data/packing.py",
        "self._next = places[0]",
        "self._next = (0, 0, 0)",
        "a resumed run reads other rows",
        ("trainer/data/test_loader.py", "trainer/data/test_plan.py"),
    ),
    Fault(
        TRAINER + "data/collate.py",
        "labels[start - 1 : -1] = document.tokens[start:]",
        "labels[start:] = document.tokens[start:]",
        "a token predicts itself",
        ("trainer/data", "trainer/torch/test_data_loss.py"),
    ),
    Fault(
        TRAINER + "torch/optimizer.py",
        "config.lr * (step_index + 1) / config.warmup_steps",
        "config.lr * step_index / config.warmup_steps",
        "the first step trains nothing",
        ("trainer/torch/test_learning_rate.py",),
    ),
    Fault(
        TRAINER + "torch/parallel/dispatch.py",
        "route.inverse_R = _invert(route.order_R)",
        "route.inverse_R = route.order_R",
        "tokens get the outputs of others",
        ("trainer/torch/test_switched_runs.py", "trainer/torch/parallel"),
    ),
    Fault(
        TRAINER + "checkpoint_files.py",
        'return "" if volume == math.prod(self.shape)',
        'return "" if volume',
        "a checkpoint with holes is read",
        ("trainer/test_checkpoint_files.py", "trainer/torch/test_checkpoint.py"),
    ),
    Fault(
        TRAINER + "config/checks.py",
        "if model.num_kv_heads % par.tp:",
        "if False:",
        "a layout that cannot run is started",
        ("trainer/config/test_illegal_layouts.py",),
    ),
    Fault(
        TRAINER + "observe/totals.py",
        '"attention": 1 + 2 * flows',
        '"attention": 1 + flows',
        "backward attention is forgotten in MFU",
        ("trainer/observe/test_ledger.py",),
    ),
)


def copied(target: Path) -> None:
    """The tree as it is now, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def is_found(tree: Path, fault: Fault, everywhere: bool) -> bool:
    """Whether a test fails with it."""
    path = tree / fault.file
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace(fault.text, fault.wrong), encoding="utf-8")
    try:
        return fails(tree, [f"tests/{t}" for t in fault.tests]) or (everywhere and fails(tree, ["-n", "auto", "--dist", "loadscope"]))
    finally:
        path.write_text(right, encoding="utf-8")


def fails(tree: Path, words: list[str]) -> bool:
    """Whether one of the fast tests fails.

    Raises:
        SystemExit: no test ran.
    """
    paths = os.pathsep.join(sources(tree))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 2):  # 2: a module that a test imports is broken
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return done.returncode != 0


def main() -> int:
    """Plant each fault in a copy of the tree, and print whether a test fails with it; 1 where too few are noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--near", action="store_true", help="ask only the tests of a fault's place")
    arguments = parser.parse_args()
    gone = [
        f"{f.file}: {f.text!r} stands {n} times, expected once" for f in FAULTS if (n := (ROOT / f.file).read_text().count(f.text)) != 1
    ]
    if gone:
        print("\n".join(gone), file=sys.stderr)
        return 2
    faults = [f for f in FAULTS if arguments.only in f.file or arguments.only in f.why]
    if arguments.check:
        print(f"{len(FAULTS)} faults, each in its place")
        return 0
    noticed = 0
    with tempfile.TemporaryDirectory(prefix="playbook-faults-") as folder:
        copied(Path(folder))
        for fault in faults:
            began = time.monotonic()
            is_ = is_found(Path(folder), fault, not arguments.near)
            noticed += is_
            print(f"{'found' if is_ else 'NOT FOUND':9} {time.monotonic() - began:4.0f} s  {fault.file}: {fault.why}", flush=True)
    print(f"{noticed} of {len(faults)} found")
    return 0 if noticed >= LEAST * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
