"""Gradients of the experts' weights: bfloat16 products are added up in float32 and rounded once."""

from __future__ import annotations

import pytest
import torch

from longctx.model.experts.gradient_sum import GradientSum

PRODUCTS = (0, 1, 3, 2, 1)
"""Products that are added to each expert."""


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_float32_and_rounded_once(dtype, products, tiles):
    g = torch.Generator().manual_seed(0)
    weight = torch.zeros(len(PRODUCTS), 24, 16, dtype=dtype)
    total, bias = GradientSum(weight, tiles=tiles), GradientSum(weight[:, :, 0], tiles=tiles)
    wanted, wanted_bias = torch.zeros(weight.shape), torch.zeros(weight.shape[:2])
    for _ in range(tiles):
        for expert, count in enumerate(PRODUCTS):
            for _ in range(count):
                dy = torch.randn(7, 24, generator=g).to(products)
                x = torch.randn(7, 16, generator=g).to(products)
                total.add_outer(expert, dy, x)
                bias.add_bias(expert, dy)
                # a bfloat16 product comes rounded; the sum of products must not be
                wanted[expert] += (dy.T @ x).float()
                wanted_bias[expert] += dy.float().sum(0)
    assert total.result().dtype == dtype
    # float32 additions in another order; their last bit may turn a bfloat16 rounding
    tolerance = 1e-5
    if dtype == torch.bfloat16:
        tolerance = 2**-8
    torch.testing.assert_close(total.result().float(), wanted, rtol=tolerance, atol=1e-5)
    torch.testing.assert_close(bias.result().float(), wanted_bias, rtol=tolerance, atol=1e-5)
    assert not total.result()[0].any(), "exactly 0 for an expert without tokens"


def test_one_product_is_the_gradient_to_the_bit():
    g = torch.Generator().manual_seed(1)
    dy, x = torch.randn(9, 24, generator=g).bfloat16(), torch.randn(9, 16, generator=g).bfloat16()
    total = GradientSum(torch.zeros(2, 24, 16, dtype=torch.bfloat16), tiles=1)
    total.add_outer(1, dy, x)
    assert torch.equal(total.result()[1], dy.T @ x)
