"""The configuration that a launch writes for its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from playbook.paths import data_root
from playbook_bench.launch.local import Spec, write_config
from playbook_trainer.config.tree import load


@pytest.mark.parametrize(("given", "written"), [("{run}/checkpoints", "{folder}/checkpoints"), ("elsewhere", "elsewhere"), (None, None)])
def test_each_launch_may_save_into_its_own_folder(given: str | None, written: str | None, tmp_path: Path) -> None:
    """Two launches of a series must not find each other's checkpoints; what is below the folder goes with it."""
    config = load(data_root("configs") / "qwen3_tiny.yaml", {"checkpoint.dir": given} if given else {})
    found = json.loads(write_config(Spec(config, 1, tmp_path)).read_text(encoding="utf-8"))
    assert found["checkpoint"]["dir"] == (written and written.replace("{folder}", str(tmp_path)))
    assert config.checkpoint.dir == given, "records hold what the case says"
