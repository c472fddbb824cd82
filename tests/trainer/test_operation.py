"""A run under adversity: signals, values that are not finite, a rank that no longer answers."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_sets import samples
from forking import Forks
from ranks import SUPPORT, alive, steps, summary, tensors

from playbook_bench.launch.local import LocalLauncher, Spec
from playbook_bench.statements.training import read_wandb_offline_run
from playbook_trainer.config.tree import load

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
VISION = "trainer/configs/qwen3_vl_tiny.yaml"
QUICK = ["train.receipt=false", "train.warmup_steps=1", "train.steps=6", "data.seq_len=64", "model.num_layers=1"]

NAN_GRADIENT = """
import os
from playbook_trainer.torch import engine
real, calls = engine.forward_backward, []
def planted(model, *args):
    out = real(model, *args)
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        grad = next(iter(model.layers.values())).attn.q_proj.weight.grad
        grad.to_local().fill_(float("nan"))
    return out
engine.forward_backward = planted
"""

# The watchdog's own clock, which leaps by a quarter of an hour where nothing gets on: no test waits for it.
LEAPS = """
import time, types
from playbook_trainer.observe import watchdog
leaps = [0]
watchdog.time = types.SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: time.monotonic() + 900 * leaps[0])
"""

STILL = f"""{LEAPS}
import os, signal
from playbook_trainer.torch import engine
real, calls = engine.forward_backward, []
def planted(*args):
    calls.append(1)
    if len(calls) == 3:
        leaps[0] = 1
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args)
engine.forward_backward = planted
"""


FULL = """
import os, resource, signal
from playbook_trainer.torch import checkpoint
real = checkpoint.Checkpointer.save
def planted(self, *given):
    if given[0] == 4 and os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return real(self, *given)
checkpoint.Checkpointer.save = planted
"""


GONE = """
import shutil
from pathlib import Path
from playbook_trainer.torch import checkpoint
real = checkpoint.Checkpointer.save
def planted(self, *given):
    done = real(self, *given)
    self.wait()
    shutil.rmtree(self._config.output)
    return done
checkpoint.Checkpointer.save = planted
"""


FULL_AT_THE_START = """
import resource, signal
from playbook_trainer.observe import metrics
real = metrics._keep_until
def planted(path, step):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    real(path, step)
metrics._keep_until = planted
"""


BAD_DATA_WHILE_SAVING = """
import os, time
from playbook.errors import DataError
from playbook_trainer import checkpoint_files
from playbook_trainer.data.loader import Loader
finish, read, calls = checkpoint_files.Writer.finish, Loader._next, []
def slowly(self, **given):
    time.sleep(1)
    finish(self, **given)
def planted(self):
    calls.append(1)
    if len(calls) == 5 and os.environ["RANK"] == "1":
        raise DataError("planted")
    return read(self)
checkpoint_files.Writer.finish, Loader._next = slowly, planted
"""


SLOW_FILES = f"""{LEAPS}
from playbook_trainer import checkpoint_files
finish = checkpoint_files.Writer.finish
def slowly(self, **given):
    leaps[0] += 1
    time.sleep(3)  # the watchdog looks every two seconds
    finish(self, **given)
