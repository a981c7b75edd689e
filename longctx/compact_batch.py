"""``CompactBatch``: a micro-batch on its way from the shards to a device, in two or four bytes per token.

A token and the one that follows it are in one buffer; positions and document ids are derived from the document
boundaries. ``unpack`` makes the ``Batch`` of int64 tensors, 32 bytes per token, on the device that uses them.

Axes: B rows, t tokens of this rank, D documents of the full sequence, S spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments, Stream, asked_for


class DocumentEnd(IntEnum):
    """Kind of token after the last token of a document."""

    NOTHING = 0
    """It ends there: its last token has no target."""
    MORE = 1
    """It was cut there: the token behind the cut is the target."""
    PADDING = 2
    """It is no document but padding: no token of it has a target."""


class Span(NamedTuple):
    """Tokens start, start + step, … of the sequence (``count`` of them), contiguous in ``CompactBatch.ids``."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    step: int
    at: int
    """Where its first token lies."""

    @property
    def following(self) -> int:
        """Distance in the buffer from a token to the one that follows it."""
        # Neighbours share the buffer: each token's following one is the next. With a step, the following tokens come
        # after all.
        if self.step == 1:
            return 1
        return self.count

    @property
    def size(self) -> int:
        """Number of buffer entries."""
        return self.count + self.following


@dataclass(frozen=True, kw_only=True)
class CompactBatch:
    """One rank's tokens of a micro-batch, or all of them, on the CPU."""

    ids: Tensor
    """Token ids, uint16 or int32 as the shards have them: each span's tokens, and the one behind each of them."""
    spans: Tensor
    """int64 [S, 4]: ``Span`` by ``Span``, in the order of this rank's tokens."""
    ends: Tensor
    """uint8 [D]: a ``DocumentEnd`` of each document."""
    bounds: Tensor
    """int64 [D + 1]: ``documents.cu_seqlens``."""
    documents: PackedDocuments
    """``Batch.documents``."""
    shape: tuple[int, int]
    """(B, t)."""
    counted: Tensor | None = None
    """Runs of tokens of the whole sequence whose target counts in the loss, of this rank's documents: first token and
    the one behind the last of each, int64 [2 · runs], ascending. None if every target counts."""
    masked: Tensor | None = None
    """This rank's tokens that masking chose, and what is read in the place of each, int32 [2, chosen]; ``ids`` have
    what stood there. None if nothing is masked."""
    seconds: Tensor | None = None
    """Token of each document that its second segment begins with, int64 [D]; None if each document is one segment."""
    firsts: Tensor | None = None
    """Of documents of two segments this rank's first tokens, and ``Stream.order`` of each, int32 [2, firsts]."""
    num_targets: int
    """Tokens that masking chose; without masking, those that one follows in their document, and that count."""
    num_tokens: int
    """Tokens that are not padding."""
    sources: Tensor | None = None
    """``Batch.sources``, which stay on the CPU."""
    source: CompactBatch | None = None
    """``Batch.source``: this rank's tokens of it."""
    row_tokens: int = 0
    """``Batch.row_tokens``."""
    placement: Any = None
    """``Batch.placement``."""

    @property
    def nbytes(self) -> int:
        """Number of bytes copied to the device."""
        of_source = 0 if self.source is None else self.source.nbytes
        return of_source + sum(getattr(self, name).nbytes for name in self._moving)

    def pinned(self) -> CompactBatch:
        """Return the same batch in page-locked memory, which a GPU copies from while it computes."""
        source = self.source
        if source is not None:
            source = source.pinned()
        return replace(self, **{name: getattr(self, name).pin_memory() for name in self._moving}, source=source)

    @property
    def _moving(self) -> tuple[str, ...]:
        """Names of the tensors that are copied to the device."""
        names = ("ids", "spans", "ends", "bounds")
        optional = ("counted", "masked", "seconds", "firsts")
        return names + tuple(name for name in optional if getattr(self, name) is not None)

    @property
    def num_pairs(self) -> int:
        """Number of documents of two segments with their first token here."""
        return 0 if self.firsts is None else self.firsts.shape[1]

    def num_ahead(self, most: int) -> int:
        """Return the same as ``Batch.num_ahead``."""
        return most * self.num_targets - _num_too_near(self, most)

    def unpack(self, device: torch.device | str = "cpu", prepare: Callable[[Stream], Batch] = asked_for) -> Batch:
        """Return the batch with its per-token tensors [B, t], int64, on ``device``, without a host synchronisation.

        ``prepare`` makes the targets of an objective, on the device.
        """
        stream = self.stream(device)
        if self.source is not None:
            # No token of the source is predicted.
            stream = replace(stream, source=replace(self.source.stream(device), following=None))
        return prepare(stream)

    def stream(self, device: torch.device | str) -> Stream:
        """Return the tokens on ``device``, without targets and without a source."""
        if torch.device(device).type == "cpu":
            per_token = self.copied()
        else:
            per_token = looked_up(self, device)
        places = firsts = None
        if self.seconds is not None and self.firsts is not None:
            # Padding has id -1: looked up as the first document's, and masked below.
            document_ids, seconds = per_token["document_ids"], self.seconds.to(device, non_blocking=True)
            is_second = per_token["positions"] >= seconds[document_ids.clamp(min=0)]
            per_token["segments"] = (is_second & (document_ids != PADDING_DOCUMENT)).long()
            firsts, orders = self.firsts.to(device, non_blocking=True).long()
            per_token["order"] = torch.full_like(document_ids, IGNORED_TARGET).index_copy_(0, firsts, orders)
        if self.masked is not None:
            places, read_as = self.masked.to(device, non_blocking=True).long()
            tokens = per_token["tokens"]
            per_token["masked"] = torch.full_like(tokens, IGNORED_TARGET).index_copy_(0, places, tokens[places])
            tokens.index_copy_(0, places, read_as)
        return Stream(
            **{name: x.view(self.shape) for name, x in per_token.items()},
            documents=self.documents,
            places=places,
            firsts=firsts,
            sources=self.sources,
            source=None,
            row_tokens=self.row_tokens,
            placement=self.placement,
        )

    def copied(self) -> dict[str, Tensor]:
        """Return the per-token tensors on the CPU, copied by document: a tenth of the time of ``looked_up``."""
        num_local = self.shape[0] * self.shape[1]
        names = ("tokens", "following", "positions", "document_ids")
        found = {name: torch.empty(num_local, dtype=torch.int64) for name in names}
        tokens, following, positions, document_ids = found.values()
        if self.counted is not None:
            found["counted"] = torch.empty(num_local, dtype=torch.bool)
        bounds, ends = self.documents.bounds, self.ends.tolist()
        counting = torch.arange(max(self.documents.lengths, default=0))
        local = 0
        for span in map(Span._make, self.spans.tolist()):
            start, count, step, at = span
            tokens[local : local + count] = self.ids[at : at + count]
            behind = at + span.following
            following[local : local + count] = self.ids[behind : behind + count]
            for number, first, last in self.documents.within(start, start + (count - 1) * step + 1):
                # The first of the span's tokens in this document; with a step there may be none.
                first += -(first - start) % step
                num = len(range(first, last, step))
                if not num:
                    continue
                begin = local + (first - start) // step
                into, place = slice(begin, begin + num), first - bounds[number]
                positions[into] = counting[place : place + (num - 1) * step + 1 : step]
                if ends[number] == DocumentEnd.PADDING:
                    document_ids[into], following[into] = PADDING_DOCUMENT, IGNORED_TARGET
                    continue
                document_ids[into] = number
                if ends[number] == DocumentEnd.NOTHING and first + (num - 1) * step + 1 == bounds[number + 1]:
                    following[begin + num - 1] = IGNORED_TARGET
            if self.counted is not None:
                index = torch.arange(start, start + count * step, step)
                found["counted"][local : local + count] = _inside(self.counted, index)
            local += count
        return found


