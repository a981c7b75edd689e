"""What rounding to bfloat16 costs: the numbers that bounds of low precision are made of.

bfloat16 keeps 8 significant bits. Its neighbours lie at most 2⁻⁷ of a number apart, so rounding to the nearest moves a
number by at most ``UNIT`` of itself. Over a tensor these errors are spread evenly over half a step to either side, and
one rounding puts it off by at most UNIT / √3 in the Frobenius norm (``ONCE``); by 0.42 · UNIT = 1.66e-3 where mantissas
are spread as they are in most tensors. Independent roundings add in squares.

The two ways to multiply bfloat16 differ in what is rounded. ``products="float32"`` rounds what a layer hands on, once.
``products="native"`` rounds the result of every matrix product; its sums are float32. PyTorch promises no more than
that, and processors differ within it: so a test's native bound counts the products.
"""

from __future__ import annotations

import pytest

from longctx.kernels.processor import MATMUL_MODES, MatmulMode

UNIT = 2.0**-8
ONCE = UNIT / 3**0.5

both_ways = pytest.mark.parametrize("products", MATMUL_MODES)
"""Every test of low precision runs in both ways to multiply, whatever this machine's processor prefers."""


def rounded(times: float) -> float:
    """Most of the relative error, in the Frobenius norm, of a tensor that was rounded so many times."""
    return times**0.5 * ONCE


ATTENTION: dict[MatmulMode, float] = {"float32": rounded(5), "native": rounded(12)}
"""Bounds of attention in one process, for queries, keys and values around 1: output and gradients.

In float32 an output is rounded once. A gradient is so too, and depends on the rounded output: a score's gradient takes
its product with the output's gradient away, which where few keys are seen leaves little and so counts 4 times.
Natively scores are rounded besides (an error of a weight as large as the score: 5 times for scores around 1, where
large ones weigh most) and weights or scores' gradients; then the product.
"""