checkpoint_files.Writer.finish = slowly
"""


def signalled(
    forks: Forks, words: list[str], out: Path, ranks: int, ready: Callable[[list[dict[str, Any]]], bool], signum: int
) -> list[int]:
    """The exit codes of ranks, the last of which has got a signal once this holds of the steps."""
    pids = forks.start([*words, f"output={out}"], ranks)
    deadline = time.monotonic() + 2000
    while not (out / "metrics.jsonl").is_file() or not ready(steps(out)):
        assert time.monotonic() < deadline, forks.text(0)
        time.sleep(0.01)
    os.kill(pids[-1], signum)
    return forks.wait()


@pytest.mark.full
def test_a_signal_to_one_rank_saves_and_ends_all(forks: Forks, tmp_path: Path) -> None:
    out, stopped = tmp_path / "out", 0
    words = [TEXT, *QUICK, "train.deterministic=true", f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.keep=1"]
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        before = stopped
        codes = signalled(forks, [*words, "train.steps=4000"], out, 2, lambda rows, least=before + 2: len(rows) >= least, signum)
        assert codes == [5, 5], forks.text(0)
        stopped = steps(out)[-1]["step"]
        assert stopped >= before + 2
        assert summary(out)["outcome"] == "stopped"
        assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [".lock", f"step_{stopped:08d}"]
        assert forks.text(0).count("ended: a signal asked for it, and a checkpoint was saved") == (2 if before else 1)
    assert [r["step"] for r in steps(out)] == list(range(1, stopped + 1))
    assert f"resumed after step {before} of 4000\n" in forks.text(0)
    assert forks.run([*words, f"train.steps={stopped}", f"output={out}"], 2) == [0, 0], forks.text(0)
    assert "nothing is left to do, raise train.steps" in forks.text(0)


@pytest.mark.full
def test_a_signal_to_a_run_that_cannot_be_saved_does_not_say_that_it_was(forks: Forks, tmp_path: Path) -> None:
    diverging = ["train.on_nan=continue", "optimizer.lr=1e30", "optimizer.warmup_steps=0", "train.steps=4000"]
    words = [TEXT, *QUICK, *diverging, f"checkpoint.dir={tmp_path / 'saved'}"]
    codes = signalled(forks, words, tmp_path / "out", 1, lambda rows: any(r.get("nan") for r in rows), signal.SIGTERM)
    assert codes == [3], forks.text(0)
    assert summary(tmp_path / "out")["outcome"] == "nan"
    assert [p.name for p in (tmp_path / "saved").iterdir()] == [".lock"]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.full
def test_a_save_that_takes_longer_than_a_step_may_is_no_hang(in_background: bool, forks: Forks, tmp_path: Path) -> None:
    """The last one, which nothing follows, would be cut off at every attempt. One that waits for the one before is counted."""
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2", f"checkpoint.async_save={str(in_background).lower()}"]
    words = [TEXT, *QUICK, *saving, "train.steps=4", "train.hang_timeout_s=20", f"output={tmp_path / 'out'}"]
    assert forks.run(words, 1, SLOW_FILES) == [0], forks.told()
    assert (tmp_path / "saved" / "step_00000004").is_dir()
    counters = summary(tmp_path / "out")["receipt"]["counters"]
    assert (counters["checkpoints"], counters["checkpoints_behind_another"]) == (2, in_background)


@pytest.mark.full
def test_a_signal_under_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANT", json.dumps({"baseline": {"fault": "terminate", "rank": 1, "at": 2}}))
    changes = {k: v for k, _, v in (w.partition("=") for w in QUICK)} | {"train.steps": 4000, "checkpoint.dir": str(tmp_path / "saved")}
    config = load(Path(TEXT), {k: json.loads(v) if isinstance(v, str) and v[0] in "0123456789tf" else v for k, v in changes.items()})
    planted = SUPPORT / "ranks" / "planted.py"
    result = LocalLauncher(command=(sys.executable, str(planted), "--real")).run(Spec(config, 2, tmp_path / "run", timeout_s=1200))
    assert (result.outcome, result.returncode) == ("killed", 5), result.message
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [".lock", f"step_{steps(tmp_path / 'run')[-1]['step']:08d}"]


@pytest.mark.parametrize(("policy", "code", "saved"), [("skip", 0, [1, 2, 3, 4, 5, 6]), ("stop", 3, [1, 2]), ("continue", 3, [1, 2])])
@pytest.mark.sample("skip-0-saved0", "stop-3-saved1")
def test_a_gradient_that_is_not_finite(policy: str, code: int, saved: list[int], forks: Forks, tmp_path: Path) -> None:
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=1", "checkpoint.keep=9"]
    words = [TEXT, *QUICK, f"train.on_nan={policy}", *saving, "eval.every=2", "eval.batches=1", f"output={tmp_path / 'out'}"]
    assert forks.run(words, 2, NAN_GRADIENT) == [code, code], forks.text(0)
    assert ("ended: loss or gradient norm was not finite" in forks.text(0)) == (code == 3)
    rows, metrics = steps(tmp_path / "out"), summary(tmp_path / "out")["metrics"]
    assert [r["step"] for r in rows if r.get("nan")] == ([3] if policy != "continue" else [3, 4, 5, 6])
    folders = sorted((tmp_path / "saved").glob("step_*"))
    assert [int(p.name[-8:]) for p in folders] == saved, "what is not finite is never saved"
    assert ("model.embed.weight is not finite: no checkpoint" in forks.text(0)) == (policy == "continue")
    if policy == "continue":
        assert all("NaN" not in (tmp_path / "out" / name).read_text() for name in ("summary.json", "metrics.jsonl"))
        evaluated = summary(tmp_path / "out")["eval"]
        assert [(row["step"], row["loss"] is None) for row in evaluated] == [(2, False), (4, True), (6, True)]
    if policy == "skip":
        assert [r["step"] for r in rows if r.get("skipped")] == [3]
        assert (metrics["nan_steps"], metrics["skipped_steps"]) == (1, 1)
        held = [tensors(f) for f in folders]
        assert held[1] == held[2], "no rank made the update"
        assert held[2] != held[3]


def test_a_disk_that_is_full_is_said_and_the_checkpoint_before_stays(forks: Forks, tmp_path: Path) -> None:
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2"]
    assert forks.run([TEXT, *QUICK, *saving, f"output={tmp_path / 'out'}"], 2, FULL) == [2, 2]
    said = forks.text(0).splitlines()[-1]
    assert "the checkpoint of step 4 could not be written" in said
    assert "rank 1: a file could not be written to its end, as where a disk or a quota is full" in said
    assert [p.name for p in (tmp_path / "saved").glob("step_*")] == ["step_00000002"]


@pytest.mark.full
def test_a_disk_that_is_full_at_the_start_takes_no_metrics(forks: Forks, tmp_path: Path) -> None:
    words = [TEXT, *QUICK, f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2", f"output={tmp_path / 'out'}"]
    assert forks.run([*words, "train.steps=4"]) == [0]
    before = (tmp_path / "out/metrics.jsonl").read_bytes()
    assert forks.run(words, 1, FULL_AT_THE_START) != [0]
    assert (tmp_path / "out/metrics.jsonl").read_bytes() == before
    with (tmp_path / "out/metrics.jsonl").open("ab") as f:
        f.write(b"\xff\x00")  # of a machine that lost power
    assert forks.run(words) == [0], forks.text(0)
    assert [r["step"] for r in steps(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_an_output_that_cannot_be_written_any_more_is_one_message(forks: Forks, tmp_path: Path) -> None:
    """Its folder is removed while the run trains, or its disk is full from the start; the checkpoint before stays."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    words = [TEXT, *QUICK, f"output={out}", f"checkpoint.dir={saved}", "checkpoint.every=2"]
    for why, plant in (("No such file or directory", GONE), ("No space left on device", "")):
        if not plant:
            out.mkdir()
            (out / "config.yaml").symlink_to("/dev/full")
        assert forks.run(words, 1, plant) == [2]
        assert forks.text(0).splitlines()[-1] == (
            f"error: output {out} cannot be written: {why}; mend that, or choose another folder: the same command goes on from the newest "
            "checkpoint, if checkpoint.dir is set"
        )
        assert [p.name for p in saved.glob("step_*")] == ["step_00000002"]
    (out / "config.yaml").unlink()
    assert forks.run(words) == [0]


