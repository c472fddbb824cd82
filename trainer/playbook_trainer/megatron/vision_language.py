"""Qwen3-VL on megatron-core's GPTModel: the vision tower before the decoder, positions in three dimensions,
and DeepStack inside its first layers.

The tower (`models.vision`) is the same module as in the torch backend, under the same names (`vision.*`). It lives on the first pipeline
stage; every tensor- and context-parallel rank encodes all images of its micro-batch and keeps the visual tokens among its own rows.

Suffixes: N tokens of the context-parallel rank, n rows of the decoder's input (N, or N / tp with sequence parallelism), V visual tokens
among them, k DeepStack layers, D hidden size, d head size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from playbook_trainer.config.tree import ModelConfig, TrainerConfig
from playbook_trainer.data.batch import VisionBatch
from playbook_trainer.megatron.gpt import build_text
from playbook_trainer.torch.build import compile_regions, freeze
from playbook_trainer.torch.model.decoder import blank_image, rotary_angles
from playbook_trainer.torch.model.vision import VisionBlock, VisionTower


def build(config: TrainerConfig, transformer_config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    """One chunk of the model on this rank, as `model.build_text` does it for text; what `train.freeze` names needs no gradient.

    Raises:
        ConfigError: as `model.build_text`.
    """
    whole = partial(VisionLanguageModel, config)
    model = build_text(
        config, transformer_config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, model=whole,
        position_embedding_type="none",
    )  # fmt: skip
    freeze(model, config.train.freeze)
    compile_regions(model, config.train.compile)
    return model


class VisionLanguageModel(GPTModel):
    """One pipeline stage of Qwen3-VL: a GPTModel whose first stage also holds the vision tower.

    `options` are GPTModel's own arguments.
    """

    _fsdp_modules = (VisionBlock,)
    """Units of FSDP besides megatron's own layers; its wrapper of torch's FSDP2 reads this name, Megatron-FSDP is told by its caller."""

    def __init__(self, trainer_config: TrainerConfig, *, transformer_layer_spec: TransformerBlockSubmodules, **options: Any) -> None:
        layers = [rotated(spec) for spec in transformer_layer_spec.layer_specs]
        super().__init__(transformer_layer_spec=replace(transformer_layer_spec, layer_specs=layers), **options)
        model = trainer_config.model
        assert model.vision is not None
        self.vision_config, self.deepstack_layers = model.vision, len(model.vision.deepstack_layers)
        # As if built for `mrope`, whose own rotary module takes frequencies in three blocks and not in turn.
        self.position_embedding_type, self.mrope_section = "mrope", model.mrope_section
        self.rotary_pos_emb = InterleavedRotary(model)
        if self.pre_process:
            self.vision = _tower(trainer_config, self.config)
            for layer in self.decoder.layers[: self.deepstack_layers]:
                layer.register_forward_hook(_add_features, with_kwargs=True)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        *,
        positions_3N: Tensor | None = None,
        vision: VisionBatch | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As GPTModel's, of tokens (1, N).

        `positions_3N` takes the place of `position_ids`; every stage needs it. The first stage needs `vision`, None where the micro-batch
        has no image; its indices count this rank's rows (after the cuts of context and sequence parallelism).
        """
        if self.pre_process:
            rows = self.embedding(input_ids=input_ids, position_ids=position_ids)
            kwargs["decoder_input"], kwargs["extra_block_kwargs"] = self.see(rows, vision)
        return super().forward(input_ids, position_ids if positions_3N is None else positions_3N, attention_mask, **kwargs)

    def see(self, rows_n1D: Tensor, vision: VisionBatch | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The decoder's input with the images in their places, and what DeepStack adds to its first layers.

        Features travel in the slots for cross-attention, which a decoder-only layer hands on unread: so recomputation of whole layers
        treats them as inputs, with gradients, and each micro-batch of a pipeline keeps its own.
        """
        dtype, precision = rows_n1D.dtype, self.config.params_dtype
        if vision is None:
            # The tower runs all the same: its gradient is zero, not absent, and gathers of sharded weights stay in step.
            encoded, deepstack = self.vision(blank_image(self.vision_config, rows_n1D.device), precision)
            return rows_n1D + (0 * sum(t.sum() for t in (encoded, *deepstack))).to(dtype), {}
        encoded, deepstack = self.vision(vision, precision)
        take = vision.visual_take_V
        image_VD, *features = (t.to(dtype) if take is None else t.to(dtype).index_select(0, take) for t in (encoded, *deepstack))
        rows_n1D = rows_n1D.index_copy(0, vision.visual_index_V, image_VD.unsqueeze(1))
        if not features:
            return rows_n1D, {}
        return rows_n1D, {"context": torch.stack(features), "context_mask": vision.visual_index_V}


class InterleavedRotary(nn.Module):
    """Angles of Qwen3-VL's M-RoPE for this rank's tokens, in the place of megatron's rotary module, which holds only the sectioned kind."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model_config = config

    def forward(self, positions_3N: Tensor, mrope_section: list[int] | None = None, cp_group: Any = None) -> Tensor:
        """Float32 (N, 1, 1, d). The positions are this rank's already, so no share is taken of them here."""
        return rotary_angles(positions_3N, self.model_config)[:, None, None, :]


class RotatedSelfAttention(SelfAttention):
    """Self-attention that rotates every token by its own row of angles, whether documents are packed or not.

    For packed documents megatron takes angles by the distance from the document's start: tokens of an image have other positions than
    that, and its exact variant reads the borders back from the device in every layer.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        """As SelfAttention's; `rotary_pos_emb` (N, 1, 1, d)."""
        self._angles = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        finally:
            self._angles = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Queries and keys rotated, and values, each (N, 1, heads, d)."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        query, key = (apply_rotary_pos_emb(t, self._angles, config=self.config, cp_group=self.pg_collection.cp) for t in (query, key))
        return query, key, value


def _add_features(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Forward hook of a decoder layer: DeepStack's features of this layer, added at the visual tokens;
    the last one takes them off the way.
    """
    features_kVD, index_V = kwargs.get("context"), kwargs.get("context_mask")
    if features_kVD is None:
        return output
    number = layer.layer_number - 1
    rows_n1D = output[0].index_add(0, index_V, features_kVD[number].unsqueeze(1).to(output[0].dtype))
    return rows_n1D, features_kVD if number + 1 < len(features_kVD) else None


def rotated(spec: ModuleSpec) -> ModuleSpec:
    """The specification of a decoder layer, with self-attention that rotates token by token."""
    attention = spec.submodules.self_attention
    assert attention.module is SelfAttention, f"layers with {attention.module} cannot be given angles by token"
    return replace(spec, submodules=replace(spec.submodules, self_attention=replace(attention, module=RotatedSelfAttention)))


def _tower(config: TrainerConfig, transformer_config: Any) -> VisionTower:
    """The tower in the precision of megatron's parameters, marked for its reductions over tensor-parallel ranks, which hold copies of it.

    With sequence parallelism each rank has seen the gradients of its own rows: parts, to be summed. Without it, all have computed the same,
    but for the order of additions in attention's backward pass; the mean keeps the copies equal.
    """
    model, train = config.model, config.train
    assert model.vision is not None
    device: Any = "cpu" if transformer_config.use_cpu_initialization else torch.cuda.current_device()
    with torch.device("meta" if getattr(transformer_config, "init_model_with_meta_device", False) else device):
        tower = VisionTower(model.vision, model.hidden_size, recompute="vision" in train.recompute_modules, attention=train.attention)
    tower.to(transformer_config.params_dtype)
    for parameter in tower.parameters():
        if transformer_config.sequence_parallel:
            parameter.sequence_parallel = True
        else:
            parameter.average_gradients_across_tp_domain = True
    return tower
