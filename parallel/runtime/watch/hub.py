"""The hub of a run's watch: a thread of rank 0 to which every rank holds a connection.

The first failure that a rank reports is told to all. A connection that closes without a good-bye is a rank that died
without a message: the system closes it when a process is killed, and gives it up when a machine is gone. A process that
is stopped, or that waits for ever, closes nothing: so every rank says a few times in a time-out what it does, and the
hub says that it is there (``overseer.py``).
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
from parallel.runtime.watch.options import WatchOptions
from parallel.runtime.watch.overseer import Overseer
from parallel.runtime.watch.processes import RankProcess

_MOST_WAITING = 4096
"""Connections that may arrive at once."""
_STRANGER_SECONDS = 10.0
"""How long a connection may be open before it has shown the token."""
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
    opened: float = field(default_factory=time.monotonic)

    def tell(self, message: bytes) -> None:
        """Send it a line."""
        # One that cannot be told is gone, which its own connection says, or stopped, which it is silent for.
        with contextlib.suppress(OSError):
            self.socket.sendall(message)


class _Lines:
    """All connections, and which of them is which rank's."""

    def __init__(self) -> None:
        self.by_socket: dict[socket.socket, _Line] = {}
        self.by_rank: dict[int, _Line] = {}

    def remove(self, line: _Line) -> None:
        """Close a connection and forget it."""
        del self.by_socket[line.socket]
        line.socket.close()
        if line.rank is not None:
            del self.by_rank[line.rank]

    def strangers(self) -> list[_Line]:
        """Those that have been open for long and have said nothing that a rank says."""
        oldest = time.monotonic() - _STRANGER_SECONDS
        return [line for line in self.by_socket.values() if line.rank is None and line.opened < oldest]

    def tell_all(self, message: bytes) -> None:
        """Send a line to every rank."""
        for line in list(self.by_rank.values()):
            line.tell(message)

    def tell(self, rank: int, message: bytes) -> None:
        """Send a line to one rank, if it is there."""
        if rank in self.by_rank:
            self.by_rank[rank].tell(message)


class Hub:
    """Tells all ranks what one of them reports."""

    def __init__(self, options: WatchOptions) -> None:
        """Listen from now on; ``options`` are those of rank 0."""
        _allow_many_files()
        self.token = secrets.token_hex(16)
        """What a rank shows: others on the network may connect, and are not listened to."""
        self._remark, self._beat = options.remark, options.beat
        self._listener = _listen()
        # A connection that is gone again before it is taken would keep the thread.
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Writing to the one end wakes the thread, which waits for the other one, too.
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lines = _Lines()
        self._overseer = Overseer(options, tell=self._lines.tell, fail=self._fail)
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
        while len(self._lines.by_rank) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        pulse = time.monotonic()
        while not self._stops:
            for key, _ in self._selector.select(self._beat / 2):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken:
                    self._read(self._lines.by_socket[key.fileobj])  # type: ignore[index]
            # Only now: of a process that was stopped, what others said meanwhile is read first.
            self._overseer.look()
            if time.monotonic() >= pulse:
                pulse = time.monotonic() + self._beat
                self._lines.tell_all(line_of("pulse"))
                for line in self._lines.strangers():
                    self._drop(line)
        # Else a rank that is slower to leave would take the closed connection for rank 0's death.
        self._lines.tell_all(line_of("over"))
        for connection in [*self._lines.by_socket, self._listener, self._wake, self._woken]:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_SECONDS)
            keep_alive(connection)
            self._lines.by_socket[connection] = _Line(connection)
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
            self._welcome(line, RankProcess.from_values(message["process"]), str(message["version"]))
        elif line.rank is None:
            raise ValueError("a stranger")
        elif kind in ("beat", "report"):
            self._overseer.hear(line.rank, message)
        elif kind == "failed":
            del message["kind"]
            self._fail(Failure.from_values(message))
        elif kind == "reported":
            self._lines.tell_all(line_of("reported"))
        elif kind == "left":
            self._drop(line)

    def _welcome(self, line: _Line, process: RankProcess, version: str) -> None:
        """Take a rank as one of the run; tell it where it cannot be one."""
        rank = process.rank
        line.host = process.host
        # Before it is counted: to be the last one lets all begin.
        known = self._lines.by_rank.setdefault(rank, line)
        problem = self._overseer.arrive(process, version)
        if problem:
            if known is line:
                del self._lines.by_rank[rank]
            refused = Failure(rank=-1, code=FAILED, text=problem, speaker=rank)
            line.tell(line_of("failed", **refused.to_values()))
            return
        line.rank = rank
        # Another rank may have failed before this one came.
        if self._failure is not None:
            line.tell(line_of("failed", **self._failure.to_values()))

    def _fail(self, failure: Failure) -> None:
        """Tell everyone of the first failure; what follows from it is nobody's concern."""
        if self._failure is None:
            self._failure = failure
            self._lines.tell_all(line_of("failed", **failure.to_values()))

    def _lose(self, line: _Line) -> None:
        """A connection has closed: the rank has died, unless the run is ending."""
        self._drop(line)
        if line.rank is not None:
            text = died(line.rank, line.host, self._remark)
            self._fail(Failure(rank=line.rank, code=FAILED, text=text, silent=True))

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        self._lines.remove(line)
        if line.rank is not None:
            self._overseer.forget(line.rank)


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
