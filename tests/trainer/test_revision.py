"""Which paths a run takes, which verdicts age with each, and that every source file belongs to one or is neutral."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from stored import long_run

from playbook.paths import data_root
from playbook.records.evidence import FIRST_REVISION, Evidence, noise_key
from playbook.records.machine import revision_changes
from playbook.records.read import Present, Record, read
from playbook_trainer import __main__ as program
from playbook_trainer import loop, revision
from playbook_trainer.config import tree

PACKAGE = Path(loop.__file__).parent
BEGAN = dict.fromkeys(revision.PATHS, FIRST_REVISION) | {"torch": 4, "megatron": 3}
"""The revisions when paths came in; before, there was one number for each backend."""
MOE, VISION = "qwen3_moe_tiny.yaml", "qwen3_vl_tiny.yaml"
ONE_RANK = {
    "checkpoint_files.py:identity",
    "checkpoint_files.py:is_finished",
    "checkpoint_files.py:mark_finished",
    "checkpoint_files.py:newest",
    "data/images.py:ImageDecoder.__init__",
    "data/images.py:ImageDecoder.take_counts",
    "torch/checkpoint.py:Checkpointer.__init__",
    "torch/checkpoint.py:Checkpointer.restore",
    "torch/checkpoint.py:Checkpointer.wait",
    "torch/checkpoint.py:place",
    "torch/model/balance.py:attach",
    "torch/model/fp8.py:products",
    "torch/model/recompute.py:recomputed",
    "torch/parallel/comm.py:all_gather",
    "torch/parallel/comm.py:copy_to",
    "torch/parallel/comm.py:gather_plain",
    "torch/parallel/comm.py:reduce_from",
    "torch/parallel/comm.py:reduce_scatter",
    "torch/parallel/context.py:split",
}
"""Functions that are called where the path of their file is not taken, and do nothing then."""


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [r for r in read([data_root("results")]) if isinstance(r.content, Evidence) and r.backends and r.runs]


def dumped(file: str, **keys: Any) -> dict[str, Any]:
    return tree.dump(tree.load(data_root("configs") / file, {k.replace("__", "."): v for k, v in keys.items()}))


def ages(record: Record, numbers: dict[str, int]) -> str:
    return "; ".join(revision_changes(record.content.measured, numbers, revision.paths))


def as_run(record: Record) -> dict[str, int]:
    """Revisions at which nothing has moved since the record; of two numbers of one backend, the larger."""
    ran = {run.config_sha: run.performance_revision or 0 for run in record.runs}
    configs = record.content.measured.configs
    return BEGAN | {b: max(n for sha, n in ran.items() if configs[sha].get("backend", "torch") == b) for b in record.backends}


def test_every_source_file_belongs_to_a_path_or_is_neutral() -> None:
    files = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}
    belong = {name for path in revision.PATHS.values() for name in path.files}
    assert {f for f in files if not f.startswith((*belong, *revision.NEUTRAL))} == set(), "a new file: add it to a path, or to NEUTRAL"
    assert {name for name in (*belong, *revision.NEUTRAL) if not any(f.startswith(name) for f in files)} == set(), "no such file any more"
    assert {f for f in files if f.startswith(tuple(belong)) and f.startswith(revision.NEUTRAL)} == set()
    assert all(not p.read_text().partition('"""\n')[2].strip() for p in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize(
    ("config", "ranks", "taken"),
    [
        (dumped(MOE), 1, {"data", "torch.experts"}),
        (dumped(MOE, model="qwen3_tiny", data__kind="mock"), 1, set()),
        (dumped(VISION), 1, {"data", "images", "torch.vision"}),
        (dumped(MOE), 4, {"data", "torch.experts", "torch.fsdp"}),
        (dumped(MOE, parallel__ep=4), 4, {"data", "torch.experts", "torch.fsdp", "torch.ep"}),
        (dumped(MOE, parallel__cp=2), 2, {"data", "torch.experts", "torch.fsdp", "torch.cp"}),
        (dumped(MOE, parallel__tp=2), 2, {"data", "torch.experts", "torch.tp"}),
        (dumped(MOE, parallel__tp=2, parallel__etp=1), 2, {"data", "torch.experts", "torch.tp", "torch.fsdp"}),
        (dumped(MOE, parallel__etp=1), 1, {"data", "torch.experts"}),
        (dumped(MOE, parallel__etp=2), 2, {"data", "torch.experts", "torch.tp", "torch.fsdp"}),
        (dumped(MOE, parallel__pp=2), 2, {"data", "torch.experts", "torch.pp"}),
        (dumped(MOE, checkpoint__dir="c", offload__activations=True), 1, {"data", "torch.experts", "checkpoint", "torch.offload"}),
        (dumped(MOE, train__recompute="full", train__compile__loss=True), 1, {"data", "torch.experts", "torch.recompute", "torch.compile"}),
        (dumped(MOE, precision__fp8="rowwise", train__cuda_graphs=["attn"]), 1, {"data", "torch.experts", "torch.fp8", "torch.graphs"}),
        (dumped(MOE, backend="megatron"), 1, {"data", "megatron", "megatron.experts"}),
        (dumped(VISION, backend="megatron", parallel__pp=2), 2, {"data", "images", "megatron", "megatron.vision", "megatron.parallel"}),
        ({}, 1, {"data"}),
        ({"parallel": {"ep": [4], "tp": None, "pp": "x"}, "model": 7, "data": {"kind": 1}, "megatron": {"aux_loss_coeff": 1}, "moe": "x"}, 1, {"data"}),
    ],
)  # fmt: skip
def test_the_paths_of_a_run(config: dict[str, Any], ranks: int, taken: set[str]) -> None:
    """The last is nothing that our trainer has written."""
    backend = {"megatron"} & taken or {"torch"}
    assert set(revision.paths(config, ranks)) == {"loop"} | backend | taken
    assert set(revision.beside_backend(config, ranks)) == {"loop"} | taken - backend


