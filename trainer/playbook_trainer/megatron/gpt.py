"""The text models on megatron-core's GPTModel: Qwen3 dense, Qwen3 MoE, and DeepSeek-V3 with MLA, shared experts and multi-token prediction.

Layers are Transformer Engine's where it is installed, and `megatron.local`'s elsewhere; both name their weights alike.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from playbook.errors import ConfigError
from playbook_trainer.axes import Axis
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.megatron.experts import Experts
from playbook_trainer.megatron.settings import has_transformer_engine
from playbook_trainer.torch.model import ops
from playbook_trainer.torch.model.attention import attend
from playbook_trainer.torch.parallel.comm import copy_to

# Attention of packed documents inside megatron-core's layers, for hosts without Transformer Engine: SDPA on a CPU, flash or cuDNN on a
# GPU.
# megatron-core's own attention of that case keeps the scores of whole rows and takes no packed documents, and its MLA asks for head sizes
# of values that differ from those of keys.
# Suffixes: S tokens of a row, B rows, N tokens of all rows, H query heads, G key/value heads, d head size of queries and keys, e of
# values.


class PackedAttention(MegatronModule):
    """Causal attention within each document, with the interface of megatron-core's DotProductAttention."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ConfigError("context parallelism needs Transformer Engine's attention: install it, or set parallel.cp: 1")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """The attention itself; documents end where `packed_seq_params` says, or with their row.

        Shapes: query (S, B, H, d), key (S, B, G, d), value (S, B, G, e), returns (S, B, H e); packed (N, H, d), ..., returns (N, H e).
        """
        if packed_seq_params is not None:
            return self.documents(query, key, value, packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q).flatten(1)
        size, rows = query.shape[:2]
        q_NHd, k_NGd, v_NGe = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        borders = torch.arange(0, (rows + 1) * size, size, dtype=torch.int32, device=query.device)
        out_NHe = self.documents(q_NHd, k_NGd, v_NGe, borders, size)
        return out_NHe.flatten(1).unflatten(0, (rows, size)).transpose(0, 1).contiguous()

    def documents(self, q_NHd: Tensor, k_NGd: Tensor, v_NGe: Tensor, borders: Tensor, longest: int) -> Tensor:
        """The attention of documents that lie end to end: (N, H, e)."""
        size, width = q_NHd.shape[2], v_NGe.shape[2]
        if self.softmax_scale is not None:
            q_NHd = q_NHd * (self.softmax_scale * math.sqrt(size))
        if q_NHd.is_cuda and width < size:
            # Flash attention has one head size: the columns added to values are zero, and dropped from the result.
            v_NGe = pad(v_NGe, (0, size - width))
        borders = borders.to(torch.int32)
        return attend(q_NHd, k_NGd, v_NGe, borders, borders, longest, longest, causal=True)[..., :width]


# Layers of megatron-core for hosts without Transformer Engine.
# Norms and the linear layers behind them have the names that Transformer Engine's have, so weights and checkpoints look the same either
# way.


def duplicated(config: Any, *shape: int) -> nn.Parameter:
    """Ones that every tensor-parallel rank holds, marked so that gradients are added up where each rank has seen a part of the tokens."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = nn.Parameter(torch.ones(shape, dtype=config.params_dtype, device=device))
    weight.sequence_parallel = config.sequence_parallel
    return weight


class RMSNorm(nn.Module):
    """Root-mean-square norm; megatron-core's wrapper of torch's refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = duplicated(config, hidden_size), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return ops.norm(x, self.weight.to(x.dtype), self.eps)


class NormLinear(ColumnParallelLinear):
    """A norm and a column-parallel linear layer behind it, with the names of Transformer Engine's LayerNormLinear."""

    def __init__(self, input_size: int, output_size: int, **how: Any) -> None:
        super().__init__(input_size, output_size, **how)
        self.eps = how["config"].layernorm_epsilon
        self.layer_norm_weight = duplicated(how["config"], input_size)

    def forward(self, input_: Tensor, *args: Any, **how: Any) -> Any:
        """Normalise, then multiply."""
        return super().forward(ops.norm(input_, self.layer_norm_weight.to(input_.dtype), self.eps), *args, **how)


