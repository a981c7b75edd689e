"""Faults of a network, put between this rank and torch: what one rank sends, or what it receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from longctx.tensor_bytes import as_bytes
from parallel.comm.messages.kinds import Kind

Change = Callable[[list[Any], int], list[Any]]
"""From the operations of an exchange, and its number, to those that take place."""


def flip_bit(x: Tensor, bit: int) -> None:
    """Flip one bit of a tensor's memory, counted from its end where negative."""
    memory = as_bytes(x)
    bit %= 8 * memory.numel()
    memory[bit // 8] ^= 1 << bit % 8


@dataclass
class Seen:
    """Whether a fault came about, and when."""

    at: float = 0.0

    def now(self) -> None:
        if not self.at:
            self.at = time.perf_counter()


class _Spoilt:
    """An operation under way whose result one changes once it has arrived."""

    def __init__(self, work: Any, spoil: Callable[[], None]) -> None:
        self._work, self._spoil = work, spoil

    def wait(self) -> None:
        self._work.wait()
        self._spoil()


@contextmanager
def exchanges_changed(change: Change) -> Iterator[None]:
    """Point to point: what takes place of each exchange is what ``change`` makes of it."""
    start, number = dist.batch_isend_irecv, -1

    def started(ops: list[Any]) -> list[Any]:
        nonlocal number
        number += 1
        ops = change(list(ops), number)
        works = start(ops) if ops else []
        spoilt = [op for op in ops if hasattr(op, "spoil")]
        return [*works, *(_Spoilt(mock.Mock(), op.spoil) for op in spoilt)]

    with mock.patch.object(dist, "batch_isend_irecv", started):
        yield


def wrong_bytes(bit: int, exchange: int, seen: Seen) -> Change:
    """A bit of the first tensor that arrives in an exchange is flipped."""

    def change(ops: list[Any], number: int) -> list[Any]:
        arriving = [op for op in ops if op.op is dist.irecv]
        if number >= exchange and arriving and not seen.at:
            seen.now()
            arriving[0].spoil = lambda: flip_bit(arriving[0].tensor, bit)
        return ops

    return change


def delayed(seconds: float, exchange: int, seen: Seen) -> Change:
    """An exchange begins late on this rank."""

    def change(ops: list[Any], number: int) -> list[Any]:
        if number >= exchange and not seen.at:
            seen.now()
            time.sleep(seconds)
        return ops

    return change


def reordered(exchange: int, seen: Seen) -> Change:
    """Of an exchange the second tensor arrives as the first, and the first as the second."""

    def change(ops: list[Any], number: int) -> list[Any]:
        leaving = [op for op in ops if op.op is dist.isend]
        if number >= exchange and len(leaving) == 2 and not seen.at:
            seen.now()
            leaving[0].tensor, leaving[1].tensor = leaving[1].tensor, leaving[0].tensor
        return ops

    return change


def stale(exchange: int, seen: Seen, *, kind: Kind) -> Change:
    """From an exchange on, the first that sends what is of this kind sends what it sent the time before, once more."""
    before: list[Tensor] = []

    def change(ops: list[Any], number: int) -> list[Any]:
        leaving = [op for op in ops if op.op is dist.isend and op.tag // 4 == kind]
        if not leaving:
            return ops
        now = [op.tensor.clone() for op in leaving]
        if number >= exchange and before and not seen.at and before[0].shape == now[0].shape:
            seen.now()
            for op, old in zip(leaving, before, strict=True):
                op.tensor = old
        before[:] = now
        return ops

    return change


@contextmanager
def collective_spoilt(name: str, call: int, bit: int, seen: Seen) -> Iterator[None]:
    """A bit of what ``dist.NAME`` brings in one of its calls is flipped, in the last message of another rank."""
    real, calls = getattr(dist, name), -1

    def spoilt(received: Tensor, outgoing: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal calls
        work = real(received, outgoing, *args, **options)
        if not received.numel():
            return work
        calls += 1
        if calls < call or seen.at:
            return work
        seen.now()
        if work is None:
            flip_bit(received, bit)
            return work
        return _Spoilt(work, lambda: flip_bit(received, bit))

    with mock.patch.object(dist, name, spoilt):
        yield


def nothing_injected() -> Change:
    """All exchanges as they are."""
    return lambda ops, number: ops
