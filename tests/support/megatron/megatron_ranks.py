"""Many layouts of megatron-core models in few processes, on a CPU: `python megatron_ranks.py JOBS`.

JOBS is a JSON file with a list of {"name", "ranks", "words": [...], "weights": folder or null, "shared_out": whether FSDP2 is tried too,
"trains": whether anything runs}. This process imports everything once, and forks the
ranks of all jobs of one size. Every job loads the weights (or draws some, for models that
transformers lacks), runs the rows of `parity.rows` through the backend's own engine with copies on every data-parallel rank, and writes beside
JOBS, under its name: losses and gradients under our names, the weights as saved again, and the first
weights as drawn. A job that breaks ends its group of ranks with what they said.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import megatron_shim
import parity
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from playbook_bench.launch.local import free_port
from playbook_trainer.config.tree import ModelConfig, TrainerConfig, load, parse_overrides
from playbook_trainer.data.batch import Batch
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.huggingface.names import sizes, slices
from playbook_trainer.megatron import engine, weights
from playbook_trainer.megatron.weights import core_tensors
from playbook_trainer.torch.parallel.context import _filled
from playbook_trainer.torch.weights import collect, senders

CPU = torch.device("cpu")


def configuration(words: list[str]) -> TrainerConfig:
    """The shipped tiny model of experts, with overrides, for this backend."""
    common = {"backend": "megatron", "data.seq_len": 64, "train.global_batch_size": 2, "megatron.data_parallel": "ddp"}
    return load(Path("trainer/configs/qwen3_moe_tiny.yaml"), {**common, **parse_overrides(words)})


def rows(config: ModelConfig) -> list[Batch]:
    """Of one length, as a pipeline needs them."""
    return [_filled(parity.pack(documents), 192 if config.vision else 64) for documents in parity.rows(config)]


def run(made: engine.MegatronEngine) -> tuple[float, float]:
    """The summed loss of all rows over all ranks, and their labels, by which the gradients are divided that are left in `main_grad`."""
    every, dp = rows(made.config.model), made.axes.dp
    labels = float(sum(batch.num_loss for batch in every))
    # In the first pass DDP learns which gradients come when; in a second one that is absent stops it. A text has them all.
    for _ in range(2 if made.config.model.vision else 1):
        loss = made.forward_backward(made.local(every[dp.rank :: dp.size]), torch.tensor(labels))
    total = loss * (made.axes.tp.rank == 0)
    dist.all_reduce(total)
    return float(total), labels


def logits(made: engine.MegatronEngine) -> torch.Tensor:
    """Those of all documents, end to end, on one rank."""
    with torch.no_grad():
        given = [(b.tokens, b.positions, engine.packed(b.borders, b.longest)) for b in made.local(rows(made.config.model))]
        return torch.cat([made.model[0](tokens, positions, None, packed_seq_params=packed)[0] for tokens, positions, packed in given])


def share_out(model: Any) -> None:
    """torch's FSDP2 over the ranks of data parallelism, as megatron-core wraps a model on GPUs."""
    mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu")
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gradients(config: TrainerConfig, wrapped: Sequence[Any], scale: float = 1.0) -> dict[str, torch.Tensor]:
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


def initialise(chunks: Sequence[Any], config: TrainerConfig, real: Callable[..., None] = weights.initialise) -> None:
    """With what Transformer Engine keeps of an 8-bit parameter for the optimizer: a copy of the values that it was built with."""
    kept = {parameter: parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()}
    for parameter, value in kept.items():
        parameter.get_high_precision_init_val = partial(lambda value: value, value)
    real(chunks, config)
    for parameter, value in kept.items():
        assert torch.equal(value, parameter), "an optimizer would start from other weights"
        del parameter.get_high_precision_init_val


def job(spec: dict[str, Any], folder: Path) -> None:
    """One layout on this rank."""
    config = configuration(spec["words"])
    made = engine.MegatronEngine(config, dist.get_rank(), dist.get_world_size(), CPU)
    counts: list[Any] = [None] * dist.get_world_size()
    if spec["weights"]:
        weights.save(made.chunks, config.model, folder / "drawn")
        files = weights.load(made.chunks, config.model, Path(spec["weights"]))
        dist.all_gather_object(counts, (files.bytes_read, sum(t.nbytes for t in made.model.parameters())))
        weights.save(made.chunks, config.model, folder / "saved", max_shard_bytes=300_000)
    if dist.get_world_size() == 1 and not config.model.mtp_layers and not config.model.vision:
        save_file({"logits": logits(made)}, folder / "logits.safetensors")
    loss = 0.0
    if spec["trains"]:
        loss, labels = run(made)
        found = gradients(config, made.chunks, scale=labels)
        if dist.get_rank() == 0:
            save_file({name: t.contiguous() for name, t in found.items()}, folder / "gradients.safetensors")
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps({"loss": loss, "counts": counts}))
    if spec["shared_out"]:
        share_out(made.model[0])
        weights.save(list(made.model), config.model, folder / "shared_out")
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
    engine.require = lambda *_: None  # there is no GPU, which is what the shim is for
    weights.initialise = initialise
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
