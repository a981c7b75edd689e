"""The clocks that a timeline is kept by."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil


def process_age() -> float:
    """Seconds since this process was started."""
    try:
        # Ticks since the machine's start. psutil adds them to a time of day that is known to a second.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, since_boot() - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return max(0.0, time.time() - psutil.Process().create_time())


def since_boot() -> float:
    """Seconds since the machine's start, sleep included; 0 where the system does not say."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """What names the machine since its start; empty where the system has no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where times come from; a test has clocks of its own."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never go back."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970: anybody may set this clock while a run goes on."""
    since_boot: Callable[[], float] = since_boot
    boot_id: Callable[[], str] = boot_id
    age: Callable[[], float] = process_age
