"""Read packed rows into a ``CompactBatch``, complete or one rank's portion: tokens, next tokens, documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from data_pipeline.rows.example_tensors import Runs, example_tensors, reply_tensors
from data_pipeline.rows.examples import Examples
from data_pipeline.rows.fim_documents import Documents
from data_pipeline.rows.pack import Row
from data_pipeline.rows.preferences import PreferenceReplies
from data_pipeline.rows.row_layout import Held, RowLayout
from data_pipeline.rows.token_masking import Masking
from data_pipeline.shards.reader import SourceSide
from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch, DocumentEnd, TokenSpan
from longctx.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """Tokens in a micro-batch that one rank holds, with the rows concatenated."""

    documents: PackedDocuments
    """Documents over all ranks' tokens; they may extend beyond the rows, into padding documents."""
    runs: Runs
    """This rank's tokens, in its order."""
    placement: Any
    """Value for ``Batch.placement``."""


Place = Callable[[PackedDocuments], Share]
"""Function that chooses this rank's tokens, given the micro-batch's documents."""


Readable = Documents | SourceSide | Examples | PreferenceReplies
"""Data that rows are read from, on either side."""


class Sources(NamedTuple):
    """Source side for pairs, read by an encoder."""

    documents: SourceSide | Examples
    seq_len: int
    """Source tokens per row."""


def build_batch(
    shards: Readable,
    rows: Sequence[Row],
    seq_len: int,
    *,
    masking: Masking | None = None,
    sources: Sources | None = None,
) -> CompactBatch:
    """Build a batch [len(rows), seq_len] from rows; a row without pieces is all padding.

    Reads only the rows' pieces, and one token beyond each cut piece: the target for its last token.
    """
    layout = RowLayout.of(rows, seq_len, of_pairs=sources is not None)
    batch = _read(shards, layout, _all_of(layout, len(rows) * seq_len), (len(rows), seq_len), masking=masking)
    if sources is None:
        return batch
    other = RowLayout.of([row.source for row in rows], sources.seq_len, of_pairs=True)
    shape = (len(rows), sources.seq_len)
    return replace(batch, source=_read(sources.documents, other, _all_of(other, shape[0] * shape[1]), shape))


def _all_of(layout: RowLayout, num_tokens: int) -> Share:
    """Return the portion for a process that holds all tokens."""
    return Share(layout.documents, [(0, num_tokens, 1)], None)


def build_share(
    shards: Readable,
    rows: Sequence[Row],
    seq_len: int,
    place: Place,
    *,
    masking: Masking | None = None,
    sources: Sources | None = None,
    place_source: Place | None = None,
) -> tuple[CompactBatch, PackedDocuments]:
    """Build one rank's portion of the batch, [1, t], and return it with the documents on all ranks.

    The documents exclude padding after the rows. Reads only this rank's tokens, and one beyond each span if its step is
    1. ``place_source`` selects this rank's source tokens; None means ``place``.
    """
    layout = RowLayout.of(rows, seq_len, of_pairs=sources is not None)
    batch = _share(shards, layout, place(layout.documents), seq_len, masking)
    # Place sources separately: their rows have another length and other documents.
    if sources is not None:
        other = RowLayout.of([row.source for row in rows], sources.seq_len, of_pairs=True)
        share = (place_source or place)(other.documents)
        batch = replace(batch, source=_share(sources.documents, other, share, sources.seq_len))
    return batch, layout.documents


def _share(
    shards: Readable, layout: RowLayout, share: Share, seq_len: int, masking: Masking | None = None
) -> CompactBatch:
    """Return one rank's portion of one side."""
    num_tokens = sum(count for _, count, _ in share.runs)
    if share.documents.prefixes and num_tokens < share.documents.num_tokens:
        raise ConfigError(
            "two replies share one copy of their prompt, but several ranks share the row. Read preferences without "
            "shared prompts, or set parallel.context=1."
        )
    # The capacity of experts is per row, so pass the row length although the portion is one flat row.
    return _read(shards, layout, share, (1, num_tokens), row_tokens=seq_len, masking=masking)


def packed_documents(rows: Sequence[Row], seq_len: int, *, of_pairs: bool = False) -> PackedDocuments:
    """Return the batch's documents without reading tokens."""
    return RowLayout.of(rows, seq_len, of_pairs=of_pairs).documents


Lengths = tuple[int, ...]


