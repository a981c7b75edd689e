"""``Examples``: training examples made from pieces of texts: corrupted texts, or two segments in some order.

A piece counts a text's tokens without those that the tokenizer puts around it: the example has its own. The length of
an example depends only on the piece's length, so rows are planned without reading a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data_pipeline.rows.pack import ExampleRule, Piece, Row
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import key64
from longctx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Example:
    """Result of converting one piece."""

    tokens: np.ndarray
    source: np.ndarray | None = None
    """What an encoder reads beside them."""
    second: int = 0
    """The first token of the second segment; 0 if there is one alone."""
    order: int = 0
    """Of two segments 0 if they stand together as they are in the text, 1 if they do not."""


PieceOfEpoch = tuple[Piece, int]
"""A piece, and the epoch that it is read in."""


class Recipe(Protocol):
    """Maker of examples from a folder's pieces (``rows.spans``, ``rows.segments``)."""

    shards: ShardSet
    rule: ExampleRule

    def examples(self, pieces: Sequence[PieceOfEpoch]) -> list[Example]:
        """Return the example of each piece, reading the texts needed for it."""
        ...


class Examples:
    """Examples of some pieces, numbered separately; ``sources`` is their other side."""

    is_masked = False
    first_documents = (0,)

    def __init__(self, recipe: Recipe, pieces: Sequence[PieceOfEpoch]) -> None:
        self._recipe, self._pieces = recipe, pieces
        self.padding = recipe.shards.padding
        self._made: dict[int, Example] = {}
        self._is_source = False

    @classmethod
    def of_rows(cls, recipe: Recipe, rows: Sequence[Row]) -> tuple[Examples, list[Row]]:
        """Return the examples of all pieces of these rows, numbered from 0, and the rows of examples."""
        pieces: list[PieceOfEpoch] = []
        found = []
        for row in rows:
            lengths, numbers = np.array(row.lengths, np.int64), range(len(pieces), len(pieces) + len(row))
            epochs = row.epochs or [0] * len(row)
            pieces += zip(row, epochs, strict=True)
            made = Row(numbers, [0] * len(row), recipe.rule.lengths(lengths).tolist())
            made.epochs = epochs
            of_sources = recipe.rule.source_lengths(lengths)
            if of_sources is not None:
                made.source_lengths = of_sources.tolist()
            found.append(made)
        return cls(recipe, pieces), found

    @property
    def has_segments(self) -> bool:
        """True if each example has two segments."""
        return self._recipe.rule.has_segments

    @property
    def sources(self) -> Examples:
        """The other side of the same examples."""
        other = Examples(self._recipe, self._pieces)
        # Both sides share the examples already made.
        other._made, other._is_source = self._made, True
        return other

    def slices(self, pieces: Iterable[Piece]) -> list[np.ndarray]:
        """Return the tokens of pieces, as ``ShardSet.slices`` does."""
        wanted = list(pieces)
        self._make(number for number, _, _ in wanted)
        return [self._tokens(number)[start:stop] for number, start, stop in wanted]

    def segments(self, number: int) -> tuple[int, int]:
        """Return ``Example.second`` and ``Example.order`` of an example."""
        self._make([number])
        return self._made[number].second, self._made[number].order

    def counted(self, index: int) -> None:
        """Return None: all of a target is predicted, and nothing of a source."""

    def key(self, number: int) -> int:
        """Return a number for the example's piece, the same in any batch, that seeds its random draws."""
        (document, start, _), _ = self._pieces[number]
        return key64(document, start)

    def _tokens(self, number: int) -> np.ndarray:
        made = self._made[number]
        if not self._is_source:
            return made.tokens
        assert made.source is not None, "the recipe makes no sources"
        return made.source

    def _make(self, numbers: Iterable[int]) -> None:
        # In ascending order, the order of texts on disk; made once, by the first request of either side.
        new = sorted(set(numbers) - self._made.keys())
        if new:
            self._made.update(zip(new, self._recipe.examples([self._pieces[number] for number in new]), strict=True))


def tokens_around(shards: ShardSet) -> tuple[int, int]:
    """Return the number of tokens that the tokenizer puts before a text and after it."""
    tokenizer = shards.tokenizer()
    return len(tokenizer.begins_with), len(tokenizer.ends_with)


def read_texts(shards: ShardSet, pieces: Iterable[Piece]) -> list[np.ndarray]:
    """Return the tokens of each piece of a text, int32."""
    # In the shards a document has a begin token, which is not part of its text.
    before, _ = tokens_around(shards)
    found = shards.slices([(document, start + before, stop + before) for document, start, stop in pieces])
    return [tokens.astype(np.int32) for tokens in found]


def check_texts(shards: ShardSet, objective: str, instead: str) -> None:
    """Raise ConfigError unless a folder holds texts; ``objective`` is the setting that requires them."""
    if not shards.is_masked and not shards.manifest.has_sources:
        return
    kind = "pairs" if shards.manifest.has_sources else "conversations"
    raise ConfigError(
        f"{objective} is for texts, and {shards.folder} holds {kind}.\nName a folder of texts, or {instead}."
    )
