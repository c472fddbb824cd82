"""Our decoders agree with Hugging Face transformers on tiny random weights: logits, loss and the gradient of every parameter.

The weights travel through our own writer and transformers' own reader, so the checkpoint layout is tested on the way.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import parity
import pytest
import torch

from playbook_trainer.config.tree import ModelConfig
from playbook_trainer.huggingface import weights
from playbook_trainer.torch.model.decoder import Decoder

SMALL, WIDE, TALL, LARGE = (1, 2, 2), (1, 4, 12), (1, 10, 6), (1, 14, 20)

TEXT = {"one": [(41, [])], "packed": [(41, []), (1, []), (30, [])]}
IMAGES = {
    "text only": [(23, [])],
    "one image": [(9, [WIDE])],
    "several sizes": [(5, [SMALL, TALL, WIDE])],
    "packed": [(9, [WIDE]), (17, []), (4, [LARGE, SMALL]), (3, [TALL])],
    "image before any text": [(0, [TALL])],
}
CONFIGS = {
    "text-moe": (lambda: parity.tiny("qwen3_moe_tiny"), TEXT),
    "text-moe-unnormalized": (lambda: parity.tiny("qwen3_moe_tiny", norm_topk_prob=False), TEXT),
    "text-dense": (lambda: parity.dense("qwen3_moe_tiny"), TEXT),
    "text-dense-tied": (lambda: parity.tiny("qwen3_tiny"), TEXT),
    "text-moe-tied": (lambda: parity.tiny("qwen3_moe_tiny", tie_word_embeddings=True), TEXT),
    "vl-moe": (lambda: parity.tiny("qwen3_vl_moe_tiny"), IMAGES),
    "vl-dense": (lambda: parity.dense("qwen3_vl_moe_tiny"), IMAGES),
    "vl-dense-tied": (lambda: parity.tiny("qwen3_vl_tiny"), IMAGES),
    "vl-moe-tied": (lambda: parity.tiny("qwen3_vl_moe_tiny", tie_word_embeddings=True), IMAGES),
}


def distances(config: ModelConfig, ours: Decoder, theirs: Any, documents: list[parity.Document]) -> dict[str, Any]:
    """How far ours is from theirs, which is given each document alone, so that a packed one sees none of its neighbours."""
    packed = parity.pack(documents)
    ours.zero_grad()
    theirs.zero_grad()
    logits, loss = parity.run_theirs(theirs, documents)
    found = ours(packed, logits=True)
    assert logits.std() > 0.05, "logits this flat would agree anyway"
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=0, msg=lambda m: f"{config}: {m}")
    found_loss = ours(packed)
    off = abs(float((found_loss - loss) / packed.num_loss))
    assert off < 1e-4
    far = {"logits": float((found - logits).abs().max()), "loss": off, "gradients": None, "worst": None}
    found_loss.backward()
    if packed.vision is None and config.vision is not None:
        return far  # without an image the tower has no gradient on either side
    worst, whose = parity.worst_gradient({n: p.grad for n, p in ours.named_parameters()}, parity.their_gradients(config, theirs))
    assert worst < 1e-3, f"{config}: gradient of {whose} differs by {worst:.1e}"
    return far | {"gradients": worst, "worst": whose}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sample("text-moe", "vl-dense-tied")
def test_logits_loss_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    make, batches = CONFIGS[name]
    config = make()
    state = parity.written(config, tmp_path / "model")
    ours, theirs = parity.ours(config, state), parity.theirs(tmp_path / "model")
    for what, batch in batches.items():
        documents = [parity.Document(config, text, grids, seed) for seed, (text, grids) in enumerate(batch)]
        parity.record("models.jsonl", {"model": name, "batch": what} | distances(config, ours, theirs, documents))


def drawn(seed: int) -> ModelConfig:
    """A model with every size drawn anew."""
    pick = random.Random(seed)
    vision, moe = bool(seed % 2), bool(seed // 2 % 2)
    base = parity.preset("qwen3_vl_moe_tiny" if vision else "qwen3_moe_tiny").model_dump()
    half, kv_heads = pick.choice([3, 4, 6, 10]), pick.choice([1, 2, 3])
    sizes: dict[str, Any] = {
        "head_dim": 2 * half, "num_kv_heads": kv_heads, "num_heads": kv_heads * pick.choice([1, 2, 5]), "hidden_size": pick.choice([40, 56, 72]),
        "num_layers": pick.choice([2, 3]), "vocab_size": pick.choice([261, 300, 517]), "tie_word_embeddings": pick.random() < 0.5,
        "rope_theta": pick.choice([1e4, 5e6]), "rms_norm_eps": pick.choice([1e-5, 1e-6]),
    }  # fmt: skip
    # Widths in multiples of four: grouped products of transformers want them. Of one expert the normalised probability is 1, and its gradient rounding.
    experts = pick.choice([3, 8, 13])
    sizes |= (
        {"num_experts": experts, "top_k": pick.randint(2, experts), "expert_ffn_size": pick.choice([12, 24, 44]), "norm_topk_prob": vision or pick.random() < 0.5}
        if moe
        else {"num_experts": 0, "top_k": 0, "expert_ffn_size": 0, "ffn_size": pick.choice([48, 90])}
    )  # fmt: skip
    if vision:
        sizes["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        heads = pick.choice([2, 4])
        sizes["vision"] = base["vision"] | {
            "hidden_size": heads * pick.choice([8, 16]),
            "num_heads": heads,
            "ffn_size": pick.choice([40, 96]),
            "deepstack_layers": [pick.choice([0, 1])],
        }
    return ModelConfig.model_validate(base | sizes)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sample("0", "3")
def test_models_of_random_sizes_compute_what_transformers_computes(seed: int, tmp_path: Path) -> None:
    config = drawn(seed)
    state = parity.random_state(config, seed)
    weights.save_safetensors(config, state, tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.load_safetensors(config, tmp_path).items())
    ours, theirs = parity.ours(config, state), parity.theirs(tmp_path)
    grids = [[(1, 4, 6)], [(1, 2, 2), (1, 6, 4)]] if config.vision else [[], []]
    documents = [parity.Document(config, length, images, seed) for length, images in zip((5, 23), grids, strict=True)]
    distances(config, ours, theirs, documents)
