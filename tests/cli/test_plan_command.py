"""`playbook plan MODEL`: what a user reads, the JSON of a script, exports, and mistakes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable

import pytest
from in_process import refused
from plan_page import DECISIONS, MARK, PAGE

from playbook.errors import ExitCode
from playbook.paths import data_root
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.runs.check import check
from playbook.planner.runs.published import RUNS
from playbook.planner.time.cluster import cluster
from playbook.planner.time.step import step_time
from playbook_app.cli.app import app, run_command
from playbook_app.mcp.planning import plan_answer
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import load
from playbook_trainer.export.plans import TARGETS, trained_by
from playbook_trainer.export.sheet import RELEASES


@pytest.fixture
def run(capsys) -> Callable[..., subprocess.CompletedProcess[str]]:
    def ran(*words: str, command: str = "plan") -> subprocess.CompletedProcess[str]:
        code = run_command(app, [command, *words])
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return ran


def test_the_answer_is_one_screen_in_plain_words(run) -> None:
    shown = run("Qwen3-8B", "--gpus", "8", "--gbs", "64")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert len(lines) <= 24
    assert "legal layouts" in lines[0]
    assert any(line.startswith("second") for line in lines)
    assert any(line.startswith("memory") for line in lines)
    words = next(line for line in lines if line.startswith("check")).split()[1:]
    assert run(*words[2:], command="layout").returncode == 0


def test_json_has_the_schema_that_scripts_read(run) -> None:
    found = json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--top", "3", "--json").stdout)
    assert found["schema"] == "plan/1"
    assert len(found["plans"]) == 3
    for plan in found["plans"]:
        assert {"layout", "fits", "memory_gib", "tokens_per_s_per_gpu", "mfu"} <= set(plan)
        speed = plan["tokens_per_s_per_gpu"]
        assert speed["low"] < speed["value"] < speed["high"]
    assert 1 in found["ties"]
    assert set(found["ties"]) <= {1, 2, 3}
    assert found["assumptions"]


def test_a_plan_names_what_was_measured_of_its_choice_as_far_as_the_scope_fits(run) -> None:
    dense, sparse = (run(model, "--gpus", "8", "--gbs", "64", "--top", "1").stdout for model in ("qwen3_8b", "qwen3_30b_a3b"))
    claims = [[line.split()[1] for line in shown.splitlines() if line.startswith("claim ")] for shown in (dense, sparse)]
    assert claims == [["V1"], ["M1.s", "V1"]]
    (line,) = (line for line in dense.splitlines() if line.startswith("claim "))
    (claim,) = json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--top", "1", "--json").stdout)["claims"]
    assert claim["words"] in line
    stands = json.loads(run("list", "V1", "--json", command="evidence").stdout)[0]
    assert stands["stands"] in line
    assert stands["sentence"].partition(";")[0] in line
    assert "qwen3_30b_a3b" in line, "a dense model is told what was measured"


def test_a_plan_says_where_its_memory_is_at_the_limit_and_how_it_is_started(run) -> None:
    asked = ("llama3_8b", "--gpus", "8", "--seq", "8192", "--top", "3")
    shown, found = run(*asked).stdout.splitlines(), json.loads(run(*asked, "--json").stdout)
    assert "global batch 512 (four million tokens; --gbs names yours)" in shown[0]
    near = [p["memory_gib"] > 0.98 * found["question"]["memory_gib"] for p in found["plans"]]
    assert any(near)
    assert not all(near)
    assert ["memory at the limit" in line for line in shown if re.match(r"\d\*? ", line)] == near
    told = [line for line in shown if line.startswith("memory ") and "within 2% of the limit of 73.2" in line]
    assert len(told) == near[0]
    start = next(line for line in shown if line.startswith("start "))
    for target in start.rpartition(": ")[2].split(", "):
        assert run(*asked, "--export", target).returncode == 0
    assert "at the limit" not in run(*asked, "--memory", "1").stdout.splitlines()[2]


def test_what_a_trainer_implies_is_so_in_a_plan_a_diagnosis_and_an_export(run) -> None:
    asked = ("--gpus", "8", "--gpu", "h100", "--gbs", "64", "--framework", "accelerate", "--json")
    plan = json.loads(run("qwen3_8b", *asked).stdout)["plans"][0]
    best = json.loads(run("--model", "qwen3_8b", *asked, command="diagnose").stdout)["predicted"]["best"]
    assert plan["settings"] == best["settings"]
    assert {"compiled=false", "loss=torch", "sharding=fsdp2"} <= set(plan["settings"])
    script = run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--export", "accelerate").stdout  # its backend goes without saying
    assert f"# layout: {' '.join(plan['settings'])}" in script
    assert "supposes compiled ones" not in script
    other = json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--json").stdout)["other_backend"]
    assert "accelerate" not in other["trainers"], "it would run a compiled plan slower than predicted"


def test_a_plan_of_megatron_fsdp_is_one_that_this_trainer_takes(run) -> None:
    asked = ("qwen3_30b_a3b", "--gpus", "8", "--gbs", "64", "--fix", "sharding=fsdp")
    assert all("pp" not in " ".join(p["settings"]) for p in json.loads(run(*asked, "--json").stdout)["plans"])
    assert "data_parallel: megatron_fsdp" in run(*asked, "--export", "playbook").stdout


def test_a_plan_takes_the_framework_that_will_train_it_as_agents_do(run) -> None:
    asked = {"seq_len": 8192, "global_batch_size": 128, "goal": "tokens/s", "allow": frozenset(), "top": 2}
    for framework in ("megatron-lm", "torchtitan"):
        words = ("--gpus", "8", "--seq", "8192", "--gbs", "128", "--top", "2", "--json", "--framework", framework)
        shown = json.loads(run("llama3_8b", *words).stdout)["plans"]
        backend, fix = trained_by(framework, "megatron", ())
        plans = plan_answer("llama3_8b", 8, "h100", backend=backend, fix=fix, **asked).plans
        assert [p["settings"] for p in shown] == [p["settings"] for p in plans]
        assert [p["memory_gib"] for p in shown] == [p["memory_gib"] for p in plans]
        assert all(("loss=native" if framework == "megatron-lm" else "backend=torch") in p["settings"] for p in plans)
    wrong = run("llama3_8b", "--framework", "megatronlm")
    assert (wrong.returncode, "did you mean 'megatron-lm'?" in wrong.stderr) == (ExitCode.USAGE, True)


def test_nothing_fits_is_exit_code_2_and_says_what_would(run) -> None:
    shown = run("qwen3_235b_a22b", "--gpus", "32", "--gbs", "512")
    assert shown.returncode == 2
    assert "nothing fits" in shown.stdout
    assert "--gpus 64" in shown.stdout


def test_runs_of_ones_own_scale_the_figures(run, tmp_path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("model,hardware,gpus,seq_len,mbs,gbs,tp,pp,precision,tokens_per_s_per_gpu\nqwen3_8b,H100,8,4096,1,64,1,1,bf16,4000\n")
    alone, plain, scaled = (
        json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--json", *more).stdout)["plans"][0]
        for more in (["--no-published"], [], ["--anchor", str(table)])
    )
    assert scaled["layout"] == plain["layout"]
    speeds = scaled["tokens_per_s_per_gpu"], plain["tokens_per_s_per_gpu"]
    assert speeds[0]["value"] < speeds[1]["value"]
    assert speeds[0]["high"] / speeds[0]["low"] < speeds[1]["high"] / speeds[1]["low"]

    shown = run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--anchor", str(table)).stdout.splitlines()
    (line,) = (line for line in shown if line.startswith("anchored"))
    assert line == f"anchored 1 run and published runs, x{speeds[0]['value'] / alone['tokens_per_s_per_gpu']['value']:.2f}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "63"], "global batch 1024 is not a multiple of micro batch 1 x dp 63 = 63; set gbs to a multiple of 63"),
        (["--gpus", "64", "--fix", "tp=3"], "32 attention heads do not divide over tp 3; set tp to a divisor of 32"),
        (["--gpus", "64", "--fix", "recompute=full,ep_overlap=true"], "overlap of expert communication excludes recompute full"),
        (["--gpus", "8", "--gbs", "1", "--fix", "pp=8,vpp=1"], "pp 8 needs as many micro-batches, and a step has 1"),
    ],
)
def test_where_no_layout_is_legal_the_rule_is_named_that_most_break(run, words: list[str], says: str) -> None:
    shown = run("qwen3_30b_a3b", *words)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "What most layouts break:\n  - " in shown.stderr
    assert says in shown.stderr
    assert any(says in sentence for sentence in json.loads(run("qwen3_30b_a3b", *words, "--json").stdout)["broken"])


@pytest.mark.parametrize(("seq", "tokens"), [("8K", 8192), ("8,192", 8192), ("8192", 8192)])
def test_a_sequence_is_spelled_as_in_a_table_of_runs(run, seq: str, tokens: int) -> None:
    found = json.loads(run("qwen3_8b", "--gpus", "8", "--seq", seq, "--gpu", "h200", "--top", "1", "--json").stdout)
    assert (found["question"]["seq_len"], found["question"]["hardware"]) == (tokens, "h200")


@pytest.mark.parametrize("target", ["torchtitan", "accelerate", "deepspeed"])
def test_plans_of_the_torch_backend_are_exported_to_trainers_on_it(run, target: str) -> None:
    asked = ["qwen3_8b", "--gpus", "8", "--gbs", "64", "--fix", "tp=1,pp=1,cp=1", "--export", target]
    shown = run(*asked, "--backend", "torch")
    assert shown.returncode == 0
    assert shown.stdout.splitlines()[1].startswith(f"# for {target} ")
    assert run(*asked, "--backend", "megatron").returncode == 2
    job = run(*asked, "--backend", "torch", "--slurm")
    assert (job.returncode, "#SBATCH --gpus-per-node=8" in job.stdout) == ((2, False) if target == "accelerate" else (0, True))


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"torchtitan", "accelerate", "deepspeed"}))
def test_the_winner_is_exported_as_a_script_that_names_its_release_and_what_its_log_is_set_beside(run, target: str) -> None:
    asked = ["qwen3_30b_a3b", "--gpus", "8", "--hardware", "h200", "--gbs", "64", "--fix", "tp=1,cp=1,vpp=1,mbs=1", "--export", target]
    shown = run(*asked)
    assert shown.returncode == 0
    assert re.search(r"global.batch.size.*64", shown.stdout)
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("#!")
    assert lines[1].startswith(f"# for {RELEASES.get(target, 'playbook')}")
    beside = lines[-1].removeprefix("# beside the prediction: ")
    log = (
        "playbook diagnose run --gpu h200"
        if target == "playbook"
        else "playbook diagnose train.log --model qwen3_30b_a3b --gpus 8 --gpu h200"
    )
    assert beside.startswith(log)
    sbatch = run(*asked, "--slurm").stdout
    assert "#SBATCH --nodes=1" in sbatch
    assert "\nsrun torchrun" in sbatch
    assert subprocess.run(["bash", "-n"], input=sbatch + shown.stdout, text=True, check=False).returncode == 0


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge"])
@pytest.mark.parametrize("words", [["gpt_oss_20b", "--gpus", "2", "--layers", "4"], ["llama3_70b", "--gpus", "64"]])
@pytest.mark.sample("words0-megatron-lm")
def test_the_last_line_of_an_export_sets_a_log_beside_the_prediction(run, tmp_path, monkeypatch, target: str, words: list[str]) -> None:
    asked = [*words, "--gbs", "256"]
    loss = ["--fix", "loss=native"] if target == "megatron-lm" else []  # the only one that its runs have
    predicted = json.loads(run(*asked, *loss, "--json").stdout)["plans"][0]
    shown = run(*asked, "--export", target).stdout
    monkeypatch.chdir(tmp_path)
    took = f"elapsed time per iteration (ms): {predicted['seconds'] * 1100:.1f}"
    lines = (f" iteration {i:8}/      20 | {took} | global batch size:   256 | lm loss: 2.0E+00 |\n" for i in range(1, 21))
    (tmp_path / "train.log").write_text("".join(lines))
    command = shlex.split(shown.splitlines()[-1].partition(": ")[2])
    told = json.loads(run(*command[2:], "--json", command=command[1]).stdout)
    assert told["predicted"]["yours"]["tokens_per_s_per_gpu"]["value"] == pytest.approx(predicted["tokens_per_s_per_gpu"]["value"])
    assert told["measured"]["tokens_per_s_per_gpu"] == pytest.approx(predicted["tokens_per_s_per_gpu"]["value"] / 1.1, rel=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        ["qwen3_vl_8b", "--export", "megatron-lm"],
        ["llama3_8b", "--export", "colossal"],
        ["llama3_8b", "--slurm"],
        ["gpt_oss_20b", "--export", "playbook"],
    ],
)
def test_what_cannot_be_exported_ends_with_one_message_and_exit_code_2(capsys, words: list[str]) -> None:
    refused(capsys, "plan", *words, "--gpus", "8", "--gbs", "64")


def test_a_plan_of_unlike_chunks_comes_with_its_layout_string(run) -> None:
    asked = ("llama3_70b", "--gpus", "64", "--gbs", "1024", "--fix", "tp=2,cp=2,pp=8,vpp=8")
    string = "Et|(tt|)*17(t|)*45L"
    assert f"pipeline {string}" in run(*asked).stdout
    assert json.loads(run(*asked, "--json").stdout)["plans"][0]["pipeline_layout"] == string
    assert f"--pipeline-model-parallel-layout '{string}'" in run(*asked, "--export", "megatron-lm").stdout
    checked = run("check", "--model", "llama3_70b", "gpus=64", "tp=2", "cp=2", "pp=8", "vpp=8", "gbs=1024", command="layout")
    assert f"'{string}'" in checked.stdout


@pytest.mark.parametrize(("model", "gpus"), [("qwen3_30b_a3b", 16), ("qwen3_8b", 8)])
def test_the_exported_winner_passes_the_trainers_own_checks(model: str, gpus: int, tmp_path) -> None:
    best = search(Question(MODELS[model], model, cluster("h100"), gpus, 4096, 512), 1).choices[0]
    path = tmp_path / "plan.yaml"
    [text] = TARGETS["playbook"](best.plan, "h100").files.values()
    path.write_text(text)
    report = dry_run(load(path), gpus)
    assert report.layout["microbatches"] == best.plan.microbatches
    assert max(s.peak for s in report.stages) == pytest.approx(best.peak, rel=0.02)


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
    assert run(*words).returncode == 2


def test_the_page_asks_ten_questions_and_has_an_answer_to_each() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[2]
    sections = text.split("\n### ")[1:]
    assert len(sections) == len(DECISIONS) == 10
    for section, (question, command) in zip(sections, DECISIONS, strict=True):
        assert section.startswith(f"{question}\n\n```text\n$ {command}\n")
        assert "playbook layout memory --model" in section


def test_the_pages_answer_is_still_among_the_best(run) -> None:
    """One of ten, and by no more than a tenth: that all are what is answered today is asked in `tests/mcp/test_decisions.py`."""
    question, command = DECISIONS[3]
    found = json.loads(run(*command.split()[2:], "--json").stdout)
    best = found["plans"][0]["tokens_per_s_per_gpu"]["value"]
    shown = PAGE.read_text(encoding="utf-8").partition(f"### {question}\n")[2]
    model, *words = next(line for line in shown.splitlines() if line.startswith("check")).partition("--model ")[2].split()
    again = parse(model, words)
    assert again.broken() == []
    assert step_time(again, cluster(found["question"]["hardware"])).tokens_per_s_per_gpu.value > 0.9 * best


@pytest.mark.full
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
    assert f"({fastest['id']}) {fastest['link']}" in shown

    plain = run(*asked, "--no-published").stdout
    assert not [line for line in plain.splitlines() if line.startswith(("published", "anchored", "ran "))]
    other = [
        line for line in run("llama3_8b", "--gpus", "8", "--hardware", "h200", "--top", "1").stdout.splitlines() if line.startswith("ran ")
    ]
    assert other == ["ran      no published run of llama3_8b on h200 in bf16"]
    cut = run("qwen3_30b_a3b", "--layers", "8", "--gpus", "16", "--hardware", "h100", "--top", "1").stdout
    assert "of qwen3_30b_a3b on h100" in cut, "runs of all 48 layers are none of eight"


def test_an_id_of_a_published_run_resolves(run, capsys) -> None:
    lines = dict(line.split(None, 1) for line in run("run", "r294").stdout.splitlines() if not line.startswith("assumes"))
    assert (lines["model"], lines["tokens_per_s_per_gpu"], lines["gpus"]) == ("Qwen3-30B-A3B", "13011.4", "16")
    assert lines["link"].startswith("https://github.com/")
    found = json.loads(run("run", "r294", "--json").stdout)
    row = next(r for r in check(data_root("tables") / RUNS, leave_out="configuration") if r.run.id == "r294")
    assert found["predicted"] == pytest.approx(row.prediction.tokens_per_s_per_gpu)
    assert found["scaled"] == pytest.approx(row.interval.value, rel=1e-3)
    assert "no published run 'r29'; expected an id" in refused(capsys, "plan", "run", "r29")
    assert "not known" in json.loads(run("run", "r003", "--json").stdout)["why"]


def test_an_export_says_what_it_should_reach_and_why_it_may_differ_from_the_table(run) -> None:
    asked = ["qwen3_8b", "--gpus", "8", "--gbs", "64", "--fix", "tp=1,pp=1,cp=1"]
    own, alike = run(*asked, "--export", "megatron-lm"), run(*asked, "--export", "megatron-bridge")
    assert "searched with loss=native, as megatron-lm trains" in own.stderr
    assert re.match(r"predicted: [\d,]+ tokens/s/GPU, 80 % between [\d,]+ and [\d,]+, \d+ GiB$", alike.stderr)


def test_an_export_has_its_layout_and_what_it_holds_at_its_head(run) -> None:
    shown = run("llama3_8b", "--gpus", "8", "--hardware", "h100", "--seq", "8192", "--gbs", "128", "--export", "megatron-lm")
    layout, held = (next(line for line in shown.stdout.splitlines() if line.startswith(f"# {word}: ")) for word in ("layout", "memory"))
    settings = layout.removeprefix("# layout: ").partition(";")[0].split()
    assert "loss=native" in settings
    assert "plan 1 of a table without that may be another" in layout
    peak = max(s["peak"] for s in json.loads(run("memory", "--model", "llama3_8b", *settings, "--json", command="layout").stdout)["stages"])
    assert f"{peak / 2**30:.1f} of 79.6 GiB" in held


def test_the_other_backend_has_a_line_with_its_best_plan_and_who_runs_it(run) -> None:
    asked = ("llama3_8b", "--gpus", "8", "--hardware", "h100", "--seq", "8192", "--gbs", "128")
    found = json.loads(run(*asked, "--json").stdout)
    best, other = found["plans"][0], found["other_backend"]
    there = json.loads(run(*asked, "--backend", "torch", "--json").stdout)
    assert other["plan"]["settings"] == there["plans"][0]["settings"]
    assert other["plan"]["tokens_per_s_per_gpu"] == there["plans"][0]["tokens_per_s_per_gpu"]
    assert other["faster"] == pytest.approx(there["plans"][0]["tokens_per_s_per_gpu"]["value"] / best["tokens_per_s_per_gpu"]["value"] - 1)
    assert other["trainers"] == ["torchtitan"]
    lines = run(*asked).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("other ")]
    assert "--backend torch" in line
    assert line.endswith("exports to torchtitan"), "this playbook's trainer has no model without query-key norms"
    assert lines[-1].endswith("megatron-lm, megatron-bridge, playbook, torchtitan"), "whoever takes either is named"
    back = there["other_backend"]
    assert (back["backend"], back["plan"]["settings"]) == ("megatron", best["settings"])
    assert "playbook" in json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--json").stdout)["other_backend"]["trainers"]


def test_the_other_backend_is_silent_where_its_settings_mean_nothing_there_and_says_that_nothing_fits(run) -> None:
    asked = ("qwen3_235b_a22b", "--gpus", "32", "--hardware", "h100", "--gbs", "512", "--allow", "offload")
    assert json.loads(run(*asked, "--json").stdout)["other_backend"]["sentence"].endswith("nothing fits")
    kept = json.loads(run("qwen3_8b", "--gpus", "8", "--gbs", "64", "--fix", "precision_aware=true", "--json").stdout)
    assert kept["other_backend"] is None
    assert kept["plans"]


def test_runs_on_other_boards_of_a_gpu_are_shown_and_called_that(run) -> None:
    shown = run("llama3_8b", "--gpus", "8", "--hardware", "h100", "--seq", "8192", "--gbs", "128").stdout
    ran = [line for line in shown.splitlines() if line.startswith("ran ")]
    assert ran
    assert all("on 8 h100_96_500w (other GPU)" in line or "on 128 h100_96_500w (other GPU)" in line for line in ran)
    own = run("qwen3_30b_a3b", "--gpus", "16", "--hardware", "h100", "--gbs", "1024").stdout
    assert "(other GPU)" not in own


def test_a_plan_with_megatron_fsdp_is_warned_of_in_its_own_row(run) -> None:
    asked = ("llama3_8b", "--gpus", "8", "--gbs", "64")
    warned, plain = (run(*asked, *more).stdout.splitlines() for more in (("--fix", "sharding=fsdp"), ()))
    rows = [line for line in warned if re.match(r"\d\*? ", line)]
    assert rows
    assert all("Megatron-FSDP, slower than predicted where measured (M1.s)" in line for line in rows)
    assert not any("Megatron-FSDP" in line for line in plain)
