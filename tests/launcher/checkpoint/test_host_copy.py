"""The memory of a checkpoint's copy beside a GPU: what is page-locked, and when it is read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from launcher.checkpoint.host_copy import HostCopy
from parallel.zero.zero_state import StatePiece

GPU = torch.device("cuda:3")
PIECES = [StatePiece("a", "master", 0, 5), StatePiece("b", "master", 0, 1000), StatePiece("b", "exp_avg", 0, 1000)]


class LateCopies(TorchDispatchMode):
    """Copies of a GPU's stream: in the order of its computation, and done when the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        # The stream's own order: what comes later in it cannot change what is copied.
        self.started.append((target.fill_(torch.nan), source.clone()))
        return target

    def finish(self, device: torch.device) -> None:
        assert device == GPU
        with _disable_current_modes():
            for target, source in self.started:
                target.copy_(source)
        self.started.clear()


class Cudart:
    """Stands for CUDA's runtime: the ranges of memory that are locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.device: torch.device | None = None
        self.answer = 0

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.device = device
        yield
        self.device = None

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert self.device == GPU, "a context on another rank's GPU"
        assert flags == 1
        self.locked[address] = num_bytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    def check(self, answer: int) -> None:
        if answer:
            raise RuntimeError(f"CUDA error {answer}")


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    found = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", found.on)
    monkeypatch.setattr(torch.cuda, "check_error", found.check)
    return found


def test_the_copy_is_read_when_the_device_has_come_to_it(cudart: Cudart, monkeypatch: pytest.MonkeyPatch):
    copy, late = HostCopy(PIECES, GPU), LateCopies()
    monkeypatch.setattr(torch.cuda, "synchronize", late.finish)
    for _ in range(2):
        values = [torch.randn(piece.numel) for piece in PIECES]
        with late:
            held = copy.fill(PIECES, (x.clone() for x in values))
            # Anything that is read before the wait is NaN.
            assert all(torch.equal(x, y) for x, y in zip(held, values, strict=True))


def test_the_memory_is_locked_as_it_is_and_unlocked_before_it_goes(cudart: Cudart):
    """Twelve bytes a parameter, and a value for each odd piece: a power of two would be up to twice as many."""
    copy = HostCopy(PIECES, GPU)
    odd = sum(piece.numel % 2 for piece in PIECES)
    assert list(cudart.locked.values()) == [4 * (2005 + odd)]
    del copy
    gc.collect()
    assert not cudart.locked


def test_memory_that_the_system_does_not_lock_is_none(cudart: Cudart):
    """As where there is too little: ``Copies.get`` answers None, and training waits for its saves."""
    cudart.answer = 2
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        HostCopy(PIECES, GPU)


def test_on_a_cpu_nothing_is_locked(cudart: Cudart):
    values = [torch.randn(piece.numel) for piece in PIECES]
    held = HostCopy(PIECES, torch.device("cpu")).fill(PIECES, values)
    assert all(torch.equal(x, y) for x, y in zip(held, values, strict=True))
    assert not any(x.data_ptr() % 8 for x in held), "each begins at a word, by which it is summed"
    assert not cudart.locked
