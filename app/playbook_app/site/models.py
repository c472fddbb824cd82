"""Pages about models: the shapes that are known by name, the configuration families that cards hold, and the recipes that ship."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from playbook.cards.model import Card, ConfigFamily, Quantity
from playbook.errors import ConfigError
from playbook.planner import flops, parameters
from playbook.planner.layout import min_gpus
from playbook.planner.memory import TIGHT
from playbook.planner.models import MODELS
from playbook.planner.options import LABELS
from playbook.planner.plan import DEGREES, Plan, parse
from playbook.planner.shapes import Shape
from playbook_app.site.calculator import address
from playbook_app.site.pages import render
from playbook_app.site.shelf import TARGETS, Shelf
from playbook_app.site.text import attribute, code, link, mapping, number, text

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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
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
    entries = sorted(_entries(shelf.cards.values()), key=lambda e: (e[1].model, e[1].hardware, e[1].name))
    models, machines = sorted({f.model for _, f in entries}), sorted({f.hardware for _, f in entries})
    choices = {"model": ("Model", {m: m for m in models}), "platform": ("Hardware", {m: m for m in machines})}
    return render("families.md", choices=choices, rows=[_row(card, f) for card, f in entries])


def _entries(cards: Iterable[Card]) -> list[tuple[Card, ConfigFamily]]:
    return [(card, family) for card in cards for family in card.families]


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
    words: dict[str, Any] = {"model": family.model, "gpus": family.gpus or min_gpus(**{k: v for k, v in degrees.items() if k != "vpp"})}
    words |= degrees
    words |= {_WORDS[k]: v for k, v in family.settings.items() if k in _WORDS and isinstance(v, int)}
    modules = _known(family.settings, "recompute")
    graphs = _known(family.settings, "cuda_graph") or _known(family.settings, "graphs")
    dispatcher = str(family.settings.get("dispatcher", ""))
    words |= {"recompute": ",".join(modules)} if modules else {}
    words |= {"graphs": ",".join(graphs)} if graphs else {}
    words |= {"dispatcher": dispatcher} if dispatcher in LABELS["dispatcher"] else {}
    return words | ({"uneven": True} if family.settings.get("pipeline") == "uneven" else {})


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
    return f"{peak_gib:.0f}{', **tight**' if peak_gib > (1 - TIGHT) * memory_gib else ''}"


def anchor(path: str) -> str:
    """The heading id of a recipe."""
    return Path(path).stem.replace("_", "-")


def _commands(row: Mapping[str, Any]) -> str:
    """Commands for a recipe, one to a line: dry run, full size, small version, export."""
    full_size = [row["run"], row["slurm"]] if row["run"] else [row["slurm"]]
    export = f"playbook config export {row['path']} --to {next(iter(TARGETS))} --platform {row['platform']}"
    return "\n".join([row["dry_run"], *full_size, row["run_small"], export])
