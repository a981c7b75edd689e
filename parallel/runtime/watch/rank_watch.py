"""One rank's part in the watch: it receives the first failure from any rank, and ends this process.

The main thread may be inside a collective that never returns and that no exception or signal can interrupt. So the
watch gives it a short time to end by itself, and then ends the process.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from longctx.errors import ClusterError
from parallel.runtime.watch.connection import Connection
from parallel.runtime.watch.ending_signals import EndingSignals, failure_of
from parallel.runtime.watch.failure import FIRST_ALIVE, SIGINT_CODE, Failure
from parallel.runtime.watch.heartbeats import HeartbeatLog
from parallel.runtime.watch.last_message import end_process, print_last_message
from parallel.runtime.watch.processes import is_first, kill, rouse, stopped_before_rendezvous, wait_for_exit
from parallel.runtime.watch.watch_coordinator import Coordinator
from parallel.runtime.watch.watch_options import WatchOptions

log = logging.getLogger(__name__)
# Without a run folder there is no log file, and another rank has already reported to the console.
log.addHandler(logging.NullHandler())

GRACE_SECONDS = 2.0
"""Grace period for a rank's main thread to end after another rank failed."""
SHARED_FAILURE_SECONDS = 3.0
"""How long rank 0 has to hit another rank's error itself, if all ranks are about to."""
REPORT_SECONDS = 10.0
"""How long a silent rank waits for rank 0 to report: launchers end all ranks once one has failed."""
_LAST_ACT_SECONDS = 1.0
_ROUSED_SECONDS = 1.5
"""Grace period for a rank that was stopped to end by itself, with the common exit code."""


