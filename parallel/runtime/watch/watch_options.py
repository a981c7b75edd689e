"""Options for a rank's watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallel.runtime.watch.stall_detection import SHARE, WARN_SHARE

_QUICKEST = 0.1
_HEARTBEAT_RATE = 100
"""Heartbeats that the coordinator receives in total: a hundredth of rank 0's time."""


def _no_op() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options for a rank's watch; times in seconds."""

    rank: int
    world_size: int
    timeout: float
    """How long ranks wait for one another in a collective (``run.timeout_seconds``)."""
    rendezvous_seconds: float = 45.0
    """How long ranks wait for the last one at rendezvous (``run.meet_seconds``)."""
    version: str = ""
    """Code version, equal on all ranks."""
    folder: Path | None = None
    """Folder for stacks; None if the run has no folder."""
    hint: str = ""
    """Appended to the message about a rank that died without one."""
    last_act: Callable[[], None] = _no_op
    """Called before any rank's failure ends this process."""
    spins: bool = False
    """True if a core is busy even while waiting for a device, as with CUDA."""

    @property
    def limit(self) -> float:
        """Seconds that a rank may be silent, wait or be idle."""
        return SHARE * self.timeout

    @property
    def warn_seconds(self) -> float:
        """Seconds that others wait until a warning names the rank."""
        return WARN_SHARE * self.timeout

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between a rank's heartbeats: at least thirty per timeout, and at most as many as the coordinator can
        process.
        """
        slowest = max(1.0, self.world_size / _HEARTBEAT_RATE)
        return min(max(self.timeout / 30, _QUICKEST), slowest)
