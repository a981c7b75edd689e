"""Divides a source into source parts: the unit that one worker encodes and that a restart does not repeat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from data_pipeline.prepare.readers.file_pieces import CUT_BYTES
from data_pipeline.prepare.source_items import FilePiece

PART_BYTES = CUT_BYTES
"""Maximum bytes on disk per source part, unless a single file piece has more. Part of the format: a shard never spans
several parts.
"""

IMAGE_PART_BYTES = CUT_BYTES >> 3
"""``PART_BYTES`` for images, which decode to several times their bytes on disk and take longer per byte."""

# Approximate for text with a vocabulary of a hundred thousand; a smaller one gives a second, partly filled shard.
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class SourcePart:
    """Consecutive file pieces: what one worker encodes."""

    number: int
    pieces: tuple[FilePiece, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(piece.size for piece in self.pieces)

    def __str__(self) -> str:
        first, last = self.pieces[0].file.name, self.pieces[-1].file.name
        if first == last:
            return f"part {self.number} ({first})"
        return f"part {self.number} ({first} … {last})"


def part_bytes(shard_tokens: int, *, images: bool = False) -> int:
    """Return the source part size: text for one shard with ``shard_tokens`` tokens, and at least ``PART_BYTES``."""
    if images:
        return max(IMAGE_PART_BYTES, shard_tokens // 2)
    return max(PART_BYTES, _BYTES_PER_TOKEN * shard_tokens)


def split_into_parts(pieces: Iterable[FilePiece], most_bytes: int) -> list[SourcePart]:
    """Group the file pieces, in order, into source parts of up to ``most_bytes``, with at least one piece each.

    A pure function of the listing: a document's shard depends on neither workers nor interruptions.
    """
    parts: list[SourcePart] = []
    open_pieces: list[FilePiece] = []
    size = 0
    for piece in pieces:
        # Greedy and in order: with best fit, a document's position would depend on the file pieces after it.
        if open_pieces and size + piece.size > most_bytes:
            parts.append(SourcePart(len(parts), tuple(open_pieces)))
            open_pieces, size = [], 0
        open_pieces.append(piece)
        size += piece.size
    if open_pieces:
        parts.append(SourcePart(len(parts), tuple(open_pieces)))
    return parts


def hash_parts(parts: Sequence[SourcePart]) -> str:
    """Return the xxh3_128 checksum over the assignment of file pieces to source parts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        # Use names and not paths: a corpus may be mounted elsewhere when the build continues.
        pieces = [[piece.file.name, piece.start, piece.stop, piece.size] for piece in part.pieces]
        digest.update(json.dumps(pieces).encode())
    return digest.hexdigest()
