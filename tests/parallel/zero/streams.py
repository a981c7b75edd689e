"""A CPU whose DeepSpeed believes in streams: gradients that queued work uses, and those freed before it has run.

Operations still run at once. The gradients that one of them reads or writes on the reduction's stream are noted. If one
is dropped before the computation waits for that stream, and the stream was not recorded, PyTorch's allocator would give
its memory to the computation's next tensor of this size while the queued work still uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Use:
    """The last use of some memory by a stream that the computation has not waited for."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    time: int

    def is_dropped(self) -> bool:
        """Whether the program has no reference left: one is this object's."""
        return torch._C._storage_Use_Count(self.storage._cdata) == 1


@dataclass(eq=False)
class Stream:
    """A queue of work, and the memory that it uses."""

    spy: Spy
    uses: dict[int, Use] = field(default_factory=dict)

    def wait_stream(self, other: Stream) -> None:
        if self is self.spy.main:
            self.spy.wait(other, self.spy.time)

    def wait_event(self, event: Event) -> None:
        if self is self.spy.main:
            event.synchronize()

    def synchronize(self) -> None:
        self.spy.wait(self, self.spy.time)


class Event:
    """A moment in a stream."""

    def __init__(self, spy: Spy) -> None:
        self.spy, self.stream, self.time = spy, spy.main, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.time = stream or self.spy.now, self.spy.time

    def query(self) -> bool:
        return False  # as late as possible

    def synchronize(self) -> None:
        self.spy.wait(self.stream, self.time)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.spy.now).wait_event(self)


class Spy:
    """What has been queued, recorded and freed."""

    def __init__(self) -> None:
        self.main = self.now = Stream(self)
        self.watched = Stream(self)
        """The one that reduces gradients."""
        self.time = 0
        self.gradients: dict[int, torch.UntypedStorage] = {}
        """Memory of every gradient that backward made; kept, so that no address stands for two."""
        self.recorded: set[tuple[int, Stream]] = set()
        self.unrecorded: list[str] = []
        """Gradients that were dropped behind queued work without a record."""
        self.kept = 0
        """How many were dropped behind queued work with one."""

    def watch(self, stream: Stream) -> None:
        """Forget what was found, and look at the uses of this stream from now on."""
        self.watched, self.unrecorded, self.kept = stream, [], 0

    def arrive(self, gradient: Tensor) -> None:
        """Backward made this gradient: in freed memory of its size, if there is any that queued work will write to."""
        for use in self.dropped(recorded=False):
            if use.dtype == gradient.dtype and use.storage.nbytes() == gradient.nbytes:
                late = torch.empty(0, dtype=gradient.dtype)
                late.set_(use.storage, 0, gradient.shape)  # type: ignore[call-overload]
                gradient.copy_(late)
                break
        storage = gradient.untyped_storage()
        self.gradients[storage._cdata] = storage

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self.recorded.add((tensor.untyped_storage()._cdata, stream))

    def dropped(self, *, recorded: bool) -> list[Use]:
        """Gradients that the program dropped while the watched stream still uses them."""
        uses = self.watched.uses
        found = [memory for memory in uses if ((memory, self.watched) in self.recorded) == recorded]
        return [uses[memory] for memory in found if uses[memory].is_dropped()]

    def wait(self, stream: Stream, time: int) -> None:
        """The computation waits for what was queued on a stream up to this time."""
        if stream is self.watched:
            self.unrecorded += [f"{use.storage.nbytes()} bytes of {use.dtype}" for use in self.dropped(recorded=False)]
            self.kept += len(self.dropped(recorded=True))
            stream.uses = {memory: use for memory, use in stream.uses.items() if use.time > time}

    @contextmanager
    def queue(self, stream: Stream | None) -> Iterator[None]:
        """Operations within are queued on this stream."""
        before, self.now = self.now, stream or self.now
        try:
            if self.now is self.watched is not self.main:
                with Noting(self):
                    yield
            else:
                yield
        finally:
            self.now = before

    def new_stream(self, **_: Any) -> Stream:
        return Stream(self)

    def new_event(self, **_: Any) -> Event:
        return Event(self)


class Noting(TorchDispatchMode):
    """Notes which gradients operations use."""

    def __init__(self, spy: Spy) -> None:
        super().__init__()
        self.spy = spy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spy = self.spy
        spy.time += 1
        for x in tree_leaves((args, kwargs)):
            memory = x.untyped_storage()._cdata if isinstance(x, Tensor) else None
            if memory in spy.gradients:
                spy.now.uses[memory] = Use(spy.gradients[memory], x.dtype, spy.time)
        return func(*args, **(kwargs or {}))


def claim_streams() -> Spy:
    """Make DeepSpeed's accelerator of this process claim to have streams. For good: in a process of its own."""
    spy, accelerator = Spy(), type(get_accelerator())
    claims = {
        "is_synchronized_device": lambda self: False,
        "use_host_timers": lambda self: True,
        "Stream": property(lambda self: spy.new_stream),
        "Event": property(lambda self: spy.new_event),
        "stream": lambda self, stream: spy.queue(stream),
        "current_stream": lambda self, device_index=None: spy.now,
        "default_stream": lambda self, device_index=None: spy.main,
        "synchronize": lambda self, device_index=None: spy.watched.synchronize(),
    }
    for name, claim in claims.items():
        setattr(accelerator, name, claim)
    torch.Tensor.record_stream = lambda self, stream: spy.record(self, stream)  # type: ignore[assignment, method-assign]
    return spy
