"""Reads exports back with megatron-core's own code: a process of its own, since the trainer's tests import another release.

Standard input has one JSON object a line, `{"world": GPUs, "blackwell": bool, "environment": {...}}` with either `argv`, words of Megatron-LM's command
line, or `fields`, arguments of `TransformerConfig`, and `scheduler`, those of `OptimizerParamScheduler`. Standard output has an answer a line:
`{"error": ...}`, or what the parser, the configurations and the layer counts of every rank and chunk make of it, or, with `"values": true`, every argument
as it was parsed. The folder of the unpacked wheel is the only argument.

The wheel is for Python 3.12 and wants a GPU: `typing.override`, the GPU's capability, triton and Transformer Engine's presence are supplied; none of
them says whether arguments go together.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

TRANSFORMER_ENGINE = "2.16.1"
_GPU = {"capability": (9, 0)}


class _Stub(types.ModuleType):
    """A package that has every name; what it decorates stays as it is."""

    __path__: typing.ClassVar[list[str]] = []
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(f"{self.__name__}.{name}")

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else self


def _supply() -> None:
    """What the wheel takes for granted."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    torch.compile = lambda function=None, **_: function or (lambda f: f)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: _GPU["capability"]  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=_GPU["capability"][0], minor=0)  # type: ignore[assignment]
    for name in ("triton", "triton.language"):
        sys.modules[name] = _Stub(name)


def _with_transformer_engine() -> None:
    """Its release, and that its kernels are there."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from megatron.training.argument_utils import ArgumentGroupFactory
    from packaging.version import Version

    ArgumentGroupFactory._get_field_docstrings = lambda *_: {}  # texts of help, which take half a second each time
    utils._te_version = Version(TRANSFORMER_ENGINE)
    for module, names in {
        rope_utils: ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"),
        moe_utils: (
            "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs", "fused_unpermute",
        ),
    }.items():  # fmt: skip
        for name in names:
            setattr(module, name, object())
    importlib.import_module("megatron.training.training")  # before Transformer Engine can be found, which it would import in earnest

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = types.ModuleType(name)
    optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = lambda master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad: None  # type: ignore[attr-defined]
    sys.modules[optimizers.__name__] = optimizers


def _parsed(argv: list[str]) -> tuple[Any, dict[str, Any]]:
    """The configuration of a command line as the script of training makes it, that of the optimizer, of data parallelism and of the loop included."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_args, validate_args

    sys.argv = ["pretrain", *argv]
    args = parse_args()
    values = dict(vars(args))  # the checks change some
    validate_args(args)
    pattern = args.hybrid_layer_pattern
    model = hybrid_config_from_args(args) if pattern else gpt_config_from_args(args)
    config = pretrain_cfg_container_from_args(args, model).model.transformer
    return config, {
        "dp": args.data_parallel_size, "mbs": args.micro_batch_size, "gbs": args.global_batch_size, "seq_len": args.seq_length,
        "hybrid_layer_pattern": pattern, "vpp": args.virtual_pipeline_model_parallel_size or 1, "etp": args.expert_tensor_parallel_size,
        "values": values,
    }  # fmt: skip


def _built(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration of fields; those that are Megatron-Bridge's own are left to another check."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    functions: dict[str, Callable[..., Any]] = {
        "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "quick_gelu": quick_gelu, "squared_relu": squared_relu,
    }  # fmt: skip
    cls = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    known = {k: v for k, v in fields.items() if k in inspect.signature(cls).parameters}
    for name in [k for k in known if k.endswith("_dtype") and k != "moe_router_dtype"]:
        known[name] = getattr(torch, known[name])
    known |= {"activation_func": functions[known["activation_func"]], "attention_backend": AttnBackend[known["attention_backend"]]}
    if "window_size" in known:
        known["window_size"] = tuple(known["window_size"])
    return cls(**known), {"hybrid_layer_pattern": fields.get("hybrid_layer_pattern")}


def _schedule(arguments: dict[str, Any]) -> None:
    """Builds the scheduler of learning rate and weight decay, for an optimizer without parameters."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    OptimizerParamScheduler(types.SimpleNamespace(param_groups=[]), **arguments)


def _chunks(config: Any, pattern: str | None) -> list[int]:
    """Decoder layers of every chunk in the order of the model, as each rank counts them for itself."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    if pattern:
        return [len(part) for part in pattern.split(Symbols.MTP_SEPARATOR)[0].split(Symbols.PIPE)]
    found = []
    for chunk in range(pp * vpp):
        parallel_state.set_pipeline_model_parallel_rank(chunk % pp)
        parallel_state.set_pipeline_model_parallel_world_size(pp)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
        found.append(int(get_num_layers_to_build(config, vp_stage=chunk // pp if vpp > 1 else None, pp_rank=chunk % pp)))
    return found


def read_back(job: dict[str, Any]) -> dict[str, Any]:
    """One export as the target understands it."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1", "NCCL_GRAPH_REGISTER", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(name, None)
    os.environ.update(job["environment"], WORLD_SIZE=str(job["world"]), RANK="0")
    _GPU["capability"] = (10, 0) if job["blackwell"] else (9, 0)
    config, besides = _parsed(job["argv"]) if "argv" in job else _built(job["fields"])
    if "scheduler" in job:
        _schedule(job["scheduler"])
    values = besides.pop("values", {})
    if job.get("values"):
        return values
    routed = config.num_moe_experts is not None
    flex = config.moe_token_dispatcher_type == "flex"
    pattern = besides.pop("hybrid_layer_pattern")
    recompute = config.recompute_modules if config.recompute_granularity == "selective" else []
    return {
        "tp": config.tensor_model_parallel_size,
        "cp": config.context_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "vpp": config.virtual_pipeline_model_parallel_size or 1,
        "ep": config.expert_model_parallel_size,
        **besides,
        "etp": (config.expert_tensor_parallel_size or config.tensor_model_parallel_size) if routed else 1,
        "chunks": _chunks(config, pattern),
        "recompute": ["full"] if config.recompute_granularity == "full" else sorted(recompute),
        "dispatcher": "" if not routed else config.moe_flex_dispatcher_backend if flex else config.moe_token_dispatcher_type,
    }


def _named(value: Any) -> str:
    """An enumeration by its name, a type of numbers by its short name."""
    return getattr(value, "name", str(value))


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        _supply()
        _with_transformer_engine()
        for line in sys.stdin:
            try:
                answer = read_back(json.loads(line))
            except (Exception, SystemExit) as e:  # whatever the target's code says of an export is an answer
                answer = {"error": f"{type(e).__name__}: {e}"}
            print(json.dumps(answer, default=_named), file=answers, flush=True)


if __name__ == "__main__":
    main()
