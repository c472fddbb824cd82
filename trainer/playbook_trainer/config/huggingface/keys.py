"""What becomes of each key of a published `config.json`: it is read, it must have the one value that is trained with, or it has no effect on training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_VISION_THETA = 10_000.0
"""With which the vision tower turns positions. Source: transformers, Qwen3VLVisionRotaryEmbedding."""

PARTS = ("text_config", "vision_config", "rope_parameters", "rope_scaling")
"""Keys that hold others."""
_TRAINED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "": {},
    "text_config.": {
        "attention_dropout": (0,),
        "use_sliding_window": (False,),
        "output_router_logits": (False,),  # else transformers adds a balancing loss, as moe.aux_loss_coeff does here
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    "rope_parameters.": {"partial_rotary_factor": (1,)},
    "vision_config.": {"attention_dropout": (0,)},
    "vision_config.rope_parameters.": {"rope_theta": (_VISION_THETA,), "rope_type": ("default", "axial")},
}
"""By part of the file: keys of which some values alone are trained with."""

WITHOUT_EFFECT = frozenset(
    {
        # names and versions
        *("architectures", "model_type", "transformers_version", "_name_or_path", "auto_map", "unsloth_fixed", "unsloth_version"),
        # precisions, which train.dtype and checkpoint.export_dtype decide, and ways to compute the same
        *("dtype", "torch_dtype", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "use_cache"),
        *("pretraining_tp", "ep_size"),
        # what a call returns
        *("output_hidden_states", "output_attentions", "return_dict"),
        # of other tasks and architectures
        *("is_encoder_decoder", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "video_token_id"),
        # where no attention slides
        *("sliding_window", "max_window_layers"),
        # a start that texts of this trainer do not have, weights of losses that moe.aux_loss_coeff decides, and sums of other keys
        *("bos_token_id", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "qk_head_dim"),
    }
)
"""Keys of any part that change nothing that is computed or trained."""


def untrained(parts: Mapping[str, tuple[Mapping[str, Any], Collection[str]]]) -> list[str]:
    """What the parts of a file ask for that is not trained with here, a clause for each key; a part comes with the names of its keys that are read."""
    clauses = []
    for prefix, (part, read) in parts.items():
        for key, value in part.items():
            if value is None or key in read or key in WITHOUT_EFFECT:
                continue
            if (trained := _TRAINED[prefix].get(key)) is not None:
                clauses += [f"{prefix}{key} {value!r}, here {trained[0]!r}"] if value not in trained else []
            elif key in PARTS:
                clauses += [] if isinstance(value, dict) else [f"{prefix}{key} {value!r}, here a mapping"]
            elif key == "layer_types":
                full = isinstance(value, list) and set(map(str, value)) <= {"full_attention"}
                clauses += [] if full else [f"{prefix}{key} {value!r}, here full_attention"]
            elif value is not False:  # a switch that is off
                clauses.append(f"{prefix}{key}, which this trainer does not know (take it out of the file if training need not read it)")
    return clauses
