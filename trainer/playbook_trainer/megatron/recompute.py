"""How many layers megatron-core's full recompute takes. Arithmetic alone, without torch: the real run, the dry run and the export agree on it."""

from __future__ import annotations

from playbook_trainer.config.tree import TrainerConfig


def longest_chunk(config: TrainerConfig) -> int:
    """Decoder layers of the pipeline's longest chunk."""
    par = config.parallel
    return max(par.pipeline_layout) if par.pipeline_layout else config.model.num_layers // (par.pp * par.vpp)


def recompute_layers(config: TrainerConfig) -> int:
    """Layers per checkpoint (uniform), or layers of a chunk that are made again (block): those chosen, else one, or all of every chunk.

    Chunks count one by one, and a number beyond a chunk's length means all of it.
    Source: Megatron-LM, `megatron/core/recompute.py` (0.16.1: `megatron/core/transformer/transformer_block.py`).
    """
    own = config.megatron
    return own.recompute_layers or (1 if own.recompute_method == "uniform" else longest_chunk(config))