def _num_too_near(batch: CompactBatch, most: int) -> int:
    """Return the number of predictions 1 … ``most`` tokens ahead that would start before their document."""
    missing, bounds = 0, batch.documents.bounds
    for start, count, step, _ in batch.spans.tolist():
        for number, first, last in batch.documents.within(start, start + (count - 1) * step + 1):
            begin = bounds[number]
            # Only the first tokens of a document, some of which may be on this rank.
            for index in range(begin, min(last, begin + most)):
                if index >= first and not (index - start) % step and _has_target(batch, number, index):
                    missing += most - (index - begin)
    return missing


def _has_target(batch: CompactBatch, number: int, index: int) -> bool:
    """Return whether a token of a document is followed by one that counts."""
    end = int(batch.ends[number])
    if end == DocumentEnd.PADDING:
        return False
    if end == DocumentEnd.NOTHING and index + 1 == batch.documents.bounds[number + 1]:
        return False
    return batch.counted is None or bool(_inside(batch.counted, torch.tensor([index])))


def looked_up(batch: CompactBatch, device: torch.device | str) -> dict[str, Tensor]:
    """Return the per-token tensors [B·t] by name, each token looked up separately, which is fast on a GPU."""
    ids, spans, ends, bounds = (
        x.to(device, non_blocking=True) for x in (batch.ids, batch.spans, batch.ends, batch.bounds)
    )
    counted = batch.counted
    if counted is not None:
        counted = counted.to(device, non_blocking=True)
    start_S, count_S, step_S, at_S = spans.unbind(1)
    num_local = batch.shape[0] * batch.shape[1]
    local = torch.arange(num_local, device=device)
    ends_S = count_S.cumsum(0)
    # Searched rather than repeated: no size here requires a host synchronisation.
    span = torch.searchsorted(ends_S, local, right=True)
    nth = local - (ends_S - count_S)[span]
    entry = at_S[span] + nth
    behind = torch.where(step_S == 1, 1, count_S)[span]
    index = start_S[span] + nth * step_S[span]
    document = torch.searchsorted(bounds[1:], index, right=True)
    end = ends[document]
    is_last = index + 1 == bounds[1:][document]
    ignored = (end == DocumentEnd.PADDING) | (is_last & (end == DocumentEnd.NOTHING))
    found = {
        "tokens": _looked_up(ids, entry),
        "following": _looked_up(ids, entry + behind).masked_fill_(ignored, IGNORED_TARGET),
        "positions": index - bounds[document],
        "document_ids": document.masked_fill(end == DocumentEnd.PADDING, PADDING_DOCUMENT),
    }
    if counted is not None:
        found["counted"] = _inside(counted, index)
    return found


def _inside(bounds: Tensor, index: Tensor) -> Tensor:
    """Return whether each index is in one of the runs with these bounds."""
    return torch.searchsorted(bounds, index, right=True) % 2 == 1


def _looked_up(ids: Tensor, index: Tensor) -> Tensor:
    """Return ``ids[index]`` as int64."""
    if ids.dtype != torch.uint16:
        return ids[index].long()
    # Few PyTorch operators support unsigned dtypes: the bits are looked up, and the sign is removed.
    return ids.view(torch.int16)[index].long().bitwise_and_(0xFFFF)
