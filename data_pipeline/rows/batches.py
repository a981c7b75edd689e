"""Build a ``Batch`` from packed rows: tokens, shifted targets, positions, documents; all of it, or one rank's share."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments

Pieces = list[tuple[int, int, int]]
"""One row: document, start, stop of each piece."""

Runs = Sequence[tuple[int, int, int]]
"""Tokens start, start + step, … (count of them), each as start, count, step; ascending and disjoint."""


class Documents(Protocol):
    """What is read: ``shards.reader.ShardSet``, or several of them (``shards.corpus.Corpus``)."""

    @property
    def padding(self) -> int:
        """The token id that fills rows."""
        ...

    def check_files(self, documents: Iterable[int]) -> None:
        """DataError where a file of these documents is no longer the one that was mapped."""
        ...

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of a document; beyond its end there are none."""
        ...


@dataclass(frozen=True)
class Share:
    """The tokens of a micro-batch that one rank holds, its rows laid end to end."""

    documents: PackedDocuments
    """Those of all ranks' tokens; they may end behind the rows: what is there is padding, documents of its own."""
    runs: Runs
    """This rank's tokens, in its order."""
    placement: Any
    """``Batch.placement``."""


Place = Callable[[PackedDocuments], Share]
"""Who decides on the share, from the documents of the micro-batch."""


def build_batch(shards: Documents, rows: list[Pieces], seq_len: int) -> Batch:
    """Rows of pieces as a ``Batch`` [len(rows), seq_len]; a row without pieces is all padding.

    Reads only the pieces, and one token beyond each that was cut: that token is the target of the piece's last one.
    """
    layout = _Layout.of(rows, seq_len)
    documents = PackedDocuments.of(layout.bounds)
    return _read(shards, layout, Share(documents, [(0, len(rows) * seq_len, 1)], None), (len(rows), seq_len))


def build_share(shards: Documents, rows: list[Pieces], seq_len: int, place: Place) -> tuple[Batch, PackedDocuments]:
    """One rank's part of the same batch, [1, t], and the documents of the whole one, padding behind the rows left out.

    Reads this rank's tokens and one beyond each run of them, nothing else, where runs have a step of 1.
    """
    layout = _Layout.of(rows, seq_len)
    documents = PackedDocuments.of(layout.bounds)
    share = place(documents)
    num_tokens = sum(count for _, count, _ in share.runs)
    # Experts' capacity is counted by rows.
    return _read(shards, layout, share, (1, num_tokens), row_tokens=seq_len), documents


def documents_of(rows: list[Pieces], seq_len: int) -> PackedDocuments:
    """The documents of such a batch; nothing is read."""
    return PackedDocuments.of(_Layout.of(rows, seq_len).bounds)


def lengths_of(rows: list[Pieces], seq_len: int) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of each row's documents, that of padding too: it is attended to as well."""
    for row in rows:
        yield documents_of([row], seq_len).lengths


@dataclass(frozen=True)
class _Layout:
    """Pieces of all rows one after the other, with those of padding at rows' ends."""

    bounds: list[int]
    """Where piece n begins, among the tokens of all rows; one more entry for their end."""
    pieces: list[tuple[int, int, int] | None]
    """None is padding."""

    @classmethod
    def of(cls, rows: list[Pieces], seq_len: int) -> _Layout:
        """That of these rows."""
        bounds: list[int] = [0]
        pieces: list[tuple[int, int, int] | None] = []
        for number, row in enumerate(rows, start=1):
            for piece in row:
                bounds.append(bounds[-1] + piece[2] - piece[1])
                pieces.append(piece)
            if bounds[-1] < number * seq_len:
                bounds.append(number * seq_len)
                pieces.append(None)
        return cls(bounds, pieces)

    def overlapping(self, documents: PackedDocuments, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each document in [start, stop), its first token there and the one behind it."""
        bounds = documents.bounds
        number = bisect.bisect_right(bounds, start) - 1
        while number < documents.num_documents and bounds[number] < stop:
            yield number, max(start, bounds[number]), min(stop, bounds[number + 1])
            number += 1


def _documents_read(layout: _Layout, share: Share) -> set[int]:
    """The documents of which a share has tokens."""
    found: set[int] = set()
    for start, count, step in share.runs:
        for number, _, _ in layout.overlapping(share.documents, start, start + (count - 1) * step + 1):
            # Padding behind the rows has no piece, and padding within them has none of a document.
            if number < len(layout.pieces):
                piece = layout.pieces[number]
                if piece is not None:
                    found.add(piece[0])
    return found


def _read(shards: Documents, layout: _Layout, share: Share, shape: tuple[int, int], *, row_tokens: int = 0) -> Batch:
    """The tokens of a share, and what belongs to them."""
    num_tokens = shape[0] * shape[1]
    # Once for all that is read here, and right before it.
    shards.check_files(_documents_read(layout, share))
    # Everything starts as padding, and each piece overwrites its part.
    tokens = np.full(num_tokens, shards.padding, dtype=np.int64)
    targets = np.full(num_tokens, IGNORED_TARGET, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    document_ids = np.full(num_tokens, PADDING_DOCUMENT, dtype=np.int64)
    local = 0
    for start, count, step in share.runs:
        stop = start + (count - 1) * step + 1
        for number, first, last in layout.overlapping(share.documents, start, stop):
            # The first of the run's tokens that the document has.
            first += -(first - start) % step
            at = local + (first - start) // step
            here = len(range(first, last, step))
            into = slice(at, at + here)
            begin = share.documents.bounds[number]
            # Positions restart with each piece, also with one that continues a document: its row does not hold the
            # beginning.
            positions[into] = np.arange(first - begin, last - begin, step)
            if number >= len(layout.pieces):
                tokens[into] = 0  # padding behind the rows
                continue
            piece = layout.pieces[number]
            # Padding is a document of its own for attention, and no document for losses and routers.
            if piece is None or not here:
                continue
            document, piece_start, _ = piece
            # One token more than is here, unless the document ends: the last target of a document's end stays ignored,
            # that of a cut is the next token.
            ids = shards.slice(document, piece_start + first - begin, piece_start + last - begin + 1)
            tokens[into] = ids[: last - first : step]
            # Shifted here, before any rank cuts the row: a target may lie on another rank than its token.
            following = ids[1::step][:here]
            targets[at : at + len(following)] = following
            document_ids[into] = number
        local += count
    return Batch(
        tokens=torch.from_numpy(tokens.reshape(shape)),
        targets=torch.from_numpy(targets.reshape(shape)),
        positions=torch.from_numpy(positions.reshape(shape)),
        document_ids=torch.from_numpy(document_ids.reshape(shape)),
        documents=share.documents,
        row_tokens=row_tokens,
        placement=share.placement,
    )
