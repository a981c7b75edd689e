"""``RankTimer``: time an action on this rank while all other ranks do the same."""

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

_ROUNDS, _LONG = 3, 5
_TOGETHER_SECONDS, _MOST_TOGETHER = 0.05, 50


class RankTimer:
    """Timer for one rank's actions; all ranks must time the same actions in the same order."""

    def __init__(self, device: torch.device, *, round_seconds: float, cpu_time: bool = False) -> None:
        """Create a clock with rounds that repeat an action for about ``round_seconds``.

        With ``cpu_time``, count this process's CPU time over all threads, undisturbed by other programs; if ranks share
        cores, multiply it by the number of ranks per core.
        """
        self.device, self.round_seconds, self.cpu_time = device, round_seconds, cpu_time
        self.factor = 1.0
        # A process may be restricted to fewer cores than the machine has.
        if cpu_time:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self.factor = max(1.0, num_ranks() / cores)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return seconds per call: the median over rounds, without first-call setup.

        Only for actions on a single rank: each rank chooses its own repeat count, so an action in which ranks wait for
        one another would hang. Use ``together`` for those.
        """
        long_barrier()
        action()
        once = self._once(action, 1)
        if once > _LONG * self.round_seconds:
            # Long enough for disturbances not to matter.
            return min(once, self._once(action, 1))
        repeats = max(1, int(self.round_seconds / max(once, 1e-9)))
        return statistics.median(self._once(action, repeats) for _ in range(_ROUNDS))

    def together(self, action: Callable[[], Any]) -> float:
        """Like ``seconds``, for an action in which ranks wait for one another: all ranks repeat it equally often."""
        # The first call connects and allocates.
        action()
        long_barrier()
        # Ranks measure different seconds; the slowest one sets the repeat count for all.
        once = torch.tensor([self._once(action, 1)], dtype=torch.float64, device=self.device)
        Communicator().all_reduce(once, world_group(), operation="agreeing on a call count", largest=True)
        repeats = min(max(1, int(_TOGETHER_SECONDS / max(once.item(), 1e-6))), _MOST_TOGETHER)
        times = []
        for _ in range(_ROUNDS):
            long_barrier()
            times.append(self._once(action, repeats))
        return statistics.median(times)

    def once(self, action: Callable[[], Any]) -> float:
        """Return the seconds for a single call."""
        return self._once(action, 1)

    def _once(self, action: Callable[[], Any], repeats: int) -> float:
        """Return mean seconds per call over ``repeats`` calls."""
        # GPU calls return early: synchronize so that earlier work is excluded and these calls are complete.
        self._finish()
        start = self._now()
        for _ in range(repeats):
            action()
        self._finish()
        return self.factor * (self._now() - start) / repeats

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _now(self) -> float:
        if self.cpu_time:
            return time.process_time()
        return time.perf_counter()
