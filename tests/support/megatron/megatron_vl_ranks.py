"""Qwen3-VL on megatron-core over gloo: `python megatron_vl_ranks.py JOBS FOLDER`.

JOBS is a JSON list of {"name", "model", "ranks", "words"}. Each is one accumulated step over four micro-batches, two of them without an image,
with megatron-core's own schedule, DDP and reductions. FOLDER/name.json receives the loss, FOLDER/name the gradients, written as if they were the
weights of a Hugging Face folder; `reference-MODEL` is the same of the torch backend on one rank.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_shim
import parity
import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from playbook.paths import data_root
from playbook_bench.launch.local import free_port
from playbook_trainer.axes import Axes, Axis
from playbook_trainer.config.tree import TrainerConfig, load, parse_overrides
from playbook_trainer.data.batch import Batch
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.megatron import settings as mapping
from playbook_trainer.megatron import vision_language, weights
from playbook_trainer.torch.parallel import tensor
from playbook_trainer.torch.parallel.context import _filled

TOKENS = 192
COMMON = ["backend=megatron", "megatron.kernels=local", f"data.seq_len={TOKENS}"]


def configuration(job: dict[str, Any]) -> TrainerConfig:
    return load(data_root("configs") / f"{job['model']}.yaml", parse_overrides([*COMMON, *job["words"]]))


def batches(config: TrainerConfig) -> list[Batch]:
    """Of one length, as a pipeline needs them: two with images of several sizes, two without."""
    model = config.model

    def images(seed: int) -> list[parity.Document]:
        grids = [[(1, 4, 6), (1, 2, 4)], [], [(1, 6, 4)]]
        return [parity.Document(model, text, grid, seed + i) for i, (text, grid) in enumerate(zip((20, 30, 13), grids, strict=True))]

    every = [images(0), [parity.Document(model, 60, [], 5)], images(9), [parity.Document(model, 90, [], 13)]]
    return [_filled(parity.pack(documents), TOKENS) for documents in every]


def reference(job: dict[str, Any], folder: Path) -> None:
    """The torch backend's weights, loss and gradients, each for all jobs with this model."""
    config = configuration(job)
    values = parity.random_state(config.model)
    hf.save_safetensors(config.model, values, folder / f"weights-{job['model']}")
    model, every = parity.ours(config.model, values), batches(config)
    labels, total = sum(b.num_loss for b in every), 0.0
    for batch in every:
        loss = model(batch) / labels
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    hf.save_safetensors(config.model, gradients, folder / f"reference-{job['model']}")
    (folder / f"reference-{job['model']}.json").write_text(json.dumps({"loss": total}))


def train_one(job: dict[str, Any], folder: Path, rank: int, store: Any) -> None:
    config = configuration(job)
    par, ranks = config.parallel, job["ranks"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
    state.initialize_model_parallel(
        par.tp, par.pp, context_parallel_size=par.cp, expert_model_parallel_size=par.ep, expert_tensor_parallel_size=par.etp
    )
    model_parallel_cuda_manual_seed(1)
    settings = TransformerConfig(**mapping.transformer(config, TransformerConfig), use_cpu_initialization=True)
    first, last = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
    model = vision_language.build(config, settings, pre_process=first, post_process=last)
    weights.load([model], config.model, folder / f"weights-{job['model']}")
    if job.get("save"):
        weights.save([model], config.model, folder / f"saved-{job['name']}")
    wrapped = DistributedDataParallel(settings, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    settings.finalize_model_grads_func, settings.no_sync_func = finalize_model_grads, wrapped.no_sync
    step(wrapped, config, last)  # in the first pass DDP learns which gradients come when; in the second one that is absent stops it
    loss = step(wrapped, config, last)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    weights.save([model], config.model, folder / job["name"])
    if rank == 0:
        (folder / f"{job['name']}.json").write_text(json.dumps({"loss": loss}))
    dist.barrier()
    state.destroy_model_parallel()
    dist.destroy_process_group()


def step(model: Any, config: TrainerConfig, last: bool) -> float:
    """Forward and backward passes of all micro-batches of this data-parallel rank; the mean loss per label over all ranks."""
    every = batches(config)
    labels, dp, tp = sum(b.num_loss for b in every), state.get_data_parallel_world_size(), state.get_tensor_model_parallel_world_size()
    own = every[state.get_data_parallel_rank() :: dp]
    axes = Axes(tp=Axis("tp", tp, state.get_tensor_model_parallel_rank()), sequence_parallel=config.parallel.sequence_parallel)

    def forward(batches: Any, model: Any) -> Any:
        batch = tensor.cut(next(batches), axes)
        cu, top = batch.cu_seqlens, batch.max_seqlen
        packed = PackedSeqParams("thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=top, max_seqlen_kv=top)
        vision = batch.vision if state.is_pipeline_first_stage() else None
        out = model(batch.tokens_N[None], None, positions_3N=batch.positions, vision=vision, packed_seq_params=packed)

        def loss(logits: torch.Tensor) -> Any:
            each = vocab_parallel_cross_entropy(logits[0].unsqueeze(1).float(), batch.labels_N.clamp(min=0).unsqueeze(1)).squeeze(1)
            mean = each[batch.labels_N >= 0].sum() / labels
            return mean * len(own) * dp, mean.detach().clone()

        return out, loss

    model.zero_grad_buffer()
    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(own),
        model=[model],
        num_microbatches=len(own),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack(found).sum() if last else torch.zeros(())
    for group in (state.get_pipeline_model_parallel_group(), state.get_data_parallel_group()):
        dist.all_reduce(total, group=group)
    return float(total)


def main(jobs: list[dict[str, Any]], folder: Path) -> int:
    """The ranks of each job are forks of this process, which has imported everything."""
    megatron_shim.install()
    for job in {job["model"]: job for job in jobs}.values():
        reference({**job, "words": []}, folder)
    failed = 0
    for job in jobs:
        children, port = [], free_port()
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    store = dist.TCPStore("127.0.0.1", port, job["ranks"], rank == 0, timeout=timedelta(seconds=600))
                    train_one(job, folder, rank, store)
                    code = 0
                except BaseException:
                    (folder / f"{job['name']}.error{rank}").write_text(traceback.format_exc())
                finally:
                    os._exit(code)
            children.append(pid)
        ended = [os.waitpid(pid, 0)[1] for pid in children]
        failed += any(ended)
    return failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
