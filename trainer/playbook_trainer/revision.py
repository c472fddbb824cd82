"""The performance revision of each path that a run may take through the trainer. Torch-free, so that the harness reads it.

Raise a path's number in the commit that makes it faster or slower, or changes what it counts: verdicts whose runs took it are then stale,
others are not. A change that only some settings see may edit the cases that have them instead. A new path begins at FIRST:
a record from before it is read as having that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from playbook.records.evidence import FIRST_REVISION as FIRST
from playbook_trainer.config.tree import neutral

Value = Callable[[str], Any]
"""The value of a dotted key in a run's resolved configuration; the neutral one where the configuration is from before that key."""


class Path(NamedTuple):
    """A way through the trainer's code that some runs take and others do not."""

    revision: int
    taken: Callable[[Value, int], bool]
    """Whether a run on so many ranks takes it; a path named after a backend, only on that backend."""
    files: tuple[str, ...]
    """What belongs to it below `playbook_trainer/`: files, and folders with a slash at the end. A file may belong to several paths."""


def _always(value: Value, ranks: int) -> bool:
    return True


def _set(*keys: str) -> Callable[[Value, int], bool]:
    """Whether any of these keys has a value that does something."""
    return lambda value, ranks: any(value(key) not in (neutral()[key], "auto") for key in keys)


def _cut(*axes: str) -> Callable[[Value, int], bool]:
    """Whether several ranks share the work along one of these axes."""
    return lambda value, ranks: any(_degree(value(axis)) > 1 for axis in axes)


def _sharded(value: Value, ranks: int) -> bool:
    """Whether several ranks have the same dense weights (dp x cp), or those of the same expert (edp)."""
    tp, pp, ep = (_degree(value(f"parallel.{axis}")) for axis in ("tp", "pp", "ep"))
    etp = _degree(value("parallel.etp") or tp)
    return ranks > tp * pp or ranks > etp * ep * pp


def _degree(value: Any) -> int:
    """A record may hold anything there."""
    return value if isinstance(value, int) and value > 0 else 1


