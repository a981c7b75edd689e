"""Read packed rows as a ``CompactBatch``, all of it or one rank's share: tokens, the ones behind them, documents."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch, DocumentEnd, Span

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

    @property
    def first_documents(self) -> Sequence[int]:
        """The number of each folder's first document; a folder is a source."""
        ...

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Tokens of each of these documents [n], int64."""
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


def build_batch(shards: Documents, rows: list[Pieces], seq_len: int) -> CompactBatch:
    """Rows of pieces as a batch [len(rows), seq_len]; a row without pieces is all padding.

    Reads only the pieces, and one token beyond each that was cut: that token is the target of the piece's last one.
    """
    layout = _Layout.of(rows, seq_len)
    share = Share(layout.documents, [(0, len(rows) * seq_len, 1)], None)
    return _read(shards, layout, share, (len(rows), seq_len))


def build_share(
    shards: Documents, rows: list[Pieces], seq_len: int, place: Place
) -> tuple[CompactBatch, PackedDocuments]:
    """One rank's part of the same batch, [1, t], and the documents of the whole one, padding behind the rows left out.

    Reads this rank's tokens and one beyond each run of them, nothing else, where runs have a step of 1.
    """
    layout = _Layout.of(rows, seq_len)
    share = place(layout.documents)
    num_tokens = sum(count for _, count, _ in share.runs)
    # Experts' capacity is counted by rows.
    return _read(shards, layout, share, (1, num_tokens), row_tokens=seq_len), layout.documents


def documents_of(rows: list[Pieces], seq_len: int) -> PackedDocuments:
    """The documents of such a batch; nothing is read."""
    return _Layout.of(rows, seq_len).documents


def lengths_of(rows: list[Pieces], seq_len: int) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of each row's documents, that of padding too: it is attended to as well."""
    for row in rows:
        yield documents_of([row], seq_len).lengths


@dataclass(frozen=True)
class _Layout:
    """Pieces of all rows one after the other, with those of padding at rows' ends."""

    documents: PackedDocuments
    """Where each piece begins, among the tokens of all rows."""
    pieces: list[tuple[int, int, int] | None]
    """None is padding."""
    padding: list[int]
    """Which of them are."""
    num_behind: int = 0
    """How many of the last ones lie behind the rows."""

    @classmethod
    def of(cls, rows: list[Pieces], seq_len: int) -> _Layout:
        """That of these rows."""
        lengths: list[int] = []
        pieces: list[tuple[int, int, int] | None] = []
        padding: list[int] = []
        for row in rows:
            of_row = [stop - start for _, start, stop in row]
            lengths += of_row
            pieces += row
            missing = seq_len - sum(of_row)
            if missing:
                padding.append(len(pieces))
                lengths.append(missing)
                pieces.append(None)
        # Sums of lengths: there is nothing in them that ``PackedDocuments.of`` would have to look for.
        return cls(PackedDocuments(tuple(accumulate(lengths, initial=0))), pieces, padding)

    def padded(self, documents: PackedDocuments) -> _Layout:
        """The same with padding behind the rows, ``documents`` of its own."""
        missing = documents.num_documents - len(self.pieces)
        if not missing:
            return self
        behind = range(len(self.pieces), documents.num_documents)
        return _Layout(documents, [*self.pieces, *[None] * missing], [*self.padding, *behind], missing)

    def padding_id(self, number: int, shards: Documents) -> int:
        """What fills a piece of padding: the tokenizer's token within the rows, 0 behind them."""
        if number < len(self.pieces) - self.num_behind:
            return shards.padding
        return 0


@dataclass
class _Buffer:
    """What is read of a share, as it grows."""

    ids: np.ndarray
    ends: np.ndarray
    spans: list[Span] = field(default_factory=list)
    at: int = 0
    """Entries of ``ids`` so far."""
    num_targets: int = 0
    num_tokens: int = 0


Held = tuple[int, int, int]
"""The number of a document, its first token that lies in a run, and the one behind the last."""


def _held(bounds: Sequence[int], start: int, stop: int) -> Iterator[Held]:
    """Yield what lies in [start, stop) of each document."""
    number = bisect.bisect_right(bounds, start) - 1
    while start < stop:
        last = bounds[number + 1]
        # Nothing of an empty document.
        if last > start:
            yield number, start, min(stop, last)
            start = last
        number += 1


