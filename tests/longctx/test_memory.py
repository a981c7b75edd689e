"""Fresh memory is what was asked for, however large."""

from __future__ import annotations

import pytest
import torch

from longctx.kernels import memory
from longctx.kernels.memory import fresh


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, 1024, 513)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_fresh_tensors(shape, dtype, monkeypatch):
    for advice in (memory._madvise(), None):
        monkeypatch.setattr(memory, "_madvise", lambda advice=advice: advice)
        made = fresh(shape, dtype=dtype, zero=True)
        assert torch.equal(made, torch.zeros(shape, dtype=dtype))
        assert made.is_contiguous()
        assert fresh(shape, dtype=dtype).shape == shape


def test_large_ones_are_asked_for_in_huge_pages_and_no_others(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *given: asked.append(given))
    fresh((1 << 19,), dtype=torch.float32)
    assert not asked
    large = fresh((1 << 21,), dtype=torch.float32)
    [(start, length, _)] = asked
    assert large.data_ptr() <= start < start + length <= large.data_ptr() + large.nbytes
    assert length > large.nbytes - 2 * 4096
