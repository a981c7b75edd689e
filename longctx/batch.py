"""Input of the model: rows of packed documents, their boundaries, and the token after each token.

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
"""Target of a token whose prediction is not counted: a document's last token and padding."""

PADDING_DOCUMENT = -1
"""Entry of ``Batch.document_ids`` for padding tokens."""


@dataclass(frozen=True)
class PackedDocuments:
    """Documents packed end to end over a full sequence, for any number of ranks that share its tokens.

    Built once per batch, by ``of``; layouts, schedules, masks and kernels read the same instance. It can be a
    dictionary key: its hash is computed once for any number of documents.
    """

    bounds: tuple[int, ...]
    """``cu_seqlens``: document n has the tokens from entry n to entry n + 1. Two equal entries hold an empty one."""
    padding: tuple[int, ...] | None = field(default=None, compare=False)
    """Numbers of the documents that are padding, ascending; None if nobody said. Not compared: layouts, schedules and
    masks are the same."""

    # Fields rather than properties: a compiled graph that counted the bounds would be valid for one number of
    # documents.
    num_tokens: int = field(init=False, compare=False, repr=False)
    """Length of the whole sequence."""
    num_documents: int = field(init=False, compare=False, repr=False)
    """Documents of the sequence, empty ones too."""
    longest: int = field(init=False, compare=False, repr=False)
    """Tokens of the longest document that is not padding; 0 if all are."""
    lengths: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Tokens of each document."""

    def __post_init__(self) -> None:
        self._set(self.bounds, tuple(map(operator.sub, self.bounds[1:], self.bounds)), self.padding)

    def _set(self, bounds: tuple[int, ...], lengths: tuple[int, ...], padding: tuple[int, ...] | None) -> None:
        counted = lengths
        if padding:
            # Frequencies that stretch with the length must not stretch with a row's padding.
            counted = list(lengths)
            for number in padding:
                counted[number] = 0
        # One update instead of one call per field: a micro-batch of short rows is read in the time of a few dozen
        # assignments.
        vars(self).update(
            bounds=bounds,
            num_tokens=bounds[-1],
            num_documents=len(lengths),
            longest=max(counted, default=0),
            lengths=lengths,
            padding=padding,
        )

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], padding: tuple[int, ...] | None = None) -> PackedDocuments:
        """Return documents of these lengths, integers of at least 0; ``padding`` as in the field."""
        documents = cls.__new__(cls)
        documents._set(tuple(accumulate(lengths, initial=0)), tuple(lengths), padding)
        return documents

    @classmethod
    def of(
        cls, cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None, num_tokens: int | None = None
    ) -> PackedDocuments:
        """Return the documents between these boundaries; None means one document of ``num_tokens``.

        Raise ConfigError unless the boundaries are integers that ascend from 0, and end at ``num_tokens`` if that is
        given.
        """
        if cu_seqlens is None:
            assert num_tokens is not None, "one document of how many tokens?"
            return cls((0, num_tokens))
        if isinstance(cu_seqlens, PackedDocuments):
            if num_tokens in (None, cu_seqlens.num_tokens):
                return cu_seqlens
            found = cu_seqlens.bounds
        elif isinstance(cu_seqlens, Tensor):
            found = cu_seqlens.tolist()
        else:
            found = list(cu_seqlens)
        # Checked here, once per batch, so that later code need not check again.
        fault = _fault(found, num_tokens)
        if fault is not None:
            _refuse(found, num_tokens, fault)
        return cls(tuple(operator.index(bound) for bound in found))

    @classmethod
    def of_rows(cls, num_rows: int, row_tokens: int) -> PackedDocuments:
        """Return rows of one document each, packed end to end."""
        return cls(tuple(row_tokens * row for row in range(num_rows + 1)))

    def padded(self, num_tokens: int) -> PackedDocuments:
        """Return the same documents with padding up to ``num_tokens``, in documents no longer than the longest."""
        missing = num_tokens - self.num_tokens
        if not missing:
            return self
        assert missing > 0, f"{self.num_tokens} tokens are more than {num_tokens}"
        # In short documents padding costs no more attention than the real documents.
        starts = range(self.num_tokens, num_tokens, self.longest or missing)
        added = range(self.num_documents, self.num_documents + len(starts))
        return PackedDocuments((*self.bounds, *starts[1:], num_tokens), (*(self.padding or ()), *added))

    def with_padding(self, document_ids: Tensor) -> PackedDocuments:
        """Return the same documents with ``padding`` taken from ``document_ids`` [B, T]: negative for padding.

        Return them unchanged if padding is known already, or if these are not the tokens of the full sequence.
        """
        if self.padding is not None or document_ids.numel() != self.num_tokens:
            return self
        some = [number for number, length in enumerate(self.lengths) if length]
        is_padding = document_ids.flatten()[[self.bounds[number] for number in some]] < 0
        padding = tuple(number for number, is_one in zip(some, is_padding.tolist(), strict=True) if is_one)
        return PackedDocuments(self.bounds, padding)

    def within(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return each document's part of tokens [start, stop): its number, first token there, and end of the part.

        Documents without tokens there are left out.
        """
        if start >= stop:
            return []
        number = bisect.bisect_right(self.bounds, start) - 1
        behind = bisect.bisect_left(self.bounds, stop, number + 1)
        firsts, lasts = list(self.bounds[number:behind]), list(self.bounds[number + 1 : behind + 1])
        firsts[0], lasts[-1] = start, stop
        found = zip(range(number, behind), firsts, lasts, strict=True)
        return [held for held in found if held[1] < held[2]]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Boundaries as int64 [num_documents + 1] on the CPU. Read-only."""
        # A row may have thousands: this takes a third of the time of ``torch.tensor``.
        return torch.frombuffer(array("q", self.bounds), dtype=torch.int64)

    # The generated hash would read all boundaries at each cache lookup.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.bounds)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One sequence of packed documents, ready to be split between ranks token by token.

    Per-token tensors have shape [B, T] (or [B, t] after a split) and are split together: neither the positions nor the
    following token depend on the end of a shard. ``documents`` stay global.
    """

    tokens: Tensor
    """Token ids, int64."""
    positions: Tensor
    """Position of the token in its document, int64, restarting from 0 at every entry of ``cu_seqlens``."""
    document_ids: Tensor
    """Index of the token's document in ``documents``, int64; ``PADDING_DOCUMENT`` for padding."""
    documents: PackedDocuments
    """The documents, or pieces of some, of the flattened B·T tokens. Attention never crosses a boundary, and every
    multiple of T is one. Padding at a row's end is a document of its own."""
    following: Tensor | None = None
    """The token that follows in the same document, int64; ``IGNORED_TARGET`` where there is none. None if an objective
    has read it, or nobody will."""
    counted: Tensor | None = None
    """Whether predicting what follows the token counts in the loss, bool; None if it always does."""
    masked: Tensor | None = None
    """What stood where masking chose a token, int64; ``IGNORED_TARGET`` elsewhere. None if nothing is masked."""
    places: Tensor | None = None
    """The tokens that masking chose, as rows of [B·t], int64 [chosen]; None if nobody has said which. The head computes
    nothing for the others."""
    segments: Tensor | None = None
    """Segment of the token in its document, 0 or 1, int64; None if each document is one."""
    order: Tensor | None = None
    """At the first token of a document of two segments 0 if they stand together as they are, and 1 if they do not,
    int64; ``IGNORED_TARGET`` elsewhere. None if nobody asks."""
    firsts: Tensor | None = None
    """Those first tokens as rows of [B·t], int64 [firsts]; None if nobody has said which."""
    sources: Tensor | None = None
    """Number of each document's source [num_documents], int64, −1 for padding; None where all have one source."""
    source: Stream | None = None
    """What an encoder reads: document n of these tokens reads document n of it. Its rows and placement are its own."""
    row_tokens: int = 0
    """Length of the rows that were laid end to end in one; 0 while each is a row of its own."""
    placement: Any = None
    """Where the tokens of all ranks live (``parallel.layout.SequenceLayout``), of a batch that was split between them;
    None of a whole one."""

    def __post_init__(self) -> None:
        # Once per batch, from all of its tokens: after a split no rank could tell.
        object.__setattr__(self, "documents", self.documents.with_padding(self.document_ids))

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of ``documents``: int64 [num_documents + 1] on the CPU, ascending from 0 to B·T."""
        return self.documents.cu_seqlens

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int((self.document_ids != PADDING_DOCUMENT).sum())

    @property
    def num_pairs(self) -> int:
        """Number of documents of two segments with their first token here."""
        return 0 if self.order is None else int((self.order != IGNORED_TARGET).sum())

    @property
    def num_targets(self) -> int:
        """Number of tokens chosen by masking; without masking, of tokens with a following token that counts."""
        targets = self.masked
        if targets is None:
            targets = _targets(self)
        return int((targets != IGNORED_TARGET).sum())

    def num_ahead(self, most: int) -> int:
        """Return the number of predictions 2, 3, … ``most`` + 1 tokens ahead that stay within their document."""
        return _num_ahead(_targets(self), self.positions, most)

    def flatten_rows(self) -> Self:
        """Return the same tokens as one row [1, B·T], the shape that a sequence layout splits."""
        flat, source = self.map_tokens(lambda x: x.reshape(1, -1)), self.source
        if source is not None:
            source = source.flatten_rows()
        # The experts' capacity is counted by rows, so their length is kept; flattening twice equals flattening once.
        return replace(flat, source=source, row_tokens=self.row_tokens or self.tokens.shape[1])

    def padded(self, num_tokens: int) -> Self:
        """Return the same tokens as one row of ``num_tokens``, padded with separate documents without targets."""
        flat, documents = self.flatten_rows(), self.documents.padded(num_tokens)
        missing = num_tokens - self.documents.num_tokens
        if not missing:
            return flat
        positions = torch.arange(missing)[None] % documents.lengths[self.documents.num_documents]
        fill = {
            "counted": 0,
            "tokens": 0,
            "segments": 0,
            "order": IGNORED_TARGET,
            "following": IGNORED_TARGET,
            "masked": IGNORED_TARGET,
            "targets": IGNORED_TARGET,
            "document_ids": PADDING_DOCUMENT,
        }
        longer = {}
        for name, x in flat.per_token().items():
            behind = positions
            if name in fill:
                behind = torch.full_like(positions, fill[name])
            longer[name] = torch.cat((x, behind.to(x.dtype)), dim=1)
        return replace(flat, **longer, documents=documents)

    def per_token(self) -> dict[str, Tensor]:
        """Return the per-token tensors by name: all must be split together, or they would be misaligned."""
        found = {"tokens": self.tokens, "positions": self.positions, "document_ids": self.document_ids}
        for name in ("following", "counted", "masked", "segments", "order"):
            if (values := getattr(self, name)) is not None:
                found[name] = values
        return found

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same stream with ``change`` applied to the per-token tensors; ``documents`` are unchanged."""
        # The tokens may differ afterwards.
        return replace(self, **{name: change(x) for name, x in self.per_token().items()}, places=None, firsts=None)

    def to(self, device: torch.device) -> Self:
        """Return the stream with per-token tensors on ``device``; ``documents`` stay on the CPU, for schedules."""
        moved = self.map_tokens(lambda x: x.to(device, non_blocking=True))
        rows = {name: getattr(self, name) for name in ("places", "firsts")}
        rows = {name: x.to(device, non_blocking=True) for name, x in rows.items() if x is not None}
        source = self.source
        if source is not None:
            source = source.to(device)
        return replace(moved, **rows, source=source)


