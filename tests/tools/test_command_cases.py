"""The cases of other trainers' commands that contributors run on a GPU: they are sound, and one runs here in a small size."""

import subprocess
import sys

import pytest
from ranks import SUPPORT, environment

from playbook.paths import repo_root
from playbook.records.case import load_case
from playbook_bench import logs
from playbook_bench.machine import requirements
from playbook_bench.variants import program
from playbook_bench.variants.resolve import resolve_all

ALL = sorted((repo_root() / "tools" / "cases").glob("*.yaml"))
FILES = [p for p in ALL if "kind: command" in p.read_text()]


@pytest.mark.parametrize("path", sorted({*ALL} - {*FILES}), ids=lambda p: p.stem)
def test_a_case_of_our_trainer_runs_on_every_machine_that_it_names(path):
    case = load_case(path)
    for profile in sorted({*case.profiles} - {"cpu"}):
        assert set(resolve_all(case, profile)) == {"baseline", "candidate"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_case_is_sound_and_names_scripts_that_are_there(path):
    case = load_case(path)
    for variant in resolve_all(case, "h200x1").values():
        assert not [word for word in variant.words if "{" in word and word != "{run}/trace.json"]
        scripts = [word for word in variant.words if word.endswith((".py", ".yaml"))]
        assert scripts
        assert all((repo_root() / word).is_file() for word in scripts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_case_names_the_packages_without_which_it_cannot_run(path, monkeypatch):
    monkeypatch.setattr(requirements, "installed", lambda package: False)
    case = load_case(path)
    assert len(requirements.unmet_requirements(case.requires, trains=False)) == len(case.requires) >= 1


TINY = [
    *("model=qwen3_moe_tiny", "data.seq_len=64", "train.dtype=fp32", "moe.router_dtype=bf16", "optimizer.moments_dtype=fp32"),
    *("megatron.precision_aware_optimizer=false", "megatron.grad_reduce_dtype=fp32"),
]


@pytest.mark.full
def test_megatron_core_by_itself_logs_what_its_case_reads_and_leaves_a_trace(tmp_path):
    pytest.importorskip("megatron.core")
    case = load_case(repo_root() / "tools" / "cases" / "bare-megatron-cutlass.yaml")
    run = resolve_all(case, "h200x1")["baseline"]
    own = [word for word in run.words[2:] if not word.startswith(("model.num_layers=", "model.num_experts="))]
    trace = tmp_path / "trace.json"
    script = str(SUPPORT / "megatron" / "bare_steps.py")
    done = subprocess.run(
        [sys.executable, script, *own, *TINY, "--trace", str(trace)],
        cwd=repo_root(),
        env={**environment(), **run.environment},
        capture_output=True,
        text=True,
        timeout=2000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = tmp_path / "log"
    printed.write_text(done.stdout)
    found = logs.read(printed, case.steps.log, steps=case.steps.count)
    assert [step.tokens for step in found.steps] == [4 * 64] * 14
    assert "loss" not in found.unknown
    assert program.trace_counts(trace)["ranges"] == {"step": 1}
