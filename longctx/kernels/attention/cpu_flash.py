"""PyTorch's CPU flash attention behind our kernel interface.

ATen op quirks hidden here: its causal mask is aligned top-left for any two lengths; rows without a key return out = 0
*and lse = 0* (so such rows are never passed in); its log-sum-exp has shape [B, H, S] but the strides of [B, S, H]; its
outputs have the input's dtype; keys and values must share one head size; it has no window, only an additive mask.
Grouped-query attention is native.

Work is cut into tiles. Tile inputs are converted and tile results merged one by one, so no full tensor is copied:

* float32: tile log-sum-exps are merged in float64 (each is rounded separately, so the errors average out), and
  backward works near exponent 0, where float32 is finest (``attention_tiles.centred``). Gradients are more exact than
  the op's own, for a few per cent more time.
* bfloat16 and float16 are computed in float32, unless the processor has bfloat16 instructions (on other processors
  the op is two to five times slower in bfloat16) or ``compute="native"`` is set. Native computation rounds each tile's
  gradients to bfloat16 and sums them in float32, one query head at a time: the op itself accumulates in bfloat16.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longctx.errors import ConfigError
from longctx.kernels.attention.attention_tiles import RowBlock, Tile, centred, fold_, row_blocks
from longctx.kernels.attention.kernel_interface import RULES, Gradients, KernelRequest, ScoreRules, merge_
from longctx.kernels.attention.sinks import apply_sinks
from longctx.kernels.attention.slices import SliceGroup, once_per_table, slice_groups
from longctx.kernels.dtypes import accumulate_dtype, as_dtype
from longctx.kernels.processor import fastest_matmul_mode

log = logging.getLogger(__name__)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_TILE = 1024
"""Maximum query rows and keys per tile if inputs are converted or results merged."""
_GRADIENT_TILE = 4096
"""The same for a backward pass without conversions: accumulating gradients over smaller tiles takes 3 to 6 % longer."""
_NATIVE_GRADIENT_TILE = 2048
"""The same if only results are converted, to accumulate in float32. For one rank of two that share 8,192 tokens it
takes 4 to 7 % less time than 1,024-row tiles and 5 to 9 MiB more memory; 4,096 rows save another 3 % and take 13 MiB
more."""
_ELEMENTS = 1 << 18
"""Maximum elements in a call's query rows, as far as heads can be split: bounds the memory that a call allocates."""
_GROUP_ROWS = 4096
"""Maximum query rows and keys of short documents in one call."""
_PACKED_ROWS = 512
"""Minimum query rows for copying the op's inputs into contiguous memory."""
_WHOLE = 1 << 30
"""No limit on tile size."""


