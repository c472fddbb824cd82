"""What a whole training takes, and the curve over numbers of GPUs, against the plans that they rest on."""

import pytest
from in_process import document

from playbook_app.cli.app import app, run_command

QWEN = ["plan", "qwen3_30b_a3b", "--no-published", "--top", "1"]


def test_a_training_takes_its_tokens_over_the_speed_of_all_gpus(capsys):
    found = document(capsys, *QWEN, "--gpus", "8", "--tokens", "1.5T", "--price", "2")
    speed, whole = found["plans"][0]["tokens_per_s_per_gpu"], found["training"]
    value, low, high = (speed[k] for k in ("value", "low", "high"))
    assert whole["days"]["value"] == pytest.approx(1.5e12 / (8 * value) / 86400)
    assert whole["days"]["low"] == pytest.approx(1.5e12 / (8 * high) / 86400)
    assert whole["gpu_hours"]["high"] == pytest.approx(1.5e12 / low / 3600)
    assert whole["price"]["value"] == pytest.approx(2 * whole["gpu_hours"]["value"])
    assert whole["energy_mwh"]["value"] == pytest.approx(whole["gpu_hours"]["value"] * 700 / 1e6)


def test_energy_is_unknown_where_no_source_says_what_a_gpu_draws(capsys):
    assert run_command(app, [*QWEN, "--gpus", "8xB300", "--tokens", "300B"]) == 0
    assert "energy unknown: no source says what a b300 may draw" in capsys.readouterr().out


def test_the_curve_has_the_plan_of_each_number_of_gpus(capsys):
    curve = document(capsys, *QWEN, "--scale", "16,1,8", "--tokens", "1T")
    assert [row["gpus"] for row in curve["rows"]] == [1, 8, 16]
    assert curve["rows"][0]["plan"] is None
    alone = document(capsys, *QWEN, "--gpus", "8", "--tokens", "1T")
    assert curve["rows"][1]["tokens_per_s_per_gpu"] == alone["plans"][0]["tokens_per_s_per_gpu"]
    assert curve["rows"][1]["training"] == alone["training"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--price", "2"], "add --tokens"),
        (["--tokens", "a lot"], "expected tokens of a training, such as 300B or 1T"),
        (["--tokens", "-1T"], "expected tokens of a training"),
        (["--tokens", "9999999T"], "expected tokens of a training"),
        (["--scale", "8,sixteen"], "numbers of GPUs, such as 8,16,32"),
        (["--scale", ","], "expected 1 to 20"),
        (["--scale", "8,16", "--gpus", "8"], "leave out --gpus"),
    ],
)
def test_what_cannot_be_asked_is_said(capsys, words, says):
    assert run_command(app, [*QWEN, *words]) == 2
    assert says in " ".join(capsys.readouterr().err.replace("│", "").split())
