"""What attention kernels are tested on: slices, score rules, and softmax attention by its definition."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from longctx.kernels.attention.kernel_interface import Gradients, RelativeBias, ScoreRules
from longctx.kernels.attention.slices import AttentionSlice, slice_table

SCALE = 0.3

SLICES = {
    "causal": [AttentionSlice(0, 20, 0, 20, lo=0)],
    "documents": [
        AttentionSlice(0, 7, 0, 7, lo=0),
        AttentionSlice(7, 8, 7, 8, lo=0),
        AttentionSlice(8, 20, 8, 20, lo=0),
    ],
    "rectangle": [AttentionSlice(0, 20, 0, 20)],
    "strict": [AttentionSlice(0, 20, 0, 20, lo=1)],
    "later queries": [AttentionSlice(5, 20, 0, 13, lo=-3, offset=5)],
    "same rows twice": [AttentionSlice(0, 20, 0, 6), AttentionSlice(4, 20, 6, 20, lo=0)],
    "some rows before": [AttentionSlice(8, 14, 0, 5), AttentionSlice(0, 20, 5, 20)],
    "blind rows": [
        AttentionSlice(3, 9, 0, 5),
        AttentionSlice(12, 15, 5, 8, lo=6),
        AttentionSlice(16, 16, 0, 20),
        AttentionSlice(17, 20, 4, 4),
    ],
    "none": [],
    "nothing in the band": [AttentionSlice(0, 20, 0, 20, lo=3, hi=2), AttentionSlice(0, 5, 10, 20, lo=0)],
    "window": [AttentionSlice(0, 20, 0, 20, lo=0, hi=4)],
    "window of itself": [AttentionSlice(0, 20, 0, 20, lo=0, hi=0)],
    "wide window": [AttentionSlice(0, 20, 0, 20, lo=0, hi=12)],
    "window, later half": [AttentionSlice(0, 20, 0, 9, lo=-7, hi=5, offset=7)],
    "window on both sides": [AttentionSlice(0, 20, 0, 20, lo=-5, hi=3)],
    "upper bound alone": [AttentionSlice(2, 20, 1, 20, hi=2)],
    "striped, with window": [
        AttentionSlice(0, 10, 0, 20, lo=-1, hi=6, step=3, offset=-1),
        AttentionSlice(10, 20, 0, 20, lo=2, step=3),
    ],
    "sinks and window": [AttentionSlice(0, 20, 0, 20, lo=0, hi=5), AttentionSlice(0, 20, 0, 2, lo=6)],
}


def rules(num_heads: int, dtype: torch.dtype = torch.float64) -> dict[str, ScoreRules]:
    """Every rule of the scores alone and all together."""
    g = torch.Generator().manual_seed(5)
    table = torch.randn(8, num_heads, generator=g, dtype=torch.float64).to(dtype)
    slopes = torch.rand(num_heads, generator=g)
    return {
        "plain": ScoreRules(scale=SCALE),
        "softcap": ScoreRules(scale=SCALE, softcap=1.5),
        "alibi": ScoreRules(scale=SCALE, alibi_slopes_H=slopes),
        "bias": ScoreRules(scale=SCALE, relative_bias=RelativeBias(table, max_distance=15)),
        "all": ScoreRules(
            scale=SCALE,
            softcap=2.0,
            alibi_slopes_H=slopes,
            relative_bias=RelativeBias(table, max_distance=13, bidirectional=True),
        ),
    }


def tensors(
    num_queries: int, num_keys: int, dtype: torch.dtype = torch.float32, *, H=4, K=2, D=8, V=None, B=2, seed=0
) -> list[Tensor]:
    """Random q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, num_queries, H, D), (B, num_keys, K, D), (B, num_keys, K, V or D))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


@st.composite
def any_slices(draw, rows: int) -> AttentionSlice:
    """A slice of tensors of so many rows, whatever its band."""
    (q0, q1), (k0, k1) = (sorted(draw(st.lists(st.integers(0, rows), min_size=2, max_size=2))) for _ in range(2))
    bounds = st.none() | st.integers(-rows - 1, rows + 1)
    return AttentionSlice(
        q0, q1, k0, k1, draw(bounds), draw(bounds), draw(st.integers(1, 3)), draw(st.integers(-20, 20))
    )


def _named(one: AttentionSlice, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Whether the slice names each (query row, key row), and i − j."""
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    inside = (i >= one.q_start) & (i < one.q_stop) & (j >= one.k_start) & (j < one.k_stop)
    if one.lo is not None:
        inside = inside & (i - j >= one.lo)
    if one.hi is not None:
        inside = inside & (i - j <= one.hi)
    return inside, i - j


def band_matrix(slices: list[AttentionSlice], num_queries: int, num_keys: int) -> Tensor:
    """How often each (query row, key row) is named, by the definition of a slice."""
    none = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    return sum((_named(p, num_queries, num_keys)[0].long() for p in slices), none)


def distance_matrix(slices: list[AttentionSlice], num_queries: int, num_keys: int) -> Tensor:
    """Tokens between each query and each key that a slice names."""
    found = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for p in slices:
        inside, apart = _named(p, num_queries, num_keys)
        found = torch.where(inside, p.step * apart + p.offset, found)
    return found


def plain_bucket(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """T5's bucket of one distance, in words of one number."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if distance < 0 else 0
        distance = abs(distance)
    exact = num_buckets // 2
    if max(distance, 0) < exact:
        return first + max(distance, 0)
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (num_buckets - exact)), num_buckets - 1)


def plain_scores(q: Tensor, k: Tensor, scores: ScoreRules, distances: Tensor) -> Tensor:
    """Scores [B, H, i, j] by the definition in the contract."""
    values = torch.einsum("bihd,bjhd->bhij", q, k) * scores.scale
    if scores.softcap is not None:
        values = scores.softcap * torch.tanh(values / scores.softcap)
    if scores.alibi_slopes_H is not None:
        values = values - scores.alibi_slopes_H.double()[:, None, None] * distances.abs()
    if scores.relative_bias is not None:
        bias = scores.relative_bias
        of = {
            d: plain_bucket(d, len(bias.table_NH), bias.max_distance, bias.bidirectional)
            for d in distances.unique().tolist()
        }
        values = values + bias.table_NH[distances.clone().apply_(lambda d: of[d])].permute(2, 0, 1)
    return values


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: ScoreRules | None = None, distances: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the marked keys in float64, with autograd; (out, lse)."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 2), v.double().repeat_interleave(groups, 2)
    values = plain_scores(
        q, k, scores or ScoreRules(scale=SCALE), torch.zeros_like(seen) if distances is None else distances
    )
    values = values.masked_fill(seen == 0, -torch.inf)
    lse = values.logsumexp(-1)
    weights = torch.where(seen > 0, torch.exp(values - lse.nan_to_num(neginf=0.0)[..., None]), 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse.transpose(1, 2)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def forward_backward(
    kernel, tensors: list[Tensor], dout: Tensor, slices: list[AttentionSlice], scores: ScoreRules
) -> list[Tensor]:
    """[out, dq, dk, dv] of one kernel; the output is rounded to the inputs' dtype before backward, as a layer does."""
    q, k, v = tensors
    out, lse = kernel.forward(q, k, v, slice_table(slices), scores=scores)
    grads: Gradients = kernel.backward(dout, q, k, v, out.to(q.dtype), lse, slice_table(slices), scores=scores)
    return [out, *grads[:3]]