@dataclass(frozen=True, kw_only=True)
class Batch(Stream):
    """Input of an objective: a stream, and a target for each of its tokens."""

    targets: Tensor
    """What is to be predicted at the token, int64; ``IGNORED_TARGET`` where nothing is."""

    @property
    def num_targets(self) -> int:
        """Number of tokens with a prediction that counts in the loss."""
        return int((self.targets != IGNORED_TARGET).sum())

    def num_ahead(self, most: int) -> int:
        return _num_ahead(self.targets, self.positions, most)

    def per_token(self) -> dict[str, Tensor]:
        return {**super().per_token(), "targets": self.targets}


def next_tokens(stream: Stream) -> Batch:
    """Return the batch with every token's target being the next token of its document, if that counts."""
    if stream.masked is not None:
        raise ConfigError("masked tokens are for train.objective=masked: what follows one may be masked itself.")
    return with_targets(stream, _targets(stream))


def asked_for(stream: Stream) -> Batch:
    """Return the batch of targets in the data: the masked tokens, or the next tokens if nothing is masked."""
    if stream.masked is None:
        return next_tokens(stream)
    return with_targets(stream, stream.masked)


def with_targets(stream: Stream, targets: Tensor) -> Batch:
    """Return the batch with these targets. Raise ConfigError unless there is one for each token."""
    if targets.shape != stream.tokens.shape:
        raise ConfigError(
            f"targets of shape {list(targets.shape)} stand beside tokens of shape {list(stream.tokens.shape)}: each "
            f"token has one. What a source's tokens say is not predicted; {IGNORED_TARGET} predicts nothing."
        )
    values = {field.name: getattr(stream, field.name) for field in fields(Stream)}
    return Batch(**{**values, "targets": targets, "following": None, "counted": None, "masked": None})


