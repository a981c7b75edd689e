"""``CompactBatch``: a micro-batch on its way from the shards to a device, in two or four bytes per token.

Axes: B rows, t tokens of this rank, D documents of the full sequence, S spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments, Stream, with_data_targets


class DocumentEnd(IntEnum):
    """Kind of token after a document's last token."""

    COMPLETE = 0
    """The document ends: its last token has no target."""
    CUT = 1
    """The document was cut: the token after the cut is the target."""
    PADDING = 2
    """Padding instead of a document: its tokens have no targets."""


class TokenSpan(NamedTuple):
    """Sequence tokens start, start + step, … (``count`` tokens), contiguous in ``CompactBatch.ids``."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    step: int
    at: int
    """Buffer index of its first token."""

    @property
    def next_offset(self) -> int:
        """Buffer distance from a token to its following token."""
        # Adjacent tokens share the buffer: each following token is the next entry. With a step, the following tokens
        # are stored after the last token.
        if self.step == 1:
            return 1
        return self.count

    @property
    def size(self) -> int:
        """Number of buffer entries."""
        return self.count + self.next_offset


# Each token and its following token share one buffer; positions and document ids are derived from the document bounds.
# ``unpack`` builds the ``Batch`` of int64 tensors, 32 bytes per token, on the device that uses them, so only the
# compact form crosses the bus.
@dataclass(frozen=True, kw_only=True)
class CompactBatch:
    """One rank's micro-batch tokens, or all of them, on the CPU."""

    ids: Tensor
    """Token ids, uint16 or int32 as in the shards: each span's tokens and their following tokens."""
    spans: Tensor
    """int64 [S, 4]: one ``TokenSpan`` per row, in this rank's token order."""
    ends: Tensor
    """uint8 [D]: a ``DocumentEnd`` per document."""
    bounds: Tensor
    """int64 [D + 1]: ``documents.cu_seqlens``."""
    documents: PackedDocuments
    """``Batch.documents``."""
    shape: tuple[int, int]
    """(B, t)."""
    target_runs: Tensor | None = None
    """Ranges of consecutive sequence tokens whose target counts in the loss, within this rank's documents: each range's
    first token and end, int64 [2 · ranges], ascending. None if every target counts."""
    masked: Tensor | None = None
    """This rank's masked tokens, and the token ids that replace them, int32 [2, chosen]; ``ids`` keep the originals.
    None without masking."""
    seconds: Tensor | None = None
    """First token of each document's second segment, int64 [D]; None if each document is one segment."""
    label_indices: Tensor | None = None
    """This rank's first tokens in labelled documents, with their ``Stream.labels``, int32 [2, labelled]."""
    reference_P2: Tensor | None = None
    """``Stream.reference_P2``."""
    pixels: Tensor | None = None
    """``Stream.pixels`` in this rank's token order, uint8 [B·t, C·P·P]."""
    num_targets: int
    """Masked tokens; without masking, tokens with a following token in their document that counts."""
    num_tokens: int
    """Tokens that are not padding."""
    sources: Tensor | None = None
    """``Batch.sources``, which stay on the CPU."""
    source: CompactBatch | None = None
    """``Batch.source``: this rank's source tokens."""
    row_tokens: int = 0
    """``Batch.row_tokens``."""
    placement: Any = None
    """``Batch.placement``."""

    @property
    def nbytes(self) -> int:
        """Bytes copied to the device."""
        of_source = 0 if self.source is None else self.source.nbytes
        return of_source + sum(getattr(self, name).nbytes for name in self._device_fields)

    def pinned(self) -> CompactBatch:
        """Copy the batch to page-locked memory, which a GPU reads from asynchronously."""
        source = self.source
        if source is not None:
            source = source.pinned()
        return replace(self, **{name: getattr(self, name).pin_memory() for name in self._device_fields}, source=source)

    @property
    def _device_fields(self) -> tuple[str, ...]:
        """Names of the tensors that are copied to the device."""
        names = ("ids", "spans", "ends", "bounds")
        optional = ("target_runs", "masked", "seconds", "label_indices", "reference_P2", "pixels")
        return names + tuple(name for name in optional if getattr(self, name) is not None)

    @property
    def num_labels(self) -> int:
        """Labelled documents with their first token on this rank."""
        return 0 if self.label_indices is None else self.label_indices.shape[1]

    def num_mtp_targets(self, most: int) -> int:
        """Return the same as ``Batch.num_mtp_targets``."""
        return most * self.num_targets - self._num_too_near(most)

    def unpack(
        self, device: torch.device | str = "cpu", prepare: Callable[[Stream], Batch] = with_data_targets
    ) -> Batch:
        """Build the batch with per-token tensors [B, t], int64, on ``device``, without a host sync.

        ``prepare`` creates an objective's targets on the device.
        """
        stream = self.stream(device)
        if self.source is not None:
            # source tokens are never predicted
            stream = replace(stream, source=replace(self.source.stream(device), next_token_ids=None))
        return prepare(stream)

    def stream(self, device: torch.device | str) -> Stream:
        """Return the tokens on ``device``, without targets and without a source."""
        if torch.device(device).type == "cpu":
            per_token = self.copied()
        else:
            per_token = self.unpack_by_lookup(device)
        masked_indices = label_indices = reference_P2 = None
        if self.seconds is not None:
            # Padding has id -1: look up document 0 for it, and mask it below.
            document_ids, seconds = per_token["document_ids"], self.seconds.to(device, non_blocking=True)
            is_second = per_token["positions"] >= seconds[document_ids.clamp(min=0)]
            per_token["segments"] = (is_second & (document_ids != PADDING_DOCUMENT)).long()
        if self.label_indices is not None:
            label_indices, labels = self.label_indices.to(device, non_blocking=True).long()
            per_token["labels"] = torch.full_like(per_token["tokens"], IGNORED_TARGET).index_copy_(
                0, label_indices, labels
            )
        if self.reference_P2 is not None:
            reference_P2 = self.reference_P2.to(device, non_blocking=True)
        if self.pixels is not None:
            per_token["pixels"] = self.pixels.to(device, non_blocking=True)
        if self.masked is not None:
            masked_indices, read_as = self.masked.to(device, non_blocking=True).long()
            tokens = per_token["tokens"]
            per_token["masked"] = torch.full_like(tokens, IGNORED_TARGET).index_copy_(
                0, masked_indices, tokens[masked_indices]
            )
            tokens.index_copy_(0, masked_indices, read_as)
        return Stream(
            **{name: x.view(*self.shape, *x.shape[1:]) for name, x in per_token.items()},
            documents=self.documents,
            masked_indices=masked_indices,
            label_indices=label_indices,
            reference_P2=reference_P2,
            sources=self.sources,
            source=None,
            row_tokens=self.row_tokens,
            placement=self.placement,
        )

    def copied(self) -> dict[str, Tensor]:
        """Build the per-token tensors on the CPU, document by document, in a tenth of the time ``unpack_by_lookup``
        takes.
        """
        num_local = self.shape[0] * self.shape[1]
        names = ("tokens", "next_token_ids", "positions", "document_ids")
        found = {name: torch.empty(num_local, dtype=torch.int64) for name in names}
        tokens, next_token_ids, positions, document_ids = found.values()
        if self.target_runs is not None:
            found["loss_mask"] = torch.empty(num_local, dtype=torch.bool)
        bounds, ends, first_positions = self.documents.bounds, self.ends.tolist(), self.documents.first_positions
        position_range = torch.arange(max(map(add, self.documents.lengths, first_positions), default=0))
        local = 0
        for span in map(TokenSpan._make, self.spans.tolist()):
            start, count, step, at = span
            tokens[local : local + count] = self.ids[at : at + count]
            next_at = at + span.next_offset
            next_token_ids[local : local + count] = self.ids[next_at : next_at + count]
            for number, first, last in self.documents.within(start, start + (count - 1) * step + 1):
                # the span's first token in this document; with a step there may be none
                first += -(first - start) % step
                num = len(range(first, last, step))
                if not num:
                    continue
                begin = local + (first - start) // step
                into, place = slice(begin, begin + num), first - bounds[number] + first_positions[number]
                positions[into] = position_range[place : place + (num - 1) * step + 1 : step]
                if ends[number] == DocumentEnd.PADDING:
                    document_ids[into], next_token_ids[into] = PADDING_DOCUMENT, IGNORED_TARGET
                    continue
                document_ids[into] = number
                if ends[number] == DocumentEnd.COMPLETE and first + (num - 1) * step + 1 == bounds[number + 1]:
                    next_token_ids[begin + num - 1] = IGNORED_TARGET
            if self.target_runs is not None:
                index = torch.arange(start, start + count * step, step)
                found["loss_mask"][local : local + count] = _inside(self.target_runs, index)
            local += count
        return found

    def _num_too_near(self, most: int) -> int:
        """Count the predictions 1 … ``most`` tokens ahead that would start before their document."""
        missing, bounds = 0, self.documents.bounds
        for start, count, step, _ in self.spans.tolist():
            for number, first, last in self.documents.within(start, start + (count - 1) * step + 1):
                begin = bounds[number]
                # only a document's first tokens, some of which may be on this rank
                for index in range(begin, min(last, begin + most)):
                    if index >= first and not (index - start) % step and self._has_target(number, index):
                        missing += most - (index - begin)
        return missing

    def _has_target(self, number: int, index: int) -> bool:
        """Return whether a document's token has a following token that counts."""
        end = int(self.ends[number])
        if end == DocumentEnd.PADDING:
            return False
        if end == DocumentEnd.COMPLETE and index + 1 == self.documents.bounds[number + 1]:
            return False
        return self.target_runs is None or bool(_inside(self.target_runs, torch.tensor([index])))

    def unpack_by_lookup(self, device: torch.device | str) -> dict[str, Tensor]:
        """Build the per-token tensors [B·t] by name with one lookup per token, which is fast on a GPU."""
        ids, spans, ends, bounds = (
            x.to(device, non_blocking=True) for x in (self.ids, self.spans, self.ends, self.bounds)
        )
        target_runs = self.target_runs
        if target_runs is not None:
            target_runs = target_runs.to(device, non_blocking=True)
        start_S, count_S, step_S, at_S = spans.unbind(1)
        num_local = self.shape[0] * self.shape[1]
        local = torch.arange(num_local, device=device)
        ends_S = count_S.cumsum(0)
        # searchsorted instead of repeat_interleave: no output size needs a host sync
        span = torch.searchsorted(ends_S, local, right=True)
        nth = local - (ends_S - count_S)[span]
        entry = at_S[span] + nth
        next_distance = torch.where(step_S == 1, 1, count_S)[span]
        index = start_S[span] + nth * step_S[span]
        document = torch.searchsorted(bounds[1:], index, right=True)
        end = ends[document]
        is_last = index + 1 == bounds[1:][document]
        ignored = (end == DocumentEnd.PADDING) | (is_last & (end == DocumentEnd.COMPLETE))
        found = {
            "tokens": _lookup_ids(ids, entry),
            "next_token_ids": _lookup_ids(ids, entry + next_distance).masked_fill_(ignored, IGNORED_TARGET),
            "positions": index - bounds[document],
            "document_ids": document.masked_fill(end == DocumentEnd.PADDING, PADDING_DOCUMENT),
        }
        if self.documents.prefixes:
            found["positions"] += torch.tensor(self.documents.first_positions).to(device, non_blocking=True)[document]
        if target_runs is not None:
            found["loss_mask"] = _inside(target_runs, index)
        return found


def _inside(bounds: Tensor, index: Tensor) -> Tensor:
    """Return whether each index is inside a range from ``bounds``."""
    return torch.searchsorted(bounds, index, right=True) % 2 == 1


def _lookup_ids(ids: Tensor, index: Tensor) -> Tensor:
    """Return ``ids[index]`` as int64."""
    if ids.dtype != torch.uint16:
        return ids[index].long()
    # Few PyTorch operators support unsigned dtypes, so look up the bits and clear the sign extension.
    return ids.view(torch.int16)[index].long().bitwise_and_(0xFFFF)
