"""Hugging Face weights into the shards of several ranks and out again: every byte comes back, and no rank reads more than it holds."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
import torch
from layout_runs import assert_near
from ranks import SUPPORT, run, steps, summary, trained
from safetensors.torch import load_file

from playbook.errors import ConfigError
from playbook_trainer.huggingface import weights

CASES = {
    "moe-ep2": ("qwen3_moe_tiny", 2, ["parallel.ep=2"]),
    "moe-ep2-dp2": ("qwen3_moe_tiny", 4, ["parallel.ep=2"]),
    "tied-pp2-dp2": ("qwen3_tiny", 4, ["parallel.pp=2"]),
    "tied-tp2-dp2": ("qwen3_tiny", 4, ["parallel.tp=2"]),
    "folded-copies": ("qwen3_moe_tiny", 4, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=1", "parallel.dp_replicate=2"]),
    "vision-sequence": (
        "qwen3_vl_moe_tiny",
        4,
        ["parallel.tp=2", "parallel.ep=4", "parallel.etp=1", "parallel.sequence_parallel=true", "train.global_batch_size=4"],
    ),
    "hsdp": ("qwen3_moe_tiny", 4, ["parallel.dp_replicate=2"]),
    "vision-fsdp3": ("qwen3_vl_moe_tiny", 3, ["train.global_batch_size=3"]),
}


def folder_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    parity.written(parity.tiny(name), folder)
    return load_file(folder / weights.SINGLE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("moe-ep2")
def test_round_trip_over_ranks_is_exact(case: str, tmp_path: Path) -> None:
    name, ranks, words = CASES[case]
    given = folder_of(name, tmp_path / "in")
    line = [f"trainer/configs/{name}.yaml", str(tmp_path / "out"), f"init.weights={tmp_path / 'in'}", *words]
    results = run(line, ranks, script=SUPPORT / "ranks" / "weights_ranks.py", timeout=2800)
    assert [r[0] for r in results] == [0] * ranks, results[0][2] + results[-1][2]
    counts = [tuple(map(int, out.split()[-2:])) for _, out, _ in results]
    assert all(read == held for read, held in counts)
    whole = sum(t.nbytes for t in given.values())
    assert max(held for _, held in counts) < 0.6 * whole, "no rank holds the model"
    found = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    torch.testing.assert_close(found, given, rtol=0, atol=0)


@pytest.mark.full
def test_finetuning_starts_from_the_folder_in_every_layout(tmp_path: Path) -> None:
    folder_of("qwen3_tiny", tmp_path / "in")
    words = ["trainer/configs/qwen3_tiny.yaml", "train.steps=4", "train.warmup_steps=1", f"init.weights={tmp_path / 'in'}"]
    for out, ranks, more in (("one", 1, []), ("two", 2, ["parallel.pp=2"]), ("seed", 1, ["init.weights=null"])):
        trained(tmp_path / out, ranks, *words, *more)
    one, seed = (steps(tmp_path / out)[0]["loss"] for out in ("one", "seed"))
    assert abs(one - seed) > 1e-3, "from scratch is another start"
    assert_near(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("frozen", ["[vision, projector]", "[language_model]"])
@pytest.mark.full
def test_frozen_parts_come_out_as_they_went_in(frozen: str, tmp_path: Path) -> None:
    given = folder_of("qwen3_vl_tiny", tmp_path / "in")
    words = ["trainer/configs/qwen3_vl_tiny.yaml", "train.steps=4", "train.warmup_steps=1", f"init.weights={tmp_path / 'in'}"]
    words += ["data.num_workers=0", f"train.freeze={frozen}"]
    for out, ranks in (("one", 1), ("two", 2)):
        trained(tmp_path / out, ranks, *words, f"checkpoint.export={tmp_path / out}-weights")
    assert_near(tmp_path / "two", tmp_path / "one")
    found = load_file(tmp_path / "two-weights" / weights.SINGLE)
    moved = {name.removeprefix("model.").split(".")[0] for name in given if not torch.equal(found[name], given[name])}
    assert moved == ({"language_model"} if "vision" in frozen else {"visual"})
    counts = summary(tmp_path / "two")
    assert 0 < counts["trained_parameters"] < counts["num_parameters"]


@pytest.mark.parametrize("place", ["file/weights", "/proc/weights", "/proc/tty"])
def test_a_place_that_cannot_be_written_is_refused(place: str, tmp_path: Path) -> None:
    """The last is there, so that only writing to it tells; the first file may be written hours later."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"checkpoint.export {tmp_path / place} cannot be written"):
        weights.refuse_unwritable(tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_looking_at_a_place_for_weights_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in (tmp_path / "new" / "deep", tmp_path / "there"):
        weights.refuse_unwritable(place)
    assert [p.name for p in tmp_path.rglob("*")] == ["there"]
