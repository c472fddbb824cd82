"""Positions agree with the functions of Hugging Face transformers, and refuse documents whose images do not fit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLMoeConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_interpolation_indices_and_weights, get_vision_position_ids

from playbook.errors import DataError
from playbook_trainer.data.collate import mrope_positions, vision_index

IMAGE, START = 258, 259
MERGE = 2

sides = st.integers(1, 9).map(lambda n: n * MERGE)
grids_with_frames = st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=4)


class _RopeIndex:
    """The two methods of the transformers model that give positions, without building a model."""

    get_vision_position_ids = Qwen3VLMoeModel.get_vision_position_ids
    get_rope_index = Qwen3VLMoeModel.get_rope_index
    config = Qwen3VLMoeConfig()


def document(grids, texts):
    """Text of the given lengths between the images, and a start token before each image."""
    parts = []
    for grid, text in zip(grids, texts, strict=False):
        parts += [np.arange(text) % 256, [START], np.full(np.prod(grid) // MERGE**2, IMAGE)]
    return np.concatenate([*parts, np.arange(texts[-1]) % 256]).astype(np.int64)


@settings(max_examples=40, deadline=None)
@given(grids_with_frames, st.lists(st.integers(0, 12), min_size=5, max_size=5))
def test_mrope_positions_equal_those_of_transformers(grids, texts):
    tokens = document(grids, texts)
    ids = torch.from_numpy(tokens)[None]
    theirs, _ = _RopeIndex().get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=torch.tensor(grids))
    np.testing.assert_array_equal(mrope_positions(tokens, IMAGE, grids, MERGE), theirs[:, 0].numpy())


@settings(max_examples=40, deadline=None)
@given(grids_with_frames, st.sampled_from([1, 2, 7, 48]))
def test_vision_index_equals_that_of_transformers(grids, side):
    thw = torch.tensor(grids)
    ours = vision_index(grids, MERGE, side)
    np.testing.assert_array_equal(ours["cu_seqlens"], get_vision_cu_seqlens(thw).numpy())
    np.testing.assert_array_equal(ours["rotary_P2"], get_vision_position_ids(thw, MERGE).numpy())
    index, weight = get_vision_interpolation_indices_and_weights(thw, side, mode="bilinear", align_corners=True, spatial_merge_size=MERGE)
    np.testing.assert_array_equal(ours["pos_index_4P"], index.T.numpy())
    np.testing.assert_allclose(ours["pos_weight_4P"], weight.T.numpy(), atol=1e-6)
    assert ours["max_seqlen"] == max(h * w for _, h, w in grids)
    dtypes = {"cu_seqlens": torch.int32, "rotary_P2": torch.int64, "pos_index_4P": torch.int64, "pos_weight_4P": torch.float32}
    assert {name: ours[name].dtype for name in dtypes} == dtypes


def test_text_alone_counts_up_on_all_axes():
    assert (mrope_positions(np.arange(5), IMAGE, [], MERGE) == np.arange(5)).all()
    assert mrope_positions(np.array([], dtype=np.int64), IMAGE, [], MERGE).shape == (3, 0)


def test_two_images_without_text_between_them_are_kept_apart():
    tokens = np.full(1 + 4, IMAGE)
    got = mrope_positions(tokens, IMAGE, [(1, 2, 2), (1, 4, 4)], MERGE)
    assert got.tolist() == [[0, 1, 1, 1, 1], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]]


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([1, IMAGE, IMAGE, 2], [(1, 4, 4)], "has 2 image tokens in a row, its grid (1, 4, 4) needs 4"),
        ([1, IMAGE, IMAGE], [(1, 2, 2)], "1 image tokens more than its 1 grids"),
        ([1, 2], [(1, 2, 2)], "has 0 image tokens"),
        ([], [(1, 2, 2)], "has 0 image tokens"),
        ([IMAGE], [(1, 3, 2)], "in multiples of 2"),
        ([IMAGE], [(1, 0, 2)], "must be positive"),
    ],
)
def test_images_that_do_not_fit_are_refused(tokens, grids, message):
    with pytest.raises(DataError) as error:
        mrope_positions(np.array(tokens, dtype=np.int64), IMAGE, grids, MERGE)
    assert message in str(error.value)


def test_grids_that_cannot_be_merged_are_refused_and_no_images_are_fine():
    with pytest.raises(DataError, match="resize the image"):
        vision_index([(1, 4, 5)], MERGE, 48)
    empty = vision_index([], MERGE, 48)
    assert empty["cu_seqlens"].tolist() == [0]
    assert empty["max_seqlen"] == 0
    assert empty["pos_index_4P"].shape == (4, 0)
