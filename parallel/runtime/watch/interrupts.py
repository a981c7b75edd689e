"""Listener for signals that ask for an end, also while the main thread is in a call that handles none."""

from __future__ import annotations

import _thread
import signal
import socket
import threading
import time
from collections.abc import Callable

from parallel.runtime.watch.failure import INTERRUPTED, Failure
from parallel.runtime.watch.last_words import end_process

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for an end. Of those that a process has no handler for, the system ends it before any is told."""


class EndingSignals:
    """Handler of ending signals: the first ends all after a time of grace, unless the main thread sees to it."""

    def __init__(self, end: Callable[[signal.Signals], None], *, grace_seconds: float) -> None:
        """Listen from now on if the main thread calls this: other threads cannot.

        ``end`` is called in a thread of its own, after the main thread has had so many seconds to end by itself.
        """
        self._end, self._grace_seconds, self._own = end, grace_seconds, 0
        self.was_interrupted = False
        """Whether there was a Ctrl-C."""
        self.deferred = False
        """Whether the main thread sees to the first signal, which ends nothing by itself then."""
        self._before: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        # Python writes the number of a signal there at once, and runs handlers only between two steps of its code.
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="watch interrupts", daemon=True).start()

    def interrupt_main(self) -> None:
        """Raise KeyboardInterrupt in the main thread, once it runs Python code; this one does not count."""
        self._own += 1
        _thread.interrupt_main()

    def stop(self) -> None:
        """Stop listening. The main thread calls this."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            self._before = None
            self._write.close()

    def _listen(self) -> None:
        while data := self._read.recv(64):
            for number in data:
                if number == signal.SIGINT and self._own:
                    self._own -= 1
                elif number in ENDING:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            if self.was_interrupted:
                end_process(INTERRUPTED)
            self.was_interrupted = True
        if not self.deferred:
            threading.Thread(target=self._end_late, args=(number,), daemon=True).start()

    def _end_late(self, number: signal.Signals) -> None:
        time.sleep(self._grace_seconds)
        if not self.deferred:
            self._end(number)


def ended_by(number: signal.Signals) -> str:
    """Return the text for the user after a signal before the first step."""
    return f"Ended by {number.name} before the first step: there was nothing to save."


def failure_of(number: signal.Signals, *, rank: int, interrupted: str) -> Failure:
    """Return the failure that ends all ranks after a signal to one; ``interrupted`` is its text after Ctrl-C."""
    if number == signal.SIGINT:
        # A terminal sends it to every rank.
        return Failure(rank=rank, code=INTERRUPTED, text=interrupted, alike=True)
    return Failure(rank=rank, code=128 + number, text=ended_by(number))
