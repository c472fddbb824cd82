"""A configuration's model as the arithmetic of `playbook` knows it."""

from __future__ import annotations

from playbook.planner.shapes import Mla, Shape, Vision
from playbook_trainer.config.tree import ModelConfig


def shape_of(model: ModelConfig) -> Shape:
    """A model's counts, as `playbook.planner.shapes` has them for published ones."""
    mla, tower = None, None
    if model.attention == "mla":
        mla = Mla(model.q_lora_rank, model.kv_lora_rank, model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim)
    if (v := model.vision) is not None:
        values = v.in_channels * v.temporal_patch_size * v.patch_size**2
        tower = Vision(v.depth, v.hidden_size, v.ffn_size, v.num_position_embeddings, values, v.spatial_merge_size, len(v.deepstack_layers))
    return Shape(
        model.num_layers, model.num_heads, model.num_kv_heads, model.num_experts, model.name, model.hidden_size, model.vocab_size,
        head_dim=model.head_dim, ffn=model.ffn_size, dense_layers=model.dense_layers, top_k=model.top_k, expert_ffn=model.expert_ffn_size,
        shared_ffn=model.shared_expert_ffn_size, qk_norm=model.qk_norm, tied=model.tie_word_embeddings, mtp=model.mtp_layers, mla=mla,
        vision=tower,
    )  # fmt: skip
