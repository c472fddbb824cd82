"""A model cut to some layers and experts is the same wherever a model is named: layout, plan, diagnose, plan check, and the tools for agents."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import document, run

from playbook.planner import parameters
from playbook.planner.choice.plain_data import words
from playbook.planner.models import find
from playbook.planner.plan import Plan, cut, parse
from playbook.planner.runs.check import check
from playbook_app.mcp.planning import plan_answer, plan_of

MODEL, CUT = "Qwen/Qwen3-30B-A3B", ("--layers", "8", "--experts", "16")


def test_layout_holds_the_layers_and_experts_that_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "layout", "memory", "--model", MODEL, "--gpus", "4", "ep=4", "gbs=16", *CUT)
    assert found["layout"]["layers"] == 8
    assert found == document(capsys, "layout", "memory", "--model", MODEL, "--gpus", "4", "ep=4", "gbs=16", "layers=8", "experts=16")
    whole = document(capsys, "layout", "memory", "--model", MODEL, "--gpus", "4", "ep=4", "gbs=16", "--layers", "8")
    assert whole["peak"] > found["peak"]


def test_a_plan_of_the_cut_model_is_checked_by_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    best = document(capsys, "plan", MODEL, "--gpus", "8", "--gbs", "16", "--top", "1", "--no-published", *CUT)["plans"][0]
    assert {"layers=8", "experts=16"} <= set(best["settings"])
    plan = parse("qwen3_30b_a3b", best["settings"])
    assert (plan.shape.layers, plan.shape.experts, plan.shape.top_k) == (8, 16, 8)


def test_diagnose_names_the_cut_and_finds_no_run_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "diagnose", "--model", MODEL, "--gpus", "8", "--gpu", "h100", "--tokens-per-s", "50000", "--gbs", "16", *CUT)
    assert found["setting"]["model"] == "qwen3_30b_a3b of 8 layers and 16 experts"
    assert not any(row["model"].startswith("Qwen3-30B") for row in (found["published"] or {"rows": []})["rows"])


def test_a_row_of_plan_check_is_of_the_cut_model(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"id,model,hardware,gpus,ep,gbs,layers,experts\na,{MODEL},h100,8,8,64,8,16\nb,{MODEL},h100,8,8,64,90,16\n")
    cut_, deeper = check(path)
    assert cut_.prediction is not None, cut_.why
    assert (cut_.prediction.plan.shape.layers, cut_.prediction.plan.shape.experts) == (8, 16)
    assert f"90 layers; {MODEL} has 48" in str(deeper.why)


def test_agents_cut_a_model_with_the_same_words() -> None:
    plan = plan_of(MODEL, 8, ["layers=8", "experts=16", "ep=8"])
    assert parameters.total(plan.shape) < parameters.total(find(MODEL)) / 20
    found = plan_answer(
        MODEL,
        8,
        "h100",
        seq_len=4096,
        global_batch_size=16,
        goal="tokens/s",
        backend="megatron",
        allow=frozenset(),
        fix=("layers=8", "experts=16"),
        top=1,
    )
    assert found.plans


def test_fewer_experts_than_a_token_meets_meet_all() -> None:
    shape, others, name = cut(find(MODEL), ["tp=2", "experts=4"])
    assert (shape.top_k, others, name) == (4, ("tp=2",), " of 4 experts")
    assert "experts=4" in words(Plan(shape, "qwen3_30b_a3b"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama3_8b", "--experts", "4"], "the model has none"),
        (["--model", MODEL, "--layers", "0"], "layers"),
        (["--model", MODEL, "experts=x"], "experts is 'x'; expected a whole number"),
    ],
)
def test_a_cut_that_is_none_gets_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "layout", "check", "--gpus", "8", *words)
    assert code == 2
    assert message in err
