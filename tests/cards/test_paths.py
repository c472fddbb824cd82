"""What pages show as a path is found in any folder; a file that is there goes before a shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest

from playbook.errors import FileError
from playbook.paths import data_root, shipped
from playbook_trainer.config.tree import load

TINY = Path("trainer/configs/qwen3_moe_tiny.yaml")


def test_a_configuration_that_pages_name_runs_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(TINY) == load(data_root("configs") / TINY.name)


def test_a_file_that_is_here_goes_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TINY.parent.mkdir(parents=True)
    TINY.write_text((data_root("configs") / TINY.name).read_text() + "\nseed: 4711\n")
    assert load(TINY).seed == 4711


@pytest.mark.parametrize(
    "name",
    [
        "trainer/configs/nothing.yaml",
        "trainer/configs/../../pyproject.toml",
        "trainer/configs",
        f"trainer/configs/{'a' * 5000}",
        "elsewhere/qwen3_moe_tiny.yaml",
    ],
)
def test_no_other_file_is_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped("configs", Path(name)) is None
    with pytest.raises(FileError, match="cannot be read"):
        load(Path(name))
