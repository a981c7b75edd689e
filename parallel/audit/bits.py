"""Differences between two results of one computation: in any bit, or beyond rounding."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.tensor_bytes import as_bytes

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_UPDATE_ROUNDINGS = 32
"""More roundings than in any AdamW variant, each by at most half an ulp of its result."""
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


class BitDifference(NamedTuple):
    """Difference between two results."""

    values: int
    """Number of mismatched values."""
    total: int
    """Number of values."""
    bits: tuple[int, ...]
    """Mismatched bit positions over all values; 0 is the lowest mantissa bit."""
    parts: tuple[str, ...]
    """Meaning of these positions: mantissa, exponent, sign."""
    example: tuple[float, float]
    """First mismatched value, in both results."""

    def describe(self) -> str:
        """Return it as text, for a message."""
        bits = ", ".join(map(str, self.bits[:8]))
        if len(self.bits) > 8:
            bits += f" and {len(self.bits) - 8} more"
        word = "bit"
        if len(self.bits) > 1:
            word = "bits"
        return (
            f"{self.values} of {self.total} values differ, in {word} {bits} ({', '.join(self.parts)}): the first is "
            f"{self.example[0]:.9g} instead of {self.example[1]:.9g}"
        )


def difference(ours: Sequence[Tensor], others: Sequence[Tensor]) -> BitDifference | None:
    """Compare flat tensors with others of equal shape and dtype; return None if all bits are equal."""
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in others]
    found: BitDifference | None = None
    total = sum(x.numel() for x in ours)
    for a, b in zip(ours, others, strict=True):
        if not a.numel():
            continue
        # As integers: NaN then equals itself, and −0 differs from 0.
        flipped = _words(a) ^ _words(b)
        # Usually no bit differs over millions of values: detail only the mismatched ones.
        indices = np.flatnonzero(flipped)
        if not len(indices):
            continue
        positions = _positions(int(np.bitwise_or.reduce(flipped)))
        first = int(indices[0])
        current = BitDifference(
            len(indices), total, positions, _parts(positions, a.dtype), (_value(a, first), _value(b, first))
        )
        if found is not None:
            current = found._replace(
                values=found.values + current.values,
                bits=tuple(sorted(set(found.bits + current.bits))),
                parts=tuple(dict.fromkeys(found.parts + current.parts)),
            )
        found = current
    return found


def matmul_difference(a_nK: Tensor, b_Km: Tensor, found_nm: Tensor, other_nm: Tensor) -> BitDifference | None:
    """Compare two matmuls of a and b beyond rounding; return None if they are within the bound.

    A dot product over K terms, summed in any order with unit roundoff u, has an error of at most γ·Σ|a·b| with γ = K·u
    / (1 − K·u) (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, §3.1). Rounding to the output
    dtype adds half an ulp. Both results may err by as much, in opposite directions.
    """
    terms = a_nK.shape[1]
    u = torch.finfo(accumulate_dtype(a_nK.dtype)).eps / 2
    # K + 1 instead of K leaves room for one more rounding.
    gamma = (terms + 1) * u / (1 - (terms + 1) * u)
    sizes_nm = a_nK.abs().double() @ b_Km.abs().double()
    found, other = found_nm.double(), other_nm.double()
    rounding = torch.finfo(found_nm.dtype).eps / 2
    largest = torch.maximum(found.abs(), other.abs())
    bound_nm = 2 * (gamma * sizes_nm + rounding * largest) + torch.finfo(found_nm.dtype).tiny
    return _too_long(bound_nm, found_nm, other_nm)


def update_difference(before: Tensor, found: Tensor, other: Tensor) -> BitDifference | None:
    """Compare two AdamW results for one tensor beyond rounding; return None if they are within the bound.

    ``before`` is the tensor before the step. AdamW computes sums of products: each rounding is relative to the larger
    of a value's old and new magnitude.
    """
    u = torch.finfo(found.dtype).eps / 2
    sizes = torch.maximum(before.abs(), torch.maximum(found.abs(), other.abs())).double()
    change = torch.maximum((found - before).abs(), (other - before).abs()).double()
    return _too_long(_UPDATE_ROUNDINGS * u * (sizes + change) + torch.finfo(found.dtype).tiny, found, other)


def _too_long(bound: Tensor, found: Tensor, other: Tensor) -> BitDifference | None:
    """Return the difference between values that are further apart than ``bound``; None if all are within it."""
    # Comparisons with NaN are False, so a NaN in only one result counts as outside.
    is_inside = (found.double() - other.double()).abs() <= bound
    is_inside |= (found == other) | (found.isnan() & other.isnan())
    if bool(is_inside.all()):
        return None
    exceeds = ~is_inside
    result = difference([found[exceeds].flatten()], [other[exceeds].flatten()])
    assert result is not None
    return result._replace(total=found.numel())


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a checksum over all bits."""
    state = blake2b(digest_size=16)
    for x in tensors:
        state.update(_words(x).tobytes())
    return state.hexdigest()


def _words(x: Tensor) -> np.ndarray:
    return as_bytes(x.cpu().contiguous()).numpy().view(_WORDS[x.dtype.itemsize])


def _value(x: Tensor, place: int) -> float:
    return float(x[place])


def _positions(word: int) -> tuple[int, ...]:
    return tuple(n for n in range(word.bit_length()) if word >> n & 1)


def _parts(positions: Sequence[int], dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the fields at these bit positions, for this dtype."""
    mantissa, sign = _MANTISSA_BITS.get(dtype), 8 * dtype.itemsize - 1
    found = {}
    for n in positions:
        name = "exponent"
        if mantissa is None:
            name = "a whole number"
        elif n < mantissa:
            name = "mantissa"
        elif n == sign:
            name = "sign"
        found[name] = None
    return tuple(found)
