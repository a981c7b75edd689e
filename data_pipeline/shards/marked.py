"""Tokens as readable text: control tokens spelled out, and marks around target tokens."""

from __future__ import annotations

import numpy as np

from longctx.tokenizer import Tokenizer

BEGIN_TARGETS, END_TARGETS = "⟦", "⟧"


def marked_text(ids: np.ndarray, tokenizer: Tokenizer, target_mask: np.ndarray) -> str:
    """Return ids [N] as text, with control tokens spelled out and each span of target tokens (bool [N]) in marks."""
    control = tokenizer.is_control[ids]
    # Split at every mask change and around control tokens, so that each span is decoded in one way.
    changes = np.flatnonzero((target_mask[1:] != target_mask[:-1]) | (control[1:] | control[:-1])) + 1
    text: list[str] = []
    inside = False
    for part, is_target in zip(np.split(ids, changes), np.append(target_mask[:1], target_mask[changes]), strict=True):
        if is_target != inside:
            text.append(BEGIN_TARGETS if is_target else END_TARGETS)
            inside = bool(is_target)
        if len(part) and tokenizer.is_control[part[0]]:
            text += [tokenizer.piece(int(token)) for token in part]
        else:
            text.append(tokenizer.decode(part))
    if inside:
        text.append(END_TARGETS)
    return "".join(text)


def mask_of(bounds: np.ndarray, length: int) -> np.ndarray:
    """Convert token spans, in the format of ``EncodedDocument.target_runs``, to a mask, bool [length]."""
    steps = np.zeros(length + 1, np.int8)
    steps[bounds[::2]] += 1
    steps[bounds[1::2]] -= 1
    return np.cumsum(steps[:-1]).astype(bool)
