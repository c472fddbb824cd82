"""Fine-tuning a mixture of experts in transformers, and GRPO's update in TRL: real runs of the scripts that cases launch, in a tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest
import torch

from playbook.paths import repo_root
from playbook.records.case import list_cases, load_case
from playbook_bench.run import aa

pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
from playbook_trainer.huggingface import fine_tune

TINY = ["--layers", "2", "--hidden", "64", "--num-experts", "8", "--vocab", "320", "--seq-len", "64", "--steps", "3"]
CASES = [name for name in list_cases() if name.startswith("transformers-")]


def steps(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, float]]:
    fine_tune.main([*TINY, *words])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.full
def test_packed_rows_train_on_the_same_samples_with_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    ways = (["padded"], ["packed"], ["padded", "--pad-to", "48"])
    padded, *others = (steps(capsys, "--samples", *words, "--mean", "12", "--rows", "2") for words in ways)
    for other in others:
        assert [s["tokens"] for s in padded] == [s["tokens"] for s in other]
        assert [s["loss"] for s in padded] == pytest.approx([s["loss"] for s in other], rel=1e-4)
    full = steps(capsys)
    assert {s["tokens"] for s in full} == {64}


@pytest.mark.full
def test_ways_to_compute_the_same_have_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    plain = [s["loss"] for s in steps(capsys)]
    for words in (["--experts", "eager"], ["--experts", "batched_mm"], ["--checkpointing"], ["--master"]):
        assert [s["loss"] for s in steps(capsys, *words)] == pytest.approx(plain, rel=1e-4), words


def test_bytes_counted_over_shapes_are_those_of_a_real_step(capsys: pytest.CaptureFixture[str]) -> None:
    told = fine_tune.parse([*TINY, "--weights", "bf16"])
    (counted,) = {s["peak_memory_bytes"] for s in steps(capsys, "--count")[1:]}
    generator = torch.Generator().manual_seed(0)
    with fine_tune.LiveBytes() as live:
        model = fine_tune.build(told, torch.device("cpu"))
        update = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step
        for _ in range(2):
            live.most = live.now
            fine_tune.gradients(model, fine_tune.micro_batches(told, generator), autocast=False)
            update()
            model.zero_grad()
    assert counted == pytest.approx(live.most, rel=0.02)


TRL = repo_root() / ".venv" / "targets" / "trl"
in_trl = pytest.mark.skipif(not TRL.is_dir(), reason="TRL is not unpacked here: make targets")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python whose runs of both scripts are forks of one process: what they import takes ten seconds."""
    script = Path(fine_tune.__file__).with_name("grpo_update.py" if TRL.is_dir() else "fine_tune.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TRL), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.syspath_prepend(str(TRL))
        with preloaded.serving(script) as place:
            yield str(preloaded.python(tmp_path_factory.mktemp("bin"), place))


@pytest.mark.full
@pytest.mark.parametrize("name", [*CASES, pytest.param("trl-grpo-update", marks=in_trl)])
def test_each_cases_variants_run_here_and_prove_their_paths(name: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "peft" in load_case(name).requires:
        pytest.importorskip("peft", reason="peft is not installed")
    monkeypatch.setattr(sys, "executable", python)
    assert [(proof.variant, proof.ok) for proof in aa.prove([name], profile="cpu")] == [("baseline", True), ("candidate", True)]


@in_trl
@pytest.mark.full
def test_recorded_rollouts_are_trained_on_and_a_short_group_is_refused(tmp_path: Path, python: str) -> None:
    rows = [{"prompt": [1, 2], "completions": [[3] * n for n in (4, 5, 6, 7)], "rewards": [0.0, 1.0, 0.0, 1.0]} for _ in range(6)]
    file = tmp_path / "rollouts.jsonl"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        size = ["--layers", "2", "--hidden", "64", "--vocab", "320", "--prompts", "2", "--steps", "3", "--longest", "16"]
        script = [python, "-m", "playbook_trainer.huggingface.grpo_update", *size, "--rollouts", str(file), *words]
        return subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)

    both = [
        [json.loads(line) for line in run(*words).stdout.splitlines() if line.startswith('{"step"')]
        for words in ((), ("--no-checkpointing",))
    ]
    assert [[s["tokens"] for s in steps] for steps in both] == [[2 * (4 * 2 + 22)] * 3] * 2
    assert [s["grad_norm"] for s in both[0]] == pytest.approx([s["grad_norm"] for s in both[1]], rel=1e-4)
    rows[2]["rewards"] = [1.0]
    done = run()
    assert done.returncode != 0
    assert "rollouts.jsonl:3: expected 4 completions and as many rewards" in done.stderr
