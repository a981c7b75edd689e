"""``Clock``: seconds of an action on this rank while every other rank does the same."""

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
    """Times actions of one rank; all ranks must ask for the same ones in the same order."""

    def __init__(self, device: torch.device, *, round_seconds: float, cpu_time: bool = False) -> None:
        """A round repeats its action for about ``round_seconds``.

        ``cpu_time`` counts what the threads of this process compute, and not what other programs take from them; ranks
        that share a core then count as often as they share it.
        """
        self.device, self.round_seconds, self.cpu_time = device, round_seconds, cpu_time
        self.factor = 1.0
        # A process may use fewer cores than the machine has.
        if cpu_time:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self.factor = max(1.0, num_ranks() / cores)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Of one call, the median of rounds. What a first call prepares is not in it.

        For an action of this rank alone: how often it is repeated is each rank's own affair. One in which ranks wait
        for one another would hang here; ``together`` is for those.
        """
        meet_patiently()
        action()
        once = self._once(action, 1)
        if once > _LONG * self.round_seconds:
            # Long enough to be told apart from what disturbs it.
            return min(once, self._once(action, 1))
        repeats = max(1, int(self.round_seconds / max(once, 1e-9)))
        return statistics.median(self._once(action, repeats) for _ in range(_ROUNDS))

    def together(self, action: Callable[[], Any]) -> float:
        """The same of an action in which ranks wait for one another: equally often on all of them."""
        # A first call connects, and allocates.
        action()
        meet_patiently()
        # Ranks see different seconds, so they agree on the number of calls.
        once = torch.tensor([self._once(action, 1)], dtype=torch.float64, device=self.device)
        Communicator().all_reduce(once, world_group(), doing="agreeing on a number of calls", largest=True)
        repeats = min(max(1, int(_TOGETHER_SECONDS / max(once.item(), 1e-6))), _MOST_TOGETHER)
        times = []
        for _ in range(_ROUNDS):
            meet_patiently()
            times.append(self._once(action, repeats))
        return statistics.median(times)

    def once(self, action: Callable[[], Any]) -> float:
        """Of a single call."""
        return self._once(action, 1)

    def _once(self, action: Callable[[], Any], repeats: int) -> float:
        """Of one of so many calls."""
        # On a GPU calls return before they are done: nothing of others may be left, and all of these must end.
        self._finish()
        begun = self._now()
        for _ in range(repeats):
            action()
        self._finish()
        return self.factor * (self._now() - begun) / repeats

    def _finish(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _now(self) -> float:
        if self.cpu_time:
            return time.process_time()
        return time.perf_counter()