@pytest.mark.full
def test_bad_data_does_not_take_the_checkpoint_that_is_being_written(forks: Forks, tmp_path: Path) -> None:
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2"]
    words = [TEXT, *QUICK, *saving, "train.global_batch_size=4", "train.micro_batch_size=1"]
    codes = forks.run([*words, f"output={tmp_path / 'out'}"], 2, BAD_DATA_WHILE_SAVING)
    assert (codes[1], "rank 1: error: planted" in forks.text(1)) == (2, True)
    assert [p.name for p in (tmp_path / "saved").glob("step_*")] == ["step_00000002"]


def test_a_run_that_only_skips_ends(forks: Forks, tmp_path: Path) -> None:
    words = ["train.on_nan=skip", "train.steps=30", "optimizer.lr=1e30", "optimizer.warmup_steps=0", f"output={tmp_path}"]
    assert forks.run([TEXT, *QUICK, *words]) == [3]
    assert [bool(r.get("skipped")) for r in steps(tmp_path)] == [False] + [True] * 10


def test_steps_without_labels_change_nothing_but_the_count(forks: Forks, tmp_path: Path) -> None:
    """Every image is bad and skipped, so no sample bears a loss: zero over zero labels is no NaN."""
    cut_off = Path("trainer/assets/vqa/brick_wall.jpg").read_bytes()[:9000]
    samples(tmp_path, [{"images": ["bad.jpg"], "question": "What?", "answer": "A wall."}] * 12, {"bad.jpg": cut_off})
    data = [f"data.path={tmp_path}", "data.num_workers=0", "data.pack=false", "data.max_image_pixels=16384", "data.on_bad_image=skip"]
    words = [
        VISION,
        "train.receipt=false",
        "train.warmup_steps=1",
        *data,
        "train.steps=2",
        "data.seq_len=128",
        f"output={tmp_path / 'out'}",
    ]
    assert forks.run(words) == [0], forks.text(0)
    assert [(r["loss"], r["grad_norm"], r.get("nan")) for r in steps(tmp_path / "out")] == [(0.0, 0.0, None)] * 2


@pytest.mark.full
def test_the_summary_of_a_run_before_does_not_stay(forks: Forks, tmp_path: Path) -> None:
    words = [TEXT, *QUICK, "train.steps=2", f"output={tmp_path}"]
    assert forks.run(words) == [0], forks.text(0)
    crash = "from playbook_trainer import loop; loop.run_steps = None"
    assert forks.run(words, 1, crash) == [1]
    assert not (tmp_path / "summary.json").exists()


