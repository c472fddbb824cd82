"""Pipeline schedules: which layers a stage holds, how many microbatches it keeps in flight, and how much of a step it waits.

Source: Megatron-LM, `megatron/core/pipeline_parallel/schedules.py` (`get_pp_rank_microbatches`, `get_schedule_table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from playbook.errors import ConfigError

_WRITTEN_OUT = 4
"""Layers of a chunk from which on they are counted instead of listed."""


def split(layers: int, pp: int, vpp: int = 1) -> list[int]:
    """Decoder layers per chunk, in the order of the model: equal, or else as even as embedding and output layer allow.

    Where the layers do not divide, embedding and output layer count as one layer each, and longer chunks come first.

    Raises:
        ConfigError: there are more chunks than layers, embedding and output layer.
    """
    chunks = pp * vpp
    if layers % chunks == 0:
        return [layers // chunks] * chunks
    if chunks > layers + 2:
        raise ConfigError(
            f"{layers} layers, embedding and output do not fill {chunks} chunks; expected at most {layers + 2}, lower pp or vpp"
        )
    least, more = divmod(layers + 2, chunks)
    sizes = [least + (i < more) for i in range(chunks)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return sizes


def string(sizes: Sequence[int], mtp: int = 0) -> str:
    """Chunks as `--pipeline-model-parallel-layout` takes them: E the embedding, t a layer, m a depth of prediction, L the loss, | between
    chunks.

    Source: Megatron-LM, `megatron/core/transformer/pipeline_parallel_layer_layout.py` (`parse_str_to_list`, `validate_layer_layout`).
    """
    first, *middle = [f"{_layers(n)}|" for n in sizes[:-1]] or [""]
    runs = ((chunk, len(list(group))) for chunk, group in groupby(middle))
    return f"E{first}{''.join(f'({c})*{n}' if n > 2 else c * n for c, n in runs)}{_layers(sizes[-1])}{'m' * mtp}L"


def _layers(count: int) -> str:
    return "t" * count if count < _WRITTEN_OUT else f"t*{count}"


def indices(sizes: Sequence[int], pp: int, stage: int) -> list[list[int]]:
    """The layer indices of each chunk of a stage: chunk `i` of the model belongs to stage `i % pp`."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(range(starts[i], starts[i] + sizes[i])) for i in range(stage, len(sizes), pp)]


def in_flight(*, pp: int, stage: int, microbatches: int, vpp: int = 1, overlap: bool = False, sizes: Sequence[float] = ()) -> list[int]:
    """Microbatches whose activations a stage holds at its peak, per chunk of the stage.

    One forward, one backward without interleaving: `min(m, pp - stage)`. Interleaved, in units of chunks, the warm-up forwards
    `2 (pp - stage - 1) + (vpp - 1) pp` and one more, since chunks take microbatches in groups of pp
    (`microbatch_group_size_per_vp_stage` as it is by default); overlap of expert communication keeps one more again. `sizes` are the bytes
    that a microbatch keeps in each chunk of the stage: where they differ, the peak may come later, once more microbatches are in the large
    ones.
    """
    if vpp == 1:
        # Without a pipeline, the next micro-batch's forward pass fills what this one's backward pass frees, layer by layer.
        return [min(microbatches, pp - stage + (1 if overlap and pp > 1 else 0))]
    alive = min(microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1 + (1 if overlap else 0))
    # The peak comes after `alive` forwards or within one turn of the chunks, so later microbatches need no place in the order.
    order, counts = _order(min(microbatches, alive + 2 * pp), vpp, pp, alive)
    return _heaviest(list(counts), order, alive, pp * vpp, sizes) if len(set(sizes)) > 1 else list(counts)


def _heaviest(counts: list[int], order: Sequence[int], alive: int, turn: int, sizes: Sequence[float]) -> list[int]:
    """What is held at the peak once each backward, through the chunks from last to first, makes room for one forward."""
    peak, most = counts, sum(n * size for n, size in zip(counts, sizes, strict=True))
    now, weight = list(counts), most
    for back, forth in zip(order, order[alive : alive + turn], strict=False):
        back = len(sizes) - 1 - back
        now[back], weight = now[back] - 1, weight - sizes[back]
        now[forth], weight = now[forth] + 1, weight + sizes[forth]
        if weight > most * (1 + 1e-9):  # not by rounding alone
            peak, most = list(now), weight
    return peak


@lru_cache(maxsize=4096)
def _order(microbatches: int, vpp: int, group: int, alive: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The chunk of each forward of a stage, in order: a group of microbatches passes one chunk, then the next; and how many of each are
    among the first `alive`.
    """
    rounds = [min(group, microbatches - start) for start in range(0, microbatches, group)]
    order = tuple(chunk for size in rounds for chunk in range(vpp) for _ in range(size))
    return order, tuple(order[:alive].count(chunk) for chunk in range(vpp))


def bubble(*, pp: int, microbatches: int, vpp: int = 1) -> float:
    """The share of a step that a stage waits for the pipeline to fill and drain: `(pp - 1) / (vpp m + pp - 1)`.

    Source: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv 2104.04473, section 2.2.
    """
    return (pp - 1) / (vpp * microbatches + pp - 1)