def lengths_of(rows: Sequence[Row], seq_len: int, source_seq_len: int = 0) -> Iterator[tuple[Lengths, ...]]:
    """Yield each row's document lengths, and for pairs their source lengths.

    Padding counts as a document, because attention is computed on it too.
    """
    for row in rows:
        own = packed_documents([row], seq_len, of_pairs=source_seq_len > 0).lengths
        if source_seq_len:
            yield own, packed_documents([row.source], source_seq_len, of_pairs=True).lengths
        else:
            yield (own,)


@dataclass(slots=True)
class _Buffer:
    """Growing buffer for a rank's portion."""

    ends: bytearray
    """One ``DocumentEnd`` per document."""
    padding: int
    """Padding id inside rows."""
    dtype: np.dtype
    """Token dtype."""
    parts: list[np.ndarray] = field(default_factory=list)
    """Entries for ``CompactBatch.ids``: views, joined once all are present."""
    spans: list[TokenSpan] = field(default_factory=list)
    at: int = 0
    """Entries so far."""
    num_targets: int = 0
    num_tokens: int = 0

    @classmethod
    def of(cls, layout: RowLayout, padding: int, tokens: list[np.ndarray]) -> _Buffer:
        """Create an empty buffer for these tokens."""
        ends = bytearray(layout.documents.num_documents)
        for number in layout.padding:
            ends[number] = DocumentEnd.PADDING
        dtype = np.dtype(np.int32)
        if tokens:
            dtype = tokens[0].dtype
        return cls(ends, padding, dtype)

    def ids(self) -> np.ndarray:
        """Return all entries: uint16 if the shards store uint16 (vocabulary up to 65,536 ids), int32 otherwise."""
        # A tenth of the time that NumPy takes per entry.
        joined = bytearray().join(self.parts)  # pyright: ignore[reportArgumentType], arrays say so from Python 3.12 on
        if len(joined) == self.at * self.dtype.itemsize:
            # Reinterpret uint32 as int32: vocabularies have fewer than 2^31 ids.
            return np.frombuffer(joined, _IDS.get(self.dtype, self.dtype))
        # Dtypes differ: spans with a step, or documents with and without fill-in-the-middle.
        return np.concatenate(self.parts, dtype=np.int32, casting="same_kind")


_IDS = {np.dtype(np.uint32): np.dtype(np.int32)}
"""Batch dtype by shard dtype, if they differ."""
_NO_SPANS = np.empty((0, len(TokenSpan._fields)))


def _read(
    shards: Readable,
    layout: RowLayout,
    share: Share,
    shape: tuple[int, int],
    *,
    row_tokens: int = 0,
    masking: Masking | None = None,
) -> CompactBatch:
    """Read a rank's tokens, with targets, documents and masks."""
    layout = layout.padded(share.documents)
    held = [_held(layout.documents, *run) for run in share.runs]
    # Read everything in one call, so that each file is verified once, right before it is read.
    found = shards.slices(layout.wanted(held))
    buffer, tokens = _Buffer.of(layout, shards.padding, found), iter(found)
    for own, (start, count, step) in zip(held, share.runs, strict=True):
        if step == 1:
            _add_run(buffer, layout, own, tokens, start)
        else:
            _add_strided(buffer, layout, own, tokens, TokenSpan(start, count, step, buffer.at))
    targets = None
    if shards.is_masked:
        bounds = _target_runs(shards, layout, held)
        buffer.num_targets = sum(_num_inside(bounds, *run) for run in share.runs)
        targets = torch.from_numpy(bounds)
    masked = None
    if masking is not None:
        masked = torch.from_numpy(_masked(shards, layout, share, held, found, masking))
        buffer.num_targets = masked.shape[1]
    of_examples: dict[str, Any] = {}
    if isinstance(shards, Examples):
        of_examples = example_tensors(shards, layout, share.runs, held)
    elif isinstance(shards, PreferenceReplies):
        of_examples = reply_tensors(shards, layout, share.runs, held)
    return CompactBatch(
        masked=masked,
        **of_examples,
        ids=torch.from_numpy(buffer.ids()),
        spans=torch.from_numpy(np.array(buffer.spans or _NO_SPANS, np.int64)),
        ends=torch.from_numpy(np.frombuffer(buffer.ends, np.uint8)),
        bounds=layout.documents.cu_seqlens,
        documents=layout.documents,
        shape=shape,
        target_runs=targets,
        num_targets=buffer.num_targets,
        num_tokens=buffer.num_tokens,
        sources=_sources(shards, layout),
        row_tokens=row_tokens,
        placement=share.placement,
    )


