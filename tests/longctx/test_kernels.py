"""Attention kernels of one device, their choice, and the local core."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.kernels.contract import KernelRequest, Pair, Scores, accumulate_dtype, merge_
from longctx.kernels.cpu_flash import CpuFlashKernel, blocks
from longctx.kernels.reference import ReferenceKernel
from longctx.kernels.select import choose_kernel
from longctx.model.cores import AttentionMask, LocalAttention, LocalKVCache, document_pairs

SCALE = 0.3


def band_matrix(pairs: list[Pair], num_queries: int, num_keys: int) -> torch.Tensor:
    """How often each (query row, key row) is named, by the definition of a pair."""
    seen = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for p in pairs:
        for i in range(p.q_start, p.q_stop):
            for j in range(p.k_start, p.k_stop):
                seen[i, j] += (p.lo is None or i - j >= p.lo) and (p.hi is None or i - j <= p.hi)
    return seen


def plain_attention(q, k, v, seen):
    """Softmax attention over the marked keys in float64, with autograd; (out, lse)."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 2), v.double().repeat_interleave(groups, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * SCALE
    scores = scores.masked_fill(seen == 0, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(seen > 0, torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]), 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse.transpose(1, 2)


def tensors(num_queries: int, num_keys: int, dtype=torch.float32, *, H=4, K=2, D=8, B=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, num_queries, H, D), (B, num_keys, K, D), (B, num_keys, K, D))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


@st.composite
def causal_pairs(draw):
    bounds = [sorted(draw(st.lists(st.integers(0, 12), min_size=2, max_size=2))) for _ in range(2)]
    lo = draw(st.none() | st.integers(-15, 15))
    return Pair(*bounds[0], *bounds[1], lo)


@given(causal_pairs())
@settings(max_examples=400, deadline=None)
def test_blocks_cover_exactly_the_band(pair):
    covered = torch.zeros(12, 12, dtype=torch.int64)
    for block in blocks(pair):
        rows, keys = block.q.stop - block.q.start, block.k.stop - block.k.start
        assert rows > 0
        assert keys > 0, "a row that sees no key would come back with lse 0"
        part = torch.ones(rows, keys, dtype=torch.int64)
        covered[block.q, block.k] += part.tril() if block.causal else part
    assert torch.equal(covered, band_matrix([pair], 12, 12))


def test_blocks_refuse_a_window():
    with pytest.raises(ConfigError, match="reference"):
        list(blocks(Pair(0, 4, 0, 4, lo=0, hi=2)))


@given(
    num_keys=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 9), max_size=4),
    blind=st.lists(st.booleans(), min_size=5, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_merging_parts_gives_the_whole(num_keys, cuts, blind):
    q, k, v = tensors(5, num_keys, torch.float64)
    seen = torch.ones(5, num_keys, dtype=torch.int64)
    seen[torch.tensor(blind)] = 0
    whole = plain_attention(q, k, v, seen)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    edges = sorted({0, num_keys, *(min(c, num_keys) for c in cuts)})
    for a, b in pairwise(edges):
        merge_(out, lse, *plain_attention(q, k[:, a:b], v[:, a:b], seen[:, a:b]))
    torch.testing.assert_close((out, lse), whole)


PAIRS = {
    "causal": [Pair(0, 20, 0, 20, lo=0)],
    "documents": [Pair(0, 7, 0, 7, lo=0), Pair(7, 20, 7, 20, lo=0)],
    "rectangle": [Pair(0, 20, 0, 20)],
    "strict": [Pair(0, 20, 0, 20, lo=1)],
    "later queries": [Pair(5, 20, 0, 13, lo=-3)],
    "same rows twice": [Pair(0, 20, 0, 6), Pair(4, 20, 6, 20, lo=0)],
    "blind rows": [Pair(3, 9, 0, 5), Pair(12, 15, 5, 8, lo=6)],
    "none": [],
    "window": [Pair(0, 20, 0, 20, lo=0, hi=4)],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kernel", "name"),
    [(ReferenceKernel(), name) for name in PAIRS] + [(CpuFlashKernel(), name) for name in PAIRS if name != "window"],
    ids=lambda x: getattr(x, "name", x),
)
def test_kernel_against_definition(kernel, name, dtype):
    pairs, (q, k, v) = PAIRS[name], tensors(20, 20, dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*leaves, band_matrix(pairs, 20, 20))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    out, lse = kernel.forward(q, k, v, pairs, scores=Scores(scale=SCALE))
    grads = kernel.backward(dout, q, k, v, out.to(dtype), lse, pairs, scores=Scores(scale=SCALE))
    assert {x.dtype for x in (out, *grads[:3])} == {accumulate_dtype(dtype)}
    assert lse.dtype == torch.float64
    wanted = torch.autograd.grad(expected[0], leaves, dout.double()) if pairs else [torch.zeros_like(x) for x in leaves]
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]  # some ulps at values near 4
    for got, want in zip((out, lse, *grads[:3]), (*expected, *wanted), strict=True):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_gradients_over_visits_sum_to_the_whole():
    """What a ring does: backward part by part with the global out and lse."""
    kernel, (q, k, v) = CpuFlashKernel(), tensors(16, 16, torch.float64)
    pairs, dout = [Pair(0, 16, 0, 6), Pair(0, 16, 6, 16, lo=0)], torch.ones(2, 16, 4, 8, dtype=torch.float64)
    out, lse = kernel.forward(q, k, v, pairs, scores=Scores(scale=SCALE))
    whole = kernel.backward(dout, q, k, v, out, lse, pairs, scores=Scores(scale=SCALE))[:3]
    parts = [kernel.backward(dout, q, k, v, out, lse, [p], scores=Scores(scale=SCALE))[:3] for p in pairs]
    torch.testing.assert_close(whole, tuple(a + b for a, b in zip(*parts, strict=True)))


