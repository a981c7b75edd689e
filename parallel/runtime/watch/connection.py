"""A rank's connection to the coordinator: its own reports, and news from other ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from parallel.runtime.watch.connection_acceptor import keep_alive
from parallel.runtime.watch.failure import FAILED, Failure, MessageStream, encode_message, line_of_key
from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.watch_coordinator import died
from parallel.runtime.watch.watch_options import WatchOptions

_MEANWHILE_SECONDS = 0.2
_ANSWER_SECONDS = 3.0
"""How long a failing rank waits for the coordinator to say which failure was first."""


class Connection:
    """Connection that reports this rank to the coordinator, and receives the run's first failure."""

    def __init__(
        self,
        connection: socket.socket,
        options: WatchOptions,
        *,
        key: str,
        on_failure: Callable[[Failure], None],
        on_question: Callable[[list[RankProcess]], None],
    ) -> None:
        """Set the callbacks. ``on_failure`` is called once, in its own thread.

        ``on_question`` is called when the run hangs, with the ranks that are the cause.
        """
        self._socket, self._rank, self._hint = connection, options.rank, options.hint
        self._on_failure, self._on_question = on_failure, on_question
        self._send_lock, self._lines, self._is_over = threading.Lock(), MessageStream(), False
        self._has_failure, self._reported, self._met = threading.Event(), threading.Event(), threading.Event()
        self.neighbors: list[RankProcess] = []
        """Ranks on this machine, including this one; empty before rendezvous is complete."""
        self.messages = 0
        """Messages received from the coordinator: it is alive as long as this grows."""
        self.first: Failure | None = None
        """The run's first failure, from any rank; None until then."""
        keep_alive(connection)
        own = RankProcess.own(options.rank, options.version)
        self._hello = line_of_key(key) + encode_message("hello", process=vars(own))

    def start(self) -> None:
        """Identify this rank, and listen: the reply may be the reason why the run ends."""
        self._send(self._hello)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def wait(self, seconds: float) -> Failure | None:
        """Return the run's first failure if it is received within ``seconds``."""
        self._has_failure.wait(seconds)
        return self.first

    def wait_met(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> bool:
        """Return True if all ranks join within ``seconds``; an earlier failure ends this process.

        ``meanwhile`` is called a few times per second.
        """
        deadline = time.monotonic() + seconds
        while not self._met.wait(_MEANWHILE_SECONDS) and time.monotonic() < deadline:
            if meanwhile is not None:
                meanwhile()
        return self._met.is_set()

    def send_message(self, kind: str, **values: Any) -> None:
        """Send the coordinator a message about this rank."""
        self._send(encode_message(kind, **values))

    def end_by(self, failure: Failure) -> None:
        """End this process for a reason that the coordinator cannot report."""
        if not self._is_over:
            # If the coordinator resumed, it would take each rank's end for a death.
            self._send(encode_message("failed", **failure.to_values()))
            self._receive_failure(failure)

    def announce(self, failure: Failure) -> Failure:
        """Tell all ranks why this one ends; return the run's first failure, which may be another rank's."""
        if self.first is None:
            self._send(encode_message("failed", **failure.to_values()))
            self._has_failure.wait(_ANSWER_SECONDS)
        return self.first or failure

    def reported(self) -> None:
        """Tell all ranks that the user has been informed."""
        self._send(encode_message("reported"))

    def wait_reported(self, seconds: float) -> bool:
        """Return True if rank 0 confirms within ``seconds`` that it has reported."""
        return self._reported.wait(seconds)

    def leave(self) -> None:
        """Announce that this rank leaves, and stop listening."""
        self._is_over = True
        self._send(encode_message("left"))

    def _listen(self) -> None:
        while not self._is_over:
            data = b""
            with contextlib.suppress(OSError):
                data = self._socket.recv(65_536)
            if not data:
                # When rank 0 is done, the coordinator sends "over" before it closes.
                if not self._is_over:
                    self._receive_failure(
                        Failure(rank=0, code=FAILED, text=died(0, "", self._hint), cannot_report=True)
                    )
                return
            for message in self._lines.add(data):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        self.messages += 1
        if kind == "failed":
            self._receive_failure(Failure.from_values(message))
        elif kind == "met":
            self.neighbors = [RankProcess.from_values(values) for values in message["neighbours"]]
            self._met.set()
        elif kind == "explain":
            self._on_question([RankProcess.from_values(values) for values in message["processes"]])
        elif kind == "reported":
            self._reported.set()
        elif kind == "over":
            self._is_over = True

    def _receive_failure(self, failure: Failure) -> None:
        if self.first is not None:
            return
        self.first = failure
        # Before the main thread can end: record its state while it was stopped.
        if failure.awaits(self._rank):
            self._on_question([])
        self._has_failure.set()
        # In a new thread: this one continues to listen.
        threading.Thread(target=self._on_failure, args=(failure,), name="watch end", daemon=True).start()

    def _send(self, message: bytes) -> None:
        # If the coordinator is gone, the listening thread detects it from the connection.
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(message)
