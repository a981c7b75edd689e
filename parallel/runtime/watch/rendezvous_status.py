"""Rendezvous status at startup: ranks that have joined, with hosts and code versions, and missing ranks."""

from __future__ import annotations

from collections.abc import Mapping

from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.stall_detection import format_ranks

_LINES = 8
"""Maximum hosts listed in a message."""


class RendezvousStatus:
    """Expected ranks, and those that have joined."""

    def __init__(self, world_size: int, version: str) -> None:
        """Expect ``world_size`` ranks with ``version``, rank 0's code version."""
        self._world_size, self._version = world_size, version
        self.arrivals: dict[int, RankProcess] = {}

    @property
    def is_complete(self) -> bool:
        """True if every rank has joined."""
        return len(self.arrivals) == self._world_size

    def add(self, process: RankProcess) -> str:
        """Add a rank; return the reason why it cannot belong to this run, or an empty text."""
        if process.rank not in range(self._world_size):
            return (
                f"ClusterError: rank {process.rank} on {process.host} joined a run with {self._world_size} ranks. "
                "Start all hosts with one hostfile and one command."
            )
        # Keep the first one: it may belong to a running job.
        if process.rank in self.arrivals:
            existing = self.arrivals[process.rank]
            return (
                f"ClusterError: two processes are rank {process.rank}: {existing.pid} on {existing.host} and "
                f"{process.pid} "
                f"on {process.host}. Another run may use this port: choose another one (--master_port)."
            )
        self.arrivals[process.rank] = process
        return ""

    def code_mismatch(self) -> str:
        """Return the error text if ranks run different code than rank 0; otherwise empty."""
        others = {r: a for r, a in self.arrivals.items() if a.version != self._version}
        if not others:
            return ""
        lines = [f"  rank 0{self._host(0)}: {self._version}"]
        lines += [
            f"  {format_ranks(ranks)} on {host}: {version}" for (host, version), ranks in _by_host(others).items()
        ]
        return "\n".join(
            [
                "ClusterError: the ranks run different code:",
                *_truncate(lines),
                "Install the same package versions and sources on every host, then restart.",
            ]
        )

    def missing(self, seconds: float, address: str) -> str:
        """Return the error text about ranks that did not reach ``address`` within ``seconds``."""
        missing_ranks = [rank for rank in range(self._world_size) if rank not in self.arrivals]
        hosts = [f"  {format_ranks(ranks)} from {host}" for (host, _), ranks in _by_host(self.arrivals).items()]
        return "\n".join(
            [
                f"ClusterError: {format_ranks(missing_ranks)} of {self._world_size} did not join at {address} within "
                f"{seconds:.0f} s. Joined:",
                *_truncate(hosts),
                "A missing rank exited earlier, has a different --master_addr or --master_port, or cannot reach that "
                "address.\nIts own output shows which. If hosts start slowly, raise run.meet_seconds.",
            ]
        )

    def _host(self, rank: int) -> str:
        if rank in self.arrivals:
            return f" on {self.arrivals[rank].host}"
        return ""


def _by_host(arrivals: Mapping[int, RankProcess]) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for rank, process in sorted(arrivals.items()):
        found.setdefault((process.host, process.version), []).append(rank)
    return found


def _truncate(lines: list[str]) -> list[str]:
    if len(lines) <= _LINES:
        return lines
    return [*lines[:_LINES], f"  … and {len(lines) - _LINES} hosts more"]
