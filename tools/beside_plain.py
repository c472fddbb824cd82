"""What `auto` gives beside the best switches set by hand and beside the plain path: shipped configurations in turns on one GPU.

    python tools/beside_plain.py --out DIR --budget 560                       # all of them, 60 steps each
    python tools/beside_plain.py --out DIR --only text-moe --steps 200 --rounds 4
    python tools/beside_plain.py --out DIR --rehearse                         # tiny models on the CPU

Prints for each launch tokens/s, peak memory, seconds until the first step has ended and, for all three sides of a round, the largest
difference of their losses. A JSON line for each launch goes to DIR/beside-plain.jsonl. Launches that the file holds with an end of their
own (training, refusal, out of memory) are not run again, so the same command goes on where its budget has cut it; then it ends with code 3.
Words of the form key.path=value go to all sides. Which side is first changes from round to round. Ranks are forks of one process that has
imported torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer"), str(Path(__file__).parent)]

from megatron_table import LEFT_OUT, ended, leave, measured, reason, run_forked  # noqa: E402

from playbook.errors import PlaybookError  # noqa: E402
from playbook_bench.machine import detect  # noqa: E402
from playbook_trainer import fork_server  # noqa: E402
from playbook_trainer.config import checks  # noqa: E402
from playbook_trainer.config.tree import TrainerConfig, load, parse_overrides  # noqa: E402

FILE = "beside-plain.jsonl"
SIDES = ("auto", "best", "off")
FINAL = ("ok", "refused", "out of memory")
"""Ends after which a launch is not run again."""


SETTINGS: Mapping[str, Sequence[str]] = {
    "text-moe": ("qwen3_30b_a3b_24l", "model.num_layers=6", "parallel.ep=1"),
    "text-moe-4k": (
        "qwen3_30b_a3b_24l", "model.num_layers=6", "parallel.ep=1", "data.kind=mock", "data.pack=false", "train.micro_batch_size=4", "train.global_batch_size=4"
    ),
    "images-moe-2b": ("qwen3_vl_2b_a300m",),
    "images-moe": ("qwen3_vl_30b_a3b_6l",),
    "text-dense": ("planned", "model=qwen3_1_7b", "data.seq_len=4096", "train.micro_batch_size=4", "train.global_batch_size=4"),
    "tiny-text": ("qwen3_tiny",),
    "tiny-text-moe": ("qwen3_moe_tiny",),
    "tiny-images": ("qwen3_vl_tiny",),
    "tiny-images-moe": ("qwen3_vl_moe_tiny",),
    "recipe-packed": ("recipes/qwen3_vl_30b_a3b_series_2_packed", "model.num_layers=6"),
    "recipe-text": ("recipes/qwen3_vl_30b_a3b_series_4_text", "model.num_layers=6"),
}  # fmt: skip
"""Of each, a shipped configuration, and the words that make it fit one GPU of 140 GiB."""
REHEARSED = ("tiny-text", "tiny-text-moe", "tiny-images", "tiny-images-moe")
LEFT_ASIDE = ("recipe-packed", "recipe-text")
"""Run only where they are named: `images-moe` and `text-moe` in longer rows."""

PLAIN: Mapping[str, Any] = {
    "train.fused_activation": False, "train.fused_norms": False, "train.fused_loss": False, "train.attention": "plain",
    "train.compile.vision": False, "train.compile.decoder": False, "train.compile.loss": False,
    "moe.fused_permutation": False, "moe.fused_router": False, "moe.apply_probs_on": "output",
    "optimizer.fused": False, "optimizer.master_weights": "fp32",
}  # fmt: skip


def by_hand(config: TrainerConfig, *, gpu: bool, packed_cudnn: bool) -> dict[str, Any]:
    """The switches that somebody would set who knows them all, at the precision that the configuration asks for; none of them serves a
    CPU."""
    if not gpu:
        return {}
    narrow = config.train.dtype == "bf16"
    switches: dict[str, Any] = {
        "train.fused_activation": True,
        "train.fused_norms": True,
        "train.fused_loss": narrow,
        "optimizer.fused": True,
    }
    if narrow:
        switches["train.compile.loss"] = False  # the kernel takes its place
    if config.model.num_experts:
        switches |= {"moe.fused_permutation": True, "moe.fused_router": True, "moe.apply_probs_on": "activation"}
    if config.model.vision is not None:
        switches |= {"train.compile.vision": True, "train.compile.dynamic": "marked"}
    if narrow and packed_cudnn:
        switches["train.attention"] = "cudnn"
    if narrow and config.parallel.reduce_dtype == "bf16":
        switches["optimizer.master_weights"] = "remainder"
    return switches


def words(side: str, setting: Sequence[str], steps: int, more: Sequence[str], *, gpu: bool, packed_cudnn: bool) -> list[str]:
    """The trainer's arguments of one side. What is said by hand in the file itself stays on the side `best` alone."""
    path = f"trainer/configs/{setting[0]}.yaml"
    common = [*setting[1:], f"train.steps={steps}", f"train.warmup_steps={min(10, steps // 2)}", "train.receipt=false", *more]
    if not gpu:
        common.append("train.device=cpu")
    config = load(ROOT / path, parse_overrides(common))
    switches = {"auto": {}, "off": PLAIN, "best": by_hand(config, gpu=gpu, packed_cudnn=packed_cudnn)}[side]
    return [path, *common, *(f"{key}={json.dumps(value)}" for key, value in switches.items())]


