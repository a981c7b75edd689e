"""Listener for termination signals, including while the main thread is in a call that does not handle them."""

from __future__ import annotations

import _thread
import signal
import socket
import threading
import time
from collections.abc import Callable

from parallel.runtime.watch.failure import SIGINT_CODE, Failure
from parallel.runtime.watch.last_message import end_process

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Termination signals. Without a handler, the system ends the process before this listener runs."""


class EndingSignals:
    """Handler for termination signals: the first ends all ranks after a grace period, unless the main thread handles
    it.
    """

    def __init__(self, end: Callable[[signal.Signals], None], *, grace_seconds: float) -> None:
        """Start listening, if called from the main thread: other threads cannot.

        ``end`` is called in its own thread, after the main thread has had ``grace_seconds`` to end by itself.
        """
        self._end, self._grace_seconds, self._own = end, grace_seconds, 0
        self.received_sigint = False
        """True after a Ctrl-C."""
        self.deferred = False
        """True if the main thread handles the first signal, which then ends no process by itself."""
        self._before: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        # Python writes signal numbers to this socket immediately, while it runs handlers only between two bytecodes.
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="watch interrupts", daemon=True).start()

    def interrupt_main(self) -> None:
        """Raise KeyboardInterrupt in the main thread once it runs Python code; the listener ignores this signal."""
        self._own += 1
        _thread.interrupt_main()

    def stop(self) -> None:
        """Stop listening. Must be called from the main thread."""
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
                    self._handle_signal(signal.Signals(number))

    def _handle_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            if self.received_sigint:
                end_process(SIGINT_CODE)
            self.received_sigint = True
        if not self.deferred:
            threading.Thread(target=self._end_after_grace, args=(number,), daemon=True).start()

    def _end_after_grace(self, number: signal.Signals) -> None:
        time.sleep(self._grace_seconds)
        if not self.deferred:
            self._end(number)


def signal_text(number: signal.Signals) -> str:
    """Return the message to the user after a signal before the first step."""
    return f"Ended by {number.name} before the first step: no training state to save."


def failure_of(number: signal.Signals, *, rank: int, stop_text: str) -> Failure:
    """Build the failure that ends all ranks after a signal to one; ``stop_text`` is its text after Ctrl-C."""
    if number == signal.SIGINT:
        # A terminal sends it to every rank.
        return Failure(rank=rank, code=SIGINT_CODE, text=stop_text, is_shared=True)
    return Failure(rank=rank, code=128 + number, text=signal_text(number))
