"""CUDA graphs of the megatron backend: when they are captured, and by whom.

Source: megatron-core 0.19.2, `megatron/core/transformer/cuda_graphs.py` and `megatron/core/full_cuda_graph.py`; the order of calls is that
of Megatron-LM, `megatron/training/training.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from playbook_trainer.config import megatron_fields as fields
from playbook_trainer.config.megatron_checks import GRAPH_WARMUP
from playbook_trainer.config.tree import TrainerConfig


def forget(config: TrainerConfig) -> None:
    """Drop what an earlier run in this process left in megatron-core's classes, before a model is built:
    graphs, their inputs, their counters.
    """
    impl = fields.graph_impl(config)
    if impl == "local":
        from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

        delete_cuda_graphs()
    elif impl == "full_iteration":
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

        for stage in StaticBufferLoader.static_buffers:
            FullCudaGraphWrapper.cuda_graph[stage] = FullCudaGraphWrapper.result[stage] = None
            FullCudaGraphWrapper.curr_iteration[stage] = 0
            StaticBufferLoader.static_buffers[stage] = []


@contextmanager
def wrapping(config: TrainerConfig) -> Iterator[None]:
    """A block for wrapping the model in data parallelism, on the stream that CUDA graphs need.

    It holds the nodes that accumulate gradients, and these stay on the stream on which they were made. A graph of the whole iteration runs
    them, so it has to be the one that captures; the default stream takes no part in a capture.
    Source: Megatron-LM, `megatron/training/models/dist_utils.py`.
    """
    if fields.graph_impl(config) != "full_iteration":
        yield
        return
    from megatron.core import full_cuda_graph

    stream = getattr(full_cuda_graph, "get_shared_capture_stream", torch.cuda.Stream)()  # older versions capture on one of their own
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Graphs:
    """CUDA graphs of the megatron backend: of parts of layers, captured by Transformer Engine after the first steps,
    or of a whole iteration.
    """

    def __init__(self, config: TrainerConfig, transformer_config: Any, chunks: list[Any], optim: Any) -> None:
        """Prepare the capture by Transformer Engine, where that captures; otherwise nothing is prepared."""
        self.impl, self._step, self._chunks = fields.graph_impl(config), 0, chunks
        self._overlaps = config.megatron.overlap_param_gather and config.megatron.data_parallel == "distributed_optimizer"
        self._helper: Any = None
        if self.impl != "transformer_engine":
            return
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, init_num_microbatches_calculator
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        train, par = config.train, config.parallel
        destroy_num_microbatches_calculator()
        dp = dist.get_world_size() // (par.tp * par.pp * par.cp)
        init_num_microbatches_calculator(dist.get_rank(), None, train.global_batch_size, train.micro_batch_size, dp)
        self._helper = TECudaGraphHelper(
            model=chunks,
            config=transformer_config,
            seq_length=config.data.seq_len,
            micro_batch_size=train.micro_batch_size,
            optimizers=[optim],
        )

    def schedule(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The pipeline schedule; with `cuda_graph_impl: full_iteration`, wrapped so that it is captured as one graph."""
        if self.impl != "full_iteration":
            return run
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        captured: Callable[..., Any] = FullCudaGraphWrapper(run, cuda_graph_warmup_steps=GRAPH_WARMUP)
        return captured

    def before_step(self) -> None:
        """Capture the graphs before the step that follows the warm-up steps; does nothing in all others."""
        if self._helper is not None and self._step == GRAPH_WARMUP:
            if self._overlaps:
                for chunk in self._chunks:
                    chunk.disable_forward_pre_hook(param_sync=False)
            self._helper.create_cudagraphs()
            if self._overlaps:
                for chunk in self._chunks:
                    chunk.enable_forward_pre_hook()
                self._helper.cuda_graph_set_manual_hooks()
        self._step += 1
