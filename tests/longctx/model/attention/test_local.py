"""One process's attention core against its definition: masks, score rules, sinks, caches, and as part of a graph.

Axes: B rows, T tokens, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import RelativeBias, ScoreRules
from longctx.kernels.attention.sinks import apply_sinks, sinks_gradient
from longctx.model.attention.core import sinks_of
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.local import LocalAttention, continuation_slices, document_slices
from longctx.model.attention.mask import AttentionMask
from tests.longctx.attention_cores import attend_once
from tests.rounding import ATTENTION, both_ways

BUCKETS, FARTHEST = 6, 9
MASKS = [
    {},
    {"causal": False},
    {"window": 1},
    {"window": 4},
    {"window": 3, "causal": False},
    {"window": 2, "sink_tokens": 3},
    {"window": 2, "sink_tokens": 6, "causal": False},
    {"window": 5, "sink_tokens": 1},
    {"window": 40, "sink_tokens": 2},
    {"sink_tokens": 2},
]


def visible(mask: AttentionMask, i: int, j: int) -> bool:
    """Whether token i sees token j of the flattened rows, by the words of ``AttentionMask``."""
    start = next((a for a, b in pairwise(mask.documents.bounds) if a <= i < b and a <= j < b), None)
    if start is None or (mask.causal and j > i):
        return False
    if mask.window is None or abs(i - j) < mask.window or j - start < mask.sink_tokens:
        return True
    return mask.stride > 0 and (i - j) % mask.stride == 0


def bucket(distance: int, bidirectional: bool) -> int:
    """T5's bucket of a distance query − key."""
    buckets, first = BUCKETS, 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    distance, exact = max(distance, 0), buckets // 2
    if distance < exact:
        return first + distance
    wide = math.log(distance / exact) / math.log(FARTHEST / exact) * (buckets - exact)
    return first + min(exact + int(wide), buckets - 1)


def by_definition(q, k, v, mask, scores, sinks):
    """``softmax_over`` what the mask lets each token see."""
    tokens = range(q.shape[0] * q.shape[1])
    return softmax_over(q, k, v, torch.tensor([[visible(mask, i, j) for j in tokens] for i in tokens]), scores, sinks)


def softmax_over(q, k, v, seen, scores, sinks=None):
    """Softmax over all scores at once, in float64 and with autograd; rows are flattened; [B, T, H, V]."""
    B, T, H, _ = q.shape
    groups = H // k.shape[2]
    q, k, v = (x.reshape(B * T, *x.shape[2:]) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    values = torch.einsum("ihd,jhd->hij", q, k) * scores.scale
    if scores.softcap is not None:
        values = scores.softcap * torch.tanh(values / scores.softcap)
    tokens = range(B * T)
    if scores.alibi_slopes_H is not None:
        distances = torch.tensor([[abs(i - j) for j in tokens] for i in tokens])
        values = values - scores.alibi_slopes_H.double()[:, None, None] * distances
    if scores.relative_bias is not None:
        bias = scores.relative_bias
        index = torch.tensor([[bucket(i - j, bias.bidirectional) for j in tokens] for i in tokens])
        values = values + bias.table_NH[index].permute(2, 0, 1)
    values = values.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        values = torch.cat((values, sinks[:, None, None].expand(H, B * T, 1)), -1)
    return torch.einsum("hij,jhv->ihv", values.softmax(-1)[..., : B * T], v).view(B, T, H, -1)


def leaves(B: int, T: int, *, H=4, K=2, D=8, V=5, dtype=torch.float64) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"q": (B, T, H, D), "k": (B, T, K, D), "v": (B, T, K, V), "table": (BUCKETS, H), "sinks": (H,)}
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for n, s in shapes.items()}


def rules(x: dict[str, torch.Tensor], *, rich: bool, bidirectional: bool = False) -> dict:
    """``scores`` and ``weights`` for a core: all there is, or nothing."""
    if not rich:
        return {}
    slopes = torch.tensor([0.5, 0.1, -0.2, 1.0])
    bias = RelativeBias(x["table"], FARTHEST, bidirectional)
    scores = ScoreRules(scale=0.4, softcap=3.0, alibi_slopes_H=slopes, relative_bias=bias)
    return {"scores": scores, "weights": (x["sinks"],)}


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
@pytest.mark.parametrize("changes", MASKS, ids=str)
def test_values_and_gradients_are_the_definitions(changes, rich):
    mask = AttentionMask((0, 1, 8, 8, 13, 26), **changes)
    x = leaves(2, 13)
    asked = rules(x, rich=rich, bidirectional=not mask.causal)
    out = attend_once(LocalAttention("blockwise"), x["q"], x["k"], x["v"], mask, **asked)
    scores = asked.get("scores", ScoreRules(scale=8**-0.5))
    wanted = by_definition(x["q"], x["k"], x["v"], mask, scores, sinks_of(asked.get("weights", ())))
    torch.testing.assert_close(out, wanted)
    dout, inputs = torch.randn_like(out), [t for n, t in x.items() if rich or n in "qkv"]
    grads, exact = (torch.autograd.grad(result, inputs, dout) for result in (out, wanted))
    torch.testing.assert_close(grads, exact)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 1)])
