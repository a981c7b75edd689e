"""Model input: packed document rows, their boundaries, and each token's following token.

Axes: B rows, T tokens a row; a small t is one rank's shard of T.
"""

from __future__ import annotations

import bisect
import operator
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from longctx.errors import ConfigError

IGNORED_TARGET = -100
"""Target for a token that is not counted: a document's last token, or padding."""

PADDING_DOCUMENT = -1
"""Entry in ``Batch.document_ids`` for padding tokens."""


@dataclass(frozen=True)
class PackedDocuments:
    """Documents packed end to end over a full sequence, for any number of ranks that share its tokens.

    Built once per batch, by ``of``; layouts, schedules, masks and kernels share the instance. It can be a dictionary
    key: its hash is computed once for any number of documents.
    """

    bounds: tuple[int, ...]
    """``cu_seqlens``: document n spans the tokens from entry n to entry n + 1. Two equal entries hold an empty
    document."""
    padding: tuple[int, ...] | None = field(default=None, compare=False)
    """Indices of padding documents, ascending; None if unknown. Not compared: layouts, schedules and masks are the
    same."""
    prefixes: tuple[int, ...] = ()
    """Per document, the number of an earlier one that it continues, such as the prompt of two replies, or −1: its
    tokens also see that document, and their positions follow it. Empty if each document stands alone."""

    # Fields, not properties: a compiled graph that counted the bounds would only be valid for one document count.
    num_tokens: int = field(init=False, compare=False, repr=False)
    """Length of the full sequence."""
    num_documents: int = field(init=False, compare=False, repr=False)
    """Documents in the sequence, including empty ones."""
    longest: int = field(init=False, compare=False, repr=False)
    """Length of the longest document that is not padding, with its prefix; 0 if all are."""
    lengths: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Tokens per document."""

    def __post_init__(self) -> None:
        self._set(self.bounds, tuple(map(operator.sub, self.bounds[1:], self.bounds)), self.padding, self.prefixes)

    def _set(
        self,
        bounds: tuple[int, ...],
        lengths: tuple[int, ...],
        padding: tuple[int, ...] | None,
        prefixes: tuple[int, ...],
    ) -> None:
        real_lengths: Sequence[int] = lengths
        if prefixes:
            real_lengths = [
                n + (lengths[before] if before >= 0 else 0) for n, before in zip(lengths, prefixes, strict=True)
            ]
        if padding:
            # RoPE frequencies that stretch with the length must not stretch with padding.
            real_lengths = list(real_lengths)
            for number in padding:
                real_lengths[number] = 0
        # a single update instead of one call per field: reading a micro-batch of short rows takes only a few dozen
        # assignments
        vars(self).update(
            bounds=bounds,
            num_tokens=bounds[-1],
            num_documents=len(lengths),
            longest=max(real_lengths, default=0),
            lengths=lengths,
            padding=padding,
            prefixes=prefixes,
        )

    @classmethod
    def of_lengths(
        cls, lengths: Sequence[int], padding: tuple[int, ...] | None = None, prefixes: tuple[int, ...] = ()
    ) -> PackedDocuments:
        """Build documents from these lengths, non-negative integers; ``padding`` and ``prefixes`` as in the fields."""
        documents = cls.__new__(cls)
        documents._set(tuple(accumulate(lengths, initial=0)), tuple(lengths), padding, prefixes)
        return documents

    @classmethod
    def of(
        cls, cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None, num_tokens: int | None = None
    ) -> PackedDocuments:
        """Build the documents between these boundaries; None means one document with ``num_tokens``.

        Raise ConfigError unless the boundaries are integers that ascend from 0, and end at ``num_tokens`` if that is
        given.
        """
        if cu_seqlens is None:
            assert num_tokens is not None, "num_tokens is required for a single document"
            return cls((0, num_tokens))
        if isinstance(cu_seqlens, PackedDocuments):
            if num_tokens in (None, cu_seqlens.num_tokens):
                return cu_seqlens
            found = cu_seqlens.bounds
        elif isinstance(cu_seqlens, Tensor):
            found = cu_seqlens.tolist()
        else:
            found = list(cu_seqlens)
        # checked here, once per batch, so that later code need not check again
        fault = _fault(found, num_tokens)
        if fault is not None:
            _refuse(found, num_tokens, fault)
        return cls(tuple(operator.index(bound) for bound in found))

    @classmethod
    def of_rows(cls, num_rows: int, row_tokens: int) -> PackedDocuments:
        """Build rows with one document each, packed end to end."""
        return cls(tuple(row_tokens * row for row in range(num_rows + 1)))

    def padded(self, num_tokens: int) -> PackedDocuments:
        """Append padding documents up to ``num_tokens``, each no longer than the longest document."""
        missing = num_tokens - self.num_tokens
        if not missing:
            return self
        assert missing > 0, f"{self.num_tokens} tokens are more than {num_tokens}"
        # in short documents padding costs no more attention than the real documents
        starts = range(self.num_tokens, num_tokens, self.longest or missing)
        added = range(self.num_documents, self.num_documents + len(starts))
        bounds, padding = (*self.bounds, *starts[1:], num_tokens), (*(self.padding or ()), *added)
        return PackedDocuments(bounds, padding, self.prefixes and self.prefixes + (-1,) * len(starts))

    def with_padding(self, document_ids: Tensor) -> PackedDocuments:
        """Return the same documents with ``padding`` taken from ``document_ids`` [B, T]: negative for padding.

        Return them unchanged if padding is already known, or if these are not the full sequence's tokens.
        """
        if self.padding is not None or document_ids.numel() != self.num_tokens:
            return self
        some = [number for number, length in enumerate(self.lengths) if length]
        is_padding = document_ids.flatten()[[self.bounds[number] for number in some]] < 0
        padding = tuple(number for number, is_one in zip(some, is_padding.tolist(), strict=True) if is_one)
        return PackedDocuments(self.bounds, padding, self.prefixes)

    @property
    def first_positions(self) -> tuple[int, ...]:
        """Position of each document's first token: 0, or the length of its prefix."""
        if not self.prefixes:
            return (0,) * self.num_documents
        return tuple(0 if number < 0 else self.lengths[number] for number in self.prefixes)

    def within(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return each document's overlap with tokens [start, stop): its index, first token there, and end.

        Documents without tokens there are omitted.
        """
        if start >= stop:
            return []
        number = bisect.bisect_right(self.bounds, start) - 1
        end_number = bisect.bisect_left(self.bounds, stop, number + 1)
        starts, lasts = list(self.bounds[number:end_number]), list(self.bounds[number + 1 : end_number + 1])
        starts[0], lasts[-1] = start, stop
        found = zip(range(number, end_number), starts, lasts, strict=True)
        return [held for held in found if held[1] < held[2]]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Boundaries as int64 [num_documents + 1] on the CPU. Read-only."""
        # a row may have thousands, and ``torch.tensor`` takes three times as long
        return torch.frombuffer(array("q", self.bounds), dtype=torch.int64)

    # the generated hash would read all boundaries at each cache lookup
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.bounds)


