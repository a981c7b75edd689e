"""One rank's part in the watch: a thread that hears of the first failure of any rank, and ends this process.

The main thread may be inside of a collective that never returns, where no exception and no signal reaches it. So the
thread gives it a short time to end by itself, and then ends the process.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from parallel.runtime.watch.failure import INTERRUPTED, Failure, Lines, line_of
from parallel.runtime.watch.hub import Hub, died, keep_alive

log = logging.getLogger(__name__)
# Without a run folder there is no log file, and the console has heard it from another rank.
log.addHandler(logging.NullHandler())

GRACE_SECONDS = 2.0
"""How long the main thread of a rank has to end after another one failed."""
ALIKE_SECONDS = 3.0
"""How long rank 0 has to meet what another rank met, where all are about to meet it."""
REPORT_SECONDS = 10.0
"""How long a silent rank waits for rank 0 to report: launchers end all ranks as soon as one has failed."""
_ANSWER_SECONDS = 3.0
"""How long a failing rank waits for the hub to say whose failure was the first."""


class Member:
    """This process's connection to the hub, and the thread that listens."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        rank: int,
        token: str,
        hub: Hub | None = None,
        interrupted: str = "Interrupted.",
        speaks_for_rank_0: bool = False,
        last_act: Callable[[], None] = lambda: None,
        remark: str = "",
    ) -> None:
        """``interrupted`` is said after Ctrl-C. ``last_act`` is called before another rank's failure ends this one.

        ``speaks_for_rank_0``: this rank says so, should rank 0 die without a message; ``remark`` follows.
        """
        self._socket, self._rank, self._hub = connection, rank, hub
        self._interrupted, self._last_act, self._remark = interrupted, last_act, remark
        self._speaks_for_rank_0 = speaks_for_rank_0
        self._lines = Lines()
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._is_over = self._main_is_ending = False
        self._first: Failure | None = None
        self._heard, self._reported = threading.Event(), threading.Event()
        keep_alive(connection)
        self._send(line_of("hello", rank=rank, token=token, host=socket.gethostname()))
        self._signals = _Signals(self._count_interrupts)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    # ------------------------------------------------------------------------------------------- for the main thread

    @property
    def first(self) -> Failure | None:
        """The run's first failure, of any rank; None as long as there is none."""
        return self._first

    def wait(self, seconds: float) -> Failure | None:
        """The run's first failure, should one be heard of within so many seconds."""
        self._heard.wait(seconds)
        return self._first

    def announce(self, failure: Failure) -> Failure:
        """Tell all ranks why this one ends; returns the first failure of the run, which may be another rank's.

        From here on the caller ends the process, and the watch only sees to it that it does.
        """
        with self._ending:
            self._main_is_ending = True
        return self._announce(failure)

    def reported(self) -> None:
        """Tell all ranks that the user has been told."""
        self._send(line_of("reported"))

    def wait_reported(self, seconds: float = REPORT_SECONDS) -> bool:
        """Whether rank 0 tells within so many seconds that it has reported."""
        return self._reported.wait(seconds)

    def linger(self) -> None:
        """Wait for the other ranks to hear what this one said, before it ends."""
        if self._hub is not None:
            self._hub.linger(GRACE_SECONDS)

    def leave(self) -> None:
        """End the watch: this rank is done."""
        self._is_over = True
        self._signals.stop()
        self._send(line_of("left"))
        if self._hub is not None:
            self._hub.stop()

    # --------------------------------------------------------------------------------------------- the watch's threads

    def _listen(self) -> None:
        while not self._is_over:
            data = b""
            with contextlib.suppress(OSError):
                data = self._socket.recv(65_536)
            if not data:
                if not self._is_over:
                    text = died(0, "", self._remark)
                    self._hear(Failure(rank=0, code=1, text=text, silent=True))
                return
            for message in self._lines.add(data):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "failed":
            self._hear(Failure(**message))
        elif kind == "reported":
            self._reported.set()
        elif kind == "over":
            self._is_over = True

    def _hear(self, failure: Failure) -> None:
        if self._first is not None:
            return
        self._first = failure
        self._heard.set()
        # A thread of its own: this one goes on to listen.
        threading.Thread(target=self._see_to_the_end, args=(failure,), name="watch end", daemon=True).start()

    def _see_to_the_end(self, failure: Failure) -> None:
        """End the process, unless the main thread does so in time."""
        if failure.rank != self._rank:
            log.error("rank %d failed, and this rank stops:\n%s", failure.rank, failure.text)
        speaks = failure.silent and self._speaks(failure)
        if speaks:
            say(failure.text)
        if failure.alike:
            self._end_alike(failure)
        else:
            self._interrupt_main(failure)
            time.sleep(GRACE_SECONDS)
        if self._main_is_ending:
            # It has a message to write or to wait for; what follows is for the case that it cannot.
            time.sleep(REPORT_SECONDS + _ANSWER_SECONDS)
        self._end(failure)

    def _speaks(self, failure: Failure) -> bool:
        """Whether this rank says what a dead one cannot."""
        if failure.rank == 0:
            return self._speaks_for_rank_0
        return self._rank == 0

    def _end_alike(self, failure: Failure) -> None:
        """Let the main thread meet what another rank met; say it in its place where it does not come to that."""
        time.sleep(ALIKE_SECONDS)
        if self._main_is_ending:
            return
        if self._rank == 0:
            say(failure.text)
            self.reported()
        else:
            self._reported.wait(REPORT_SECONDS)

    def _end(self, failure: Failure) -> NoReturn:
        # Bounded: it may ask a library that is stuck.
        act = threading.Thread(target=self._last_act, daemon=True)
        act.start()
        act.join(1.0)
        self.linger()
        end_process(failure.code)

    def _interrupt_main(self, failure: Failure) -> None:
        """Let the main thread leave what it is in, where Python code runs: progress bars and files are closed."""
        with self._ending:
            if failure.rank != self._rank and not self._main_is_ending:
                self._signals.expect_one()
                _thread.interrupt_main()

    def _count_interrupts(self, count: int) -> None:
        """After the first Ctrl-C the main thread ends, or the watch where it cannot; the second ends at once."""
        if count > 1:
            end_process(INTERRUPTED)
        threading.Thread(target=self._end_interrupted, daemon=True).start()

    def _end_interrupted(self) -> None:
        time.sleep(GRACE_SECONDS)
        if self._main_is_ending:
            return
        self._announce(Failure(rank=self._rank, code=INTERRUPTED, text=self._interrupted, alike=True))

    def _announce(self, failure: Failure) -> Failure:
        if self._first is None:
            self._send(line_of("failed", **failure.to_values()))
            self._heard.wait(_ANSWER_SECONDS)
        return self._first or failure

    def _send(self, message: bytes) -> None:
        # Where the hub is gone, the connection says so to the listening thread.
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(message)


class _Signals:
    """Tells of each Ctrl-C, also while the main thread runs no Python code."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell, self._count, self._expected = tell, 0, 0
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, name="watch signals", daemon=True).start()

    def expect_one(self) -> None:
        """Not to count the next one: it is not the user's."""
        self._expected += 1

    def stop(self) -> None:
        """Count no more."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            self._before = None
            self._write.close()

    def _listen(self) -> None:
        while data := self._read.recv(64):
            for number in data:
                if number != signal.SIGINT:
                    continue
                if self._expected:
                    self._expected -= 1
                    continue
                self._count += 1
                self._tell(self._count)


def say(text: str) -> None:
    """Write to standard error, below whatever a progress bar has left there; nothing where ``text`` is empty."""
    if not text:
        return
    show_cursor = ""
    if sys.stderr.isatty():
        show_cursor = "\x1b[?25h"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{show_cursor}\n{text}\n\n")
        sys.stderr.flush()


def end_process(code: int) -> NoReturn:
    """End this process at once, whatever other threads and devices do; what was written is flushed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # Its handlers flush after each line; waiting for locks of threads that are stuck could hang.
    os._exit(code)
