"""Ending a run on request: a signal to any rank makes all ranks save and leave after one and the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill; Slurm's `--signal=USR1@300` sends the second five minutes ahead."""


class StopRequest:
    """Records that a signal asked this rank to stop, and finds out whether any rank was asked."""

    def __init__(self) -> None:
        self.asked = False
        self._copies: list[tuple[Tensor, Any]] = []

    def listen(self) -> None:
        """Handle SIGNALS from now on; a second signal has its usual effect. Data workers that start later inherit the handler, so they survive the first signal too."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                signal.signal(signum, self._ask)

    def agreed(self, flag: Tensor) -> bool:
        """Whether `flag`, summed over the ranks in this step, says that one of them was asked; every rank gets the same answer.

        On a GPU the answer is that of the step before, whose copy has arrived: the host need not wait for what it has just issued.
        """
        if not flag.is_cuda:
            return bool(flag.item())
        copy, event = torch.empty(1, dtype=flag.dtype, pin_memory=True), torch.cuda.Event()
        copy.copy_(flag.view(1), non_blocking=True)
        event.record()
        self._copies.append((copy, event))
        if len(self._copies) < 2:
            return False
        copy, event = self._copies.pop(0)
        event.synchronize()
        return bool(copy.item())

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signum, signal.SIG_DFL)
