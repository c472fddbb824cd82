"""Attention of packed documents inside megatron-core's layers, for hosts without Transformer Engine: SDPA on a CPU, flash or cuDNN on a GPU.

megatron-core's own attention of that case keeps the scores of whole rows and takes no packed documents, and its MLA asks for head sizes
of values that differ from those of keys.

Suffixes: S tokens of a row, B rows, N tokens of all rows, H query heads, G key/value heads, d head size of queries and keys, e of values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import pad

from playbook.errors import ConfigError
from playbook_trainer.torch.model.attention import attend


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
            padded = packed_seq_params.cu_seqlens_q_padded
            borders = packed_seq_params.cu_seqlens_q if padded is None else padded
            return self.documents(query, key, value, borders, packed_seq_params.max_seqlen_q).flatten(1)
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
