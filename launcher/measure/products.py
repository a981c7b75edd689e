"""Products of weights by shape, forward and backward, by the code of a run's layers.

Axes: N tokens, M width in and out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from launcher.measure.clock import Clock
from launcher.measure.figures import DTYPES, Figure
from launcher.measure.sizes import Sizes
from longctx.kernels.matmul import multiply, multiply_backward
from longctx.kernels.processor import Products, fastest_products


def measure_products(clock: Clock, sizes: Sizes) -> Iterator[Figure]:
    """FLOPs a second forward and of both products of backward."""
    axes = {"tokens": sizes.tokens, "width": sizes.widths}
    forward = Figure("product_flops", axes, "products of a linear layer, forward")
    backward = Figure("product_backward_flops", axes, "its two products of backward")
    for dtype, (N, M) in product(DTYPES, product(sizes.tokens, sizes.widths)):
        x_NM, weight_MM, dy_NM = (torch.randn(rows, M, device=clock.device, dtype=dtype) / M**0.5 for rows in (N, M, N))
        products: Products = fastest_products()
        flops = 2 * N * M * M
        with torch.no_grad():
            seconds = clock.seconds(lambda: multiply(x_NM, weight_MM, products=products))  # noqa: B023
            forward.add(dtype, flops / seconds)
            seconds = clock.seconds(
                lambda: multiply_backward(dy_NM, x_NM, weight_MM, needs_x=True, needs_weight=True, products=products)  # noqa: B023
            )
            backward.add(dtype, 2 * flops / seconds)
    yield forward
    yield backward
