"""The coordinator's view of the ranks: which have joined, their states, and whether the run hangs.

It has no thread and no socket: the coordinator's thread calls it, with the ranks' messages and a few times per timeout.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parallel.runtime.listening import rendezvous_host
from parallel.runtime.watch.activity_sampler import AwakeClock
from parallel.runtime.watch.failure import FAILED, Failure, encode_message
from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.rendezvous_status import RendezvousStatus
from parallel.runtime.watch.stall_detection import RankState, Stall, detect_stall, slow_ranks
from parallel.runtime.watch.stall_report import Report, slow_rank_warning, stall_message
from parallel.runtime.watch.watch_options import WatchOptions

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())

_ANSWER_SECONDS = 1.0
"""How long the coordinator waits for the ranks' positions before it reports without them."""


class RankMonitor:
    """State machine for the watch: rendezvous, collection of heartbeats, and hang detection."""

    def __init__(
        self,
        options: WatchOptions,
        *,
        send: Callable[[int, bytes], None],
        fail: Callable[[Failure], None],
    ) -> None:
        """Set the callbacks: ``send`` sends a line to one rank; ``fail`` sends all ranks the reason for the end."""
        self._options, self._send, self._fail = options, send, fail
        self.roll = RendezvousStatus(options.world_size, options.version)
        # If this process itself was stopped, seconds without listening do not count.
        self._clock = AwakeClock(2 * options.heartbeat_seconds + 1.0)
        self._started = time.monotonic()
        self._states: dict[int, RankState] = {}
        self._last_received: dict[int, float] = {}
        self._has_met = self._is_over = False
        self._stall: Stall | None = None
        self._question_time = 0.0
        self._reports: dict[int, Report] = {}
        self._warned: dict[int, float] = {}

    def arrive(self, process: RankProcess) -> str:
        """Add a rank that joined; return the reason why it cannot belong to this run, or an empty text."""
        problem = self.roll.add(process)
        if problem:
            return problem
        self._last_received[process.rank] = self._clock.tick()
        if self.roll.is_complete:
            self._release_ranks()
        return ""

    def process_message(self, rank: int, message: dict[str, Any]) -> None:
        """Process a rank's message: a heartbeat, or the reply to a question."""
        # Even an unreadable reply proves that the rank is alive.
        self._last_received[rank] = self._clock.tick()
        if message["kind"] == "beat":
            self._states[rank] = RankState(**message["state"])
        elif message["kind"] == "report":
            states = {int(other): str(state) for other, state in message["states"].items()}
            self._reports[rank] = Report(where=str(message["where"]), states=states)

    def remove(self, rank: int) -> None:
        """Remove a rank that has left."""
        for table in (self._last_received, self._states):
            table.pop(rank, None)

    def check(self) -> None:
        """Check whether the run hangs. Call it a few times per timeout, after processing all messages."""
        now = self._clock.tick()
        if self._is_over:
            return
        if not self._has_met:
            self._call_roll()
        elif self._stall is not None:
            self._await_reports(self._stall)
        else:
            states = self._states_now(now)
            self._stall = detect_stall(states, self._options.limit)
            if self._stall is not None:
                self._ask(self._stall)
            else:
                self._warn(states)

    def _release_ranks(self) -> None:
        """Release all ranks, which have now joined, unless their code versions mismatch."""
        problem = self.roll.code_mismatch()
        if problem:
            self._end(problem)
            return
        self._has_met = True
        # Each rank is told only about its own machine; all-to-all information would grow quadratically. Rank 0 comes
        # last: it continues at once, and if it dies, this thread dies with it before it has told the others.
        for rank, process in sorted(self.roll.arrivals.items(), reverse=True):
            near = [vars(other) for other in self.roll.arrivals.values() if other.machine == process.machine]
            self._send(rank, encode_message("met", neighbours=near))

    def _call_roll(self) -> None:
        options = self._options
        if time.monotonic() - self._started < options.rendezvous_seconds:
            return
        # Ranks with other code may have joined, and the missing ones may have failed for the same reason.
        address = f"{rendezvous_host()}:{os.environ.get('MASTER_PORT')}"
        self._end(self.roll.code_mismatch() or self.roll.missing(options.rendezvous_seconds, address))

    def _states_now(self, now: float) -> dict[int, RankState]:
        """Return the ranks' last reported states, with the time since then."""
        silence = {rank: now - received for rank, received in self._last_received.items()}
        unknown = RankState(activity="starting", step=0, count=0, kind="works", held=0.0, waited=0.0, quiet=0.0)
        return {rank: replace(self._states.get(rank, unknown), silence=seconds) for rank, seconds in silence.items()}

    def _ask(self, stall: Stall) -> None:
        self._question_time, self._reports = time.monotonic(), {}
        named = [vars(self.roll.arrivals[rank]) for rank in stall.ranks if rank in self.roll.arrivals]
        for rank in self._last_received:
            self._send(rank, encode_message("explain", processes=named))

    def _await_reports(self, stall: Stall) -> None:
        """Report why the run ends, once the ranks have replied or had time to."""
        expected = {rank for rank in self._last_received if rank not in stall.ranks or self._is_responsive(rank)}
        if not expected <= self._reports.keys() and time.monotonic() - self._question_time < _ANSWER_SECONDS:
            return
        options, states = self._options, self._states_now(self._clock.tick())
        text = stall_message(
            stall,
            states,
            self._reports,
            self.roll.arrivals,
            timeout=options.timeout,
            folder=options.folder,
            hint=options.hint,
        )
        # A rank that has not replied cannot end itself, either.
        dumb = [vars(self.roll.arrivals[rank]) for rank in stall.ranks if rank not in self._reports]
        self._end(text, tuple(dumb))

    def _is_responsive(self, rank: int) -> bool:
        return self._clock.tick() - self._last_received[rank] < self._options.limit

    def _warn(self, states: dict[int, RankState]) -> None:
        """Warn about ranks that others wait for: once, and again when the delay has doubled."""
        # Ranks that were stopped together with this process have not waited for any other.
        if self._clock.seconds - self._clock.woke < 2 * self._options.heartbeat_seconds:
            return
        now = time.monotonic()
        named = slow_ranks(states, self._options.warn_seconds)
        for rank in [rank for rank in self._warned if rank not in named]:
            del self._warned[rank]
        due = tuple(rank for rank in named if now >= self._warned.get(rank, 0.0))
        if due:
            log.warning("%s", slow_rank_warning(due, states, self.roll.arrivals))
        for rank in due:
            lasted = max(states[rank].silence, states[rank].held, self._options.warn_seconds)
            self._warned[rank] = now + lasted

    def _end(self, text: str, to_kill: tuple[dict[str, Any], ...] = ()) -> None:
        self._is_over = True
        self._fail(Failure(rank=-1, code=FAILED, text=text, speaker=0, kills=to_kill))
