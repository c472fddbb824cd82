"""What tests of real runs share."""

import pytest
from forking import Forks


@pytest.fixture
def forks(tmp_path_factory: pytest.TempPathFactory) -> Forks:
    """Runs of the trainer as forks of one process, and what those of one test print."""
    return Forks(tmp_path_factory.mktemp("forks") / "log")
