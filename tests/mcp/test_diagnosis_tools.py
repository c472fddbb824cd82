"""The tools that diagnose and export, as the official client meets them in process."""

import json

import pytest

from tests.support.mcp_calls import answer, ask, refusal

ASKED = {"model": "qwen3_8b", "gpus": 8, "hardware": "h100"}


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("diagnose", {"mfu": 40, "step_time_s": 2}, "expected one figure"),
        ("diagnose", {"mfu": 95}, "expected at most 80%, which the best matrix product"),
        ("diagnose", {"layout": ["tp=3"]}, "tp 3"),
        ("diagnose", {"hardware": "zx81"}, "is not known"),
        ("diagnose", {"saw": ["sleep=9%"]}, "saw 'sleep' is not known"),
        ("diagnose", {"network": "IB"}, "network is 'IB'; expected 100GbE"),
        ("export_layout", {"settings": ["tp=3"]}, "tp 3"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(library, tool, arguments, says):
    assert says in refusal(library, tool, **{**ASKED, **arguments})


def test_a_plan_is_exported(library):
    plan = answer(library, "plan_layout", model="llama3_8b", gpus=8, hardware="h100", fix=["tp=2"], framework="megatron-lm", top=1)[
        "plans"
    ][0]
    exported = answer(library, "export_layout", model="llama3_8b", gpus=8, hardware="h100", settings=plan["settings"])
    assert "--tensor-model-parallel-size 2" in exported["text"]
    assert exported["verdict"] in ("fits", "tight")


@pytest.mark.full
def test_hardware_may_be_the_text_of_a_file_and_the_network_is_named(library, tmp_path):
    asked = {"model": "qwen3_8b", "gpus": 16, "global_batch_size": 64, "top": 1}
    slow = answer(library, "plan_layout", hardware="h100", network="100GbE", **asked)
    assert slow["plans"][0]["network_share"] > 0
    assert sum("network" in words for words in slow["assumptions"]) == 1
    text = json.dumps({"gpu": "h100", "nvlink_domain": 4, "network": "100GbE"})
    stated = answer(library, "plan_layout", hardware=text, **asked)
    assert stated["plans"][0]["tokens_per_s_per_gpu"]["value"] <= slow["plans"][0]["tokens_per_s_per_gpu"]["value"]
    assert any("stated, hardware: 4 in one NVLink domain" in words for words in stated["assumptions"])
    file = tmp_path / "hardware.json"
    file.write_text(text, encoding="utf-8")
    for hardware, says in ((str(file), "is not known"), (json.dumps({"calibration": str(file)}), "text has no folder")):
        assert says in refusal(library, "plan_layout", hardware=hardware, **asked)


def test_an_export_is_judged_by_the_loss_that_its_trainer_runs(library):
    """Megatron-LM refuses Transformer Engine's loss; its own takes the memory that the planned one spares."""
    asked = {"model": "llama3_8b", "gpus": 8, "hardware": "h100", "settings": ["tp=2", "mbs=2", "gbs=128", "seq_len=8192"]}
    own, bridge = (answer(library, "export_layout", framework=f, **asked) for f in ("megatron-lm", "megatron-bridge"))
    planned = answer(library, "estimate_memory", **asked)
    native = answer(library, "estimate_memory", **asked | {"settings": [*asked["settings"], "loss=native"]})
    assert (bridge["verdict"], own["verdict"]) == (planned["verdict"], native["verdict"]) == ("fits", "does not fit")
    assert own["memory_gib"] == native["peak"] / 2**30 > own["gpu_gib"]
    text = ask(library, "export_layout", framework="megatron-lm", **asked).content[0].text
    says = f"does not fit: {own['memory_gib']:.1f} of 79.6 GiB with megatron-lm's loss; call plan_layout with framework=megatron-lm"
    assert text.splitlines()[0] == says
    large = {**asked, "settings": ["tp=2", "mbs=8", "gbs=128", "seq_len=8192"]}
    text = ask(library, "export_layout", framework="megatron-lm", **large).content[0].text
    assert text.startswith("does not fit")
    assert "plan_layout" not in text.splitlines()[0], "no loss makes it fit"


def test_a_plan_s_text_names_length_limit_ties_from_1_and_a_published_run_that_is_ahead(library):
    asked = {"model": "qwen3_30b_a3b", "gpus": 16, "hardware": "h100", "global_batch_size": 1024}
    found, text = answer(library, "plan_layout", **asked), ask(library, "plan_layout", **asked).content[0].text
    assert text.startswith("4,096 tokens, global batch 1,024, at most 73.2 GiB of a GPU\n")
    assert found["ties"][0] == 1
    best = found["plans"][0]["tokens_per_s_per_gpu"]["value"]
    (ahead,) = [r for r in found["published"]["rows"] if r["id"] == found["published"]["ahead"]]
    assert ahead["tokens_per_s_per_gpu"] > best
    assert f"ahead of plan 1, published: {ahead['words']}" in text
    assert found["claims"]
    assert all(f"claim {c['words']}" in text for c in found["claims"])
    assert found["other_backend"]["sentence"] in text
    near = [p["memory_gib"] > 0.98 * found["limit_gib"] for p in found["plans"]]
    assert ["(at the limit)" in line for line in text.splitlines() if ": gpus=16 " in line] == near
    behind = asked | {"model": "llama3_8b"}
    found, text = answer(library, "plan_layout", **behind), ask(library, "plan_layout", **behind).content[0].text
    assert found["published"]["ahead"] is None
    assert [line for line in text.splitlines() if line.startswith("published")] == [
        f"published: {r['words']}" for r in found["published"]["rows"]
    ]
