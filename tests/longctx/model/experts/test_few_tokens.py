"""The new tokens of several sequences, as in decoding: few tokens are computed in one product for all experts."""

from __future__ import annotations

import pytest
import torch

from longctx.model.experts.dispatch import ExpertRun, TokenDispatcher
from tests.longctx.model.experts.test_experts import EXACT, build, by_definition, routed, tolerance
from tests.rounding import both_ways


@both_ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_several_sequences(dtype, products):
    """Without a gradient, few tokens are computed in grouped products, more in blocks."""
    module, exact = build(dtype, expert_bias=True), build(expert_bias=True)
    exact.load_state_dict(module.state_dict())
    for tokens in (0, 1, 2, 8, 32, 33):
        x, gates, choices = routed(dtype, tokens=tokens, nowhere=0.1)
        with torch.no_grad():
            found = module(x, gates, choices, ExpertRun(TokenDispatcher(), matmul_mode=products))
            wanted = by_definition(exact, x.double(), gates.double(), choices)
        bound = tolerance(dtype, "native")
        if dtype == torch.float64:
            bound = EXACT
        assert (found.double() - wanted).abs().sum() <= bound * wanted.abs().sum(), tokens
