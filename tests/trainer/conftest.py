"""What tests of real runs share."""

import pytest
from forking import Forks


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Forks:
    """Runs of the trainer as forks of one process, for a module."""
    return Forks(tmp_path_factory.mktemp("forks") / "log")