class Down(nn.Module):
    """A projection of MLA down to compressed rows, whole on every tensor-parallel rank,
    as Transformer Engine's `duplicated` linear layer is.

    The last `rotated` columns go to the heads as they are, and each rank has only its own heads: without sequence parallelism, their
    gradients are summed here (with it, megatron-core's gather of these columns does so).
    """

    def __init__(self, config: Any, output_size: int, rotated: int = 0) -> None:
        super().__init__()
        self.weight = duplicated(config, output_size, config.hidden_size)
        if config.perform_initialization:
            config.init_method(self.weight)
        self.plain, self.rotated = output_size - rotated, 0 if config.sequence_parallel else rotated
        group = parallel_state.get_tensor_model_parallel_group()
        self.tp = Axis("tp", group.size(), group.rank(), group)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The product, and no bias."""
        out = linear(x, self.weight)
        if self.rotated:
            plain, rotated = out.split([self.plain, self.rotated], dim=-1)
            out = torch.cat([plain, copy_to(rotated, self.tp)], dim=-1)
        return out, None


class TopKRouter(router.TopKRouter):
    """megatron-core's router, with scores by torch; Megatron-FSDP knows a router by the name of its class.

    megatron-core multiplies by Transformer Engine wherever that is installed, and that rounds products of float32 to TF32.
    Source: Transformer Engine, `transformer_engine/common/gemm/cublaslt_gemm.cu` (CUBLAS_COMPUTE_32F_FAST_TF32).
    """

    def gating(self, input: Tensor) -> Tensor:
        """Scores (S, B, E) of rows (S, B, D)."""
        rows_ND = input.flatten(0, -2)
        wide = self.config.moe_router_dtype == "fp32"
        scores_NE = ops.wide_linear(rows_ND, self.weight) if wide else linear(rows_ND, self.weight)
        return scores_NE.unflatten(0, input.shape[:-1])


_UP_AND_NORMS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class Mla(MLASelfAttention):
    """Multi-head latent attention with down projections of our own.

    megatron-core without Transformer Engine cuts them over tensor-parallel ranks, and then gives the rotated part of the keys the
    gradients of one rank's heads only.
    """

    def __init__(self, config: Any, *args: Any, **how: Any) -> None:
        super().__init__(config, *args, **how)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Down(config, config.q_lora_rank)
        rotated = config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Down(config, config.kv_lora_rank + rotated, rotated)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The parts as they are given; megatron-core since 0.17 would look for those of `transformer_impl`."""
        return {name: getattr(submodules, name) for name in _UP_AND_NORMS}


