"""Texts as hashed words or characters, vectorized over a hundred thousand characters at a time.

A word consists of letters, digits and ``_``. In scripts without spaces between words (Chinese, Japanese, Thai, Lao,
Burmese, Khmer) and in pictographs each character is a unit. Case and the characters between words do not count.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from longctx.integer_hash import GOLDEN, mix64_array

_BETWEEN, _IN_WORD, _ALONE = 0, 1, 2
# Our own code point ranges: Python's tables change with its version, but signatures must not.
_RANGES = (
    (0x30, 0x39, _IN_WORD),
    (0x41, 0x5A, _IN_WORD),
    (0x5F, 0x5F, _IN_WORD),
    (0x61, 0x7A, _IN_WORD),
    (0xAA, 0xAA, _IN_WORD),
    (0xB5, 0xB5, _IN_WORD),
    (0xBA, 0xBA, _IN_WORD),
    (0xC0, 0xD6, _IN_WORD),
    (0xD8, 0xF6, _IN_WORD),
    (0xF8, 0x1FFF, _IN_WORD),
    (0x2070, 0x209F, _IN_WORD),
    (0x2100, 0x218F, _IN_WORD),
    (0x2C00, 0x2DFF, _IN_WORD),
    (0x3005, 0x3007, _ALONE),
    (0x3021, 0x3029, _ALONE),
    (0x3041, 0xA4CF, _ALONE),
    (0xA4D0, 0xD7FF, _IN_WORD),
    (0xE000, 0xF8FF, _ALONE),
    (0xF900, 0xFAFF, _ALONE),
    (0xFB00, 0xFDFF, _IN_WORD),
    (0xFE70, 0xFEFE, _IN_WORD),
    (0xFF10, 0xFF19, _IN_WORD),
    (0xFF21, 0xFF3A, _IN_WORD),
    (0xFF41, 0xFF5A, _IN_WORD),
    (0xFF66, 0xFFDC, _ALONE),
    (0x10000, 0x1AFFF, _IN_WORD),
    (0x1B000, 0x3FFFF, _ALONE),
    # Within the above ranges: scripts without spaces.
    (0x0E01, 0x0EFF, _ALONE),
    (0x1000, 0x109F, _ALONE),
    (0x1780, 0x17FF, _ALONE),
)
_LAST = 0x40000
_BASE = np.uint64(GOLDEN)
"""Base of the polynomial that hashes a word: odd, so that a word's position can be divided out."""
_INVERSE = np.uint64(pow(GOLDEN, -1, 1 << 64))


def unit_hashes(points: np.ndarray, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of a text's units, uint64, and the index of each unit's first character.

    ``points`` are code points in lower case, uint8 or uint32.
    """
    if points.dtype != np.uint8:
        points = np.minimum(points, np.uint32(_LAST))
    kinds = _table(unit)[points]
    in_word = kinds == _IN_WORD
    alone = kinds == _ALONE
    joins = np.zeros(len(points) + 1, dtype=bool)
    # True if a character and the previous one are in the same word.
    np.logical_and(in_word[1:], in_word[:-1], out=joins[1:-1])
    # A unit starts and ends at word boundaries; characters between units are ignored.
    counts = in_word | alone
    starts = np.flatnonzero(counts & ~joins[:-1])
    ends = np.flatnonzero(counts & ~joins[1:]) + 1
    # Polynomial hash (Karp and Rabin, 1987) for all words at once: Σ cᵢ·baseⁱ over a word is a difference of two prefix
    # sums, and dividing by base^start makes it independent of the word's position. All arithmetic is modulo 2^64.
    powers, inverses = _powers(len(points))
    sums = np.empty(len(points) + 1, dtype=np.uint64)
    sums[0] = 0
    np.multiply(points, powers, out=sums[1:], dtype=np.uint64)
    np.cumsum(sums[1:], out=sums[1:])
    return mix64_array((sums[ends] - sums[starts]) * inverses[starts]), starts


@cache
def _table(unit: str) -> np.ndarray:
    """Return the kind of each code point."""
    table = np.zeros(_LAST + 1, dtype=np.uint8)
    for first, last, kind in _RANGES:
        table[first : last + 1] = kind
    # Every visible character, including punctuation, which words ignore.
    if unit == "characters":
        table[0x21:] = _ALONE
        table[0x7F:0xA1] = _BETWEEN
        table[0x2000:0x2070] = _BETWEEN
        table[0x3000] = _BETWEEN
    return table


_known_powers: list[tuple[np.ndarray, np.ndarray]] = []


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return powers of the base and of its inverse, [count] each, uint64."""
    if not _known_powers or len(_known_powers[0][0]) < count:
        size = 1 << max(count - 1, 1).bit_length()
        tables = []
        for base in (_BASE, _INVERSE):
            factors = np.full(size, base, dtype=np.uint64)
            factors[0] = 1
            tables.append(np.multiply.accumulate(factors))
        _known_powers[:] = [(tables[0], tables[1])]
    powers, inverses = _known_powers[0]
    return powers[:count], inverses[:count]
