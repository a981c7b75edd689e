"""Products of rows sorted by expert, beside their definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from longctx.kernels import grouped
from longctx.kernels.grouped import (
    grouped_outer,
    grouped_rows,
    sort_by_expert,
    sum_by_expert,
    supports_grouped_mm,
)
from tests.rounding import UNIT, both_ways

ENDS = (3, 3, 10, 17)


def operands(dtype):
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(s).to(dtype) for s in ((ENDS[-1], 16), (4, 8, 16), (ENDS[-1], 8)))
    return x, weight, dy, torch.tensor(ENDS, dtype=torch.int32)


def by_definition(x, weight, dy):
    """Products and sums in float64."""
    rows, outer = x.new_zeros(len(x), 8).double(), torch.zeros_like(weight, dtype=torch.float64)
    start = 0
    for expert, stop in enumerate(ENDS):
        rows[start:stop] = x[start:stop].double() @ weight[expert].double().T
        outer[expert] = dy[start:stop].double().T @ x[start:stop].double()
        start = stop
    return rows, outer


# A sum of 16 products is off by at most 16 roundings of its largest partial sum; a bfloat16 result is rounded besides,
# to one part in 2^8.
TOLERANCE = {
    torch.float64: {"atol": 1e-13, "rtol": 1e-13},
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-5, "rtol": UNIT + 1e-5},
}
ABSOLUTE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 17 * 4 * UNIT}
"""Where sums cancel: of 17 parts, of which none is beyond 4 here."""


@both_ways
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grouped_products_equal_their_definition(dtype, loop, products, monkeypatch):
    x, weight, dy, ends = operands(dtype)
    if loop:
        monkeypatch.setattr(grouped, "supports_grouped_mm", lambda *_, **__: False)
    else:
        in_float32 = dtype == torch.bfloat16 and products == "float32"
        assert supports_grouped_mm(x, weight, matmul_mode=products) == (dtype != torch.float64 and not in_float32)
    want = by_definition(x, weight, dy)
    got = grouped_rows(x, weight.mT, ends, matmul_mode=products), grouped_outer(dy, x, ends, matmul_mode=products)
    for value, exact in zip(got, want, strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), exact, **TOLERANCE[dtype])
    assert got[1][1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 256])
@pytest.mark.parametrize("copied", [1, 300])
def test_products_by_blocks_equal_their_definition(dtype, rows, copied, monkeypatch):
    """What CUDA takes where the grouped product would wait; on a CPU by its own code."""
    monkeypatch.setattr(grouped, "_ROWS", rows)
    monkeypatch.setattr(grouped, "_COPIED_VALUES", copied)  # a block at a time, and two
    x, weight, dy, ends = operands(dtype)
    got = grouped.rows_by_blocks(x, weight.mT, ends), grouped.outer_by_blocks(dy, x, ends)
    for value, exact in zip(got, by_definition(x, weight, dy), strict=True):
        assert value.dtype == dtype
        # a block's part of a gradient is rounded before it is added
        torch.testing.assert_close(value.double(), exact, **(TOLERANCE[dtype] | {"atol": ABSOLUTE[dtype]}))
    assert got[1][1].count_nonzero() == 0


@pytest.mark.parametrize("width", [15, 18])
def test_odd_widths_take_the_loop(width):
    x = torch.randn(4, width)
    assert not supports_grouped_mm(x, x, matmul_mode="native")


def test_sums_by_expert():
    rows = torch.arange(17.0).unsqueeze(1).bfloat16()
    got = sum_by_expert(rows, torch.tensor(ENDS, dtype=torch.int32))
    assert got.dtype == torch.float32
    assert got.squeeze(1).tolist() == [sum(range(3)), 0, sum(range(3, 10)), sum(range(10, 17))]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
def test_sorting_is_stable_inverts_and_puts_nowhere_last(dtype):
    choices = torch.tensor([[2, 0], [-1, 2], [0, 3], [2, -1]], dtype=dtype)
    order, inverse, ends = sort_by_expert(choices, 4)
    assert order.tolist() == [1, 4, 0, 3, 6, 5, 2, 7]
    assert order[inverse].tolist() == list(range(8))
    assert ends.tolist() == [2, 2, 5, 6]
    assert ends.dtype == torch.int32


def laid_out(offset, shape, dtype=torch.bfloat16):
    """A tensor of this shape that lies ``offset`` values into a buffer, as DeepSpeed's flat buffers hold parameters."""
    size = torch.Size(shape).numel()
    return torch.arange(offset + size, dtype=torch.float32).to(dtype)[offset:].view(shape)


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (laid_out(0, (4, 16)), True),
        (laid_out(8, (4, 16)), True),
        (laid_out(8, (3, 16, 8)).mT, True),
        (laid_out(1, (4, 16)), False),  # a parameter of one value before it
        (laid_out(4, (4, 16)), False),
        (laid_out(4, (4, 16), torch.float32), True),
        (laid_out(2, (4, 16), torch.float32), False),
        (laid_out(129, (3, 16, 8)).mT, False),
        (laid_out(0, (4, 24))[:, :16], True),  # a part of wider rows
        (laid_out(0, (4, 20))[:, :16], False),  # rows that begin between words
        (laid_out(0, (4, 16)).T, True),
        (laid_out(0, (1, 16)).expand(4, 16), False),  # the gradient of a sum: its rows lie on each other
        (laid_out(0, (4, 1)).expand(4, 16), False),
        (laid_out(0, (4, 32))[:, ::2], False),
    ],
)
def test_what_lies_on_words_of_16_bytes(x, wanted):
    assert grouped.is_aligned(x) == wanted
    on_cuda = SimpleNamespace(device=SimpleNamespace(type="cuda"), clone=x.clone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "is_aligned", lambda _: wanted)
        found = grouped.ensure_aligned(on_cuda)  # a tensor of this device as far as the function looks
    if wanted:
        assert found is on_cuda
    else:
        assert grouped.is_aligned(found)
        assert torch.equal(found, x)
    assert grouped.ensure_aligned(x) is x, "CPUs take any address: no copy"
