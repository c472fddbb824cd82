"""Pages about models: the shapes that are known by name, the configuration families that cards hold, the recipes that ship, and the layout
calculator: its form, and the tables that its scripts compute with, so that no number is typed twice.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from playbook import yaml_files
from playbook.cards.model import Card, ConfigFamily, Quantity
from playbook.errors import ConfigError
from playbook.planner import activations, flops, memory, parameters, plan, shapes
from playbook.planner import options as options_
from playbook.planner.layout import min_gpus
from playbook.planner.models import MODELS
from playbook.planner.options import FLEX, FP8, LABELS, Options
from playbook.planner.plan import DEGREES, Plan, parse
from playbook.planner.shapes import Shape
from playbook.planner.time import constants, laws, layer, spread, step
from playbook.planner.time.cluster import REFERENCE, Cluster, cluster, clusters
from playbook_app.site.cards import TARGETS, Shelf
from playbook_app.site.pages import render
from playbook_app.site.text import attribute, code, front_matter, link, mapping, number, text

_SCRIPTS = ("layout.js", "memory.js", "time.js", "calculator.js")
START = {"model": "qwen3_30b_a3b", "gpus": "8", "gpu": "h100", "ep": "8"}
"""The form's first values: a layout that can run."""

_KINDS = {"bool | None": "switch", "bool": "switch", "int": "number", "tuple[int, ...]": "numbers", "tuple[str, ...]": "words"}

