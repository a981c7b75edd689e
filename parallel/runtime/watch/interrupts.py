"""Hears each signal that asks for an end, also while the main thread is in a call that hears none."""

from __future__ import annotations

import _thread
import signal
import socket
import threading
from collections.abc import Callable

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for an end. Of those that a process has no handler for, the system ends it before any is told."""


class Interrupts:
    """Tells from a thread of its own which signal has come, and how many times."""

    def __init__(self, tell: Callable[[signal.Signals, int], None]) -> None:
        """Listen from now on, where the main thread calls this: others cannot."""
        self._tell, self._own = tell, 0
        self._counts: dict[int, int] = dict.fromkeys(ENDING, 0)
        self._before: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        # Python writes the number of a signal there at once, and runs handlers only between two steps of its code.
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="watch interrupts", daemon=True).start()

    def interrupt_main(self) -> None:
        """Raise KeyboardInterrupt in the main thread, where it runs Python code; this one does not count."""
        self._own += 1
        _thread.interrupt_main()

    def stop(self) -> None:
        """Listen no more. The main thread calls this."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            self._before = None
            self._write.close()

    def _listen(self) -> None:
        while data := self._read.recv(64):
            for number in data:
                if number not in self._counts:
                    continue
                if number == signal.SIGINT and self._own:
                    self._own -= 1
                    continue
                self._counts[number] += 1
                self._tell(signal.Signals(number), self._counts[number])
