"""Cells as people spell them: read as what they mean, refused by name where they mean nothing, and never a traceback."""

import csv
import json
import random

import pytest

from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook.planner.runs.check import check, document
from playbook.planner.time.cluster import cluster

PUBLISHED = data_root("tables") / "published_runs.csv"
ROW = {
    "model": "Qwen3-30B-A3B", "hardware": "H100", "gpus": "16", "precision": "bf16", "seq_len": "4096", "mbs": "1", "gbs": "1024", "tp": "1", "pp": "2",
    "vpp": "1", "ep": "8", "fsdp": "0", "dispatcher": "deepep", "recompute": "none", "cuda_graph": "none", "offload": "none", "routing": "force_balance",
    "tokens_per_s_per_gpu": "13011", "mem_gb": "60", "mem_unit": "GB",
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(**cells):
        path = tmp_path / "runs.csv"
        row = ROW | cells
        with path.open("w", newline="") as f:
            out = csv.writer(f)
            out.writerows([row, row.values()])
        (found,) = check(path)
        return found

    return read


SAME = {
    "model": ["qwen3_30b_a3b", "Qwen3 30B A3B", "Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B", "qwen3-30b a3b"],
    "hardware": ["H100 SXM", "NVIDIA H100 80GB HBM3", "H100-SXM5-80GB", "DGX-H100", "8xH100", "h100 80G"],
    "gpus": ["16.0", " 16 "],
    "precision": ["BF16", "bfloat16"],
    "seq_len": ["4,096", "4K", "4096.00"],
    "fsdp": ["off", "False", "optimizer", "ZeRO-1"],
    "dispatcher": ["DeepEP", "deep_ep"],
    "recompute": ["None", "off", "no"],
    "cuda_graph": ["None", "False", "off"],
    "offload": ["off", "no"],
    "routing": ["Force balance", "balanced", "force_balance,dropless"],
    "tokens_per_s_per_gpu": ["13,011", "~13011", "13011.0"],
    "mem_gb": ["n/a"],
    "mem_unit": ["gb", "GiB", "MB"],
}


@pytest.mark.parametrize(("column", "cell"), [(c, cell) for c, cells in SAME.items() for cell in cells])
def test_another_spelling_is_the_same_run(read, column, cell):
    found, plain = read(**{column: cell}), read()
    assert found.prediction is not None, found.why
    assert found.interval == plain.interval
    assert found.measured.tokens_per_s_per_gpu == 13011


@pytest.mark.parametrize(
    ("column", "cell", "as_if"),
    [
        ("precision", "FP8-MX", "mxfp8"),
        ("precision", "fp8 blockwise", "fp8_blockwise"),
        ("precision", "FP16", "bf16"),
        ("recompute", "full (uniform)", "full"),
        ("recompute", "Selective", "core_attn"),
        ("recompute", "layernorm, moe-act", "layernorm+moe_act"),
        ("cuda_graph", "Full iteration", "full_iteration"),
        ("cuda_graph", "attn+moe_router", "transformer_engine:attn+moe_router"),
        ("fsdp", "ZeRO-3", "zero3"),
        ("fsdp", "Megatron-FSDP", "fsdp"),
        ("routing", "token drop", "token_drop CF=1"),
        ("mbs", "-", ""),
        ("ep", "N/A", ""),
        ("vpp", "none", ""),
    ],
)
def test_a_word_stands_for_another(read, column, cell, as_if):
    found = read(**{column: cell})
    assert found.prediction is not None, found.why
    assert found.interval.value == read(**{column: as_if}).interval.value


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"hardware": "V100 PCIe"}, "hardware 'V100 PCIe' is not known"),
        ({"hardware": "H20 141GB"}, "hardware 'H20 141GB' is not known"),
        ({"dispatcher": "pigeon"}, "dispatcher 'pigeon' is not known"),
        ({"cuda_graph": "some"}, "cuda_graph 'some' is not known"),
        ({"recompute": "most"}, "recompute 'most' is not known"),
        ({"precision": "int8"}, "precision 'int8' is not known"),
        ({"gpus": "12", "pp": "8"}, "12 GPUs do not divide into tp 1 x cp 1 x pp 8"),
        ({"gpus": "16", "ep": "16"}, "16 GPUs do not divide into ep 16 x etp 1 x pp 2"),
        ({"gpus": "28", "ep": "7"}, "128 experts do not divide over ep 7"),
        ({"gpus": "48", "tp": "3", "pp": "1"}, "32 attention heads do not divide over tp 3"),
        ({"model": "a" * 500}, "is not known; name a preset"),
    ],
)
def test_what_means_nothing_is_refused_by_name(read, cells, why):
    assert why in read(**cells).why


def test_what_a_plan_cannot_use_does_not_take_its_memory_away(read):
    for cells in ({"model": "Llama3-8B"}, {"gbs": "1000"}, {"vpp": "4", "pp": "1"}, {"routing": "token_drop", "dispatcher": ""}):
        assert read(**cells).prediction.memory_bytes, cells


def test_the_header_may_be_in_capitals(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("Model,Hardware,GPUs,MBS,GBS,TP\nLlama3-8B,H100,8,1,64,1\n")
    assert check(path)[0].prediction


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100 40GB", "a100_40"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GB300 NVL72", "gb300"),
        ("HGX B200", "b200"),
    ],
)
def test_a_gpu_is_known_by_its_driver_and_by_its_board(name, known):
    assert cluster(name).name == known


ODD = (
    "", "-", "n/a", "none", "0", "1", "2", "3", "7", "64", "1.0", "4K", "999999999", "-1", "1e9", "nan", "inf", "x" * 300, "²", "٣", '"', "a,b", "on", "full",
    "fsdp", "deepep", "H100 SXM", "MI300X", "Qwen3-30B-A3B", "mpt-7b", "../x.json", "/etc/passwd", "bf16", "mxfp8", "full+moe", "selective",
    "optimizer 200%", "1073741825", "token_drop", "lora", "sft", "DeepSeek-V3", "131072", "torch", "unfused",
)  # fmt: skip


@pytest.mark.parametrize("tables", [60, pytest.param(200, marks=pytest.mark.full)])
def test_a_mutated_table_is_predicted_or_refused(tmp_path, tables):
    rng = random.Random(tables)
    with PUBLISHED.open(newline="") as f:
        head, *rows = csv.reader(f)
    path = tmp_path / "runs.csv"
    refused = []
    for _ in range(tables):
        names, body = list(head), [list(row) for row in rng.sample(rows, 2)]
        for _ in range(rng.randint(1, 5)):
            rng.choice([names, *body, *body, *body])[rng.randrange(len(head))] = rng.choice([*ODD, *rng.choice(rows)])
        if rng.random() < 0.1:
            rng.choice([names, *body]).pop()
        with path.open("w", newline="") as f:
            csv.writer(f).writerows([names, *body])
        if rng.random() < 0.1:
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data)
        try:
            found = check(path)
        except PlaybookError as e:
            refused.append(str(e))
            continue
        shown = json.loads(json.dumps(document(found), allow_nan=False))
        for row in shown["rows"]:
            assert (row["predicted"] is None) == bool(row["why"])
            if row["predicted"]:
                speed = row["predicted"]["tokens_per_s_per_gpu"]
                assert 0 < speed["low"] < speed["value"] < speed["high"]
    assert all(str(path) in message for message in refused)
    assert len(refused) < 0.8 * tables