class CpuFlashKernel:
    """The fast kernel on CPUs; docs/parallel.md compares ring attention with it to ``scaled_dot_product_attention``.

    ``compute`` is the dtype in which bfloat16 and float16 inputs are multiplied: ``"float32"``, ``"native"`` (their
    own), or ``"auto"``: ``fastest_matmul_mode`` decides for bfloat16, and float16 uses float32.
    """

    def __init__(self, compute: str = "auto") -> None:
        if compute not in ("auto", "float32", "native"):
            raise ConfigError(f"compute={compute!r} is unknown. Try one of ['auto', 'float32', 'native'].")
        self.compute, self.name = compute, "cpu_flash"
        if compute != "auto":
            self.name = f"cpu_flash_{compute}"

    def supports(self, request: KernelRequest) -> str | None:
        if request.device_type != "cpu":
            return f"runs on the CPU, not on {request.device_type}"
        if request.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"no {str(request.dtype).removeprefix('torch.')}"
        if request.rules:
            return f"no {RULES[request.rules[0]]}; blockwise has"
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        op = self._op(q_BtHD, v_BsKV, scores)
        # With bfloat16 results each tile merge would round once more, so the op takes full rows.
        size = _TILE
        if op.rounds:
            size = _WHOLE
        whole = _whole_block(slices, size, q_BtHD.shape[1], len(q_BtHD))
        if whole is not None:
            group, block = whole
            q, (k, v) = _queries(q_BtHD, group), (_keys(x, group) for x in (k_BsKD, v_BsKV))
            out, lse = op.forward_block(q, k, v, block)
            return _joined(out, len(q_BtHD)), _joined(lse, len(q_BtHD))
        shape = q_BtHD.shape[:-1] + v_BsKV.shape[-1:]
        # empty, not zeros: most rows belong to one row block, which writes its result there
        out = q_BtHD.new_empty(shape, dtype=accumulate_dtype(q_BtHD.dtype))
        lse = q_BtHD.new_full(shape[:-1], -torch.inf, dtype=torch.float64)
        touched = torch.zeros(1, shape[1], dtype=torch.bool)
        for group in _groups(slices, len(q_BtHD)):
            q_NrHD, out_NrHV, lse_NrH, touched_Nr = (_queries(x, group) for x in (q_BtHD, out, lse, touched))
            k_NsKD, v_NsKV = (_keys(x, group) for x in (k_BsKD, v_BsKV))
            for block in _blocks(group, size):
                block_out, block_lse = op.forward_block(q_NrHD, k_NsKD, v_NsKV, block)
                is_known = touched_Nr[:, block.q]
                if is_known.any():
                    out_NrHV[:, block.q].masked_fill_(~is_known[..., None, None], 0)  # never written: 0 · NaN is NaN
                    merge_(out_NrHV[:, block.q], lse_NrH[:, block.q], block_out, block_lse)
                else:
                    out_NrHV[:, block.q], lse_NrH[:, block.q] = block_out, block_lse
                touched_Nr[:, block.q] = True
        if not touched.all():
            out[:, ~touched[0]] = 0
        return out, lse

    def forward_newest(
        self,
        q_N1HD: Tensor,
        k_NsKD: Tensor,
        v_NsKV: Tensor,
        bias_N11s: Tensor | None,
        *,
        scores: ScoreRules,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the partial output [N, 1, H, V] for one query per sequence over all its keys and the sinks.

        ``bias_N11s`` is −inf for buffer rows outside the sequence; those rows must still be finite.
        """
        N, _, H, D = q_N1HD.shape
        V, op = v_NsKV.shape[3], self._op(q_N1HD, v_NsKV, scores)
        # Treat query heads that share keys as rows in one head, so that its keys are read once instead of per query
        # head.
        rows = H // k_NsKD.shape[2]
        if N * H // rows < torch.get_num_threads():
            rows = 1  # the op runs one thread per head
        q = op.fit(q_N1HD.reshape(N, H // rows, rows, D))
        k, v = op.fit(k_NsKD.transpose(1, 2)), op.fit(v_NsKV.transpose(1, 2))
        if bias_N11s is not None:
            bias_N11s = as_dtype(bias_N11s, op.dtype)
        out, lse = _forward(q, k, v, 0.0, False, attn_mask=bias_N11s, scale=op.scale)
        if out.shape[-1] > V:
            out = out[..., :V]
        out = as_dtype(out.reshape(N, 1, H, V), accumulate_dtype(out.dtype))
        if sinks_H is None:
            return out
        return apply_sinks(out, lse.reshape(N, 1, H), sinks_H)[0]

    def backward(
        self,
        dout_BtHV: Tensor,
        q_BtHD: Tensor,
        k_BsKD: Tensor,
        v_BsKV: Tensor,
        out_BtHV: Tensor,
        lse_BtH: Tensor,
        slices: Tensor,
        *,
        scores: ScoreRules,
    ) -> Gradients:
        op = self._op(q_BtHD, v_BsKV, scores)
        partial = accumulate_dtype(q_BtHD.dtype)
        power_BtH: Tensor | None = None
        if op.dtype == torch.float32:
            power_BtH, lse_BtH = centred(lse_BtH)
        else:
            lse_BtH = lse_BtH.to(partial)
        size = _TILE
        if op.dtype == q_BtHD.dtype == partial:  # no conversions
            size = _GRADIENT_TILE
        elif op.dtype == q_BtHD.dtype:  # native: only results are converted
            size = _NATIVE_GRADIENT_TILE
        rows = _Rows(dout_BtHV, q_BtHD, out_BtHV, lse_BtH, power_BtH)
        single = _single_tiles(slices, size, q_BtHD.shape[1], k_BsKD.shape[1], len(q_BtHD))
        if single is not None and op.takes_all_heads(single, q_BtHD.shape[2], k_BsKD.shape[2]):
            return op.gradients_of_tiles(rows, k_BsKD, v_BsKV, single)
        dq, dk, dv = (x.new_zeros(x.shape, dtype=partial) for x in (q_BtHD, k_BsKD, v_BsKV))
        for group in _groups(slices, len(q_BtHD)):
            group_rows, dq_NrHD = rows.of_group(group), _queries(dq, group)
            k, v, dk_NsKD, dv_NsKV = (_keys(x, group) for x in (k_BsKD, v_BsKV, dk, dv))
            for block in _blocks(group, size):
                for h, g in op.head_groups(block, q_BtHD.shape[2], k.shape[2], group.num_slices):
                    at = block.q
                    tiles = op.gradients(group_rows.part(at, h), k[:, :, g], v[:, :, g], block)
                    for tile, tile_dq, tile_dk, tile_dv in tiles:
                        dq_NrHD[:, at, h] += tile_dq
                        dk_NsKD[:, tile.k, g] += tile_dk
                        dv_NsKV[:, tile.k, g] += tile_dv
        return Gradients(dq, dk, dv)

    def _op(self, q_BtHD: Tensor, v_BsKV: Tensor, scores: ScoreRules) -> _Op:
        if scores.rules:
            raise ConfigError("kernel cpu_flash supports neither soft cap nor bias. Try parallel.kernel=blockwise.")
        dtype = _compute_dtype(q_BtHD.dtype, self.compute)
        return _Op(dtype, (q_BtHD.shape[-1], v_BsKV.shape[-1]), scores.scale)


def _groups(slices: Tensor, batch: int) -> tuple[SliceGroup, ...]:
    """Return groups of slices that one call computes as a batch; a batch of its own leaves no room for that."""
    return slice_groups(slices, _GROUP_ROWS if batch == 1 else 0)


def _queries(x: Tensor, group: SliceGroup) -> Tensor:
    """Return a group's query rows as a batch of its slices, a view."""
    return _split(_rows(x, group.queries), group.num_slices)


def _keys(x: Tensor, group: SliceGroup) -> Tensor:
    """Return a group's key rows as a batch of its slices, a view."""
    return _split(_rows(x, group.keys), group.num_slices)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Return rows ``x[:, rows]``, or ``x`` itself if these are all: for short documents, each view counts."""
    if rows.stop - rows.start == x.shape[1]:
        return x
    return x[:, rows]


def _split(x: Tensor, num_slices: int) -> Tensor:
    """Return rows [1, N·r, …] as a batch of N slices [N, r, …], a view; those of a single slice as they are."""
    if num_slices == 1:
        return x
    # One call and not several: for short documents the calls take longer than the copies that they avoid.
    return x.view(num_slices, x.shape[1] // num_slices, *x.shape[2:])


def _joined(x: Tensor, batch: int) -> Tensor:
    """Return a batch of slices [N, r, …] as the rows [batch, N·r / batch, …] that ``_split`` took."""
    shape = list(x.shape)
    shape[:2] = batch, x.shape[0] * x.shape[1] // batch
    return x.reshape(shape)


def _blocks(group: SliceGroup, size: int) -> Iterator[RowBlock]:
    """Yield the row blocks of a group's first slice, counted from its first row and key."""
    first = group.first
    return row_blocks(first.shifted(queries=-first.q_start, keys=-first.k_start), rows=size, keys=size)


@once_per_table
def _whole_block(slices: Tensor, size: int, num_rows: int, batch: int) -> tuple[SliceGroup, RowBlock] | None:
    """Return the single group and its single row block if they hold all query rows, as in decoding or for a few equal
    documents; None if rows span several.
    """
    # Decoding takes this path on each step: one block needs no merge, no buffer and no bookkeeping.
    groups = _groups(slices, batch)
    if len(groups) != 1 or groups[0].queries != slice(0, num_rows):
        return None
    block = next(_blocks(groups[0], size), None)
    if block is None or block.q != slice(0, num_rows // groups[0].num_slices):
        return None
    return groups[0], block


@once_per_table
def _single_tiles(
    slices: Tensor, size: int, num_rows: int, num_keys: int, batch: int
) -> tuple[tuple[SliceGroup, RowBlock], ...] | None:
    """Return the groups and their blocks if each group is one tile and they have all rows and keys in order; otherwise
    None: gradients are then sums over tiles, or 0.
    """
    found, row, key = [], 0, 0
    for group in _groups(slices, batch):
        first, blocks = group.first, tuple(_blocks(group, size))
        if (group.queries.start, group.keys.start) != (row, key) or len(blocks) != 1 or len(blocks[0].tiles) != 1:
            return None
        all_rows = (slice(0, first.q_stop - first.q_start), slice(0, first.k_stop - first.k_start))
        if (blocks[0].q, blocks[0].tiles[0].k) != all_rows:
            return None
        found.append((group, blocks[0]))
        row, key = group.queries.stop, group.keys.stop
    if not found or (row, key) != (num_rows, num_keys):
        return None
    return tuple(found)


@lru_cache(maxsize=16)
def _compute_dtype(dtype: torch.dtype, compute: str) -> torch.dtype:
    """Resolve the dtype in which ``dtype`` inputs are multiplied; log the reason once."""
    if dtype in (torch.float32, torch.float64):
        return dtype
    if compute == "auto":
        compute = "float32"
        if dtype == torch.bfloat16:
            compute = fastest_matmul_mode()
        if dtype == torch.float16:
            log.info("cpu_flash computes %s in float32: float16 partial sums overflow.", dtype)
        elif compute == "native":
            log.info("cpu_flash computes %s natively: this processor has bfloat16 instructions.", dtype)
        else:
            log.info("cpu_flash computes %s in float32: this processor has no bfloat16 instructions.", dtype)
    if compute == "native":
        return dtype
    return torch.float32


class _Rows(NamedTuple):
    """One row block's query tensors for the backward pass."""

    dout_BrHV: Tensor
    q_BrHD: Tensor
    out_BrHV: Tensor
    lse_BrH: Tensor
    power_BrH: Tensor | None = None
    """Powers of two to scale dout with if lse is centred."""

    def of_group(self, group: SliceGroup) -> _Rows:
        """Return a group's rows, as a batch of its slices."""
        parts = (None if x is None else _queries(x, group) for x in self)
        return _Rows._make(parts)

    def part(self, rows: slice, heads: slice) -> _Rows:
        """Return some rows and heads."""
        parts = (None if x is None else x[:, rows, heads] for x in self)
        return _Rows._make(parts)


class _Op(NamedTuple):
    """ATen op wrapper that takes and returns [B, rows, heads, size] and hides the op's own layout."""

    dtype: torch.dtype
    """Matmul dtype."""
    sizes: tuple[int, int]
    """Head sizes: queries and keys, values."""
    scale: float

    @property
    def rounds(self) -> bool:
        """True if the op's results are less precise than partial results should be."""
        return self.dtype not in (torch.float32, torch.float64)

    def head_groups(
        self, block: RowBlock, num_heads: int, num_kv_heads: int, batch: int
    ) -> Iterator[tuple[slice, slice]]:
        """Yield each backward call's query heads and the key heads they share; the op runs one thread per head."""
        shared = num_heads // num_kv_heads
        # Limit a call's query-row elements, but take enough key heads to give each thread a query head.
        most = _ELEMENTS // (batch * (block.q.stop - block.q.start) * max(self.sizes))
        together = max(most // shared, -(-torch.get_num_threads() // shared), 1)
        for g in range(0, num_kv_heads, together):
            stop = min(g + together, num_kv_heads)
            yield slice(g * shared, stop * shared), slice(g, stop)

    def forward_block(self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, block: RowBlock) -> tuple[Tensor, Tensor]:
        """Compute one row block's output [B, r, H, V] as a partial result and float64 log-sum-exp [B, r, H]."""
        num_queries = block.q.stop - block.q.start
        q = self.to_op_layout(_rows(q_BtHD, block.q), num_queries)
        out: Tensor | None = None
        lse: Tensor | None = None
        for tile in block.tiles:
            k, v = (self.to_op_layout(_rows(x, tile.k), num_queries) for x in (k_BsKD, v_BsKV))
            tile_out, tile_lse = _forward(
                q, k, v, 0.0, _is_causal(tile), attn_mask=self._mask(block, tile), scale=self.scale
            )
            tile_out, tile_lse = self.to_partial_result(tile_out, self.sizes[1]), tile_lse.transpose(1, 2).double()
            # Online softmax over tiles: every row sees a key in each tile, so neither log-sum-exp is −inf.
            if out is None or lse is None:
                out, lse = tile_out, tile_lse
            else:
                fold_(out, lse, tile_out, tile_lse)
        assert out is not None, "row block without a tile"
        assert lse is not None
        return out, lse

    def gradients(
        self, rows: _Rows, k_BsKD: Tensor, v_BsKV: Tensor, block: RowBlock
    ) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
        """Yield the block's tiles, each with its query, key and value gradients as partial results."""
        num_queries = block.q.stop - block.q.start
        dout, q, out = (self.to_op_layout(x, num_queries) for x in (rows.dout_BrHV, rows.q_BrHD, rows.out_BrHV))
        lse, num_kv_heads = rows.lse_BrH.transpose(1, 2), k_BsKD.shape[2]
        if rows.power_BrH is not None:
            power = rows.power_BrH.unsqueeze(-1).transpose(1, 2)
            if dout.dtype != rows.dout_BrHV.dtype:
                dout.mul_(power)  # ``to_op_layout`` made a copy
            else:
                dout = dout * power
        D, V = self.sizes
        for tile in block.tiles:
            k, v = (self.to_op_layout(_rows(x, tile.k), num_queries) for x in (k_BsKD, v_BsKV))
            if self.rounds:  # the op would sum heads that share a key in its own dtype
                k, v = (x.repeat_interleave(q.shape[1] // num_kv_heads, 1) for x in (k, v))
            mask = self._mask(block, tile)
            dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, _is_causal(tile), attn_mask=mask, scale=self.scale)
            dq, dk, dv = self.to_partial_result(dq, D), self.to_partial_result(dk, D), self.to_partial_result(dv, V)
            if self.rounds:
                dk, dv = (x.unflatten(2, (num_kv_heads, -1)).sum(3) for x in (dk, dv))
            yield tile, dq, dk, dv

    def takes_all_heads(
        self, tiles: tuple[tuple[SliceGroup, RowBlock], ...], num_heads: int, num_kv_heads: int
    ) -> bool:
        """Return whether one backward call takes all heads of each tile."""
        counts = [
            len(list(self.head_groups(block, num_heads, num_kv_heads, group.num_slices))) for group, block in tiles
        ]
        return max(counts) == 1

    def gradients_of_tiles(
        self, rows: _Rows, k_BsKD: Tensor, v_BsKV: Tensor, tiles: tuple[tuple[SliceGroup, RowBlock], ...]
    ) -> Gradients:
        """Return all gradients, from tiles that follow one another in queries and keys (``_single_tiles``)."""
        # For short documents, filling memory with zeros and adding to them would take a fifth of the time.
        found = []
        for group, block in tiles:
            k, v = (_keys(x, group) for x in (k_BsKD, v_BsKV))
            for _, dq, dk, dv in self.gradients(rows.of_group(group), k, v, block):
                found.append([_joined(x, len(k_BsKD)) for x in (dq, dk, dv)])
        dq, dk, dv = found[0]
        if len(found) > 1:
            dq, dk, dv = (torch.cat([of_tile[side] for of_tile in found], 1) for side in range(3))
        return Gradients(dq, dk, dv)

    def to_op_layout(self, x_BsHX: Tensor, num_queries: int) -> Tensor:
        """Convert rows to the op's layout: [B, H, rows, size], the smaller head size padded with zeros.

        If ``num_queries``, the query row count, is large, rows become contiguous per head: the op takes 4 to 9 % longer
        on strided rows. With few query rows, as in decoding, the copy would cost more than it saves.
        """
        layout = torch.preserve_format
        if num_queries >= _PACKED_ROWS:
            layout = torch.contiguous_format
        return self.fit(x_BsHX.transpose(1, 2), layout)

    def fit(self, x_BHsX: Tensor, layout: torch.memory_format = torch.preserve_format) -> Tensor:
        """Convert to the op's dtype and pad to the larger head size."""
        missing = max(self.sizes) - x_BHsX.shape[-1]
        if missing:
            x_BHsX = functional.pad(x_BHsX, (0, missing))
        if x_BHsX.dtype != self.dtype:
            return x_BHsX.to(self.dtype, memory_format=layout)
        if layout == torch.contiguous_format:
            return x_BHsX.contiguous()
        return x_BHsX

    def to_partial_result(self, x: Tensor, size: int) -> Tensor:
        """Convert an op output to a partial result [B, rows, H, size]."""
        if x.shape[-1] > size:
            x = x[..., :size]
        return as_dtype(x.transpose(1, 2), accumulate_dtype(x.dtype))

    def _mask(self, block: RowBlock, tile: Tile) -> Tensor | None:
        """Return a tile's additive mask, or None if the tile is full or causal from its top-left corner."""
        if _is_causal(tile) or tile.lo is tile.hi is None:
            return None
        return _band_mask(block.q.stop - block.q.start, tile.k.stop - tile.k.start, tile.lo, tile.hi, self.dtype)


def _is_causal(tile: Tile) -> bool:
    return tile.lo == 0 and tile.hi is None


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # training may reuse a mask that generation cached
def _band_mask(rows: int, keys: int, lo: int | None, hi: int | None, dtype: torch.dtype) -> Tensor:
    """Return a mask [rows, keys], 0 if lo ≤ i − j ≤ hi, else −inf.

    It has at most 2^20 elements, and most blocks share one.
    """
    q_minus_k = torch.arange(rows)[:, None] - torch.arange(keys)
    is_masked = torch.zeros(rows, keys, dtype=torch.bool)
    if lo is not None:
        is_masked |= q_minus_k < lo
    if hi is not None:
        is_masked |= q_minus_k > hi
    return torch.zeros(rows, keys, dtype=dtype).masked_fill_(is_masked, -torch.inf)
