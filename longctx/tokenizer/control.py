"""``ControlFinder``: find the control tokens that a chat template has written into a text.

Matching follows the library ``tokenizers``: leftmost first, then longest, each with the white space that it absorbs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longctx.errors import DataError

Span = tuple[int, int]
"""First character, and the index after the last one."""


class AddedToken(NamedTuple):
    """Token that is searched for in a text before it is cut into words."""

    id: int
    is_control: bool = True
    strips_left: bool = False
    """True if preceding white space is part of it."""
    strips_right: bool = False
    is_word: bool = False
    """True if it only matches without an adjacent letter or digit."""


@dataclass(frozen=True)
class TokenSpans:
    """Ids with their character spans in the text."""

    ids: np.ndarray
    """Token ids, int32 [N]."""
    starts: np.ndarray
    """First character of each token, int64 [N]."""
    ends: np.ndarray
    """Index after each token's last character, int64 [N]."""

    @classmethod
    def joined(cls, parts: Sequence[TokenSpans]) -> TokenSpans:
        """Join parts of one text, in order."""
        none = np.empty(0, np.int64)
        # The empty arrays handle an empty list.
        return cls(
            np.concatenate([none.astype(np.int32)] + [part.ids for part in parts]),
            np.concatenate([none] + [part.starts for part in parts]),
            np.concatenate([none] + [part.ends for part in parts]),
        )

    def moved(self, by: int) -> TokenSpans:
        """Return the same ids with spans shifted by ``by`` characters."""
        return TokenSpans(self.ids, self.starts + by, self.ends + by)

    def within(self, spans: Sequence[Span]) -> np.ndarray:
        """Return True for each id that overlaps one of these ascending spans, bool [N]."""
        if not spans:
            return np.zeros(len(self.ids), dtype=bool)
        starts, stops = np.array(spans, dtype=np.int64).T
        # Only the first span that ends after the id's first character can contain it.
        first = np.minimum(np.searchsorted(stops, self.starts, side="right"), len(stops) - 1)
        return (self.ends > starts[first]) & (self.starts < stops[first])


class Chunk(NamedTuple):
    """Text chunk: part of a document that is encoded separately."""

    text: str
    is_first: bool
    """True if the document starts with it: some tokenizers put a space before a document, but not before its parts."""


class ControlFinder:
    """Finder for a tokenizer's control tokens in a text."""

    def __init__(self, added: Mapping[str, AddedToken]) -> None:
        self._added = dict(added)
        # Regex alternation takes the first alternative that matches, so the longest comes first.
        longest_first = sorted((text for text in added if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def texts(self) -> list[str]:
        """Return the control tokens' texts."""
        return [text for text, token in self._added.items() if token.is_control]

    def find(self, text: str, plain: Sequence[Span] = ()) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and id of each control token outside ``plain``."""
        at = previous_stop = 0
        spans = iter(plain)
        span = next(spans, None)
        while (match := self._pattern.search(text, at)) is not None:
            start, stop = match.span()
            token = self._added[match[0]]
            at = stop
            if token.is_word and not _stands_alone(text, start, stop):
                continue
            # Matches and spans both ascend.
            while span is not None and span[1] <= start:
                span = next(spans, None)
            is_plain = span is not None and span[0] < stop
            # Absorbed white space must not reach into the previous control token.
            if token.strips_left:
                start = max(len(text[:start].rstrip()), previous_stop)
            if token.strips_right:
                stop = len(text) - len(text[stop:].lstrip())
            # Other matches stay text, but no control token can start inside them.
            if token.is_control and not is_plain:
                yield start, stop, token.id
                at = previous_stop = stop


class SpanSupport:
    """Tokenizer support for rendered conversations."""

    path: Path
    as_prompt: Callable[[str], list[int]] | None = None
    """Function that replaces ``encode_prompt``, such as a chat template; unset by default."""

    @cached_property
    def control_finder(self) -> ControlFinder:
        """Finder for the tokens that a chat template writes; raises DataError if the tokenizer does not define them."""
        raise DataError(
            f"tokenizer={self.path} is a SentencePiece model, and its file does not define how conversations are "
            "tokenized.\nWrite its tokenizer.json first: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )

    @cached_property
    def restarts_after_control(self) -> bool:
        """True if the text after a control token gets the same space as a document's start."""
        return False

    def locate_chunks(self, chunks: Sequence[Chunk]) -> list[TokenSpans]:
        """Return each chunk's ids with their character spans."""
        raise NotImplementedError


def _stands_alone(text: str, start: int, stop: int) -> bool:
    before, after = text[max(0, start - 1) : start], text[stop : stop + 1]
    return not any(re.match(r"\w", character) for character in (before, after) if character)
