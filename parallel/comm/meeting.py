"""Where the ranks meet: torch's store, at the address in the environment."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel.runtime.listening import is_agents_store, listen, meeting_host

MEET_SECONDS = 45.0
"""How long ranks wait for the last one to come. With the seconds that an end takes, a start fails within a minute."""


def meeting_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store: rank 0 has it, and returns at once; the others when they reach it.

    OSError if that takes longer than ``timeout`` (twice that if a stranger answers nothing), or if rank 0 cannot have
    the port.
    """
    host, port = meeting_host(), int(os.environ["MASTER_PORT"])
    if rank != 0:
        _reach(host, port, timeout.total_seconds())
    is_master = rank == 0 and not is_agents_store()

    def build() -> dist.TCPStore:
        # Without a wait for all ranks: that would end by a time-out which tells nobody who is missing.
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
        if is_master:
            # By itself the store listens on every interface; whoever reaches it may write into it.
            options["master_listen_fd"] = listen(host, port).detach()
        return dist.TCPStore(host, port, world_size, is_master=is_master, timeout=timeout, **options)

    if is_master:
        store = build()
    else:
        store = _within(build, timeout.total_seconds())
    # Under torchrun's store the keys of a start that failed are still there.
    prefix = "longctx"
    if is_agents_store():
        prefix = f"longctx/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)


def _within(build: Callable[[], dist.TCPStore], seconds: float) -> dist.TCPStore:
    """The store that ``build`` returns. OSError where it takes longer than so many seconds."""
    # torch waits without a limit for the first answer of whoever listens, which may be another program.
    found: list[dist.TCPStore | BaseException] = []

    def act() -> None:
        try:
            found.append(build())
        # The caller raises it.
        except BaseException as error:
            found.append(error)

    # A thread that is stuck does not keep the process: it ends by ``os._exit``.
    thread = threading.Thread(target=act, name="meeting", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise OSError(f"what listens there gives no answer within {seconds:.0f} s, so it is no rank 0")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


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
