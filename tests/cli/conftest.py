from __future__ import annotations

import pytest


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory without earlier results, of a process that is no rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path
