"""The command line, as a user meets it: real processes where it matters, in-process where it is quicker."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer
from in_process import document, printed, refused, run
from stored import shipped

from playbook import paths
from playbook.cards.model import Quantity
from playbook.paths import DEFAULT_RESULTS, data_root, repo_root, sources
from playbook.records.read import read, verdicts
from playbook_app.cli import app, options
from playbook_app.cli.commands.evidence import drawn
from playbook_app.cli.commands.site import walk
from playbook_bench.run import store

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(repo_root()))}


READERS = ("cards show moe-dispatcher-choice", "cards list --claims", "bench list", "evidence list", "evidence show W9")
"""Commands that only read, for which a person waits."""


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        (("--help",), "pydantic playbook_bench playbook_trainer"),
        pytest.param(READERS, "playbook_bench.launch.local playbook_bench.run.confirm", marks=pytest.mark.full, id="readers"),
    ],
)
def test_reading_imports_nothing_heavy(commands, heavy):
    """What launches is of no use to a reader."""
    script = "import sys; from playbook_app.cli.app import app, run_command\nfor line in sys.argv[1:]: assert run_command(app, line.split()) == 0"
    command = [sys.executable, "-c", f"{script}\nprint('', *sys.modules, sep='\\nmodule ')", *commands]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    imported = {line.removeprefix("module ") for line in done.stdout.splitlines() if line.startswith("module ")}
    assert "playbook" in imported
    assert not imported & {*heavy.split(), "torch", "pandas", "scipy", "numpy", "jsonschema"}


def test_every_command_says_what_it_is_for_and_documents_its_options():
    found = list(walk(typer.main.get_command(app.app), "playbook"))
    assert {command.name.split()[1] for command in found} == set(app.COMMANDS)
    for command in found:
        assert command.summary.endswith("."), command.name
        assert all(text for _, text in command.options), command.name


@pytest.mark.parametrize(
    "words", [["frobnicate"], ["cards"], ["cards", "show"], ["confirm", "--profil", "cpu"], ["gate", "moe-dispatch-bytes"]]
)
def test_wrong_usage_exits_with_2(capsys, words):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert "Usage:" in out + err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["confirm"], "name cards or claims, or say --all"),
        (["confirm", "--all", "vlm-real-data"], "not both"),
        (["confirm", "moe-dispatcher-choise"], "did you mean 'moe-dispatcher-choice'"),
        (["confirm", "moe-dispatcher-choice/W99"], "has no claim 'W99'"),
        (["confirm", "no claim"], "write CARD, CARD/CLAIM or CLAIM, for example moe-dispatcher-choice/W9"),
        (["confirm", "moe-dispatcher-choice", "--budget", "10"], "expected a number and s, m or h, such as 10m"),
        (["confirm", "moe-dispatcher-choice", "--budget", "-1m"], "expected a number and s, m or h"),
        (["confirm", "moe-dispatcher-choice", "--fork", "--launcher", "slurm"], "--fork has no meaning with --launcher slurm"),
        (["bench", "run", "no-such-case"], "no such case"),
        (["bench", "run", "W9"], "it is a claim: playbook confirm moe-dispatcher-choice/W9"),
        (["cards", "show", "fsdp-vs-3d"], "card 'fsdp-vs-3d' does not exist"),
        (["cards", "show", "recompute/W9"], "card 'recompute' has no claim 'W9'; expected one of: L3, "),
        (["cards", "show", "vlm-real-data/"], "card 'vlm-real-data' has no claim ''"),
        (["cards", "show", "fsdp-vs-3d/V1"], "card 'fsdp-vs-3d' does not exist"),
        (["config", "export", "qwen3_8b"], "`playbook plan qwen3_8b --gpus N --export megatron-lm` prints the fastest layout"),
        (["config", "export", "Qwen/Qwen3-8B", "--to", "torchtitan"], "`playbook config list` names published ones"),
        (["config", "export", "deepseek_v3_128k_h100"], "recipes/deepseek_v3_128k_h100.yaml"),
        (["config", "export", "nowhere.yaml"], "nowhere.yaml:1:1: cannot be read"),
        (["bench", "replay", "nowhere.json"], "cannot be read"),
        (["evidence", "show", "01M7YJDRQX4TZNCJN4X580XXXX"], "`playbook evidence list --json` has their paths"),
        (["evidence", "show", "Z999"], "there is no claim Z999"),
        (["evidence", "show", "W10"], "test it with: playbook confirm moe-dispatcher-choice/W10"),
        (
            ["train", "--dry-run", str(repo_root() / "trainer/configs/qwen3_30b_a3b_24l.yaml")],
            "--gpus N says on how many, without it one is taken",
        ),
        (["evidence", "show", "nowhere.json"], "cannot be read"),
        (["evidence", "list", "--results", "nowhere"], "--results is nowhere, which is no folder"),
        (["train", "nowhere.yaml"], "cannot be read"),
        (["train", str(repo_root() / "trainer/configs/qwen3_moe_tiny.yaml"), "parallel.epp=2"], "unknown key 'epp'"),
        (["train", str(repo_root() / "trainer/configs/qwen3_moe_tiny.yaml"), "parallel.tp=3"], "do not divide"),
        (["gate", "--baseline", "no-such-commit", "moe-dispatch-bytes"], "is no commit"),
        (["gate", "--baseline", "HEAD", "moe-dispatch-bytes", "--budget", f"{'9' * 400}s"], "expected more than 0, and an end"),
        (["bisect", "HEAD~1", "HEAD", "--case", "moe-dispatch-bytes", "--limit", "0%"], "expected more than 0 and less than"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(capsys, elsewhere, words, says):
    assert says in refused(capsys, *words, listed="parallel.tp=3" in words)


OWN_CARD = """\
id: ours
title: A card of our own
summary: One claim about arithmetic, and one that launches the trainer.
symptoms: [our runs are slow]
phase: profile
wall: communication
claims:
  - id: Z1
    statement: Data parallelism is left at PP 8 on 256 GPUs where CP follows the sequence.
    mechanism: Ranks are counted, nothing is measured.
    kind: arithmetic
    metric: holds
    expect: {op: holds}
    scope: {}
    label: benchmark-only
    sources: [{title: Our notes, origin: ours, section: Memory, date: 2026-11}]
    case: cp-dp-floor
  - id: Z2
    statement: The all-gather dispatcher gives at most 5 % more useful tokens per second and GPU than all-to-all.
    mechanism: Every rank receives every token, whether it needs it or not.
    kind: pair
    comparison: {baseline: {moe.dispatcher: alltoall}, candidate: {moe.dispatcher: allgather}}
    metric: useful_tokens_per_s_per_gpu
    expect: {op: "<=", margin: {value: 5, unit: percent}}
    scope: {}
    label: training-equivalent
    sources: [{title: Our notes, origin: ours, section: Dispatch, date: 2026-11}]
    case: our-pair
