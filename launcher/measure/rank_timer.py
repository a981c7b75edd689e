"""``RankTimer``: seconds per call of an action on this rank, under the load of all other ranks doing the same."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from parallel.comm.communicator import Communicator
from parallel.comm.process_groups import world_group
from parallel.comm.world import long_barrier, num_ranks

_NUM_ROUNDS = 3
_LONG_ROUNDS = 5
"""A single call that takes longer than this many rounds is not repeated in rounds."""
_COLLECTIVE_ROUND_SECONDS = 0.05
_MAX_COLLECTIVE_REPEATS = 50
"""Maximum calls per round."""


class RankTimer:
    """Timer for one rank's actions; all ranks must time the same actions in the same order, because it has barriers."""

    def __init__(self, device: torch.device, *, round_seconds: float, cpu_time: bool = False) -> None:
        """Create a timer whose rounds repeat an action for about ``round_seconds``; 0 means two single calls.

        With ``cpu_time``, count this process's CPU time over all threads, undisturbed by other programs, instead of
        wall time; if ranks share cores, multiply it by the number of ranks per core.
        """
        self.device, self.round_seconds, self.cpu_time = device, round_seconds, cpu_time
        self.oversubscription = 1.0
        """Ranks per core, at least 1; multiplies CPU time, which does not include waiting for a core."""
        if cpu_time:
            # A process may be restricted to fewer cores than the machine has.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self.oversubscription = max(1.0, num_ranks() / cores)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return seconds per call on this rank, without first-call setup: the median over rounds.

        For an action much longer than a round, return the shorter of two calls. Only for actions on a single rank: each
        rank chooses its own repeat count, so an action in which ranks wait for one another would hang. Use
        ``collective_seconds`` for those.
        """
        # Start together: ranks share cores, caches and memory, and a run keeps all of them busy.
        long_barrier()
        action()
        once = self._mean_seconds(action, 1)
        if once > _LONG_ROUNDS * self.round_seconds:
            # Disturbances average out within such a call; the minimum drops a rare long one.
            return min(once, self._mean_seconds(action, 1))
        # A coarse clock may count 0 seconds for one call.
        repeats = max(1, int(self.round_seconds / max(once, 1e-9)))
        return statistics.median(self._mean_seconds(action, repeats) for _ in range(_NUM_ROUNDS))

    def collective_seconds(self, action: Callable[[], Any]) -> float:
        """Return seconds per call on this rank, for an action in which ranks wait for one another. Collective.

        All ranks repeat the action equally often; each returns the median of its own rounds.
        """
        # The first call connects and allocates.
        action()
        long_barrier()
        # Ranks measure different seconds; the slowest one sets the repeat count for all.
        once = torch.tensor([self._mean_seconds(action, 1)], dtype=torch.float64, device=self.device)
        Communicator().all_reduce(once, world_group(), operation="agreeing on a call count", largest=True)
        repeats = min(max(1, int(_COLLECTIVE_ROUND_SECONDS / max(once.item(), 1e-6))), _MAX_COLLECTIVE_REPEATS)
        times = []
        for _ in range(_NUM_ROUNDS):
            # A rank that started early would count its wait for the others.
            long_barrier()
            times.append(self._mean_seconds(action, repeats))
        return statistics.median(times)

    def single_call_seconds(self, action: Callable[[], Any]) -> float:
        """Return the seconds for a single call, without warm-up, rounds or a barrier."""
        return self._mean_seconds(action, 1)

    def _mean_seconds(self, action: Callable[[], Any], repeats: int) -> float:
        """Return mean seconds per call over ``repeats`` calls."""
        # GPU calls return early: synchronize so that earlier work is excluded and these calls are complete.
        self._synchronize()
        start = self._now()
        for _ in range(repeats):
            action()
        self._synchronize()
        return self.oversubscription * (self._now() - start) / repeats

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _now(self) -> float:
        if self.cpu_time:
            return time.process_time()
        return time.perf_counter()
