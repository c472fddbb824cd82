"""Epochs become steps, a file of one's own for evaluation: which samples a run reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data_sets
import pytest

from playbook.errors import ConfigError, DataError
from playbook_trainer.config.checks import feature_problems
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.loader import build_loader, check, with_steps
from playbook_trainer.data.rows import make_rows


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., str]:
    """Writes so many documents, each of its own letters, and gives their path."""

    def write(count: int, name: str = "train") -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"<{name} {i}>" + "x" * (7 * i % 40)}) + "\n" for i in range(count)))
        return str(path)

    return write


def config(path: str, **words: Any) -> TrainerConfig:
    return data_sets.config(
        "qwen3_tiny", **{"data__path": path, "data__seq_len": 64, "train__warmup_steps": 0, "optimizer__warmup_steps": 0, **words}
    )


def documents(given: TrainerConfig, split: Any, rows: int) -> set[str]:
    """What the first rows hold."""
    made = make_rows(given, split)
    return {bytes(d.tokens[:-1].tolist()).decode().rstrip("x") for k in range(rows) for d in made.row(k)}


def test_epochs_may_be_many_or_parts_of_one(texts: Callable[..., str]) -> None:
    path = texts(40)  # of which 36 are trained on
    steps = {n: with_steps(config(path, data__pack=False, train__epochs=n)).train.steps for n in (0.01, 0.5, 1, 2.5)}
    assert steps == {0.01: 1, 0.5: 5, 1: 9, 2.5: 23}  # of four rows
    assert with_steps(config(path)).train.steps == 20


def test_epochs_that_leave_no_step_to_time_are_refused(texts: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs 1 comes to 3 steps of 2 rows, and train\.warmup_steps 3 leaves none to time"):
        with_steps(config(texts(6), data__pack=False, train__epochs=1, train__warmup_steps=3, train__global_batch_size=2))


def test_an_evaluation_file_is_read_whole_and_none_of_the_training_data_is_held_out(texts: Callable[..., str]) -> None:
    one = config(texts(20), data__pack=False)
    assert len(documents(one, "train", 20)) == 18
    own = config(texts(20), data__pack=False, eval__every=1, eval__path=texts(5, "own"))
    assert documents(own, "train", 20) == {f"<train {i}>" for i in range(20)}
    assert documents(own, "eval", 5) == {f"<own {i}>" for i in range(5)}


@pytest.mark.parametrize(("content", "said"), [(None, r"eval\.path: no file or folder"), ("7\n", "own.jsonl:1"), ("", "own")])
def test_an_evaluation_file_that_cannot_be_read_is_refused_at_the_start(
    content: str | None, said: str, texts: Callable[..., str], tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    if content is not None:
        own.write_text(content)
    with pytest.raises(DataError, match=said):
        check(config(texts(20), eval__every=1, eval__path=str(own)))


def test_a_run_does_not_go_on_where_other_samples_are_held_out(texts: Callable[..., str]) -> None:
    held, own = config(texts(20)), config(texts(20), eval__every=1, eval__path=texts(5, "own"))
    for one, other in ((held, own), (own, held)):
        loader = build_loader(one, dp_rank=0, dp_size=1)
        next(iter(loader))
        state = loader.state()
        build_loader(one, dp_rank=0, dp_size=1, state=state)
        with pytest.raises(ConfigError, match=r"data stream has eval\.path"):
            build_loader(other, dp_rank=0, dp_size=1, state=state)
    old = {**build_loader(held, dp_rank=0, dp_size=1).state()}
    old["stream"] = {key: value for key, value in old["stream"].items() if key != "eval.path"}  # of a version without the key
    build_loader(held, dp_rank=0, dp_size=1, state=old)
    with pytest.raises(ConfigError, match=r"data stream has eval\.path null, this run has set"):
        build_loader(own, dp_rank=0, dp_size=1, state=old)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"train__epochs": 1, "data__kind": "mock"}, "train.epochs: mock data is made up as it is read: set train.steps"),
        ({"train__epochs": 1, "data__source": "generated"}, "train.epochs: generated data is made up as it is read: set train.steps"),
        ({"eval__path": "x", "eval__every": 1, "data__source": "generated"}, "eval.path: the training data is made up"),
        ({"eval__path": "x"}, "eval.path is read by evaluations, and there are none: set eval.every"),
        ({"checkpoint__keep_best": True, "checkpoint__dir": "x"}, "set eval.every and checkpoint.dir"),
        ({"checkpoint__keep_best": True, "eval__every": 1}, "set eval.every and checkpoint.dir"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_what_would_have_no_effect_is_refused(words: dict[str, Any], said: str, backend: str) -> None:
    problems = feature_problems(data_sets.config("qwen3_tiny", backend=backend, **words))
    assert any(said in problem for problem in problems), problems


def test_a_warm_up_longer_than_the_run_is_refused(texts: Callable[..., str]) -> None:
    said = r"optimizer\.warmup_steps 10 is longer than the 9 steps of the run"
    with pytest.raises(ConfigError, match=said):
        with_steps(config(texts(40), data__pack=False, train__epochs=1, optimizer__warmup_steps=10))
    short, enough = (feature_problems(data_sets.config("qwen3_tiny", train__steps=9, optimizer__warmup_steps=n)) for n in (10, 9))
    assert any("optimizer.warmup_steps 10 is longer than the 9 steps" in problem for problem in short)
    assert not any("optimizer.warmup_steps" in problem for problem in enough)
