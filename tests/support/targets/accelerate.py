"""Accelerate's own parser and transformers' own models, in a process of its own: reads launchables as JSON from stdin, writes what each configures."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this file has the package's name

import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import AutoConfig, AutoModelForCausalLM


def _read(each: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in each["files"].items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        os.chdir(folder)
        arguments = launch_command_parser().parse_args(each["command"][2:])
        arguments = _validate_launch_command(arguments)[0]
        environment = prepare_multi_gpu_env(arguments)
        for name in [n for n in os.environ if n.startswith(("FSDP_", "PARALLELISM_CONFIG_"))]:
            del os.environ[name]
        os.environ.update({k: v for k, v in environment.items() if k.startswith(("FSDP_", "PARALLELISM_CONFIG_"))})
        plugin, par = FullyShardedDataParallelPlugin(), ParallelismConfig()
        assert par.total_size == arguments.num_processes, "its own check of the number of processes"
        fields = json.loads(Path("model.json").read_text(encoding="utf-8"))
        os.chdir("/")
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    compile(each["files"]["train.py"], "train.py", "exec")
    counts = each["files"]["train.py"].split("STEPS, SAMPLES, ACCUMULATE, TOKENS, CP = ")[1].splitlines()[0].split(", ")
    assert model._no_split_modules, "layers that FSDP wraps"
    return {
        "dp_shard": par.dp_shard_size, "dp_replicate": par.dp_replicate_size, "cp": par.cp_size, "tp": par.tp_size, "processes": arguments.num_processes,
        "nodes": arguments.num_machines, "version": plugin.fsdp_version, "reshard": plugin.reshard_after_forward,
        "recompute": plugin.activation_checkpointing, "precision": str(arguments.mixed_precision), "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_hidden_layers, "microbatch": int(counts[1]), "microbatches": int(counts[2]), "seq_len": int(counts[3]),
    }  # fmt: skip


def main() -> None:
    """Read, check, write."""
    answers = []
    for each in json.load(sys.stdin):
        try:
            answers.append(_read(each))
        except (Exception, SystemExit) as e:  # one refusal must not hide the others
            answers.append({"refused": f"{type(e).__name__}: {e}"[:2000]})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
