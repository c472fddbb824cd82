"""Hangs by PyTorch's flight recorder: which rank, which collective; and pickles that would do more than hold data."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wild
from test_walls import answer, shown

from playbook.errors import PlaybookError
from playbook_bench.trace import containers
from playbook_bench.trace import dumps as recorded

SEEDS = int(os.environ.get("PLAYBOOK_MUTATIONS", "300"))
WORLD = 4


def entry(number: int, group: str = "default_pg", name: str = "nccl:all_reduce", state: str = "completed", **other: Any) -> dict[str, Any]:
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/env/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "train", "filename": "/home/me/train.py", "line": 40 + number},
        ],
        "process_group": ("0" if group == "default_pg" else "7", group), "collective_seq_id": number, "p2p_seq_id": 0,
        "profiling_name": name, "input_sizes": [[4]], "input_dtypes": ["Float"], "state": state, "retired": state == "completed", "is_p2p": False,
        **other,
    }  # fmt: skip


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}, "entries": list(entries)}


def hang(*dumps: dict[str, Any]) -> recorded.Hang:
    return recorded.hang([(f"/tmp/nccl_trace_rank_{rank}", each) for rank, each in enumerate(dumps)])


WAITS = (entry(1), entry(2), entry(3, state="started"))


def test_the_rank_that_never_came_is_named() -> None:
    found = hang(dump(*WAITS), dump(*WAITS), dump(entry(1), entry(2)), dump(*WAITS))
    assert (found.cause, found.collective, found.ranks, found.waiting) == ("missing", "nccl:all_reduce 3 of default_pg #0", (2,), (0, 1, 3))
    assert found.sentence == (
        "Rank 2 never came to nccl:all_reduce 3 of default_pg #0, in which ranks 0, 1, 3 wait; "
        "the last call of rank 2 is nccl:all_reduce 2 of default_pg #0 at train.py:42 train."
    )
    assert found.standings[0].where == "train.py:43 train"


def test_a_rank_without_a_dump_is_missing() -> None:
    found = hang(dump(*WAITS), dump(*WAITS), dump(*WAITS))
    assert (found.cause, found.ranks) == ("missing", (3,))
    assert found.sentence.endswith("rank 3 left no dump.")


def test_a_rank_that_waits_elsewhere_is_not_the_one_to_look_at() -> None:
    """Rank 1 is missing from the default group because it waits for rank 3 in its own group; rank 3 waits nowhere."""
    tp = [entry(8, "TP", state="completed"), entry(9, "TP", state="started")]
    found = hang(dump(*WAITS), dump(*WAITS[:2], *tp), dump(*WAITS), dump(*WAITS[:2], tp[0]))
    assert (found.cause, found.ranks, found.waiting) == ("missing", (3,), (1,))
    assert found.collective == "nccl:all_reduce 9 of TP #7"


def test_ranks_that_call_different_things_come_first() -> None:
    other = entry(3, name="nccl:all_gather", state="started")
    found = hang(dump(*WAITS), dump(*WAITS[:2], other), dump(*WAITS), dump(*WAITS))
    assert (found.cause, found.ranks) == ("different", (1,))
    assert found.sentence.startswith(
        "Rank 1 calls nccl:all_gather [[4]] ['Float'] as collective 3 of default_pg #0, where ranks 0, 2, 3 call nccl:all_red"
    )
    sizes = entry(3, state="started", input_sizes=[[8]])
    assert hang(dump(*WAITS), dump(*WAITS[:2], sizes), dump(*WAITS), dump(*WAITS)).cause == "different"


def test_a_rank_whose_gpu_has_not_started_and_one_that_hangs_inside() -> None:
    queued = (entry(1), entry(2), entry(3, state="scheduled"))
    found = hang(dump(*WAITS), dump(*WAITS), dump(*queued), dump(*WAITS))
    assert (found.cause, found.ranks) == ("not started", (2,))
    found = hang(*[dump(*WAITS)] * WORLD)
    assert (found.cause, found.ranks) == ("inside", (0, 1, 2, 3))
    assert hang(*[dump(*WAITS[:2])] * WORLD).cause == "none"


def test_a_buffer_that_dropped_its_first_entries_misses_nothing() -> None:
    found = hang(dump(entry(2), WAITS[2]), dump(WAITS[2]), dump(entry(1), entry(2)), dump(*WAITS))
    assert (found.cause, found.ranks) == ("missing", (2,))


def test_sends_that_no_peer_answers_are_named() -> None:
    send = entry(0, name="nccl:recv 1<-0", state="started", is_p2p=True, p2p_seq_id=5)
    found = hang(dump(*WAITS[:2]), dump(*WAITS[:2], send), dump(*WAITS[:2]), dump(*WAITS[:2]))
    assert (found.cause, found.ranks) == ("peers", (1,))
    assert "rank 1 in nccl:recv 1<-0 5" in found.sentence


@pytest.mark.parametrize("protocol", [2, 4, "json"])
def test_the_command_reads_a_folder_of_dumps(protocol: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(WORLD):
        document = dump(*WAITS[: 2 if rank == 2 else 3])
        data = json.dumps(document).encode() if protocol == "json" else pickle.dumps(document, protocol)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    code, out, _ = shown(capsys, "--file", str(tmp_path))
    assert (code, out.startswith("Rank 2 never came to nccl:all_reduce 3")) == (0, True)
    code, out, _ = shown(capsys, "--file", str(tmp_path), "--json")
    assert json.loads(out)["ranks"] == [2]


RAN = Path("/tmp/playbook-was-run")
HOSTILE = {
    "a call": pickle.dumps({"version": "2", "pg_config": {}, "entries": [wild.Called(os.mkdir, str(RAN))]}),
    "a class": b"\x80\x02cbuiltins\neval\n(S'1'\ntR.",
    "a table of 32 GB": b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "a byte array of 8 EB": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
    "an extension": b"\x80\x02\x82\x01.",
    "something outside": b"\x80\x02K\x01Q.",
    "nothing": b"\x80\x02",
    "no dictionary": pickle.dumps([1]),
    "no entries": pickle.dumps({"version": "2", "pg_config": {}, "entries": 5}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pickle_that_is_more_than_data_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dump_0").write_bytes(HOSTILE[kind])
    code, _, err = shown(capsys, "--file", str(tmp_path / "dump_0"))
    assert (code, "Traceback" in err) == (2, False)
    assert not RAN.exists()


def test_wild_dumps_are_refused_or_answered(tmp_path: Path) -> None:
    rng = random.Random(7)
    for _ in range(SEEDS):
        documents = [json.loads(json.dumps(dump(*WAITS[: rng.choice([2, 3])]))) for _ in range(WORLD)]
        wild.plant(rng, documents)
        try:
            found = hang(*(each for each in documents if recorded.is_dump(each)))
        except PlaybookError:
            continue
        assert found.sentence.isprintable()
        json.dumps([s.last for s in found.standings])


def test_mutated_pickles_are_refused_or_plain(tmp_path: Path) -> None:
    data, rng = pickle.dumps(dump(*WAITS)), random.Random(11)
    for _ in range(SEEDS):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 4])):
            changed[rng.randrange(2, len(changed))] = rng.randrange(256)
        (tmp_path / "dump").write_bytes(changed)
        for stream in containers.files(tmp_path / "dump"):
            try:
                document = containers.load_pickle(stream)
                if recorded.is_dump(document):
                    recorded.hang([("dump_0", document)])
            except PlaybookError:
                pass


SCRIPT = """
import json, os, sys, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
x = torch.ones(4)
dist.all_reduce(x)
if rank == 0:
    dist.all_reduce(x, async_op=True)
while not json.loads(_dump_fr_trace_json())["entries"][0]["retired"]:  # a thread of its own says so, a moment after
    time.sleep(0.01)
for name, made in (("pickles", _dump_fr_trace()), ("texts", _dump_fr_trace_json())):
    os.makedirs(f"{folder}/{name}", exist_ok=True)
    open(f"{folder}/{name}/trace_rank_{rank}", "wb").write(made if isinstance(made, bytes) else made.encode())
open(f"{folder}/done{rank}", "w").close()
while not all(os.path.exists(f"{folder}/done{r}") for r in (0, 1)):
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.full
def test_dumps_that_torch_wrote_name_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hangs.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "hangs.py")]
    started = [subprocess.Popen([*words, str(r), str(tmp_path)], env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}) for r in (0, 1)]
    assert [each.wait(1200) for each in started] == [0, 0]
    for name in ("pickles", "texts"):
        _, found = answer(capsys, "--file", str(tmp_path / name))
        assert (found["cause"], found["ranks"], found["collective"]) == ("missing", [1], "gloo:all_reduce 2 of default_pg #0")
    assert found["standings"][1]["last"] == "gloo:all_reduce 1 of default_pg #0"