def run(arguments: list[str], gpus: Sequence[str], limit_s: float) -> dict[str, Any]:
    """One launch: its figures, or why it has none; never longer than the limit."""
    folder, began = Path(tempfile.mkdtemp(prefix="beside-plain-")), time.monotonic()
    try:
        job = run_forked(arguments, gpus or [""], folder, limit_s)
        out: dict[str, Any] = {"outcome": "ok", "wall_s": round(time.monotonic() - began, 1)}
        if job.ended:
            return out | {"outcome": "failed", "message": "did not end within its limit"}
        if code := job.codes[0]:
            return out | {"outcome": {2: "refused", 4: "out of memory"}.get(code, "failed"), "message": reason(ended(job))}
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        first = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
        return out | {
            **measured(folder, 1, ()),
            "first_step_s": round(summary["seconds"]["start_up"] + first["seconds"], 2),
            "start_up_s": round(summary["seconds"]["start_up"], 2),
            "recompiles": summary["metrics"]["recompiles"],
            "mfu": summary["metrics"].get("mfu"),
            "config_sha": summary["config_sha"],
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def apart(a: Sequence[float | None], b: Sequence[float | None]) -> float | None:
    """The largest difference of two series of losses; None where one holds a value that is not finite, or is shorter."""
    if len(a) != len(b) or None in a or None in b:
        return None
    return max((abs(x - y) for x, y in zip(a, b, strict=True) if x is not None and y is not None), default=None)


def line(row: Mapping[str, Any]) -> str:
    """A launch for people."""
    place = f"{row['setting']:16} round {row['round']}  {row['side']:4}"
    if row["outcome"] != "ok":
        return f"{place}  {row['outcome']}: {row['message']}  [{row['wall_s']} s]"
    return (
        f"{place}  {row['tokens_per_s_per_gpu']:10,.0f} tokens/s  {row['step_s'] * 1000:7.1f} ms  "
        f"{row['peak_memory_bytes'] / 2**30:6.1f} GiB"
        f"  first step after {row['first_step_s']:.1f} s  {row['recompiles']} recompiles  [{row['wall_s']} s]"
    )


def compared(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For the sides of one round that have trained: speeds as shares, and how far losses are apart."""
    of = {r["side"]: r for r in rows if r["outcome"] == "ok"}
    out = []
    for side, other in (("auto", "best"), ("auto", "off"), ("best", "off")):
        if side in of and other in of:
            ratio = of[side]["tokens_per_s_per_gpu"] / of[other]["tokens_per_s_per_gpu"]
            more = (of[side]["peak_memory_bytes"] - of[other]["peak_memory_bytes"]) / 2**30
            far = apart(of[side]["losses"], of[other]["losses"])
            losses = "losses cannot be compared" if far is None else f"losses at most {far:.2e} apart"
            out.append(f"  {side} / {other}: {ratio:.3f} of the speed, {more:+.2f} GiB, {losses} over {len(of[side]['losses'])} steps")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("words", nargs="*", help="key.path=value for all sides")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), metavar="SETTING", help=f"of: {'; '.join(SETTINGS)}")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--budget", type=float, default=540, help="seconds after which nothing is started")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a launch may take")
    parser.add_argument("--out", type=Path, required=True, help="folder of the file")
    parser.add_argument("--rehearse", action="store_true", help="the tiny models on the CPU, whatever GPUs there are")
    arguments = parser.parse_intermixed_args(argv)
    began = time.monotonic()
    gpus = [] if arguments.rehearse else detect.device_ids(detect.detect())[:1]
    if not gpus and not arguments.rehearse:
        print("there is no GPU; --rehearse trains tiny models on the CPU", file=sys.stderr)
        return 2
    if not fork_server.import_all("torch"):
        print("an import has touched a GPU, so nothing can be forked", file=sys.stderr)
        return 2
    names = arguments.only or (REHEARSED if arguments.rehearse else [name for name in SETTINGS if name not in LEFT_ASIDE])
    print(
        f"{', '.join(names)}; {arguments.rounds} x {len(arguments.sides)} launches each; ready after {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return 0 if compare(arguments, names, gpus, began) else LEFT_OUT


def compare(arguments: argparse.Namespace, names: Sequence[str], gpus: Sequence[str], began: float) -> bool:
    """Every launch that is not held yet and for which there is time, written down one by one; whether there was time for all."""
    path, cudnn = arguments.out / FILE, bool(gpus) and find_spec("transformer_engine") is not None
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    about = {"steps": arguments.steps, "words": arguments.words, "gpu": bool(gpus)}
    for number in range(arguments.rounds):
        for name in names:
            at = {"setting": name, "round": number, **about}
            turn = number % len(SIDES)
            for side in [s for s in (*SIDES[turn:], *SIDES[:turn]) if s in arguments.sides]:
                key = at | {"side": side}
                if any(r["outcome"] in FINAL for r in rows if {k: r.get(k) for k in key} == key):
                    continue
                if time.monotonic() - began > arguments.budget:
                    print("the budget leaves out the rest; the same command goes on", flush=True)
                    return False
                try:
                    asked = words(side, SETTINGS[name], arguments.steps, arguments.words, gpu=bool(gpus), packed_cudnn=cudnn)
                    checks.check(load(ROOT / asked[0], parse_overrides(asked[1:])), 1)
                    found = run(asked, gpus, arguments.limit) | {"arguments": asked}
                except PlaybookError as e:
                    found = {"outcome": "refused", "message": " ".join(str(e).split()), "wall_s": 0.0}
                rows.append(key | found)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(line(rows[-1]), flush=True)
            for text in compared([r for r in rows if {k: r.get(k) for k in at} == at]):
                print(text, flush=True)
    return True


if __name__ == "__main__":
    leave(main())
