"""Observation of this process by the watch: the marks of the main thread, and signs that it works."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from parallel.runtime.spans import Doing
from parallel.runtime.watch.judge import PATIENT, TIMED, WORKS, RankState

_BUSY = 0.02
"""Share of one core that a process uses which works. The watch itself uses a thousandth."""
_BUSY_BYTES = 16_384
"""Bytes through files, between two looks, of a process that reads or writes. To look takes some hundreds."""
_CHILDREN_AFTER = 2.0
"""Seconds without a sign of work of its own after which a process looks for one of the compilers it has started."""
_COLLECTIVES = "/torch/distributed/"
_DEEPSPEED = "/deepspeed/"


class AwakeClock:
    """Clock of the seconds in which this process ran: those for which it was stopped do not count."""

    def __init__(self, longest: float) -> None:
        """Leave out more than ``longest`` seconds between two looks at the clock: the process was stopped."""
        self._longest, self._last, self.seconds = longest, time.monotonic(), 0.0
        self.woke = 0.0
        """When the process last went on."""

    def tick(self) -> float:
        """Return the seconds up to now."""
        now = time.monotonic()
        if now - self._last <= self._longest:
            self.seconds += now - self._last
        else:
            self.woke = self.seconds
        self._last = now
        return self.seconds


class Sampler:
    """Observer of the main thread, in another thread, a few times in a time-out.

    The main thread makes *progress* when it leaves a mark. If it does not wait for other ranks, it also does so when
    its Python code moves on, or when the process, or a compiler that it has started, uses a core or moves bytes through
    files: that is how building a model or hashing a large file look from outside.
    """

    def __init__(self, doing: Doing, *, spins: bool) -> None:
        """With ``spins`` a core is busy also while this process waits for its device, so a busy core shows nothing."""
        self._doing, self._spins = doing, spins
        self._process, self._main = psutil.Process(), threading.main_thread().ident
        self._place: Any = None
        self._count = self._wait_count = -1
        self._since = self._waits_since = self._moved = 0.0
        self._used, self._bytes, self._looked = 0.0, 0, 0.0
        # Seconds used by its children at the last look for them; None if none was made since there was work.
        self._used_below: float | None = None

    def look(self, now: float) -> RankState:
        """Return the state of this process at ``now``, by an ``AwakeClock``."""
        doing, frame = self._doing, sys._current_frames().get(self._main or 0)
        place = (id(frame.f_code), frame.f_lasti) if frame is not None else None
        # The main thread's last instruction: in a call into a library it stays where it is.
        has_moved, is_busy = place != self._place, self._is_busy(now)
        self._place = place
        if doing.count != self._count:
            self._count, self._since, self._moved = doing.count, now, now
        kind = self._kind(frame, has_moved or is_busy)
        if kind == WORKS and (has_moved or is_busy):
            self._moved = now
        # One wait: the same mark and, as far as was seen, the same place in the code all the time.
        if kind == WORKS or has_moved or self._wait_count != self._count:
            self._waits_since = now
        self._wait_count = self._count
        return RankState(
            what=doing.describe(),
            step=doing.step,
            count=doing.count,
            kind=kind,
            held=now - self._since,
            waited=now - self._waits_since,
            quiet=now - self._moved,
            disk=doing.disk,
        )

    def _kind(self, frame: FrameType | None, works: bool) -> str:
        """Return the kind of the main thread's state, by its marks or by the code that it is in."""
        if self._doing.patient:
            return PATIENT
        if self._doing.wait:
            return TIMED
        if frame is None:
            return WORKS
        file = frame.f_code.co_filename
        # A library that communicates for itself leaves no mark. Its own arithmetic keeps a core busy, a wait does not.
        if _COLLECTIVES in file or (_DEEPSPEED in file and not works):
            return TIMED
        return WORKS

    def _is_busy(self, now: float) -> bool:
        """Return whether the process, or a compiler of it, has used a core or moved bytes since the last look."""
        seconds, self._looked = now - self._looked, now
        used, moved = self._seconds_used(), self._bytes_moved()
        busy = used - self._used > _BUSY * seconds or moved - self._bytes > _BUSY_BYTES
        # Compilers are other processes. The search for them takes a while, so it is made only if nothing moves.
        if not busy and now - self._moved > _CHILDREN_AFTER:
            before, self._used_below = self._used_below, self._used_by_children()
            # The seconds used before the first look tell nothing about now.
            busy = before is not None and self._used_below - before > _BUSY * seconds
            # The search reads a file of every process of the machine: that is no work of this one.
            used, moved = self._seconds_used(), self._bytes_moved()
        else:
            self._used_below = None
        self._used, self._bytes = used, moved
        return busy

    def _seconds_used(self) -> float:
        """Return seconds of a core, of all threads of this process; 0 if they show nothing."""
        if self._spins:
            return 0.0
        return time.process_time()

    def _used_by_children(self) -> float:
        total = 0.0
        with contextlib.suppress(psutil.Error):
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    times = child.cpu_times()
                    total += times.user + times.system
        return total

    def _bytes_moved(self) -> int:
        """Return the bytes that the process has read from files and written to them; 0 if the system has no count."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            read, written = Path("/proc/self/io").read_text().splitlines()[:2]
            return int(read.split()[1]) + int(written.split()[1])
        return 0