@dataclass(frozen=True, eq=False)
class ReadTokens:
    """Tokens whose hidden states are read after the last layer; all others serve its attention as keys and values."""

    indices_F: Tensor
    """Indices into [B·t], int64."""
    documents: PackedDocuments | None = None
    """The tokens as documents, in ascending order, if the CPU knows which document each is from: document n holds those
    of the batch's document n. The last layer then computes only their queries, in one process."""

    def select(self, x_BtM: Tensor) -> Tensor:
        """Return the tokens' rows [1, F, M]."""
        return x_BtM.flatten(0, 1).index_select(0, self.indices_F)[None]

    @classmethod
    def of_firsts(cls, indices_F: Tensor, documents: PackedDocuments) -> ReadTokens:
        """Return the first tokens of some documents, at these ascending indices."""
        padding = documents.padding
        if padding is None:
            return cls(indices_F)
        counts = [min(length, 1) for length in documents.lengths]
        for number in padding:
            counts[number] = 0
        # Only their number is known without waiting for a device.
        if sum(counts) != len(indices_F):
            return cls(indices_F)
        return cls(indices_F, PackedDocuments.of_lengths(counts))


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One sequence of packed documents, ready to be split between ranks token by token.

    Per-token tensors have shape [B, T] (or [B, t] after a split) and are split together: neither positions nor
    following tokens depend on shard boundaries. ``documents`` stay global.
    """

    tokens: Tensor
    """Token ids, int64."""
    positions: Tensor
    """Token position in its document, int64, restarting from 0 at every entry of ``cu_seqlens``; after a prefix, from
    the prefix's length."""
    document_ids: Tensor
    """The token's document index in ``documents``, int64; ``PADDING_DOCUMENT`` for padding."""
    documents: PackedDocuments
    """Documents, or pieces, in the flattened B·T tokens. Attention never crosses a boundary, and every multiple of T is
    one. Padding at a row's end is its own document."""
    next_token_ids: Tensor | None = None
    """Next token in the same document, int64; ``IGNORED_TARGET`` after the last one. None once an objective has
    consumed it, or if unused."""
    loss_mask: Tensor | None = None
    """Whether predicting the following token counts in the loss, bool; None if it always does."""
    masked: Tensor | None = None
    """Original token at masked positions, int64; ``IGNORED_TARGET`` at all others. Unset without masking."""
    masked_indices: Tensor | None = None
    """Masked positions as indices into [B·t], int64 [chosen], if known. The head skips all other tokens."""
    segments: Tensor | None = None
    """The token's segment in its document, 0 or 1, int64; None if each document is one segment."""
    pixels: Tensor | None = None
    """Each token's pixels, uint8 [B, T, C·P·P]; zeros for class tokens and padding. None if the model reads token ids.
    """
    labels: Tensor | None = None
    """The document's label at its first token, int64: its class, or for two segments 0 if they follow each other as in
    their text and 1 if not; ``IGNORED_TARGET`` at all other tokens. None if unused."""
    label_indices: Tensor | None = None
    """These first tokens as indices into [B·t], int64 [labelled], if known."""
    reference_P2: Tensor | None = None
    """Log-likelihoods of a record's two replies under a reference model, float64 [P, 2] for all records in the batch,
    wherever their tokens are. NaN if unknown; None without replies to compare."""
    sources: Tensor | None = None
    """Source number per document [num_documents], int64, −1 for padding; None if all share one source."""
    source: Stream | None = None
    """Encoder input: document n of this batch reads document n of the source, which has its own rows and placement."""
    row_tokens: int = 0
    """Row length before rows were concatenated into one; 0 while rows are separate."""
    placement: Any = None
    """Token placement over all ranks (``parallel.layout.SequenceLayout``) if the batch was split between them; None for
    a full batch."""

    def __post_init__(self) -> None:
        # once per full batch: after a split no rank could tell
        object.__setattr__(self, "documents", self.documents.with_padding(self.document_ids))

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of ``documents``: int64 [num_documents + 1] on the CPU, ascending from 0 to B·T."""
        return self.documents.cu_seqlens

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids != PADDING_DOCUMENT).sum())

    @property
    def num_labels(self) -> int:
        """Labelled documents with their first token on this rank."""
        return 0 if self.labels is None else int((self.labels != IGNORED_TARGET).sum())

    @property
    def num_targets(self) -> int:
        """Masked tokens; without masking, tokens with a following token that counts."""
        targets = self.masked
        if targets is None:
            targets = self._targets()
        return int((targets != IGNORED_TARGET).sum())

    def num_mtp_targets(self, most: int) -> int:
        """Count the predictions 2, 3, … ``most`` + 1 tokens ahead that stay within their document."""
        return _count_mtp_targets(self._targets(), self.positions, most)

    def flatten_rows(self) -> Self:
        """Concatenate all rows into one [1, B·T], the shape that a sequence layout splits."""
        flat, source = self.map_tokens(lambda x: x.flatten(0, 1)[None]), self.source
        if source is not None:
            source = source.flatten_rows()
        # Expert capacity is counted per row, so keep the row length; flattening twice equals flattening once.
        return replace(flat, source=source, row_tokens=self.row_tokens or self.tokens.shape[1])

    def padded(self, num_tokens: int) -> Self:
        """Return one row with ``num_tokens`` tokens, padded with separate documents without targets."""
        flat, documents = self.flatten_rows(), self.documents.padded(num_tokens)
        missing = num_tokens - self.documents.num_tokens
        if not missing:
            return flat
        positions = torch.arange(missing)[None] % documents.lengths[self.documents.num_documents]
        fill = {
            "loss_mask": 0,
            "tokens": 0,
            "segments": 0,
            "labels": IGNORED_TARGET,
            "pixels": 0,
            "next_token_ids": IGNORED_TARGET,
            "masked": IGNORED_TARGET,
            "targets": IGNORED_TARGET,
            "document_ids": PADDING_DOCUMENT,
        }
        longer = {}
        for name, x in flat.per_token().items():
            padding_values = positions.to(x.dtype)
            if name in fill:
                padding_values = x.new_full((1, missing, *x.shape[2:]), fill[name])
            longer[name] = torch.cat((x, padding_values), dim=1)
        return replace(flat, **longer, documents=documents)

    def per_token(self) -> dict[str, Tensor]:
        """Return per-token tensors by name: all must be split together to stay aligned."""
        found = {"tokens": self.tokens, "positions": self.positions, "document_ids": self.document_ids}
        for name in ("next_token_ids", "loss_mask", "masked", "segments", "pixels", "labels"):
            if (values := getattr(self, name)) is not None:
                found[name] = values
        return found

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``change`` to the per-token tensors; ``documents`` stay as they are."""
        # masked_indices and label_indices index the old tokens
        return replace(
            self, **{name: change(x) for name, x in self.per_token().items()}, masked_indices=None, label_indices=None
        )

    def to(self, device: torch.device) -> Self:
        """Move per-token tensors to ``device``; ``documents`` stay on the CPU, for schedules."""
        moved = self.map_tokens(lambda x: x.to(device, non_blocking=True))
        rows = {name: getattr(self, name) for name in ("masked_indices", "label_indices", "reference_P2")}
        rows = {name: x.to(device, non_blocking=True) for name, x in rows.items() if x is not None}
        source = self.source
        if source is not None:
            source = source.to(device)
        return replace(moved, **rows, source=source)

    def _targets(self) -> Tensor:
        assert self.next_token_ids is not None, "the stream has no next_token_ids"
        if self.loss_mask is None:
            return self.next_token_ids
        return self.next_token_ids.masked_fill(~self.loss_mask, IGNORED_TARGET)


