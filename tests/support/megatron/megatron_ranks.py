"""Many layouts of megatron-core models in few processes, on a CPU: `python megatron_ranks.py JOBS`.

JOBS is a JSON file with a list of {"name", "ranks", "words": [...], "weights": folder or null, "shared_out": whether FSDP2 is tried too,
"trains": whether anything runs}. This process imports everything once, and forks the
ranks of all jobs of one size. Every job loads the weights (or draws some, for models that
transformers lacks), runs both packs of documents through megatron-core's own schedule and its
gradient reductions, and writes beside JOBS, under its name: losses and gradients under our names, the weights as saved again, and the first
weights as drawn. A job that breaks ends its group of ranks with what they said.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import megatron_shim
import parity
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from playbook_bench.launch.local import free_port
from playbook_trainer.config.tree import ModelConfig, TrainerConfig, load, parse_overrides
from playbook_trainer.data.batch import Batch
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.huggingface.names import sizes, slices
from playbook_trainer.megatron import settings as mapping
from playbook_trainer.megatron import weights
from playbook_trainer.megatron.gpt import build_text
from playbook_trainer.megatron.weights import core_tensors
from playbook_trainer.torch.weights import collect, senders

PACKS = ((7, 19, 38), (30, 1, 33))
"""Lengths of the documents of two rows of 64 tokens."""


def packs(config: ModelConfig) -> list[list[parity.Document]]:
    """The documents of both rows."""
    return [[parity.Document(config, n, [], seed=100 * row + n) for n in lengths] for row, lengths in enumerate(PACKS)]


def configuration(words: list[str]) -> TrainerConfig:
    """The shipped tiny model of experts, with overrides, for this backend."""
    common = {"backend": "megatron", "train.device": "cpu", "data.seq_len": 64, "train.global_batch_size": 2}
    return load(Path("trainer/configs/qwen3_moe_tiny.yaml"), {**common, **parse_overrides(words)})


def initialise(config: TrainerConfig) -> None:
    """megatron-core's process groups for the layout."""
    par = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp,
        virtual_pipeline_model_parallel_size=par.vpp if par.vpp > 1 else None,
        expert_model_parallel_size=par.ep,
        expert_tensor_parallel_size=par.etp or par.tp,
    )
    model_parallel_cuda_manual_seed(config.seed)


def build(config: TrainerConfig) -> tuple[Any, list[Any]]:
    """megatron-core's configuration, and this rank's chunks."""
    cls = MLATransformerConfig if config.model.attention == "mla" else TransformerConfig
    settings = cls(**{**mapping.transformer(config, cls), "use_cpu_initialization": not torch.cuda.is_available()})
    stages = range(config.parallel.vpp) if config.parallel.vpp > 1 else [None]
    ends = [
        {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            "vp_stage": stage,
        }
        for stage in stages
    ]
    # As the engine does: megatron-core makes routers on the CPU, and moves them in a function that ours does not call.
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return settings, [build_text(config, settings, **end).to(device) for end in ends]


def packed(batch: Batch) -> PackedSeqParams:
    """The borders of documents as megatron-core takes them."""
    cu, longest = batch.cu_seqlens, batch.max_seqlen
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)


def losses_NL(model: Any, batch: Batch) -> torch.Tensor:
    """The loss of every token, zero where it has no label; between stages, the hidden states."""
    labels = batch.labels_N.clamp(min=0)[None]
    mask = (batch.labels_N >= 0).float()
    out = model(batch.tokens_N[None], batch.positions[None], None, labels=labels, packed_seq_params=packed(batch), loss_mask=mask[None])
    return out


def run(config: TrainerConfig, settings: Any, chunks: list[Any]) -> tuple[float, list[Any]]:
    """The summed loss of both packs over all ranks; gradients are left in `main_grad`, divided by the number of rows."""
    shares = parallel_state.get_data_parallel_world_size()
    mine = [parity.pack(p) for p in packs(config.model)][parallel_state.get_data_parallel_rank() :: shares]
    wrapped = [DistributedDataParallel(settings, DistributedDataParallelConfig(), chunk) for chunk in chunks]

    def step(rows: Any, model: Any) -> Any:
        batch = next(rows)
        mask = (batch.labels_N >= 0).float()

        def summed(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = (out.view(-1) * mask).sum()
            return loss, {"loss": loss.detach().clone()}

        return losses_NL(model, batch), summed

    settings.finalize_model_grads_func = finalize_model_grads
    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(mine) for _ in wrapped],
        model=wrapped,
        num_microbatches=len(mine),
        seq_length=sum(PACKS[0]),
        micro_batch_size=1,
        forward_only=False,
    )
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and parallel_state.get_tensor_model_parallel_rank() == 0
    total = torch.tensor(sum(float(part["loss"]) for part in found) if last else 0.0)
    dist.all_reduce(total)
    return float(total), wrapped