class RankWatch:
    """This process as a member of the watch."""

    def __init__(
        self,
        connection: socket.socket,
        options: WatchOptions,
        *,
        key: str,
        hub: Coordinator | None = None,
        stop_text: str = "Interrupted.",
    ) -> None:
        """Join the watch; ``stop_text`` is the text after Ctrl-C."""
        self._rank, self._hub, self._options = options.rank, hub, options
        self._stop_text, self._has_reported = stop_text, False
        self._taking_over, self._main_is_ending = threading.Lock(), False
        self._telling, self._has_logged, self._speaks_for_another = threading.Lock(), False, False
        self.signals = EndingSignals(self._end_for_signal, grace_seconds=GRACE_SECONDS)
        self._heartbeat_times = HeartbeatLog(options)
        self.line = Connection(
            connection,
            options,
            key=key,
            on_failure=self._see_to_the_end,
            on_question=self._heartbeat_times.report_position,
        )
        # Last, since the first message may need everything above.
        self.line.start()

    def wait_for_all(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Return once all ranks have joined, calling ``meanwhile`` periodically. Raise ClusterError after a timeout."""
        # Add time for the coordinator, which reports the missing ranks itself.
        if not self.line.wait_met(self._options.rendezvous_seconds + REPORT_SECONDS, meanwhile):
            raise ClusterError(
                f"rank {self._rank} reached rank 0 but received no further message from it for "
                f"{self._options.rendezvous_seconds:.0f} s.\n"
                "Rank 0's process is stopped, or the network to its machine is cut: check there, then restart."
            )
        self._heartbeat_times.start(self.line)

    def take_over(self) -> None:
        """Let the main thread end the process: the watch no longer interrupts it, and only enforces the end."""
        with self._taking_over:
            self._main_is_ending = True

    @property
    def is_ending(self) -> bool:
        """True if this process is ending: by its main thread, or because a rank failed."""
        return self._main_is_ending or self.line.first is not None

    def may_report(self) -> bool:
        """Return True for the first caller: main thread and watch may both try to report a failure."""
        with self._taking_over:
            is_first = not self._has_reported
            self._has_reported = True
        return is_first

    def end(self, code: int) -> NoReturn:
        """Run the last act, wait until the other ranks have received this one's message, and end this process."""
        self._report_remote_failure()
        # Bounded: it may call a library that hangs.
        act = threading.Thread(target=self._options.last_act, daemon=True)
        act.start()
        act.join(_LAST_ACT_SECONDS)
        first = self.line.first
        if first is not None and first.awaits(self._rank):
            end_process(code)
        if first is not None:
            kill(first.kills or stopped_before_rendezvous(self.line.neighbors), after=_ROUSED_SECONDS)
        if self._hub is not None:
            self._hub.linger(GRACE_SECONDS)
        if self._speaks_for_another:
            # A later rank that arrives here late would see no running rank before it, and report again.
            wait_for_exit([one for one in self.line.neighbors if one.rank > self._rank], REPORT_SECONDS)
        end_process(code)

    def leave(self) -> None:
        """Leave the watch: this rank is done."""
        self.signals.stop()
        self._heartbeat_times.stop()
        self.line.leave()
        if self._hub is not None:
            self._hub.stop()

    def _see_to_the_end(self, failure: Failure) -> None:
        """End the process, unless the main thread does so in time."""
        self._report_remote_failure()
        if failure.awaits(self._rank):
            self.end(failure.code)
        rouse(failure.kills)
        if failure.is_shared:
            self._wait_for_the_same(failure)
        else:
            self._stop_main_thread(failure)
            time.sleep(GRACE_SECONDS)
        if self._main_is_ending:
            # The main thread reports or waits for a report; the code below is for the case that it cannot.
            time.sleep(REPORT_SECONDS + SHARED_FAILURE_SECONDS)
        self.end(_code_of(failure, received_sigint=self.signals.received_sigint))

    def _report_remote_failure(self) -> None:
        """Log why another rank ends this one, and report it if that rank cannot: once, before the process ends."""
        failure = self.line.first
        if failure is None or failure.rank == self._rank:
            return
        # Main thread and watch both get here, and either may end the process.
        with self._telling:
            if self._has_logged:
                return
            self._has_logged = True
            log.error("%s, and this rank stops:\n%s", failure.source(), failure.text)
            # After Ctrl-C every rank ends; a second Ctrl-C ends each silently, some slightly earlier.
            if not self.signals.received_sigint and self._speaks(failure):
                self._speaks_for_another = True
                print_last_message(failure.text)

    def _speaks(self, failure: Failure) -> bool:
        """Return True if this rank reports for one that cannot."""
        if failure.speaker == FIRST_ALIVE or (failure.cannot_report and failure.rank == 0):
            return self._rank != 0 and is_first(self._rank, self.line.neighbors)
        return failure.speaker == self._rank or (failure.cannot_report and self._rank == 0)

    def _wait_for_the_same(self, failure: Failure) -> None:
        """Give the main thread time to hit the same failure; if it does not, report in its place."""
        time.sleep(SHARED_FAILURE_SECONDS)
        if self._main_is_ending:
            return
        if self._rank != 0:
            self.line.wait_reported(REPORT_SECONDS)
        elif self.may_report():
            print_last_message(text_of(failure, self._rank))
            self.line.reported()

    def _stop_main_thread(self, failure: Failure) -> None:
        """Interrupt the main thread's Python code, so that progress bars and files are closed."""
        with self._taking_over:
            if failure.rank != self._rank and not self._main_is_ending:
                self.signals.interrupt_main()

    def end_for(self, failure: Failure) -> None:
        """End all ranks for a failure found by a thread on this rank, whatever its main thread does."""
        if self.line.announce(failure) == failure and not failure.is_shared:
            print_last_message(failure.text)

    def _end_for_signal(self, number: signal.Signals) -> None:
        if not self._main_is_ending:
            self.end_for(failure_of(number, rank=self._rank, stop_text=self._stop_text))


def _code_of(failure: Failure, *, received_sigint: bool) -> int:
    if failure.cannot_report and received_sigint:
        return SIGINT_CODE
    return failure.code


def text_of(failure: Failure, rank: int) -> str:
    """Return the message for a failure, prefixed with its rank if it is another one."""
    if failure.rank == rank or failure.code == SIGINT_CODE or not failure.text:
        return failure.text
    return f"rank {failure.rank}: {failure.text}"
