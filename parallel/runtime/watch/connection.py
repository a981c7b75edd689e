"""Connection of a rank to the hub: its own reports, and news of the other ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from parallel.runtime.watch.door import keep_alive
from parallel.runtime.watch.failure import FAILED, Failure, Lines, line_of, line_of_key
from parallel.runtime.watch.hub import died
from parallel.runtime.watch.options import WatchOptions
from parallel.runtime.watch.processes import RankProcess

_MEANWHILE_SECONDS = 0.2
_ANSWER_SECONDS = 3.0
"""How long a failing rank waits for the hub to say whose failure was the first."""


class Connection:
    """Connection that reports this rank to the hub, and hears from it of the run's first failure."""

    def __init__(
        self,
        connection: socket.socket,
        options: WatchOptions,
        *,
        key: str,
        on_failure: Callable[[Failure], None],
        on_question: Callable[[list[RankProcess]], None],
    ) -> None:
        """Set the callbacks. ``on_failure`` is called once, in a thread of its own.

        ``on_question`` is called when the run hangs, with the ranks that are the cause.
        """
        self._socket, self._rank, self._remark = connection, options.rank, options.remark
        self._on_failure, self._on_question = on_failure, on_question
        self._sending, self._lines, self._is_over = threading.Lock(), Lines(), False
        self._heard, self._reported, self._met = threading.Event(), threading.Event(), threading.Event()
        self.neighbours: list[RankProcess] = []
        """The ranks of this machine, this one too; none before all have met."""
        self.messages = 0
        """How many came from the hub: it is there as long as this grows."""
        self.first: Failure | None = None
        """The run's first failure, of any rank; None as long as there is none."""
        keep_alive(connection)
        own = RankProcess.own(options.rank, options.version)
        self._hello = line_of_key(key) + line_of("hello", process=vars(own))

    def start(self) -> None:
        """Introduce this rank, and listen: the answer may be the reason why the run ends."""
        self._send(self._hello)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def wait(self, seconds: float) -> Failure | None:
        """Return the run's first failure, if one is heard of within so many seconds."""
        self._heard.wait(seconds)
        return self.first

    def wait_met(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> bool:
        """Return whether all ranks have come within so many seconds; those that fail before end this process.

        ``meanwhile`` is called a few times a second.
        """
        deadline = time.monotonic() + seconds
        while not self._met.wait(_MEANWHILE_SECONDS) and time.monotonic() < deadline:
            if meanwhile is not None:
                meanwhile()
        return self._met.is_set()

    def tell(self, kind: str, **values: Any) -> None:
        """Send the hub a message about this rank."""
        self._send(line_of(kind, **values))

    def end_by(self, failure: Failure) -> None:
        """End this process for a reason that the hub cannot report."""
        if not self._is_over:
            # If the hub woke up, it would take the end of each rank for a death.
            self._send(line_of("failed", **failure.to_values()))
            self._hear(failure)

    def announce(self, failure: Failure) -> Failure:
        """Tell all ranks why this one ends; return the first failure of the run, which may be another rank's."""
        if self.first is None:
            self._send(line_of("failed", **failure.to_values()))
            self._heard.wait(_ANSWER_SECONDS)
        return self.first or failure

    def reported(self) -> None:
        """Tell all ranks that the user has been told."""
        self._send(line_of("reported"))

    def wait_reported(self, seconds: float) -> bool:
        """Return whether rank 0 says within so many seconds that it has reported."""
        return self._reported.wait(seconds)

    def leave(self) -> None:
        """Say good-bye, and stop listening."""
        self._is_over = True
        self._send(line_of("left"))

    def _listen(self) -> None:
        while not self._is_over:
            data = b""
            with contextlib.suppress(OSError):
                data = self._socket.recv(65_536)
            if not data:
                # The hub says good-bye when rank 0 is done.
                if not self._is_over:
                    self._hear(Failure(rank=0, code=FAILED, text=died(0, "", self._remark), silent=True))
                return
            for message in self._lines.add(data):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        self.messages += 1
        if kind == "failed":
            self._hear(Failure.from_values(message))
        elif kind == "met":
            self.neighbours = [RankProcess.from_values(values) for values in message["neighbours"]]
            self._met.set()
        elif kind == "explain":
            self._on_question([RankProcess.from_values(values) for values in message["processes"]])
        elif kind == "reported":
            self._reported.set()
        elif kind == "over":
            self._is_over = True

    def _hear(self, failure: Failure) -> None:
        if self.first is not None:
            return
        self.first = failure
        # Before the main thread can end: its state while it was stopped.
        if failure.awaits(self._rank):
            self._on_question([])
        self._heard.set()
        # A thread of its own: this one continues to listen.
        threading.Thread(target=self._on_failure, args=(failure,), name="watch end", daemon=True).start()

    def _send(self, message: bytes) -> None:
        # If the hub is gone, the listening thread sees it from the connection.
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(message)