_FORM: Sequence[tuple[str, bool, Sequence[tuple[str, str]]]] = (
    (
        "Model and batch",
        True,
        [
            ("model", "Model"),
            ("gpus", "GPUs"),
            ("gpu", "Kind of GPU"),
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
    defaults = Options()
    options = {
        f.name: {"kind": _KINDS.get(str(f.type), "word"), "default": getattr(defaults, f.name), "free": str(f.type) == "bool | None"}
        for f in fields(Options)
    }
    return {
        "models": {name: asdict(shape) for name, shape in MODELS.items()},
        "defaults": {f.name: f.default for f in fields(Plan) if f.name not in ("shape", "model", "options")},
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
        **_of_time(),
    }


def _of_time() -> dict[str, Any]:
    """What a step's time is made of: constants by name, the reference GPU's laws, and of each GPU its rates and what scales the laws to
    it.
    """
    reference = cluster(REFERENCE)
    return {
        "constants": {k: _value(v) for k, v in vars(constants).items() if k.isupper() and not k.startswith("_")},
        **{
            name: {k: v for k, v in vars(module).items() if k.isupper() and isinstance(v, int | float | tuple | dict)}
            for name, module in (("layer", layer), ("step", step), ("spread", spread))
        },
        "tile": laws.TILE,
        "laws": {
            **{k: v for k, v in asdict(reference.laws).items() if k != "attention"},
            "attention": {" ".join(map(str, key)): curve for key, curve in reference.laws.attention.items()},
        },
        "gpus": {name: _rates(cluster(name), reference) for name in clusters()},
    }


def _value(constant: Any) -> Any:
    """A constant's figure, or those of its forward and backward pass."""
    return [c.value for c in constant] if isinstance(constant, tuple) else constant.value


def _rates(gpu: Cluster, reference: Cluster) -> dict[str, Any]:
    keys = ("bf16_flops_per_s", "fp8_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "nic_bytes_per_s", "domain", "host_speed")
    kernel = next(iter(reference.laws.attention))
    return {
        **{k: getattr(gpu, k) for k in (*keys, "has_fp8", "host_known", "transferred", "stragglers")},
        "rings": gpu.rings,
        "bf16": gpu.laws.forward.share / reference.laws.forward.share,
        "fp8": gpu.laws.fp8.share / reference.laws.fp8.share,
        "attention": gpu.laws.attention[kernel][1][0] / reference.laws.attention[kernel][1][0],
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
        "Which layouts can run, how fast they are, what each GPU then holds, and the nearest layout that can run where one cannot. The "
        "rules and the figures are those of `playbook layout check`, `playbook plan` and `playbook layout memory`, computed in this page; "
        "nothing is sent anywhere. The address "
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
    if key == "gpu":
        return _select(key, label, [(name, name) for name in data_tables["gpus"]], START["gpu"])
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


_SEQ_LEN = 4096
"""The sequence length at which the page counts FLOPs per token."""

_WORDS = {"seq_len": "seq_len", "micro_batch_size": "mbs", "global_batch_size": "gbs", "imbalance": "imbalance"}


def models_page(configs: Path) -> str:
    """Every model that layouts are computed for; `configs` is the trainer's folder of configurations."""
    recipes = _recipes(configs)
    rows = []
    for name, shape in sorted(MODELS.items(), key=lambda m: -parameters.total(m[1])):
        name_cell = link(code(name), shape.source) if shape.source.startswith("https://") else code(name)
        runs = ", ".join(code(r) for r in recipes.get(name, [])) or ("by name" if name in recipes[""] else "")
        rows.append(
            [
                f"{name_cell} {{ #{name.replace('_', '-')} }}",
                _labelled(_billions(parameters.total(shape)), "parameters"),
                _labelled(_billions(parameters.active(shape)), "active"),
                _labelled(f"{shape.layers} x {number(shape.hidden)}", "layers x width"),
                _labelled(f"{shape.heads} / {shape.kv_heads}", "heads / KV"),
                _labelled(f"{shape.top_k} of {shape.experts}" if shape.experts else "", "experts"),
                _kind(shape),
                _labelled(f"{flops.per_token(shape, _SEQ_LEN) / 1e9:.3g}", "GFLOP per token"),
                _labelled(runs, "trainer"),
                link("layout", address({"model": name})),
            ]
        )
    return render("models.md", seq_len=_SEQ_LEN, rows=rows)


def _recipes(configs: Path) -> dict[str, list[str]]:
    """Configurations of the trainer by the model that they name; under the empty name, the models that it knows."""
    recipes: dict[str, list[str]] = {"": sorted(p.stem for p in (configs / "models").glob("*.yaml"))}
    for path in sorted([*configs.glob("*.yaml"), *configs.glob("recipes/*_*.yaml")]):
        content, _ = yaml_files.read(path)
        model = content.get("model") if isinstance(content, dict) else None
        name = model.get("preset") if isinstance(model, dict) else model
        if isinstance(name, str):
            recipes.setdefault(name, []).append(path.stem)
    return recipes


def _billions(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.0f} M" if count >= 1e7 else f"{count / 1e6:,.1f} M"


def _kind(shape: Shape) -> str:
    attention = "MLA" if shape.mla else f"gated delta net, every {shape.linear.full_every}th full" if shape.linear else ""
    attention = attention or ("GQA" if shape.kv_heads < shape.heads else "MHA")
    extras = [
        f"window {shape.window}" if shape.window else "",
        f"{shape.dense_layers} dense layers" if shape.experts and shape.dense_layers else "",
        "shared expert" if shape.shared_ffn else "",
        f"MTP {shape.mtp}" if shape.mtp else "",
        "vision tower" if shape.vision else "",
        "tied embedding" if shape.tied else "",
    ]
    return ", ".join([attention, *filter(None, extras)])


def families_page(shelf: Shelf) -> str:
    """Every configuration family of every card, each checked by the layout rules."""
    of_cards = ((card, family) for card in shelf.cards.values() for family in card.families)
    entries = sorted(of_cards, key=lambda e: (e[1].model, e[1].hardware, e[1].name))
    models, machines = sorted({f.model for _, f in entries}), sorted({f.hardware for _, f in entries})
    choices = {"model": ("Model", {m: m for m in models}), "platform": ("Hardware", {m: m for m in machines})}
    return render("families.md", choices=choices, rows=[_row(card, f) for card, f in entries])


def _row(card: Card, family: ConfigFamily) -> list[str]:
    """One family as a row of cells, with what the filters look at."""
    words = " ".join([family.name, family.model, family.hardware, str(family.settings), family.note or "", card.title]).lower()
    marks = f'data-text="{attribute(words)}" data-model="{attribute(family.model)}" data-platform="{attribute(family.hardware)}"'
    published = "<br>".join(_figure(k, q) for k, q in family.measured.items())
    note_text = "; ".join(
        filter(None, [family.note, *(f"{s.title}, {s.origin}, {s.section or 'whole'}, {s.date}" for s in family.sources)])
    )
    note = f'<br><span class="pb-of">{text(note_text)}</span>' if note_text else ""
    return [
        f"{link(text(family.name), f'../cards/{card.id}.md#configurations-in-use')}{note} {{ {marks} }}",
        f"{text(family.model)}<br>{text(family.hardware)}" + (f"<br>{number(family.gpus)} GPUs" if family.gpus else ""),
        mapping(family.layout),
        mapping(family.settings) if family.settings else "",
        _labelled(published, "published"),
        _labelled(_check(family), "can it run"),
    ]


_UNITS = {"tokens_per_s_per_gpu": "tokens/s/GPU", "model_tflops_per_gpu": "TFLOP/s/GPU", "mfu": "% MFU"}


def _figure(name: str, quantity: Quantity) -> str:
    """A published figure, in the words of the field where it has some."""
    unit = _UNITS.get(name)
    value = f"{'about ' if quantity.approx else ''}{number(quantity.value)}"
    return f"{value} {unit}" if unit else f"{text(name.replace('_', ' '))} {value} {text(quantity.unit)}"


def _labelled(cell: str, label: str) -> str:
    return f'{cell} {{ data-label="{label}" }}' if cell else ""


def settings(family: ConfigFamily) -> dict[str, Any]:
    """The settings of a family that the calculator knows, by the calculator's names."""
    degrees = {k: v for k, v in family.layout.items() if k in DEGREES}
    modules = _known(family.settings, "recompute")
    graphs = _known(family.settings, "cuda_graph") or _known(family.settings, "graphs")
    dispatcher = str(family.settings.get("dispatcher", ""))
    return {
        "model": family.model,
        "gpus": family.gpus or min_gpus(**{k: v for k, v in degrees.items() if k != "vpp"}),
        **degrees,
        **{_WORDS[k]: v for k, v in family.settings.items() if k in _WORDS and isinstance(v, int)},
        **({"recompute": ",".join(modules)} if modules else {}),
        **({"graphs": ",".join(graphs)} if graphs else {}),
        **({"dispatcher": dispatcher} if dispatcher in LABELS["dispatcher"] else {}),
        **({"uneven": True} if family.settings.get("pipeline") == "uneven" else {}),
    }


def _known(values: Mapping[str, Any], key: str) -> list[str]:
    value = values.get(key, [])
    names = value if isinstance(value, list) else [value]
    allowed = LABELS["recompute" if key == "recompute" else "graphs"]
    return [str(n) for n in names] if names and all(n in allowed for n in names) else []


def plan_of(family: ConfigFamily) -> Plan | None:
    """The family as a plan for the layout rules; None if its model or a value is unknown to them."""
    chosen = settings(family)
    words = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in chosen.items() if k != "model"]
    try:
        return parse(family.model, words)
    except ConfigError:
        return None


def _check(family: ConfigFamily) -> str:
    plan = plan_of(family)
    if plan is None:
        return ""
    broken = plan.broken()
    label = f"breaks {len(broken)} rule{'s' if len(broken) > 1 else ''}" if broken else "yes" + ("" if family.gpus else f", on {plan.gpus}")
    return link(label, address(settings(family)))


def recipes_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every recipe: an overview, then a section each."""
    cells = [
        [
            link(text(row["title"]), f"#{anchor(row['path'])}"),
            f"{text(row['model'])}<br>{text(row['backend'])}",
            mapping(row["layout"]) if row["layout"] else "data parallel",
            "<br>".join(number(n) for n in row["gpus"]),
            text(row["hardware"]),
            "<br>".join(_peak(row["peaks_gib"][n], row["memory_gib"]) for n in row["gpus"]),
            f"{row['memory_gib']:.0f}",
        ]
        for row in rows
    ]
    return render("recipes.md", overview=cells, recipes=rows, anchor=anchor, commands=_commands, targets=list(TARGETS))


def _peak(peak_gib: float, memory_gib: float) -> str:
    return f"{peak_gib:.0f}{', **tight**' if peak_gib > (1 - memory.TIGHT) * memory_gib else ''}"


def anchor(path: str) -> str:
    """The heading id of a recipe."""
    return Path(path).stem.replace("_", "-")


def _commands(row: Mapping[str, Any]) -> str:
    """Commands for a recipe, one to a line: dry run, full size, small version, export."""
    full_size = [row["run"], row["slurm"]] if row["run"] else [row["slurm"]]
    export = f"playbook config export {row['path']} --to {next(iter(TARGETS))} --platform {row['platform']}"
    return "\n".join([row["dry_run"], *full_size, row["run_small"], export])
