"""Loops with identical steps on the device. A trace has no data, so one step represents many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor
from torch._subclasses import FakeTensor

T = TypeVar("T")

_times = 1


def in_a_trace_once(steps: Sequence[T], example: Tensor) -> Iterator[T]:
    """Yield all steps; if ``example`` is a fake tensor, yield the first, one for all in between, and the last."""
    global _times
    # the first and last step may be shorter than those in between
    if len(steps) < 4 or not isinstance(example, FakeTensor):
        yield from steps
        return
    yield steps[0]
    outer, _times = _times, _times * (len(steps) - 2)
    try:
        yield steps[1]
    finally:
        _times = outer
    yield steps[-1]


def times() -> int:
    """Return how often the current step would run with data."""
    return _times