@dataclass(frozen=True, kw_only=True)
class Batch(Stream):
    """Objective input: a stream with a target per token."""

    targets: Tensor
    """Token to predict, int64; ``IGNORED_TARGET`` if there is none."""

    @property
    def num_targets(self) -> int:
        """Tokens with a prediction that counts in the loss."""
        return int((self.targets != IGNORED_TARGET).sum())

    def num_mtp_targets(self, most: int) -> int:
        return _count_mtp_targets(self.targets, self.positions, most)

    def per_token(self) -> dict[str, Tensor]:
        return {**super().per_token(), "targets": self.targets}


def next_tokens(stream: Stream) -> Batch:
    """Build the batch with the next tokens within each document as targets, if they count."""
    if stream.masked is not None:
        raise ConfigError("masked tokens require train.objective=masked: a next-token target may be masked itself.")
    return with_targets(stream, stream._targets())


def with_data_targets(stream: Stream) -> Batch:
    """Build the batch with the data's own targets: masked tokens, or next tokens without masking."""
    if stream.masked is None:
        return next_tokens(stream)
    return with_targets(stream, stream.masked)


def with_targets(stream: Stream, targets: Tensor) -> Batch:
    """Build the batch with these targets. Raise ConfigError unless there is one per token."""
    if targets.shape != stream.tokens.shape:
        raise ConfigError(
            f"targets have shape {list(targets.shape)}, tokens {list(stream.tokens.shape)}: each token needs one. "
            f"Source tokens get no targets; {IGNORED_TARGET} marks a token without a prediction."
        )
    values = {field.name: getattr(stream, field.name) for field in fields(Stream)}
    return Batch(**{**values, "targets": targets, "next_token_ids": None, "loss_mask": None, "masked": None})


