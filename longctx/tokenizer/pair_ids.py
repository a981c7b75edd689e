"""Ids for both sides of a pair: the encoder's source, and the start of the target."""

from __future__ import annotations

import numpy as np

from longctx.errors import DataError
from longctx.tokenizer.embedding_rows import check_rows
from longctx.tokenizer.tokenizer_base import Tokenizer


def source_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a full document as an encoder reads it."""
    ids = np.concatenate([tokenizer.prefix_ids, tokenizer.encode(text), tokenizer.suffix_ids])
    return check_rows(tokenizer, ids, "the text").tolist()


def start_of_targets(tokenizer: Tokenizer) -> int:
    """Return the id that starts a target: the one in the model's files (T5: its padding).

    By default it is the tokenizer's begin id or, without one, its end id. Raise DataError for a tokenizer without an
    end id.
    """
    if not len(tokenizer.suffix_ids):
        raise DataError(
            f"{tokenizer.path} has no end-of-text id, so a model trained on pairs could not end its output. "
            "Train a tokenizer with `longctx tokenizer train`."
        )
    if tokenizer.special.start is not None:
        return tokenizer.special.start
    ids = tokenizer.prefix_ids if len(tokenizer.prefix_ids) else tokenizer.suffix_ids
    return int(ids[-1])