def _held(documents: PackedDocuments, start: int, count: int, step: int) -> list[Held]:
    """Return a span's tokens in each document, starting at the span's first token in it."""
    found = documents.within(start, start + (count - 1) * step + 1)
    if step == 1:
        return found
    on_step = ((number, first + (start - first) % step, last) for number, first, last in found)
    # A document shorter than the step may have no token on this rank.
    return [held for held in on_step if held[1] < held[2]]


def _target_runs(shards: Readable, layout: RowLayout, held: Iterable[list[Held]]) -> np.ndarray:
    """Return the spans of tokens with a target in the loss, as pairs of bounds, int64 [2 · spans].

    Covers only documents with tokens on this rank. A token's target is the next token in its document, so these are the
    shards' target spans shifted by one and cut at piece ends.
    """
    assert not isinstance(shards, Examples), "all tokens in an example are targets"
    found: list[np.ndarray] = [np.empty(0, np.int64)]
    for number in sorted({number for run in held for number, _, _ in run}):
        piece = layout.piece(number)
        if piece is None:
            continue
        document, start, stop = piece
        bounds = shards.target_runs(document)
        if bounds is None:
            # All tokens except the document's first, which is never a target.
            length = int(shards.lengths_of(np.array([document]))[0])
            bounds = np.array([1, max(length, 1)], np.int64)
        # Shift bounds from target tokens to the tokens that predict them, then clip to this piece.
        inside = np.clip(bounds - 1, start, stop).reshape(-1, 2)
        inside = inside[inside[:, 0] < inside[:, 1]]
        found.append(inside.ravel() + (layout.documents.bounds[number] - start))
    return np.concatenate(found)