PATHS: Mapping[str, Path] = MappingProxyType(
    {
        "loop": Path(
            FIRST,
            _always,
            (
                "__main__.py", "axes.py", "engine.py", "loop.py", "data/batch.py", "data/collate.py", "data/loader.py",
                "data/rows.py", "observe/",
            ),
        ),
        # Random tokens are read from nowhere.
        "data": Path(
            FIRST,
            lambda value, ranks: value("data.kind") != "mock",
            (
                "data/packing.py", "data/tokenizer.py", "data/sources/",
            ),
        ),
        "images": Path(
            FIRST,
            lambda value, ranks: value("data.kind") in ("vqa", "chat"),
            ("data/images.py",),
        ),
        "checkpoint": Path(
            FIRST,
            _set("checkpoint.dir"),
            ("checkpoint_files.py", "torch/checkpoint.py", "megatron/checkpoints.py", "megatron/weights.py"),
        ),
        "torch": Path(
            4,
            _always,
            (
                "config/automatic.py", "config/environment.py", "torch/optimizer.py", "torch/build.py", "torch/engine.py",
                "torch/kernels/adamw.py", "torch/kernels/dense.py", "torch/model/attention.py", "torch/model/decoder.py",
                "torch/model/ops.py",
                "torch/parallel/pipeline.py", "torch/parallel/sharding.py", "torch/parallel/tensor.py",
            ),
        ),
        "torch.experts": Path(
            FIRST,
            _set("model.num_experts"),
            ("torch/kernels/experts.py", "torch/model/balance.py", "torch/parallel/dispatch.py"),
        ),
        "torch.vision": Path(FIRST, _set("model.vision"), ("torch/model/vision.py", "torch/kernels/rotary.py")),
        "torch.compile": Path(
            FIRST, _set("train.compile.vision", "train.compile.decoder", "train.compile.loss"), ("torch/build.py", "torch/model/ops.py")
        ),
        "torch.fp8": Path(FIRST, _set("precision.fp8"), ("torch/model/fp8.py",)),
        "torch.graphs": Path(FIRST, _set("train.cuda_graphs"), ("torch/model/graphs.py",)),
        "torch.offload": Path(FIRST, _set("offload.activations", "offload.optimizer"), ("torch/build.py", "torch/model/offload.py")),
        "torch.recompute": Path(FIRST, _set("train.recompute"), ("torch/model/recompute.py",)),
        # On one rank FSDP2 only casts, which is of the path torch.
        "torch.fsdp": Path(FIRST, _sharded, ("torch/build.py",)),
        "torch.ep": Path(
            FIRST, _cut("parallel.ep"), ("torch/parallel/comm.py", "torch/parallel/dispatch.py")
        ),
        "torch.cp": Path(
            FIRST,
            _cut("parallel.cp"),
            ("torch/parallel/comm.py", "torch/parallel/context.py"),
        ),
        "torch.tp": Path(
            FIRST,
            _cut("parallel.tp", "parallel.etp"),
            ("torch/parallel/comm.py", "torch/parallel/tensor.py"),
        ),
        "torch.pp": Path(FIRST, _cut("parallel.pp"), ("torch/parallel/pipeline.py",)),
        "megatron": Path(
            3,
            _always,
            (
                "config/automatic.py", "config/environment.py", "config/megatron_fields.py", "config/row_lengths.py", "megatron/engine.py",
                "megatron/hooks.py", "megatron/inputs.py", "megatron/settings.py", "megatron/wrap.py", "megatron/gpt.py",
                "torch/model/attention.py", "torch/model/ops.py",
            ),
        ),
        "megatron.experts": Path(FIRST, _set("model.num_experts"), ("megatron/experts.py", "torch/model/decoder.py")),
        "megatron.vision": Path(FIRST, _set("model.vision"), ("megatron/vision_language.py", "torch/model/vision.py")),
        "megatron.graphs": Path(FIRST, _set("train.cuda_graphs", "megatron.cuda_graph_impl"), ("megatron/graphs.py",)),
        "megatron.parallel": Path(
            FIRST, lambda value, ranks: ranks > 1, ("megatron/groups.py", "megatron/inputs.py", "megatron/settings.py", "megatron/wrap.py")
        ),
    }
)  # fmt: skip
NEUTRAL = (
    # What they decide stands in the resolved configuration, which a record holds.
    "config/checks.py", "config/dry_run.py", "config/huggingface.py", "config/megatron_checks.py", "config/recipes.py",
    "config/sections.py", "config/tree.py",
    # Before the first step and after the last.
    "exit_codes.py", "fork_server.py", "huggingface/", "join.py", "torch/weights.py",
    # No part of a training run.
    "calibrate.py", "export/", "megatron/probe.py", "preflight.py", "revision.py",
)  # fmt: skip
"""Files and folders that move no figure of a verdict."""
BACKENDS = ("torch", "megatron")
"""The paths that every run of a backend takes; others of the backend are named after it, with a dot."""


def numbers() -> dict[str, int]:
    """The revision of every path today."""
    return {name: path.revision for name, path in PATHS.items()}


def paths(config: Mapping[str, Any], ranks: int) -> list[str]:
    """The paths that a run of this resolved configuration takes on so many ranks.
    The configuration may be an old record's, and hold anything.
    """

    def value(key: str) -> Any:
        node: Any = config
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return neutral()[key]
            node = node[part]
        return node

    others = [name for name in BACKENDS if name != value("backend")]
    return [name for name, path in PATHS.items() if name.partition(".")[0] not in others and path.taken(value, ranks)]


def beside_backend(config: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """The revision of each path that such a run takes, besides its backend's."""
    return {name: PATHS[name].revision for name in paths(config, ranks) if name not in BACKENDS}


def touched(files: Iterable[str], config: Mapping[str, Any], ranks: int) -> list[str]:
    """Those of a run's paths to which one of these files below `playbook_trainer/` belongs; its backend's, where there is none."""
    changed, of_run = tuple(files), paths(config, ranks)
    return [p for p in of_run if any(f.startswith(PATHS[p].files) for f in changed)] or [p for p in of_run if p in BACKENDS]
