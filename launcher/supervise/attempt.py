"""One attempt: the command's exit code and duration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.cluster.sessions import SignalForwarder, run_in_group


@dataclass(frozen=True)
class Ending:
    """Result of an attempt."""

    code: int
    """The command's exit code; 128 plus the signal's number if a signal ended it."""
    seconds: float
    num_leftover: int
    """Processes that the command left running and that were then ended."""


def attempt(words: Sequence[str], stop: SignalForwarder) -> Ending:
    """Execute a command to its end, with output to our own streams. Raise LongCtxError if it cannot be started."""
    start_time = time.monotonic()
    code, left = run_in_group(words, stop)
    return Ending(code, time.monotonic() - start_time, left)
