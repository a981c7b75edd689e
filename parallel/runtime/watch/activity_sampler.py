"""Sampling of this process by the watch: the main thread's marks, and evidence that it works."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from parallel.runtime.activity import Activity
from parallel.runtime.watch.stall_detection import PATIENT, TIMED, WORKS, RankState

_BUSY = 0.02
"""Fraction of one core used by a working process. The watch itself uses a thousandth."""
_BUSY_BYTES = 16_384
"""Bytes through files between two samples in a process that does I/O. Sampling itself takes some hundreds."""
_CHILDREN_AFTER = 2.0
"""Seconds without evidence of its own work before a process checks its child compilers."""
_COLLECTIVES = "/torch/distributed/"
_DEEPSPEED = "/deepspeed/"


class AwakeClock:
    """Clock that counts only seconds in which this process ran, not those in which it was stopped."""

    def __init__(self, longest: float) -> None:
        """Skip intervals longer than ``longest`` seconds between two ticks: the process was stopped."""
        self._longest, self._last, self.seconds = longest, time.monotonic(), 0.0
        self.woke = 0.0
        """Time at which the process last resumed."""

    def tick(self) -> float:
        """Return the seconds counted so far."""
        now = time.monotonic()
        if now - self._last <= self._longest:
            self.seconds += now - self._last
        else:
            self.woke = self.seconds
        self._last = now
        return self.seconds


class ActivitySampler:
    """Sampler for the main thread, run in another thread a few times per timeout.

    The main thread makes *progress* when it leaves a mark. If it does not wait for other ranks, it also does so when
    its Python code advances, or when the process, or a compiler it started, uses a core or moves bytes through files:
    building a model or hashing a large file looks like this from outside.
    """

    def __init__(self, activity: Activity, *, spins: bool) -> None:
        """Set ``spins`` if a core is busy even while the process waits for its device: CPU use proves no work then."""
        self._activity, self._spins = activity, spins
        self._process, self._main = psutil.Process(), threading.main_thread().ident
        self._place: Any = None
        self._count = self._wait_count = -1
        self._since = self._waits_since = self._moved = 0.0
        self._used, self._bytes, self._last_sample = 0.0, 0, 0.0
        # CPU seconds used by its children at the last check; None if not checked since the last evidence of work.
        self._used_below: float | None = None

    def sample(self, now: float) -> RankState:
        """Return this process's state at ``now``, measured by an ``AwakeClock``."""
        activity, frame = self._activity, sys._current_frames().get(self._main or 0)
        place = (id(frame.f_code), frame.f_lasti) if frame is not None else None
        # Compare the main thread's last instruction; it stays the same during a library call.
        has_moved, is_busy = place != self._place, self._is_busy(now)
        self._place = place
        if activity.count != self._count:
            self._count, self._since, self._moved = activity.count, now, now
        kind = self._kind(frame, has_moved or is_busy)
        if kind == WORKS and (has_moved or is_busy):
            self._moved = now
        # Same wait: the same mark and, as far as sampled, the same code position all the time.
        if kind == WORKS or has_moved or self._wait_count != self._count:
            self._waits_since = now
        self._wait_count = self._count
        return RankState(
            activity=activity.describe(),
            step=activity.step,
            count=activity.count,
            kind=kind,
            held=now - self._since,
            waited=now - self._waits_since,
            quiet=now - self._moved,
            disk=activity.disk,
        )

    def _kind(self, frame: FrameType | None, works: bool) -> str:
        """Classify the main thread's state by its marks or by the code it is in."""
        if self._activity.patient:
            return PATIENT
        if self._activity.wait:
            return TIMED
        if frame is None:
            return WORKS
        file = frame.f_code.co_filename
        # Libraries that communicate by themselves leave no mark. Their arithmetic keeps a core busy, their waits do
        # not.
        if _COLLECTIVES in file or (_DEEPSPEED in file and not works):
            return TIMED
        return WORKS

    def _is_busy(self, now: float) -> bool:
        """Return True if the process, or a child compiler, has used a core or moved bytes since the last sample."""
        seconds, self._last_sample = now - self._last_sample, now
        used, moved = self._seconds_used(), self._bytes_moved()
        busy = used - self._used > _BUSY * seconds or moved - self._bytes > _BUSY_BYTES
        # Compilers are child processes. Searching for them is slow, so it is done only without other evidence of work.
        if not busy and now - self._moved > _CHILDREN_AFTER:
            before, self._used_below = self._used_below, self._used_by_children()
            # CPU time used before the first check is no evidence for now.
            busy = before is not None and self._used_below - before > _BUSY * seconds
            # The search itself reads one file per process on the machine: exclude that from this process's work.
            used, moved = self._seconds_used(), self._bytes_moved()
        else:
            self._used_below = None
        self._used, self._bytes = used, moved
        return busy

    def _seconds_used(self) -> float:
        """Return core seconds over all threads in this process; 0 if CPU usage proves no work."""
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
        """Return the bytes that the process has read from and written to files; 0 if the system does not count them."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            read, written = Path("/proc/self/io").read_text().splitlines()[:2]
            return int(read.split()[1]) + int(written.split()[1])
        return 0