"""


def test_a_configuration_that_cannot_be_read_is_told_before_anything_has_run(capsys, elsewhere):
    """Of a card in a repository of its own, with the case of its second claim beside it."""
    (elsewhere / "cards").mkdir()
    (elsewhere / "bench" / "cases").mkdir(parents=True)
    case = (data_root("cases") / "moe-dispatcher-allgather-vs-alltoall.yaml").read_text(encoding="utf-8")
    case = case.replace("id: moe-dispatcher-allgather-vs-alltoall", "id: our-pair")
    case = case.replace("trainer/configs/qwen3_30b_a3b_24l.yaml", "configs/ours.yaml")
    (elsewhere / "bench" / "cases" / "our-pair.yaml").write_text(case, encoding="utf-8")
    (elsewhere / "cards" / "ours.yaml").write_text(OWN_CARD, encoding="utf-8")
    code, out, err = run(capsys, "confirm", "cards/ours.yaml", "--profile", "cpu", "--json")
    assert (code, out) == (2, "")
    assert "trainer 'configs/ours.yaml' is not a path below trainer/configs/" in err
    assert not list(elsewhere.rglob("*.json")), "a record of the first claim"


def test_cards_check_reports_and_exits_with_2(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("id: bad\nid: bad\n", encoding="utf-8")
    code, out, err = run(capsys, "cards", "check", str(tmp_path))
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'bad.yaml'}:2:1: duplicate key 'id'" in err
    code, out, _ = run(capsys, "cards", "check", "--json", str(tmp_path))
    assert code == 2
    assert json.loads(out)["findings"][0]["line"] == 2
    assert out.count("\n") == 1


def test_claims_are_listed_with_their_status(capsys, elsewhere):
    rows = {r["id"]: r for r in document(capsys, "cards", "list", "--claims")}
    assert {row["mechanism_of"] for row in rows.values()} - {None} <= set(rows)
    assert all(r["status"] for r in rows.values())
    assert {r["status"] for r in rows.values()} > {"untested", "confirmed"}
    assert len({tuple(r) for r in rows.values()}) == 1  # of an untested claim, too
    assert {r["machine"] for r in rows.values() if r["status"] == "untested"} == {None}
    assert "moe-dispatcher-choice" in run(capsys, "cards", "list")[1]


def test_a_card_is_shown_whole(capsys, elsewhere):
    out = printed(capsys, "cards", "show", "moe-dispatcher-choice")
    for part in ("W9.m", "why:", "scope:", "source:", "decide", "pitfalls", "fix:"):
        assert part in out
    out = printed(capsys, "cards", "show", "recompute")
    for part in (
        "; avoid train.recompute_modules ['core_attn']  (because L3, L3.b, L4, L4.c)",
        "\ninteractions\n  Modules nested in one another",
    ):
        assert part in out
    assert document(capsys, "cards", "show", "moe-dispatcher-choice")["status"]["W9"]["status"]


@pytest.mark.parametrize("named", ["moe-dispatcher-choice/W9", "W9", "W9.m"])
@pytest.mark.sample("W9")
def test_a_claim_is_shown_as_its_card_shows_it(capsys, elsewhere, named):
    _, whole, _ = run(capsys, "cards", "show", "moe-dispatcher-choice")
    code, out, _ = run(capsys, "cards", "show", named)
    title, _, *lines = out.splitlines()
    assert (code, title) == (0, whole.splitlines()[0])
    assert lines[0].startswith("W9  ")
    assert any(line.startswith("  W9.m  ") for line in lines)
    assert "\n".join(lines[:-2]) in whole
    assert lines[-1].endswith("playbook confirm moe-dispatcher-choice/W9")
    found = document(capsys, "cards", "show", named)
    assert (found["card"], found["id"], list(found["status"])) == ("moe-dispatcher-choice", "W9", ["W9", "W9.m"])
    assert found["statement"] in whole


def test_confirm_gives_one_json_line_and_the_status_reaches_the_card(capsys, elsewhere):
    code, out, err = run(capsys, "confirm", "long-context-cp-sizing/L2", "long-context-cp-sizing/L9", "--profile", "cpu", "--json")
    assert code == 0
    assert out.count("\n") == 1
    told = json.loads(out)
    assert [c["status"] for c in told["claims"]] == ["confirmed", "confirmed"]
    assert "L9" in err
    path = told["claims"][0]["evidence"]
    assert "same verdict" in printed(capsys, "bench", "replay", path)
    row = next(r for r in document(capsys, "cards", "list", "--claims") if r["id"] == "L2")
    assert row["status"] == "confirmed"
    assert {"L2", "L9"} <= {r["claim"] for r in document(capsys, "evidence", "list")}
    _, out, _ = run(capsys, "evidence", "show", path)
    assert "confirmed" in out
    assert "repeat" in out


def test_an_altered_record_does_not_replay(capsys, elsewhere):
    path = elsewhere / document(capsys, "confirm", "long-context-cp-sizing/L2", "--profile", "cpu")["claims"][0]["evidence"]
    path.write_text(path.read_text(encoding="utf-8").replace("256", "255", 1), encoding="utf-8")
    code, out, err = run(capsys, "bench", "replay", str(path), "--json")
    assert code == 5
    assert json.loads(out)[0]["same"] is False
    assert "sha256" in err
    _, out, err = run(capsys, "evidence", "show", str(path))
    assert "counts for nothing" in err
    assert [r["status"] for r in document(capsys, "evidence", "list") if r["path"].endswith(path.name)] == ["altered"]


def test_a_record_that_stopped_between_looks_shows_its_interval_and_says_so(capsys, elsewhere):
    stopped = shipped(lambda e: (found := e.derived.comparison) and found.design != "deterministic" and found.look is None and found.low)
    assert "] between looks" in printed(capsys, "evidence", "show", str(stopped))


def test_a_record_cannot_steer_the_terminal(capsys, elsewhere):
    path = elsewhere / document(capsys, "confirm", "long-context-cp-sizing/L2", "--profile", "cpu")["claims"][0]["evidence"]
    path.write_text(path.read_text(encoding="utf-8").replace("dp halves", r"\u001b[2J\u0007dp halves"), encoding="utf-8")
    _, out, err = run(capsys, "evidence", "show", str(path))
    assert "\x1b" not in out + err
    assert r"\x1b[2J\x07dp halves" in out


def test_what_does_not_apply_here_exits_with_4(capsys, elsewhere):
    code, out, _ = run(capsys, "confirm", "moe-dispatcher-choice/V5", "--profile", "cpu", "--json")
    claim = json.loads(out)["claims"][0]
    assert code == 4
    assert claim["status"] == "not_applicable"
    assert "GB200" in claim["sentence"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (None, None)])
def test_budgets(text, seconds):
    assert options.to_seconds(text) == seconds


def test_every_command_is_in_the_readme():
    readme = (repo_root() / "README.md").read_text(encoding="utf-8")
    for command in walk(typer.main.get_command(app.app), "playbook"):
        assert command.name.split()[-1] in readme, command.name


def test_an_installed_copy_writes_no_pages_among_the_packages(tmp_path, monkeypatch, capsys):
    packages = tmp_path / "site-packages"
    (packages / "playbook" / "_data" / "cards").mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", packages / "playbook")
    said = refused(capsys, "site", "build")
    assert "installed copy" in said
    assert "--out" in said
    assert [p.name for p in packages.iterdir()] == ["playbook"]


@pytest.mark.full
def test_what_another_machine_found_is_not_hidden_by_the_last_measured_one(capsys, elsewhere, monkeypatch):
    """As on the site and over MCP: a claim that is refuted on a GPU does not read as confirmed because a CPU ran it too."""
    from playbook_bench.run import store
    from playbook_trainer import revision

    known = store.load(next(r.path for r in verdicts(read([data_root("results")]), "V8.m") if r.machine == "h200x1"))
    refuted = known.derived.model_copy(update={"verdict": known.derived.verdict.model_copy(update={"status": "refuted"})})
    plan = known.measured.plan and known.measured.plan.model_copy(update={"rules": 2})  # a new record may not claim the first rules
    measured = known.measured.model_copy(update={"plan": plan})
    store.write(store.evidence_of(measured, refuted, known.command, known.seconds), DEFAULT_RESULTS)
    monkeypatch.setattr(revision, "numbers", lambda: {"torch": 99})
    found = {v["machine"]: v for v in document(capsys, "cards", "show", "vlm-tuning-knobs")["status"]["V8.m"]["verdicts"]}
    assert found["h200x1"]["status"] == "refuted"
    (cpu,) = (name for name in found if name.startswith("cpu"))
    assert found[cpu]["status"] == "confirmed"
    assert all(v["stale"] for v in found.values())
    both = ("refuted, stale, one H200, torch", f"confirmed, stale, {cpu.replace('cpu', 'CPU')}, torch")
    (row,) = (line for line in run(capsys, "cards", "list", "--claims")[1].splitlines() if line.startswith("V8.m "))
    assert all(words in row for words in both)
    _, text, _ = run(capsys, "cards", "show", "vlm-tuning-knobs")
    (row,) = (line for line in text.splitlines() if line.startswith("  V8.m "))
    assert all(words in row for words in both)
    assert all(f"[on {machine}, {v['evidence']}]" in text for machine, v in found.items())


def test_the_help_has_every_command_in_a_group_and_the_version_as_an_option(capsys):
    _, out, _ = run(capsys, "--help")
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2:3].isalpha()}
    assert set(app.COMMANDS) <= listed
    assert [line for line in out.splitlines() if line.endswith(":") and " " not in line][-6:] == [
        "Find:",
        "Plan:",
        "Measure:",
        "Guard:",
        "More:",
        "Examples:",
    ]
    assert run(capsys, "--version")[:2] == run(capsys, "version")[:2]


def test_the_shell_completes_commands():
    asked = {"_PLAYBOOK_COMPLETE": "complete_bash", "COMP_WORDS": "playbook evidence sh", "COMP_CWORD": "2"}
    command = [sys.executable, "-c", "import sys; from playbook_app.cli.app import main; sys.argv[0] = 'playbook'; main()"]
    done = subprocess.run(command, env={**ENV, **asked}, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["show"], done.stderr


def test_evidence_is_shown_by_claim_with_its_interval(capsys, elsewhere):
    by_claim = printed(capsys, "evidence", "show", "moe-dispatcher-choice/W9")
    assert by_claim.startswith(printed(capsys, "evidence", "show", by_claim.split()[0]))
    (line,) = (line for line in by_claim.splitlines() if "M] +5 %" in line)
    assert line.index("=") < line.index("o") < line.rindex("=") < line.index("|") < line.index("M]")


@pytest.mark.parametrize(("low", "effect", "high"), [(0.02, 0.03, 0.04), (-0.01, 0.0, 0.01), (-0.9, 0.5, 20.0), (0.1, 0.1, 0.1)])
def test_an_interval_is_drawn_within_its_line(low, effect, high):
    known = store.load(shipped(lambda e: e.derived.comparison and e.derived.comparison.design != "deterministic"))
    found = known.derived.comparison.model_copy(update={"low": low, "effect": effect, "high": high})
    line, key = drawn(found, Quantity(value=5, unit="percent"))
    inside = line.split("[")[1].split("]")[0]
    assert (len(inside), inside.count("|") + inside.count("M") + inside.count("o") <= 3, "M margin +5 %" in key) == (49, True, True)
    assert drawn(found.model_copy(update={"low": None}), None) == []


def test_records_are_listed_newest_first(capsys, elsewhere):
    created = [r["created"] for r in document(capsys, "evidence", "list")]
    assert created == sorted(created, reverse=True)
