"""What several tests of commands plan."""

import planned_clock
import pytest


@pytest.fixture
def planned(monkeypatch):
    """Launches take what their logs say, and half a second beside, whatever a busy machine makes of them; scripts of tests wait for nothing."""
    monkeypatch.setenv("PLANNED_CLOCK", "1")
    planned_clock.install(monkeypatch.setattr)