def _masked(
    shards: Readable,
    layout: RowLayout,
    share: Share,
    held: Sequence[list[Held]],
    found: Sequence[np.ndarray],
    masking: Masking,
) -> np.ndarray:
    """Return this rank's chosen token indices and their replacements, int32 [2, chosen]."""
    pieces, local = [], 0
    for own, (start, count, step) in zip(held, share.runs, strict=True):
        for number, first, last in own:
            piece = layout.piece(number)
            if piece is not None:
                document, begin, _ = piece
                offset = begin - layout.documents.bounds[number]
                pieces.append((number, document, first + offset, last + offset, local + (first - start) // step, step))
        local += count
    # Whole-word masking needs the tokens before each piece to find the word that the piece starts in.
    context: Sequence[np.ndarray] = [np.empty(0, np.int32)] * len(pieces)
    if masking.context:
        context = shards.slices([(document, max(0, a - masking.context), a) for _, document, a, *_ in pieces])
    parts = [np.empty((2, 0), np.int32)]
    for piece, tokens, before in zip(pieces, found, context, strict=True):
        number, document, first, last, at, step = piece
        folder, own_number = _owner(shards, document)
        chosen, read_as = masking.draw(folder, own_number, layout.epoch(number), first, tokens[: last - first], before)
        on_step = chosen % step == 0
        parts.append(np.stack([at + chosen[on_step] // step, read_as[on_step]]).astype(np.int32))
    return np.concatenate(parts, axis=1)


def _owner(shards: Readable, document: int) -> tuple[int, int]:
    """Return a document's folder and the number that seeds its random draws."""
    # Folder-local numbers, so that a document's masks do not depend on the mixture it is read in.
    if isinstance(shards, Examples):
        return 0, shards.key(document)
    folder = int(np.searchsorted(shards.first_documents, document, side="right")) - 1
    return folder, document - int(shards.first_documents[folder])


def _num_inside(bounds: np.ndarray, start: int, count: int, step: int) -> int:
    """Count a span's tokens inside the target spans with these bounds."""
    # ``bounds`` alternate start, end: a token is inside a target span if an odd number of bounds is at or before it.
    tokens = np.arange(start, start + count * step, step)
    return int((np.searchsorted(bounds, tokens, side="right") % 2).sum())


def _sources(shards: Readable, layout: RowLayout) -> torch.Tensor | None:
    """Return each document's source index, -1 for padding; None if there is a single source."""
    if len(shards.first_documents) == 1:
        return None
    sources = np.full(layout.documents.num_documents, -1)
    documents = [document for row in layout.rows for document in row.documents]
    is_document = np.ones(len(sources), bool)
    is_document[list(layout.padding)] = False
    sources[is_document] = np.searchsorted(shards.first_documents, documents, side="right") - 1
    return torch.from_numpy(sources)


def _add_run(buffer: _Buffer, layout: RowLayout, run: list[Held], tokens: Iterator[np.ndarray], start: int) -> None:
    """Add a contiguous span's documents: one ``TokenSpan``, and a further one after each cut piece."""
    ends = buffer.ends
    last_number, last_first, last = run[-1]
    if ends.count(DocumentEnd.PADDING, run[0][0], last_number + 1):
        _add_cut_run(buffer, layout, run, tokens, start)
        return
    own = list(islice(tokens, len(run)))
    num_entries = sum(map(len, own))
    num_next = num_entries - (last - start)
    if num_next and num_next != len(own[-1]) - (last - last_first):
        _add_cut_run(buffer, layout, run, iter(own), start)
        return
    # Fast path: no padding, and at most the last piece was cut.
    buffer.parts += own
    buffer.spans.append(TokenSpan(start, last - start, 1, buffer.at))
    buffer.num_tokens += last - start
    buffer.num_targets += num_entries - len(own)
    if not num_next:
        # Never used as a target, but keeps uninitialized memory from reaching the device.
        buffer.parts.append(np.zeros(1, buffer.dtype))
        num_entries += 1
    elif last == layout.documents.bounds[last_number + 1]:
        ends[last_number] = DocumentEnd.CUT
    buffer.at += num_entries


# A ``TokenSpan``'s targets are its entries shifted by one, so the entry after each cut piece is that piece's next
# token. This moves all later entries by one, which requires a new ``TokenSpan``.
def _add_cut_run(buffer: _Buffer, layout: RowLayout, run: list[Held], tokens: Iterator[np.ndarray], start: int) -> None:
    """Add a span with padding or several cut pieces, document by document."""
    bounds, ends, parts = layout.documents.bounds, buffer.ends, buffer.parts
    at = span_at = buffer.at
    last, num_next, num_tokens, num_targets = start, 0, 0, 0
    for number, first, last in run:
        num, num_next = last - first, 0
        if ends[number] == DocumentEnd.PADDING:
            parts.append(np.full(num, layout.padding_id(number, buffer.padding), buffer.dtype))
            at += num
            continue
        # One token more than this rank holds, unless the document ends.
        part = next(tokens)
        parts.append(part)
        size = len(part)
        at += size
        num_next = size - num
        num_tokens += num
        num_targets += size - 1
        if num_next and last == bounds[number + 1]:
            # Start a new ``TokenSpan``: otherwise the next document's first token would be at the index of this piece's
            # next token.
            ends[number] = DocumentEnd.CUT
            buffer.spans.append(TokenSpan(start, last - start, 1, span_at))
            start, span_at = last, at
    if start < last:
        buffer.spans.append(TokenSpan(start, last - start, 1, span_at))
        if not num_next:
            # Never used as a target, but keeps uninitialized memory from reaching the device.
            parts.append(np.zeros(1, buffer.dtype))
            at += 1
    buffer.at = at
    buffer.num_tokens += num_tokens
    buffer.num_targets += num_targets


def _add_strided(
    buffer: _Buffer, layout: RowLayout, run: list[Held], tokens: Iterator[np.ndarray], span: TokenSpan
) -> None:
    """Add a strided span: one ``TokenSpan`` with its tokens, followed by each token's next token."""
    # With step > 1, neighboring entries are not consecutive tokens, so targets need an array of their own.
    bounds, step = layout.documents.bounds, span.step
    own, next_tokens = np.zeros((2, span.count), buffer.dtype)
    for number, first, last in run:
        at, num_tokens = (first - span.start) // step, len(range(first, last, step))
        if buffer.ends[number] == DocumentEnd.PADDING:
            own[at : at + num_tokens] = layout.padding_id(number, buffer.padding)
            continue
        part = next(tokens)
        own[at : at + num_tokens] = part[: last - first : step]
        next_part = part[1::step][:num_tokens]
        next_tokens[at : at + len(next_part)] = next_part
        buffer.num_tokens += num_tokens
        buffer.num_targets += len(next_part)
        if len(next_part) == num_tokens and first + (num_tokens - 1) * step + 1 == bounds[number + 1]:
            buffer.ends[number] = DocumentEnd.CUT
    buffer.parts += own, next_tokens
    buffer.spans.append(span)
    buffer.at += span.size
