"""Where the ranks of a run meet before their first collective, with a word about those that do not come."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from playbook.errors import ConfigError
from playbook_trainer.exit_codes import RunError

_SAY_S = 8.0
"""Seconds without the others after which a rank says whom it waits for."""
_GIVE_UP_S = 600.0
_OPERATION = timedelta(minutes=30)
"""How long what is asked of the store later may take: torch's own default for process groups."""
_POLL_S = 0.05
_SHOWN = 16
"""Ranks named in one line."""


def meet(rank: int, world: int) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, once all ranks have come to it.
    Rank 0 keeps it, unless the launcher does, as torchrun's agent.

    Raises:
        ConfigError: another program has the port.
        RunError: somebody has not come within ten minutes.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    began = time.monotonic()
    if not keeps:
        _await(host, port, rank, began)
    try:
        store = dist.TCPStore(host, port, world, keeps, timedelta(seconds=_GIVE_UP_S), wait_for_workers=False, multi_tenant=True)
    except dist.DistError as e:
        if not keeps:
            raise RunError(f"rank 0 at {host}:{port} has gone ({_cause(e)}); look at its log") from e
        raise ConfigError(
            f"rank 0 cannot listen at MASTER_ADDR {host}, port {port} ({_cause(e)}); set MASTER_PORT to a free port, or end what holds it"
        ) from e
    store.set_timeout(_OPERATION)
    names = [f"playbook/rank {r}" for r in range(world)]
    store.set(names[rank], "here")
    reported = False
    while rank == 0 and not store.check(names):
        waited = time.monotonic() - began
        if (not reported and waited > _SAY_S) or waited > _GIVE_UP_S:
            absent = [str(r) for r, name in enumerate(names) if not store.check([name])]
            _wait(rank, f"no word from rank {', '.join(absent[:_SHOWN])}{' and others' if len(absent) > _SHOWN else ''} of {world}", began)
            reported = True
        time.sleep(_POLL_S)
    return store


def _await(host: str, port: int, rank: int, began: float) -> None:
    """Until somebody listens there. Torch's own attempts would fill the log with its stack."""
    reported = False
    while True:
        try:
            socket.create_connection((host, port), timeout=_SAY_S).close()
            return
        except OSError:
            waited = time.monotonic() - began
            if (not reported and waited > _SAY_S) or waited > _GIVE_UP_S:
                _wait(rank, f"no answer from rank 0 at {host}:{port}", began)
                reported = True
            time.sleep(_POLL_S)


def _wait(rank: int, what: str, began: float) -> None:
    waited = time.monotonic() - began
    if waited > _GIVE_UP_S:
        raise RunError(f"{what} in {waited:.0f} s; look at its log, and whether its machine reaches this one")
    sys.stderr.write(f"rank {rank}: {what} in {waited:.0f} s; waiting up to {_GIVE_UP_S:.0f} s\n")
    sys.stderr.flush()


def _cause(e: BaseException) -> str:
    text = str(e)
    return "the address is in use" if "EADDRINUSE" in text else text.splitlines()[0]
