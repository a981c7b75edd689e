"""What the data pipeline hands to the model: rows of packed documents, their boundaries, and what follows each token.

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
    """Documents laid end to end over a whole sequence, on however many ranks its tokens live.

    Made once a batch, by ``of``; layouts, schedules, masks and kernels read the same one. It may be a dictionary's key:
    its hash is computed once, however many documents there are.
    """

    bounds: tuple[int, ...]
    """``cu_seqlens``: document n has the tokens from entry n to entry n + 1. Two equal entries hold an empty one."""
    padding: tuple[int, ...] | None = field(default=None, compare=False)
    """Numbers of the documents that are padding, ascending; None if nobody said. Not compared: layouts, schedules and
    masks are the same."""

    # Fields rather than properties: a compiled graph that counted the bounds would serve one number of documents.
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
            # Frequencies that stretch with the length must not stretch with what fills a row.
            counted = list(lengths)
            for number in padding:
                counted[number] = 0
        # All in one stroke: a micro-batch of short rows is read in the time of a few dozen assignments.
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
        """Documents of these lengths, all whole numbers of at least 0; ``padding`` as the field says."""
        documents = cls.__new__(cls)
        documents._set(tuple(accumulate(lengths, initial=0)), tuple(lengths), padding)
        return documents

    @classmethod
    def of(
        cls, cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None, num_tokens: int | None = None
    ) -> PackedDocuments:
        """The documents between these boundaries; None is one document of ``num_tokens``.

        ConfigError unless they are whole numbers that ascend from 0, and to ``num_tokens`` where that is given.
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
        # Here, once a batch, so that nobody behind has to check again.
        fault = _fault(found, num_tokens)
        if fault is not None:
            _refuse(found, num_tokens, fault)
        return cls(tuple(operator.index(bound) for bound in found))

    @classmethod
    def of_rows(cls, num_rows: int, row_tokens: int) -> PackedDocuments:
        """Rows of one document each, laid end to end."""
        return cls(tuple(row_tokens * row for row in range(num_rows + 1)))

    def padded(self, num_tokens: int) -> PackedDocuments:
        """The same documents, and padding up to so many tokens, in documents none longer than the longest."""
        missing = num_tokens - self.num_tokens
        if not missing:
            return self
        assert missing > 0, f"{self.num_tokens} tokens are more than {num_tokens}"
        # In short documents padding costs no more attention than what it stands behind.
        starts = range(self.num_tokens, num_tokens, self.longest or missing)
        added = range(self.num_documents, self.num_documents + len(starts))
        return PackedDocuments((*self.bounds, *starts[1:], num_tokens), (*(self.padding or ()), *added))

    def with_padding(self, document_ids: Tensor) -> PackedDocuments:
        """Return the same documents, with ``padding`` as ``document_ids`` [B, T] say it: negative for padding.

        Unchanged if padding is known already, or if these are not the tokens of the whole sequence.
        """
        if self.padding is not None or document_ids.numel() != self.num_tokens:
            return self
        some = [number for number, length in enumerate(self.lengths) if length]
        is_padding = document_ids.flatten()[[self.bounds[number] for number in some]] < 0
        padding = tuple(number for number, is_one in zip(some, is_padding.tolist(), strict=True) if is_one)
        return PackedDocuments(self.bounds, padding)

    def within(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """What each document has of tokens [start, stop): its number, its first token there, the one behind the last.

        Documents without any are left out.
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
        """The boundaries as int64 [num_documents + 1] on the CPU. Nobody writes into it."""
        # A row may have thousands: this takes a third of the time of ``torch.tensor``.
        return torch.frombuffer(array("q", self.bounds), dtype=torch.int64)

    # The generated hash would go through all boundaries at each look-up of a cache.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.bounds)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One sequence of packed documents, ready to be split between ranks token by token.

    Per-token tensors have shape [B, T] (or [B, t] after a split) and are cut together: neither positions nor what
    follows a token depend on where a shard ends. ``documents`` stay global.
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
        # Once a batch, of its tokens as a whole: after a split no rank could tell.
        object.__setattr__(self, "documents", self.documents.with_padding(self.document_ids))

    @property
    def cu_seqlens(self) -> Tensor:
        """The boundaries of ``documents``: int64 [num_documents + 1] on the CPU, ascending from 0 to B·T."""
        return self.documents.cu_seqlens

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids != PADDING_DOCUMENT).sum())

    @property
    def num_pairs(self) -> int:
        """Documents of two segments whose first token is here."""
        return 0 if self.order is None else int((self.order != IGNORED_TARGET).sum())

    @property
    def num_targets(self) -> int:
        """Tokens that masking chose; without masking, those that one follows in their document, and that count."""
        targets = self.masked
        if targets is None:
            targets = _targets(self)
        return int((targets != IGNORED_TARGET).sum())

    def num_ahead(self, most: int) -> int:
        """Targets that lie at least 2, 3, … ``most`` + 1 tokens behind where they are predicted, in its document."""
        return _num_ahead(_targets(self), self.positions, most)

    def flatten_rows(self) -> Self:
        """The same tokens as one row [1, B·T]: the shape that a sequence layout splits."""
        flat, source = self.map_tokens(lambda x: x.reshape(1, -1)), self.source
        if source is not None:
            source = source.flatten_rows()
        # Experts' capacity is counted by rows, so their length is remembered; flat twice is flat once.
        return replace(flat, source=source, row_tokens=self.row_tokens or self.tokens.shape[1])

    def padded(self, num_tokens: int) -> Self:
        """The same tokens as one row of ``num_tokens``, padding behind them: documents of its own, without targets."""
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
        """The tensors with a value for each token, by name: one that was cut without the others would be shifted."""
        found = {"tokens": self.tokens, "positions": self.positions, "document_ids": self.document_ids}
        for name in ("following", "counted", "masked", "segments", "order"):
            if (values := getattr(self, name)) is not None:
                found[name] = values
        return found

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with per-token tensors that went through ``change``; ``documents`` stay as they are."""
        # Tokens may be others afterwards.
        return replace(self, **{name: change(x) for name, x in self.per_token().items()}, places=None, firsts=None)

    def to(self, device: torch.device) -> Self:
        """The per-token tensors on ``device``; ``documents`` stay on the CPU, where schedules are built."""
        moved = self.map_tokens(lambda x: x.to(device, non_blocking=True))
        rows = {name: getattr(self, name) for name in ("places", "firsts")}
        rows = {name: x.to(device, non_blocking=True) for name, x in rows.items() if x is not None}
        source = self.source
        if source is not None:
            source = source.to(device)
        return replace(moved, **rows, source=source)


@dataclass(frozen=True, kw_only=True)
class Batch(Stream):
    """What an objective is computed of: a stream, and a target for each of its tokens."""

    targets: Tensor
    """What is to be predicted at the token, int64; ``IGNORED_TARGET`` where nothing is."""

    @property
    def num_targets(self) -> int:
        """Tokens whose prediction counts in the loss."""
        return int((self.targets != IGNORED_TARGET).sum())

    def num_ahead(self, most: int) -> int:
        return _num_ahead(self.targets, self.positions, most)

    def per_token(self) -> dict[str, Tensor]:
        return {**super().per_token(), "targets": self.targets}


def next_tokens(stream: Stream) -> Batch:
    """The batch in which every token's target is the one that follows in the same document, if that counts."""
    if stream.masked is not None:
        raise ConfigError("masked tokens are for train.objective=masked: what follows one may be masked itself.")
    return with_targets(stream, _targets(stream))


def asked_for(stream: Stream) -> Batch:
    """The batch of what the data ask for: what masking chose, or where nothing is masked the next tokens."""
    if stream.masked is None:
        return next_tokens(stream)
    return with_targets(stream, stream.masked)


def with_targets(stream: Stream, targets: Tensor) -> Batch:
    """The batch of these targets. ConfigError unless there is one for each token."""
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
    """How often a target can be predicted from 1, 2, … ``most`` tokens before its own place."""
    return int(((targets != IGNORED_TARGET) * positions.clamp(max=most)).sum())


def _fault(bounds: Sequence[Any], num_tokens: int | None) -> str | None:
    """What is wrong with the boundaries and what would be right, in two sentences; None where nothing is wrong."""
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
    """Raise the ConfigError, which shows the boundaries and what is wrong with them."""
    goal = "0"
    if num_tokens is not None:
        goal = f"0 to the sequence's {num_tokens} tokens"
    # A batch may have thousands of documents: both ends are enough.
    shown = f"{list(bounds)}"
    if len(bounds) > 6:
        first, last = ", ".join(map(str, bounds[:4])), ", ".join(map(str, bounds[-2:]))
        shown = f"[{first}, …, {last}]"
    raise ConfigError(f"cu_seqlens must ascend from {goal}; got {shown} ({len(bounds)} entries). {fault}")
