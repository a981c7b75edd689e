"""Which documents are held out: a function of a hash of their text alone."""

from __future__ import annotations

import numpy as np

from data_pipeline.shuffle import fall_below, falls_below

# Part of the format: another number would move documents between the splits.
SPLIT_SALT = 0x76616C6964


def is_held_out(text_hash: int, fraction: float) -> bool:
    """Whether a document with this hash of its text goes to the validation split."""
    return falls_below(text_hash, fraction, SPLIT_SALT)


def are_held_out(text_hashes: np.ndarray, fraction: float) -> np.ndarray:
    """``is_held_out`` of every hash, bool [n]."""
    return fall_below(text_hashes, fraction, SPLIT_SALT)
