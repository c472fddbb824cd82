"""`playbook plan MODEL`: what a user reads, the JSON of a script, exports, and mistakes."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from playbook.cli import exit_codes
from playbook.cli.app import app
from playbook.cli.plans.export import configuration
from playbook.paths import repo_root
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.time.cluster import cluster
from playbook.planner.time.step import step_time
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import load

sys.path.insert(0, str(repo_root() / "tools"))
from plan_page import DECISIONS, MARK, PAGE


class Shown(NamedTuple):
    """What a command printed, and its exit code."""

    exit_code: int
    stdout: str


@pytest.fixture
def run(capsys) -> Callable[..., Shown]:
    def ran(*words: str, command: str = "plan") -> Shown:
        code = exit_codes.run(app, [command, *words])
        return Shown(code, capsys.readouterr().out)

    return ran


def test_the_answer_is_one_screen_in_plain_words(run) -> None:
    shown = run("Qwen3-8B", "--gpus", "8", "--gbs", "64")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert len(lines) <= 24
    assert "legal layouts" in lines[0]
    assert any(line.startswith("second") for line in lines)
    assert any(line.startswith("memory") for line in lines)
    words = next(line for line in lines if line.startswith("check")).split()[1:]
    assert run(*words[2:], command="layout").exit_code == 0


def test_json_has_the_schema_that_scripts_read(run) -> None:
    found = json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--top", "3", "--json").stdout)
    assert found["schema"] == "plan/1"
    assert len(found["plans"]) == 3
    for plan in found["plans"]:
        assert {"layout", "fits", "memory_gib", "tokens_per_s_per_gpu", "mfu"} <= set(plan)
        speed = plan["tokens_per_s_per_gpu"]
        assert speed["low"] < speed["value"] < speed["high"]
    assert set(found["ties"]) <= {0, 1, 2}
    assert found["assumptions"]


def test_nothing_fits_is_exit_code_2_and_says_what_would(run) -> None:
    shown = run("qwen3_235b_a22b", "--gpus", "32", "--gbs", "512")
    assert shown.exit_code == 2
    assert "nothing fits" in shown.stdout
    assert "--gpus 64" in shown.stdout


def test_runs_of_ones_own_scale_the_figures(run, tmp_path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("model,hardware,gpus,seq_len,mbs,gbs,tp,pp,precision,tokens_per_s_per_gpu\nqwen3_8b,H100,8,4096,1,64,1,1,bf16,4000\n")
    plain, scaled = (
        json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--json", *more).stdout)["plans"][0]
        for more in ([], ["--anchor", str(table)])
    )
    assert scaled["layout"] == plain["layout"]
    speeds = scaled["tokens_per_s_per_gpu"], plain["tokens_per_s_per_gpu"]
    assert speeds[0]["value"] < speeds[1]["value"]
    assert speeds[0]["high"] / speeds[0]["low"] < speeds[1]["high"] / speeds[1]["low"]

    shown = run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--anchor", str(table)).stdout.splitlines()
    (line,) = (line for line in shown if line.startswith("anchored"))
    assert line == f"anchored 1 run and published runs, x{speeds[0]['value'] / speeds[1]['value']:.2f}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "63"], "global batch 1024 is not a multiple of micro batch 1 x dp 63 = 63; set gbs to a multiple of 63"),
        (["--gpus", "64", "--fix", "tp=3"], "32 attention heads do not divide over tp 3; set tp to a divisor of 32"),
        (["--gpus", "64", "--fix", "recompute=full,ep_overlap=true"], "overlap of expert communication excludes recompute full"),
        (["--gpus", "8", "--gbs", "1", "--fix", "pp=8,vpp=1"], "pp 8 needs as many micro-batches, and a step has 1"),
    ],
)
def test_where_no_layout_is_legal_the_rule_is_named_that_most_break(capsys, words: list[str], says: str) -> None:
    code = exit_codes.run(app, ["plan", "qwen3_30b_a3b", *words])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert "What most layouts break:\n  - " in shown.err
    assert says in shown.err
    exit_codes.run(app, ["plan", "qwen3_30b_a3b", *words, "--json"])
    assert any(says in sentence for sentence in json.loads(capsys.readouterr().out)["broken"])


@pytest.mark.parametrize(("seq", "tokens"), [("8K", 8192), ("8,192", 8192), ("8192", 8192)])
def test_a_sequence_is_spelled_as_in_a_table_of_runs(run, seq: str, tokens: int) -> None:
    found = json.loads(run("qwen3_8b", "--gpus", "8", "--seq", seq, "--gpu", "h200", "--top", "1", "--json").stdout)
    assert (found["question"]["seq_len"], found["question"]["hardware"]) == (tokens, "h200")


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge", "torchtitan", "playbook"])
def test_the_winner_is_exported(run, target: str) -> None:
    shown = run("qwen3_30b_a3b", "--gpus", "8", "--gbs", "64", "--fix", "tp=1,cp=1,vpp=1,mbs=1", "--export", target)
    assert shown.exit_code == 0
    assert "not expressible: parallel" not in shown.stdout
    assert re.search(r"global.batch.size.*64", shown.stdout)
    # Pasted into a run of one's own it must not change what the model learns.
    assert not re.search(
        r"\blr\b|learning_rate|steps|iters|aux.loss|load.balancing|capacity|router.dtype|seed|data.path|checkpoint\.",
        without_comments(shown.stdout),
    )


def without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(
    ("model", "gpus"), [("qwen3_30b_a3b", 16), ("qwen3_8b", 8), pytest.param("deepseek_v3", 512, marks=pytest.mark.full)]
)
def test_the_exported_winner_passes_the_trainers_own_checks(model: str, gpus: int, tmp_path) -> None:
    import yaml

    best = search(Question(MODELS[model], model, cluster("h100"), gpus, 4096, 512), 1).choices[0]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(configuration(best.plan)))
    report = dry_run(load(path), gpus)
    assert report.layout["microbatches"] == best.plan.microbatches
    assert max(s.peak for s in report.stages) == pytest.approx(best.peak, rel=0.02)


def test_a_model_that_this_trainer_does_not_train_has_its_layout_exported(run) -> None:
    shown = run("llama3_8b", "--gpus", "8", "--gbs", "64", "--export", "megatron-lm")
    assert "--tensor-model-parallel-size" in shown.stdout
    assert run("llama3_8b", "--gpus", "8", "--gbs", "64", "--export", "playbook").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["no_such_model"],
        ["qwen3_8b", "--hardware", "toaster"],
        ["qwen3_8b", "--goal", "fun"],
        ["qwen3_8b", "--fix", "tp"],
        ["qwen3_8b", "--seq", "-"],
        ["qwen3_8b", "--seq", "0"],
        [],
    ],
)
def test_mistakes_end_with_exit_code_2(run, words: list[str]) -> None:
    assert run(*words).exit_code == 2


def test_the_page_asks_ten_questions_and_has_an_answer_to_each() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[2]
    sections = text.split("\n### ")[1:]
    assert len(sections) == len(DECISIONS) == 10
    for section, (question, command) in zip(sections, DECISIONS, strict=True):
        assert section.startswith(f"{question}\n\n```text\n$ {command}\n")
        assert "playbook layout memory --model" in section


@pytest.mark.parametrize("place", [3, *(pytest.param(i, marks=pytest.mark.full) for i in range(10))])
def test_an_answer_takes_seconds_and_the_pages_is_still_among_the_best(run, place: int) -> None:
    """The page's best plan may lose to another as constants move, but by no more than a tenth."""
    question, command = DECISIONS[place]
    began = time.process_time()
    found = json.loads(run(*command.split()[2:], "--json").stdout)
    assert time.process_time() - began < 5
    best = found["plans"][0]["tokens_per_s_per_gpu"]["value"]
    shown = PAGE.read_text(encoding="utf-8").partition(f"### {question}\n")[2]
    model, *words = next(line for line in shown.splitlines() if line.startswith("check")).partition("--model ")[2].split()
    again = parse(model, words)
    assert again.broken() == []
    assert step_time(again, cluster(found["question"]["hardware"])).tokens_per_s_per_gpu.value > 0.9 * best