def _targets(stream: Stream) -> Tensor:
    assert stream.following is not None, "nobody has read what follows"
    if stream.counted is None:
        return stream.following
    return stream.following.masked_fill(~stream.counted, IGNORED_TARGET)


def _num_ahead(targets: Tensor, positions: Tensor, most: int) -> int:
    """Return the number of times a target can be predicted from 1, 2, … ``most`` tokens before its own position."""
    return int(((targets != IGNORED_TARGET) * positions.clamp(max=most)).sum())


def _fault(bounds: Sequence[Any], num_tokens: int | None) -> str | None:
    """Return the fault of the boundaries and its correction, in two sentences; None if they are valid."""
    if not bounds:
        return f"There is none. One document is [0, {num_tokens or 0}]."
    for number, bound in enumerate(bounds):
        if not hasattr(bound, "__index__"):
            return f"Entry {number} is {bound!r}. Give a whole number of tokens for the end of each document."
    if bounds[0] != 0:
        return f"The first is {bounds[0]}. Begin with 0, then the end of each document."
    for number, (before, after) in enumerate(pairwise(bounds), start=1):
        if after < before:
            return f"Entry {number} is {after}, after {before}. Give documents' ends in order, not their lengths."
    if num_tokens is not None and bounds[-1] != num_tokens:
        return f"The last is {bounds[-1]}. End with {num_tokens}; padding is a document of its own."
    return None


def _refuse(bounds: Sequence[Any], num_tokens: int | None, fault: str) -> None:
    """Raise the ConfigError that shows the boundaries and their fault."""
    goal = "0"
    if num_tokens is not None:
        goal = f"0 to the sequence's {num_tokens} tokens"
    # A batch may have thousands of documents: both ends are enough.
    shown = f"{list(bounds)}"
    if len(bounds) > 6:
        first, last = ", ".join(map(str, bounds[:4])), ", ".join(map(str, bounds[-2:]))
        shown = f"[{first}, …, {last}]"
    raise ConfigError(f"cu_seqlens must ascend from {goal}; got {shown} ({len(bounds)} entries). {fault}")
