"""Scripts of Megatron-Bridge held against its source: it wants Python 3.12 and a GPU's packages, so that its syntax trees are read instead.

Each class that a script builds must have the fields that it is given, with a value of their choices. What the model's fields mean is read back by
megatron-core's `TransformerConfig`, from which the provider derives, and the rate's schedule is built by megatron-core's own class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.targets import megatron
from tests.support.targets.megatron import Export, dataclasses_in

FOLDER = megatron.FOLDER.with_name("megatron-bridge")
"""The unpacked wheel, which `make targets` fetches."""
_CORE = ("MCore", "MTrain")
"""What Megatron-Bridge puts before the name of a class of megatron-core that it imports."""
Classes = dict[str, tuple[dict[str, ast.expr], list[str]]]


def read_back(exports: Sequence[Export]) -> list[dict[str, Any]]:
    """What the source says of each script's fields, and megatron-core of the model; `error` where either refuses."""
    scripts = [ast.parse(found.files["plan_bridge.py"]) for _, _, found in exports]
    problems = [[*unknown(script)] for script in scripts]
    models = megatron.answers(
        [
            {**megatron.setting(export), "fields": arguments(script, "model"), "scheduler": _schedule(script)}
            for export, script in zip(exports, scripts, strict=True)
        ]
    )
    return [
        {"error": "; ".join(wrong)} if wrong else model if "error" in model else model | _loop(export, script)
        for export, script, wrong, model in zip(exports, scripts, problems, models, strict=True)
    ]


def _loop(export: Export, script: ast.Module) -> dict[str, Any]:
    """Batch and length, which the model does not have; DP is what the degrees leave of the launcher's ranks."""
    train, data, model = (arguments(script, section) for section in ("train", "dataset", "model"))
    command = export[2].command
    ranks = int(command[command.index("--nproc-per-node") + 1])
    ranks *= int(command[command.index("--nnodes") + 1]) if "--nnodes" in command else 1
    held = model["tensor_model_parallel_size"] * model["pipeline_model_parallel_size"] * model["context_parallel_size"]
    assert data["seq_length"] == model["seq_length"]
    found = {"dp": ranks // held, "mbs": train["micro_batch_size"], "gbs": train["global_batch_size"], "seq_len": model["seq_length"]}
    pattern = str(model.get("hybrid_layer_pattern", "")).partition("/")[0]
    return found | ({"vpp": (pattern.count("|") + 1) // model["pipeline_model_parallel_size"]} if pattern else {})


def _schedule(script: ast.Module) -> dict[str, Any]:
    """What `_get_scheduler` of its `optim.py` gives to megatron-core's scheduler; None where a script leaves out what its classes leave out."""
    optimizer, scheduler, train = (arguments(script, section) for section in ("optimizer", "scheduler", "train"))
    steps = scheduler["lr_decay_iters"] * train["global_batch_size"]
    return {
        "init_lr": 0.0, "max_lr": optimizer["lr"], "min_lr": optimizer.get("min_lr"), "lr_warmup_steps": 0, "lr_decay_steps": steps,
        "lr_decay_style": scheduler["lr_decay_style"], "wd_incr_steps": steps, "wd_incr_style": "constant",
        "start_wd": scheduler.get("start_weight_decay"), "end_wd": scheduler.get("end_weight_decay"),
    }  # fmt: skip


def unknown(script: ast.Module) -> Iterator[str]:
    """Names that a module does not have, fields that a class does not have, and values that are none of a field's choices."""
    for node in (n for n in script.body if isinstance(n, ast.ImportFrom) and str(n.module).startswith("megatron.")):
        text = _module(str(node.module))
        yield from (f"{node.module} has no {name.name}" for name in node.names if not re.search(rf"\b{name.name}\b", text))
    for call in _calls(script):
        assert isinstance(call.func, ast.Name)
        fields = fields_of(call.func.id)
        for word in call.keywords:
            annotation = fields.get(str(word.arg))
            if annotation is None:
                yield f"{call.func.id} has no field {word.arg}"
            elif not _takes(annotation, word.value):
                yield f"{call.func.id}.{word.arg} is {ast.unparse(word.value)}; its type is {ast.unparse(annotation)}"


def _takes(annotation: ast.expr, value: ast.expr) -> bool:
    """Whether a value is one of an annotation's literals, where these are all that it takes."""
    text = ast.unparse(annotation).removeprefix("Optional[").removesuffix(" | None")
    if not text.startswith("Literal[") or not isinstance(value, ast.Constant):
        return True
    choices = ast.literal_eval(text.removeprefix("Literal").rstrip("]") + "]")
    return value.value in choices or (value.value is None and "None" in ast.unparse(annotation)) or value.value is None


def arguments(script: ast.Module, section: str) -> dict[str, Any]:
    """The arguments of a section's class as plain data: names of functions, types and choices without what stands before them."""
    config = next(c for c in _calls(script) if isinstance(c.func, ast.Name) and c.func.id == "ConfigContainer")
    call = next(word.value for word in config.keywords if word.arg == section)
    assert isinstance(call, ast.Call)
    return {str(w.arg): _plain(w.value) for w in call.keywords}


def _plain(value: ast.expr) -> Any:
    if isinstance(value, ast.Call):
        return ast.unparse(value)
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ast.literal_eval(value)


def _calls(script: ast.Module) -> list[ast.Call]:
    """The calls that build configurations, by a class of that name."""
    calls = (node for node in ast.walk(script) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return [c for c in calls if isinstance(c.func, ast.Name) and c.func.id[0].isupper()]


@cache
def fields_of(name: str) -> dict[str, ast.expr]:
    """The annotated fields of a class of Megatron-Bridge, those of its bases included."""
    bridge, core = _sources()
    found: dict[str, ast.expr] = {}
    for table, key in ((bridge, name), (core, _plain_name(name))):
        if key in table and (table is bridge or name not in bridge):
            own, bases = table[key]
            for base in bases:
                found |= core_fields(base) if base == key or table is core else fields_of(base)
            return found | own
    return found


def core_fields(name: str) -> dict[str, ast.expr]:
    """The same of a class of megatron-core."""
    own, bases = _sources()[1].get(_plain_name(name), ({}, []))
    return {k: v for base in bases for k, v in core_fields(base).items()} | own


def _plain_name(name: str) -> str:
    return next((name.removeprefix(start) for start in _CORE if name.startswith(start)), name)


@cache
def _module(name: str) -> str:
    """The source of a module of either wheel; nothing where there is none."""
    places = (folder.joinpath(*name.split(".")).with_suffix(".py") for folder in (FOLDER, megatron.FOLDER))
    return next((path.read_text(encoding="utf-8") for path in places if path.is_file()), "")


@cache
def _sources() -> tuple[Classes, Classes]:
    bridge, core = FOLDER / "megatron" / "bridge", megatron.FOLDER / "megatron"
    return _read(bridge / "models", bridge / "training", bridge / "data"), _read(core / "core", core / "training" / "config")


def _read(*folders: Path) -> Classes:
    """Megatron-FSDP is left out, which has classes of its own by the same names."""
    return dataclasses_in(*sorted(path for folder in folders for path in folder.rglob("*.py") if "megatron_fsdp" not in path.parts))
