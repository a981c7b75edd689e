"""Streaming detokenization: text is returned as soon as later tokens cannot change it.

A token alone has no text. Some tokenizers drop the space before the first decoded token, and a character may span
several tokens. So tokens are decoded together with a few of those before them, and an unfinished character waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""Decoder output for bytes that do not form a complete character, or not yet."""

Decode = Callable[[Sequence[int]], str]
"""Function from ids to text, as a tokenizer decodes them."""


class TextStream:
    """Converter from tokens to text. Results from ``add`` and ``finish`` join to the text that follows the prompt's."""

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = _context(decode, list(prompt_ids))
        """Tokens decoded together: some with known text, then those that may wait for more bytes."""
        self._shown = decode(self._ids)
        """Part of their text that was returned, or belongs to the prompt."""

    def add(self, token: int) -> str:
        """Return the text that this token completed; may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        # The next token's bytes may complete the last character.
        complete_text = text.rstrip(UNFINISHED)
        new = complete_text[len(self._shown) :]
        if new:
            self._shown = complete_text
        if complete_text == text:
            # Drop tokens that no longer affect decoding: the cost per token stays constant.
            self._ids = _context(self._decode, self._ids)
            self._shown = self._decode(self._ids)
        return new

    def finish(self) -> str:
        """Return the remaining text: an unfinished character, as U+FFFD."""
        rest = self._decode(self._ids)[len(self._shown) :]
        self._shown += rest
        return rest


def _context(decode: Decode, ids: list[int]) -> list[int]:
    """Return the shortest suffix of ``ids`` after which tokens decode as after all ``ids``; all if no suffix does."""
    for start in range(len(ids) - 1, -1, -1):
        text = decode(ids[start:])
        # A tokenizer may drop some spaces in a blank text; a character that begins before these tokens is incomplete.
        if text.strip() and UNFINISHED not in text:
            return ids[start:]
    return ids
