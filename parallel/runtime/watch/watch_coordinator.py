"""The coordinator of a run's watch: a thread on rank 0 to which every rank keeps a connection.

The first reported failure is sent to all ranks. A connection that closes without a "left" message means that the rank
died: the system closes it when a process is killed, and drops it when a machine is gone. A stopped or hanging process
closes no connection: so every rank sends heartbeats a few times per timeout, and the coordinator sends its own
(``rank_monitor.py``).

``connection_acceptor.py`` accepts connections and rejects unrelated clients.
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
    ClientConnection,
    ConnectionAcceptor,
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
        self._acceptor = ConnectionAcceptor(host, key, world_size=options.world_size, selector=self._selector)
        # Writing to one end wakes the thread, which also selects on the other end.
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._monitor = RankMonitor(options, send=self._acceptor.send_to, fail=self._fail)
        self._failure: Failure | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="watch hub", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Address for processes on this machine."""
        return self._acceptor.address

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
        while len(self._acceptor.by_rank) > 1 and time.monotonic() < deadline:
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
                client = self._acceptor.client(key.fileobj)
                if key.fileobj is self._acceptor.listener:
                    self._acceptor.admit()
                elif client is not None:
                    self._read(client)
            # Last: if this process was stopped, messages that arrived meanwhile are processed first.
            self._monitor.check()
            if time.monotonic() >= pulse:
                pulse = time.monotonic() + self._heartbeat_seconds
                self._acceptor.broadcast(encode_message("pulse"))
                self._acceptor.drop_strangers()
        # Otherwise a slower rank would take the closed connection for rank 0's death.
        self._acceptor.broadcast(encode_message("over"))
        self._acceptor.close()
        for end in (self._wake, self._woken):
            end.close()

    def _read(self, client: ClientConnection) -> None:
        """Read a rank's data, or detect that it is gone."""
        data = b""
        with contextlib.suppress(OSError):
            data = client.socket.recv(65_536)
        if not data:
            self._handle_disconnect(client)
            return
        try:
            for message in self._acceptor.messages(client, data):
                self._take(client, message)
        # Any error: ranks send only valid messages, and no unrelated client may end this thread.
        except Exception as error:
            if not isinstance(error, UnauthenticatedError):
                log.warning("dropped a connection to the watch coordinator: %s: %s", type(error).__name__, error)
            if self._acceptor.client(client.socket) is not None:
                self._handle_disconnect(client)

    def _take(self, client: ClientConnection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if client.rank is None:
            if kind != "hello":
                raise UnauthenticatedError
            self._welcome(client, RankProcess.from_values(message["process"]))
        elif kind in ("beat", "report"):
            self._monitor.process_message(client.rank, message)
        elif kind == "failed":
            del message["kind"]
            self._fail(Failure.from_values(message))
        elif kind == "reported":
            self._acceptor.broadcast(encode_message("reported"))
        elif kind == "left":
            self._drop(client)

    def _welcome(self, client: ClientConnection, process: RankProcess) -> None:
        """Accept a rank into the run, or tell it why it cannot join."""
        rank = process.rank
        client.host = process.host
        # Register it before counting: the last one to join releases all ranks.
        known = self._acceptor.by_rank.setdefault(rank, client)
        problem = self._monitor.arrive(process)
        if problem:
            if known is client:
                del self._acceptor.by_rank[rank]
            rejection = Failure(rank=-1, code=FAILED, text=problem, speaker=rank)
            client.send(encode_message("failed", **rejection.to_values()))
            return
        client.rank = rank
        if self._monitor.roll.is_complete:
            self._acceptor.close_to_strangers()
        # Another rank may have failed before this one joined.
        if self._failure is not None:
            client.send(encode_message("failed", **self._failure.to_values()))

    def _fail(self, failure: Failure) -> None:
        """Send the first failure to all ranks; later ones follow from it and are ignored."""
        if self._failure is None:
            self._failure = failure
            self._acceptor.key.remove()
            self._acceptor.broadcast(encode_message("failed", **failure.to_values()))

    def _handle_disconnect(self, client: ClientConnection) -> None:
        """Handle a closed connection: the rank has died, unless the run is ending."""
        self._drop(client)
        if client.rank is not None:
            text = died(client.rank, client.host, self._hint)
            self._fail(Failure(rank=client.rank, code=FAILED, text=text, cannot_report=True))

    def _drop(self, client: ClientConnection) -> None:
        self._acceptor.drop(client)
        if client.rank is not None:
            self._monitor.remove(client.rank)


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
