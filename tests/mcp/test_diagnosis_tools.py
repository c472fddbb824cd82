"""The tools that diagnose and export, as the official client meets them in process."""

import json

import pytest

from playbook_app.mcp.server import server
from tests.support.mcp_calls import answer, ask

ASKED = {"model": "qwen3_8b", "gpus": 8, "hardware": "h100"}


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("diagnose", {"mfu": 40, "step_time_s": 2}, "expected one figure"),
        ("diagnose", {"tokens_per_s": 1e6}, "Check your token count"),
        ("diagnose", {"mfu": 95}, "expected at most 80%, which the best matrix product"),
        ("diagnose", {"layout": ["tp=3"]}, "tp 3"),
        ("diagnose", {"hardware": "a100", "layout": ["fp8=blockwise"]}, "no 8-bit products"),
        ("diagnose", {"hardware": "zx81"}, "is not known"),
        ("diagnose", {"saw": ["sleep=9%"]}, "saw 'sleep' is not known"),
        ("diagnose", {"network": "IB"}, "network is 'IB'; expected 100GbE"),
        ("export_layout", {"settings": ["tp=3"]}, "tp 3"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(library, tool, arguments, says):
    result = ask(library, tool, **{**ASKED, **arguments})
    assert result.is_error
    assert says in result.content[0].text


def test_a_diagnosis_takes_what_was_seen(library):
    asked = {
        "model": "qwen3_30b_a3b",
        "gpus": 64,
        "hardware": "h100",
        "mfu": 15,
        "layout": ["tp=2", "ep=8", "mbs=2", "gbs=1024", "gpus=64"],
    }
    predicted, seen = (answer(library, "diagnose", **asked, **more) for more in ({}, {"saw": ["all-to-all=40%"]}))
    assert [f["walls"][0]["name"] for f in (predicted, seen)] == ["host-bound", "exposed communication"]
    assert predicted["actions"][0]["id"] != seen["actions"][0]["id"]


def test_a_plan_is_exported(library):
    plan = answer(library, "plan_layout", model="llama3_8b", gpus=8, hardware="h100", fix=["tp=2"], top=1)["plans"][0]
    exported = answer(library, "export_layout", model="llama3_8b", gpus=8, hardware="h100", settings=plan["settings"])
    assert "--tensor-model-parallel-size 2" in exported["text"]
    assert exported["verdict"] in ("fits", "tight")


def test_the_instructions_begin_with_the_plan_and_the_diagnosis(library):
    words = server(library).instructions
    assert words.startswith("Start with plan_layout")
    assert words.index("diagnose") < words.index("list_cards")


def test_hardware_may_be_the_text_of_a_file_and_the_network_is_named(library, tmp_path):
    asked = {"model": "qwen3_30b_a3b", "gpus": 16, "global_batch_size": 64, "top": 1}
    plain, slow = (answer(library, "plan_layout", hardware="h100", network=n, **asked) for n in ("", "100GbE"))
    assert slow["plans"][0]["network_share"] > plain["plans"][0]["network_share"] >= 0
    assert sum("network" in words for words in slow["assumptions"]) == 1
    text = json.dumps({"gpu": "h100", "nvlink_domain": 4, "network": "100GbE"})
    stated = answer(library, "plan_layout", hardware=text, **asked)
    assert stated["plans"][0]["tokens_per_s_per_gpu"]["value"] <= slow["plans"][0]["tokens_per_s_per_gpu"]["value"]
    assert any("stated, hardware: 4 in one NVLink domain" in words for words in stated["assumptions"])
    file = tmp_path / "hardware.json"
    file.write_text(text, encoding="utf-8")
    for hardware, says in ((str(file), "is not known"), (json.dumps({"calibration": str(file)}), "text has no folder")):
        result = ask(library, "plan_layout", hardware=hardware, **asked)
        assert result.is_error
        assert says in result.content[0].text
