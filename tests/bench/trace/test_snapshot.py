"""Memory snapshots of PyTorch: what holds the peak, whatever was freed since or allocated before."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import in_process
import pytest
import wild
from test_walls import shown

from playbook.errors import PlaybookError
from playbook_bench.trace import dumps

SEEDS = int(os.environ.get("PLAYBOOK_MUTATIONS", "300"))
GIB = 1 << 30
TORCH = "/env/lib/python3.11/site-packages/torch"


def stack(*lines: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": 10 + i, "name": name} for i, (file, name) in enumerate(lines)]


MODEL = stack((f"{TORCH}/nn/modules/linear.py", "__init__"), ("/home/me/model.py", "__init__"), ("/home/me/train.py", "main"))
ATTENTION = stack((f"{TORCH}/nn/functional.py", "sdpa"), ("/home/me/model.py", "forward"), (f"{TORCH}/nn/modules/module.py", "_call_impl"))
LOSS = stack((f"{TORCH}/nn/functional.py", "cross_entropy"), ("/home/me/train.py", "main"))
BACKWARD = stack((f"{TORCH}/autograd/graph.py", "_engine_run_backward"), (f"{TORCH}/_tensor.py", "backward"), ("/home/me/train.py", "main"))
ADAM = stack((f"{TORCH}/optim/adam.py", "_init_group"), (f"{TORCH}/optim/optimizer.py", "wrapper"), ("/home/me/train.py", "main"))


def event(action: str, address: int, gib: float, frames: list[Any] | None = None) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": int(gib * GIB), "stream": 0, "frames": frames or []}


def document() -> dict[str, Any]:
    """Parameters 2 GiB and 1 unrecorded before; optimizer 4; then 3 of activations and 1 of loss at the peak, of which 2.5 are gradients in the end."""
    events = [
        event("alloc", 1, 2, MODEL), event("alloc", 2, 4, ADAM),
        event("alloc", 3, 1.5, ATTENTION), event("alloc", 4, 1.5, ATTENTION), event("alloc", 5, 1, LOSS),
        event("free_requested", 5, 1), event("free_completed", 5, 1), event("free_requested", 3, 1.5), event("free_completed", 3, 1.5),
        event("alloc", 3, 2.0, BACKWARD), event("free_requested", 4, 1.5), event("alloc", 5, 0.5, BACKWARD), event("free_requested", 9, 0.25),
    ]  # fmt: skip
    states = {1: 2.0, 2: 4.0, 3: 2.0, 5: 0.5, 8: 0.75}
    blocks = [
        {"address": a, "size": int(g * GIB), "requested_size": int(g * GIB), "state": "active_allocated", "frames": []}
        for a, g in states.items()
    ]
    blocks.append({"address": 77, "size": 5 * GIB, "requested_size": 5 * GIB, "state": "inactive", "frames": []})
    return {"segments": [{"device": 0, "address": 1, "total_size": 16 * GIB, "blocks": blocks}], "device_traces": [events]}


def test_the_peak_is_found_and_its_parts_are_those_of_then() -> None:
    found = dumps.read_snapshot(document())
    assert {part: size / GIB for part, size in found.parts.items()} == {
        "optimizer": 4, "activations": 3, "parameters": 2, "loss": 1, "unrecorded": 1,
    }  # fmt: skip
    assert (found.peak / GIB, found.reserved / GIB, found.device) == (11, 16, 0)
    assert (
        found.sentence
        == "The peak is 11.00 GiB on GPU 0: optimizer 36% of it; most at one line, 4.00 GiB, by train.py:12 main (optimizer)."
    )
    sites = {(s.where, s.part): (s.size / GIB, s.count) for s in found.sites}
    assert sites["model.py:11 forward", "activations"] == (3, 2)


def test_without_a_history_the_end_counts_and_out_of_memory_is_said() -> None:
    plain = document()
    plain["device_traces"] = [[]]
    found = dumps.read_snapshot(plain)
    assert (found.peak / GIB, found.parts) == (9.25, {"unrecorded": int(9.25 * GIB)})
    assert "no history" in found.notes[0]
    plain = document()
    plain["device_traces"][0].append({"action": "oom", "size": 3 * GIB, "device_free": GIB // 2, "frames": []})
    assert dumps.read_snapshot(plain).notes == ("out of memory: 3.00 GiB were asked for, and the GPU had 0.50 left",)


def test_the_gpu_that_has_most_is_meant() -> None:
    two = document()
    two["segments"][0]["device"] = 1
    two["device_traces"] = [[event("alloc", 1, 1, MODEL)], two["device_traces"][0]]
    assert dumps.read_snapshot(two).device == 1


def test_the_commands_show_it_alone_and_beside_the_planners_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.pickle").write_bytes(pickle.dumps(document()))
    code, out, _ = shown(capsys, "--file", str(tmp_path / "m.pickle"))
    assert (code, out.startswith("The peak is 11.00 GiB")) == (0, True)
    code, out, _ = shown(capsys, "--file", str(tmp_path / "m.pickle"), "--json")
    assert json.loads(out)["parts"]["loss"] == GIB
    words = ["layout", "memory", "--model", "qwen3_30b_a3b", "--gpus", "64", "ep=8", "--snapshot", str(tmp_path / "m.pickle")]
    code, text, _ = in_process.run(capsys, *words)
    assert (code, "planned GiB" in text) == (0, True)
    found = json.loads(in_process.run(capsys, *words, "--json")[1])
    assert found["snapshot"]["planned"]["optimizer"] == found["stages"][0]["optimizer"]
    (tmp_path / "t.json").write_text("{}")
    assert in_process.run(capsys, *words[:-1], str(tmp_path / "t.json"))[0] == 2


def test_wild_snapshots_are_refused_or_add_up() -> None:
    rng = random.Random(3)
    for _ in range(SEEDS):
        changed = pickle.loads(pickle.dumps(document()))
        wild.plant(rng, changed)
        if not dumps.is_snapshot(changed):
            continue
        try:
            found = dumps.read_snapshot(changed)
        except PlaybookError:
            continue
        assert sum(found.parts.values()) == found.peak > 0
        assert found.sentence.isprintable()
