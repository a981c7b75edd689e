"""A tile's assignments in single-expert blocks: their buffers, and the tensors that forward saves.

Axes: S received tokens, k experts per token, R assignments in expert order, n assignments in a block (and zero rows
after them for bfloat16 matmuls), M model width, X any width.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.kernels.grouped import sort_by_expert
from longctx.kernels.matmul import multiplies_in_float32
from longctx.kernels.processor import MatmulMode
from longctx.model.experts.experts_call import (
    DispatchedTokens,
    ExpertsCall,
    ExpertWeights,
    QuantizedExperts,
    Update,
    saved_widths,
)
from longctx.model.experts.gradient_sum import GradientSum

BLOCK_TOKENS = 1024
"""Assignments per block: enough for full-speed matmuls, few enough for the cache."""
CHUNK_BYTES = 8 << 20
"""Minimum bytes that backward frees at a time."""
_FREED = torch.empty(0)


class ExpertBlocks:
    """A tile's assignments in single-expert blocks, and buffers for one block."""

    def __init__(self, tokens: DispatchedTokens, weights: ExpertWeights, matmul_mode: MatmulMode) -> None:
        order_R, _, ends_e = sort_by_expert(tokens.experts_Sk, len(weights.down_eMF))
        ends = ends_e.tolist()
        self.order_R = order_R[: ends[-1]]  # assignments without a local expert come last
        self.token_R = self.order_R // tokens.experts_Sk.shape[1]
        self.gates_R1 = tokens.gates_Sk.flatten().index_select(0, self.order_R).unsqueeze(-1)
        self.dtype = tokens.x_SM.dtype
        """Dtype for matmuls."""
        if multiplies_in_float32(tokens.x_SM, matmul_mode):
            self.dtype = torch.float32
        self._blocks = list(_cut(ends))
        self._most = max((self._rows(block) for _, block in self._blocks), default=0)
        self._buffers: dict[str, Tensor] = {}
        self._converted: dict[str, tuple[int, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Iterate over the blocks, expert by expert, as (expert, assignment range)."""
        return iter(self._blocks)

    def _rows(self, block: slice) -> int:
        """Return a block's row count for matmuls: its assignments, plus zero rows in bfloat16."""
        size = block.stop - block.start
        if self.dtype.itemsize > 2:
            return size
        return padded_size(size)

    def buffer(self, name: str, block: slice, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer [n, width] for a block; it overwrites the previous block's values with this name."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._most, width, dtype=dtype or self.dtype)
        return self._buffers[name][: self._rows(block)]

    def own(self, tensor_nX: Tensor, block: slice) -> Tensor:
        """Return the rows for the block's assignments, without zero rows."""
        return tensor_nX[: block.stop - block.start]

    def filled(self, name: str, own_nX: Tensor, block: slice) -> Tensor:
        """Return these rows for the block's assignments, in the matmul dtype, with zero rows after them."""
        if own_nX.dtype == self.dtype and len(own_nX) == self._rows(block):
            return own_nX
        buffer_nX = self.buffer(name, block, own_nX.shape[1])
        buffer_nX[len(own_nX) :].zero_()
        self.own(buffer_nX, block).copy_(own_nX)
        return buffer_nX

    def gates(self, block: slice) -> Tensor:
        """Return gates for the block's assignments, [n, 1]; 0 in zero rows."""
        own_n1 = self.gates_R1[block]
        return torch.nn.functional.pad(own_n1, (0, 0, 0, self._rows(block) - len(own_n1)))

    def gather(self, name: str, source_SX: Tensor, block: slice) -> Tensor:
        """Gather the block's tokens, in the matmul dtype."""
        width = source_SX.shape[1]
        if source_SX.dtype == self.dtype:
            tokens_nX = self.buffer(name, block, width)
            own_nX = self.own(tokens_nX, block)
            tokens_nX[len(own_nX) :].zero_()
            torch.index_select(source_SX, 0, self.token_R[block], out=own_nX)
            return tokens_nX
        # Gather first, then convert: converting all tokens would need a float32 copy of them.
        narrow_nX = self.own(self.buffer(f"narrow {name}", block, width, source_SX.dtype), block)
        torch.index_select(source_SX, 0, self.token_R[block], out=narrow_nX)
        return self.filled(name, narrow_nX, block)

    def weight(self, name: str, of_experts: Tensor | QuantizedExperts, expert: int) -> Tensor:
        """Return an expert's weight in the matmul dtype."""
        # An expert's blocks are consecutive, so its weight is converted once.
        known, converted = self._converted.get(name, (-1, None))
        if isinstance(of_experts, QuantizedExperts):
            if converted is None or known != expert:
                self._converted.pop(name, None)
                converted = of_experts[expert].to(self.dtype)
                self._converted[name] = expert, converted
            return converted
        own = of_experts[expert]
        if own.dtype == self.dtype:
            return own
        if converted is None:
            converted = torch.empty(own.shape, dtype=self.dtype)
        if known != expert:
            self._converted[name] = expert, converted.copy_(own)
        return converted

    def project(
        self,
        name: str,
        x_nI: Tensor,
        weight_eOI: Tensor | QuantizedExperts,
        update: Update | None,
        expert: int,
        *,
        out: Tensor,
    ) -> None:
        """Write a block's projection by its expert's weight, with the update to it, to ``out`` [n, O]."""
        torch.mm(x_nI, self.weight(name, weight_eOI, expert).T, out=out)
        if update is not None:
            a_rI, b_Or = self._update(name, update, expert)
            out.addmm_(x_nI @ a_rI.T, b_Or.T)

    def project_backward(
        self,
        name: str,
        dy_nO: Tensor,
        weight_eOI: Tensor | QuantizedExperts,
        update: Update | None,
        expert: int,
        *,
        out: Tensor,
    ) -> None:
        """Write ``project``'s gradient for x to ``out`` [n, I]."""
        torch.mm(dy_nO, self.weight(name, weight_eOI, expert), out=out)
        if update is not None:
            a_rI, b_Or = self._update(name, update, expert)
            out.addmm_(dy_nO @ b_Or, a_rI)

    def add_update_gradients(
        self,
        name: str,
        sums: tuple[GradientSum | None, GradientSum | None],
        dy_nO: Tensor,
        x_nI: Tensor,
        update: Update | None,
        expert: int,
    ) -> None:
        """Add ``project``'s gradients for an update to the sums for A and B."""
        if update is None:
            return
        a_rI, b_Or = self._update(name, update, expert)
        if sums[0] is not None:
            sums[0].add_outer(expert, dy_nO @ b_Or, x_nI)
        if sums[1] is not None:
            sums[1].add_outer(expert, dy_nO, x_nI @ a_rI.T)

    def _update(self, name: str, update: Update, expert: int) -> tuple[Tensor, Tensor]:
        return self.weight(f"{name} A", update.a_erI, expert), self.weight(f"{name} B", update.b_eOr, expert)

    def add_to_tokens(self, out_SM: Tensor, y_nM: Tensor, block: slice) -> None:
        """Add the block's results to their tokens'."""
        # An expert has a token once, so additions follow expert order.
        out_SM.index_add_(0, self.token_R[block], self.own(y_nM, block).to(out_SM.dtype))


def padded_size(size: int) -> int:
    """Round up to one of a few sizes: multiples of 16, and from 257 on multiples of 1/16 of the next power of two."""
    # oneDNN, which runs bfloat16 matmuls, compiles code for every row count that it meets, at 4 to 10 ms each, and its
    # cache holds 1024 of them. Live routing would bring it new counts in every step.
    step = max(16, 2 ** ((size - 1).bit_length() - 4))
    return -(-size // step) * step


def _cut(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Split every expert's assignments into equal blocks."""
    start = 0
    for expert, stop in enumerate(ends):
        size = stop - start
        count = -(-size // BLOCK_TOKENS)
        for n in range(count):
            yield expert, slice(start + size * n // count, start + size * (n + 1) // count)
        start = stop


# Separate buffers (chunks) let weight gradients take the saved tensors' memory while backward runs: without them a
# layer with 16 experts needs 0.71 to 0.78 of transformers' memory in float32, with them 0.41 to 0.69 (``python -m
# benchmarks.moe``).
class SavedChunks:
    """Tensors that forward saves for its assignments, in buffers (chunks) of a few expert blocks; backward frees each
    chunk after use.

    Tensor order: gate and up for the first chunk, its x if x is saved, then the next chunk's.
    """

    def __init__(
        self, blocks: ExpertBlocks, tokens: DispatchedTokens, weights: ExpertWeights, call: ExpertsCall
    ) -> None:
        self.dtype = tokens.x_SM.dtype
        self.widths = saved_widths(call.run.recompute, weights, in_blocks=True)
        self.starts = self._cut(blocks)
        self.ends = [*self.starts[1:], len(blocks.order_R)]

    def _cut(self, blocks: ExpertBlocks) -> list[int]:
        """Return each chunk's first assignment; chunks have ``CHUNK_BYTES`` or a little more."""
        token_bytes = sum(self.widths) * self.dtype.itemsize
        starts = [0]
        for _, block in blocks:
            if (block.start - starts[-1]) * token_bytes >= CHUNK_BYTES:
                starts.append(block.start)
        return starts

    def allocate(self) -> list[Tensor]:
        """Allocate memory for all chunks, without touching it yet."""
        sizes = [stop - start for start, stop in zip(self.starts, self.ends, strict=True)]
        return [_own_pages(size, width, self.dtype) for size in sizes for width in self.widths]

    def of(self, saved: Sequence[Tensor], block: slice) -> list[Tensor]:
        """Return the block's slices of the saved tensors."""
        chunk, first = self._chunk_of(block)
        own = slice(block.start - self.starts[chunk], block.stop - self.starts[chunk])
        return [tensor[own] for tensor in saved[first : first + len(self.widths)]]

    def free_before(self, saved: list[Tensor], block: slice) -> None:
        """Free the chunks before the block's."""
        _, first = self._chunk_of(block)
        for number in range(first):
            saved[number] = _FREED

    def _chunk_of(self, block: slice) -> tuple[int, int]:
        """Return the block's chunk, and the index of its first tensor in the list."""
        chunk = bisect_right(self.starts, block.start) - 1
        return chunk, chunk * len(self.widths)


def _own_pages(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized tensor that returns its memory to the system when it is freed.

    An allocator may keep freed memory for tensors of the same size, so that gradients could not take it.
    """
    nbytes = rows * width * dtype.itemsize
    if nbytes < mmap.PAGESIZE:
        return torch.empty(rows, width, dtype=dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(rows, width)
