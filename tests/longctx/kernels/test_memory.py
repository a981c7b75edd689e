"""Fresh memory is what was asked for, however large."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from longctx.kernels import memory
from longctx.kernels.memory import fresh, mapped


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, 1024, 513)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_fresh_tensors(shape, dtype, monkeypatch):
    for advice in (memory._madvise(), None):
        monkeypatch.setattr(memory, "_madvise", lambda advice=advice: advice)
        made = fresh(shape, dtype=dtype)
        assert made.shape == shape
        assert made.is_contiguous()
        assert torch.equal(made.fill_(3), torch.full(shape, 3, dtype=dtype))


def test_large_ones_are_asked_for_in_huge_pages_and_no_others(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *given: asked.append(given))
    fresh((1 << 19,), dtype=torch.float32)
    assert not asked
    large = fresh((1 << 21,), dtype=torch.float32)
    [(start, length, _)] = asked
    assert large.data_ptr() <= start < start + length <= large.data_ptr() + large.nbytes
    assert length > large.nbytes - 2 * 4096


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, 1024, 1025)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_mapped_tensors_are_zeros_that_can_be_written(shape, dtype):
    made = mapped(shape, dtype=dtype)
    assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    assert made.is_contiguous()
    made.fill_(3)
    assert torch.equal(made, torch.full(shape, 3, dtype=dtype))


def test_a_mapped_tensor_gives_its_memory_back_at_once():
    before = resident_bytes()
    made = [mapped((1 << 20,), dtype=torch.float64).fill_(1) for _ in range(16)]
    assert resident_bytes() - before > 100 << 20
    view = made[3][5:]
    del made
    assert resident_bytes() - before < 16 << 20
    assert view.sum() == len(view)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE
