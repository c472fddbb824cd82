"""The layout calculator's page: its form, and the tables that its scripts compute with, so that no number is typed twice."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from playbook.planner import activations, flops, memory, plan, shapes
from playbook.planner import options as options_
from playbook.planner.models import MODELS
from playbook.planner.options import FLEX, FP8, LABELS, Options
from playbook.planner.plan import Plan
from playbook.planner.time.cluster import cluster, clusters
from playbook_app.site.text import attribute, front_matter

_SCRIPTS = ("layout.js", "memory.js", "calculator.js")
START = {"model": "qwen3_30b_a3b", "gpus": "8", "ep": "8"}
"""The form's first values: a layout that can run."""

_KINDS = {"bool | None": "switch", "bool": "switch", "int": "number", "tuple[int, ...]": "numbers", "tuple[str, ...]": "words"}

_FORM: Sequence[tuple[str, bool, Sequence[tuple[str, str]]]] = (
    (
        "Model and batch",
        True,
        [
            ("model", "Model"),
            ("gpus", "GPUs"),
            ("seq_len", "Sequence length"),
            ("mbs", "Micro batch"),
            ("gbs", "Global batch, 0: one pipeline's worth"),
            ("layers", "Layers, if not all"),
        ],
    ),
    (
        "Degrees",
        True,
        [
            ("tp", "Tensor, TP"),
            ("cp", "Context, CP"),
            ("pp", "Pipeline, PP"),
            ("vpp", "Virtual stages, VPP"),
            ("ep", "Expert, EP"),
            ("etp", "Expert tensor, ETP"),
        ],
    ),
    (
        "States and precision",
        False,
        [
            ("backend", "Backend"),
            ("compiled", "Compiled layers"),
            ("sharding", "Sharding over data parallelism"),
            ("grad_bytes", "Gradient bytes"),
            ("master_bytes", "Master bytes"),
            ("moment_bytes", "Bytes of each moment"),
            ("fp8", "FP8 recipe"),
            ("fp8_params", "No BF16 copy of FP8 weights"),
            ("lora", "Rank of LoRA adapters"),
            ("lora_targets", "Matrices with adapters"),
            ("base", "Bits of the frozen base"),
            ("frozen", "Frozen parts"),
            ("optimizer_offload", "Optimizer on the host, percent"),
            ("loss", "Loss"),
            ("precision_aware", "Precision-aware optimizer"),
            ("optimizer_instances", "Optimizer instances"),
        ],
    ),
    (
        "Activations and graphs",
        False,
        [
            ("recompute", "Recompute"),
            ("graphs", "CUDA graphs of"),
            ("offload", "Offload layers"),
            ("offload_percent", "Of the layers, percent"),
            ("offload_modules", "Offload inputs of"),
            ("capacity", "Pad experts to capacity"),
        ],
    ),
    (
        "Communication and order",
        False,
        [
            ("dispatcher", "Dispatcher"),
            ("imbalance", "Fullest rank's tokens over the mean"),
            ("ep_overlap", "Overlap expert communication"),
            ("delay_wgrad", "Delay weight gradients"),
            ("shared_overlap", "Overlap shared experts"),
            ("sp", "Sequence parallelism"),
            ("cp_comm", "CP communication"),
            ("cp_sizes", "CP sizes, such as 2,4"),
            ("uneven", "Uneven pipeline stages"),
            ("overlap_p2p", "Overlap pipeline transfers"),
            ("rank_order", "Rank order"),
        ],
    ),
)
"""Groups of the form: title, whether it starts open, and each key with its label."""


_FREE = {"sp": "where TP is above 1", "uneven": "where layers do not divide"}
"""What a switch that nobody set means."""


def tables() -> dict[str, Any]:
    """Models, choices, defaults and constants, as plain data for the scripts."""
    shown = {f.name: f.default for f in fields(Plan) if f.name not in ("shape", "model", "options")}
    defaults = Options()
    options = {
        f.name: {"kind": _KINDS.get(str(f.type), "word"), "default": getattr(defaults, f.name), "free": str(f.type) == "bool | None"}
        for f in fields(Options)
    }
    return {
        "models": {name: asdict(shape) for name, shape in MODELS.items()},
        "defaults": shown,
        "options": options,
        "labels": {k: sorted(v) for k, v in LABELS.items()},
        "flex": sorted(FLEX),
        "losses": plan.LOSSES,
        "widths": plan.WIDTHS,
        "largest": shapes.LARGEST,
        "deepest": shapes.DEEPEST,
        "nearest": {"choices": plan.CHOICES, "other_gpus": plan.OTHER_GPUS, "uneven": plan.UNEVEN},
        "bf16": activations.BF16,
        "fp32": activations.FP32,
        "chunk": activations.CHUNK,
        "offloaded": activations.OFFLOADED,
        "resident_layers": memory.RESIDENT_LAYERS,
        "returning_layers": memory.RETURNING_LAYERS,
        "freed": {k: sorted(v) for k, v in activations.FREED.items()},
        "param_bytes": memory.PARAM_BYTES,
        "host_bytes": memory.HOST_BYTES,
        "base_bytes": memory.BASE_BYTES,
        "live_parameters": memory.LIVE_PARAMETERS,
        "sharded": options_.SHARDING,
        "sharding_words": options_.SHARDING_WORDS,
        "deepspeed": sorted(options_.DEEPSPEED),
        "node": options_.NODE,
        "lora_targets": options_.LORA_TARGETS,
        "gpu_gib": {name: cluster(name).memory_gib for name in clusters()},
        "tight": memory.TIGHT,
        "workspace_bytes": memory.WORKSPACE_BYTES,
        "plain_bytes": memory.PLAIN_BYTES,
        "fp8_copies": {k: memory.fp8_copies(k) for k in ["", *sorted(FP8)]},
        "backward": flops.BACKWARD,
    }


