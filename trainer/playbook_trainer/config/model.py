"""The `model` section of the trainer's configuration: every count that a model's shape follows from. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from playbook.planner.models import from_preset
from playbook.planner.shapes import DEEPEST, Shape
from playbook.yaml_files import Strict


class VisionConfig(Strict):
    """The vision tower of Qwen3-VL."""

    depth: int = Field(gt=0, le=DEEPEST)
    hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    ffn_size: int = Field(gt=0)
    in_channels: int = Field(default=3, gt=0)
    patch_size: int = Field(default=16, gt=0)
    temporal_patch_size: int = Field(default=2, gt=0)
    spatial_merge_size: int = Field(default=2, gt=0)
    num_position_embeddings: int = Field(default=2304, gt=0)
    deepstack_layers: list[int] = Field(default_factory=list)


class YarnConfig(Strict):
    """Rotary frequencies stretched for rows longer than those of pre-training. Source: YaRN, arXiv 2309.00071."""

    factor: float = Field(gt=1)
    original_seq_len: int = Field(gt=0)
    """Rows that the unstretched frequencies were trained on."""
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    mscale: float = Field(default=1.0, ge=0)
    mscale_all_dim: float = Field(default=1.0, ge=0)


class ModelConfig(Strict):
    """A Qwen3 decoder, dense (num_experts 0) or MoE, with or without a vision tower; or one in the style of DeepSeek-V3."""

    name: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0, le=DEEPEST)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    """Of queries and keys; with attention mla, qk_nope_head_dim + qk_rope_head_dim."""
    attention: Literal["gqa", "mla"] = "gqa"
    """gqa: grouped queries. mla: keys and values from a common compressed row, and a rotated part apart (multi-head latent attention)."""
    q_lora_rank: int = Field(default=0, ge=0)
    """Width of compressed queries; 0 leaves queries uncompressed. This and the next four are for attention mla."""
    kv_lora_rank: int = Field(default=0, ge=0)
    qk_nope_head_dim: int = Field(default=0, ge=0)
    qk_rope_head_dim: int = Field(default=0, ge=0)
    v_head_dim: int = Field(default=0, ge=0)
    qk_norm: bool = True
    """Norms of queries and keys: of each head, or with mla of the compressed rows."""
    ffn_size: int = Field(default=0, ge=0)
    """Width of the dense MLP; in a model with experts, that of its first_dense_layers."""
    num_experts: int = Field(default=0, ge=0)
    top_k: int = Field(default=0, ge=0)
    expert_ffn_size: int = Field(default=0, ge=0)
    first_dense_layers: int = Field(default=0, ge=0)
    """Layers with a dense MLP in a model with experts, before all others."""
    shared_expert_ffn_size: int = Field(default=0, ge=0)
    """Width of the expert that every token goes through; 0 means none."""
    norm_topk_prob: bool = True
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_groups: int = Field(default=0, ge=0)
    """Groups of experts, of which each token may choose among router_group_top_k; 0 means no groups."""
    router_group_top_k: int = Field(default=0, ge=0)
    router_scale: float = Field(default=1.0, gt=0)
    """Factor on the probabilities of the chosen experts."""
    router_bias: bool = False
    """A bias on the scores with which experts are chosen, moved after each step against their load (balance without an auxiliary loss)."""
    mtp_layers: int = Field(default=0, ge=0, le=DEEPEST)
    """Depths of multi-token prediction beyond the next token. Source of these fields:
    DeepSeek-V3, arXiv 2412.19437, sections 2.1 and 2.2."""
    tie_word_embeddings: bool = False
    """One matrix for the embedding and the output layer. With pipeline stages,
    the first and the last both hold it and add their gradients."""
    rope_theta: float = Field(default=1_000_000.0, gt=1)
    yarn: YarnConfig | None = None
    mrope_section: list[int] | None = None
    """Frequencies given to time, height and width; set for vision-language models."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    init_std: float = Field(default=0.02, gt=0)
    vision: VisionConfig | None = None
    image_token_id: int | None = Field(default=None, ge=0)
    vision_start_token_id: int | None = Field(default=None, ge=0)
    vision_end_token_id: int | None = Field(default=None, ge=0)
    eos_token_id: int = Field(default=0, ge=0)
    pad_token_id: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        """Refuse fields that contradict one another."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.num_experts and not (0 < self.top_k <= self.num_experts and self.expert_ffn_size > 0):
            raise ValueError("a model with experts needs 0 < top_k <= num_experts and expert_ffn_size > 0")
        if not self.num_experts and self.ffn_size <= 0:
            raise ValueError("a model without experts needs ffn_size > 0")
        if problem := self._mla_problem() or self._moe_problem():
            raise ValueError(problem)
        if self.rotated % 2:
            name = "head_dim" if self.attention == "gqa" else "qk_rope_head_dim"
            raise ValueError(f"{name} {self.rotated} is odd; positions turn its values in pairs, so make it even")
        if self.mrope_section is not None and (len(self.mrope_section) != 3 or min(self.mrope_section) < 0):
            raise ValueError(f"mrope_section {self.mrope_section} must be three counts, of time, height and width; none below 0")
        if self.mrope_section is not None and sum(self.mrope_section) != self.head_dim // 2:
            raise ValueError(f"mrope_section {self.mrope_section} must add up to head_dim / 2 = {self.head_dim // 2}")
        if self.vision is not None and (self.mrope_section is None or self.image_token_id is None):
            raise ValueError("a model with a vision tower needs mrope_section and image_token_id")
        return self

    def _mla_problem(self) -> str | None:
        sizes = {
            name: getattr(self, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        if self.attention == "gqa":
            foreign = [name for name, size in {**sizes, "yarn": self.yarn}.items() if size]
            return f"{', '.join(foreign)} belong to attention: mla, and attention is gqa" if foreign else None
        if missing := [name for name, size in sizes.items() if not size and name != "q_lora_rank"]:
            return f"attention mla needs {', '.join(missing)} > 0"
        if self.head_dim != self.qk_nope_head_dim + self.qk_rope_head_dim:
            return f"head_dim {self.head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {self.qk_nope_head_dim + self.qk_rope_head_dim}"
        if self.num_kv_heads != self.num_heads:
            return f"attention mla has as many key-value heads as heads: set num_kv_heads to {self.num_heads}, found {self.num_kv_heads}"
        return None

    def _moe_problem(self) -> str | None:
        """What is wrong with the fields of experts and of their router, if anything."""
        groups, top_groups = self.router_groups, self.router_group_top_k
        if not self.num_experts:
            expert_settings = ("first_dense_layers", "shared_expert_ffn_size", "router_groups", "router_group_top_k", "router_bias")
            return next(
                (f"{name} needs a model with experts, and num_experts is 0" for name in expert_settings if getattr(self, name)), None
            )
        if self.first_dense_layers >= self.num_layers:
            return f"first_dense_layers {self.first_dense_layers} leaves none of {self.num_layers} layers with experts"
        if self.first_dense_layers and self.ffn_size <= 0:
            return "first_dense_layers needs ffn_size > 0"
        if bool(groups) != bool(top_groups):
            return f"router_groups {groups} and router_group_top_k {top_groups} go together: set both, or neither"
        if groups and (self.num_experts % groups or top_groups > groups or self.top_k > top_groups * (self.num_experts // groups)):
            return (
                f"{self.num_experts} experts in router_groups {groups}, of which router_group_top_k {top_groups} are kept, "
                f"leave no top_k {self.top_k}"
            )
        if self.router_bias and self.router_score != "sigmoid":
            return "router_bias needs router_score: sigmoid"
        return None

    @property
    def rotated(self) -> int:
        """Values of a query or key that turn with its position."""
        return self.head_dim if self.attention == "gqa" else self.qk_rope_head_dim

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP; they come first."""
        return self.first_dense_layers if self.num_experts else self.num_layers


# A configuration's model as the arithmetic of `playbook` knows it.


def shape_of(model: ModelConfig) -> Shape:
    """A model's counts, by the same reader as those of the presets."""
    return from_preset(model.model_dump(), model.name)
