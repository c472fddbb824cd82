"""Frozen parts keep their values and cost neither gradients nor saved activations; what is trained gets the gradients it would get anyway."""

from __future__ import annotations

from functools import cache

import parity
import pytest
import torch
from listeners import Recorder

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_trainer.axes import Axes
from playbook_trainer.config import checks
from playbook_trainer.config.sections import FREEZABLE
from playbook_trainer.config.tree import load
from playbook_trainer.observe.ranges import listening
from playbook_trainer.observe.receipt import Observer, observing
from playbook_trainer.torch.build import freeze, part_of
from playbook_trainer.torch.model.decoder import Decoder
from playbook_trainer.torch.parallel.pipeline import forward_backward

TEXT = data_root("configs") / "qwen3_moe_tiny.yaml"
VISION = data_root("configs") / "qwen3_vl_moe_tiny.yaml"
CONFIG = parity.tiny("qwen3_vl_moe_tiny", num_layers=2)
STATE = parity.random_state(CONFIG)
IMAGES = parity.pack([parity.Document(CONFIG, 9, [(1, 4, 12)], 0), parity.Document(CONFIG, 17, [], 1)])
NO_IMAGES = parity.pack([parity.Document(CONFIG, 17, [], 1)])


@cache
def observed(*frozen, images=True):
    """Gradients by name, the peak of saved bytes, and the ranges, of one step with these parts frozen."""
    model: Decoder = parity.ours(CONFIG, STATE)
    freeze(model, frozen)
    batch = IMAGES if images else NO_IMAGES
    observer = Observer(model, {})
    with observing(observer):
        forward_backward(model, [batch], torch.tensor(float(batch.num_loss)), Axes())
    return {n: p.grad for n, p in model.named_parameters()}, observer.saved.peak, observer.ranges


def test_every_part_has_parameters():
    parts = {part_of(name) for name, _ in Decoder(CONFIG).named_parameters()}
    assert parts == set(FREEZABLE)


@pytest.mark.parametrize(
    "frozen", [["vision"], ["projector"], ["vision", "projector"], ["language_model"], ["vision", "language_model"]], ids="+".join
)
@pytest.mark.sample("vision", "language_model")
def test_what_is_trained_gets_the_same_gradients(frozen):
    whole, _, _ = observed()
    found, _, _ = observed(*frozen)
    for name, grad in found.items():
        if part_of(name) in frozen:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, whole[name], rtol=0, atol=0)


def test_a_frozen_tower_saves_nothing_for_the_backward_pass():
    _, plain, ranges = observed()
    _, saved, frozen_ranges = observed("vision", "projector")
    assert saved < 0.8 * plain
    assert {"vision.bwd", "projector.bwd"} <= set(ranges)
    assert not {"vision.bwd", "projector.bwd"} & set(frozen_ranges)
    assert ranges["vision"] == frozen_ranges["vision"] == 1


@pytest.mark.parametrize("frozen", [[], ["vision"], ["language_model"], ["vision", "language_model"]], ids="+".join)
def test_ranges_of_the_backward_pass_close(frozen):
    recorder, model = Recorder(), parity.ours(CONFIG, STATE)
    freeze(model, frozen)
    with listening(recorder):
        forward_backward(model, [IMAGES], torch.tensor(1.0), Axes())
    opened, closed = (sorted(entry[1:] for entry in recorder.seen if entry[0] == sign) for sign in "+-")
    assert opened == closed


def test_a_batch_without_images_trains_nothing_where_the_language_model_is_frozen():
    found, _, _ = observed("language_model", images=False)
    assert not any(g is not None for g in found.values())


@pytest.mark.parametrize(
    ("config", "words", "world", "says"),
    [
        (TEXT, {"train.freeze": ["vision"]}, 1, "no vision tower"),
        (VISION, {"train.freeze": list(FREEZABLE)}, 1, "nothing is left to train"),
        (VISION, {"train.freeze": ["language_model"], "data.kind": "text"}, 1, "no images, leaves nothing to train"),
        (
            VISION,
            {"train.freeze": ["vision"], "train.recompute": "selective", "train.recompute_modules": ["vision"]},
            1,
            "keeps nothing that could be made again",
        ),
        (
            VISION,
            {"train.freeze": ["language_model"], "parallel.pp": 2, "train.global_batch_size": 4},
            2,
            "pipeline stages after the first",
        ),
    ],
)
def test_what_cannot_be_frozen_is_refused(config, words, world, says):
    with pytest.raises(ConfigError, match=says):
        checks.check(load(config, words), world)
