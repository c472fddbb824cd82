"""Configurations of odd shape: read by what their fields say, or refused with what is missing or wrong, whatever they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playbook.errors import ConfigError, PlaybookError
from playbook.planner import parameters
from playbook.planner.models import find, from_fields
from playbook_app.mcp.planning import shape_of

SAYS_ALL: dict[str, Any] = {
    "model_type": "mine", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 1000,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION, MLP, TABLES, NORMS = 4 * 64 * 64, 3 * 64 * 128, 2 * 1000 * 64, 2 * 64
DENSE = 4 * (ATTENTION + MLP + NORMS) + TABLES + 64


def says(**fields: Any) -> dict[str, Any]:
    """The whole configuration with other fields; None takes one out."""
    return {k: v for k, v in {**SAYS_ALL, **fields}.items() if v is not None}


READ: list[tuple[str, Mapping[str, Any], int]] = [
    ("an unknown type", SAYS_ALL, DENSE),
    ("no type", says(model_type=None), DENSE),
    ("older names", {"n_layer": 4, "n_embd": 64, "n_inner": 128, "n_head": 4, "vocab_size": 1000, "gated_mlp": True, "tie_word_embeddings": False}, DENSE),
    ("a nested decoder", {"model_type": "outer", "text_config": SAYS_ALL, "vision_config": {"hidden_size": 8, "image_size": 224}}, DENSE),
    ("sections of attention and MLP", {
        "model_type": "dbrx", "n_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 1000, "attn_config": {"kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 8, "moe_top_k": 2},
    }, DENSE - 4 * (2 * 64 * 32) + 4 * (64 * 8 + 7 * MLP)),
    ("grouped heads of another width", says(num_key_value_heads=1, head_dim=32), DENSE + 4 * (2 * 64 * 128 + 2 * 64 * 32 - ATTENTION)),
    ("two matrices and biases", says(hidden_act="gelu", gated_mlp=False, use_bias=True), DENSE + 4 * (4 * 64 + 128 + 64 - 64 * 128)),
    ("tied tables", says(tie_word_embeddings=True), DENSE - 1000 * 64),
    ("experts of the only width", says(num_experts=8, num_experts_per_tok=2), DENSE + 4 * (64 * 8 + 7 * MLP)),
    ("a dense layer first, and shared experts", says(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1,
    ), DENSE + 3 * (64 * 8 + 9 * 3 * 64 * 32 - MLP)),
    ("dense layers by number", says(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0, 1]),
     DENSE + 2 * (64 * 8 + 8 * 3 * 64 * 32 - MLP)),
    ("latent attention", says(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
     DENSE + 4 * (64 * 4 * 12 + 64 * 20 + 16 + 16 * 4 * 16 + 4 * 8 * 64 - ATTENTION)),
    ("one head for all", {"model_type": "falcon", **{k: SAYS_ALL[k] for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")}},
     4 * (2 * 64 * 64 + 2 * 64 * 16 + 2 * 64 * 256 + 2 * 64) + 64 * 1000 + 2 * 64),
    ("learned positions", {"model_type": "opt", "ffn_dim": 256, "max_position_embeddings": 100,
                           **{k: SAYS_ALL[k] for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")}},
     4 * (ATTENTION + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 4 * 64) + 64 * 1000 + 102 * 64 + 2 * 64),
    ("norms without weights", says(model_type="olmo"), DENSE - 4 * NORMS),
    ("norms over all heads", says(model_type="olmo2", num_key_value_heads=2), DENSE + 4 * (64 + 32 - 2 * 64 * 32)),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "count"), [row[1:] for row in READ], ids=[row[0] for row in READ])
def test_fields_that_suffice_are_read(fields: Mapping[str, Any], count: int) -> None:
    assert parameters.total(from_fields(fields, "here")) == count


def test_layers_that_see_everything_take_turns_with_those_that_do_not() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    assert from_fields(says(sliding_window=8, layer_types=kinds), "here").window_every == 2
    assert from_fields(says(sliding_window=8), "here").window_every == 0
    assert from_fields(says(sliding_window=8, layer_types=["full_attention"] * 4), "here").window == 0
    with pytest.raises(ConfigError, match="layer_types is not expressible"):
        from_fields(says(sliding_window=8, layer_types=["full_attention", *kinds[:3]]), "here")


REFUSED: list[tuple[Any, str]] = [
    (says(hidden_act="gelu"), r"gated_mlp \(true where .* missing; add it"),
    (says(hidden_act=None, tie_word_embeddings=None), r"tie_word_embeddings .*, gated_mlp .* missing; add them"),
    (says(intermediate_size=None), "intermediate_size missing; add it"),
    (says(hidden_size=65), "head_dim missing; add it"),
    (says(num_experts=8), "num_experts_per_tok missing; add it"),
    (says(num_experts=8, num_experts_per_tok=2, n_shared_experts=1), "moe_intermediate_size missing"),
    (says(kv_lora_rank=16), "qk_nope_head_dim, qk_rope_head_dim, v_head_dim missing"),
    (says(num_experts=8, num_experts_per_tok=2, decoder_sparse_step=2), "decoder_sparse_step 2 is not expressible"),
    (says(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[3]), r"layers \[3\] have no experts; expected the first ones"),
    (says(num_experts=8, num_experts_per_tok=2, mlp_only_layers="0"), "mlp_only_layers is 0; expected a list of whole numbers"),
    (says(hidden_size=10**400), "hidden_size is 1000.*; expected a whole number from 0"),
    (says(hidden_size=64.0), "hidden_size is 64.0; expected a whole number"),
    (says(hidden_size=float("inf")), "hidden_size is inf"),
    (says(hidden_size=[64] * 10_000), r"hidden_size is \[64, 64"),
    (says(vocab_size=True), "vocab_size is True"),
    (says(num_attention_heads=0), "heads out of range|head_dim"),
    (says(num_hidden_layers=10**9), "at most 1000 layers"),
    (says(num_key_value_heads=7), "expected a number that divides them"),
    (says(sliding_window=64, layer_types=["full_attention"]), "expected a list with the kind of each layer"),
    (says(sliding_window=64, layer_types="abc"), "expected a list with the kind of each layer"),
    (says(num_hidden_layers=1001), "at most 1000 layers"),
    (says(tie_word_embeddings="yes"), "tie_word_embeddings is yes; expected true or false"),
    (says(mamba_d_state=16), "mamba_d_state tell of layers that have no arithmetic here"),
    (says(is_encoder_decoder=True), "is_encoder_decoder tell of layers"),
    ({"model_type": "mine", "text_config": [SAYS_ALL]}, "num_attention_heads, hidden_size, vocab_size"),
    ({"model_type": {"a": "b"}, **{k: v for k, v in SAYS_ALL.items() if k not in ("model_type", "vocab_size")}}, "vocab_size missing"),
    ([SAYS_ALL], "expected a mapping of fields, found list"),
    (None, "expected a mapping of fields, found NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_missing_or_wrong_is_said_by_name(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_fields(fields, "here")
    assert len(str(caught.value)) < 600


NO_FIELDS = ("[1, 2]", "{", "", '{"model_type": ["llama"]}')


def test_text_of_any_depth_or_without_fields_gets_one_message(tmp_path: Path) -> None:
    for text in (
        "[" * 90_000,
        '{"a":' * 15_000,
        '{"vocab_size": ' + "9" * 90_000 + "}",
        '{"model_type": "llama", "model_type": 3}',
        *NO_FIELDS,
    ):
        with pytest.raises(PlaybookError):
            shape_of(text if text.startswith("{") else "{" + text)
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PlaybookError, match=r"config\.json"):
            find(str(tmp_path))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.integers(10**9, 10**30),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 9), max_size=4),
)
NAMES = (
    "model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size hidden_act num_experts"
    " num_experts_per_tok moe_intermediate_size first_k_dense_replace mlp_only_layers moe_layer_freq kv_lora_rank sliding_window layer_types text_config"
    " vision_config attn_config linear_num_key_heads hybrid_override_pattern layers_block_type learned_positions norms full_attention_interval"
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES.split()), VALUES, max_size=4),
    st.sampled_from(["mine", "llama", "qwen3_moe", "deepseek_v3", "nemotron_h", "opt"]),
)
def test_no_field_brings_the_reader_down(fields: dict[str, Any], kind: str) -> None:
    try:
        shape = from_fields({**SAYS_ALL, "model_type": kind, **fields}, "here")
    except ConfigError:
        return
    assert parameters.total(shape) > 0
