"""``TokenPlacement``: a sequence's tokens on each rank, in any number and order. Pure index arithmetic.

A ``SequenceLayout`` gives every rank equally many tokens in global order. Attention within an image's windows, or a
layer that merges neighbouring patches, needs others: complete windows per rank, in window order, and perhaps no token
on some rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b

import numpy as np
from numpy import ndarray
from numpy.typing import ArrayLike

from longctx.errors import ConfigError
from parallel.layout.sequence import SequenceLayout


@dataclass(frozen=True, eq=False)
class TokenPlacement:
    """Ordered tokens of every rank; each token is on exactly one rank.

    Placements with the same tokens in the same order are equal, and can be dictionary keys: their checksum is computed
    once.
    """

    tokens_T: ndarray
    """Global token indices, rank after rank, each rank's in local order: int64, read-only."""
    bounds: ndarray
    """Rank r has entries ``bounds[r]`` to ``bounds[r + 1]`` of ``tokens_T``: int64, read-only."""

    @classmethod
    def build(cls, tokens_of_ranks: Sequence[ArrayLike], num_tokens: int) -> TokenPlacement:
        """Build the placement from each rank's token indices, flattened in memory order.

        Raise ConfigError unless they are integers and contain each of the sequence's ``num_tokens`` tokens exactly
        once; the message gives the first token that does not fit.
        """
        parts = [_as_indices(tokens, rank) for rank, tokens in enumerate(tokens_of_ranks)]
        if not parts:
            raise ConfigError(f"a placement needs ranks; got none for {num_tokens} tokens. Give one list per rank.")
        placement = cls._of(parts)
        _check_tokens(placement, num_tokens)
        return placement

    @classmethod
    def of_layout(cls, layout: SequenceLayout) -> TokenPlacement:
        """Return the placement of a layout's tokens over all its ranks, ring × Ulysses."""
        return _of_layout(layout)

    @classmethod
    def _of(cls, parts: Sequence[ndarray]) -> TokenPlacement:
        tokens_T, bounds = np.concatenate(parts), np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=bounds[1:])
        # Plans are cached by placement, so it must not change.
        for array in (tokens_T, bounds):
            array.setflags(write=False)
        return cls(tokens_T, bounds)

    @property
    def num_tokens(self) -> int:
        """Tokens in the sequence."""
        return len(self.tokens_T)

    @property
    def degree(self) -> int:
        """Number of ranks, including those without tokens."""
        return len(self.bounds) - 1

    def num_local(self, rank: int) -> int:
        """Return the rank's token count."""
        return int(self.bounds[rank + 1] - self.bounds[rank])

    def tokens(self, rank: int) -> ndarray:
        """Return a rank's global token indices in local order, as a view."""
        return self.tokens_T[self.bounds[rank] : self.bounds[rank + 1]]

    @cached_property
    def token_ranks(self) -> ndarray:
        """Rank that holds each token."""
        token_ranks = np.empty(self.num_tokens, dtype=np.int64)
        token_ranks[self.tokens_T] = np.repeat(np.arange(self.degree), np.diff(self.bounds))
        return token_ranks

    @cached_property
    def token_rows(self) -> ndarray:
        """Each token's local row on its rank."""
        token_rows = np.empty(self.num_tokens, dtype=np.int64)
        token_rows[self.tokens_T] = np.arange(self.num_tokens) - np.repeat(self.bounds[:-1], np.diff(self.bounds))
        return token_rows

    @cached_property
    def digest(self) -> str:
        """Checksum over every rank's tokens and their order."""
        checksum = blake2b(self.bounds.tobytes(), digest_size=16)
        checksum.update(self.tokens_T.data)
        return checksum.hexdigest()

    def describe(self) -> str:
        """Return a one-line summary for error messages."""
        counts = np.diff(self.bounds)
        return f"{self.num_tokens} tokens over {self.degree} ranks ({counts.min()} to {counts.max()} each)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenPlacement):
            return NotImplemented
        return self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


# A model has a few layouts at once; each holds eight bytes per token.
@lru_cache(maxsize=16)
def _of_layout(layout: SequenceLayout) -> TokenPlacement:
    return TokenPlacement._of([layout.indices(rank).numpy() for rank in range(layout.degree)])


def _as_indices(tokens: ArrayLike, rank: int) -> ndarray:
    """Return a rank's tokens as int64 [tokens]. Raise ConfigError unless they are integers."""
    indices = np.ravel(np.asarray(tokens))
    # An empty list is an array of floats.
    if len(indices) and not np.issubdtype(indices.dtype, np.integer):
        raise ConfigError(f"the tokens of rank {rank} are {indices.dtype}; token indices must be integers.")
    return indices.astype(np.int64)


def _check_tokens(placement: TokenPlacement, num_tokens: int) -> None:
    """Raise ConfigError, with the first token that is outside, missing or double, unless each token occurs once."""
    tokens_T = placement.tokens_T
    rule = f"A placement over {placement.degree} ranks has each token from 0 to {num_tokens - 1} exactly once."
    outside = np.flatnonzero((tokens_T < 0) | (tokens_T >= num_tokens))
    if len(outside):
        index = int(outside[0])
        raise ConfigError(f"rank {_ranks_at(placement, [index])} has token {tokens_T[index]}. {rule}")
    counts_T = np.bincount(tokens_T, minlength=num_tokens)
    wrong = np.flatnonzero(counts_T != 1)
    if not len(wrong):
        return
    first = int(wrong[0])
    if not counts_T[first]:
        raise ConfigError(f"token {first} is on no rank. {rule}\nAdd it to one rank.")
    holders = _ranks_at(placement, np.flatnonzero(tokens_T == first))
    raise ConfigError(f"token {first} is listed {counts_T[first]} times, on ranks {holders}. {rule}\nKeep it once.")


def _ranks_at(placement: TokenPlacement, entries: ArrayLike) -> str:
    """Return the ranks of these entries of ``tokens_T``, as text."""
    # A rank without tokens has two equal bounds: take the last rank that begins at or before the entry.
    ranks = np.searchsorted(placement.bounds, np.asarray(entries), side="right") - 1
    return ", ".join(map(str, ranks.tolist()))
