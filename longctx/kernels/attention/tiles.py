"""Helpers of tiled kernels: cutting a slice into tiles, and centring exponents where float32 is exact.

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
"""Fewest query rows of a block under a narrow window: fewer would leave more calls than work."""
_WIDE = 1024
"""Most rows and keys of a tile that an upper bound cuts, and so is masked: half of its work is in vain."""


class Tile(NamedTuple):
    """Keys that meet one block of query rows if ``lo <= i − j <= hi``, both counted from the tile's first corner.

    A bound that cuts nothing off is None, so a tile with ``lo=0`` alone is causal with row 0 aligned to key 0.
    """

    k: slice
    lo: int | None
    hi: int | None


class RowBlock(NamedTuple):
    """Query rows and the tiles they meet; **every row sees at least one key of every tile**."""

    q: slice
    tiles: tuple[Tile, ...]


def row_blocks(attn_slice: AttentionSlice, *, rows: int, keys: int) -> Iterator[RowBlock]:
    """Yield the slice in blocks of at most ``rows`` query rows and tiles of at most ``keys`` keys.

    Rows that see no key are left out. A narrow band (less than 2·1024 or 2·``keys`` tokens) is cut into blocks of about
    a quarter of its width, at least 64 rows, and one tile holds all keys of a block: a mask costs less than merging.
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
        rows = min(rows, keys, _WIDE)
    is_narrow = False
    if lo is not None and hi is not None:
        width = hi - lo + 1
        is_narrow = width < 2 * min(keys, _WIDE)
        if is_narrow:
            # with more rows more of a tile would lie outside of the band, with fewer there would be more merges
            rows = min(rows, max(_NARROW, 1 << (width // 4).bit_length() >> 1))
    for row in range(q_start, q_stop, rows):
        block = slice(row, min(row + rows, q_stop))
        yield RowBlock(block, tuple(_tiles(block, bounded, keys, is_narrow)))


def _without_idle_bounds(attn_slice: AttentionSlice) -> AttentionSlice:
    """Return the slice without bounds that cut nothing off, so that its tiles need no mask."""
    q_start, q_stop, k_start, k_stop, lo, hi = attn_slice[:6]
    if lo is not None and lo <= q_start - (k_stop - 1):
        lo = None
    if hi is not None and hi >= q_stop - 1 - k_start:
        hi = None
    return attn_slice._replace(lo=lo, hi=hi)


def _tiles(q: slice, attn_slice: AttentionSlice, keys: int, is_narrow: bool) -> Iterator[Tile]:
    """Yield the tiles of one block in the order of their keys: those that ``hi`` cuts, those that every row sees in
    full, those that ``lo`` cuts."""
    lo, hi = attn_slice.lo, attn_slice.hi
    # keys that any row of the block sees
    begin, end = attn_slice.k_start, attn_slice.k_stop
    if hi is not None:
        begin = max(begin, q.start - hi)
    if lo is not None:
        end = min(end, q.stop - lo)

    # the edge of the window: keys that the block's last row no longer sees
    if hi is not None and begin < q.stop - 1 - hi:
        edge = end
        if not is_narrow:
            edge = min(end, q.stop - hi)  # the last row sees the last key of the edge
        yield _masked_tile(q, begin, edge, lo, hi)
        begin = edge

    # keys that every row sees
    diagonal = end
    if lo is not None and end > q.start - lo + 1:
        diagonal = q.start - lo
    for k in range(begin, diagonal, keys):
        yield Tile(slice(k, min(k + keys, diagonal)), None, None)

    # the diagonal: keys that the block's first row does not see yet
    if begin < end and diagonal < end:
        yield Tile(slice(diagonal, end), 0, None)


def _masked_tile(q: slice, begin: int, end: int, lo: int | None, hi: int) -> Tile:
    """Return the tile with its bounds counted from its own corner; ``lo`` is None if it cuts nothing."""
    shift = q.start - begin
    if lo is not None:
        if end - 1 <= q.start - lo:
            lo = None
        else:
            lo -= shift
    return Tile(slice(begin, end), lo, hi - shift)


def centred(lse_BtH: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``power`` and ``lse`` (float32), such that lse is near 0.

    They satisfy ``exp(s − lse_BtH) · dout = exp(s − lse) · (dout · power)``, and every gradient is linear in that
    product. ``power`` is a power of two, so scaling by it is exact. Exponents near 0 are where float32 has its finest
    steps: around −9, as over 8192 keys, every gradient of a row would inherit an error of 5e-7.
    """
    # exp(−lse) = 2^−m · exp(−(lse − m·ln 2)): integer powers of two go into dout, the rest stays in the exponent
    m = (lse_BtH / math.log(2)).round_().clamp_(-40, 40)  # 2^-40 keeps dout far from float32's smallest
    power = torch.ldexp(torch.ones_like(m, dtype=torch.float32), -m.int())
    return power, (lse_BtH - m * math.log(2)).float()


def fold_(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's result [..., V] into ``out`` and ``lse`` [...] (float64) in one pass over ``out``.

    Like ``contract.merge_``, for rows that see a key in both: no log-sum-exp is −inf.
    """
    # exp(b) / (exp(a) + exp(b)) is sigmoid(b − a)
    weight = torch.sigmoid(tile_lse - lse).to(out.dtype).unsqueeze(-1)
    out.lerp_(tile_out, weight)
    torch.logaddexp(lse, tile_lse, out=lse)
