"""The library that the server answers from."""

import pytest

from playbook_app.mcp.answers import library_here


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """A working folder without the results that `make demo` leaves in the repository's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield


@pytest.fixture(scope="module")
def library(elsewhere):
    return library_here()
