"""``TokenColumn``: lists of token ids in a mapped file, with checksum blocks verified before use."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_pipeline.shards.block_checksum import BLOCK_SHIFT, RECOVERY_HINT, ChecksumBlocks, advise
from longctx.errors import DataError

OFFSET = 8
"""Bytes per offset into the tokens."""


class TokenColumn:
    """Column of id lists: row ``i`` is ``values[offsets[i] : offsets[i + 1]]``."""

    def __init__(self, column: pa.Array, content: pa.Buffer, blocks: ChecksumBlocks, path: Path) -> None:
        self._path, self._blocks = path, blocks
        self.offsets = column.offsets.to_numpy(zero_copy_only=True)
        self.values = column.values.to_numpy(zero_copy_only=True)
        self._offsets_buffer, values = column.offsets.buffers()[1], column.values.buffers()[1]
        self._offsets_at, self._values_at = (
            buffer_offset(self._offsets_buffer, content, path),
            buffer_offset(values, content, path),
        )
        # Plain integers come from a memory view, in a third of numpy's time.
        self.tokens = _reader(path, blocks, self.values, memoryview(self.offsets), self._offsets_at, self._values_at)
        """Reads tokens ``start`` to ``stop`` of a row as a view, by default to its end."""
        # Tokens are read in long spans, all other data in a few scattered bytes.
        advise(values, mmap.MADV_NORMAL)

    def all_tokens(self) -> np.ndarray:
        """Return the tokens of all rows, as a view."""
        self._blocks.check(self._values_at, self._values_at + self.values.nbytes)
        return self.values

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Return each row's token count."""
        if len(rows) * mmap.PAGESIZE >= self.offsets.nbytes:
            # This touches nearly every page, so one read of all pages is faster than one read per page.
            advise(self._offsets_buffer, mmap.MADV_WILLNEED)
        # Neighboring offsets i and i + 1 delimit row i, so verify 16 bytes per row.
        self._blocks.check_items(self._offsets_at + OFFSET * rows, 2 * OFFSET)
        starts, ends = self.offsets[rows], self.offsets[rows + 1]
        if starts.min() < 0 or (ends <= starts).any() or ends.max() > len(self.values):
            raise offsets_error(self._path)
        self._release_offsets()
        return ends - starts

    def longest(self) -> int:
        """Return the longest row's token count."""
        # Request all offsets in one read.
        advise(self._offsets_buffer, mmap.MADV_WILLNEED)
        self._blocks.check(self._offsets_at, self._offsets_at + self.offsets.nbytes)
        longest = int(np.diff(self.offsets).max(initial=0))
        self._release_offsets()
        return longest

    def has(self, documents: int, tokens: int) -> bool:
        """Return whether the column has exactly this many rows and tokens."""
        if (len(self.offsets) - 1, len(self.values)) != (documents, tokens):
            return False
        ends = np.array([0, documents])
        self._blocks.check_items(self._offsets_at + OFFSET * ends, OFFSET)
        return self.offsets[ends].tolist() == [0, tokens]

    def _release_offsets(self) -> None:
        """Drop the pages with offsets from this process; they stay in the page cache.

        An epoch block draws on every shard, so without this a process would accumulate the offsets of the entire
        corpus.
        """
        # The file is mapped read-only, so no data can be lost.
        advise(self._offsets_buffer, mmap.MADV_DONTNEED)


def _reader(
    path: Path, blocks: ChecksumBlocks, values: np.ndarray, offset_of: memoryview, offsets_at: int, values_at: int
) -> Callable[..., np.ndarray]:
    """Return ``TokenColumn.tokens`` as a closure: a method would spend a third of its time on attribute lookups.

    The closure does not refer to the column, so the column is freed with its last user, without garbage collection.
    """
    token_bytes, num_tokens = values.itemsize, len(values)

    def tokens(row: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        if not blocks.all_seen:
            at = offsets_at + OFFSET * row
            # Inlined from ``ChecksumBlocks.check``: a call here would take a quarter of the read's total time.
            if not (blocks.seen[at >> BLOCK_SHIFT] and blocks.seen[(at + 2 * OFFSET - 1) >> BLOCK_SHIFT]):
                blocks.check(at, at + 2 * OFFSET)
        first, last = offset_of[row], offset_of[row + 1]
        # A slice with invalid offsets would contain another document's tokens, or fewer than the plan expects.
        if not 0 <= first < last <= num_tokens:
            raise offsets_error(path)
        if stop is not None and first + stop < last:
            last = first + stop
        first += start
        if first >= last:
            return values[:0]
        if not blocks.all_seen:
            begin, end = values_at + token_bytes * first, values_at + token_bytes * last
            if blocks.seen.find(0, begin >> BLOCK_SHIFT, ((end - 1) >> BLOCK_SHIFT) + 1) >= 0:
                blocks.check(begin, end)
        return values[first:last]

    return tokens


def offsets_error(path: Path) -> DataError:
    """Return the error for documents with invalid offsets."""
    return DataError(f"{path} is damaged: its document offsets are not ascending. {RECOVERY_HINT}")


def buffer_offset(part: pa.Buffer | None, content: pa.Buffer, path: Path) -> int:
    """Return a buffer's offset in the file; raise DataError if the buffer is not in the file."""
    if part is None or not part.size:
        return 0
    # A decompressed buffer is in separate memory, which madvise for files would destroy.
    if not content.address <= part.address <= content.address + content.size - part.size:
        raise DataError(f"{path} is compressed: its tokens cannot be mapped. Build the folder again.")
    return part.address - content.address
