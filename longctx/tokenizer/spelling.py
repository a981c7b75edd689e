"""The bytes that ids stand for, looked up in a table: a proof that a text comes back, at a tenth of decoding's cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Spelling:
    """For a tokenizer whose text is the bytes of its ids one after the other, with nothing between or before them."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        """``pieces`` are the bytes of each id; None where an id stands for no text of its own."""
        self._lengths = np.array([len(piece or b"") for piece in pieces], dtype=np.int32)
        self._starts = np.cumsum(self._lengths, dtype=np.int32) - self._lengths
        self._bytes = np.frombuffer(b"".join(piece or b"" for piece in pieces), dtype=np.uint8)
        self._is_text = np.array([piece is not None for piece in pieces])

    def spells(self, ids: np.ndarray, text: str) -> bool:
        """Whether the ids' bytes are those of ``text``; False too where one of them stands for no text."""
        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        lengths = self._lengths[ids]
        stops = np.cumsum(lengths)
        if not len(ids) or stops[-1] != len(raw) or not self._is_text[ids].all():
            return not len(ids) and not len(raw)
        # For every byte of the text where it stands in the table: its id's first byte there, and how far into the id.
        first = self._starts[ids] - (stops - lengths).astype(np.int32)
        at = np.repeat(first, lengths)
        at += np.arange(len(raw), dtype=np.int32)
        return bool(np.array_equal(self._bytes[at], raw))

    def locate(self, ids: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return first character, and the one behind the last, of each id of ``text``, int64; ids spell the text."""
        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        # Characters that begin before each byte, and in the text as a whole.
        begun = np.concatenate([np.zeros(1, np.int64), np.cumsum((raw & 0xC0) != 0x80)])
        stops = np.cumsum(self._lengths[ids], dtype=np.int64)
        starts = stops - self._lengths[ids]
        # A byte within a character stands for that character.
        return begun[starts + 1] - 1, begun[stops]
