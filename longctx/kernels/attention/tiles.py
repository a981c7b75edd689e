"""What kernels made of tiles share: how a slice is cut, and where exponents are exact.

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
    """Keys that meet one block of query rows where ``lo <= i − j <= hi``, both counted from the tile's first corner.

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
    """The slice cut into blocks of at most ``rows`` query rows and tiles of at most ``keys`` keys.

    Rows that see no key are left out. A narrow band (less than 2·1024 or 2·``keys`` tokens) is cut into blocks of about
    a quarter of its width, at least 64 rows, and one tile holds all keys of a block: a mask costs less than merging.
    """
    lo, hi = attn_slice.lo, attn_slice.hi
    lo = None if lo is None or lo <= attn_slice.q_start - (attn_slice.k_stop - 1) else lo
    hi = None if hi is None or hi >= attn_slice.q_stop - 1 - attn_slice.k_start else hi
    if attn_slice.k_start >= attn_slice.k_stop or (lo is not None and hi is not None and lo > hi):
        return
    start = attn_slice.q_start if lo is None else max(attn_slice.q_start, attn_slice.k_start + lo)
    stop = attn_slice.q_stop if hi is None else min(attn_slice.q_stop, attn_slice.k_stop + hi)
    if hi is not None:
        rows = min(rows, keys, _WIDE)
    width = _WIDE * 2 if hi is None or lo is None else hi - lo + 1
    narrow = width < 2 * min(keys, _WIDE)
    if narrow:
        rows = min(rows, max(_NARROW, 1 << (width // 4).bit_length() >> 1))
    for r in range(start, stop, rows):
        block = slice(r, min(r + rows, stop))
        yield RowBlock(block, tuple(_tiles(block, attn_slice, lo, hi, keys, narrow)))


def _tiles(
    q: slice, attn_slice: AttentionSlice, lo: int | None, hi: int | None, keys: int, narrow: bool
) -> Iterator[Tile]:
    """The tiles of one block: what ``hi`` cuts, what every row sees whole, what ``lo`` cuts."""
    begin = attn_slice.k_start if hi is None else max(attn_slice.k_start, q.start - hi)
    end = attn_slice.k_stop if lo is None else min(attn_slice.k_stop, q.stop - lo)
    if hi is not None and begin < q.stop - 1 - hi:
        edge = end if narrow else min(end, q.stop - hi)  # the last row sees the last key of the edge
        yield _tile(q, begin, edge, lo, hi)
        begin = edge
    diagonal = end if lo is None or end <= q.start - lo + 1 else q.start - lo
    for k in range(begin, diagonal, keys):
        yield Tile(slice(k, min(k + keys, diagonal)), None, None)
    if begin < end and diagonal < end:
        yield Tile(slice(diagonal, end), 0, None)


def _tile(q: slice, begin: int, end: int, lo: int | None, hi: int) -> Tile:
    """The tile with its bounds counted from its own corner; ``lo`` is None where it cuts nothing."""
    shift = q.start - begin
    lo = None if lo is None or end - 1 <= q.start - lo else lo - shift
    return Tile(slice(begin, end), lo, hi - shift)


def centred(lse_BtH: Tensor) -> tuple[Tensor, Tensor]:
    """``power`` and ``lse`` (float32) with ``exp(s − lse_BtH) · dout = exp(s − lse) · (dout · power)`` and lse near 0.

    Every gradient is linear in that product. ``power`` is a power of two, so scaling by it is exact, and near 0
    exponents are where float32 has its finest steps: around −9, where they lie over 8192 keys, every gradient of a row
    would inherit an error of 5e-7.
    """
    m = (lse_BtH / math.log(2)).round_().clamp_(-40, 40)  # 2^-40 keeps dout far from float32's smallest
    power = torch.ldexp(torch.ones_like(m, dtype=torch.float32), -m.int())
    return power, (lse_BtH - m * math.log(2)).float()


def fold_(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's result [..., V] into ``out`` and ``lse`` [...] (float64) in one pass over ``out``.

    Like ``contract.merge_``, for rows that see a key in both: no log-sum-exp is −inf.
    """
    weight = torch.sigmoid(tile_lse - lse).to(out.dtype).unsqueeze(-1)
    out.lerp_(tile_out, weight)
    torch.logaddexp(lse, tile_lse, out=lse)
