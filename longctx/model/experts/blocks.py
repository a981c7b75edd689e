"""A tile's assignments in blocks of one expert each: their buffers, and the tensors that forward saves.

Axes: S tokens that arrived, k experts a token, R assignments in the order of their experts, n assignments of a block
(and rows of zeros after them, if products are formed in bfloat16), M model width, X any width.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.kernels.grouped import sort_by_expert
from longctx.kernels.matmul import multiplies_in_float32
from longctx.kernels.processor import Products
from longctx.model.experts.call import ExpertsCall, Tokens, Weights, saved_widths

BLOCK_TOKENS = 1024
"""Most assignments of a block: enough for products at full speed, few enough for the cache."""
CHUNK_BYTES = 8 << 20
"""Least size of what backward frees at a time."""
_FREED = torch.empty(0)


class Blocks:
    """A tile's assignments in blocks of one expert each, and buffers of one block."""

    def __init__(self, tokens: Tokens, weights: Weights, products: Products) -> None:
        order_R, _, ends_e = sort_by_expert(tokens.experts_Sk, len(weights.down_eMF))
        ends = ends_e.tolist()
        self.order_R = order_R[: ends[-1]]  # those without an expert here come last
        self.token_R = self.order_R // tokens.experts_Sk.shape[1]
        self.gates_R1 = tokens.gates_Sk.flatten().index_select(0, self.order_R).unsqueeze(-1)
        self.dtype = tokens.x_SM.dtype
        """In which products are formed."""
        if multiplies_in_float32(tokens.x_SM, products):
            self.dtype = torch.float32
        self._blocks = list(_cut(ends))
        self._most = max((self._rows(block) for _, block in self._blocks), default=0)
        self._buffers: dict[str, Tensor] = {}
        self._converted: dict[str, tuple[int, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Iterate over the blocks, expert after expert, as (expert, range of assignments)."""
        return iter(self._blocks)

    def _rows(self, block: slice) -> int:
        """Return the rows of a block's products: its assignments, and in bfloat16 some rows of zeros."""
        size = block.stop - block.start
        if self.dtype.itemsize > 2:
            return size
        return padded_size(size)

    def buffer(self, name: str, block: slice, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer [n, width] for a block. It overwrites the last block's values of this name."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._most, width, dtype=dtype or self.dtype)
        return self._buffers[name][: self._rows(block)]

    def own(self, tensor_nX: Tensor, block: slice) -> Tensor:
        """Return the rows of the block's assignments, without those of zeros."""
        return tensor_nX[: block.stop - block.start]

    def filled(self, name: str, own_nX: Tensor, block: slice) -> Tensor:
        """Return these rows for the block's assignments, in the dtype of the products, and zeros after them."""
        if own_nX.dtype == self.dtype and len(own_nX) == self._rows(block):
            return own_nX
        buffer_nX = self.buffer(name, block, own_nX.shape[1])
        buffer_nX[len(own_nX) :].zero_()
        self.own(buffer_nX, block).copy_(own_nX)
        return buffer_nX

    def gates(self, block: slice) -> Tensor:
        """Return the gates of the block's assignments, [n, 1]; 0 in rows of zeros."""
        own_n1 = self.gates_R1[block]
        return torch.nn.functional.pad(own_n1, (0, 0, 0, self._rows(block) - len(own_n1)))

    def gather(self, name: str, source_SX: Tensor, block: slice) -> Tensor:
        """Return the block's tokens, in the dtype of the products."""
        width = source_SX.shape[1]
        if source_SX.dtype == self.dtype:
            tokens_nX = self.buffer(name, block, width)
            own_nX = self.own(tokens_nX, block)
            tokens_nX[len(own_nX) :].zero_()
            torch.index_select(source_SX, 0, self.token_R[block], out=own_nX)
            return tokens_nX
        # gathered first and then converted: converting all tokens would need a tensor of them in float32
        narrow_nX = self.own(self.buffer(f"narrow {name}", block, width, source_SX.dtype), block)
        torch.index_select(source_SX, 0, self.token_R[block], out=narrow_nX)
        return self.filled(name, narrow_nX, block)

    def weight(self, name: str, of_experts: Tensor, expert: int) -> Tensor:
        """Return an expert's weight in the dtype of the products."""
        own = of_experts[expert]
        if own.dtype == self.dtype:
            return own
        # blocks of an expert follow one another, so that it is converted once
        known, converted = self._converted.get(name, (-1, None))
        if converted is None:
            converted = torch.empty(own.shape, dtype=self.dtype)
        if known != expert:
            self._converted[name] = expert, converted.copy_(own)
        return converted

    def add_to_tokens(self, out_SM: Tensor, y_nM: Tensor, block: slice) -> None:
        """Add the block's results to their tokens'."""
        # an expert has a token once, so additions happen in the order of the experts
        out_SM.index_add_(0, self.token_R[block], self.own(y_nM, block).to(out_SM.dtype))


def padded_size(size: int) -> int:
    """Round up to one of a few sizes: multiples of 16, from 257 on of a sixteenth of the next power of two.

    oneDNN, which forms products in bfloat16, compiles code for every number of rows that it meets, for 4 to 10 ms each,
    and its cache has room for 1024 of them. Live routing would bring it new numbers in every step.
    """
    step = max(16, 2 ** ((size - 1).bit_length() - 4))
    return -(-size // step) * step


def _cut(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Cut every expert's assignments into equal blocks."""
    start = 0
    for expert, stop in enumerate(ends):
        size = stop - start
        count = -(-size // BLOCK_TOKENS)
        for n in range(count):
            yield expert, slice(start + size * n // count, start + size * (n + 1) // count)
        start = stop


class SavedChunks:
    """Tensors that forward saves of its assignments, in chunks of blocks; backward frees each chunk after its use.

    The gradients of the weights take its memory: without chunks a layer of 16 experts needs 0.71 to 0.78 of
    transformers' memory in float32, with them 0.41 to 0.69 (``python -m benchmarks.moe``).

    Tensors come in this order: gate and up of the first chunk, its x if x is saved, then those of the next chunk.
    """

    def __init__(self, blocks: Blocks, tokens: Tokens, weights: Weights, call: ExpertsCall) -> None:
        self.dtype = tokens.x_SM.dtype
        self.widths = saved_widths(call.run.recompute, weights, in_blocks=True)
        self.starts = self._cut(blocks)
        self.stops = [*self.starts[1:], len(blocks.order_R)]

    def _cut(self, blocks: Blocks) -> list[int]:
        """Return the first assignments of chunks that have ``CHUNK_BYTES`` or a little more."""
        token_bytes = sum(self.widths) * self.dtype.itemsize
        starts = [0]
        for _, block in blocks:
            if (block.start - starts[-1]) * token_bytes >= CHUNK_BYTES:
                starts.append(block.start)
        return starts

    def allocate(self) -> list[Tensor]:
        """Allocate memory for all chunks, without touching it yet."""
        sizes = [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]
        return [_own_pages(size, width, self.dtype) for size in sizes for width in self.widths]

    def of(self, saved: Sequence[Tensor], block: slice) -> list[Tensor]:
        """Return the block's part of the saved tensors."""
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
    """Return an uninitialized tensor that returns its memory to the system when it is freed.

    An allocator may keep freed memory for tensors of the same size, so that gradients could not take it.
    """
    nbytes = rows * width * dtype.itemsize
    if nbytes < mmap.PAGESIZE:
        return torch.empty(rows, width, dtype=dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(rows, width)
