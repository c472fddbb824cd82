"""The vision tower agrees with that of Hugging Face transformers, for images of several sizes and counts."""

import copy
import itertools

import numpy as np
import parity
import pytest
import torch
from listeners import Recorder
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from playbook.errors import ConfigError
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.huggingface.names import InMemory, whole
from playbook_trainer.observe.ranges import listening
from playbook_trainer.torch.model.vision import VisionTower

SIZES = [(1, 2, 2), (1, 4, 12), (1, 10, 6), (1, 26, 18), (1, 2, 98)]


def batch(config, grids):
    vision = config.vision
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.random.default_rng(0).standard_normal((sum(int(np.prod(g)) for g in grids), values)).astype(np.float32)
    return parity.vision_batch(config, grids, pixels, np.arange(0))


@pytest.fixture(scope="module")
def towers():
    """The configuration, our tower, and theirs with the same weights."""
    config = parity.tiny("qwen3_vl_moe_tiny")
    state = parity.random_state(config)
    tower = VisionTower(config.vision, config.hidden_size)
    tower.load_state_dict({name.removeprefix("vision."): t for name, t in state.items() if name.startswith("vision.")})
    settings = hf.hf_config(config)["vision_config"]
    settings.pop("model_type")
    model = Qwen3VLMoeVisionModel(Qwen3VLMoeVisionConfig(**settings, attn_implementation="eager"))
    prefix = "model.visual."
    model.load_state_dict({name.removeprefix(prefix): t for name, t in hf.to_hf(config, state).items() if name.startswith(prefix)})
    return config, tower, model


@pytest.mark.parametrize("grids", [[g] for g in SIZES] + [list(p) for p in itertools.permutations(SIZES, 3)][:6] + [[(3, 4, 6), (1, 2, 4)]])
@pytest.mark.sample("grids1", "grids11")
def test_embeddings_and_gradients_equal_those_of_transformers(towers, grids):
    config, tower, model = towers
    vision = batch(config, grids)
    merged, deep = tower(vision, torch.float32)
    expected = model(vision.pixels_PC, grid_thw=torch.tensor(grids))
    pairs = [(merged, expected.pooler_output), *zip(deep, expected.deepstack_features, strict=True)]
    assert len(pairs) == 1 + len(config.vision.deepstack_layers)
    tower.zero_grad()
    model.zero_grad()
    for found, wanted in pairs:
        assert found.shape == (sum(int(np.prod(g)) for g in grids) // 4, config.hidden_size)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    weights = [torch.randn(found.shape, generator=torch.Generator().manual_seed(i)) for i, (found, _) in enumerate(pairs)]
    sum((found * w).sum() for (found, _), w in zip(pairs, weights, strict=True)).backward()
    sum((wanted * w).sum() for (_, wanted), w in zip(pairs, weights, strict=True)).backward()
    theirs = {f"model.visual.{name}": p.grad for name, p in model.named_parameters()}
    for rule in hf.rules(config):
        if rule.ours.startswith("vision."):
            wanted = rule.read(InMemory({name: theirs.pop(name) for name in rule.theirs}), whole(rule.shape))
            found = tower.get_parameter(rule.ours.removeprefix("vision.")).grad
            assert (found - wanted).norm() <= 1e-3 * wanted.norm(), rule.ours
    assert not theirs


def test_bfloat16_stays_close_to_float32(towers):
    config, tower, _ = towers
    vision = batch(config, SIZES[:3])
    exact, _ = tower(vision, torch.float32)
    low = VisionTower(config.vision, config.hidden_size).to(torch.bfloat16)
    low.load_state_dict(tower.state_dict())
    found, deep = low(vision, torch.bfloat16)
    assert {t.dtype for t in (found, *deep)} == {torch.bfloat16}
    assert (found.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.full
def test_the_compiled_parts_of_a_block_hold_no_break_and_give_the_same(towers, monkeypatch):
    config, tower, _ = towers
    vision = batch(config, SIZES[1:3])
    expected, _ = tower(vision, torch.float32)
    for block, part in itertools.product(tower.blocks, ("before", "after")):
        monkeypatch.setattr(block, part, torch.compile(getattr(block, part), backend="aot_eager", fullgraph=True))
    found, _ = tower(vision, torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", ["nothing", "patch embedding", "everything"])
def test_ranges_are_side_by_side_and_balanced_in_both_directions(towers, frozen):
    config, tower, recorder = towers[0], copy.deepcopy(towers[1]), Recorder()
    shut = {"nothing": [], "patch embedding": [*tower.patch_embed.parameters(), *tower.pos_embed.parameters()]}
    for parameter in shut.get(frozen, list(tower.parameters())):
        parameter.requires_grad_(False)
    with listening(recorder):
        merged, deep = tower(batch(config, SIZES[:2]), torch.float32)
        if merged.requires_grad:
            (merged.sum() + sum(d.square().sum() for d in deep)).backward()
    projector, vision = ["+projector.bwd", "-projector.bwd"], ["+vision.bwd", "-vision.bwd"]
    backward = {"nothing": projector + vision, "patch embedding": projector, "everything": []}[frozen]
    assert recorder.seen == ["+vision", "-vision", "+projector", "-projector", *backward]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deepstack_layers": [1, 4]}, r"deepstack_layers \[1, 4\] must rise and lie in 0..3"),
        ({"deepstack_layers": [2, 1]}, "must rise"),
        ({"num_heads": 3}, "head size"),
        ({"num_position_embeddings": 2000}, "no square number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(towers, change, message):
    config, _, _ = towers
    with pytest.raises(ConfigError, match=message):
        VisionTower(config.vision.model_copy(update=change), config.hidden_size)
