"""One token, as in decoding: its experts are read where they are, and give what blocks of tokens give."""

from __future__ import annotations

import pytest
import torch

from longctx.kernels import matmul
from longctx.kernels.matmul import multiply
from longctx.model.experts.experts import Experts
from tests.longctx.samples import randomize, tiny_config


@pytest.fixture(autouse=True, params=[True, False], ids=["vectors", "matrices"])
def processor(request, monkeypatch):
    """A processor that multiplies one row of bfloat16 faster as a vector, or as a matrix."""
    monkeypatch.setattr(matmul, "multiplies_rows_as_vectors", lambda: request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"expert_bias": True, "activation": "swiglu_oai"}])
@pytest.mark.parametrize("chosen", [[3, 0], [1, -1], [-1, -1]])
def test_one_token_gets_what_it_gets_among_others(dtype, options, chosen):
    config = tiny_config(**options)
    experts = Experts(config)
    randomize(experts, std=0.3, seed=1)
    experts = experts.to(dtype)
    generator = torch.Generator().manual_seed(2)
    x_NM = torch.randn(2, config.hidden_size, generator=generator).to(dtype)
    gates_Nk = torch.rand(2, 2, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    experts_Nk = torch.tensor([chosen, [2, 1]])
    gates_Nk = gates_Nk.masked_fill(experts_Nk < 0, 0)
    with torch.no_grad():
        among = experts(x_NM, gates_Nk, experts_Nk)[:1]
        alone = experts(x_NM[:1], gates_Nk[:1], experts_Nk[:1])
    assert alone.dtype == among.dtype
    # Sums have another order; in bfloat16 each of two results is rounded once more or less.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(alone, among, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("products", ["native", "float32"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_row_is_multiplied_as_many_are(products, has_bias):
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(24, 40, generator=generator)
    x_NI, bias_O = torch.randn(3, 40, generator=generator), torch.randn(24, generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        operands = [tensor.to(dtype) for tensor in (x_NI, weight_OI, bias_O)]
        bias = operands[2] if has_bias else None
        rows = multiply(operands[0], operands[1], bias, matmul_mode=products)
        one = multiply(operands[0][None, :1], operands[1], bias, matmul_mode=products)
        assert one.shape == (1, 1, 24)
        torch.testing.assert_close(one[0], rows[:1], rtol=tolerance, atol=tolerance)
