"""torchtitan's own parser and checks, in a process of its own: reads launchables as JSON from stdin, writes what each configures to stdout.

Its wheel and small ones are unpacked in the folder that is the argument. Its kernels want triton, which a machine without GPU has not: a stub stands for it.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
import tempfile
import types
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # before the stub: torch must find no triton
import torch.distributed.pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti


class _Stub(types.ModuleType):
    """A module whose every name is a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function


def _stub_triton() -> None:
    for name in ("triton", "triton.language"):
        sys.modules[name] = _Stub(name)
    sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]


def _words(command: list[str]) -> tuple[int, list[str]]:
    """The number of processes that the launcher starts, and the arguments of torchtitan."""
    at = command.index("torchtitan.train")
    flags = dict(pairwise(command[:at]))
    return int(flags.get("--nnodes", 1)) * int(flags["--nproc-per-node"]), command[at + 1 :]


def _config(files: Mapping[str, str], words: list[str]) -> Any:
    """What its own manager makes of the file and the arguments."""
    from torchtitan.config import ConfigManager

    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            return ConfigManager().parse_args(words)
        finally:
            sys.path.remove(folder)
            for name in files:
                sys.modules.pop(Path(name).stem, None)


def _layers(config: Any, world: int) -> list[list[int]]:
    """By rank of the pipeline, the layers of each of its chunks, by torchtitan's own split; its schedule takes the micro-batches."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import pipeline_parallel as pp
    from torchtitan.protocols.module import ModuleDict

    par, model = config.parallelism, config.model_spec.model
    if par.pipeline_parallel_degree == 1:
        return [[len(model.layers)]]
    pp._get_pipeline_metadata(ParallelDims.from_config(par, world), par, model)
    whole = torch.nn.Module()
    whole.tok_embeddings, whole.norm, whole.lm_head = torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity()
    whole.layers = ModuleDict({str(i): torch.nn.Identity() for i in range(len(model.layers))})
    parts = [pp._split_module(whole, names) for names in par.module_fqns_per_model_part]
    assert sorted(int(i) for part in parts for i in part.layers) == list(range(len(model.layers)))
    assert [part.tok_embeddings is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.lm_head is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    ranks = [
        pp._get_pp_rank_to_stage_indices_mapping(rank, par.pipeline_parallel_degree, par.pipeline_parallel_schedule, len(parts))
        for rank in range(par.pipeline_parallel_degree)
    ]
    stages = [_Stage(i, len(parts), par.pipeline_parallel_degree) for i in ranks[0]]
    schedule = pp._build_pipeline_schedule(
        parallelism=par, local_batch_size=config.training.local_batch_size, stages=stages, loss_fn=lambda *_, **__: (None, {})
    )
    assert isinstance(schedule, PipelineScheduleMulti) == (len(stages) > 1), "a schedule of one chunk would run the first of a rank alone"
    return [[len(parts[i].layers) for i in rank] for rank in ranks]


class _Stage:
    """What schedules ask of a stage before they run."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, index % ranks
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.stage_index_to_group_rank = {i: i % ranks for i in range(stages)}
        self.submod, self.device, self.group = torch.nn.Identity(), torch.device("cpu"), None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _read(each: Mapping[str, Any], parameters: dict[str, int]) -> dict[str, Any]:
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    world, words = _words(each["command"])
    config = _config(each["files"], words)
    par, training, spec = config.parallelism, config.training, config.model_spec
    dims = ParallelDims.from_config(par, world)
    divisor = (dims.tp if par.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    assert training.seq_len % divisor == 0, "the trainer's own check of the sequence"
    assert (dims.dp_shard * dims.cp * dims.tp) % dims.ep == 0, "ranks of experts are taken from shards, cp and tp"
    batch = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    assert training.global_batch_size % batch == 0, "the trainer's own check of the batch"
    spec.model.update_from_config(config=config)
    config._validate_cuda_graphs()
    dispatchers = {type(d).__qualname__.split(".")[0] for _, d, _, _ in spec.model.traverse(LocalTokenDispatcher.Config)}
    source = next(iter(each["files"].values())).split("class NoTokenizer")[0]
    if source not in parameters and dispatchers <= {"AllToAllTokenDispatcher"}:  # the others need packages of CUDA to be built
        with torch.device("meta"):
            model = spec.model.build()
        model.verify_module_protocol()
        spec.model.get_nparams_and_flops(model, training.seq_len)
        parameters[source] = sum(p.numel() for p in model.parameters())
    microbatch = par.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    recompute = config.activation_checkpoint
    return {
        "dp_replicate": dims.dp_replicate, "dp_shard": dims.dp_shard, "cp": dims.cp, "tp": dims.tp, "pp": dims.pp, "ep": dims.ep,
        "layers": _layers(config, world), "schedule": par.pipeline_parallel_schedule if dims.pp > 1 else "", "seq_len": training.seq_len, "global_batch": training.global_batch_size,
        "microbatch": microbatch, "microbatches": training.global_batch_size // (dims.dp_replicate * dims.dp_shard) // microbatch,
        "passes": training.global_batch_size // batch, "recompute": type(recompute).__qualname__.split(".")[0], "parameters": parameters.get(source),
        "dispatchers": sorted(dispatchers), "compiled": config.compile.components if config.compile.enable else [],
        "loss": type(config.loss).__qualname__.split(".")[0], "sp": par.enable_sequence_parallel, "reshard": par.fsdp_reshard_after_forward,
        "forced": config.debug.moe_force_load_balance, "optimizer": config.optimizer.implementation, "log_freq": config.metrics.log_freq,
    }  # fmt: skip


def main() -> None:
    """Read, check, write."""
    asked = json.load(sys.stdin)
    sys.path.insert(0, sys.argv[1])
    _stub_triton()
    parameters: dict[str, int] = {}
    answers = []
    noise = io.StringIO()
    with redirect_stdout(noise), redirect_stderr(noise):
        for each in asked:
            try:
                answers.append(_read(each, parameters))
            except (Exception, SystemExit) as e:  # one refusal must not hide the others
                answers.append({"refused": f"{type(e).__name__}: {e}"[:2000] or noise.getvalue()[-2000:]})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
