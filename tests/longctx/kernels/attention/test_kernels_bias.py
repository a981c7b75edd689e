"""Rules of the scores: buckets and slopes as published, what a tile works out once a distance, the table's gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longctx.errors import ConfigError
from longctx.kernels.attention.bias import (
    alibi_slopes,
    buckets,
    distance_bias,
    gather_diagonals,
    spread,
    tile_distances,
)
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.attention.contract import RelativeBias, Scores
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from tests.longctx.kernels.attention.kernel_cases import plain_bucket, rules, tensors


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 1000), (8, 20), (4, 17)])
def test_buckets_are_t5s(num_buckets, max_distance, bidirectional):
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distances = torch.arange(-1200, 1200)
    bias = RelativeBias(torch.zeros(num_buckets, 2), max_distance, bidirectional)
    theirs = attention._relative_position_bucket(-distances, bidirectional, num_buckets, max_distance)
    assert torch.equal(buckets(distances, bias), theirs)
    near = [plain_bucket(d, num_buckets, max_distance, bidirectional) for d in (-3, -1, 0, 1, 3, 5000)]
    assert buckets(torch.tensor([-3, -1, 0, 1, 3, 5000]), bias).tolist() == near


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(6).tolist() == pytest.approx([2.0**-e for e in (2, 4, 6, 8, 1, 3)])
    with pytest.raises(ConfigError, match="at least one head"):
        alibi_slopes(0)


@pytest.mark.parametrize(("q", "k"), [((3, 9), (2, 6)), ((0, 1), (5, 9)), ((4, 9), (7, 8))])
def test_one_value_a_distance_spread_over_a_tile_and_back(q, k):
    one, scores = AttentionSlice(0, 20, 0, 20, step=2, offset=-3), rules(3)["all"]
    apart = torch.arange(*q)[:, None] - torch.arange(*k)
    values_Hn = distance_bias(scores, tile_distances(one, slice(*q), slice(*k), apart.device))
    whole = spread(values_Hn, k[1] - k[0])
    torch.testing.assert_close(whole, distance_bias(scores, 2 * apart - 3))
    random, back = torch.randn(whole.shape, dtype=torch.float64), torch.randn(values_Hn.shape, dtype=torch.float64)
    torch.testing.assert_close((spread(back, k[1] - k[0]) * random).sum(), (back * gather_diagonals(random)).sum())


class _Attention(torch.autograd.Function):
    """A kernel with its table as one of the inputs."""

    @staticmethod
    def forward(ctx, q, k, v, table, kernel, slices, scores: Scores):
        assert scores.relative_bias is not None
        scores = replace(scores, relative_bias=replace(scores.relative_bias, table_NH=table))
        out, lse = kernel.forward(q, k, v, slice_table(slices), scores=scores)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = kernel, slices, scores
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        kernel, slices, scores = ctx.rest
        q, k, v, out, lse = ctx.saved_tensors
        return *kernel.backward(dout, q, k, v, out, lse, slice_table(slices), scores=scores), None, None, None


@pytest.mark.parametrize("kernel", [ReferenceKernel(), BlockwiseKernel()], ids=lambda k: k.name)
def test_gradcheck_with_a_bias_table(kernel):
    scores = rules(2)["all"]
    assert scores.relative_bias is not None
    leaves = [
        x.requires_grad_()
        for x in (*tensors(6, 6, torch.float64, H=2, K=1, D=3, V=2, B=2), scores.relative_bias.table_NH)
    ]
    slices = [AttentionSlice(0, 6, 0, 4, lo=-2, offset=1), AttentionSlice(0, 6, 4, 6, hi=1)]
    assert torch.autograd.gradcheck(lambda *x: _Attention.apply(*x, kernel, slices, scores), leaves)
