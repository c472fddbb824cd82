"""What people type and what they get: spellings that are understood, and messages that name what to do."""

from __future__ import annotations

import html

import pytest
from in_process import printed, refused, run

from playbook.cards.load import load_all
from playbook.cards.model import counted
from playbook_app.cli.commands import calibrate, schemas
from playbook_app.site import build
from playbook_bench.machine import requirements
from playbook_bench.run.targets import tasks_of

PLAN = ("plan", "llama3_8b", "--gbs", "64", "--top", "1")
DIAGNOSE = ("diagnose", "--model", "llama3_8b", "--gbs", "64")


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(
    "words", [("--hardware", "8xH200"), ("--gpus", "8xH200"), ("--gpu", "h200x8"), ("--gpus", "8", "--hardware", "8 x NVIDIA H200")]
)
def test_a_number_before_the_gpu_counts(capsys, words):
    assert printed(capsys, *PLAN, *words).startswith("llama3_8b on 8 h200, ")


@pytest.mark.parametrize(
    "words", [("--hardware", "64xH100", "--gpus", "8"), ("--gpus", "8xH100", "--hardware", "h200"), ("--gpus", "many")]
)
@pytest.mark.parametrize("command", [PLAN, DIAGNOSE])
def test_a_contradiction_or_no_number_is_refused_in_plain_words(capsys, command, words):
    code, _, err = run(capsys, *command, *words)
    assert code == 2
    assert "expected" in err
    assert "valid integer" not in err


def test_percent_thousands_and_gpus_in_one_word_are_figures(capsys):
    plain = run(capsys, *DIAGNOSE, "--gpus", "8", "--gpu", "h100", "--mfu", "40")[1]
    assert run(capsys, *DIAGNOSE, "--gpus", "8xH100", "--mfu", "40%")[1] == plain
    assert "you        8,000 tokens/s/GPU" in printed(capsys, *DIAGNOSE, "--gpus", "8xH100", "--tokens-per-s", "8,000")


@pytest.mark.parametrize("option", ["--mfu", "--tokens-per-s"])
def test_no_figure_is_refused_with_an_example(capsys, option):
    code, _, err = run(capsys, *DIAGNOSE, "--gpus", "8xH100", option, "fast")
    assert code == 2
    assert "such as" in err
    assert "valid float" not in err


def test_a_million_tokens_are_a_length(capsys):
    out = printed(capsys, "plan", "llama3_8b", "--gpus", "64", "--seq", "1M", "--gbs", "8", "--top", "1", "--fix", "cp=64")
    assert "1048576 tokens" in out


def test_a_claim_is_named_without_its_card():
    assert [t.claim.id for t in tasks_of("W9")] == [t.claim.id for t in tasks_of("moe-dispatcher-choice/W9")]


def test_calibrate_without_torch_says_so(capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "find_spec", lambda name: None)
    assert "package torch is not installed" in refused(capsys, "calibrate", "out.json")


def test_a_demo_without_torch_says_so_and_does_not_pass(capsys, monkeypatch):
    monkeypatch.setattr(requirements, "installed", lambda name: name != "torch")
    code, out, err = run(capsys, "demo")
    assert code == 4
    assert "package torch is not installed" in err
    assert "not applicable" not in out


def test_schemas_of_a_wheel_are_written_here_and_not_into_its_package(capsys, monkeypatch, elsewhere):
    packed = elsewhere / "site-packages" / "schemas"
    packed.mkdir(parents=True)
    monkeypatch.setattr(schemas, "data_root", lambda kind: packed)
    monkeypatch.setattr(schemas, "in_package", lambda path: path == packed)
    printed(capsys, "schemas", "export")
    assert not list(packed.iterdir())
    assert (elsewhere / "schemas" / "card.schema.json").is_file()


def test_a_report_of_nsys_is_read_where_nsys_is_and_the_help_says_so(capsys, monkeypatch, elsewhere):
    monkeypatch.setenv("PATH", str(elsewhere))
    words = (*DIAGNOSE, "--gpus", "8xH100", "--mfu", "40", "--trace", "step.nsys-rep")
    assert "there is no such file" in run(capsys, *words)[2]
    (elsewhere / "step.nsys-rep").write_text("a report")
    assert "nsys export --type sqlite step.nsys-rep" in run(capsys, *words)[2]
    assert "where nsys is installed" in " ".join(run(capsys, "diagnose", "--help")[1].split())
    assert "--export=sqlite" in run(capsys, *words[:-2])[1]


@pytest.mark.full
def test_site_build_writes_pages_and_all_count_the_same_claims(capsys, elsewhere, monkeypatch):
    made, generate, pages = [], build.generate, elsewhere / "site"

    def kept(*words, **more):
        made.append(generate(*words, **more))
        return made[0]

    monkeypatch.setattr(build, "generate", kept)
    code, out, _ = run(capsys, "site", "build", "--out", str(pages))
    assert (code, "evidence:" in out) == (0, True)
    assert "playbook confirm" in (pages / "_generated" / "commands.md").read_text()
    assert "state_bytes_per_rank" in html.unescape((pages / "_generated" / "metrics.md").read_text())
    assert (pages / "cards" / "moe-dispatcher-choice.md").is_file()
    said = counted(load_all())
    number = said.split()[0]
    assert f"Of {number} claims, " in made[0].inserts["coverage"]
    assert said in (pages / "_generated" / "claims.md").read_text()
    assert run(capsys, "cards", "list", "--claims")[1].endswith(f"\n{said}\n")
    assert f"of {number} claims need" in run(capsys, "demo", "long-context-cp-sizing/L2")[1]
