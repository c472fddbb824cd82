"""`playbook layout`: what it prints, and its exit codes."""

from __future__ import annotations

import json

import pytest
from in_process import document, printed, refused, run


def test_an_illegal_layout_is_explained_with_offers(capsys):
    words = ["check", "--gpus", "256", "tp=1", "cp=32", "ep=32", "pp=8", "uneven=false", "--model", "deepseek_v3"]
    code, out, _ = run(capsys, "layout", *words)
    assert code == 2
    assert "61 layers do not divide into pp 8" in out
    assert "  uneven=true    (model deepseek_v3" in out
    code, out, _ = run(capsys, "layout", *words, "--json")
    found = json.loads(out)
    assert (code, found["legal"], len(found["broken"]), len(found["nearest"])) == (2, False, 1, 3)
    for offer in found["nearest"]:
        again = [f"{k}={v}".lower() for k, v in offer["changes"].items()]
        kept = [w for w in ("tp=1", "cp=32", "ep=32", "pp=8", "uneven=false", "gpus=256") if w.split("=")[0] not in offer["changes"]]
        assert run(capsys, "layout", "check", "--model", "deepseek_v3", *kept, *again)[0] == 0


def test_a_legal_layout_says_its_degrees(capsys):
    out = printed(capsys, "layout", "check", "--model", "qwen3_30b_a3b", "gpus=8", "ep=4", "tp=2")
    assert out.startswith("legal: model qwen3_30b_a3b  gpus 8  tp 2")
    assert "dp 4" in out
    assert "edp 2" in out


def test_memory_prints_a_breakdown_that_adds_up(capsys):
    words = ["memory", "--model", "qwen3_30b_a3b", "layers=24", "gpus=4", "ep=4", "mbs=4", "seq_len=4096"]
    assert "GiB allocated on stage 1" in printed(capsys, "layout", *words)
    stage = document(capsys, "layout", *words)["stages"][0]
    parts = ("parameters", "gradients", "optimizer", "fp8_weights", "gathered", "activations", "transient", "workspace")
    assert stage["peak"] == pytest.approx(sum(stage[k] for k in parts))


def test_traffic_counts_work_and_bytes(capsys):
    found = document(capsys, "layout", "traffic", "--model", "deepseek_v3", "gpus=256", "ep=32", "pp=8", "uneven=true", "tp=2")
    assert found["flops_per_token"] == pytest.approx(260e9, rel=0.001)
    assert {row["what"] for row in found["sent"]} == {"tp", "ep", "pp", "dp"}
    assert run(capsys, "layout", "traffic", "--model", "qwen3_30b_a3b", "gpus=8", "ep=4")[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "--model", "unheard_of"], "expected one of"),
        (["memory", "--model", "qwen3_30b_a3b", "gpus=3", "ep=2"], "3 ranks do not divide into ep 2"),
        (["traffic", "--model", "qwen3_30b_a3b", "nonsense"], "expected key=value"),
    ],
)
def test_mistakes_are_messages_and_exit_with_two(capsys, words, says):
    assert says in refused(capsys, "layout", *words, listed="ep=2" in words)


@pytest.mark.parametrize(
    ("gib", "code", "says"), [("200", 0, "fits"), ("165", 0, "tight"), ("141", 2, "does not fit"), (None, 0, "no GPU is named")]
)
def test_a_peak_is_compared_with_the_gpu_that_is_named(capsys, gib, code, says):
    words = ["memory", "--model", "qwen3_30b_a3b", "gpus=8", "ep=8", "mbs=4", *(["--memory", gib] if gib else [])]
    found, out, _ = run(capsys, "layout", *words)
    assert (found, out.strip().splitlines()[-1].startswith(says)) == (code, True), out
    assert json.loads(run(capsys, "layout", *words, "--json")[1])["verdict"] == (says if gib else None)


def test_a_peak_is_set_beside_the_gpu_that_is_named_or_none_is(capsys):
    alone = printed(capsys, "layout", "memory", "--model", "deepseek_v3")
    assert "no GPU is named: no GPU that is known here has that much" in alone
    assert "fits: a GPU has 79.6 GiB" in printed(capsys, "layout", "memory", "--model", "qwen3_8b", "gpus=8", "tp=2", "--hardware", "h100")
    assert run(capsys, "layout", "memory", "--model", "deepseek_v3", "gpus=8", "--hardware", "h100")[0] == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["cp_comm=a2a"], "cp 1"), (["imbalance=2"], "without experts"), (["sp=true"], "tp 1"), (["offload_percent=50"], "no offload"),
        (["optimizer_instances=2", "sharding=none"], "shards nothing"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(capsys, words, why):
    said = refused(capsys, "layout", "memory", "--model", "qwen3_8b", "gpus=8", *words)
    assert ["has no effect" in said, why in said] == [True, True]
