"""Where the ranks meet: torch's store, at the address in the environment."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

MEET_SECONDS = 45.0
"""How long ranks wait for the last one to come. With the seconds that an end takes, a start fails within a minute."""


def meeting_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store: rank 0 has it, and returns at once; the others when they reach it.

    OSError where that takes longer than ``timeout``, RuntimeError (torch's) where rank 0 cannot have the port.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0:
        _reach(host, port, timeout.total_seconds())
    # torchrun has a store of its own there, which outlives the ranks that it starts again.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Without a wait for all ranks: that would end by a time-out which tells nobody who is missing.
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0 and not is_agents,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    # Under torchrun's store the keys of a start that failed are still there.
    prefix = "longctx"
    if is_agents:
        prefix = f"longctx/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)


def _reach(host: str, port: int, seconds: float) -> None:
    """Return once something listens there. OSError where nothing does within so many seconds."""
    # Before torch looks for it, which says on half a screen of C++ that it does not find it.
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5.0, seconds)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise OSError(f"nothing answers there within {seconds:.0f} s ({error})") from error
        time.sleep(0.1)
