"""Master weights in two halves: every loss, norm and weight is that of whole ones, to the last bit, whatever the layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from forking import Forks
from ranks import free_port, steps, summary
from safetensors.torch import load_file

TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
VISION = "trainer/configs/qwen3_vl_moe_tiny.yaml"
QUICK = ["train.dtype=bf16", "parallel.reduce_dtype=bf16", "train.steps=4", "train.warmup_steps=1", "data.seq_len=64", "model.num_layers=2"]
NARROW = "optimizer.moments_dtype=bf16"
TIED = "model.tie_word_embeddings=true"


def trained(forks: Forks, folder: Path, config: str, ranks: int, *words: str) -> list[tuple[int, float, float]]:
    line = [config, *QUICK, "train.receipt=false", *words, f"output={folder}", f"checkpoint.export={folder}-weights"]
    assert forks.run(line, ranks, free_port()) == [0] * ranks, forks.told(ranks)
    return [(row["step"], row["loss"], row["grad_norm"]) for row in steps(folder)]


def assert_same_weights(one: Path, other: Path, *, tower: bool = False) -> None:
    """Of two runs; and those that were trained, of the decoder or of the tower, are not merely what 16 bits hold, as all are at first."""
    first, second = (
        {k: t.view(torch.int32) for p in Path(f"{f}-weights").glob("*.safetensors") for k, t in load_file(p).items()} for f in (one, other)
    )
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    trained_ones = [t for name, t in first.items() if (".visual." in name) is tower]
    assert sum(bool((t & 0xFFFF).any()) for t in trained_ones) > len(trained_ones) / 2


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (TEXT, 1, []),
        (TEXT, 1, ["parallel.reduce_dtype=fp32", "train.global_batch_size=1"]),
        (TEXT, 1, [NARROW, TIED, "train.global_batch_size=1"]),
        (TEXT, 2, [NARROW, "train.global_batch_size=2"]),
        (TEXT, 2, ["parallel.ep=2"]),
        (TEXT, 2, ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=1"]),
        (TEXT, 2, [NARROW, "parallel.cp=2"]),
        (TEXT, 2, ["parallel.pp=2", TIED]),
        (TEXT, 4, [NARROW, "parallel.dp_replicate=2", "parallel.ep=2"]),
        (VISION, 1, [NARROW]),
        (VISION, 1, [NARROW, "train.freeze=[language_model]", "train.recompute=full"]),
        (VISION, 1, [NARROW, "train.freeze=[vision]", "train.steps=3"]),
        (VISION, 2, [NARROW, "train.freeze=[vision]", "train.steps=3"]),
    ],
    ids=[
        "one",
        "one-in-float32",
        "one-tied",
        "fsdp",
        "ep",
        "tp",
        "cp",
        "pp-tied",
        "hsdp-ep",
        "tower",
        "tower-alone",
        "one-frozen-tower",
        "frozen-tower",
    ],
)
@pytest.mark.full
def test_halves_train_as_whole_weights_do(config: str, ranks: int, words: list[str], forks: Forks, tmp_path: Path) -> None:
    whole, split = (trained(forks, tmp_path / m, config, ranks, *words, f"optimizer.master_weights={m}") for m in ("fp32", "remainder"))
    assert len(whole) >= 3
    assert split == whole
    assert_same_weights(tmp_path / "remainder", tmp_path / "fp32", tower="train.freeze=[language_model]" in words)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [("fp32", "remainder", [NARROW]), ("remainder", "fp32", [NARROW, "checkpoint.async_save=false"]), ("remainder", "remainder", [])],
    ids=["to-split", "to-whole", "remainder"],
)
@pytest.mark.full
def test_checkpoints_of_either_are_resumed_by_either(before: str, after: str, words: list[str], forks: Forks, tmp_path: Path) -> None:
    """Losses, norms and weights after that are those of a run of whole weights that was not interrupted."""
    rows = trained(forks, tmp_path / "all", TEXT, 2, *words, "optimizer.master_weights=fp32")
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2"]
    trained(forks, tmp_path / "first", TEXT, 2, *words, *saving, f"optimizer.master_weights={before}")
    shutil.rmtree(tmp_path / "saved" / "step_00000004")
    assert trained(forks, tmp_path / "second", TEXT, 2, *words, *saving, f"optimizer.master_weights={after}") == rows[2:]
    assert_same_weights(tmp_path / "second", tmp_path / "all")


@pytest.mark.full
def test_weights_of_a_folder_are_kept_whole(forks: Forks, tmp_path: Path) -> None:
    trained(forks, tmp_path / "first", TEXT, 1)
    more = [f"init.weights={tmp_path / 'first'}-weights", "parallel.tp=2", "seed=7"]
    whole, split = (trained(forks, tmp_path / m, TEXT, 2, *more, f"optimizer.master_weights={m}") for m in ("fp32", "remainder"))
    assert split == whole
    assert_same_weights(tmp_path / "remainder", tmp_path / "fp32")


@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [(1, "remainder", "remainder"), (2, "remainder", "fp32"), (2, "fp32", "remainder")],
    ids=["remainder", "to-whole", "to-split"],
)
@pytest.mark.full
def test_frozen_weights_that_need_32_bits_come_out_as_they_went_in(
    ranks: int, before: str, after: str, forks: Forks, tmp_path: Path
) -> None:
    """Through a checkpoint, too. They are computed with in 16 bits whichever way they are held."""
    trained(forks, tmp_path / "given", VISION, 1)
    words = [NARROW, "train.freeze=[vision]", f"init.weights={tmp_path / 'given'}-weights"]
    rows = trained(forks, tmp_path / "whole", VISION, ranks, *words, "optimizer.master_weights=fp32")
    saving = [f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=2"]
    trained(forks, tmp_path / "first", VISION, ranks, *words, *saving, f"optimizer.master_weights={before}")
    shutil.rmtree(tmp_path / "saved" / "step_00000004")
    assert trained(forks, tmp_path / "second", VISION, ranks, *words, *saving, f"optimizer.master_weights={after}") == rows[2:]
    assert_same_weights(tmp_path / "second", tmp_path / "whole")
    given, second = (load_file(next(Path(f"{tmp_path / name}-weights").glob("*.safetensors"))) for name in ("given", "second"))
    frozen = [name for name in given if ".visual.blocks." in name]
    assert any((given[name].view(torch.int32) & 0xFFFF).any() for name in frozen), "or bfloat16 would hold them"
    assert all(torch.equal(given[name], second[name]) for name in frozen)


@pytest.mark.full
def test_bytes_of_halves(forks: Forks, tmp_path: Path) -> None:
    """2 + 2 + 2 for weight, remainder and gradient where whole weights take 4 + 4; 4 for a gradient that several micro-batches add to."""
    held = {}
    for name, words in {"fp32": [], "remainder": [], "several": ["train.global_batch_size=4"]}.items():
        master = "fp32" if name == "fp32" else "remainder"
        trained(
            forks,
            tmp_path / name,
            TEXT,
            2,
            "train.global_batch_size=2",
            NARROW,
            "train.receipt=true",
            *words,
            f"optimizer.master_weights={master}",
        )
        metrics = summary(tmp_path / name)["metrics"]
        held[name] = [metrics[f"{part}_bytes_per_rank"] / 2 for part in ("param", "grad", "optimizer")]
    count = held["fp32"][0] / 2
    assert held == {
        "fp32": [2 * count, 2 * count, 2 * count],
        "remainder": [count, count, 3 * count],
        "several": [count, 2 * count, 3 * count],
    }


@pytest.mark.full
def test_frozen_weights_are_held_in_16_bits_too(forks: Forks, tmp_path: Path) -> None:
    held = {}
    for master in ("fp32", "remainder"):
        words = [NARROW, "train.freeze=[vision]", "train.steps=2", "train.receipt=true", f"optimizer.master_weights={master}"]
        trained(forks, tmp_path / master, VISION, 1, *words)
        found = summary(tmp_path / master)
        held[master] = found["metrics"]["param_bytes_per_rank"] / found["num_parameters"]
    assert held == {"fp32": 4, "remainder": 2}
