"""The hub of a run's watch: a thread of rank 0 to which every rank holds a connection.

The first failure that a rank reports is told to all. A connection that closes without a good-bye is a rank that died
without a message: the system closes it when a process is killed, and gives it up when a machine is gone.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from parallel.runtime.watch.failure import FAILED, Failure, Lines, line_of

_MOST_WAITING = 4096
"""Connections that may arrive at once."""
_SEND_SECONDS = 1.0
"""How long the hub tries to tell one rank something: messages are small, and fit the system's buffer."""


@dataclass
class _Line:
    """The connection of one rank, or of a stranger."""

    socket: socket.socket
    lines: Lines = field(default_factory=Lines)
    rank: int | None = None
    """None until it has shown the token."""
    host: str = ""


class Hub:
    """Tells all ranks what one of them reports."""

    def __init__(self, *, remark: str = "") -> None:
        """``remark`` follows the message about a rank that died without one."""
        _allow_many_files()
        self.token = secrets.token_hex(16)
        """What a rank shows: others on the network may connect, and are not listened to."""
        self._remark = remark
        self._listener = _listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Writing to the one end wakes the thread, which waits for the other one, too.
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lines: dict[socket.socket, _Line] = {}
        self._failure: Failure | None = None
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="watch hub", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def stop(self) -> None:
        """Let all ranks go."""
        self._stops = True
        # The thread may have seen it already, by a rank that leaves at this moment, and closed everything.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_SEND_SECONDS)

    def linger(self, seconds: float) -> None:
        """Return when all other ranks are gone, or after so many seconds: they hear from here what happened."""
        deadline = time.monotonic() + seconds
        while len(self._lines) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._stops:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken:
                    self._read(self._lines[key.fileobj])  # type: ignore[index]
        # Else a rank that is slower to leave would take the closed connection for rank 0's death.
        self._tell_all(line_of("over"))
        for connection in [*self._lines, self._listener, self._wake, self._woken]:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_SECONDS)
            keep_alive(connection)
            self._lines[connection] = _Line(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, line: _Line) -> None:
        """Read what a rank sends, or that it is gone."""
        data = b""
        with contextlib.suppress(OSError):
            data = line.socket.recv(65_536)
        if not data:
            self._lose(line)
            return
        try:
            for message in line.lines.add(data):
                self._take(line, message)
        except (ValueError, KeyError, TypeError):
            # A stranger; a rank says nothing that is not understood.
            self._drop(line)

    def _take(self, line: _Line, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            if not secrets.compare_digest(str(message["token"]), self.token):
                raise ValueError("a stranger")
            line.rank, line.host = int(message["rank"]), str(message["host"])
            # Another rank may have failed before this one came.
            if self._failure is not None:
                self._tell(line, line_of("failed", **self._failure.to_values()))
        elif line.rank is None:
            raise ValueError("a stranger")
        elif kind == "failed":
            del message["kind"]
            self._fail(Failure(**message))
        elif kind == "reported":
            self._tell_all(line_of("reported"))
        elif kind == "left":
            self._drop(line)

    def _fail(self, failure: Failure) -> None:
        """Tell everyone of the first failure; what follows from it is nobody's concern."""
        if self._failure is None:
            self._failure = failure
            self._tell_all(line_of("failed", **failure.to_values()))

    def _lose(self, line: _Line) -> None:
        """A connection has closed: the rank has died, unless the run is ending."""
        self._drop(line)
        if line.rank is not None:
            text = died(line.rank, line.host, self._remark)
            self._fail(Failure(rank=line.rank, code=FAILED, text=text, silent=True))

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        del self._lines[line.socket]
        line.socket.close()

    def _tell_all(self, message: bytes) -> None:
        for line in list(self._lines.values()):
            if line.rank is not None:
                self._tell(line, message)

    def _tell(self, line: _Line, message: bytes) -> None:
        # One that cannot be told is gone, which its own connection says.
        with contextlib.suppress(OSError):
            line.socket.sendall(message)


def died(rank: int, host: str, remark: str) -> str:
    """What a user reads of a rank that died without a message."""
    place = ""
    if host:
        place = f" on {host}"
    text = (
        f"ClusterError: rank {rank}{place} died without a message. It was killed (the system does so when memory runs "
        "out: see dmesg there), or its machine was lost."
    )
    return "\n".join(part for part in (text, remark) if part)


def keep_alive(connection: socket.socket) -> None:
    """Have the system find out within a minute when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        # macOS has two of them.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen() -> socket.socket:
    """A socket on a free port of every interface, old and new addresses alike."""
    # The system may know the new ones and have them switched off.
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MOST_WAITING)
    return socket.create_server(("", 0), backlog=_MOST_WAITING)


def _allow_many_files() -> None:
    """Raise the limit of open files: rank 0 has a connection to every rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
