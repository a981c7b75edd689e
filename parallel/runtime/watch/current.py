"""The watch of this process: started when ranks meet, asked when one ends."""

from __future__ import annotations

import json
import os
import socket
from typing import Protocol

from parallel.runtime.watch.guard import start_guard
from parallel.runtime.watch.hub import Hub
from parallel.runtime.watch.member import Member
from parallel.runtime.watch.options import WatchOptions

_KEY = "longctx/watch"
_GUARD_SECONDS = 10.0
"""Beyond the time-out: when a stopped rank is let go on that is alone on its machine."""

# One in a process, as torch's world group is.
_member: Member | None = None
_interrupted = "Interrupted."


class Store(Protocol):
    """Where the ranks meet: torch's."""

    def set(self, key: str, value: str, /) -> None:
        """Put a value under a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value under a key, once it is there."""
        ...


def watching() -> Member | None:
    """This process's part in the watch over all ranks; None in a process that is alone, and before ranks meet."""
    return _member


def say_when_interrupted(text: str) -> None:
    """What a user reads after Ctrl-C, should the main thread be where it cannot say it."""
    global _interrupted
    _interrupted = text


def start_watch(store: Store, options: WatchOptions) -> None:
    """Watch over all ranks, which meet in ``store``; returns when all have come. Collective.

    When one does not come, or has other code, this process ends as after any failure. OSError where rank 0's machine
    cannot be reached.
    """
    global _member
    hub, host = None, os.environ["MASTER_ADDR"]
    if options.rank == 0:
        hub, host = Hub(options), "127.0.0.1"
        store.set(_KEY, json.dumps([hub.port, hub.token]))
    # The machine of rank 0 is the one where ranks meet: launchers start it there.
    port, token = json.loads(store.get(_KEY))
    connection = socket.create_connection((host, port), timeout=options.meet)
    connection.settimeout(None)
    _member = Member(connection, options, token=token, hub=hub, interrupted=_interrupted)
    _member.wait_for_all()
    # Nobody else ends a rank of this machine that is stopped. Later than the others end.
    if len(_member.line.neighbours) == 1:
        start_guard(options.timeout + _GUARD_SECONDS, port)


def stop_watch() -> None:
    """End the watch, if there is one: this rank is done."""
    global _member
    if _member is not None:
        _member.leave()
        _member = None
