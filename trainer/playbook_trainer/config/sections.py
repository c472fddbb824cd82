"""The sections `model`, `data` and `megatron` of the configuration, and the names that are allowed in its lists,
such as `train.recompute_modules`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from playbook.planner.models import from_preset
from playbook.planner.shapes import DEEPEST, Shape
from playbook.yaml_files import Strict, did_you_mean


class GeneratedConfig(Strict):
    """Made-up data with natural statistics (`data.source: generated`); sample i is a function of `seed` and i alone."""

    seed: int = Field(default=0, ge=0)
    num_samples: int = Field(default=1_000_000, gt=0, le=2**40)
    """Documents, or image-question-answer samples, of one epoch."""
    mean_tokens: float = Field(default=427, gt=0, le=2**24)
    """Mean length of a text document; lengths are log-normal."""
    sigma: float = Field(default=1.1, ge=0, le=5)
    """Standard deviation of the logarithm of a document's length."""
    pool_images: int = Field(default=256, gt=0, le=1_000_000)
    """Distinct JPEG files; each is made once, on first use, and kept in `data.path` (or a cache folder of the user)."""
    images_per_sample: list[float] = Field(default_factory=lambda: [1.0], max_length=1000)
    """Weights of one, two, three ... images per sample; VQAv2 has one."""


class DataConfig(Strict):
    """The training data and how it is packed into rows."""

    kind: Literal["text", "vqa", "chat", "mock"] = "text"
    """text: packed text. vqa: images with questions and answers. chat: conversations, with images or without, by the tokenizer's chat
    template. mock: random tokens, no image; only to measure how far it misleads."""
    path: str | None = None
    """A file, a folder, or the name of a Hugging Face data set; None takes the bundled data."""
    source: Literal["auto", "files", "parquet", "vqav2", "webdataset", "huggingface", "generated"] = "auto"
    """The layout of `path`; auto looks at what is there. files: .txt and .jsonl, or a folder with samples.jsonl."""
    subset: str | None = None
    """Which part: the COCO subset of VQAv2 (train2014), or the configuration of a Hugging Face data set."""
    text_key: str = "text"
    """The column or key that holds a document's text."""
    generated: GeneratedConfig = Field(default_factory=GeneratedConfig)
    tokenizer: str = "byte"
    """`byte`, or the path of a tokenizer.json."""
    seq_len: int = Field(default=256, gt=0, le=2**24)
    pack: bool = True
    """Fill each row with several samples (block-diagonal attention); without it a row holds one sample,
    padded to seq_len where pad is set."""
    pack_buffer: int = Field(default=32, gt=0, le=2**16)
    """Samples among which first-fit packing chooses."""
    pad: bool = True
    """Pad every row to seq_len, so that shapes stay static."""
    pad_to_multiple: int | None = Field(default=None, gt=0)
    """With `pad: false`, pad every row to a multiple of this many tokens."""
    num_workers: int = Field(default=0, ge=0, le=1024)
    """Processes of each rank that read data; 0 reads in the rank itself."""
    images: Literal["variable", "fixed"] = "variable"
    """Image sizes as they come, or every image resized to one size (fixed_image_size)."""
    fixed_image_size: list[int] = Field(default_factory=lambda: [128, 128])
    """Height and width in pixels, used with `images: fixed`."""
    max_image_pixels: int = Field(default=65_536, gt=0, le=2**28)
    """Larger images are scaled down to at most this many pixels, aspect ratio kept."""
    min_image_pixels: int | None = Field(default=None, ge=0, le=2**28)
    """Smaller images are scaled up to at least this many pixels, as Qwen3-VL's preprocessor does, or to max_image_pixels where that is
    less. None takes what the image processor beside init.weights says, and scales nothing up where there is none."""
    max_source_pixels: int = Field(default=64_000_000, gt=0, le=2**31)
    """A file that claims more pixels is bad: a few kilobytes can unfold into gigabytes."""
    max_images_per_sample: int = Field(default=3, gt=0, le=2**16)
    """A sample with more is too long."""
    on_long_sample: Literal["drop", "cut"] = "drop"
    """An image-question-answer sample that is longer than a row, with its images scaled down as far as they may be. drop:
    it is left out, and counted.
    cut: its last images are left out, then its answer is cut at the end. A question is never cut:
    where it leaves no room, the sample is dropped."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """A row of the data that cannot be read as a sample. fail: stop with its file and line. skip: it is left out, named and counted."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """fail: stop with the file's name. skip: the image becomes grey, its sample bears no loss and keeps its place, and both are counted."""
    cache: Literal["none", "memory"] = "none"
    """memory: each worker keeps decoded and resized images, so that each is decoded once."""
    cache_gib: float = Field(default=1.0, gt=0)
    """What the cache of one worker may hold; images beyond it are decoded anew."""


