"""Master weights in two halves: exact, updated as whole weights are; every loss, norm and weight of a run is that of whole ones, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import steps, summary, trained
from safetensors.torch import load_file
from torch import Tensor

from playbook_trainer.config.tree import OptimizerConfig
from playbook_trainer.torch import optimizer
from playbook_trainer.torch.optimizer import Shard, make


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def every_border() -> Tensor:
    """All upper halves of finite numbers and infinity, of both signs, with lower halves on both sides of where rounding turns, as float32."""
    high = torch.cat([torch.arange(0x7F80), torch.arange(0x8000, 0xFF80)])
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    found = torch.cat([((high << 16)[:, None] + low).flatten(), torch.tensor([0x7F800000, 0xFF800000])])
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int().view(torch.float32)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_halves_hold_every_finite_weight_and_the_upper_one_is_its_cast(moments):
    torch.manual_seed(0)
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 20,)).int().view(torch.float32)
    whole = torch.cat([every_border(), anything[~anything.isnan()]])
    second = torch.rand(whole.shape).to(moments)
    second[::3] = 0
    high, low, signed = torch.empty_like(whole, dtype=torch.bfloat16), torch.empty_like(whole, dtype=torch.int16), second.clone()
    optimizer.split(whole, high, low, signed)
    assert torch.equal(bits(high), bits(whole.bfloat16()))
    assert torch.equal(bits(optimizer.join(high, low, signed)), bits(whole))
    assert torch.equal(bits(signed.abs()), bits(second))
    ties = (bits(whole) & 0x1FFFF) == 0x8000
    assert torch.equal(signed.signbit(), ties)


def test_what_is_no_number_stays_none():
    found = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1]).int().view(torch.float32)
    high, low, second = found.bfloat16(), torch.empty(4, dtype=torch.int16), torch.ones(4)
    optimizer.split(found, high, low, second)
    assert high.isnan().all()
    assert optimizer.join(high, low, second).isnan().all()


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_an_update_of_halves_is_that_of_whole_weights(moments, monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", 128)
    torch.manual_seed(0)
    start = torch.randn(40, 50)
    start.view(-1)[:500] = every_border()[200_000:200_500]
    config = OptimizerConfig(lr=1e-2, moments_dtype=moments)
    params = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.bfloat16())]
    optimizers: list[Any] = []
    for param, master in zip(params, ("fp32", "remainder"), strict=True):
        optimizers.append(make([Shard("w", param, param, True, False)], config.model_copy(update={"master_weights": master})))
    whole, split = optimizers
    split.put(params[1], start)
    clip = torch.tensor(0.37)
    for _ in range(4):
        grad = torch.randn_like(start).bfloat16()
        params[0].grad, params[1].grad = grad.float() * clip, grad
        split.scale = clip
        whole.step()
        split.step()
        assert torch.equal(bits(split.whole(params[1])), bits(params[0].detach()))
        assert torch.equal(bits(params[1].detach()), bits(params[0].detach().bfloat16()))
        ours, theirs = split.state[params[1]], whole.state[params[0]]
        assert torch.equal(bits(ours["exp_avg"]), bits(theirs["exp_avg"]))
        assert torch.equal(bits(ours["exp_avg_sq"].abs()), bits(theirs["exp_avg_sq"]))
        assert ours["remainder"].dtype == torch.int16


TEXT = "trainer/configs/qwen3_moe_tiny.yaml"
VISION = "trainer/configs/qwen3_vl_moe_tiny.yaml"
QUICK = ["train.dtype=bf16", "parallel.reduce_dtype=bf16", "train.steps=4", "train.warmup_steps=1", "data.seq_len=64", "model.num_layers=2"]
NARROW = "optimizer.moments_dtype=bf16"
TIED = "model.tie_word_embeddings=true"
FROZEN = "train.freeze=[vision]"


def curve(folder: Path, config: str, ranks: int, *words: str) -> list[tuple[int, float, float]]:
    trained(folder, ranks, config, *QUICK, "train.receipt=false", *words, f"checkpoint.export={folder}-weights")
    return [(row["step"], row["loss"], row["grad_norm"]) for row in steps(folder)]


def assert_same_weights(one: Path, other: Path, *, tower: bool = False) -> None:
    """Of two runs; and those that were trained, of the decoder or of the tower, are not merely what 16 bits hold, as all are at first."""
    first, second = (
        {k: t.view(torch.int32) for p in Path(f"{f}-weights").glob("*.safetensors") for k, t in load_file(p).items()} for f in (one, other)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    trained_ones = [t for name, t in first.items() if (".visual." in name) is tower]
    assert sum(bool((t & 0xFFFF).any()) for t in trained_ones) > len(trained_ones) / 2


LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "one-in-float32": (TEXT, 1, ["parallel.reduce_dtype=fp32", "train.global_batch_size=1"]),
    "one-tied": (TEXT, 1, [NARROW, TIED, "train.global_batch_size=1"]),
    "fsdp": (TEXT, 2, [NARROW, "train.global_batch_size=2"]),
    "ep": (TEXT, 2, ["parallel.ep=2"]),
    "tp": (TEXT, 2, ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=1"]),
    "cp": (TEXT, 2, [NARROW, "parallel.cp=2"]),
    "pp-tied": (TEXT, 2, ["parallel.pp=2", TIED]),
    "hsdp-ep": (TEXT, 4, [NARROW, "parallel.dp_replicate=2", "parallel.ep=2"]),
    "tower": (VISION, 1, [NARROW]),
    "tower-alone": (VISION, 1, [NARROW, "train.freeze=[language_model]", "train.recompute=full"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full
def test_halves_train_as_whole_weights_do(layout: str, tmp_path: Path) -> None:
    config, ranks, words = LAYOUTS[layout]
    whole, split = (curve(tmp_path / m, config, ranks, *words, f"optimizer.master_weights={m}") for m in ("fp32", "remainder"))
    assert len(whole) == 4
    assert split == whole
    assert_same_weights(tmp_path / "remainder", tmp_path / "fp32", tower=layout == "tower-alone")


@pytest.mark.parametrize(
    ("config", "ranks", "chain", "words"),
    [
        (TEXT, 2, ("fp32", "remainder", "fp32"), [NARROW]),
        (TEXT, 2, ("remainder", "remainder"), ["checkpoint.async_save=false"]),
        (VISION, 1, ("remainder", "remainder"), [NARROW, FROZEN]),
        (VISION, 2, ("remainder", "fp32", "remainder"), [NARROW, FROZEN]),
    ],
    ids=["either", "split", "frozen", "frozen-either"],
)
@pytest.mark.full
def test_checkpoints_of_either_are_resumed_by_either(
    config: str, ranks: int, chain: tuple[str, ...], words: list[str], tmp_path: Path
) -> None:
    """Losses, norms and weights are those of a run of whole weights that was not interrupted. Frozen weights that need 32 bits come out as they went in,
    and are held in 16: they are computed with in 16 whichever way they are held.
    """
    words = [*words, "optimizer.schedule=constant", "optimizer.warmup_steps=1", "train.receipt=true"]
    if FROZEN in words:
        curve(tmp_path / "given", VISION, 1)
        words.append(f"init.weights={tmp_path / 'given'}-weights")
    rows = curve(tmp_path / "all", config, ranks, *words, f"train.steps={2 * len(chain)}", "optimizer.master_weights=fp32")
    for i, master in enumerate(chain):
        more = [
            f"checkpoint.dir={tmp_path / 'saved'}",
            "checkpoint.every=2",
            f"train.steps={2 * i + 2}",
            f"optimizer.master_weights={master}",
        ]
        assert curve(tmp_path / f"part{i}", config, ranks, *words, *more) == rows[2 * i : 2 * i + 2]
    assert_same_weights(tmp_path / f"part{i}", tmp_path / "all")
    if FROZEN in words:
        given, last = (load_file(next(Path(f"{tmp_path / name}-weights").glob("*.safetensors"))) for name in ("given", f"part{i}"))
        frozen = [name for name in given if ".visual.blocks." in name]
        assert any((given[name].view(torch.int32) & 0xFFFF).any() for name in frozen), "or bfloat16 would hold them"
        assert all(torch.equal(given[name], last[name]) for name in frozen)
        for name, held in (("all", 4), (f"part{i}", 2)):
            found = summary(tmp_path / name)
            assert ranks * found["metrics"]["param_bytes_per_rank"] / found["num_parameters"] == pytest.approx(held, rel=0.01)


@pytest.mark.full
def test_weights_of_a_folder_are_kept_whole(tmp_path: Path) -> None:
    curve(tmp_path / "first", TEXT, 1)
    more = [f"init.weights={tmp_path / 'first'}-weights", "parallel.tp=2", "seed=7"]
    whole, split = (curve(tmp_path / m, TEXT, 2, *more, f"optimizer.master_weights={m}") for m in ("fp32", "remainder"))
    assert split == whole
    assert_same_weights(tmp_path / "remainder", tmp_path / "fp32")


@pytest.mark.full
def test_bytes_of_halves(tmp_path: Path) -> None:
    """2 + 2 + 2 for weight, remainder and gradient where whole weights take 4 + 4; 4 for a gradient that several micro-batches add to."""
    held = {}
    for name, words in {"fp32": [], "remainder": [], "several": ["train.global_batch_size=4"]}.items():
        master = "fp32" if name == "fp32" else "remainder"
        curve(
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