def request(device="cpu", dtype=torch.float32) -> KernelRequest:
    return KernelRequest(device, dtype, 8, 4, 2)


def test_kernel_choice():
    assert choose_kernel("auto", request()).name == "cpu_flash"
    assert choose_kernel("auto", request(device="cuda")).name == "reference"
    assert choose_kernel("reference", request()).name == "reference"
    with pytest.raises(ConfigError, match="unknown"):
        choose_kernel("flsh", request())
    with pytest.raises(ConfigError, match="it runs on the CPU"):
        choose_kernel("cpu_flash", request(device="cuda"))
    with pytest.raises(ConfigError, match="no attention kernel"):
        choose_kernel("auto", request(dtype=torch.int64))


def test_document_pairs_skip_empty_segments():
    assert document_pairs(AttentionMask((0, 3, 3, 8))) == (Pair(0, 3, 0, 3, lo=0), Pair(3, 8, 3, 8, lo=0))


def test_local_attention_rows_and_documents_are_independent():
    core, (q, k, v) = LocalAttention(), tensors(12, 12, B=2)
    whole = core(q, k, v, mask=AttentionMask((0, 5, 12, 24)), layer=0)
    parts = [
        core(*(x[:1, a:b] for x in (q, k, v)), mask=AttentionMask((0, b - a)), layer=0) for a, b in [(0, 5), (5, 12)]
    ]
    parts.append(core(q[1:], k[1:], v[1:], mask=AttentionMask((0, 12)), layer=0))
    torch.testing.assert_close(whole.view(1, 24, 4, 8), torch.cat(parts, 1))
    with pytest.raises(ValueError, match="cu_seqlens"):
        core(q, k, v, mask=AttentionMask((0, 12)), layer=0)


@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
def test_local_attention_gradcheck(kernel):
    leaves = [x.requires_grad_() for x in tensors(6, 6, torch.float64, B=1)]
    core, mask = LocalAttention(kernel), AttentionMask((0, 2, 6))
    assert torch.autograd.gradcheck(lambda *qkv: core(*qkv, mask=mask, layer=0), leaves)


def test_cache_continues_the_sequence():
    """Prefill, then chunks of one and of several tokens, past the buffer's first size."""
    core, (q, k, v) = LocalAttention(), tensors(150, 150)
    whole = core(q, k, v, mask=AttentionMask((0, 150, 300)), layer=0)
    cache, parts = LocalKVCache(), []
    for a, b in [(0, 60), (60, 61), (61, 70), (70, 150)]:
        step = [x[:, a:b] for x in (q, k, v)]
        parts.append(core(*step, mask=AttentionMask((0, b - a)), layer=0, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(
    "pair", [Pair(0, 2300, 0, 2300, lo=0), Pair(0, 2300, 0, 2300, lo=-700), Pair(5, 2300, 1, 2000)]
)
def test_float32_is_more_exact_than_the_op_it_is_made_of(pair):
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2300, 2, 32, generator=g) for _ in range(4))
    exact, ours = [], []
    scale = 32**-0.5
    for kernel, found, cast in ((ReferenceKernel(), exact, torch.float64), (CpuFlashKernel(), ours, torch.float32)):
        inputs = [x.to(cast) for x in (q, k, v)]
        out, lse = kernel.forward(*inputs, [pair], scores=Scores(scale=scale))
        found += [out, *kernel.backward(dout.to(cast), *inputs, out, lse, [pair], scores=Scores(scale=scale))[:3]]
    for name, got, want in zip(("out", "dq", "dk", "dv"), ours, exact, strict=True):
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error <= 5e-7, f"{name}: {error:.1e}"  # several tiles a row; one process's SDPA shows 4e-7 to 5e-7
