"""Host memory in pages: what is written comes back, whatever runs first; and how much of the host it takes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longctx.model import async_copies as copies_module
from longctx.model.async_copies import LEAST_PAGE_BYTES, PAGE_BYTES, AsyncCopies, HostTensor, page_sizes
from longctx.model.chunks.disk import Disk
from tests.late_copies import LATE_ORDERS, late_copies

PAGES = [{"page_bytes": 1 << 20}, {"page_bytes": 256, "least_page_bytes": 64}]
"""All of a tensor in one, and rows that lie across several."""
MIB = 1 << 20
GPU = torch.device("cuda:1")


def host_tensor(values: torch.Tensor) -> HostTensor:
    return HostTensor(AsyncCopies(values.device), values.shape, values.dtype)


@pytest.mark.parametrize("order", LATE_ORDERS, ids="-".join)
@pytest.mark.parametrize("pages", PAGES, ids=["one page", "several pages"])
@pytest.mark.parametrize("rows", [1, 3])
def test_each_copy_runs_behind_those_that_it_must_not_pass(rows: int, pages: dict[str, int], order: tuple[str, str]):
    old, new = torch.randn(2, rows, 10, 7, dtype=torch.float64)
    early, late, whole = slice(0, 4), slice(4, 10), slice(0, 10)
    with late_copies(*order, **pages):
        host, copies = host_tensor(old), AsyncCopies(old.device)
        marks = [host.write(whole, old)]
        # Behind the copy that fills them.
        before = host.fetch(late)
        # Behind the copy that still reads what this one overwrites.
        tail = new[:, late].contiguous()
        marks.append(host.write(late, tail))
        after = [host.fetch(late), host.fetch(early), host.whole()]
        assert torch.equal(before.wait(), old[:, late])
        assert torch.equal(after[0].wait(), new[:, late])
        assert torch.equal(after[1].wait(), old[:, early])
        assert torch.equal(after[2].wait(), torch.cat([old[:, early], new[:, late]], 1))
        for mark in marks:
            copies.wait(mark)


@pytest.mark.parametrize("order", LATE_ORDERS, ids="-".join)
def test_memory_that_nobody_waits_for_is_given_away_behind_its_copy(order: tuple[str, str]):
    x = torch.randn(1, 10, 7)
    with late_copies(*order):
        host = host_tensor(x)
        mark = host.write(slice(0, 10), x)
        host.whole()  # dropped while it is on its way
        AsyncCopies(x.device).wait(mark)


def test_beside_a_gpu_each_direction_has_a_stream_and_pages_are_locked(monkeypatch: pytest.MonkeyPatch):
    """On tensors without data, with what stands for streams: what the device is asked for."""
    asked: list[str] = []
    copies_module.streams_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: asked.append(str(device)) or object())
    try:
        streams = copies_module.streams_of(GPU)
        assert streams is not None
        assert streams.to_host is not streams.to_device
        assert copies_module.streams_of(GPU) is streams, "one pair for all stores of a device"
        assert asked == ["cuda:1", "cuda:1"]
    finally:
        copies_module.streams_of.cache_clear()


def test_values_of_a_gpu_leave_it_for_locked_pages(monkeypatch: pytest.MonkeyPatch):
    locked: list[int] = []
    empty = torch.empty

    def watched(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            locked.append(args[0])
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", watched)
    with FakeTensorMode():
        x = empty(1, 3, MIB, dtype=torch.bfloat16, device=GPU)
        host = host_tensor(x)
        assert AsyncCopies(GPU).is_asynchronous
        assert host.write(slice(0, 3), x) is None, "without data there is nothing to wait for"
    assert locked == [4 * MIB, 2 * MIB]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(1, 9, 4), (2, 9, 3, 5), (5, 3), (1, 0, 4), (2, 0)], ids=str)
def test_every_dtype_and_shape_comes_back(shape: tuple[int, ...], dtype: torch.dtype):
    x = torch.randint(0, 100, shape).to(dtype)
    host = host_tensor(x)
    host.write(slice(0, shape[1]), x)
    assert torch.equal(host.whole().wait(), x)
    for token in range(shape[1]):
        tokens = slice(token, token + 1)
        assert torch.equal(host.fetch(tokens).wait(), x[:, tokens])


def test_no_more_is_taken_of_the_host_than_the_last_page_is_rounded_up():
    """1.2 million tokens of width 4096 in bfloat16 are 9.2 GiB; in one piece PyTorch would lock 16."""
    for num_bytes in (1_200_000 * 4096 * 2, 131_072 * 7168 * 2, 2 * PAGE_BYTES, 3 * MIB + 1, 63 * MIB):
        sizes = page_sizes(num_bytes)
        assert num_bytes <= sum(sizes) < num_bytes + LEAST_PAGE_BYTES
        # What PyTorch rounds a page-locked allocation up to.
        assert all(size & (size - 1) == 0 for size in sizes)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] <= PAGE_BYTES
    assert (page_sizes(0), page_sizes(5)) == ([], [5])


def test_a_read_does_not_wait_for_a_write_that_comes_later(tmp_path):
    """In the one worker such a write would stand behind its own reader."""
    disk, out, gate = Disk(tmp_path), torch.zeros(16), threading.Event()
    disk.write("place", [torch.ones(16)], lambda: None)
    read = disk.reader("place")
    disk.write("place", [torch.zeros(16)], gate.wait)
    opened = threading.Timer(5, gate.set)
    opened.start()
    read([out])
    assert torch.equal(out, torch.ones(16))
    opened.cancel()
    gate.set()
