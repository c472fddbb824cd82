"""The page on parity says what the tests found, and says it about everything that ships."""

from __future__ import annotations

import json

import pytest

from playbook.errors import FileError
from playbook.paths import repo_root
from playbook_app.site.reference import LAYOUTS, MEGATRON, parity_page, read_rows

FOLDER = repo_root() / "docs" / "parity"


def test_every_row_is_within_what_was_asked_for():
    models = read_rows(FOLDER / "models.jsonl", [])
    assert all(r["logits"] < 1e-4 and r["loss"] < 1e-4 and (r["gradients"] or 0) < 1e-3 for r in models)
    assert {"text-moe", "text-dense", "vl-moe", "vl-dense"} <= {r["model"] for r in models}
    layouts = [row for name in LAYOUTS for row in read_rows(FOLDER / name, [])]
    assert {"gloo", "nccl"} <= {r["backend"] for r in layouts}
    assert all(r["loss"] < 1e-5 and r["grad_norm"] < 1e-4 and r["steps"] == 10 for r in layouts)
    megatron = [row for name in MEGATRON for row in read_rows(FOLDER / name, [])]
    assert all(r["gradients"] <= r["tolerance"] for r in megatron)
    assert {("moe", "transformers"), ("deepseek", "transformers"), ("moe tp2-ep2-etp1", "one rank")} <= {
        (r["model"], r["against"]) for r in megatron
    }


def test_the_page_holds_every_row(tmp_path):
    row = {
        "model": "m|1",
        "batch": "one",
        "logits": 1e-6,
        "loss": 0.0,
        "gradients": 2e-5,
        "worst": "a.b",
        "torch": "2.13.0",
        "transformers": "5.0",
    }
    (tmp_path / "models.jsonl").write_text(json.dumps(row) + "\n")
    page = parity_page(tmp_path)
    assert "| m&#124;1 | one | 1.0e-06 | 0.0e+00 | 2.0e-05 |" in page
    assert "Layouts" not in page, "no rows, no table"
    assert "megatron-core" not in page


def test_the_page_shows_what_is_committed_of_megatron_core():
    """The guide sends its readers there for what both backends compute."""
    page = parity_page(FOLDER)
    rows = [row for name in MEGATRON for row in read_rows(FOLDER / name, [])]
    assert "## Models on megatron-core" in page
    assert all(f"| {row['model']} | {row['against']} | {row['ranks']} | {row['kernels']} |" in page for row in rows)


@pytest.mark.parametrize("line", ["{", "[]", '{"model": "m"}'])
def test_a_row_of_another_shape_is_refused_at_its_line(tmp_path, line):
    (tmp_path / "models.jsonl").write_text(line + "\n")
    with pytest.raises(FileError, match="make parity"):
        parity_page(tmp_path)
