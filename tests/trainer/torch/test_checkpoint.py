"""Checkpoints: written under one layout and read under another, killed at any moment, damaged, or hostile."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forking import Forks
from ranks import alive, run, steps, summary, trained
from wild import Called

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
VISION = "trainer/configs/qwen3_vl_moe_tiny.yaml"
QUICK = ["train.receipt=false", "train.warmup_steps=1", "train.steps=6", "data.seq_len=64"]

LAYOUTS = {
    "one": (1, []),
    "fsdp2": (2, []),
    "tp2-pp2": (4, ["parallel.tp=2", "parallel.pp=2"]),
    "ep2-dp4": (4, ["parallel.ep=2"]),
    "hsdp": (4, ["parallel.dp_replicate=2"]),
    "folded": (4, ["parallel.tp=2", "parallel.etp=1", "parallel.ep=4", "parallel.sequence_parallel=true", "moe.dispatcher=dedup"]),
}


def rows_of(folder: Path, config: str, layout: str, *words: str) -> list[dict[str, Any]]:
    ranks, sizes = LAYOUTS[layout]
    return steps(trained(folder, ranks, config, *QUICK, *sizes, *words))


def saving(folder: Path, every: int = 3) -> list[str]:
    return [f"checkpoint.dir={folder}", f"checkpoint.every={every}", "checkpoint.keep=9"]


@pytest.mark.full
def test_resumed_in_another_layout(tmp_path: Path) -> None:
    """Each goes on from what the one before it has written, one step further."""
    chain = ("one", "tp2-pp2", "folded", "hsdp", "ep2-dp4", "one", "fsdp2")
    rows = ["data.seq_len=128", "data.max_image_pixels=16384", "train.global_batch_size=4", "seed=2"]
    words = [*rows, "optimizer.schedule=constant", "optimizer.warmup_steps=1"]
    whole = rows_of(tmp_path / "whole", VISION, "one", *words, f"train.steps={len(chain) + 1}")
    assert len({row["images"] for row in whole}) > 1
    for i, layout in enumerate(chain):
        more = [f"train.steps={i + 2}", f"data.num_workers={i % 3}", *saving(tmp_path / "saved", every=1)]
        row, expected = rows_of(tmp_path / "parts", VISION, layout, *words, *more)[-1], whole[i + 1]
        for counted in ("step", "images", "useful_tokens"):
            assert row[counted] == expected[counted], (layout, counted)
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5), layout
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), layout


@pytest.mark.full
def test_a_resumed_run_warms_up_anew_times_the_rest_and_is_traced(tmp_path: Path) -> None:
    words = ["model.num_layers=1", f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2"]
    rows_of(tmp_path / "out", TEXT, "one", *words, "train.steps=2")
    rows = rows_of(tmp_path / "out", TEXT, "one", *words, "train.steps=5")
    assert [r["step"] for r in rows if r["timed"]] == [2, 4, 5]
    found = summary(tmp_path / "out")
    assert found["window"] == {"first": 4, "last": 5}
    assert found["seconds"]["timed"] == pytest.approx(sum(r["seconds"] for r in rows if r["timed"] and r["step"] > 2))
    assert found["flops"]["flops_per_step"]["linear"] > 0
    rows_of(tmp_path / "traced", TEXT, "one", *words, "train.steps=8", "profile.kineto=true", "profile.steps=1")
    assert (tmp_path / "traced" / "trace.json").stat().st_size


@pytest.mark.parametrize("in_background", [True, False])
def test_a_summary_says_how_long_saves_kept_training_waiting(in_background: bool, tmp_path: Path) -> None:
    """Those after the warm-up; the one in it takes the host memory."""
    rows_of(tmp_path / "out", TEXT, "one", "train.steps=3", *saving(tmp_path / "saved", 1), f"checkpoint.async_save={in_background}")
    found = summary(tmp_path / "out")
    assert 0 < found["metrics"]["checkpoint_seconds"] < found["seconds"]["total"]
    counters = found["receipt"]["counters"]
    assert (counters["checkpoints"], counters["checkpoints_in_background"]) == (3, 3 * in_background)
    assert found["metrics"]["peak_reserved_bytes"] == found["metrics"]["peak_memory_bytes"], "off the GPU nothing is reserved"


@pytest.mark.timeout(6000)
@pytest.mark.parametrize(("deaths", "ends"), [(2, 1), (4, 2)], ids=["two", "four"])
@pytest.mark.sample("two")
def test_killed_again_and_again_and_resumed(deaths: int, ends: int, forks: Forks, tmp_path: Path) -> None:
    """A random rank dies at a random moment; in the end the losses are those of an uninterrupted run, to the last bit."""
    words = [TEXT, *QUICK, "train.deterministic=true", "parallel.ep=2", "model.num_layers=1", "train.global_batch_size=2"]
    words.append("train.hang_timeout_s=1500")  # a stall says where it is
    saved, chance, kills, runs = tmp_path / "saved", random.Random(20), 0, 0
    assert forks.run([*words, f"output={tmp_path / 'whole'}"], 2) == [0, 0], forks.told(2)
    whole = exact(tmp_path / "whole")
    while kills < deaths or runs < ends:  # on a busy machine a run dies more often before its end
        # A new run each time the last one has come to its end, which it does after a few deaths.
        parts, more = tmp_path / f"parts{runs}", [f"checkpoint.dir={saved}", "checkpoint.every=1", "checkpoint.keep=2"]
        line = [*words, *more, f"output={parts}"]
        kills += killed(forks, line, parts, chance)
        if kills >= deaths or len(lines(parts)) >= 4:
            assert forks.run(line, 2) == [0, 0], forks.told(2)
            assert exact(parts) == whole
            assert sorted(p.name for p in saved.iterdir()) == [".finished", ".lock", "step_00000005", "step_00000006"]
            shutil.rmtree(saved)
            runs += 1
    assert runs >= ends


def killed(forks: Forks, line: list[str], parts: Path, chance: random.Random) -> int:
    """Start the run, kill one of its ranks at a random moment, then the other, as a launcher does; 0 where the run ended before that."""
    more = chance.randint(0, 2)
    at = len(lines(parts)) + more
    ranks = forks.start(line, 2)
    deadline = time.monotonic() + 1200
    while len(lines(parts)) < at and all(alive(pid) for pid in ranks):
        assert time.monotonic() < deadline, forks.told(2)
        time.sleep(0.002)
    time.sleep(chance.random() * (0.05 if more else 1.0))
    for pid in chance.sample(ranks, 2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(chance.choice([0, 0.02, 0.2]))
    codes = forks.wait()
    assert set(codes) <= {0, 1, -signal.SIGKILL}, f"{codes} {forks.told(2)}"
    return int(-signal.SIGKILL in codes)


def exact(folder: Path) -> list[tuple[Any, ...]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in steps(folder)]


def lines(folder: Path) -> list[bytes]:
    path = folder / "metrics.jsonl"
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.is_file() else []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rows_of(folder / "out", TEXT, "one", "train.steps=2", *saving(folder / "checkpoints", every=2))
    return folder / "checkpoints"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The checkpoint of two steps, for a test of its own."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def resumed(copy: Path, *words: str) -> tuple[int, str]:
    code, _, err = run([TEXT, *QUICK, f"checkpoint.dir={copy}", f"output={copy / 'out'}", *words])[0]
    assert "Traceback" not in err
    return code, err


@pytest.mark.full
def test_a_hostile_checkpoint_runs_no_code(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    bomb = pickle.dumps(Called(os.mkdir, str(marker)))
    (copy / "step_00000002" / ".metadata").write_bytes(bomb)
    assert resumed(copy)[0] == 0, "the library's own index is never read"
    shutil.rmtree(copy / "out")
    (copy / ".finished").unlink()  # else a run that ended has nothing left to read
    # The stretch of the file that holds a tensor holds a pickle that runs code.
    stretch = {"start": 0, "length": len(bomb)}
    change_index(copy, lambda i: [piece.update(stretch) for t in i["tensors"].values() for piece in t["pieces"]])
    (copy / "step_00000002" / "__0_0.distcp").write_bytes(bomb)
    code, err = resumed(copy)
    assert (code, "cannot be read" in err) == (2, True), err
    assert not marker.exists()


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "step_00000002" / "checkpoint.json"
    index = json.loads(path.read_text())
    del index["sha256"]
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i: i["tensors"]["model.norm.weight"]["pieces"][0].update(offsets=[60]), "stick out"),
        (lambda i: i["tensors"].pop("model.norm.weight"), "lacks 1 tensors"),
        (lambda i: i["model"].update(num_layers=8), "another model: num_layers 8 where this run has 4"),
    ],
)
@pytest.mark.sample("<lambda>-stick out")
def test_a_damaged_index_is_refused(change: Any, expected: str, copy: Path) -> None:
    change_index(copy, change)
    code, err = resumed(copy)
    assert (code, expected in err) == (2, True), err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("seed=7", "seed 1234, this run has 7; set seed back"),
        ("data.seq_len=32", "data.seq_len 64, this run has 32; set data.seq_len back"),
        ("data.kind=mock", "data.kind text, this run has mock; set data.kind back"),
        ("data.path={text}", "data.path null, this run has other.txt; set data.path back"),
        ("data.pack=false", "data.pack true, this run has false; set data.pack back"),
    ],
)
def test_other_data_is_refused(word: str, said: str, copy: Path, forks: Forks, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Another text, of a few words.\n\n" * 50)
    words = [TEXT, *QUICK, f"checkpoint.dir={copy}", f"output={tmp_path / 'out'}", word.format(text=text)]
    assert forks.run(words) == [2]
    assert f"error: the checkpoint's data stream has {said.format(text=text)}, or choose another checkpoint.dir" in forks.text(0)
    assert "Traceback" not in forks.text(0)


def test_other_ways_to_read_the_same_data_resume(copy: Path, tmp_path: Path) -> None:
    words = ["data.num_workers=1", "data.pack_buffer=8", "train.steps=3", "optimizer.lr=1e-5", f"checkpoint.dir={copy}"]
    assert [r["step"] for r in rows_of(tmp_path / "out", TEXT, "fsdp2", *words)] == [3]


@pytest.mark.parametrize("gone", [("stream",), ("stream", "rows_per_step", "lanes")])
def test_a_checkpoint_that_does_not_say_its_stream_resumes(gone: tuple[str, ...], copy: Path, tmp_path: Path) -> None:
    change_index(copy, lambda index: [index["data"].pop(name) for name in gone])
    rows = rows_of(tmp_path / "out", TEXT, "one", "train.steps=3", f"checkpoint.dir={copy}")
    assert [r["step"] for r in rows] == [3]


def test_checkpoints_of_another_run_are_not_overwritten(copy: Path) -> None:
    code, err = resumed(copy, "checkpoint.resume=false", "checkpoint.every=2")
    assert (code, "checkpoint.resume is false" in err) == (2, True)
    assert [p.name for p in copy.glob("step_*")] == ["step_00000002"]


HOLDER = """
import sys
from pathlib import Path
from playbook import files as locks
assert not locks.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[int]:
    """Another process, of this number, uses the folder."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other.pid
        other.kill()


def test_two_runs_do_not_share_a_folder_of_checkpoints(copy: Path, forks: Forks, tmp_path: Path) -> None:
    line = [TEXT, *QUICK, f"checkpoint.dir={copy}", f"output={tmp_path / 'out'}"]
    with held(copy) as pid:
        assert forks.run([*line, "train.steps=3"]) == [2]
        (said,) = [x for x in forks.text(0).splitlines() if x.startswith(f"error: checkpoint.dir {copy} is in use by process {pid} on ")]
        assert "choose another folder" in said
        ended = [*line, "train.steps=2", f"checkpoint.export={tmp_path / 'weights'}"]
        assert forks.run(ended) == [0], "a run that has come to its end is only read"
        traced = [*line, "train.steps=2", "profile.kineto=true", "profile.steps=1"]
        assert forks.run(traced) == [2], "a run to be traced trains on"
    assert [p.name for p in copy.glob("step_*")] == ["step_00000002"]
    assert forks.run([*line, "train.steps=3"]) == [0]


def test_two_runs_do_not_share_an_output(forks: Forks, tmp_path: Path) -> None:
    """Their steps would stand among each other in one file, and each would end well."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("of the other\n")
    line = [TEXT, *QUICK, f"output={out}", "train.steps=1", "train.warmup_steps=0", "optimizer.warmup_steps=0"]
    with held(out) as pid:
        assert forks.run(line) == [2]
        (said,) = [x for x in forks.text(0).splitlines() if x.startswith(f"error: output {out} is in use by process {pid} on ")]
        assert "choose another folder" in said
        assert sorted(p.name for p in out.iterdir()) == [".lock", "metrics.jsonl"]
        assert (out / "metrics.jsonl").read_text() == "of the other\n"
    assert forks.run(line) == [0]


@pytest.mark.full
def test_a_checkpoint_is_not_taken_for_the_folder_of_all(copy: Path) -> None:
    code, err = resumed(copy / "step_00000002")
    assert (code, f"is itself a checkpoint; set it to the folder of all of them, {copy}" in err) == (2, True), err
    assert [p.name for p in copy.rglob("step_*")] == ["step_00000002"]


def test_a_folder_that_takes_no_checkpoints_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run([TEXT, *QUICK, *saving(tmp_path / "file/saved"), f"output={tmp_path / 'out'}"])[0]
    assert (code, "step 1 " in out) == (2, False)
    assert f"checkpoint.dir {tmp_path / 'file/saved'} cannot be written" in err
    assert err.count("\n") == 1