class LocalLayers(LocalSpecProvider):
    """The modules of which a layer is built; `loop` multiplies experts one by one on every device."""

    def __init__(self, loop: bool = False) -> None:
        self.experts = SequentialMLP if loop else Experts

    def fuse_layernorm_and_linear(self) -> bool:
        """Dense layers have their norm in the linear layer."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """The linear layer with a norm."""
        return NormLinear

    def layer_norm(self, *_: Any, **__: Any) -> Any:
        """A norm by itself."""
        return RMSNorm

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        """The experts of a rank: a pair of class and parts up to 0.16, a callable since."""
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=self.activation_func())
        if "moe_use_legacy_grouped_gemm" in inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters:
            return self.experts, parts
        return partial(self.experts, submodules=parts)


def layer(config: Any, parts: LocalLayers, *, moe: bool) -> ModuleSpec:
    """A decoder layer, with experts or with a dense MLP."""
    mla = config.multi_latent_attention
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm if mla else IdentityOp,
            self_attention=_mla(config) if mla else _gqa(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if moe else IdentityOp,
            mlp=_mlp(config, parts, moe=moe),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp(config: Any, parts: LocalLayers, *, moe: bool) -> Any:
    """A dense MLP, or experts with our router: a ModuleSpec up to 0.16, a callable with the parts as an argument since."""
    spec = get_mlp_module_spec_for_backend(parts, num_experts=config.num_moe_experts if moe else None)
    if moe:
        (spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules).router = TopKRouter
    return spec


def _gqa(config: Any) -> ModuleSpec:
    """Grouped-query attention."""
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormLinear, core_attention=PackedAttention, linear_proj=RowParallelLinear, q_layernorm=norm, k_layernorm=norm
        ),
    )


def _mla(config: Any) -> ModuleSpec:
    """Multi-head latent attention. The norms of the compressed rows lie in the linear layers behind them: as modules of their own,
    megatron-core would add up their gradients over tensor-parallel ranks that each have the whole of them.
    """
    up = NormLinear if config.qk_layernorm else ColumnParallelLinear
    return ModuleSpec(
        module=Mla,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=up,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=up,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )


def build_text(
    config: TrainerConfig,
    transformer_config: Any,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    model: Callable[..., Any] = GPTModel,
    **more: Any,
) -> Any:
    """One chunk of the model on this rank, its weights not yet those of the seed or the folder (see `weights.initialise`).

    `model` may be a subclass of GPTModel, and `more` goes to its constructor in place of what a text model has.

    Raises:
        ConfigError: Transformer Engine's layers have no such model.
    """
    te = has_transformer_engine(config)
    if te and config.model.attention == "mla" and config.model.qk_norm and not config.model.q_lora_rank:
        raise ConfigError(
            "model.q_lora_rank 0 with model.qk_norm: megatron-core would norm the layer's input a second time; "
            "set megatron.kernels: local, or compress queries"
        )
    parts = None if te else LocalLayers(loop=config.moe.experts == "loop")
    block = _decoder_block(transformer_config, parts, vp_stage)
    settings = {
        "vocab_size": config.model.vocab_size,
        "max_sequence_length": config.data.seq_len,
        "share_embeddings_and_output_weights": config.model.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": config.model.rope_theta,
        "pre_process": pre_process,
        "post_process": post_process,
        "mtp_block_spec": _prediction_block(transformer_config, parts, vp_stage),
        "vp_stage": vp_stage,
        **more,
    }
    chunk = model(config=transformer_config, transformer_layer_spec=block, **settings)
    _reduce_experts_apart(chunk, transformer_config)
    return chunk


def _reduce_experts_apart(chunk: nn.Module, transformer_config: Any) -> None:
    """Experts that are not cut as the rest is have their gradients summed over other ranks; 0.16.1 sees that only where ep is above 1."""
    if (
        transformer_config.num_moe_experts
        and transformer_config.expert_tensor_parallel_size != transformer_config.tensor_model_parallel_size
    ):
        for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
            for parameter in layer.experts.parameters():
                parameter.allreduce = False


def _decoder_block(transformer_config: Any, parts: LocalLayers | None, vp_stage: int | None = None) -> Any:
    """The layers that this rank builds in this chunk, of our parts, or of Transformer Engine's (None);
    `moe_layer_freq` says which are dense.
    """
    if parts is None:
        return specs.get_gpt_decoder_block_spec(transformer_config, use_transformer_engine=True, vp_stage=vp_stage)
    every = [layer(transformer_config, parts, moe=moe) for moe in moe_layers(transformer_config)]
    layout = transformer_config.pipeline_model_parallel_layout
    if layout is not None:
        indices = layout.get_layer_id_list(vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage)
        indices = range(first, first + get_num_layers_to_build(transformer_config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[every[i] for i in indices], layer_norm=RMSNorm)


def moe_layers(transformer_config: Any) -> list[bool]:
    """Which layers have experts."""
    layers, frequency = transformer_config.num_layers, transformer_config.moe_layer_freq
    if not transformer_config.num_moe_experts:
        return [False] * layers
    return [not i % frequency for i in range(layers)] if isinstance(frequency, int) else [bool(has) for has in frequency]


def _prediction_block(transformer_config: Any, parts: LocalLayers | None, vp_stage: int | None = None) -> Any:
    """The depths of multi-token prediction, whose layer is like the decoder's last; None without them, or on a rank that builds none."""
    if not transformer_config.mtp_num_layers:
        return None
    if parts is None:
        last = specs.get_gpt_decoder_layer_specs(transformer_config, use_transformer_engine=True)[-1]
        return specs.get_gpt_mtp_block_spec(transformer_config, last, use_transformer_engine=True, vp_stage=vp_stage)
    last = layer(transformer_config, parts, moe=moe_layers(transformer_config)[-1])
    return specs.get_gpt_mtp_block_spec_for_backend(transformer_config, last, parts, vp_stage=vp_stage)
