"""Pages about speed before a run: published runs, plan tables and worked examples."""

from __future__ import annotations

import json
import re
from html import unescape
from math import log
from pathlib import Path

import pytest
from plan_page import OF_A_PLAN, README, first_answers

from playbook.paths import repo_root
from playbook.planner.models import MODELS
from playbook.planner.time.cluster import clusters
from playbook_app.site import doors
from playbook_app.site.doors import read as read_doors
from playbook_app.site.published import PlanQuestion, ask, data, form, published_page, questions, read, tables_page, worked

PLANS = repo_root() / "docs" / "plans.jsonl"
DECISIONS = repo_root() / "docs" / "decisions.jsonl"
HEAD = (
    "id,source_group,release_or_date,model,params_total_B,params_active_B,task,hardware,gpus,precision,seq_len,tp,cp,pp,vpp,ep,etp,dp,dispatcher,"
    "tokens_per_s_per_gpu,mfu_pct,status\n"
)


def run(number: int, mfu: float, total: str = "30", active: str = "3", hardware: str = "H100") -> str:
    return f"r{number},page,26.01,M<b>,{total},{active},pretrain,{hardware},64,bf16,4096,2,1,1,,8,1,,alltoall,1000,{mfu},ok\n"


def test_the_ladder_says_how_many_runs_reach_what_is_asked(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    sparse = [run(i, mfu) for i, mfu in enumerate((10, 20, 25, 30, 40))]
    few = [run(i, 50, hardware="B200") for i in range(10, 13)]
    failed = run(20, 90).replace(",ok", ",OOM")
    table.write_text(HEAD + "".join([*sparse, *few, failed]))
    shown = unescape(published_page(table))
    assert "<b>H100 bf16</b>, mixture of experts" in shown
    assert "10, 25, 40 %" in shown
    assert "3 of 5" in shown
    assert "B200 bf16</b>" not in shown, "three runs are no step"
    assert shown.count("data-text=") == 8
    assert "tp 2 ep 8" in shown
    assert "M<b>" not in published_page(table)
    assert "{ #r3 data-text=" in shown, "an id that a diagnosis prints is a place on the page"


def test_plan_tables_hold_an_answer_to_every_question_and_say_where_nothing_fits() -> None:
    found = read(PLANS)
    assert [a.asked for a in found] == list(questions())
    shown = tables_page(PLANS)
    assert shown.count("calculator.md?model=") == sum(bool(a.settings) for a in found if a.asked.seq_len == 4096)
    assert shown.count("nothing fits") >= sum(not a.settings for a in found if a.asked.seq_len == 4096) > 0
    assert all(max(a.stages_gib) <= a.capacity_gib and a.low < a.speed < a.high for a in found if a.settings)


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama3_8b", "llama3_70b", "qwen3_30b_a3b"])
def test_plan_tables_are_near_what_the_planner_says_today(model: str) -> None:
    kept = next(a for a in read(PLANS) if (a.asked.model, a.asked.hardware, a.asked.gpus) == (model, "h100", 64))
    assert ask(kept.asked).speed == pytest.approx(kept.speed, rel=0.05), "the planner has changed: run `python tools/plan_page.py`"


@pytest.mark.full
@pytest.mark.parametrize(("model", "gpus"), [("llama3_8b", 128), ("llama3_70b", 96), ("qwen3_30b_a3b", 24)])
def test_between_two_numbers_of_gpus_the_speed_lies_between_theirs(model: str, gpus: int) -> None:
    """What the form of the diagnosis says of numbers that were not asked."""
    below, above = (
        next(a for a in read(PLANS) if a.asked == PlanQuestion(model, "h100", n)) for n in ((8, 64) if gpus < 64 else (64, 256))
    )
    part = log(gpus / below.asked.gpus) / log(above.asked.gpus / below.asked.gpus)
    assert ask(PlanQuestion(model, "h100", gpus)).speed == pytest.approx(below.speed * (above.speed / below.speed) ** part, rel=0.1)


def test_the_form_has_every_model_and_gpu_and_published_runs_of_those_that_were_not_asked() -> None:
    found = json.loads(data(PLANS))
    assert set(found["gpus"]) == set(clusters())
    assert set(found["models"]) == {m for m in MODELS if not m.endswith("_tiny")}
    assert form(PLANS).count("<option") == len(found["models"]) + len(clusters()) + 3
    shared, by, low, high, _, rows = found["models"]["deepseek_v3"]["published"]["gb300"]
    assert "deepseek_v3 on gb300" in shared
    assert 0 < low <= high
    assert by == "tokens"
    assert {i for i, _ in rows} <= set(found["runs"])
    assert all(0 < reached < 1 for _, reached in found["gpus"].values())


def test_decisions_hold_an_answer_to_every_question() -> None:
    found = read_doors(DECISIONS)
    assert [a.asked for a in found] == list(doors.questions())
    assert all(a.low < a.speed < a.high for a in found if a.settings)
    for case, way in {"tp=": "TP alone", "pp=": "PP alone", "ep=": "EP alone", "sharding=fsdp2": "FSDP"}.items():
        assert all(case in a.settings for a in found if a.asked.way == way and a.settings), case


@pytest.mark.full
@pytest.mark.parametrize("door", doors.DOORS, ids=lambda d: d.page)
def test_decisions_are_near_what_the_planner_says_today(door: doors.Door) -> None:
    at = {"door": door.door, "model": "qwen3_30b_a3b", "gpus": 64}
    kept = next(a for a in read_doors(DECISIONS) if {k: getattr(a.asked, k) for k in at} == at)
    assert doors.ask(kept.asked).speed == pytest.approx(kept.speed, rel=0.05), "the planner has changed: run `python tools/plan_page.py`"


@pytest.mark.full
def test_the_readme_and_the_first_page_show_what_their_commands_print() -> None:
    asked = set()
    for page in OF_A_PLAN:
        shown = page.read_text(encoding="utf-8")
        assert first_answers(page) == shown, "run `python tools/plan_page.py --page`"
        asked.add(re.search(r"^\$ (playbook plan .*?) +#", shown, re.MULTILINE)[1])
    assert len(asked) == 1, "one question, asked alike"
    assert README.read_text(encoding="utf-8").count("$ playbook diagnose ") == 1


def test_worked_examples_show_what_each_kind_of_parallelism_buys() -> None:
    for name, shown in worked().items():
        if name.startswith("worked"):
            gib = [int(v) for v in re.findall(r'(\d+)(?:\*\*, does not fit)? \{ data-label="GiB"', shown)]
            assert len(gib) >= 2
            assert gib[0] == max(gib), f"{name}: more of it takes no more memory"
