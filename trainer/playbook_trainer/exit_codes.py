"""What a rank's exit code says; docs/trainer-files.md explains them, and the harness acts on them."""

from __future__ import annotations

from collections.abc import Mapping

from playbook.errors import PlaybookError

OK, ERROR, REFUSED, NAN, OUT_OF_MEMORY, STOPPED, HANG = range(7)


class RunError(PlaybookError):
    """A run that cannot go on, for a reason outside its configuration and its data; the rank ends with ERROR."""


OF_OUTCOME: Mapping[str, int] = {"ok": OK, "nan": NAN, "stopped": STOPPED}
"""How a run that came to an end ended."""