def test_records_from_before_paths_are_as_stale_as_by_the_number_of_their_backend(records: list[Record]) -> None:
    for record in records:
        configs = record.content.measured.configs
        numbers = {(configs[run.config_sha].get("backend", "torch"), run.performance_revision) for run in record.runs}
        moved = any(n not in (None, BEGAN[backend]) for backend, n in numbers)
        assert bool(ages(record, BEGAN)) == moved, record.id


@pytest.mark.parametrize(
    ("path", "took"),
    [
        ("torch.ep", lambda c, ranks: c["backend"] == "torch" and c["parallel"]["ep"] > 1),
        ("torch.fsdp", lambda c, ranks: c["backend"] == "torch" and ranks > c["parallel"]["tp"] * c["parallel"]["pp"]),
        ("torch.cp", lambda c, ranks: c["backend"] == "torch" and c["parallel"]["cp"] > 1),
        ("torch.vision", lambda c, ranks: c["backend"] == "torch" and c["model"]["vision"]),
        ("megatron.parallel", lambda c, ranks: c["backend"] == "megatron" and ranks > 1),
        ("loop", lambda c, ranks: True),
    ],
)
def test_a_raised_path_ages_the_records_that_took_it_and_no_others(records: list[Record], path: str, took: Any) -> None:
    aged: dict[bool, list[Record]] = {True: [], False: []}
    for record in records:
        if ages(record, as_run(record)):
            continue  # runs of several revisions are stale at any
        configs = record.content.measured.configs
        ran = any(took(configs[run.config_sha], run.ranks) for run in record.runs if run.performance_revision is not None)
        why = ages(record, as_run(record) | {path: 2})
        assert why == (f"the trainer's path {path} is at performance revision 2, the runs at 1" if ran else ""), record.id
        aged[ran].append(record)
    assert aged[True]
    if path != "loop":
        one_gpu = [r for r in aged[False] if r.gpus == 1 and r.backends == ("torch",) and max(run.ranks for run in r.runs) == 1]
        assert len(one_gpu) > 20
    if path == "torch.ep":
        assert any(r.gpus == 4 for r in aged[True])


def test_readers_are_told_which_path_has_moved() -> None:
    numbers = BEGAN | {"torch": 1, "torch.ep": 2}
    found = read([data_root("results")], present=Present(numbers, paths=revision.paths))
    said = {r.about: r.stale(date(2026, 1, 1), None) or "" for r in found if r.gpus == 4 and r.backends == ("torch",)}
    assert {about: "path torch.ep is at performance revision 2" in why for about, why in said.items()} == {
        "W9": True,
        "W9.m": True,
        "V1": False,
    }


@pytest.mark.parametrize(
    ("recorded", "today", "stale"),
    [
        ({}, {"loop": 1}, False),
        ({}, {"loop": 2}, True),
        ({"loop": 2}, {"loop": 2}, False),
        ({"loop": 2, "torch.ep": 3}, {"loop": 2, "torch.ep": 4}, True),  # as of a command, whose configuration says nothing about EP
        ({"loop": 2, "gone": 3}, {"loop": 2}, False),
    ],
)
def test_a_record_keeps_the_revisions_of_its_paths(
    records: list[Record], recorded: dict[str, int], today: dict[str, int], stale: bool
) -> None:
    measured = records[0].content.measured
    run = long_run().model_copy(update={"revisions": recorded})
    own = measured.model_copy(update={"runs": [run], "configs": {run.config_sha: dumped(MOE)}})
    assert bool(revision_changes(own, {"torch": 1} | today, revision.paths)) == stale


def test_a_stored_noise_holds_until_one_of_its_paths_moves() -> None:
    before = long_run()
    first, second = (before.model_copy(update={"revisions": {"loop": 1, "torch.ep": n}}) for n in (1, 2))
    assert noise_key(before, {}) == noise_key(first, {}) != noise_key(second, {})


@pytest.mark.parametrize(("file", "words"), [(MOE, []), (VISION, ["train.recompute=full"])])
@pytest.mark.full
def test_a_run_executes_nothing_of_a_path_that_it_does_not_take(file: str, words: list[str], tmp_path: Path) -> None:
    executed: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(f"{PACKAGE}/"):
            executed.add(f"{code.co_filename.removeprefix(f'{PACKAGE}/')}:{code.co_qualname.partition('.<locals>')[0]}")

    sys.setprofile(note)
    try:
        code = program.main([f"trainer/configs/{file}", "train.steps=3", "train.warmup_steps=1", f"output={tmp_path / 'out'}", *words])
    finally:
        sys.setprofile(None)
    assert code == 0
    taken = revision.paths(dumped(file, **dict(word.replace(".", "__").split("=") for word in words)), 1)
    files = tuple(name for path in taken for name in revision.PATHS[path].files)
    assert {f for f in executed if not f.startswith((*files, *revision.NEUTRAL))} <= ONE_RANK
    assert {"loop.py", "torch/engine.py", "torch/model/decoder.py", "torch/optimizer.py"} <= {f.partition(":")[0] for f in executed}
