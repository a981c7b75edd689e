"""A process group that blocks as NCCL does: a collective whose peer is gone never returns, and nothing interrupts it.

Neither an exception nor a signal nor a time-out ends the wait, and leaving the group waits for the other ranks. Bytes
travel by gloo underneath.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NAME = "stalling"
FOR_EVER = timedelta(days=1)
OPERATIONS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "send", "recv", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base"),
)
NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""What torch 2.13 calls some of them."""


LIBC = ctypes.CDLL(None)


def or_stall(function: Callable[[], Any]) -> Any:
    """What the function returns; where it raises this never returns. No signal is heard meanwhile."""
    mutex, results = ctypes.create_string_buffer(128), []

    def act() -> None:
        try:
            results.append(function())
        except RuntimeError:
            return
        LIBC.pthread_mutex_unlock(mutex)

    # The caller waits in C for a mutex that it holds, without Python's lock, until the other thread opens it.
    LIBC.pthread_mutex_lock(mutex)
    threading.Thread(target=act, daemon=True).start()
    LIBC.pthread_mutex_lock(mutex)
    return results[0]


class StallingWork(dist.Work):
    """A collective under way."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._inner = work

    def wait(self, timeout: timedelta = FOR_EVER) -> bool:
        return or_stall(self._inner.wait)

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class StallingGroup(dist.ProcessGroup):
    """The group; its first call must be a collective, as NCCL asks."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.options = SimpleNamespace(_timeout=timeout)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout=FOR_EVER)
        self._is_warm = False

    def _get_backend(self, device: torch.device) -> StallingGroup:
        return self

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        pass

    def start(self, name: str, *args: Any, **kwargs: Any) -> StallingWork:
        """Start an operation of gloo's."""
        if not self._is_warm and name in ("send", "recv"):
            raise RuntimeError("the first call on a group is a batch of sends: NCCL leaves undefined what that does")
        self._is_warm = True
        return StallingWork(or_stall(lambda: getattr(self.inner, name)(*args, **kwargs)))

    def shutdown(self) -> None:
        or_stall(lambda: self.inner.barrier().wait())


def _operation(name: str) -> Any:
    def start(self: StallingGroup, *args: Any, **kwargs: Any) -> StallingWork:
        return self.start(name, *args, **kwargs)

    return start


for _name in OPERATIONS:
    setattr(StallingGroup, _name, _operation(_name))
for _name, _old_name in NAMES.items():
    setattr(StallingGroup, _name, _operation(_old_name))


def install() -> None:
    """Make every group of this process one that stalls."""
    dist.Backend.register_backend(NAME, StallingGroup, devices=["cpu"])

    def replaced(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], str):
                args = (f"cpu:{NAME}", *args[1:])
            if isinstance(kwargs.get("backend"), str):
                kwargs["backend"] = f"cpu:{NAME}"
            return function(*args, **kwargs)

        return call

    for name in ("init_process_group", "new_group"):
        function = replaced(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)
