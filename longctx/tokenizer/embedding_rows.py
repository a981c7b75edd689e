"""Tokenizer ids without an embedding row in the model: Gemma 3's image token, an added ``[PAD]``.

Ordinary text does not contain them, so such a tokenizer is usable; a text with one is refused, naming the token.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from longctx.errors import DataError
from longctx.tokenizer.special import SpecialIds


class ModelTokenizer(Protocol):
    """Part of ``Tokenizer`` used here."""

    vocab_size: int
    special: SpecialIds
    rows: int | None

    def describe_token(self, token: int | None, default: str = "none") -> str: ...


def check_rows(tokenizer: ModelTokenizer, ids: np.ndarray, where: str) -> np.ndarray:
    """Return the ids; raise DataError if one has no row in the model from ``tokenizer.for_model``.

    ``where`` names the text that holds it.
    """
    if tokenizer.rows is None:
        return ids
    missing = ids[ids >= tokenizer.rows]
    if len(missing):
        raise DataError(f"{where} holds the token {without_row(tokenizer, int(missing[0]), tokenizer.rows)}")
    return ids


def without_row(tokenizer: ModelTokenizer, token: int, rows: int) -> str:
    """Return a message about a token without a row in a model with ``rows`` rows, with advice."""
    size = max(tokenizer.vocab_size, token + 1)
    prefix = "Remove it from the text, or give"
    # A token that frames every document cannot be left out.
    if token in (tokenizer.special.begin, tokenizer.special.end):
        prefix = "Give"
    return (
        f"{tokenizer.describe_token(token)}, and the model has rows for ids 0 to {rows - 1} only.\n"
        f"{prefix} the model a row for it in transformers: model.resize_token_embeddings({size}), then "
        "model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR). `longctx convert --to hf` writes a folder that "
        "transformers loads."
    )
