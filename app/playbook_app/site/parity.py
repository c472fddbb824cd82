"""The page on parity: what the trainer's numbers were compared with, and how far apart they were.

The rows come from the tests themselves, which write them where the environment variable PLAYBOOK_PARITY names a folder (`make parity`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook.errors import FileError, Finding
from playbook_app.site import curves as curves
from playbook_app.site.text import code, text

MODELS = "models.jsonl"
LAYOUTS = ("layouts.jsonl", "layouts-nccl.jsonl")
"""Over gloo, as `make parity` writes them on any machine; over NCCL, from the tests marked `multigpu` on a machine that has the GPUs."""
CURVES = "vl-curves.jsonl"

MEGATRON = ("megatron.jsonl", "megatron-gpu.jsonl")
"""On the CPU, as `make parity` writes them; on a GPU, from the tests marked `gpu`."""

_INTRO = """---
hide: [toc]
---

# Parity

Correct first, then fast. What stands behind the trainer's figures are comparisons; all are tests, and the tables below are what they found
when they last wrote them down (`make parity`, and on GPUs).
"""


def read_rows(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file, one JSON object per line.

    Raises:
        FileError: a line that is no object, or that lacks one of the wanted keys.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else [], start=1):
        try:
            row = json.loads(line)
        except ValueError as e:
            raise FileError([Finding(str(path), number, 1, f"is no JSON ({e}); write it anew with `make parity`")]) from e
        if not isinstance(row, dict) or any(key not in row for key in keys):
            raise FileError([Finding(str(path), number, 1, f"expected an object with {', '.join(keys)}; write it anew with `make parity`")])
        rows.append(row)
    return rows


def parity_page(folder: Path) -> str:
    """The page, from the rows below `folder`.

    Raises:
        FileError: rows of another shape.
    """
    models = read_rows(folder / MODELS, ["model", "batch", "logits", "loss", "gradients", "worst", "torch", "transformers"])
    keys = ["layout", "ranks", "steps", "loss", "grad_norm", "torch", "backend"]
    layouts = [row for name in LAYOUTS for row in read_rows(folder / name, keys)]
    keys = [
        "model",
        "against",
        "ranks",
        "kernels",
        "device",
        "dtype",
        "logits",
        "loss",
        "gradients",
        "tolerance",
        "megatron_core",
        "torch",
    ]
    megatron = [row for name in MEGATRON for row in read_rows(folder / name, keys)]
    loss_curves = curves.section(read_rows(folder / CURVES, curves.WANTED))
    return "\n".join([_INTRO, *_models(models), *_layouts(layouts), *_megatron(megatron), *loss_curves])


def _models(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section on models of the torch backend against transformers; empty without rows."""
    if not rows:
        return []
    out = [
        "## Models, against transformers",
        "",
        "Tiny random weights that excite every parameter, float32 on the CPU. They travel through our writer and the reader of"
        " transformers. Logits: largest",
        "absolute difference. Loss: difference of the means per label. Gradients: the largest relative difference of any parameter"
        " (norm of the difference",
        f"over the norm), and whose it is. torch {text(rows[0]['torch'])}, transformers {text(rows[0]['transformers'])}.",
        "",
        "| model | documents | logits | loss | gradients | of |",
        "| --- | --- | --: | --: | --: | --- |",
    ]
    for row in rows:
        gradients = "-" if row["gradients"] is None else f"{row['gradients']:.1e}"
        worst = code(row["worst"]) if row["worst"] else "-"
        out.append(f"| {text(row['model'])} | {text(row['batch'])} | {row['logits']:.1e} | {row['loss']:.1e} | {gradients} | {worst} |")
    return [*out, "", "Asked for: logits and loss within 1e-4, gradients within 1e-3.", ""]


def _layouts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section on layouts against one rank; empty without rows."""
    if not rows:
        return []
    out = [
        "## Layouts, against one rank",
        "",
        "The same data and the same seed, float32: the largest relative difference of the loss and of the gradient norm over all steps.",
        "",
        "| layout | ranks | over | steps | loss | gradient norm |",
        "| --- | --: | --- | --: | --: | --: |",
    ]
    for row in sorted(rows, key=lambda r: (r["backend"] != "gloo", r["layout"])):
        out.append(
            f"| {text(row['layout'])} | {row['ranks']} | {text(row['backend'])} | {row['steps']} | {row['loss']:.1e} |"
            f" {row['grad_norm']:.1e} |"
        )
    return [*out, "", "Asked for: loss within 1e-5, gradient norm within 1e-4.", ""]


def _megatron(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section on models of megatron-core against transformers and one rank; empty without rows."""
    if not rows:
        return []
    out = [
        "## Models on megatron-core",
        "",
        "The same weights in megatron-core's layers, of Transformer Engine or of this trainer (`local`), against transformers, and in"
        " several layouts",
        "against one rank. Relative differences: of the logits and of the worst parameter's gradient the norm of the difference over"
        " the norm. In BF16",
        "the reference is FP32, and what is asked for follows from how far transformers in BF16 is from it.",
        "",
        "| model | against | ranks | kernels | on | precision | logits | loss | gradients | asked for | megatron-core | torch |",
        "| --- | --- | --: | --- | --- | --- | --: | --: | --: | --: | --- | --- |",
    ]
    for row in rows:
        logits = "-" if row["logits"] is None else f"{row['logits']:.1e}"
        words = [text(str(row[key])) for key in ("model", "against", "ranks", "kernels", "device", "dtype")]
        figures = [logits, *(f"{row[key]:.1e}" for key in ("loss", "gradients", "tolerance"))]
        out.append(f"| {' | '.join([*words, *figures, text(row['megatron_core']), text(row['torch'])])} |")
    return [*out, ""]
