"""The text models on megatron-core's GPTModel: Qwen3 dense, Qwen3 MoE, and DeepSeek-V3 with MLA, shared experts and multi-token prediction.

Layers are Transformer Engine's where it is installed, and `megatron.local`'s elsewhere; both name their weights alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from playbook.errors import ConfigError
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.megatron.model import layers as local
from playbook_trainer.megatron.settings import has_transformer_engine


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
    parts = None if te else local.LocalLayers(loop=config.moe.experts == "loop")
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


def _decoder_block(transformer_config: Any, parts: local.LocalLayers | None, vp_stage: int | None = None) -> Any:
    """The layers that this rank builds in this chunk, of our parts, or of Transformer Engine's (None); `moe_layer_freq` says which are dense."""
    if parts is None:
        return specs.get_gpt_decoder_block_spec(transformer_config, use_transformer_engine=True, vp_stage=vp_stage)
    every = [local.layer(transformer_config, parts, moe=moe) for moe in moe_layers(transformer_config)]
    layout = transformer_config.pipeline_model_parallel_layout
    if layout is not None:
        held = layout.get_layer_id_list(vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage)
        held = range(first, first + get_num_layers_to_build(transformer_config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[every[i] for i in held], layer_norm=local.RMSNorm)


def moe_layers(transformer_config: Any) -> list[bool]:
    """Which layers have experts."""
    layers, frequency = transformer_config.num_layers, transformer_config.moe_layer_freq
    if not transformer_config.num_moe_experts:
        return [False] * layers
    return [not i % frequency for i in range(layers)] if isinstance(frequency, int) else [bool(has) for has in frequency]


def _prediction_block(transformer_config: Any, parts: local.LocalLayers | None, vp_stage: int | None = None) -> Any:
    """The depths of multi-token prediction, whose layer is like the decoder's last; None without them, or on a rank that builds none."""
    if not transformer_config.mtp_num_layers:
        return None
    if parts is None:
        last = specs.get_gpt_decoder_layer_specs(transformer_config, use_transformer_engine=True)[-1]
        return specs.get_gpt_mtp_block_spec(transformer_config, last, use_transformer_engine=True, vp_stage=vp_stage)
    last = local.layer(transformer_config, parts, moe=moe_layers(transformer_config)[-1])
    return specs.get_gpt_mtp_block_spec_for_backend(transformer_config, last, parts, vp_stage=vp_stage)
