"""One attempt: the command's exit code and duration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.cluster.sessions import Stop, run_command


@dataclass(frozen=True)
class Ending:
    """Result of an attempt."""

    code: int
    """The command's exit code; 128 plus the signal's number if a signal ended it."""
    seconds: float
    left_behind: int
    """Processes that the command left running and that were then ended."""


def attempt(words: Sequence[str], stop: Stop) -> Ending:
    """Run a command to its end, with output to our own streams. Raise LongCtxError if it cannot be started."""
    began = time.monotonic()
    code, left = run_command(words, stop)
    return Ending(code, time.monotonic() - began, left)
