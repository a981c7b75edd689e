"""What a step usually takes, and which steps took so much more that the rest was no training."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

WINDOW = 100
"""Steps of the attempt that say what is usual: the last ones."""
LEAST = 8
"""With fewer of them nothing is a stall."""
STALL_RATIO = 2.0
"""A step is stalled that takes more than so many times what is to be expected of it …"""
STALL_SECONDS = 1.0
"""… and at least so much more: short steps of a busy machine differ by more than twice without any reason."""


class Median:
    """The median of the last values."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size, self._values, self._sorted = size, deque[float](), list[float]()

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Take in a value; the oldest goes where there are too many."""
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    @property
    def value(self) -> float:
        """0 without any value."""
        if not self._sorted:
            return 0.0
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2


class UsualStep:
    """The steps of one attempt, one after the other."""

    def __init__(self) -> None:
        self._seconds, self._rates = Median(), Median()
        self._first: tuple[float, float] | None = None
        self.warm_up = 0.0
        """What the first step took beyond the steps after it: it compiles, and touches all memory first. 0 as long as
        none has come; settled with the eighth."""

    def see(self, seconds: float, work: float) -> float:
        """Take in a step that computed ``work`` FLOPs (of any unit, 0: not known); returns its stalled seconds."""
        if self._first is None:
            self._first = seconds, work
            return 0.0
        stalled = 0.0
        if len(self._seconds) >= LEAST:
            beyond = seconds - self._expected(work)
            if beyond > STALL_SECONDS and seconds > STALL_RATIO * (seconds - beyond):
                stalled = beyond
        is_settled = len(self._seconds) >= LEAST
        self._seconds.add(seconds)
        if work > 0 and seconds > 0:
            self._rates.add(work / seconds)
        if not is_settled:
            self.warm_up = max(0.0, self._first[0] - self._expected(self._first[1]))
        return stalled

    def _expected(self, work: float) -> float:
        """Seconds of a step like the others, or, where it has more to compute than they, at their speed."""
        # A row of one long document has many times the attention of a row of short ones: that is no stall.
        rate = self._rates.value
        if work > 0 and rate > 0:
            return max(self._seconds.value, work / rate)
        return self._seconds.value
