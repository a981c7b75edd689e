"""``as_bytes``: the memory of tensors of any shape and strides."""

from __future__ import annotations

import pytest
import torch

from longctx.tensor_bytes import as_bytes, rows_as_bytes

_NUMBERS = torch.arange(10)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous ones, as PyTorch calls them, whose strides are not always those of their shape."""
    x = _NUMBERS.to(dtype)
    return [
        x,
        x.view(2, 5),
        x[:0],
        x[3],
        x[::5][:1],
        x[:5].view(1, 5).T[:1],
        x.as_strided((0, 1), (1, 0)),
        x.as_strided((0,), (0,)),
        x.as_strided((1, 1), (7, 3), 4),
        x.new_empty(3, 0),
        x.new_empty(0, 3),
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.bool])
def test_bytes_are_the_memory_itself(dtype):
    for x in tensors(dtype):
        assert x.is_contiguous()
        memory = as_bytes(x)
        assert memory.shape == (x.numel() * x.itemsize,)
        assert memory.data_ptr() == x.data_ptr()
        assert torch.equal(memory.clone().view(dtype), x.flatten())


def test_rows_of_any_strides_lie_end_to_end():
    x = _NUMBERS.to(torch.int16).view(2, 5)
    for of_any in (x, x.T, x[:, ::2], x[:0], x[:, :1], x[:0, :1], x.as_strided((0, 1), (1, 0)), x.expand(3, 2, 5)):
        rows = rows_as_bytes(of_any)
        assert rows.shape == (*of_any.shape[:-1], of_any.shape[-1] * 2)
        assert torch.equal(rows.flatten().view(torch.int16), of_any.flatten())
