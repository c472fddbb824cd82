"""A thread that notices when a rank no longer gets on, says where it stands, and ends it."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time

from playbook_trainer.exit_codes import HANG
from playbook_trainer.observe.ranges import open_ranges


class Watchdog:
    """Ends this rank once `timeout_s` seconds have passed since the last `alive`, but for a `rest`; with None it does nothing."""

    def __init__(self, timeout_s: float | None, rank: int) -> None:
        self._timeout_s, self._rank = timeout_s, rank
        self._step, self._last = 0, time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(timeout_s,), name="watchdog", daemon=True)
        if timeout_s is not None:
            self._thread.start()

    def alive(self, step: int) -> None:
        """Restart the countdown: a step has ended."""
        self._step, self._last = step, time.monotonic()

    def rest(self) -> None:
        """Pause the countdown until the next `alive`."""
        self._last = math.inf

    def close(self) -> None:
        """End the watching thread."""
        self._closed.set()
        if self._timeout_s is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self, timeout_s: float) -> None:
        while not self._closed.wait(min(timeout_s / 10, 5.0)):
            # Where a thread holds the interpreter's lock for good, only faulthandler's own thread still runs; it exits with 1.
            faulthandler.dump_traceback_later(1.5 * timeout_s, exit=True)
            if time.monotonic() - self._last > timeout_s:
                self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        where = " > ".join(open_ranges()) or "no range"
        sys.stderr.write(
            f"rank {self._rank}: no step for {timeout_s:g} s (train.hang_timeout_s), after step {self._step}, in {where}; its threads:\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(HANG)
