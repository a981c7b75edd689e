"""Grouped matmul: assignments, sorted by expert, times their experts' weights, in one call for all experts.

An assignment is a token and one of its experts.

Axes: N tokens, k experts per token, R assignments sorted by expert, E experts, I and O a matmul's input and output
width; n row blocks, b rows of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from longctx.kernels.devices import on_cpu
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.matmul import multiplies_in_float32
from longctx.kernels.processor import MatmulMode

_WORD_BYTES = 16
"""CUDA's grouped matmul reads words this long."""
_ROWS = 256
"""Rows in a row block: copying a weight takes less time than multiplying this many rows by it."""
_COPIED_VALUES = 1 << 26
"""Weight values copied at a time: 256 MB in float32."""


def sort_by_expert(experts_Nk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the permutation that sorts assignments by expert, as an index into the flattened [N, k].

    Also return its inverse and each expert's end (int32). Assignments without an expert (−1) come last, after all ends.
    """
    chosen_R = experts_Nk.flatten()
    expert_R = chosen_R.where(chosen_R >= 0, num_experts)
    # stable: each expert's tokens keep their order, which makes sums over them reproducible
    order_R = expert_R.argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    # bincount would wait for the device to learn the largest id
    counts = order_R.new_zeros(num_experts + 1).scatter_add_(0, expert_R.long(), torch.ones_like(order_R))
    return order_R, inverse_R, counts[:num_experts].cumsum(0, dtype=torch.int32)  # grouped_mm only takes int32


def grouped_rows(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, *, matmul_mode: MatmulMode) -> Tensor:
    """Multiply assignments [R, I] by their expert's weight to [R, O]; expert e has rows ``ends[e - 1]`` to ``ends[e]``.

    The last end must be R: kernels leave rows past it unwritten, and garbage times a gate of 0 may be NaN.
    """
    if supports_grouped_mm(x_RI, weight_EIO, matmul_mode=matmul_mode):
        return nn.functional.grouped_mm(ensure_aligned(x_RI), ensure_aligned(weight_EIO), offs=ends_E)
    if not on_cpu(x_RI):
        return rows_by_blocks(x_RI, weight_EIO, ends_E)
    out_RO, start = x_RI.new_zeros(x_RI.shape[0], weight_EIO.shape[-1]), 0
    for stop, weight in zip(ends_E.tolist(), weight_EIO.unbind(), strict=True):
        out_RO[start:stop] = _product(x_RI[start:stop], weight, matmul_mode)
        start = stop
    return out_RO


def grouped_outer(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor, *, matmul_mode: MatmulMode) -> Tensor:
    """Return each expert's weight gradient, [E, O, I]; exact zeros for an expert without assignments."""
    if supports_grouped_mm(dy_RO, x_RI, matmul_mode=matmul_mode):
        grad_EOI = nn.functional.grouped_mm(ensure_aligned(dy_RO).T, ensure_aligned(x_RI), offs=ends_E)
        if not on_cpu(grad_EOI):  # CUDA kernels leave groups without assignments unwritten
            empty_E = ends_E == torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
            grad_EOI.masked_fill_(empty_E[:, None, None], 0)
        return grad_EOI
    if not on_cpu(dy_RO):
        return outer_by_blocks(dy_RO, x_RI, ends_E)
    grads, start = [], 0
    for stop in ends_E.tolist():
        grads.append(_product(dy_RO[start:stop].T, x_RI[start:stop], matmul_mode))
        start = stop
    return torch.stack(grads)


def sum_by_expert(rows_RO: Tensor, ends_E: Tensor) -> Tensor:
    """Sum each expert's assignments in float32, [E, O], in a fixed order on every device."""
    offsets = torch.cat((ends_E.new_zeros(1), ends_E)).long()
    upcast = rows_RO.to(accumulate_dtype(rows_RO.dtype))
    return torch.segment_reduce(upcast, "sum", offsets=offsets, axis=0, initial=0)


def supports_grouped_mm(a: Tensor, b: Tensor, *, matmul_mode: MatmulMode) -> bool:
    """Return whether PyTorch's grouped matmul supports these dtypes and widths.

    Inner sizes must be a multiple of 16 bytes, and float64 is unsupported. float32 on CUDA also takes another path,
    since PyTorch multiplies it expert by expert with host syncs.
    """
    if multiplies_in_float32(a, matmul_mode):
        return False
    return _has_grouped_mm(a) and _has_grouped_mm(b)


def _has_grouped_mm(x: Tensor) -> bool:
    dtypes = (torch.float32, torch.bfloat16)
    if not on_cpu(x):
        dtypes = (torch.bfloat16,)
    return x.dtype in dtypes and x.shape[-1] * x.element_size() % _WORD_BYTES == 0


def ensure_aligned(x: Tensor) -> Tensor:
    """Return x as CUDA's grouped matmul requires it: copied if any matrix or row is not aligned to 16 bytes.

    CPUs take any address.
    """
    # DeepSpeed packs parameters end to end in flat buffers, so a parameter size that is not a multiple of 8 misaligns
    # all experts after it.
    if on_cpu(x) or is_aligned(x):
        return x
    # clone keeps the matrices' memory order, so it reads and writes adjacent rows
    return x.clone()


def is_aligned(x: Tensor) -> bool:
    """Return whether x, its rows and its matrices are aligned to 16 bytes, and its rows or columns are contiguous."""
    # offsets, not addresses: storages are aligned on every device, and a fake tensor has no address
    steps = [x.storage_offset(), *x.stride()]
    inner = -1
    if x.stride(-1) != 1:
        inner = -2
    # values within a row (a column, if x is transposed) are adjacent, and no two rows overlap
    if steps.pop(inner) != 1 or x.stride(-3 - inner) < x.shape[inner]:
        return False
    return all(step * x.element_size() % _WORD_BYTES == 0 for step in steps)


def _product(a: Tensor, b: Tensor, matmul_mode: MatmulMode) -> Tensor:
    """Return a · b in their dtype."""
    if multiplies_in_float32(a, matmul_mode):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


# --- Accelerators with a syncing grouped_mm: row blocks, without reading a size on the host ---------------------------
#
# ``grouped_mm`` in float32 on CUDA (PyTorch 2.11) loops over experts on the host and waits for their ends. Instead,
# each expert's rows are cut into blocks; the last one may be partial. Only the device knows how many blocks an expert
# has, but R rows and E experts never need more than R / block + E. So that many are multiplied, a few at a time, each
# with a copy of its expert's weight; surplus blocks multiply zeros.


def rows_by_blocks(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return the assignments [R, I] times their expert's weight, [R, O]; each must have an expert."""
    R, (_, inner, outer) = len(x_RI), weight_EIO.shape
    x_RI = _with_zeros(x_RI)
    # One extra row collects the results of block padding rows, all 0.
    out_RO = x_RI.new_zeros(R + 1, outer)
    for rows_nb, expert_n in _blocks(ends_E, R, inner * outer):
        out_RO[rows_nb] = x_RI[rows_nb] @ weight_EIO[expert_n]
    return out_RO[:R]


def outer_by_blocks(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Return each expert's weight gradient, [E, O, I], summed over its blocks in a fixed order."""
    R, E, outer, inner = len(x_RI), len(ends_E), dy_RO.shape[1], x_RI.shape[1]
    dy_RO, x_RI = _with_zeros(dy_RO), _with_zeros(x_RI)
    partial = accumulate_dtype(x_RI.dtype)
    total_EOI = x_RI.new_zeros(E, outer * inner, dtype=partial)
    experts_E = torch.arange(E, device=ends_E.device)
    for rows_nb, expert_n in _blocks(ends_E, R, inner * outer):
        parts_nOI = dy_RO[rows_nb].mT @ x_RI[rows_nb]
        # a matmul with zeros and ones adds in one order on every device; index_add does not
        membership_En = (expert_n == experts_E[:, None]).to(partial)
        total_EOI.addmm_(membership_En, parts_nOI.flatten(1).to(partial))
    return total_EOI.view(E, outer, inner).to(x_RI.dtype)


def _blocks(ends_E: Tensor, num_rows: int, values_of_weight: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield row indices [n, b] and experts [n] for a few blocks at a time; ``num_rows`` marks padding."""
    ends_E = ends_E.long()
    starts_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    blocks_E = (ends_E - starts_E + _ROWS - 1) // _ROWS
    last_E = blocks_E.cumsum(0)
    block_N = torch.arange(num_rows // _ROWS + len(ends_E), device=ends_E.device)
    # Surplus blocks get the last expert, past its last row, so all their rows are padding.
    expert_N = torch.searchsorted(last_E, block_N, right=True).clamp(max=len(ends_E) - 1)
    first_N = starts_E[expert_N] + (block_N - (last_E - blocks_E)[expert_N]) * _ROWS
    rows_Nb = first_N[:, None] + torch.arange(_ROWS, device=ends_E.device)
    rows_Nb = rows_Nb.where(rows_Nb < ends_E[expert_N][:, None], num_rows)
    at_once = max(1, _COPIED_VALUES // values_of_weight)
    yield from zip(rows_Nb.split(at_once), expert_N.split(at_once), strict=True)


def _with_zeros(x_RI: Tensor) -> Tensor:
    """Append a zero row to x."""
    return torch.cat((x_RI, x_RI.new_zeros(1, x_RI.shape[1])))
