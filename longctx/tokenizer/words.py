"""Ids that begin a word, by their spelling."""

from __future__ import annotations

import numpy as np

from longctx.tokenizer.contract import Tokenizer

_BEGINS = ("\u2581", "\u0120", "\u010a", "<0x0A>")
"""SentencePiece's space, the space and the line of byte-level models, and a line of byte fallback."""


def word_begins(tokenizer: Tokenizer) -> np.ndarray:
    """Return for each id whether a word begins with it, bool [vocab_size].

    Such ids begin with a space or a new line, or represent no text.
    """
    pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    if tokenizer.goes_on:
        return np.array([not piece.startswith(tokenizer.goes_on) for piece in pieces])
    return np.array([piece.startswith(_BEGINS) for piece in pieces]) | tokenizer.is_control
