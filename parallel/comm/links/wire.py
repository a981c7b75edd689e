"""Both ways of sending to one other rank: gloo for CPU tensors, NCCL for those on a GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

_GLOO_FILE = re.compile(r"^\[\S*gloo\S*:\d+\] ")


class TooSlowError(Exception):
    """A wait that took too long, or a connection that broke."""


class Wire(Protocol):
    """Sends to one other rank and receives from it at the same time."""

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        ...

    def move(self, deadline: float, *, sent: Tensor | None = None, received: Tensor | None = None) -> None:
        """Send, receive, or both at once; returns when it is done. TooSlowError after ``deadline`` (monotonic)."""
        ...


class GlooWire:
    """Connections of their own between two ranks, so that what breaks here breaks nowhere else.

    gloo answers a time-out by closing all connections of the group.
    """

    device = torch.device("cpu")

    def __init__(self, store: Store, pair: tuple[int, int], rank: int, deadline: float) -> None:
        """Connect; both ranks call it with a ``store`` that they share. TooSlowError where that does not succeed."""
        self._place = pair.index(rank)
        left = max(deadline - time.monotonic(), 0.1)
        try:
            store = PrefixStore(f"gloo {pair[0]} {pair[1]}", store)
            group = ProcessGroupGloo(store, self._place, 2, timedelta(seconds=left))
        except RuntimeError as error:
            raise TooSlowError(f"gloo cannot connect: {first_line(error)}") from error
        # torch's stubs say less of it than it can do.
        self._group = cast(ProcessGroup, group)

    def move(self, deadline: float, *, sent: Tensor | None = None, received: Tensor | None = None) -> None:
        """As ``Wire`` says."""
        other = 1 - self._place
        works = []
        try:
            if received is not None:
                works.append(self._group.recv([received], other, 0))
            if sent is not None:
                works.append(self._group.send([sent], other, 0))
            for work in works:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise TooSlowError(first_line(error)) from error


class NcclWire:
    """Batches of send and receive in a group that is warm.

    NCCL cannot take a send back: after a TooSlowError this rank sends no more.
    """

    def __init__(self, group: ProcessGroup, other: int, device: torch.device) -> None:
        """``other`` is a rank of the world."""
        self._group, self._other, self.device = group, other, device

    def move(self, deadline: float, *, sent: Tensor | None = None, received: Tensor | None = None) -> None:
        """As ``Wire`` says: when the tensors are there, not only when the host has asked for it."""
        operations = []
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, self._other, self._group))
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent, self._other, self._group))
        try:
            works = dist.batch_isend_irecv(operations)
            wait_until(lambda: all(work.is_completed() for work in works), deadline)
        except RuntimeError as error:
            raise TooSlowError(first_line(error)) from error


def wait_until(is_done: Callable[[], bool], deadline: float) -> None:
    """Ask again and again, without a pause: microseconds are measured. TooSlowError after the deadline."""
    while not is_done():
        if time.monotonic() > deadline:
            raise TooSlowError("no answer")


def first_line(error: Exception) -> str:
    """What an error says first; libraries add a stack, and gloo names its own file before."""
    for line in str(error).splitlines():
        if said := _GLOO_FILE.sub("", line).strip():
            return said
    return type(error).__name__