def _read(
    shards: Documents, layout: _Layout, share: Share, shape: tuple[int, int], *, row_tokens: int = 0
) -> CompactBatch:
    """The tokens of a share, and what belongs to them."""
    layout = layout.padded(share.documents)
    bounds = layout.documents.bounds
    held = [list(_held(bounds, start, start + (count - 1) * step + 1)) for start, count, step in share.runs]
    pieces = [layout.pieces[number] for run in held for number, _, _ in run]
    # Once for all that is read here, and right before it.
    shards.check_files({piece[0] for piece in pieces if piece is not None})
    ends = np.zeros(layout.documents.num_documents, np.uint8)
    ends[layout.padding] = DocumentEnd.PADDING
    # Behind each run, and behind each piece that was cut, there is one token more; with a step, behind each token.
    room = sum(len(run) + Span(*of, at=0).size for run, of in zip(held, share.runs, strict=True))
    buffer = _Buffer(np.empty(room, np.int32), ends)
    for run, (start, count, step) in zip(held, share.runs, strict=True):
        if step == 1:
            _read_run(shards, layout, run, buffer, start)
        else:
            _read_strided(shards, layout, run, buffer, Span(start, count, step, buffer.at))
    return CompactBatch(
        ids=torch.from_numpy(buffer.ids[: buffer.at]),
        spans=torch.tensor(buffer.spans, dtype=torch.int64).view(-1, len(Span._fields)),
        ends=torch.from_numpy(ends),
        bounds=layout.documents.cu_seqlens,
        documents=layout.documents,
        shape=shape,
        num_targets=buffer.num_targets,
        num_tokens=buffer.num_tokens,
        sources=_sources(shards, layout),
        row_tokens=row_tokens,
        placement=share.placement,
    )


def _sources(shards: Documents, layout: _Layout) -> torch.Tensor | None:
    """The source of each document; None where all have one."""
    if len(shards.first_documents) == 1:
        return None
    sources = np.full(len(layout.pieces), -1)
    documents = [piece[0] for piece in layout.pieces if piece is not None]
    is_document = np.ones(len(sources), bool)
    is_document[layout.padding] = False
    sources[is_document] = np.searchsorted(shards.first_documents, documents, side="right") - 1
    return torch.from_numpy(sources)


def _read_run(shards: Documents, layout: _Layout, run: list[Held], buffer: _Buffer, start: int) -> None:
    """Read the documents of a run of neighbours: one span, and another one behind each piece that was cut."""
    bounds, pieces, ids = layout.documents.bounds, layout.pieces, buffer.ids
    at = span_at = buffer.at
    last, following, num_tokens, num_targets = start, 0, 0, 0
    for number, first, last in run:
        num, following = last - first, 0
        piece = pieces[number]
        if piece is None:
            ids[at : at + num] = layout.padding_id(number, shards)
            at += num
            continue
        document, piece_start, _ = piece
        offset = piece_start - bounds[number]
        # One token more than is here, unless the document ends.
        tokens = shards.slice(document, first + offset, last + offset + 1)
        ids[at : at + len(tokens)] = tokens
        at += num
        following = len(tokens) - num
        num_tokens += num
        num_targets += num - 1 + following
        if following and last == bounds[number + 1]:
            # Cut here: the next document's first token would stand where its following one has to.
            buffer.ends[number] = DocumentEnd.MORE
            buffer.spans.append(Span(start, last - start, 1, span_at))
            start = last
            at += 1
            span_at = at
    if start < last:
        buffer.spans.append(Span(start, last - start, 1, span_at))
        if not following:
            # Nobody's target; but nothing that goes to a device is left as it was found.
            ids[at] = 0
        at += 1
    buffer.at = at
    buffer.num_tokens += num_tokens
    buffer.num_targets += num_targets


def _read_strided(shards: Documents, layout: _Layout, run: list[Held], buffer: _Buffer, span: Span) -> None:
    """Read the documents of every ``step``-th token: one span, what follows its tokens behind them."""
    bounds, ids, step = layout.documents.bounds, buffer.ids, span.step
    ids[span.at : span.at + span.size] = 0
    for number, first, last in run:
        # The first of the run's tokens that the document has.
        first += -(first - span.start) % step
        here = len(range(first, last, step))
        piece = layout.pieces[number]
        # Of a document shorter than a step, none may be here.
        if not here:
            continue
        at = span.at + (first - span.start) // step
        if piece is None:
            ids[at : at + here] = layout.padding_id(number, shards)
            continue
        document, piece_start, _ = piece
        offset = piece_start - bounds[number]
        tokens = shards.slice(document, first + offset, last + offset + 1)
        ids[at : at + here] = tokens[: last - first : step]
        following = tokens[1::step][:here]
        at += span.count
        ids[at : at + len(following)] = following
        buffer.num_tokens += here
        buffer.num_targets += len(following)
        if len(following) == here and first + (here - 1) * step + 1 == bounds[number + 1]:
            buffer.ends[number] = DocumentEnd.MORE
    buffer.spans.append(span)
    buffer.at = span.at + span.size