def _count_mtp_targets(targets: Tensor, positions: Tensor, most: int) -> int:
    """Count how often a target can be predicted from 1, 2, … ``most`` tokens before its own position."""
    return int(((targets != IGNORED_TARGET) * positions.clamp(max=most)).sum())


def _fault(bounds: Sequence[Any], num_tokens: int | None) -> str | None:
    """Describe a fault in the boundaries and its correction, in two sentences, if any."""
    if not bounds:
        return f"It is empty. One document is [0, {num_tokens or 0}]."
    for number, bound in enumerate(bounds):
        if not hasattr(bound, "__index__"):
            return f"Entry {number} is {bound!r}. Give a whole number of tokens for each document's end."
    if bounds[0] != 0:
        return f"The first is {bounds[0]}. Begin with 0, then each document's end."
    for number, (before, after) in enumerate(pairwise(bounds), start=1):
        if after < before:
            return f"Entry {number} is {after}, after {before}. Give documents' ends in order, not their lengths."
    if num_tokens is not None and bounds[-1] != num_tokens:
        return f"The last is {bounds[-1]}. End with {num_tokens}; padding is a separate document."
    return None


def _refuse(bounds: Sequence[Any], num_tokens: int | None, fault: str) -> None:
    """Raise a ConfigError that shows the boundaries and their fault."""
    goal = "0"
    if num_tokens is not None:
        goal = f"0 to the sequence's {num_tokens} tokens"
    # a batch may have thousands of documents, so show only both ends
    shown = f"{list(bounds)}"
    if len(bounds) > 6:
        first, last = ", ".join(map(str, bounds[:4])), ", ".join(map(str, bounds[-2:]))
        shown = f"[{first}, …, {last}]"
    raise ConfigError(f"cu_seqlens must ascend from {goal}; got {shown} ({len(bounds)} entries). {fault}")
