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
FROZEN = [NARROW, "train.freeze=[vision]", "init.weights={weights}"]


def trained(forks: Forks, folder: Path, config: str, ranks: int, *words: str) -> list[tuple[int, float, float]]:
    line = [config, *QUICK, "train.receipt=false", *words, f"output={folder}", f"checkpoint.export={folder}-weights"]
    assert forks.run(line, ranks, free_port()) == [0] * ranks, forks.told(ranks)
    return [(row["step"], row["loss"], row["grad_norm"]) for row in steps(folder)]


def held(folder: Path) -> dict[str, float]:
    """Bytes of a rank: 2 + 2 + 2 a value for weight, remainder and gradient where whole weights take 4 + 4, and 4 for two narrow moments."""
    metrics = summary(folder)["metrics"]
    return {part: metrics[f"{part}_bytes_per_rank"] for part in ("param", "grad", "optimizer")}


def assert_same_weights(one: Path, other: Path, *, tower: bool = False) -> None:
    """Of two runs; and those that were trained, of the decoder or of the tower, are not merely what 16 bits hold, as all are at first."""
    first, second = (
        {k: t.view(torch.int32) for p in Path(f"{f}-weights").glob("*.safetensors") for k, t in load_file(p).items()} for f in (one, other)
    )
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    trained_ones = [t for name, t in first.items() if (".visual." in name) is tower]
    assert sum(bool((t & 0xFFFF).any()) for t in trained_ones) > len(trained_ones) / 2


@pytest.fixture(scope="module")
def weights(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights of each model that need 32 bits."""
    folders = {config: tmp_path_factory.mktemp("given") / "run" for config in (TEXT, VISION)}
    for config, folder in folders.items():
        trained(forks, folder, config, 1, "train.steps=2")
    return {config: Path(f"{folder}-weights") for config, folder in folders.items()}


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (TEXT, 1, ["parallel.reduce_dtype=fp32", "train.global_batch_size=1"]),
        (TEXT, 1, [NARROW, TIED, "train.global_batch_size=1"]),
        (TEXT, 2, ["parallel.ep=2"]),
        (TEXT, 2, ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=1", "init.weights={weights}"]),
        (TEXT, 2, ["parallel.pp=2", TIED]),
        (TEXT, 4, [NARROW, "parallel.dp_replicate=2", "parallel.ep=2"]),
        (VISION, 1, [NARROW]),
        (VISION, 1, [NARROW, "train.freeze=[language_model]", "train.recompute=full"]),
    ],
    ids=["one-in-float32", "one-tied", "ep", "tp-of-a-folder", "pp-tied", "hsdp-ep", "tower", "tower-alone"],
)
@pytest.mark.full
def test_halves_train_as_whole_weights_do(
    config: str, ranks: int, words: list[str], weights: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    words = ["train.steps=3", *(word.format(weights=weights[config]) for word in words)]
    whole, split = (trained(forks, tmp_path / m, config, ranks, *words, f"optimizer.master_weights={m}") for m in ("fp32", "remainder"))
    assert len(whole) == 3
    assert split == whole
    assert_same_weights(tmp_path / "remainder", tmp_path / "fp32", tower="train.freeze=[language_model]" in words)


@pytest.mark.parametrize(
    ("config", "ranks", "words", "resumed"),
    [
        (TEXT, 2, [NARROW, "train.global_batch_size=2"], [("fp32", "remainder"), ("remainder", "fp32")]),
        (TEXT, 2, [], [("remainder", "remainder")]),
        (VISION, 1, FROZEN, [("remainder", "remainder")]),
        (VISION, 2, FROZEN, [("fp32", "remainder"), ("remainder", "fp32")]),
    ],
    ids=["fsdp", "fsdp-wide", "frozen", "frozen-fsdp"],
)
@pytest.mark.full
def test_checkpoints_of_either_are_resumed_by_either(
    config: str, ranks: int, words: list[str], resumed: list[tuple[str, str]], weights: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    """Losses, norms, weights and bytes are those of either run that is not interrupted, and frozen weights come out as they went in."""
    words, masters, bytes_held = [word.format(weights=weights[config]) for word in words], ("fp32", "remainder"), {}
    rows = {}
    for master in masters:
        saving = [f"checkpoint.dir={tmp_path / master}-saved", "checkpoint.every=2", f"checkpoint.async_save={master == 'fp32'}"]
        more = [*words, *saving, "train.receipt=true", f"optimizer.master_weights={master}"]
        rows[master] = trained(forks, tmp_path / master, config, ranks, *more)
        bytes_held[master] = held(tmp_path / master)
    assert rows["remainder"] == rows["fp32"]
    assert_same_weights(tmp_path / "remainder", tmp_path / "fp32")
    assert bytes_held["remainder"]["param"] == bytes_held["fp32"]["param"] / 2, "frozen weights are held in 16 bits too"
    if words == [NARROW, "train.global_batch_size=2"]:
        count = bytes_held["fp32"]["param"] / 4
        assert bytes_held["fp32"] == {"param": 4 * count, "grad": 4 * count, "optimizer": 4 * count}
        assert bytes_held["remainder"] == {"param": 2 * count, "grad": 2 * count, "optimizer": 6 * count}
    for before, after in resumed:
        saved, out = tmp_path / f"{before}-{after}-saved", tmp_path / f"{before}-{after}"
        shutil.copytree(tmp_path / f"{before}-saved" / "step_00000002", saved / "step_00000002")
        more = [*words, f"checkpoint.dir={saved}", f"optimizer.master_weights={after}"]
        assert trained(forks, out, config, ranks, *more) == rows["fp32"][2:]
        assert_same_weights(out, tmp_path / "fp32")
        if config == VISION:
            given, second = (load_file(next(folder.glob("*.safetensors"))) for folder in (weights[VISION], Path(f"{out}-weights")))
            frozen = [name for name in given if ".visual.blocks." in name]
            assert any((given[name].view(torch.int32) & 0xFFFF).any() for name in frozen), "or bfloat16 would hold them"
            assert all(torch.equal(given[name], second[name]) for name in frozen)


@pytest.mark.full
def test_several_micro_batches_add_to_a_gradient_in_float32(forks: Forks, tmp_path: Path) -> None:
    trained(forks, tmp_path, TEXT, 2, NARROW, "train.receipt=true", "train.steps=2", "optimizer.master_weights=remainder")
    found = held(tmp_path)
    assert found == {"param": found["param"], "grad": 2 * found["param"], "optimizer": 3 * found["param"]}
