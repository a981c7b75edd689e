"""``Clock``: seconds of an action on this rank while all other ranks do the same."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from parallel.comm.communicator import Communicator
from parallel.comm.groups import world_group
from parallel.comm.world import meet_patiently, num_ranks

_ROUNDS, _LONG = 3, 5
_TOGETHER_SECONDS, _MOST_TOGETHER = 0.05, 50


class Clock:
    """Timer of one rank's actions; all ranks must time the same actions in the same order."""

    def __init__(self, device: torch.device, *, round_seconds: float, cpu_time: bool = False) -> None:
        """Create a clock whose rounds repeat an action for about ``round_seconds``.

        With ``cpu_time`` it counts the CPU time of this process's threads, undisturbed by other programs; if ranks
        share cores, that time is multiplied by the number of ranks per core.
        """
        self.device, self.round_seconds, self.cpu_time = device, round_seconds, cpu_time
        self.factor = 1.0
        # A process may be restricted to fewer cores than the machine has.
        if cpu_time:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self.factor = max(1.0, num_ranks() / cores)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return the seconds of one call, the median of rounds, without the preparations of a first call.

        Only for an action of a single rank: each rank chooses its own number of repeats, so an action in which ranks
        wait for one another would hang. Use ``together`` for those.
        """
        meet_patiently()
        action()
        once = self._once(action, 1)
        if once > _LONG * self.round_seconds:
            # Long enough for disturbances not to matter.
            return min(once, self._once(action, 1))
        repeats = max(1, int(self.round_seconds / max(once, 1e-9)))
        return statistics.median(self._once(action, repeats) for _ in range(_ROUNDS))

    def together(self, action: Callable[[], Any]) -> float:
        """Return the same for an action in which ranks wait for one another, repeated equally often on all of them."""
        # The first call connects and allocates.
        action()
        meet_patiently()
        # Ranks measure different seconds, so they agree on the number of calls.
        once = torch.tensor([self._once(action, 1)], dtype=torch.float64, device=self.device)
        Communicator().all_reduce(once, world_group(), doing="agreeing on a number of calls", largest=True)
        repeats = min(max(1, int(_TOGETHER_SECONDS / max(once.item(), 1e-6))), _MOST_TOGETHER)
        times = []
        for _ in range(_ROUNDS):
            meet_patiently()
            times.append(self._once(action, repeats))
        return statistics.median(times)

    def once(self, action: Callable[[], Any]) -> float:
        """Return the seconds of a single call."""
        return self._once(action, 1)

    def _once(self, action: Callable[[], Any], repeats: int) -> float:
        """Return the mean seconds of one of ``repeats`` calls."""
        # On a GPU calls return early: earlier work must be done before, and all of these calls must end.
        self._finish()
        begun = self._now()
        for _ in range(repeats):
            action()
        self._finish()
        return self.factor * (self._now() - begun) / repeats

    def _finish(self) -> None:
        """Wait until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _now(self) -> float:
        if self.cpu_time:
            return time.process_time()
        return time.perf_counter()
