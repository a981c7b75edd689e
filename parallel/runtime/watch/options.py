"""Options of a rank's watch, given when it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallel.runtime.watch.judge import LATE, SHARE

_QUICKEST = 0.1
_BEATS_A_SECOND = 100
"""That the hub hears, from all ranks together: a hundredth of rank 0's time."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of a rank's watch; times are in seconds."""

    rank: int
    world_size: int
    timeout: float
    """How long ranks wait for one another in a collective (``run.timeout_seconds``)."""
    meet: float = 45.0
    """How long ranks wait for the last one to come, at the start (``run.meet_seconds``)."""
    version: str = ""
    """Of the code: the same on all ranks."""
    folder: Path | None = None
    """Where stacks are written; None where the run has no folder."""
    remark: str = ""
    """Follows the message about a rank that died without one."""
    last_act: Callable[[], None] = _nothing
    """Called before a failure of any rank ends this process."""
    spins: bool = False
    """Whether a core is busy also while it waits for a device, as with CUDA."""

    @property
    def limit(self) -> float:
        """Seconds that a rank may be silent, wait or stand still."""
        return SHARE * self.timeout

    @property
    def late(self) -> float:
        """Seconds that others wait until a warning names the rank."""
        return LATE * self.timeout

    @property
    def beat(self) -> float:
        """Seconds between two messages of a rank: at least thirty in a time-out, and as many as the hub can hear."""
        slowest = max(1.0, self.world_size / _BEATS_A_SECOND)
        return min(max(self.timeout / 30, _QUICKEST), slowest)
