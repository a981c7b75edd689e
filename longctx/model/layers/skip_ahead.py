"""Skip ahead in PyTorch's CPU generator, so that a part of a tensor is drawn without what lies before it.

The generator is a Mersenne Twister (MT19937): each word of its sequence is a linear function, over GF(2), of the 624
words before it. So the word k places ahead is a sum of some of the next 19,937 words. Which ones depends on k alone:
those are the terms of x^k modulo the characteristic polynomial of the sequence (Haramoto, Matsumoto, Nishimura,
Panneton and L'Ecuyer 2008). A polynomial over GF(2) is a Python integer here, with bit i for x^i.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch

WORDS, MIDDLE, MATRIX = 624, 397, 0x9908B0DF
"""Words of the state, the distance that the recurrence looks back, and what it adds for an odd word (Matsumoto and
Nishimura 1998)."""
WORD_BITS, LOW_BITS = 32, 31
DEGREE = WORDS * WORD_BITS - LOW_BITS

_STATE_BYTES, _FIRST_WORD = 5056, 24
"""``get_state``: seed, words left before the next twist, whether seeded, next word, 624 words of 8 bytes, normals."""
_DISCARDED = 1 << 22
"""Draws that are made and thrown away rather than jumped over: both take 10 ms."""


def skip_ahead(generator: torch.Generator, draws: int) -> None:
    """Let a freshly seeded CPU generator go on as if it had drawn ``draws`` random words of 32 bits."""
    state = generator.get_state()
    if draws > _DISCARDED and _is_fresh(state):
        generator.set_state(_jumped(state, draws))
        return
    scratch = torch.empty(min(draws, _DISCARDED), dtype=torch.int32)
    for start in range(0, draws, _DISCARDED):
        scratch[: draws - start].random_(generator=generator)


def _is_fresh(state: torch.Tensor) -> bool:
    """Whether this is a state as we know it, seeded and not drawn from: its first twist is to come."""
    if state.numel() != _STATE_BYTES:
        return False
    left, seeded, following = state[8:12].view(torch.int32), state[12:16].view(torch.int32), state[16:24]
    return int(left) == 1 and int(seeded) == 1 and not bool(following.any())


def _jumped(state: torch.Tensor, draws: int) -> torch.Tensor:
    """The state ``draws`` words ahead, again before a twist."""
    jumped = state.clone()
    words = jumped[_FIRST_WORD : _FIRST_WORD + 8 * WORDS].numpy().view(np.uint64)
    ahead = _sequence(words.astype(np.uint32), DEGREE + WORDS)
    # Word j of the new state is the sum of the words i + j for the terms x^i.
    windows = np.lib.stride_tricks.sliding_window_view(ahead, WORDS)
    words[:] = np.bitwise_xor.reduce(windows[_terms_of_power(draws)], axis=0)
    return jumped


def _sequence(first: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` words of the sequence that begins with these, [624] and uint32."""
    words = np.empty(count, dtype=np.uint32)
    words[:WORDS] = first
    # As many at a time as do not depend on one another.
    for k in range(0, count - WORDS, WORDS - MIDDLE):
        n = min(WORDS - MIDDLE, count - WORDS - k)
        joined = (words[k : k + n] & 0x80000000) | (words[k + 1 : k + 1 + n] & 0x7FFFFFFF)
        words[k + WORDS : k + WORDS + n] = words[k + MIDDLE : k + MIDDLE + n] ^ (joined >> 1) ^ ((joined & 1) * MATRIX)
    return words


@lru_cache(maxsize=256)
def _terms_of_power(exponent: int) -> np.ndarray:
    """The exponents of x^exponent modulo the characteristic polynomial, [terms]."""
    power = 1
    for bit in f"{exponent:b}":
        # A square over GF(2) has the same bits, spread: its digits in base 2 are read in base 4.
        power = int(f"{power:b}", 4)
        if bit == "1":
            power <<= 1
        power = _reduced(power)
    return np.flatnonzero(np.array(list(f"{power:b}"[::-1])) == "1")


def _reduced(polynomial: int) -> int:
    """A polynomial modulo the characteristic one."""
    while high := polynomial >> DEGREE:
        polynomial ^= high << DEGREE
        for exponent in characteristic_exponents():
            if exponent < DEGREE:
                polynomial ^= high << exponent
    return polynomial


@cache
def characteristic_exponents() -> tuple[int, ...]:
    """The 135 exponents of the sequence's characteristic polynomial (Matsumoto and Nishimura 1998, appendix A)."""
    p, q = (1 << WORDS) | (1 << MIDDLE), (1 << (WORDS - 1)) | (1 << (MIDDLE - 1))
    full = _product([p] * (WORD_BITS - LOW_BITS))
    polynomial = _product([full, *[q] * LOW_BITS])
    for i in range(WORD_BITS):
        if not MATRIX >> i & 1:
            continue
        if i < LOW_BITS:
            polynomial ^= _product([full, *[q] * (LOW_BITS - 1 - i)])
        else:
            polynomial ^= _product([p] * (WORD_BITS - 1 - i))
    return tuple(i for i, bit in enumerate(f"{polynomial:b}"[::-1]) if bit == "1")


def _product(factors: list[int]) -> int:
    """The product of polynomials; of none, 1."""
    result = 1
    for factor in factors:
        terms = [i for i, bit in enumerate(f"{factor:b}"[::-1]) if bit == "1"]
        total = 0
        for exponent in terms:
            total ^= result << exponent
        result = total
    return result
