"""One Slurm for all tests of this folder. Where its programs are missing the tests fail: `make test-slurm` is there to run them."""

import shutil

import localhost
import pytest


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Slurm with two virtual nodes; what a command needs in its environment."""
    missing = localhost.missing()
    if missing:
        pytest.fail(f"{', '.join(missing)} not found; install Slurm and munge, on Debian: apt-get install slurm-wlm munge", pytrace=False)
    folder = tmp_path_factory.mktemp("slurm")
    with localhost.slurm(folder) as environment:
        yield environment
    shutil.rmtree(folder / "spool", ignore_errors=True)
