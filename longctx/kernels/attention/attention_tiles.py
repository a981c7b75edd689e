"""Helpers for tiled kernels: cut slices into tiles, and centre exponents where float32 is exact.

Axes: B batch, t query rows, H query heads, V value head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.attention.slices import AttentionSlice

_NARROW = 64
"""Minimum query rows per row block under a narrow window: below that, call overhead exceeds the work."""
_MAX_MASKED_TILE = 1024
"""Maximum rows and keys in a tile that an upper bound cuts: such a tile is masked, which wastes half its work."""


class Tile(NamedTuple):
    """Keys for one block of query rows if ``lo <= i − j <= hi``, both counted from the tile's top-left corner.

    A bound without effect is None, so a tile with only ``lo=0`` is causal with row 0 aligned to key 0.
    """

    k: slice
    lo: int | None
    hi: int | None


class RowBlock(NamedTuple):
    """Query rows and their tiles; **every row sees at least one key in every tile**."""

    q: slice
    tiles: tuple[Tile, ...]


def row_blocks(attn_slice: AttentionSlice, *, rows: int, keys: int) -> Iterator[RowBlock]:
    """Yield the slice in row blocks with at most ``rows`` query rows and tiles with at most ``keys`` keys.

    Rows without a visible key are skipped. A narrow band (less than 2·1024 or 2·``keys`` tokens) is cut into blocks
    about a quarter of its width, at least 64 rows, and one tile holds all keys for a block: a mask costs less than
    merging.
    """
    bounded = _without_idle_bounds(attn_slice)
    q_start, q_stop, k_start, k_stop, lo, hi = bounded[:6]
    if k_start >= k_stop or (lo is not None and hi is not None and lo > hi):
        return
    # rows before see no key under lo, rows after none under hi
    if lo is not None:
        q_start = max(q_start, k_start + lo)
    if hi is not None:
        q_stop = min(q_stop, k_stop + hi)
        rows = min(rows, keys, _MAX_MASKED_TILE)
    is_narrow = False
    if lo is not None and hi is not None:
        width = hi - lo + 1
        is_narrow = width < 2 * min(keys, _MAX_MASKED_TILE)
        if is_narrow:
            # more rows would put more of each tile outside the band, fewer would need more merges
            rows = min(rows, max(_NARROW, 1 << (width // 4).bit_length() >> 1))
    for row in range(q_start, q_stop, rows):
        block = slice(row, min(row + rows, q_stop))
        yield RowBlock(block, tuple(_tiles(block, bounded, keys, is_narrow)))


def _without_idle_bounds(attn_slice: AttentionSlice) -> AttentionSlice:
    """Drop bounds without effect, so that the tiles need no mask."""
    q_start, q_stop, k_start, k_stop, lo, hi = attn_slice[:6]
    if lo is not None and lo <= q_start - (k_stop - 1):
        lo = None
    if hi is not None and hi >= q_stop - 1 - k_start:
        hi = None
    return attn_slice._replace(lo=lo, hi=hi)


def _tiles(q: slice, attn_slice: AttentionSlice, keys: int, is_narrow: bool) -> Iterator[Tile]:
    """Yield one row block's tiles in key order: cut by ``hi``, fully visible, cut by ``lo``."""
    # Along the keys a block crosses three zones: the window edge (masked by hi), keys visible to every row (no mask),
    # the diagonal (causal). Cutting exactly at the zone borders keeps most tiles free of masks and gives every row a
    # key in every tile.
    lo, hi = attn_slice.lo, attn_slice.hi
    # keys visible to any row in the block
    begin, end = attn_slice.k_start, attn_slice.k_stop
    if hi is not None:
        begin = max(begin, q.start - hi)
    if lo is not None:
        end = min(end, q.stop - lo)

    # window edge: keys that the block's last row no longer sees
    if hi is not None and begin < q.stop - 1 - hi:
        edge = end
        if not is_narrow:
            edge = min(end, q.stop - hi)  # the last row sees the edge's last key
        yield _masked_tile(q, begin, edge, lo, hi)
        begin = edge

    # keys visible to every row
    diagonal = end
    if lo is not None and end > q.start - lo + 1:
        diagonal = q.start - lo
    for k in range(begin, diagonal, keys):
        yield Tile(slice(k, min(k + keys, diagonal)), None, None)

    # diagonal: keys that the block's first row does not see yet
    if begin < end and diagonal < end:
        yield Tile(slice(diagonal, end), 0, None)


def _masked_tile(q: slice, begin: int, end: int, lo: int | None, hi: int) -> Tile:
    """Return the tile with bounds relative to its own corner; ``lo`` is dropped if it has no effect."""
    shift = q.start - begin
    if lo is not None:
        if end - 1 <= q.start - lo:
            lo = None
        else:
            lo -= shift
    return Tile(slice(begin, end), lo, hi - shift)


def centred(lse_BtH: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``power`` and ``lse`` (float32) with lse near 0.

    They satisfy ``exp(s − lse_BtH) · dout = exp(s − lse) · (dout · power)``, and every gradient is linear in that
    product.
    """
    # float32 has its finest steps near 0: around −9, as over 8192 keys, every gradient in a row would inherit an error
    # of 5e-7. ``power`` is a power of two, so scaling by it is exact.
    # exp(−lse) = 2^−m · exp(−(lse − m·ln 2)): integer powers of two go into dout, the rest stays in the exponent
    m = (lse_BtH * (1 / math.log(2))).round_().clamp_(-40, 40)  # 2^-40 keeps dout far above float32's smallest number
    # float32 stores 2^n as n + 127 in bits 23 to 30
    power = (127 - m.to(torch.int32)).bitwise_left_shift_(23).view(torch.float32)
    return power, lse_BtH.sub(m, alpha=math.log(2)).float()


def fold_(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's result [..., V] into ``out`` and ``lse`` [...] (float64) in one pass over ``out``.

    Unlike ``contract.merge_`` it requires that each row sees a key in both: no log-sum-exp is −inf.
    """
    # exp(b) / (exp(a) + exp(b)) is sigmoid(b − a)
    weight = torch.sigmoid(tile_lse - lse).to(out.dtype).unsqueeze(-1)
    out.lerp_(tile_out, weight)
    torch.logaddexp(lse, tile_lse, out=lse)
