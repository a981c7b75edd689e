"""What a text's shingles are, one by one, and how alike two sets of them are; and texts that are edited at random."""

from __future__ import annotations

import random
import re

import numpy as np

from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.signatures import Signer

_ALONE = r"[\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\ua4cf\U0001b000-\U0003ffff]"
_UNIT = re.compile(_ALONE + r"|[a-z0-9_\u00c0-\u024f\u0400-\u04ff]+")


def shingles(text: str, size: int = 5) -> set[tuple[str, ...]]:
    """The runs of ``size`` words of a text; a shorter one is a single run."""
    units = _UNIT.findall(text.lower())
    return {tuple(units[at : at + size]) for at in range(max(1, len(units) - size + 1))}


def jaccard(first: str, second: str, size: int = 5) -> float:
    """The share of common shingles among all of two texts."""
    one, other = shingles(first, size), shingles(second, size)
    return len(one & other) / len(one | other)


def sign(texts: list[str], rule: DuplicateRule) -> np.ndarray:
    """Signatures of texts, uint16 [n, permutations]."""
    signer, found = Signer(rule), []
    for number, text in enumerate(texts):
        found += signer.add(text, number)
    found += signer.finish()
    return np.concatenate(found)


def edited(text: str, changes: float, draw: random.Random) -> str:
    """The text with about so many of its words, of 1, replaced, removed or doubled."""
    words = text.split(" ")
    for at in range(len(words)):
        if draw.random() < changes:
            words[at] = draw.choice(["", f"{words[at]} {words[at]}", f"new{draw.randrange(10**6)}"])
    return " ".join(words)
