"""The page on the megatron backend's switches says what its rows say, failures included."""

from __future__ import annotations

import json

import pytest

from playbook.errors import FileError
from playbook.paths import repo_root
from playbook.site.megatron import BARE, CONTEXT, SWITCHES, megatron_page

GIB = 2**30


def row(name, group="g", table="one", outcome="ok", **more):
    base = {"table": table, "group": group, "name": name, "gpus": 1, "settings": {}, "outcome": outcome, "wall_s": 9.0}
    figures = {"step_s": 0.2, "tokens_per_s_per_gpu": 20480.0, "peak_memory_bytes": 40 * GIB, "losses": [12.0, 11.0], "proof": []}
    return base | (figures | {"versions": {"torch": "2.11.0"}, "device": "NVIDIA H200"} if outcome == "ok" else {}) | more


def written(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_a_switch_stands_against_the_plain_row(tmp_path):
    proof = [{"rule": "require kernel a|b", "observed": 0.0, "expected": ">= 1", "ok": False}]
    faster = row(
        "attn",
        "graphs",
        step_s=0.19,
        peak_memory_bytes=42 * GIB,
        losses=[12.0, 11.11],
        proof=proof,
        gpu_computing_percent=61.4,
        grad_norm=0.25,
    )
    refused = row("mxfp8", "FP8", outcome="refused", message="error: needs | Blackwell")
    written(tmp_path, SWITCHES, [row("plain", "plain", grad_norm=0.8), faster, refused])
    page = megatron_page(tmp_path)
    assert (
        "| **graphs** | | | | | | | | |\n| attn | 190 ms | -5.0 % | 61 % | 42.0 GiB | +2.0 GiB | 1.0e-02 | 6.9e-01 | 0&nbsp;of&nbsp;1; not"
        in page
    )
    assert "a&#124;b" in page
    assert "| **FP8** | | | | | | | | |\n| mxfp8 | refused | | | | | | | |" in page
    assert "\n- FP8, mxfp8: error: needs &#124; Blackwell\n" in page
    assert page.count("**plain**") == 0
    assert "NVIDIA H200, torch 2" in page


def test_what_needs_other_experts_stands_against_those(tmp_path):
    each = {"megatron.grouped_gemm": "cublas"}
    rows = [row("plain", "plain"), row("each", "experts", settings=each, step_s=0.25)]
    written(tmp_path, SWITCHES, [*rows, row("blockwise", "FP8", settings={**each, "precision.fp8": "blockwise"}, step_s=0.24)])
    page = megatron_page(tmp_path)
    assert "| each | 250 ms | +25.0 % |" in page
    assert "| blockwise | 240 ms | -4.0 % |" in page
    assert "FP8: with a product for each expert by cuBLAS" in page


def test_lengths_are_drawn_and_the_longest_that_fits_is_named(tmp_path):
    rows = [
        row(
            f"64K CP {cp}",
            "64K",
            "cp",
            "oom" if cp == 1 else "ok",
            settings={"data.seq_len": 65536, "parallel.cp": cp},
            gpu_computing_percent=82.2,
        )
        for cp in (1, 2)
    ]
    written(tmp_path, CONTEXT, [row("8K CP 1", "8K", "cp", settings={"data.seq_len": 8192, "parallel.cp": 1}), *rows])
    page = megatron_page(tmp_path)
    assert "| 65,536 | 1 | out of memory | | | |" in page
    assert "| 65,536 | 2 | 20,480 | 0.20 s | 82 % | 40.0 GiB |" in page
    assert "CP 1 8,192 tokens; CP 2 65,536 tokens (the longest in this table)." in page
    assert page.count("<svg") == 4


def test_the_trainer_stands_beside_megatron_core_by_whole_pairs(tmp_path):
    def run(pair, side, speed, **more):
        about = {"setting": "all-to-all", "side": side, "pair": pair, "gpus": 4, "words": [], "outcome": "ok"}
        return about | {"tokens_per_s_per_gpu": speed, "versions": {"torch": "2.11.0"}} | more

    proof = [{"rule": "require all_to_all on ep", "observed": 96.0, "expected": ">= 96", "ok": True}]
    rows = [run(0, "bare", 20_000.0), run(0, "ours", 19_600.0, proof=proof, revision=3), run(1, "ours", 20_400.0), run(1, "bare", 20_000.0)]
    written(tmp_path, BARE, [*rows, run(2, "bare", 10.0), run(2, "ours", 0.0, outcome="failed", message="no")])
    page = megatron_page(tmp_path)
    assert (
        "| all-to-all | 2 | 20,000 | 20,000 | 1.000 | 0.78 to 1.29 | 1&nbsp;of&nbsp;1 |" in page
    )  # 12.71 * 0.0283 / sqrt(2) on either side of log 1
    assert " With " not in page
    written(tmp_path, BARE, [r | {"words": ["parallel.ep=2"]} for r in rows])
    assert " With <code>parallel.ep=2</code>." in megatron_page(tmp_path)


def test_rows_of_an_older_revision_say_so(tmp_path):
    written(tmp_path, SWITCHES, [row("plain", "plain"), row("attn", "graphs", revision=3)])
    assert "Made before performance revision 3 of the trainer (2)" in megatron_page(tmp_path, 3)
    assert "Made before" not in megatron_page(tmp_path, 2)
    written(tmp_path, SWITCHES, [row("plain", "plain", revision=3)])
    assert "Made before" not in megatron_page(tmp_path, 3)


def test_the_shipped_rows_make_a_page():
    page = megatron_page(repo_root() / "docs" / "parity")
    assert page.startswith("---\nhide: [toc]\n---\n\n# The megatron backend")


def test_a_row_of_another_shape_is_refused(tmp_path):
    (tmp_path / SWITCHES).write_text('{"table": "one"}\n')
    with pytest.raises(FileError):
        megatron_page(tmp_path)
