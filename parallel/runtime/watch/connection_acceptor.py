"""Connections to a run's coordinator: those being authenticated, and those accepted.

Unrelated clients may connect, too. A connection's first bytes are compared with the run's key (``key.py``) before any
other byte is parsed. A bounded number may wait for authentication, for seconds, and listening ends once all ranks have
joined.
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
from parallel.runtime.watch.failure import MessageStream, line_of_key
from parallel.runtime.watch.key import WatchKey

SEND_SECONDS = 1.0
"""Timeout for sending one message to a rank: messages are small and fit into the system's buffer."""
_MOST_STRANGERS = 64
"""Maximum number of open, unidentified connections, in addition to the number of ranks."""
_STRANGER_SECONDS = 10.0
"""How long a connection may stay open without identifying itself."""


class UnauthenticatedError(Exception):
    """The connection does not belong to a rank."""


@dataclass(eq=False)
class ClientConnection:
    """Connection from one rank, or from an unrelated client."""

    socket: socket.socket
    lines: MessageStream = field(default_factory=MessageStream)
    first: bytes = b""
    """Received bytes of its first line."""
    has_key: bool = False
    """Whether its first line was the key."""
    rank: int | None = None
    """None until it has identified itself."""
    host: str = ""
    connect_time: float = field(default_factory=time.monotonic)

    def messages(self, data: bytes, key: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes, after a first line that must be ``key``.

        Raise StrangerError for another first line, and any JSON error for data that is not a message.
        """
        if self.has_key:
            return self.lines.add(data)
        # Compare only when complete: rejecting a prefix would reveal how much of a guess is right.
        self.first += data
        if len(self.first) < len(key):
            return []
        if not secrets.compare_digest(self.first[: len(key)], key):
            raise UnauthenticatedError
        rest, self.first, self.has_key = self.first[len(key) :], b"", True
        return self.lines.add(rest)

    def send(self, message: bytes) -> None:
        """Send it one line."""
        # If sending fails, the rank is gone, as its closed connection shows, or stopped, as its silence shows.
        with contextlib.suppress(OSError):
            self.socket.sendall(message)


class ConnectionAcceptor:
    """Listener until all ranks have joined, and all accepted connections."""

    def __init__(self, host: str, key: WatchKey, *, world_size: int, selector: selectors.BaseSelector) -> None:
        """Listen at ``host``; ``selector`` signals new connections and received data."""
        self.key, self._first_line = key, line_of_key(key.value)
        self._most_strangers = world_size + _MOST_STRANGERS
        self._selector = selector
        self.listener = listen(host, 0)
        self.address = own_address(self.listener)
        """Address for processes on this machine."""
        # If a connection closes before accept, a blocking listener would block the thread.
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, ClientConnection] = {}
        self.by_rank: dict[int, ClientConnection] = {}

    def admit(self) -> None:
        """Accept a pending connection."""
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            connection.settimeout(SEND_SECONDS)
            keep_alive(connection)
            self._clients[connection] = ClientConnection(connection)
            self._selector.register(connection, selectors.EVENT_READ)
        self.drop_strangers()

    def client(self, connection: object) -> ClientConnection | None:
        """Return a connection's client; None if it was closed meanwhile."""
        return self._clients.get(connection)  # type: ignore[call-overload]

    def messages(self, client: ClientConnection, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield a client's messages, while its connection is open."""
        for message in client.messages(data, self._first_line):
            if client.socket in self._clients:
                yield message

    def drop(self, client: ClientConnection) -> None:
        """Close a connection and forget it."""
        self._selector.unregister(client.socket)
        del self._clients[client.socket]
        client.socket.close()
        if client.rank is not None:
            del self.by_rank[client.rank]

    def drop_strangers(self) -> None:
        """Drop connections that stay unidentified for too long, and the oldest if there are too many."""
        oldest = time.monotonic() - _STRANGER_SECONDS
        unknown = [client for client in self._clients.values() if client.rank is None]
        num_excess = max(0, len(unknown) - self._most_strangers)
        for number, client in enumerate(unknown):
            if number < num_excess or client.connect_time < oldest:
                self.drop(client)

    def close_to_strangers(self) -> None:
        """Stop listening and drop unidentified connections: all ranks have joined."""
        self.key.remove()
        self._selector.unregister(self.listener)
        self.listener.close()
        self._most_strangers = 0
        self.drop_strangers()

    def close(self) -> None:
        """Close all connections."""
        self.key.remove()
        for connection in [*self._clients, self.listener]:
            connection.close()

    def broadcast(self, message: bytes) -> None:
        """Send a line to every rank."""
        for client in list(self.by_rank.values()):
            client.send(message)

    def send_to(self, rank: int, message: bytes) -> None:
        """Send a line to one rank, if it is connected."""
        if rank in self.by_rank:
            self.by_rank[rank].send(message)


def keep_alive(connection: socket.socket) -> None:
    """Make the system detect within a minute that the remote machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        # macOS supports two of these.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
