"""Grouped products on an accelerator where PyTorch's own would wait: by blocks of rows, without asking for a size.

``grouped_mm`` of float32 on CUDA (PyTorch 2.11) loops over experts on the host, which waits for their ends. Here each
expert's rows are cut into blocks, the last of which is not full. How many blocks an expert has only the device knows,
but R rows of E experts never have more than R / block + E. So that many are multiplied, each with a copy of its
expert's weight, a few at a time; blocks of no expert multiply zeros.

Axes: R assignments in the order of their experts, E experts, n blocks, b rows of a block, I and O the input and output
width of one product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype

ROWS = 256
"""Of a block: copying a weight takes less time than multiplying as many rows by it."""
_COPIED_VALUES = 1 << 26
"""Values of weights that are copied at a time: 256 MB of float32."""


def rows_by_blocks(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return the assignments [R, I] times their expert's weight, [R, O]; all of them have an expert."""
    R, (_, inner, outer) = len(x_RI), weight_EIO.shape
    x_RI = _with_zeros(x_RI)
    # One row more: where the results of rows that fill blocks up go, all of them 0.
    out_RO = x_RI.new_zeros(R + 1, outer)
    for rows_nb, expert_n in _blocks(ends_E, R, inner * outer):
        out_RO[rows_nb] = x_RI[rows_nb] @ weight_EIO[expert_n]
    return out_RO[:R]


def outer_by_blocks(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Return each expert's weight gradient, [E, O, I], summed over its blocks in fixed order."""
    R, E, outer, inner = len(x_RI), len(ends_E), dy_RO.shape[1], x_RI.shape[1]
    dy_RO, x_RI = _with_zeros(dy_RO), _with_zeros(x_RI)
    wide = accumulate_dtype(x_RI.dtype)
    total_EOI = x_RI.new_zeros(E, outer * inner, dtype=wide)
    experts_E = torch.arange(E, device=ends_E.device)
    for rows_nb, expert_n in _blocks(ends_E, R, inner * outer):
        parts_nOI = dy_RO[rows_nb].mT @ x_RI[rows_nb]
        # A product with zeros and ones adds in one order on every device; index_add does not.
        belongs_En = (expert_n == experts_E[:, None]).to(wide)
        total_EOI.addmm_(belongs_En, parts_nOI.flatten(1).to(wide))
    return total_EOI.view(E, outer, inner).to(x_RI.dtype)


def _blocks(ends_E: Tensor, num_rows: int, values_of_weight: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows [n, b] and the experts [n] of some blocks at a time; ``num_rows`` stands for no row."""
    ends_E = ends_E.long()
    starts_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    blocks_E = (ends_E - starts_E + ROWS - 1) // ROWS
    last_E = blocks_E.cumsum(0)
    block_N = torch.arange(num_rows // ROWS + len(ends_E), device=ends_E.device)
    # Blocks behind all experts' are the last expert's: they begin behind its rows.
    expert_N = torch.searchsorted(last_E, block_N, right=True).clamp(max=len(ends_E) - 1)
    first_N = starts_E[expert_N] + (block_N - (last_E - blocks_E)[expert_N]) * ROWS
    rows_Nb = first_N[:, None] + torch.arange(ROWS, device=ends_E.device)
    rows_Nb = rows_Nb.where(rows_Nb < ends_E[expert_N][:, None], num_rows)
    at_once = max(1, _COPIED_VALUES // values_of_weight)
    yield from zip(rows_Nb.split(at_once), expert_N.split(at_once), strict=True)


def _with_zeros(x_RI: Tensor) -> Tensor:
    """x and a row of zeros."""
    return torch.cat((x_RI, x_RI.new_zeros(1, x_RI.shape[1])))