def logits(config: TrainerConfig, model: Any) -> torch.Tensor:
    """Those of all documents, end to end, on one rank."""
    with torch.no_grad():
        batches = [parity.pack(p) for p in packs(config.model)]
        return torch.cat([model(b.tokens_N[None], b.positions[None], None, packed_seq_params=packed(b))[0] for b in batches])


def share_out(model: Any) -> None:
    """torch's FSDP2 over the ranks of data parallelism, as megatron-core wraps a model on GPUs."""
    mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu")
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gradients(config: TrainerConfig, wrapped: list[Any], scale: float = 1.0) -> dict[str, torch.Tensor]:
    """On rank 0, the gradients times `scale` under our names."""
    own: dict[str, dict[Any, torch.Tensor]] = {}
    for chunk in wrapped:
        for entry in core_tensors(weights.unwrapped(chunk), config.model, weights.place()):
            for piece in entry.pieces if isinstance(entry.tensor, torch.nn.Parameter) else ():
                gradient = getattr(entry.tensor, "main_grad", entry.tensor.grad)
                own.setdefault(piece.ours, {})[piece.full] = gradient[slices(piece.local)].reshape(sizes(piece.full)) * scale
    holders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(holders, {name: list(parts) for name, parts in own.items()})
    out = {}
    for rule in hf.rules(config.model):
        if rule.ours.endswith("router.bias"):
            continue
        read = lambda box, name=rule.ours: own[name][box]  # noqa: E731
        full = collect(rule, read, senders(rule, holders), dist.get_rank(), torch.float32)
        if full is not None:
            out[rule.ours] = full
    return out


def keep_first_values(chunks: list[Any]) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Each parameter with a copy of what it was built with, as Transformer Engine's 8-bit parameters have one for the optimizer."""
    kept = {parameter: parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()}
    for parameter, value in kept.items():
        parameter.get_high_precision_init_val = partial(lambda value: value, value)
    return kept


def job(spec: dict[str, Any], folder: Path) -> None:
    """One layout on this rank."""
    config = configuration(spec["words"])
    initialise(config)
    settings, chunks = build(config)
    kept = keep_first_values(chunks)
    weights.initialise(chunks, config)
    assert all(torch.equal(value, parameter) for parameter, value in kept.items()), "an optimizer would start from other weights"
    counts: list[Any] = [None] * dist.get_world_size()
    if spec["weights"]:
        weights.save(chunks, config.model, folder / "drawn")
        files = weights.load(chunks, config.model, Path(spec["weights"]))
        dist.all_gather_object(counts, (files.bytes_read, sum(t.nbytes for c in chunks for t in c.parameters())))
        weights.save(chunks, config.model, folder / "saved", max_shard_bytes=300_000)
    if dist.get_world_size() == 1 and not config.model.mtp_layers:
        save_file({"logits": logits(config, chunks[0])}, folder / "logits.safetensors")
    if not spec["trains"]:
        if dist.get_rank() == 0:
            (folder / "result.json").write_text(json.dumps({"counts": counts}))
        dist.barrier()
        parallel_state.destroy_model_parallel()
        return
    loss, wrapped = run(config, settings, chunks)
    found = gradients(config, wrapped, scale=len(PACKS))  # the schedule divides by the number of rows
    if dist.get_rank() == 0:
        save_file({name: t.contiguous() for name, t in found.items()}, folder / "gradients.safetensors")
        (folder / "result.json").write_text(json.dumps({"loss": loss, "counts": counts}))
    if spec.get("shared_out"):
        share_out(chunks[0])
        weights.save(chunks, config.model, folder / "shared_out")
    dist.barrier()
    parallel_state.destroy_model_parallel()


def rank_main(specs: list[dict[str, Any]], rank: int, port: int, folder: Path) -> None:
    """One rank through all jobs of its size."""
    code, ranks = 1, specs[0]["ranks"]
    try:
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=1200))
        for number, spec in enumerate(specs):
            timeout = timedelta(seconds=1200)
            dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=ranks, timeout=timeout)
            (folder / spec["name"]).mkdir(exist_ok=True)
            job(spec, folder / spec["name"])
            dist.destroy_process_group()
        code = 0
    except BaseException:  # whatever it was, the other ranks wait for this one
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main(path: Path) -> int:
    warnings.filterwarnings("ignore")
    megatron_shim.install()
    specs = json.loads(path.read_text())
    codes = []
    for ranks in sorted({spec["ranks"] for spec in specs}):
        children, port = [], free_port()
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                rank_main([spec for spec in specs if spec["ranks"] == ranks], rank, port, path.parent)
            children.append(pid)
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
