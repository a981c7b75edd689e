"""Splits a large file into file pieces of complete records, found while its checksum is computed."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_pipeline.prepare.readers.parquet_pages import column_metadata
from data_pipeline.prepare.source_items import File, FilePiece, full_piece

CUT_BYTES = 1 << 28
"""Approximate file piece size. Part of the format: another value would assign documents to other shards."""
_READ_BYTES = 1 << 22


def hash_and_cut(file: File, cut_bytes: int) -> tuple[str, list[FilePiece]]:
    """Return a file's xxh3_128 checksum and its file pieces: several for large plain JSON Lines and Parquet, otherwise
    one.

    Raises OSError if the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    is_lines = file.format.kind == "lines" and not file.format.compression
    lines = None
    if is_lines and file.size > cut_bytes:
        lines = _LineSplitter(cut_bytes)
    with file.path.open("rb") as raw:
        while block := raw.read(_READ_BYTES):
            digest.update(block)
            if lines is not None:
                lines.add(block)
    pieces: list[FilePiece] = []
    if lines is not None:
        pieces = _line_pieces(file, lines.splits)
    elif file.format.kind == "parquet" and file.size > cut_bytes:
        pieces = _group_pieces(file, cut_bytes)
    # A single file piece has no end, like a file that cannot be split.
    if len(pieces) < 2:
        pieces = [full_piece(file)]
    return digest.hexdigest(), pieces


class _LineSplitter:
    """Finds the line ends at which to split, given the file's bytes in order."""

    def __init__(self, cut_bytes: int) -> None:
        self.splits: list[tuple[int, int]] = []
        """Byte offset of each cut, and the number of lines before it."""
        self._cut_bytes = cut_bytes
        self._at = self._lines = 0
        self._due = cut_bytes

    def add(self, block: bytes) -> None:
        """Process the next bytes."""
        scanned = 0
        # Cut at the first line end that leaves at least cut_bytes on its left.
        while (newline := block.find(b"\n", max(0, self._due - 1 - self._at))) >= 0:
            stop = newline + 1
            self._lines += block.count(b"\n", scanned, stop)
            scanned = stop
            self.splits.append((self._at + stop, self._lines))
            self._due = self._at + stop + self._cut_bytes
        self._lines += block.count(b"\n", scanned)
        self._at += len(block)


def _line_pieces(file: File, splits: list[tuple[int, int]]) -> list[FilePiece]:
    """Return the file pieces between these cuts."""
    ends = [cut for cut in splits if cut[0] < file.size]
    edges = [(0, 0), *ends, (file.size, 0)]
    return [
        FilePiece(file, start=start, stop=stop, first=first, size=stop - start)
        for (start, first), (stop, _) in itertools.pairwise(edges)
    ]


def _group_pieces(file: File, cut_bytes: int) -> list[FilePiece]:
    """Return consecutive row groups as file pieces; empty if the footer is damaged, which the reader reports."""
    try:
        with file.path.open("rb") as raw:
            # Read only the footer.
            table = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
            groups = range(table.num_row_groups)
            sizes = [_compressed_bytes(table, group) for group in groups]
            rows = [table.metadata.row_group(group).num_rows for group in groups]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        return []
    pieces: list[FilePiece] = []
    start = first = 0
    for stop in range(1, len(sizes) + 1):
        is_last = stop == len(sizes)
        size = sum(sizes[start:stop])
        if size >= cut_bytes or is_last:
            pieces.append(FilePiece(file, start=start, stop=stop, first=first, size=size))
            first += sum(rows[start:stop])
            start = stop
    return pieces


def _compressed_bytes(table: pq.ParquetFile, group: int) -> int:
    """Return a row group's total bytes on disk."""
    return sum(column.total_compressed_size for column in column_metadata(table, group, range(len(table.schema))))
