"""Copies as a GPU may run them, on a CPU: as late or as early as what they wait for allows.

The product's own code runs, with streams that are lists of jobs. The computation is the program itself. A job of a late
stream runs when somebody waits for an event behind it; a job of an early one at once, which is as soon as it can. What
a wait that is missing lets through is NaN: memory of the device that is freed before it was copied belongs to somebody
else, memory that is being filled holds nothing yet, page-locked memory begins with anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.model import async_copies
from longctx.model.async_copies import AsyncCopies, Streams

NOTHING = 255
"""Of all bytes: NaN in each dtype of numbers with a point, −1 in whole ones."""
LATE_ORDERS = [("late", "late"), ("late", "early"), ("early", "late"), ("early", "early")]
"""When copies to the host run, and those to the device."""
_LOCK = threading.RLock()


class LateStream:
    """One direction of copies: jobs in order."""

    def __init__(self, when: str, *, to_host: bool, problems: list[str]) -> None:
        self.is_early, self.to_host, self.problems = when == "early", to_host, problems
        self.jobs: list[Callable[[], Any]] = []
        self.done = 0
        self.follows_computation = False

    def wait_event(self, event: LateEvent) -> None:
        self.follows_computation |= event.stream is None
        self.put(event.happen)

    def record_event(self) -> LateEvent:
        self.follows_computation = False
        return LateEvent(self, len(self.jobs))

    def put(self, job: Callable[[], Any]) -> None:
        with _LOCK:
            self.jobs.append(job)
            if self.is_early:
                self.run(len(self.jobs))

    def run(self, upto: int) -> None:
        with _LOCK:
            while self.done < upto:
                self.jobs[self.done]()
                self.jobs[self.done] = _nothing
                self.done += 1

    def copy(self, target: Tensor, source: Tensor) -> None:
        """``target.copy_(source)``, later."""
        if not self.follows_computation:
            self.problems.append("copied before it was computed, or before the memory's last values were used")
        if self.to_host:
            device = Borrowed(source)
            if not target.is_contiguous():  # PyTorch waits, and lets the CPU spread the values
                self.run(len(self.jobs))
                target.copy_(source)
                return

            def job() -> None:
                values = device.tensor()
                if values is None:
                    target.fill_(NOTHING)
                else:
                    target.copy_(values)

        else:
            device = Borrowed(target.fill_(NOTHING))
            source = source.contiguous()  # PyTorch gathers them now, whatever is on its way there

            def job() -> None:
                values = device.tensor()
                if values is None:
                    self.problems.append("copied to the memory of somebody else")
                else:
                    values.copy_(source)

        self.put(job)


class LateEvent:
    """A place in a stream, or in the computation, which is there already."""

    def __init__(self, stream: LateStream | None = None, upto: int = 0) -> None:
        self.stream, self.upto = stream, upto

    def happen(self) -> None:
        if self.stream is not None:
            self.stream.run(self.upto)

    def synchronize(self) -> None:
        time.sleep(0.001)  # other threads go on meanwhile
        self.happen()


class Computation:
    """The stream that computes: whatever it was given is done."""

    def wait_event(self, event: LateEvent) -> None:
        event.happen()

    def record_event(self) -> LateEvent:
        return LateEvent()


class Borrowed:
    """A tensor on the device that a copy knows and does not hold."""

    def __init__(self, x: Tensor) -> None:
        self._alive = StorageWeakRef(x.untyped_storage())
        self._view = (x.storage_offset(), x.shape, x.stride())
        self._dtype = x.dtype

    def tensor(self) -> Tensor | None:
        """It; None if its memory is somebody else's."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._alive.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class _Deferred(TorchDispatchMode):
    """Gives copies to a stream."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.stream.copy(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def late_copies(
    to_host: str = "late", to_device: str = "late", *, page_bytes: int = 8192, least_page_bytes: int = 4096
) -> Iterator[None]:
    """Run copies in these orders, through small pages. AssertionError if one went to memory of somebody else."""
    problems: list[str] = []
    streams: Any = Streams(
        LateStream(to_host, to_host=True, problems=problems),  # type: ignore[arg-type]
        LateStream(to_device, to_host=False, problems=problems),  # type: ignore[arg-type]
    )
    computation = Computation()

    def context(stream: LateStream) -> AbstractContextManager:
        return _Deferred(stream)

    def new_page(self: AsyncCopies, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), NOTHING, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_copies, "streams_of", lambda device: streams)
        patch.setattr(async_copies, "PAGE_BYTES", page_bytes)
        patch.setattr(async_copies, "LEAST_PAGE_BYTES", least_page_bytes)
        patch.setattr(AsyncCopies, "new_page", new_page)
        patch.setattr(torch.cuda, "current_stream", lambda device: computation)
        patch.setattr(torch.cuda, "stream", context)
        yield
        for stream in streams:
            stream.run(len(stream.jobs))
    assert not problems, problems[0]


def _nothing() -> None:
    pass


def _record_stream(x: Tensor, stream: Any) -> None:
    if not isinstance(stream, LateStream):
        return _RECORD_STREAM(x, stream)
    return stream.put(lambda: x)


# For good: what a failed test still holds asks when it goes.
_RECORD_STREAM = Tensor.record_stream
Tensor.record_stream = _record_stream  # type: ignore[method-assign]
