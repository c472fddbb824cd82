"""Megatron-LM's own parser, run apart from the tests: command lines in as JSON on stdin, what it understood out as JSON on stdout.

The only argument is the folder of the unpacked wheel. The parser imports all of megatron-core; what of that needs a GPU or a later Python is replaced, since parsing asks neither.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import types
import typing
import warnings
from typing import Any


def stand_ins() -> None:
    """What the imports ask for and a machine without a GPU lacks."""
    if not hasattr(typing, "override"):
        typing.override = lambda f: f
    if importlib.util.find_spec("triton") is None:
        name = "megatron.core.transformer.moe.ops.paged_stash"
        module = types.ModuleType(name)
        module.__getattr__ = lambda _: None  # type: ignore[method-assign]
        sys.modules[name] = module


def plain(value: Any) -> Any:
    """A parsed value as JSON has it; enumerations by name, types by their short name."""
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else getattr(value, "name", str(value))


def validated(namespace: argparse.Namespace, world: int, architecture: int, environment: dict[str, str]) -> str:
    """What Megatron-LM itself refuses about the arguments, or nothing."""
    import torch
    from megatron.training import arguments

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(environment)
    torch.cuda.get_device_capability = lambda *_: (architecture, 0)  # type: ignore[assignment]
    arguments.get_device_arch_version = lambda: architecture
    arguments.is_te_min_version = lambda *_, **__: True
    namespace.rank, namespace.world_size = 0, world
    try:
        arguments.validate_args(namespace)
    except (AssertionError, ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def main() -> None:
    """Parse every command line of the input."""
    warnings.filterwarnings("ignore")
    sys.path.insert(0, sys.argv[1])
    stand_ins()
    from megatron.training import arguments

    answers = []
    for asked in json.load(sys.stdin):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
        namespace = parser.parse_args(asked["words"])
        found = {k: plain(v) for k, v in vars(namespace).items()}
        answers.append({"found": found, "refused": validated(namespace, asked["gpus"], asked["architecture"], asked["environment"])})
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
