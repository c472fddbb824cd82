"""Rules of the trainer, by short runs of it: on the CPU where nothing else is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from playbook.paths import data_root
from playbook_bench.judge.verdict import Statement
from playbook_trainer.config.tree import TrainerConfig

_TIMEOUT_S = 600
_TINY = (
    "train.device=cpu",
    "data.num_workers=0",
    "train.global_batch_size=1",
    "train.warmup_steps=1",
    "train.log_every=1",
    "train.receipt=false",
)


def train(config: str, out: Path, *words: str) -> str:
    """Run a shipped configuration once, with these overrides; what went wrong, or nothing."""
    command: Sequence[str] = [
        *(sys.executable, "-m", "playbook_trainer", str(data_root("configs") / f"{config}.yaml"), f"output={out}"),
        *(*_TINY, *words),
    ]
    hidden = {} if "train.device=cuda" in words else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **hidden, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the trainer took more than {_TIMEOUT_S} s"
    return "" if done.returncode == 0 else f"the trainer ended with code {done.returncode}: {(done.stderr or done.stdout)[-400:].strip()}"


def read_wandb_offline_run(wandb_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Configuration and history of the only W&B offline run in `wandb_dir` (`offline-run-*/*.wandb`).

    Keys of W&B itself (leading `_`) are left out of the configuration, not of the history, which has a dict for each logged row. Nested
    keys are joined by `/`.

    Raises:
        ValueError: there is none, or more than one.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = wandb_dir.glob("offline-run-*/*.wandb")
    config: dict[str, Any] = {}
    history = []
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for update in [*record.run.config.update, *record.config.update]:
            config[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
        if record.history.item:
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return {key: value for key, value in config.items() if not key.startswith("_")}, history


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format (blocks of 32 KiB; checksum, length, kind), which follow a header of seven bytes.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (remaining := 32_768 - at % 32_768) < 7:
            at += remaining
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def finetune_saves_and_evaluates(words: Sequence[str] = (), checkpoint_format: str = "") -> Statement:
    """Whether a run from saved weights evaluates, leaves a checkpoint (of that format, where one is named), and is continued from it by a
    second run.

    `words` override the configuration of all runs.
    """
    with tempfile.TemporaryDirectory(prefix="playbook-finetune-") as name:
        root = Path(name)
        weights, saved = root / "weights", root / "checkpoints"
        common = (f"checkpoint.dir={saved}", "checkpoint.every=2", "eval.every=2", "eval.batches=1", f"init.weights={weights}")
        runs = {
            "export": ("train.steps=2", f"checkpoint.export={weights}"),
            "finetune": (*common, "train.steps=4"),
            "resume": (*common, "train.steps=6"),
        }
        for run, overrides in runs.items():
            problem = train("qwen3_vl_moe_tiny", root / run, "data.seq_len=256", *words, *overrides)
            if problem:
                return False, f"{run}: {problem}", {}
        summaries = {run: json.loads((root / run / "summary.json").read_text(encoding="utf-8")) for run in runs}
        steps = [json.loads(line)["step"] for line in (root / "resume" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        checkpoints = sorted(p.name for p in saved.glob("step_*"))
        formats = {json.loads(p.read_text(encoding="utf-8")).get("format") for p in saved.glob("step_*/checkpoint.json")}
    evaluated = [row["step"] for row in summaries["finetune"]["eval"]]
    holds = evaluated == [2, 4] and bool(checkpoints) and steps == [5, 6] and (not checkpoint_format or formats == {checkpoint_format})
    sentence = f"from saved weights: evaluated after steps {evaluated}, checkpoints {', '.join(checkpoints)}, continued with steps {steps}"
    sentence += f"; their format is {', '.join(map(str, formats)) or 'not said'}" if checkpoint_format else ""
    return holds, sentence, {"evaluated": evaluated, "checkpoints": checkpoints, "resumed": steps}


_CONFIG = "qwen3_vl_moe_tiny"


def first_step_from_trained_weights(steps: int, rate: float, least_ratio: float) -> Statement:
    """Whether the gradient norm of the first step on images is so many times that of the first on text alone, once the decoder has learned
    text for `steps` steps.

    The tower stays as it was drawn, so decoder and tower do not fit each other, as in a model whose weights were put together.
    """
    with tempfile.TemporaryDirectory(prefix="playbook-first-step-") as name:
        root = Path(name)
        learned = (
            "data.kind=text",
            "data.seq_len=128",
            f"train.steps={steps}",
            f"optimizer.lr={rate}",
            f"checkpoint.export={root / 'weights'}",
        )
        if problem := train(_CONFIG, root / "learned", *learned):
            return False, problem, {}
        norms: dict[str, float] = {}
        for weights, words in {"trained": (f"init.weights={root / 'weights'}",), "fresh": ()}.items():
            for kind in ("vqa", "text"):
                out = root / f"{weights}-{kind}"
                if problem := train(_CONFIG, out, *words, f"data.kind={kind}", "data.seq_len=512", "train.steps=2"):
                    return False, problem, {}
                norms[f"{weights}, {kind}"] = _first(out)["grad_norm"]
        losses = [_first(root / part)["loss"] for part in ("fresh-text", "trained-text")]
    ratios = {weights: norms[f"{weights}, vqa"] / norms[f"{weights}, text"] for weights in ("trained", "fresh")}
    holds = ratios["trained"] >= least_ratio and losses[1] < losses[0]
    # One digit: the norms of a few steps differ in their last ones from machine to machine, and a record has to replay.
    shown = {weights: float(f"{ratio:.1g}") for weights, ratio in ratios.items()}
    sentence = (
        f"first gradient norm on images over that on text: {shown['trained']:g} times from weights trained on text for {steps} steps, "
        f"{shown['fresh']:g} times from fresh ones; claimed at least {least_ratio:g} times"
    )
    return holds, sentence if losses[1] < losses[0] else f"{steps} steps did not lower the loss on text", shown


def _first(out: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    return row


def tracker_gets_configuration() -> Statement:
    """Whether TensorBoard's event file holds each line of the run's resolved configuration, an override's value among them."""
    with tempfile.TemporaryDirectory(prefix="playbook-tracker-") as name:
        out = Path(name) / "run"
        problem = train("qwen3_moe_tiny", out, "tracker.tensorboard=true", "train.steps=2", "data.seq_len=64", "optimizer.lr=0.000123")
        if problem:
            return False, problem, {}
        events = b"".join(p.read_bytes() for p in sorted((out / "tensorboard").glob("events.*")))
        lines = (out / "config.yaml").read_text(encoding="utf-8").splitlines()
        missing = [line for line in lines if line.encode() not in events]
        written = yaml.safe_load("\n".join(lines))
    holds = not missing and written["optimizer"]["lr"] == 0.000123 and set(TrainerConfig.model_fields) <= set(written)
    # How many lines there are is no finding: it grows with every setting, and the record must replay.
    sentence = (
        f"{len(missing) or 'no'} line{'' if len(missing) == 1 else 's'} of the resolved configuration missing from the tracker's file"
    )
    return holds, sentence + (f": {missing[0].strip()}" if missing else ""), {"missing": missing[:5]}


def offline_run_gets_configuration() -> Statement:
    """Whether what `wandb sync` would upload holds each section of the run's resolved configuration, an override's value among them."""
    with tempfile.TemporaryDirectory(prefix="playbook-tracker-") as name:
        out = Path(name) / "run"
        words = ("tracker.wandb=true", "tracker.offline=true", "train.steps=2", "data.seq_len=64", "optimizer.lr=0.000123")
        problem = train("qwen3_moe_tiny", out, *words)
        if problem:
            return False, problem, {}
        written = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
        sent, _ = read_wandb_offline_run(out / "wandb")
    missing = [key for key, value in written.items() if sent.get(key) != value]
    holds = not missing and written["optimizer"]["lr"] == 0.000123
    return holds, f"sections of the resolved configuration missing from the run: {', '.join(missing) or 'none'}", {"missing": missing}
