"""The coordinator of a run's watch: a thread on rank 0 to which every rank keeps a connection.

The first reported failure is sent to all ranks. A connection that closes without a "left" message means that the rank
died: the system closes it when a process is killed, and drops it when a machine is gone. A stopped or hanging process
closes no connection: so every rank sends heartbeats a few times per timeout, and the coordinator sends its own
(``overseer.py``).

``door.py`` accepts connections and rejects unrelated clients.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import selectors
import socket
import threading
import time
from typing import Any

from parallel.runtime.watch.connection_acceptor import (
    SEND_SECONDS,
    ConnectionAcceptor,
    PendingConnection,
    UnauthenticatedError,
)
from parallel.runtime.watch.failure import FAILED, Failure, encode_message
from parallel.runtime.watch.key import WatchKey
from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.rank_monitor import RankMonitor
from parallel.runtime.watch.watch_options import WatchOptions

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())


class Coordinator:
    """Coordinator that sends all ranks the first failure that one of them reports."""

    def __init__(self, options: WatchOptions, *, host: str, key: WatchKey) -> None:
        """Start listening at ``host``, to ranks that present ``key``; ``options`` are rank 0's."""
        _allow_many_files()
        self._hint, self._heartbeat_seconds = options.hint, options.heartbeat_seconds
        self._selector = selectors.DefaultSelector()
        self._door = ConnectionAcceptor(host, key, world_size=options.world_size, selector=self._selector)
        # Writing to one end wakes the thread, which also selects on the other end.
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._overseer = RankMonitor(options, send=self._door.send_to, fail=self._fail)
        self._failure: Failure | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="watch hub", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Address for processes on this machine."""
        return self._door.address

    def stop(self) -> None:
        """Release all ranks and stop."""
        self._is_stopping = True
        # The thread may already have seen the flag, because a rank left at this moment, and closed the sockets.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(SEND_SECONDS)

    def linger(self, seconds: float) -> None:
        """Return when all other ranks are gone, or after ``seconds``; until then the coordinator still forwards the
        failure.
        """
        deadline = time.monotonic() + seconds
        while len(self._door.by_rank) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        try:
            self._serve()
        # Otherwise the run would end by some timeout, with a wrong reason.
        except Exception as error:
            log.exception("the watch coordinator failed")
            text = f"ClusterError: the watch coordinator failed: {error!r}. This is a bug in longctx."
            self._fail(Failure(rank=-1, code=FAILED, text=text, speaker=0))

    def _serve(self) -> None:
        pulse = time.monotonic()
        while not self._is_stopping:
            for key, _ in self._selector.select(self._heartbeat_seconds / 2):
                guest = self._door.guest(key.fileobj)
                if key.fileobj is self._door.listener:
                    self._door.admit()
                elif guest is not None:
                    self._read(guest)
            # Last: if this process was stopped, messages that arrived meanwhile are processed first.
            self._overseer.check()
            if time.monotonic() >= pulse:
                pulse = time.monotonic() + self._heartbeat_seconds
                self._door.broadcast(encode_message("pulse"))
                self._door.drop_strangers()
        # Otherwise a slower rank would take the closed connection for rank 0's death.
        self._door.broadcast(encode_message("over"))
        self._door.close()
        for end in (self._wake, self._woken):
            end.close()

    def _read(self, guest: PendingConnection) -> None:
        """Read a rank's data, or detect that it is gone."""
        data = b""
        with contextlib.suppress(OSError):
            data = guest.socket.recv(65_536)
        if not data:
            self._handle_disconnect(guest)
            return
        try:
            for message in self._door.messages(guest, data):
                self._take(guest, message)
        # Any error: ranks send only valid messages, and no unrelated client may end this thread.
        except Exception as error:
            if not isinstance(error, UnauthenticatedError):
                log.warning("dropped a connection to the watch coordinator: %s: %s", type(error).__name__, error)
            if self._door.guest(guest.socket) is not None:
                self._handle_disconnect(guest)

    def _take(self, guest: PendingConnection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if guest.rank is None:
            if kind != "hello":
                raise UnauthenticatedError
            self._welcome(guest, RankProcess.from_values(message["process"]))
        elif kind in ("beat", "report"):
            self._overseer.process_message(guest.rank, message)
        elif kind == "failed":
            del message["kind"]
            self._fail(Failure.from_values(message))
        elif kind == "reported":
            self._door.broadcast(encode_message("reported"))
        elif kind == "left":
            self._drop(guest)

    def _welcome(self, guest: PendingConnection, process: RankProcess) -> None:
        """Accept a rank into the run, or tell it why it cannot join."""
        rank = process.rank
        guest.host = process.host
        # Register it before counting: the last one to join releases all ranks.
        known = self._door.by_rank.setdefault(rank, guest)
        problem = self._overseer.arrive(process)
        if problem:
            if known is guest:
                del self._door.by_rank[rank]
            rejection = Failure(rank=-1, code=FAILED, text=problem, speaker=rank)
            guest.send(encode_message("failed", **rejection.to_values()))
            return
        guest.rank = rank
        if self._overseer.roll.is_complete:
            self._door.close_to_strangers()
        # Another rank may have failed before this one joined.
        if self._failure is not None:
            guest.send(encode_message("failed", **self._failure.to_values()))

    def _fail(self, failure: Failure) -> None:
        """Send the first failure to all ranks; later ones follow from it and are ignored."""
        if self._failure is None:
            self._failure = failure
            self._door.key.remove()
            self._door.broadcast(encode_message("failed", **failure.to_values()))

    def _handle_disconnect(self, guest: PendingConnection) -> None:
        """Handle a closed connection: the rank has died, unless the run is ending."""
        self._drop(guest)
        if guest.rank is not None:
            text = died(guest.rank, guest.host, self._hint)
            self._fail(Failure(rank=guest.rank, code=FAILED, text=text, cannot_report=True))

    def _drop(self, guest: PendingConnection) -> None:
        self._door.drop(guest)
        if guest.rank is not None:
            self._overseer.remove(guest.rank)


def died(rank: int, host: str, hint: str) -> str:
    """Return the message to the user about a rank that died without one."""
    place = ""
    if host:
        place = f" on {host}"
    text = (
        f"ClusterError: rank {rank}{place} died without a message. It was killed (the kernel does so if memory runs "
        "out: see dmesg there), or its machine was lost."
    )
    return "\n".join(part for part in (text, hint) if part)


def _allow_many_files() -> None:
    """Raise the open file limit: rank 0 has a connection to every rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