def address(settings: Mapping[str, Any]) -> str:
    """The link to the calculator with these settings, such as `calculator.md?model=qwen3_8b&tp=2`."""
    words = "&".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items())
    return f"calculator.md?{words}"


def calculator_page() -> str:
    """The page with its form; the scripts fill in the rest."""
    data_tables = tables()
    groups = "\n".join(_group(title, opened, keys, data_tables) for title, opened, keys in _FORM)
    scripts = "\n".join(f'<script src="../javascripts/{name}" defer></script>' for name in _SCRIPTS)
    data = json.dumps(data_tables, separators=(",", ":")).replace("<", "\\u003c")
    parts = [
        front_matter(
            "Layout calculator", description="Can a parallel layout run, what does each GPU hold, which one is near it", hide="toc"
        ),
        "# Layout calculator",
        "Which layouts can run, what each GPU then holds, and the nearest layout that can run where one cannot. The rules and the figures "
        "are those of `playbook layout check` and `playbook layout memory`, computed in this page; nothing is sent anywhere. The address "
        "of the page holds the layout: copy it to share it.",
        "<noscript><p>This page computes in the browser and needs JavaScript. Without it, use <code>playbook layout"
        " check</code>.</p></noscript>",
        '<div id="pb-line" class="pb-line-of-answer" aria-live="polite"></div>',
        f'<form id="pb-layout" data-search-exclude class="pb-layout" hidden>\n{groups}\n'
        '<p><button type="reset" class="md-button">Start again</button></p>\n</form>',
        '<div id="pb-answer" class="pb-answer"></div>',
        _NOTES,
        f'<script type="application/json" id="pb-tables">{data}</script>\n{scripts}',
    ]
    return "\n\n".join(parts) + "\n"


_NOTES = """\
## What it leaves out

- Bytes sent per layer and step are not here; `playbook layout traffic` takes the same settings.
- The peak is what is *allocated*. The driver, NCCL and what the allocator reserves come on top.
- Activations of linear attention and of Mamba follow from their kernels; no run has checked them.
  A vision tower counts with its states, not with its activations.
- How good the estimate is, and on which runs it was checked: [Layouts](../guide/layouts.md#does-it-fit).
"""


def _group(title: str, opened: bool, keys: Sequence[tuple[str, str]], data_tables: Mapping[str, Any]) -> str:
    controls = "\n".join(_control(key, label, data_tables) for key, label in keys)
    return f"<details{' open' if opened else ''}><summary>{html.escape(title)}</summary>\n<div>\n{controls}\n</div></details>"


def _control(key: str, label: str, data_tables: Mapping[str, Any]) -> str:
    """The form control of one key: boxes, a choice, or an input, by what the tables say of it."""
    option = data_tables["options"].get(key)
    if key in ("recompute", "graphs", "offload_modules", "frozen", "lora_targets"):
        boxes = "".join(f'<label><input type="checkbox" name="{key}" value="{v}">{v}</label>' for v in data_tables["labels"][key])
        return f'<fieldset class="pb-boxes"><legend>{html.escape(label)}</legend>{boxes}</fieldset>'
    if key == "model":
        return _select(key, label, [(name, name) for name in data_tables["models"]], START["model"])
    if key == "loss":
        return _select(key, label, [(name, f"{name}, {size} bytes per logit") for name, size in data_tables["losses"].items()], "te")
    if key in data_tables["widths"]:
        return _select(key, label, [(str(v), str(v)) for v in data_tables["widths"][key]], str(data_tables["defaults"][key]))
    if key in data_tables["labels"]:
        names = [(v, v) for v in data_tables["labels"][key]]
        return _select(key, label, names if option["default"] else [("", "not chosen"), *names], option["default"])
    if option and option["kind"] == "switch":
        words = [("", _FREE[key])] if option["free"] else []
        default = "" if option["free"] else str(option["default"]).lower()
        return _select(key, label, [*words, ("false", "off"), ("true", "on")], default)
    if key in ("rank_order", "cp_sizes"):
        return _input(key, label, 'type="text"', option["default"] if key == "rank_order" else "")
    if key == "imbalance":
        return _input(key, label, 'type="number" min="1" max="1000" step="any"', "1")
    least = 0 if key == "gbs" else 1
    value = START.get(key, "" if key == "layers" else (option["default"] if option else data_tables["defaults"][key]))
    return _input(key, label, f'type="number" inputmode="numeric" min="{least}" step="1"', value)


def _select(key: str, label: str, choices: Sequence[tuple[str, str]], chosen: str) -> str:
    rows = "".join(
        f'<option value="{attribute(v)}"{" selected" if v == chosen else ""}>{html.escape(shown)}</option>' for v, shown in choices
    )
    return f'<label>{html.escape(label)}<select name="{key}">{rows}</select></label>'


def _input(key: str, label: str, kind: str, value: object) -> str:
    return f'<label>{html.escape(label)}<input name="{key}" {kind} value="{attribute(value)}" autocomplete="off"></label>'