def test_sinks_on_the_preferred_kernel(dtype, H, K, products):
    x, mask = leaves(1, 23, H=H, K=K, V=8, dtype=dtype), AttentionMask((0, 7, 23))
    out = attend_once(LocalAttention(matmul_mode=products), x["q"], x["k"], x["v"], mask, weights=(x["sinks"],))
    exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    wanted = by_definition(exact["q"], exact["k"], exact["v"], mask, ScoreRules(scale=8**-0.5), exact["sinks"])
    inputs = ("q", "k", "v", "sinks")
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(out, [x[n] for n in inputs], dout)
    assert [g.dtype for g in grads] == [dtype] * 4
    references = torch.autograd.grad(wanted, [exact[n] for n in inputs], dout.double())
    for got, want in zip((out, *grads), (wanted, *references), strict=True):
        assert (got.double() - want).norm() / want.norm() < (ATTENTION[products] if dtype == torch.bfloat16 else 1e-6)


def test_frozen_sinks_have_no_gradient(monkeypatch: pytest.MonkeyPatch):
    """Beside adapters: their gradient would take float32 copies of the output."""
    x, mask = leaves(1, 23), AttentionMask((0, 7, 23))
    inputs = [x[n] for n in "qkv"]
    found = []
    for frozen in (False, True):
        if frozen:
            monkeypatch.setattr("longctx.model.attention.local.sinks_gradient", None)
        sinks = x["sinks"].detach().requires_grad_(not frozen)
        out = attend_once(LocalAttention("blockwise"), *inputs, mask, weights=(sinks,))
        found.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert all(map(torch.equal, *found))


def test_sinks_on_rows_without_a_key():
    out, lse = apply_sinks(torch.zeros(1, 2, 2, 3), torch.full((1, 2, 2), -torch.inf), torch.tensor([0.5, -torch.inf]))
    assert torch.equal(out, torch.zeros(1, 2, 2, 3))
    assert lse.dtype == torch.float64
    assert lse[0].tolist() == [[0.5, -torch.inf]] * 2
    assert torch.equal(sinks_gradient(torch.ones_like(out), out, lse, lse[0, 0]), torch.zeros(2, dtype=torch.float64))


masks = st.builds(
    AttentionMask,
    st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda n: (0, *torch.tensor(n).cumsum(0).tolist())),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 14),
    sink_tokens=st.integers(0, 14),
)


def named(slices, num_queries: int, num_keys: int) -> list[list[int]]:
    """How often each query and key is named."""
    seen = [[0] * num_keys for _ in range(num_queries)]
    for p in slices:
        for i in range(p.q_start, p.q_stop):
            for j in range(p.k_start, p.k_stop):
                seen[i][j] += (p.lo is None or i - j >= p.lo) and (p.hi is None or i - j <= p.hi)
    return seen


@settings(deadline=None, max_examples=60)
@given(masks, st.integers(0, 30))
def test_slices_name_every_visible_key_once(mask, before):
    T = mask.documents.num_tokens
    assert named(document_slices(mask), T, T) == [[visible(mask, i, j) for j in range(T)] for i in range(T)]
    queries = T - min(before, T)
    slices = continuation_slices(mask, queries, T)
    one = AttentionMask((0, T), mask.causal, mask.window, mask.sink_tokens)
    assert named(slices, queries, T) == [[visible(one, i, j) for j in range(T)] for i in range(T - queries, T)]
    assert all(p.step == 1 and p.offset == T - queries for p in slices)  # tokens' distance is i − j + offset


@pytest.mark.parametrize("changes", [{}, {"window": 4}, {"window": 3, "sink_tokens": 2}], ids=str)
def test_a_cache_continues_under_windows_sinks_and_scores(changes):
    core, x = LocalAttention("blockwise"), leaves(2, 17)
    asked = rules(x, rich=True)
    with torch.no_grad():
        whole = attend_once(core, x["q"], x["k"], x["v"], AttentionMask((0, 17, 34), **changes), **asked)
        cache, parts = KVCache(), []
        for a, b in [(0, 1), (1, 2), (2, 9), (9, 10), (10, 17)]:
            mask = AttentionMask((0, b - a, 2 * (b - a)), **changes)
            step = [x[n][:, a:b] for n in "qkv"]
            parts.append(attend_once(core, *step, mask, cache=cache, **asked))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_requests_that_make_no_sense_are_refused():
    for bad, rule in (({"window": 0}, "at least 1"), ({"sink_tokens": -1}, "at least 0")):
        with pytest.raises(ConfigError, match=rule):
            AttentionMask((0, 4), **bad)
    for boundaries in ((0, 9, 4), (1, 4), ()):
        with pytest.raises(ConfigError, match="must ascend from 0"):
            AttentionMask(boundaries)
    x = leaves(1, 4)
    with pytest.raises(ConfigError, match="each of 4 query heads"):
        attend_once(
            LocalAttention("blockwise"), x["q"], x["k"], x["v"], AttentionMask((0, 4)), weights=(torch.zeros(2),)
        )
    x = leaves(2, 4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attend_once(LocalAttention("blockwise"), x["q"], x["k"], x["v"], AttentionMask((0, 4)))


class Watched(TorchDispatchMode):
    """The operators of this library that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "longctx":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators():
    """The audit copies their calls; without it kernels run directly, with the same results."""
    q = torch.randn(1, 7, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask, found = AttentionMask([0, 3, 7]), []
    for watched in (Watched(), None):
        with watched or nullcontext():
            out = attend_once(LocalAttention(), q, q, q, mask)
            (gradient,) = torch.autograd.grad(out.square().sum(), q)
        found.append((out, gradient))
        if watched is not None:
            assert watched.names == ["attention_forward", "attention_backward"]
    assert all(map(torch.equal, *found))
