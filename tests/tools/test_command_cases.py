"""The cases of other trainers' commands that contributors run on a GPU: they are sound, and one runs here in a small size."""

import sys
from pathlib import Path

import pytest

from playbook.paths import repo_root
from playbook.records.case import load_case
from playbook_bench.run import prove
from playbook_bench.run.variants import resolve_all

FILES = sorted((repo_root() / "tools" / "cases").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_case_is_sound_and_names_scripts_that_are_there(path):
    case = load_case(path)
    for variant in resolve_all(case, "h200x1").values():
        assert not [word for word in variant.words if "{" in word and word != "{run}/trace.json"]
        scripts = [word for word in variant.words if word.endswith((".py", ".yaml"))]
        assert scripts
        assert all((repo_root() / word).is_file() for word in scripts)


@pytest.mark.full
def test_transformers_experts_run_in_both_ways_and_prove_it(tmp_path, monkeypatch):
    monkeypatch.chdir(repo_root())
    text = (repo_root() / "tools" / "cases" / "transformers-grouped-mm.yaml").read_text()
    path = tmp_path / "transformers-grouped-mm.yaml"
    path.write_text(text.replace("[python,", f"[{sys.executable},"))
    assert [(proof.variant, proof.ok) for proof in prove.prove([str(path)], profile="cpu")] == [("baseline", True), ("candidate", True)]


EXAMPLES = Path(__file__).parents[1] / "support" / "examples"


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_hugging_face.py", "train_lightning.py"])
def test_a_real_trainer_is_launched_and_its_log_is_read(tmp_path, script):
    file = {"train_hugging_face.py": "{run}/out/trainer_state.json", "train_lightning.py": "{run}/out/metrics.csv"}[script]
    change = {"train_hugging_face.py": "[--collate-ms, '40']", "train_lightning.py": "[--work, '50']"}[script]
    path = tmp_path / "theirs.yaml"
    path.write_text(
        f"id: theirs\nkind: command\nsummary: A planted slow setting.\nbaseline: {{}}\ncandidate: {{arguments: {change}}}\n"
        f"command: [{sys.executable}, {EXAMPLES / script}, --output, '{{run}}/out', --steps, '12']\n"
        f"steps: {{file: '{file}'}}\nmetric: step_seconds\nprofiles: {{cpu: {{}}}}\n"
    )
    assert [proof.outcome for proof in prove.prove([str(path)], profile="cpu")] == ["ok", "ok"]