def test_settings_without_an_effect_are_said(forks: Forks, tmp_path: Path) -> None:
    assert forks.run([TEXT, *QUICK, "checkpoint.every=2", "moe.dispatcher=allgather", f"output={tmp_path}"]) == [0], forks.text(0)
    assert "checkpoint.every 2 saves nothing, since checkpoint.dir is not set\n" in forks.text(0)
    assert "moe.dispatcher allgather has no effect at parallel.ep 1" in forks.text(0)


@pytest.mark.full
def test_a_hang_is_reported_and_ended(forks: Forks, tmp_path: Path) -> None:
    ranks = forks.start([TEXT, *QUICK, "train.hang_timeout_s=20", f"output={tmp_path}"], 2, STILL)
    deadline = time.monotonic() + 1000
    while "rank 0: no step" not in forks.text(0) or alive(ranks[0]):
        assert time.monotonic() < deadline, forks.text(0)
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGKILL)  # as a launcher does with those that are left
    assert forks.wait() == [6, -signal.SIGKILL]
    said: Any = forks.text(0)[forks.text(0).index("rank 0: no step") :]
    assert "after step 2, in step > " in said
    assert "in train_step" in said
    assert "in forward_backward" in said


# By a clock that only experts advance, so that no other work of the machine is seen.
SLOW_EXPERTS = """
import os, types
from playbook_trainer.observe import ranges
from playbook_trainer.torch.model import decoder
real, passed = decoder.Experts._loop, [0.0]
def planted(self, *args):
    passed[0] += 0.5 if os.environ["RANK"] == "1" else 0.001
    return real(self, *args)
decoder.Experts._loop = planted
ranges.time = types.SimpleNamespace(perf_counter=lambda: passed[0])
"""


@pytest.mark.full
def test_the_slow_rank_is_named_and_the_largest_tells_the_peak(forks: Forks, tmp_path: Path) -> None:
    large = 1200 << 20
    plant = f"{SLOW_EXPERTS}\nos.environ['RANK'] == '1' and len(b'x' * {large})"
    words = [TEXT, *QUICK, "train.steps=4", "train.straggler_every=2", f"output={tmp_path}"]
    assert forks.run(words, 2, plant) == [0, 0], forks.text(0)
    assert min(r["peak_memory_bytes"] for r in steps(tmp_path)) > large
    assert summary(tmp_path)["metrics"]["peak_memory_bytes"] > large
    compared = {r["step"]: r["ranks"] for r in steps(tmp_path) if "ranks" in r}
    assert list(compared) == [2, 4]
    for times in compared.values():
        assert times["slowest"] == 1
        assert times["max"] > times["min"] + 0.2
        assert times["min"] <= times["median"] <= times["max"]
    found = summary(tmp_path)["stragglers"]
    assert (found["samples"], found["slowest"]) == (2, {"1": 2})


@pytest.mark.full
def test_trackers_hold_the_whole_configuration(forks: Forks, tmp_path: Path) -> None:
    tracked = ["tracker.tensorboard=true", "tracker.wandb=true", "tracker.offline=true", "tracker.name=a run"]
    words = [*tracked, "eval.every=3", "eval.batches=1", f"output={tmp_path}"]
    assert forks.run([TEXT, *QUICK, *words], 2) == [0, 0], forks.text(0)
    resolved, rows = yaml.safe_load((tmp_path / "config.yaml").read_text()), steps(tmp_path)
    assert (resolved["tracker"]["name"], resolved["train"]["steps"], resolved["optimizer"]["lr"]) == ("a run", 6, 0.0003)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert yaml.safe_load(text) == resolved
    losses = events.Scalars("loss")
    assert [e.step for e in losses] == [r["step"] for r in rows]
    assert [e.value for e in losses] == pytest.approx([r["loss"] for r in rows])
    assert [e.step for e in events.Scalars("eval_loss")] == [3, 6]
    assert events.Scalars("summary/skipped_steps")[0].value == 0

    config, history = read_wandb_offline_run(tmp_path / "wandb")
    assert config == resolved
    assert [(row["_step"], row["loss"]) for row in history] == [(r["step"], r["loss"]) for r in rows]


def test_a_missing_tracker_is_said(forks: Forks, tmp_path: Path) -> None:
    missing = "import importlib.util as u; real = u.find_spec; u.find_spec = lambda name, *a: None if name == 'wandb' else real(name, *a)"
    assert forks.run([TEXT, *QUICK, "tracker.wandb=true", f"output={tmp_path / 'out'}"], 1, missing) == [2]
    assert "tracker.wandb needs the package wandb" in forks.text(0)
    assert not (tmp_path / "out").exists()