RECOMPUTE_MODULES = ("layernorm", "core_attn", "moe_act", "mlp", "moe", "shared_experts", "mla_up_proj", "vision")
"""Names as megatron-core has them, and `vision` for the blocks of the vision tower."""

FREEZABLE = ("vision", "projector", "language_model")
"""The parts of a vision-language model that can be frozen."""

GRAPH_PARTS = ("attn", "moe_router", "moe_preprocess", "moe", "mlp")
"""Names as megatron-core has them; the torch backend captures the first three."""

OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp")
"""Parts whose inputs fine-grained offload takes to the host. Source: megatron-core 0.19.2,
`megatron/core/transformer/transformer_config.py`."""

_MEANT = {
    "vision_tower": "vision",
    "vision_model": "vision",
    "visual": "vision",
    "merger": "projector",
    "llm": "language_model",
    "decoder": "language_model",
    "text": "language_model",
    "up_proj": "mla_up_proj",
    "mla": "mla_up_proj",
    "norm": "layernorm",
    "norms": "layernorm",
    "layer_norm": "layernorm",
    "rmsnorm": "layernorm",
    "attn": "core_attn",
    "attention": "core_attn",
    "activation": "moe_act",
    "act": "moe_act",
    "swiglu": "moe_act",
    "ffn": "mlp",
    "experts": "moe",
    "shared_expert": "shared_experts",
}


def broken(rules: Mapping[str, object]) -> list[str]:
    """The lines of a table of rules whose condition holds."""
    return [line for line, holds in rules.items() if holds]


def among(names: tuple[str, ...]) -> AfterValidator:
    """Marks a list whose values are some of `names`."""
    return AfterValidator(partial(known, names=names))


def known(values: list[str], names: tuple[str, ...]) -> list[str]:
    """The values, refused unless each is one of `names` and none stands twice."""
    for value in values:
        if value not in names:
            meant = _MEANT.get(value)
            hint = f"; did you mean '{meant}'?" if meant in names else did_you_mean(value, list(names))
            raise ValueError(f"'{value}' is not known{hint}; there are {', '.join(names)}")
    if len(set(values)) < len(values):
        raise ValueError(f"{values} names something twice")
    return values


