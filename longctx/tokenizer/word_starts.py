"""Ids that start a word, by their spelling."""

from __future__ import annotations

import numpy as np

from longctx.tokenizer.tokenizer_base import Tokenizer

_WORD_START_MARKS = ("\u2581", "\u0120", "\u010a", "<0x0A>")
"""SentencePiece's space, the space and the newline in byte-level models, and a byte-fallback newline."""


def find_word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Return True for each id that starts a word, bool [vocab_size].

    Such ids start with a space or a newline, or represent no text.
    """
    pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    # WordPiece marks continuations; all others mark starts.
    if tokenizer.continuation_prefix:
        return np.array([not piece.startswith(tokenizer.continuation_prefix) for piece in pieces])
    return np.array([piece.startswith(_WORD_START_MARKS) for piece in pieces]) | tokenizer.is_control
