"""Cut long texts into text chunks: bounds memory and gives the same ids as the full text.

A cut between two characters changes no id if the tokenizer certainly cuts there itself:

* *By pieces* (SentencePiece, and fast tokenizers that see a text as one word). A token is a vocabulary piece. No token
  spans two adjacent characters that are adjacent in no piece, and the text on each side is encoded independently.
  Normalised text is only cut before a single space between two ASCII letters or digits, which no normaliser changes.
* *By words* (fast tokenizers with a pre-tokenizer that cuts text into words). An ASCII letter or digit ends a word
  before a space or a newline, in every pre-tokenizer that cuts by words at all. Each cut is checked with the tokenizer
  itself: the ids for 128 characters around it must be those for the two halves.

A text without such a point is still cut every ``LIMIT_CHARACTERS``: a few ids at that cut may then differ from those
for the full text, but the decoded text is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from longctx.tokenizer.tokenizer_base import Chunk

CHUNK_CHARACTERS = 1 << 18
LIMIT_CHARACTERS = 1 << 22
"""Maximum text chunk length if no point is certain."""

SPACE_MARK = "\u2581"
"""Character that SentencePiece writes for a space; it reads the character itself back as a space."""

IsSafeCut = Callable[[str, int], bool]
"""Function that returns True if a tokenizer certainly cuts a text before the character at an index."""


def never(text: str, at: int) -> bool:
    """Return False: no point is certain."""
    return False


_LETTER_OR_DIGIT = re.compile(r"[A-Za-z0-9]")


def safe_chunks(text: str, size: int, is_safe_cut: IsSafeCut) -> Iterator[Chunk]:
    """Yield ``text`` in chunks of about ``size`` characters, cut at certain points, otherwise at the limit."""
    start = 0
    while start < len(text):
        stop = len(text)
        if stop - start > size:
            stop = _find_cut(text, start, size, is_safe_cut)
        yield Chunk(text[start:stop], start == 0)
        start = stop


def newline_chunks(text: str, size: int) -> Iterator[Chunk]:
    """Yield ``text``, cut after a newline about every ``size`` characters; a longer line is cut anyway.

    Our own models use this rule: their shards have used it since the first release. Few tokens cross a newline.
    """
    start = 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            newline = text.rfind("\n", start, stop)
            if newline >= 0:
                stop = newline + 1
        yield Chunk(text[start:stop], start == 0)
        start = stop


def _find_cut(text: str, start: int, size: int, is_safe_cut: IsSafeCut) -> int:
    """Return the end of the chunk from ``start``: the last certain point in it, or the first one after it."""
    middle = start + size
    # Search backwards first: chunks stay close to ``size``, and certain points are usually near.
    for at in range(middle, start, -1):
        if is_safe_cut(text, at):
            return at
    limit = min(start + max(LIMIT_CHARACTERS, size), len(text))
    for at in range(middle + 1, limit):
        if is_safe_cut(text, at):
            return at
    return limit


class AdjacentPairs:
    """Character pairs that are adjacent in some vocabulary piece."""

    def __init__(self, pieces: Iterable[str], *, normalizes: bool, has_byte_fallback: bool) -> None:
        """Collect the pairs. ``normalizes``: the tokenizer changes more of a text than its spaces."""
        self._pairs: set[str] = set()
        self._known: set[str] = set()
        for piece in pieces:
            # Fast tokenizers may keep real spaces in pieces.
            written = piece.replace(" ", SPACE_MARK)
            self._known.update(written)
            self._pairs.update(written[at : at + 2] for at in range(len(written) - 1))
        self._normalizes = normalizes
        self._has_byte_fallback = has_byte_fallback

    def is_safe_cut(self, text: str, at: int) -> bool:
        """Return True if no token can span the characters before and after this point."""
        if self._normalizes and not is_plain_space(text, at):
            return False
        left, right = text[at - 1], text[at]
        # Pieces contain the mark instead of a space.
        if left == " ":
            left = SPACE_MARK
        if right == " ":
            right = SPACE_MARK
        # Two adjacent unknown characters become one unknown token.
        if not self._has_byte_fallback and left not in self._known and right not in self._known:
            return False
        return left + right not in self._pairs


def ends_word(text: str, at: int) -> bool:
    """Return True if an ASCII letter or digit precedes this point, and a space or a newline follows it."""
    return text[at] in " \n" and _LETTER_OR_DIGIT.match(text[at - 1]) is not None


def is_plain_space(text: str, at: int) -> bool:
    """Return True if a single space follows this point, between two ASCII letters or digits."""
    if text[at] != " " or at + 1 >= len(text):
        return False
    return all(_LETTER_OR_DIGIT.match(character) for character in (text[at - 1], text[at + 1]))
