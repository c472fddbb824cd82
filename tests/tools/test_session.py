"""Tasks on rented GPUs: side by side, within the time, and not twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import megatron_table
import pytest
import session
from session import TASKS, Task

from playbook.cards.load import read_cards
from playbook.paths import data_root

SLEEP = "python -c 'import os,sys,time; print(os.environ[\"CUDA_VISIBLE_DEVICES\"], flush=True); time.sleep({0}); sys.exit({1})'"


def sleeping(gpus: int, seconds: float, code: int = 0, least_s: int = 0) -> Task:
    return Task(gpus, SLEEP.format(seconds, code), least_s)


def test_tasks_share_the_gpus_and_are_not_done_twice(tmp_path: Path) -> None:
    refuted = replace(sleeping(1, 0.5, 1), settled=frozenset({0, 1, 4}))
    tasks = {"a": sleeping(2, 0.5), "b": refuted, "c": sleeping(1, 0.5, 3), "d": sleeping(4, 0.0)}
    became = session.run(["a", "b", "c", "d"], tasks, ["0", "1", "2", "3"], 600, tmp_path)
    assert became == {"a": "0", "b": "1", "c": "3", "d": "0"}
    used = {name: (tmp_path / f"{name}.log").read_text().strip() for name in tasks}
    assert used == {"a": "0,1", "b": "2", "c": "3", "d": "0,1,2,3"}
    # What time had cut goes on; what is settled, refuted or not, is left alone.
    assert session.run(["a", "b", "c"], tasks, ["0", "1"], 600, tmp_path) == {"a": "done before", "b": "done before", "c": "3"}


@pytest.mark.full
def test_time_ends_a_task_and_keeps_others_from_beginning(tmp_path: Path) -> None:
    tasks = {"long": sleeping(1, 60), "late": sleeping(1, 0, least_s=30), "wide": sleeping(2, 0)}
    became = session.run(["long", "late", "wide"], tasks, ["0"], 2, tmp_path)
    assert became == {"long": "ended at its limit", "late": "left out", "wide": "left out"}
    assert not list(tmp_path.glob("*.done"))


def test_ranks_that_share_a_gpu_fill_no_table_but_that_of_losses(tmp_path: Path) -> None:
    said = 'python -c \'import os; print(os.environ.get("PLAYBOOK_NODES"), os.environ.get("PLAYBOOK_PARITY"))\''
    names = ("shared-torch", "shared-hundred", "hundred")
    tasks = {name: replace(TASKS[name], command=said, least_s=0, gpus=1) for name in names}
    session.run(names, tasks, ["0"], 600, tmp_path)
    folder = str(tmp_path / "parity")
    assert [(tmp_path / f"{name}.log").read_text().split() for name in names] == [["4", "None"], ["4", folder], ["None", folder]]


def test_an_unknown_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert session.main(["nothing", "--out", str(tmp_path / "s")]) == 2
    assert "no task nothing" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_series_that_time_has_cut_and_a_tool_that_broke_are_done_again() -> None:
    assert not TASKS["graphs"].settled, "one verdict of many, and time is up: both end with 0 or 1"
    assert 1 not in TASKS["bare"].settled | TASKS["table"].settled, "a traceback"
    assert megatron_table.LEFT_OUT not in TASKS["bare"].settled | TASKS["table"].settled


def test_tasks_name_claims_and_files_that_exist() -> None:
    cards = {e.card.id: {c.id for c in e.card.claims} for e in read_cards([data_root("cards")]).loaded}
    for name, task in TASKS.items():
        words = task.command.format(left=1, out="out", name=name).split()
        for word in words:
            if word.startswith("tests/"):
                assert (session.ROOT / word).is_file(), word
        if "confirm" in words:
            for card, claim in (w.split("/") for w in words[words.index("confirm") + 1 : words.index("--untested")]):
                assert claim in cards[card]
