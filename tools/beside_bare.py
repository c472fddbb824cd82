"""The megatron backend beside megatron-core by itself: the same configuration in turns on the same GPUs, into
docs/parity/megatron-bare.jsonl.

    python tools/beside_bare.py --pairs 4 --budget 500                          # all settings
    python tools/beside_bare.py --only all-to-all --pairs 4 parallel.ep=2 model.num_layers=16   # on two GPUs

Words of the form key.path=value go to both sides. Which side is first changes from pair to pair; all ranks are forks of one process. Both
count all seconds between the first timed step and the last, on all ranks. Pairs that the file holds are not run again, unless `--again`
says so.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer"), str(Path(__file__).parent)]

import bare_megatron  # noqa: E402
from megatron_rows import ONE_KERNEL  # noqa: E402
from megatron_table import LEFT_OUT, launch, leave, measured, versions  # noqa: E402

from playbook.records.case import Rule  # noqa: E402
from playbook_bench.machine import detect  # noqa: E402
from playbook_trainer import fork_server  # noqa: E402

CONFIG = "trainer/configs/qwen3_30b_a3b_24l_megatron.yaml"
FILE = "megatron-bare.jsonl"
SIDES = ("bare", "ours")

_RECOMPUTE = ("train.recompute=selective", "train.recompute_modules=[layernorm,moe_act]")
_EXCHANGES = Rule(collective="all_to_all", group="ep", count="4 * moe_layers * microbatches", op=">=")


@dataclass(frozen=True)
class Setting:
    """What both sides are told, and what the receipt of ours must show of it."""

    words: tuple[str, ...]
    proof: tuple[Rule, ...]
    rows: int = 4
    """Of a micro-batch on each GPU; a step has one."""


SETTINGS = {
    "all-to-all": Setting(("moe.dispatcher=alltoall",), (_EXCHANGES,)),
    "all-gather": Setting(
        ("moe.dispatcher=allgather",),
        (Rule(collective="reduce_scatter", group="etp_ep", count="moe_layers * microbatches", op=">="),),
    ),
    "all-to-all, one kernel for all experts": Setting(
        ("moe.dispatcher=alltoall", "megatron.grouped_gemm=cutlass"), (_EXCHANGES, ONE_KERNEL)
    ),
    "all-to-all, micro-batch 6, norms and expert activations recomputed": Setting(
        ("moe.dispatcher=alltoall", *_RECOMPUTE), (_EXCHANGES,), rows=6
    ),
}


def words(setting: Setting, more: Sequence[str], gpus: int) -> list[str]:
    """The arguments of both sides."""
    batch = [f"train.micro_batch_size={setting.rows}", f"train.global_batch_size={setting.rows * gpus}"]
    return [str(ROOT / CONFIG), f"parallel.ep={gpus}", *batch, "train.receipt=false", *setting.words, *more]


def run(side: str, arguments: list[str], gpus: Sequence[str], proof: Sequence[Rule], limit_s: float) -> dict[str, Any]:
    """One launch of one side; its figures, or why it has none."""
    if side == "ours":
        return launch(arguments, gpus, limit_s, lambda folder: measured(folder, len(gpus), proof))

    def figures(folder: Path) -> dict[str, Any]:
        return {**json.loads((folder / bare_megatron.RESULT).read_text()), "versions": versions()}

    return launch(arguments, gpus, limit_s, figures, bare_megatron.main)


def pairs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Tokens per second and GPU of bare megatron-core and of this trainer, for each pair of one setting of which both have come to their
    end."""
    speeds = {(r["side"], r["pair"]): float(r["tokens_per_s_per_gpu"]) for r in rows if r["outcome"] == "ok"}
    return [
        (speed, speeds[("ours", pair)]) for (side, pair), speed in sorted(speeds.items()) if side == "bare" and ("ours", pair) in speeds
    ]


def ratio(speeds: Sequence[tuple[float, float]]) -> tuple[float, float | None, float | None]:
    """How many times faster the second of each pair is: the geometric mean, and the paired t interval of 95 % where there are two pairs or
    more."""
    logs = [math.log(ours / bare) for bare, ours in speeds]
    mean, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return math.exp(mean), None, None
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(logs) / math.sqrt(n)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def summary(speeds: Sequence[tuple[float, float]]) -> str:
    """The ratio of both sides, with its interval."""
    mean, low, high = ratio(speeds)
    return f"{mean:.3f} (one pair)" if low is None else f"{mean:.3f} [{low:.3f}, {high:.3f}], {len(speeds)} pairs"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("words", nargs="*", help="key.path=value for both sides")
    parser.add_argument(
        "--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING", help=f"of: {'; '.join(SETTINGS)}"
    )
    parser.add_argument("--pairs", type=int, default=4, help="of each setting")
    parser.add_argument("--budget", type=float, default=500, help="seconds after which nothing is started")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a launch may take")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "parity", help="folder of the file")
    parser.add_argument("--again", action="store_true", help="run pairs that the file already holds")
    arguments = parser.parse_intermixed_args(argv)
    began, path = time.monotonic(), arguments.out / FILE
    gpus = detect.device_ids(detect.detect())
    if not gpus or not fork_server.import_all("megatron"):
        print("needs GPUs that no import has touched yet", file=sys.stderr)
        return 2
    print(f"{len(gpus)} GPUs, imports {time.monotonic() - began:.0f} s", flush=True)
    return 0 if compare(arguments, gpus, began, path) else LEFT_OUT


def compare(arguments: argparse.Namespace, gpus: Sequence[str], began: float, path: Path) -> bool:
    """Every pair of every setting for which there is time, written down launch by launch; whether there was time for all."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    about = {"gpus": len(gpus), "words": arguments.words}

    def alike(row: Mapping[str, Any]) -> bool:
        return {k: row[k] for k in about} == about

    for setting in arguments.only:
        for pair in range(arguments.pairs):
            held = [r for r in rows if alike(r) and (r["setting"], r["pair"]) == (setting, pair)]
            if sum(r["outcome"] == "ok" for r in held) == len(SIDES) and not arguments.again:
                continue
            rows = [r for r in rows if r not in held]
            for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
                if time.monotonic() - began > arguments.budget:
                    print("the budget leaves out the rest", flush=True)
                    return False
                proof = SETTINGS[setting].proof if side == "ours" and pair == 0 else ()
                asked = [*words(SETTINGS[setting], arguments.words, len(gpus)), *(["train.receipt=true"] if proof else [])]
                found = {"setting": setting, "side": side, "pair": pair, **about, **run(side, asked, gpus, proof, arguments.limit)}
                rows = sorted([*rows, found], key=lambda r: (r["gpus"], r["words"], list(SETTINGS).index(r["setting"]), r["pair"]))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
                figures = f"{found['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" if found["outcome"] == "ok" else found["message"]
                shown = "".join(f"  {p['rule']}: {p['observed']}{'' if p['ok'] else ' NOT SHOWN'}" for p in found.get("proof", []))
                print(f"{setting}  pair {pair}  {side}  {figures}{shown}  [{found['wall_s']} s]", flush=True)
        if now := pairs([r for r in rows if alike(r) and r["setting"] == setting]):
            print(f"{setting}: ours / bare {summary(now)}", flush=True)
    return True


if __name__ == "__main__":
    leave(main())
