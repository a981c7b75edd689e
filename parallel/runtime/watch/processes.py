"""A run's processes on one machine: their states, and how to end one that cannot end itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank's process, and its machine."""

    rank: int
    host: str
    machine: str
    """Equal if two ranks see each other's process ids: hosts may share a name, and containers a host."""
    pid: int
    started: float
    """Start time by the machine's own clock, since process ids are reused."""
    version: str = ""
    """Code version."""

    @staticmethod
    def of(pid: int, rank: int) -> RankProcess:
        """Return a process on this machine. Raise psutil.Error if it does not exist."""
        return RankProcess(rank=rank, host=socket.gethostname(), machine=_machine(), pid=pid, started=_started(pid))

    @staticmethod
    def own(rank: int, version: str = "") -> RankProcess:
        """Return this process, with its code version."""
        return replace(RankProcess.of(os.getpid(), rank), version=version)

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> RankProcess:
        """Build it from JSON values. Raise ValueError, KeyError or TypeError for invalid values."""
        return RankProcess(
            rank=int(values["rank"]),
            host=str(values["host"]),
            machine=str(values["machine"]),
            pid=int(values["pid"]),
            started=float(values["started"]),
            version=str(values["version"]),
        )

    def state(self) -> str:
        """Return ``"running"``, ``"stopped"`` or ``"gone"``; empty for a process on another machine."""
        if self.machine != _machine():
            return ""
        process = self._process()
        if process is None:
            return "gone"
        with contextlib.suppress(psutil.Error):
            status = process.status()
            if status in _STOPPED:
                return "stopped"
            if status not in _GONE:
                return "running"
        return "gone"

    def send(self, number: int) -> None:
        """Send a signal if it is another process on this machine; SIGKILL also reaches a stopped process."""
        process = self._process()
        if process is not None and self.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _process(self) -> psutil.Process | None:
        if self.machine != _machine():
            return None
        with contextlib.suppress(psutil.Error):
            if _started(self.pid) == self.started:
                return psutil.Process(self.pid)
        return None


def is_first(rank: int, neighbors: Sequence[RankProcess]) -> bool:
    """Return True if no earlier rank runs on this machine: the first on each reports for a silent rank 0."""
    return all(process.state() != "running" for process in neighbors if 0 < process.rank < rank)


def wait_for_exit(processes: Sequence[RankProcess], seconds: float) -> None:
    """Return once no process in the list runs on this machine, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while any(process.state() == "running" for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def stopped_before_rendezvous(neighbors: Sequence[RankProcess]) -> list[dict[str, Any]]:
    """Return stopped ranks in this run under the same launcher; empty after rendezvous."""
    found, names = [], ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    # After rendezvous, ranks know one another's process ids.
    if neighbors:
        return []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            # A process may end while it is queried, and another user's process is not readable.
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                environment = process.environ()
                if process.status() in _STOPPED and all(environment[name] == os.environ[name] for name in names):
                    found.append(vars(RankProcess.of(process.pid, int(environment["RANK"]))))
    return found


def rouse(processes: Sequence[Mapping[str, Any]]) -> None:
    """Resume stopped ranks, so that they receive the reason and end with its exit code."""
    _send(processes, signal.SIGCONT)


def kill(processes: Sequence[Mapping[str, Any]], *, after: float) -> None:
    """Kill ranks that have not ended ``after`` seconds: a launcher would wait for them."""
    # Ranks on other machines are ended there.
    local = [RankProcess.from_values(values) for values in processes]
    deadline = time.monotonic() + after
    while any(one.state() in ("running", "stopped") for one in local) and time.monotonic() < deadline:
        time.sleep(0.02)
    _send(processes, signal.SIGKILL)


def _send(processes: Sequence[Mapping[str, Any]], number: int) -> None:
    for values in processes:
        RankProcess.from_values(values).send(number)


def _machine() -> str:
    # A hostname may be shared by all containers in a cluster, and containers on one machine have separate process ids.
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _started(pid: int) -> float:
    """Return a process's start time. Raise psutil.Error if it does not exist."""
    # In clock ticks since boot, which a clock adjustment, as by NTP, does not change.
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return psutil.Process(pid).create_time()
