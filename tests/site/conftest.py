from __future__ import annotations

from pathlib import Path

import pytest
from site_tree import make_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path)
