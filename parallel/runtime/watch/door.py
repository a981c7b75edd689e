"""Connections of a run's hub: the door at which they come, and those that are in.

Strangers may come, too. The first bytes of a connection are compared with the run's key (``key.py``) before any other
byte of it is read. A bounded number may wait to show the key, for seconds; and the door closes once all ranks have
come.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from parallel.runtime.listening import listen, own_address
from parallel.runtime.watch.failure import Lines, line_of_key
from parallel.runtime.watch.key import Key

SEND_SECONDS = 1.0
"""How long the hub tries to tell one rank something: messages are small, and fit the system's buffer."""
_MOST_STRANGERS = 64
"""Connections beyond the number of ranks that may be open and have not said who they are."""
_STRANGER_SECONDS = 10.0
"""How long a connection may be open before it has said who it is."""


class StrangerError(Exception):
    """Error for a connection that is not a rank's."""


@dataclass(eq=False)
class Guest:
    """Connection of one rank, or of a stranger."""

    socket: socket.socket
    lines: Lines = field(default_factory=Lines)
    first: bytes = b""
    """What came of its first line."""
    has_key: bool = False
    """Whether its first line was the key."""
    rank: int | None = None
    """None until it has said who it is."""
    host: str = ""
    opened: float = field(default_factory=time.monotonic)

    def messages(self, data: bytes, key: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes, after a first line that must be ``key``.

        Raise StrangerError for another first line, and any error of JSON for data that is not a message.
        """
        if self.has_key:
            return self.lines.add(data)
        # Compared once it is complete: refusing a part of it would tell how far a guess is right.
        self.first += data
        if len(self.first) < len(key):
            return []
        if not secrets.compare_digest(self.first[: len(key)], key):
            raise StrangerError
        rest, self.first, self.has_key = self.first[len(key) :], b"", True
        return self.lines.add(rest)

    def tell(self, message: bytes) -> None:
        """Send it a line."""
        # If sending fails, the rank is gone, which its own connection shows, or stopped, which its silence shows.
        with contextlib.suppress(OSError):
            self.socket.sendall(message)


class Door:
    """Entrance of ranks until all have come, and the connections of all that are in."""

    def __init__(self, host: str, key: Key, *, world_size: int, selector: selectors.BaseSelector) -> None:
        """Listen at ``host``; ``selector`` tells when a connection comes or sends."""
        self.key, self._first_line = key, line_of_key(key.value)
        self._most_strangers = world_size + _MOST_STRANGERS
        self._selector = selector
        self.listener = listen(host, 0)
        self.address = own_address(self.listener)
        """Where a process of this machine reaches it."""
        # A connection that is gone again before it is accepted would block the thread.
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ)
        self._guests: dict[socket.socket, Guest] = {}
        self.by_rank: dict[int, Guest] = {}

    def accept(self) -> None:
        """Accept a connection that has come."""
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            connection.settimeout(SEND_SECONDS)
            keep_alive(connection)
            self._guests[connection] = Guest(connection)
            self._selector.register(connection, selectors.EVENT_READ)
        self.drop_strangers()

    def guest(self, connection: object) -> Guest | None:
        """Return the guest of a connection; None if it has been closed meanwhile."""
        return self._guests.get(connection)  # type: ignore[call-overload]

    def messages(self, guest: Guest, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages of a guest, as long as it is in."""
        for message in guest.messages(data, self._first_line):
            if guest.socket in self._guests:
                yield message

    def drop(self, guest: Guest) -> None:
        """Close a connection and forget it."""
        self._selector.unregister(guest.socket)
        del self._guests[guest.socket]
        guest.socket.close()
        if guest.rank is not None:
            del self.by_rank[guest.rank]

    def drop_strangers(self) -> None:
        """Drop connections that have not said for long which rank they are, and the oldest if there are many."""
        oldest = time.monotonic() - _STRANGER_SECONDS
        unknown = [guest for guest in self._guests.values() if guest.rank is None]
        beyond = max(0, len(unknown) - self._most_strangers)
        for number, guest in enumerate(unknown):
            if number < beyond or guest.opened < oldest:
                self.drop(guest)

    def close_to_strangers(self) -> None:
        """Stop listening, and drop connections that have not said which rank they are: all ranks have come."""
        self.key.remove()
        self._selector.unregister(self.listener)
        self.listener.close()
        self._most_strangers = 0
        self.drop_strangers()

    def close(self) -> None:
        """Close everything."""
        self.key.remove()
        for connection in [*self._guests, self.listener]:
            connection.close()

    def tell_all(self, message: bytes) -> None:
        """Send a line to every rank."""
        for guest in list(self.by_rank.values()):
            guest.tell(message)

    def tell(self, rank: int, message: bytes) -> None:
        """Send a line to one rank, if it is there."""
        if rank in self.by_rank:
            self.by_rank[rank].tell(message)


def keep_alive(connection: socket.socket) -> None:
    """Make the system find out within a minute when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        # macOS has two of them.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
