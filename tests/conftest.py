"""Property tests take the time that they take: where a machine does other work too, a pause is no fault of an example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")
