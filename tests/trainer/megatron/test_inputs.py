"""What each rank of the megatron backend reads of a micro-batch: every token once, in the order that its attention expects."""

from __future__ import annotations

import parity
import pytest
import torch
from torch import Tensor

from playbook.paths import data_root
from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config.tree import TrainerConfig, load
from playbook_trainer.data.batch import IGNORE, Batch
from playbook_trainer.megatron import inputs

ROWS, SEQ = 2, 32


def config(**data: object) -> TrainerConfig:
    return load(
        data_root("configs") / "qwen3_moe_tiny.yaml",
        {"backend": "megatron", "data.seq_len": SEQ, "train.micro_batch_size": ROWS, **{f"data.{k}": v for k, v in data.items()}},
    )


def batch(lengths: list[int]) -> Batch:
    """Documents of these lengths; tokens are numbered, so that each can be found again."""
    total = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    labels = torch.arange(1, total + 1)
    labels[ends[1:] - 1] = IGNORE
    return Batch(
        tokens_N=torch.arange(total),
        labels_N=labels,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=ends.to(torch.int32),
        max_seqlen=max(lengths),
        num_useful=total,
        num_loss=int((labels != IGNORE).sum()),
        num_images=0,
    )


def axes(cp: int, rank: int, tp: int = 1) -> Axes:
    return Axes(cp=Axis("cp", cp, rank), tp=Axis("tp", tp, 0), sequence_parallel=tp > 1)


def everywhere(b: Batch, c: TrainerConfig, cp: int, tp: int = 1) -> list[inputs.Inputs]:
    return [inputs.make(b, c, axes(cp, rank, tp)) for rank in range(cp)]


def bearing(found: list[inputs.Inputs]) -> Tensor:
    """The tokens whose labels bear loss, over all ranks."""
    return torch.cat([f.tokens[f.weight > 0] for f in found]).sort().values


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rows_keep_their_form_and_each_token_is_read_once(cp: int) -> None:
    b, c = batch([20, 12, 32]), config(pack=False)
    found = everywhere(b, c, cp)
    assert all(f.tokens.shape == (ROWS, SEQ // cp) and f.borders is None for f in found)
    assert torch.equal(torch.cat([f.tokens.flatten() for f in found]).sort().values, b.tokens_N)
    assert torch.equal(bearing(found), b.tokens_N[b.labels_N != IGNORE])
    for f in found:
        real = f.weight > 0
        assert torch.equal(f.labels[real], f.tokens[real] + 1)
        assert torch.equal(f.labels[~real], torch.zeros_like(f.labels[~real]))
        assert f.num_loss == b.num_loss


def test_a_context_rank_holds_an_early_and_a_late_slice() -> None:
    """So every rank has the same share of the causal triangle."""
    found = everywhere(batch([32, 32]), config(pack=False), 4)
    assert [f.tokens[0].tolist() for f in found] == [
        [*range(4), *range(28, 32)],
        [*range(4, 8), *range(24, 28)],
        [*range(8, 12), *range(20, 24)],
        [*range(12, 16), *range(16, 20)],
    ]


def test_packed_rows_are_one_stream() -> None:
    b = batch([5, 27, 32])
    f = inputs.make(b, config(), axes(1, 0))
    assert f.tokens.shape == (1, ROWS * SEQ)
    assert f.borders is not None
    assert f.borders.tolist() == [0, 5, 32, 64]
    assert f.longest == 32
    assert torch.equal(f.positions, b.positions.unsqueeze(0))


@pytest.mark.parametrize(("cp", "tp", "multiple"), [(2, 1, 4), (4, 1, 8), (2, 2, 8)])
def test_packed_documents_are_filled_up_until_context_ranks_can_share_them(cp: int, tp: int, multiple: int) -> None:
    lengths = [5, 27, 1, 31]
    b = batch(lengths)
    found = everywhere(b, config(), cp, tp)
    filled = [-(-n // multiple) * multiple for n in lengths]
    for rank, f in enumerate(found):
        assert f.borders is not None
        assert (f.borders[1:] - f.borders[:-1]).tolist() == filled
        assert f.tokens.shape == f.labels.shape == f.weight.shape == f.positions.shape == (1, sum(filled) // cp)
        assert f.tokens.shape[1] % tp == 0
        assert f.longest == max(filled)
        start = 0
        for length, size in zip(lengths, filled, strict=True):  # each document is cut by itself
            mine = f.positions[0, start // cp : (start + size) // cp]
            expected = inputs.slices(size, Axis("cp", cp, rank))
            assert torch.equal(mine, expected.where(expected < length, 0))
            start += size
    assert torch.equal(bearing(found), b.tokens_N[b.labels_N != IGNORE])


VL = load(data_root("configs") / "qwen3_vl_moe_tiny.yaml", {"backend": "megatron"})
GRIDS = [[(1, 4, 6), (1, 2, 4)], [], [(1, 6, 4)]]


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_each_visual_token_has_one_place_and_its_position(cp: int, tp: int) -> None:
    # Lengths that sequence parallelism divides as they are, where no context parallelism fills documents up.
    documents = [parity.Document(VL.model, text, grids, i) for i, (text, grids) in enumerate(zip((19, 31, 13), GRIDS, strict=True))]
    batch = parity.pack(documents)
    assert batch.vision is not None
    position = {int(n): batch.positions[:, i].tolist() for n, i in enumerate(batch.vision.visual_index_V)}
    seen: dict[int, list[int]] = {}
    for c in range(cp):
        for t in range(tp):
            axes = Axes(tp=Axis("tp", tp, t), cp=Axis("cp", cp, c), sequence_parallel=tp > 1)
            made = inputs.make(batch, VL, axes)
            rows = made.tokens.numel() // tp
            assert made.tokens.numel() == rows * tp
            assert made.vision is not None
            taken = made.vision.visual_take_V
            numbers = range(len(position)) if taken is None else taken.tolist()
            for row, number in zip(made.vision.visual_index_V.tolist(), numbers, strict=True):
                assert 0 <= row < rows
                assert int(made.tokens[0, t * rows + row]) == VL.model.image_token_id
                seen[number] = made.positions[:, t * rows + row].tolist()
            assert torch.equal(made.vision.pixels_PC, batch.vision.pixels_PC), "every rank encodes every image"
    assert seen == position
