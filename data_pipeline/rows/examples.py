"""``Examples``: training examples made from document pieces, either corrupted texts or two segments in some order.

A piece excludes the tokens that the tokenizer adds around a text: the example has its own. An example's length depends
only on its piece's length, so rows are planned without reading a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from data_pipeline.rows.pack import ExampleRule, Piece, Row
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import key64
from longctx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Example:
    """Example made from one document piece."""

    tokens: np.ndarray
    source: np.ndarray | None = None
    """Encoder input."""
    second: int = 0
    """Start token of the second segment; 0 if there is only one segment."""
    label: int | None = None
    """Class; for two segments 0 if they are consecutive as in the text, 1 otherwise. None without a label."""


PieceOfEpoch = tuple[Piece, int]
"""A document piece and the epoch in which it is read."""


class Recipe(Protocol):
    """Makes examples from a folder's pieces (``rows.span_corruption``, ``rows.text_segments``)."""

    shards: ShardSet
    rule: ExampleRule

    def examples(self, pieces: Sequence[PieceOfEpoch]) -> list[Example]:
        """Return one example per piece, reading the documents needed for it."""
        ...


@runtime_checkable
class PixelRecipe(Recipe, Protocol):
    """Recipe for a rule with ``pixel_bytes`` (``rows.images``)."""

    def pixels(self, piece: PieceOfEpoch, first: int, last: int, step: int) -> np.ndarray:
        """Return the pixels of tokens ``first``, ``first`` + ``step``, … below ``last``, uint8 [tokens, bytes]."""
        ...


class Examples:
    """Examples from some pieces, with their own numbering; ``sources`` is their other side."""

    is_masked = False
    first_documents = (0,)

    def __init__(self, recipe: Recipe, pieces: Sequence[PieceOfEpoch]) -> None:
        self._recipe, self._pieces = recipe, pieces
        self.padding = recipe.shards.padding
        self._made: dict[int, Example] = {}
        self._is_source = False

    @classmethod
    def of_rows(cls, recipe: Recipe, rows: Sequence[Row]) -> tuple[Examples, list[Row]]:
        """Return the examples for all pieces in these rows, numbered from 0, and the rows that contain them."""
        pieces: list[PieceOfEpoch] = []
        found = []
        for row in rows:
            lengths, numbers = np.array(row.lengths, np.int64), range(len(pieces), len(pieces) + len(row))
            epochs = row.epochs or [0] * len(row)
            pieces += zip(row, epochs, strict=True)
            # Lengths follow from the rule: no text is read here.
            made = Row(numbers, [0] * len(row), recipe.rule.lengths(lengths).tolist())
            made.epochs = epochs
            of_sources = recipe.rule.source_lengths(lengths)
            if of_sources is not None:
                made.source_lengths = of_sources.tolist()
            found.append(made)
        return cls(recipe, pieces), found

    @property
    def rule(self) -> ExampleRule:
        """Rule for the examples' lengths and what they contain."""
        return self._recipe.rule

    @property
    def sources(self) -> Examples:
        """Source side of the same examples."""
        other = Examples(self._recipe, self._pieces)
        # Share the cache, so that both sides make each example once.
        other._made, other._is_source = self._made, True
        return other

    def slices(self, pieces: Iterable[Piece]) -> list[np.ndarray]:
        """Return the tokens of these pieces, as ``ShardSet.slices`` does."""
        wanted = list(pieces)
        self._make(number for number, _, _ in wanted)
        return [self._tokens(number)[start:stop] for number, start, stop in wanted]

    def second(self, number: int) -> int:
        """Return where an example's second segment starts."""
        self._make([number])
        return self._made[number].second

    def label(self, number: int) -> int | None:
        """Return an example's label, if it has one."""
        self._make([number])
        return self._made[number].label

    def pixels(self, number: int, first: int, last: int, step: int) -> np.ndarray:
        """Return the pixels of an example's tokens, as ``PixelRecipe.pixels`` does."""
        assert isinstance(self._recipe, PixelRecipe), "the recipe has no pixels"
        return self._recipe.pixels(self._pieces[number], first, last, step)

    def target_runs(self, index: int) -> None:
        """Return None: every target token is predicted, and source tokens never are."""

    def key(self, number: int) -> int:
        """Return the number that seeds draws for the example's piece, the same in any batch."""
        (document, start, _), _ = self._pieces[number]
        return key64(document, start)

    def _tokens(self, number: int) -> np.ndarray:
        made = self._made[number]
        if not self._is_source:
            return made.tokens
        assert made.source is not None, "the recipe does not create sources"
        return made.source

    def _make(self, numbers: Iterable[int]) -> None:
        # Make missing examples once, in ascending order, which is the order of texts on disk.
        new = sorted(set(numbers) - self._made.keys())
        if new:
            self._made.update(zip(new, self._recipe.examples([self._pieces[number] for number in new]), strict=True))


def num_special_tokens(shards: ShardSet) -> tuple[int, int]:
    """Return how many tokens the tokenizer adds before and after a text."""
    tokenizer = shards.tokenizer()
    return len(tokenizer.prefix_ids), len(tokenizer.suffix_ids)


def read_text_pieces(shards: ShardSet, pieces: Iterable[Piece]) -> list[np.ndarray]:
    """Return each piece's tokens, int32."""
    # Stored documents start with begin tokens, which are not part of the text.
    before, _ = num_special_tokens(shards)
    found = shards.slices([(document, start + before, stop + before) for document, start, stop in pieces])
    return [tokens.astype(np.int32) for tokens in found]


def check_texts(shards: ShardSet, objective: str, alternative: str) -> None:
    """Raise ConfigError unless a folder contains texts; ``objective`` is the setting that requires them."""
    manifest = shards.manifest
    if not shards.is_masked and not manifest.has_sources and not manifest.is_preferences:
        return
    kind = manifest.kind or ("pairs" if manifest.has_sources else "conversations")
    raise ConfigError(
        f"{objective} requires texts, but {shards.folder} contains {kind}.\nUse a folder of texts, or {alternative}."
    )