def test_a_published_layout_that_was_faster_leads_the_table(run) -> None:
    asked = ("qwen3_30b_a3b", "--gpus", "16", "--hardware", "h100")
    shown = run(*asked).stdout
    found = json.loads(run(*asked, "--json").stdout)
    fastest = max(found["published"]["rows"], key=lambda r: r["tokens_per_s_per_gpu"])
    assert fastest["tokens_per_s_per_gpu"] > found["plans"][0]["tokens_per_s_per_gpu"]["value"]
    assert shown.splitlines()[2].startswith("published ")
    assert f"{fastest['tokens_per_s_per_gpu']:,.0f}" in shown.splitlines()[2]
    far = 1 - fastest["predicted"] / fastest["tokens_per_s_per_gpu"]
    assert f"of {fastest['id']} the planner says {fastest['predicted']:,.0f}, {far:.0%} too slow" in shown
    assert fastest["link"].startswith("https://")
    assert f"{fastest['id']}, {fastest['link']}" in shown

    plain = run(*asked, "--no-published").stdout
    assert not [line for line in plain.splitlines() if line.startswith(("published", "anchored", "ran "))]
    assert run("llama3_70b", "--gpus", "8", "--hardware", "h200", "--top", "1").stdout.count("\nran ") == 0  # of other GPUs none is shown