class MegatronConfig(Strict):
    """Settings of megatron-core that the torch backend has no counterpart of;
    `parallel.fsdp` and what belongs to it are the torch backend's.
    """

    kernels: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layers by Transformer Engine, or by this trainer and megatron-core alone; auto takes Transformer Engine where it is installed."""
    grouped_gemm: Literal["cublas", "cutlass"] = "cublas"
    """How Transformer Engine multiplies a rank's experts. cublas: a product for each expert. cutlass, on Hopper in 16 bits: one kernel for
    all experts, forward and for the gradient of the input; gradients of the weights stay a product for each."""
    data_parallel: Literal["ddp", "distributed_optimizer", "megatron_fsdp", "fsdp2"] = "distributed_optimizer"
    """What data-parallel ranks hold. ddp: copies of everything. distributed_optimizer: shares of the optimizer state. megatron_fsdp: what
    sharding_strategy says. fsdp2: shares of everything, by torch."""
    sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What Megatron-FSDP shards: nothing, optimizer state, gradients too (ZeRO-2), or parameters too (ZeRO-3)."""
    precision_aware_optimizer: bool = False
    """Moments in optimizer.moments_dtype and gradients in grad_reduce_dtype, with the part of the float32 master weights that bf16 weights
    lack beside them; without it all are float32."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are accumulated and summed over ranks."""
    overlap_grad_reduce: bool = True
    """Sum gradients over data-parallel ranks beside the backward pass."""
    overlap_param_gather: bool = True
    """Gather updated parameters beside the forward pass that needs them."""
    tp_comm_overlap: bool = False
    """Cut tensor-parallel collectives up and run them beside the matrix products (Transformer Engine's user buffers)."""
    overlap_expert_parallel: bool = False
    """Run the expert all-to-all of one micro-batch beside the computation of another."""
    cuda_graph_impl: Literal["none", "transformer_engine", "local", "full_iteration"] = "none"
    """Who captures. none: Transformer Engine, where train.cuda_graphs names parts. local: megatron-core. full_iteration: forward and
    backward pass of a step as one graph, without named parts."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    """How attention reaches the tokens of other context ranks: a ring, a gather of keys and values, an exchange of tokens for heads, or
    exchanges inside groups (of cp_sizes) and a ring among them."""
    cp_sizes: list[int] = Field(default_factory=list)
    """Ranks of the exchange and of the ring, with a2a+p2p."""
    offload_modules: Annotated[list[str], among(OFFLOAD_MODULES)] = Field(default_factory=list)
    """Parts of a layer whose inputs wait in host memory for the backward pass."""
    optimizer_offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer state that lives, and is updated, on the host; offload.optimizer alone means all of it."""
    fp8_param: bool = False
    """Keep weights in 8 bits and gather them so; with a recipe of precision.fp8."""
    recompute_layers: int | None = Field(default=None, gt=0)
    """With train.recompute full: layers per checkpoint (uniform), or layers of a chunk that are made again (block).
    None means 1, or all."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """uniform: every stretch of recompute_layers layers is made again from its input. block:
    only the first recompute_layers of a chunk are."""


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
        heads, kv_heads, section, half = self.num_heads, self.num_kv_heads, self.mrope_section, self.head_dim // 2
        turned = "head_dim" if self.attention == "gqa" else "qk_rope_head_dim"
        rules = {
            f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}": heads % kv_heads,
            "a model with experts needs 0 < top_k <= num_experts and expert_ffn_size > 0": (
                self.num_experts and not (0 < self.top_k <= self.num_experts and self.expert_ffn_size > 0)
            ),
            "a model without experts needs ffn_size > 0": not self.num_experts and self.ffn_size <= 0,
            **self._mla_rules(),
            **self._moe_rules(),
            f"{turned} {self.rotated} is odd; positions turn its values in pairs, so make it even": self.rotated % 2,
            f"mrope_section {section} must be three counts, of time, height and width; none below 0": (
                section is not None and (len(section) != 3 or min(section) < 0)
            ),
            f"mrope_section {section} must add up to head_dim / 2 = {half}": section is not None and sum(section) != half,
            "a model with a vision tower needs mrope_section and image_token_id": (
                self.vision is not None and (section is None or self.image_token_id is None)
            ),
        }
        if problems := broken(rules):
            raise ValueError(problems[0])
        return self

    def _mla_rules(self) -> dict[str, object]:
        sizes = {
            name: getattr(self, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        if self.attention == "gqa":
            foreign = ", ".join(broken({**sizes, "yarn": self.yarn}))
            return {f"{foreign} belong to attention: mla, and attention is gqa": foreign}
        missing = ", ".join(name for name, size in sizes.items() if not size and name != "q_lora_rank")
        heads, kv_heads, parts = self.num_heads, self.num_kv_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        return {
            f"attention mla needs {missing} > 0": missing,
            f"head_dim {self.head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {parts}": self.head_dim != parts,
            f"attention mla has as many key-value heads as heads: set num_kv_heads to {heads}, found {kv_heads}": kv_heads != heads,
        }

    def _moe_rules(self) -> dict[str, object]:
        """The rules for the fields of experts and of their router."""
        experts, dense, groups, top_groups = self.num_experts, self.first_dense_layers, self.router_groups, self.router_group_top_k
        if not experts:
            names = ("first_dense_layers", "shared_expert_ffn_size", "router_groups", "router_group_top_k", "router_bias")
            return {f"{name} needs a model with experts, and num_experts is 0": getattr(self, name) for name in names}
        return {
            f"first_dense_layers {dense} leaves none of {self.num_layers} layers with experts": dense >= self.num_layers,
            "first_dense_layers needs ffn_size > 0": dense and self.ffn_size <= 0,
            f"router_groups {groups} and router_group_top_k {top_groups} go together: set both, or neither": (
                bool(groups) != bool(top_groups)
            ),
            f"{experts} experts in router_groups {groups}, of which router_group_top_k {top_groups} are kept, "
            f"leave no top_k {self.top_k}": (
                groups and (experts % groups or top_groups > groups or self.top_k > top_groups * (experts // groups))
            ),
            "router_bias needs router_score: sigmoid": self.router_bias and self.router_score != "sigmoid",
        }

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
