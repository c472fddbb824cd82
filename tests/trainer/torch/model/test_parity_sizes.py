"""Models of random sizes compute what transformers computes: heads, groups, widths, experts, top-k, tied or not, with a vision tower or without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import parity
import pytest
import torch

from playbook_trainer.config.tree import ModelConfig
from playbook_trainer.huggingface import weights


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
    ours, theirs = parity.ours(config, state), parity.theirs(config, tmp_path)
    grids = [[(1, 4, 6)], [(1, 2, 2), (1, 6, 4)]] if config.vision else [[], []]
    documents = [parity.Document(config, length, images, seed) for length, images in zip((5, 23), grids, strict=True)]
    logits, loss = parity.run_theirs(theirs, documents)
    packed = parity.pack(documents)
    assert float(logits.std()) > 0.05
    torch.testing.assert_close(ours(packed, logits=True).detach(), logits, atol=1e-4, rtol=0, msg=lambda m: f"{config}: {m}")
    found = ours(packed)
    assert abs(float((found - loss) / packed.num_loss)) < 1e-4
    found.backward()
    assert parity.worst_gradient(ours, parity.their_gradients(config, theirs))[0] < 1e-3
