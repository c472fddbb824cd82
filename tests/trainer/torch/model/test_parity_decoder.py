"""Our decoders agree with Hugging Face transformers on tiny random weights: logits, loss and the gradient of every parameter.

The weights travel through our own writer and transformers' own reader, so the checkpoint layout is tested on the way.
"""

import parity
import pytest
import torch

from playbook_trainer.huggingface import weights

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


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sample("text-moe", "vl-dense-tied")
def test_logits_loss_and_gradients_equal_those_of_transformers(name, tmp_path):
    """Theirs of each document alone, so that a packed one sees none of its neighbours."""
    make, batches = CONFIGS[name]
    config = make()
    state = parity.random_state(config)
    weights.save_safetensors(config, state, tmp_path / "model")
    decoder, model = parity.ours(config, state), parity.theirs(config, tmp_path / "model")
    for what, batch in batches.items():
        docs = [parity.Document(config, text, grids, seed) for seed, (text, grids) in enumerate(batch)]
        packed = parity.pack(docs)
        decoder.zero_grad()
        model.zero_grad()
        logits, loss = parity.run_theirs(model, docs)
        found = decoder(packed, logits=True)
        assert logits.std() > 0.1, "logits this flat would agree anyway"
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=0, msg=lambda m, w=what: f"{w}: {m}")
        found_loss = decoder(packed)
        off = abs(float(found_loss / packed.num_loss - loss / packed.num_loss))
        assert off < 1e-4, what
        row = {"model": name, "batch": what, "logits": float((found - logits).abs().max()), "loss": off, "gradients": None, "worst": None}
        found_loss.backward()
        if packed.vision is None and config.vision is not None:
            parity.record("models.jsonl", row)
            continue  # without an image the tower has no gradient on either side
        worst, whose = parity.worst_gradient(decoder, parity.their_gradients(config, model))
        assert worst < 1e-3, f"{what}: gradient of {whose} differs by {worst:.1e}"
        parity.record("models.jsonl", row | {"gradients": worst, "worst": whose})
