"""Sparse attention in one process against its definition: rows that are named, values, gradients, caches, graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.generation.loop import generate
from longctx.kernels.attention import cpu_flash
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.attention.slices import slice_table, table_slices
from longctx.model.activation_offload import Keep
from longctx.model.attention.core import sinks_of
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.local import LocalAttention, document_slices, strided_entries
from longctx.model.attention.mask import AttentionMask
from longctx.model.attention.strided import continuation, strided_work, whole_documents
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from tests.longctx.attention_cores import attend_once
from tests.longctx.cached_models import without_cache
from tests.longctx.kernels.attention.test_flash_adapters import KERNELS, check
from tests.longctx.model.attention.test_local import leaves, rules, softmax_over
from tests.longctx.samples import (
    check_documents_are_alone,
    dense_config,
    hidden_and_gradients,
    packed_batch,
    randomize,
)
from tests.rounding import ATTENTION, both_ways

RULES = [(1, 1), (1, 4), (4, 1), (3, 5), (5, 3), (4, 8), (8, 4), (7, 7), (2, 11), (40, 3), (3, 40)]
"""(window, stride): one, equal, multiples and primes of each other, larger than any document."""


def sees(cu_seqlens: tuple[int, ...], window: int, stride: int, *, causal: bool = True) -> torch.Tensor:
    """[T, T]: whether token i sees token j, in the words of the paper's masks; of both sides, what sees it too."""
    T = cu_seqlens[-1]
    seen = torch.zeros(T, T, dtype=torch.bool)
    for a, b in pairwise(cu_seqlens):
        for i in range(a, b):
            for j in range(a, i + 1):
                seen[i, j] = i - j < window or (i - j) % stride == 0
    if not causal:
        seen = seen | seen.T
    return seen


def named(work, num_queries: int, num_keys: int) -> torch.Tensor:
    """How often (query rows, key rows, slices) name each query and key; checks the distances that the slices tell."""
    queries, keys, slices = work
    seen = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    assert all(len(rows.unique()) == len(rows) for rows in (queries, keys))
    for p in table_slices(slices):
        i, j = torch.arange(p.q_start, p.q_stop)[:, None], torch.arange(p.k_start, p.k_stop)
        inside = (i - j >= (-(2**40) if p.lo is None else p.lo)) & (i - j <= (2**40 if p.hi is None else p.hi))
        apart = queries[i] + (num_keys - num_queries) - keys[j]
        assert torch.equal((p.step * (i - j) + p.offset)[inside], apart[inside])
        seen[queries[i], keys[j]] += inside
    return seen


documents = st.lists(st.integers(0, 14), min_size=1, max_size=4).map(lambda n: (0, *torch.tensor(n).cumsum(0).tolist()))


@settings(deadline=None, max_examples=60)
@given(documents, st.integers(1, 16), st.integers(1, 16), st.integers(0, 40))
def test_every_visible_key_is_named_once(cu_seqlens, window, stride, before):
    mask, T = AttentionMask(cu_seqlens, window=window, stride=stride), cu_seqlens[-1]
    band, nothing = (
        (torch.arange(T), torch.arange(T), slice_table(document_slices(mask))),
        torch.zeros(T, T, dtype=torch.int64),
    )
    pieces = whole_documents(cu_seqlens)
    strided = strided_work(pieces, window, stride)
    got = named(band, T, T) + (nothing if strided is None else named(strided, T, T))
    assert torch.equal(got, sees(cu_seqlens, window, stride).long())
    both = strided_entries(AttentionMask(cu_seqlens, causal=False, window=window, stride=stride), pieces)
    mirrored = document_slices(AttentionMask(cu_seqlens, causal=False, window=window))
    got = named((torch.arange(T), torch.arange(T), slice_table(mirrored)), T, T)
    got = sum((named(part, T, T) for part in both), got)
    assert torch.equal(got, sees(cu_seqlens, window, stride, causal=False).long())
    queries = T - min(before, T)
    newest = strided_work(continuation(queries, T), window, stride)
    apart = torch.arange(T - queries, T)[:, None] - torch.arange(T)
    got = nothing[:queries] if newest is None else named(newest, queries, T)
    assert torch.equal(got, ((apart >= window) & (apart % stride == 0)).long())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
@pytest.mark.parametrize(("window", "stride"), RULES)
def test_values_and_gradients_are_the_definitions(window, stride, rich, causal):
    cu_seqlens = (0, 1, 8, 8, 13, 38)
    mask, x = AttentionMask(cu_seqlens, causal, window, stride=stride), leaves(2, 19)
    asked = rules(x, rich=rich)
    out = attend_once(LocalAttention("blockwise"), x["q"], x["k"], x["v"], mask, **asked)
    scores = asked.get("scores", ScoreRules(scale=8**-0.5))
    seen = sees(cu_seqlens, window, stride, causal=causal)
    wanted = softmax_over(x["q"], x["k"], x["v"], seen, scores, sinks_of(asked.get("weights", ())))
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    dout, inputs = torch.randn_like(out), [t for n, t in x.items() if rich or n in "qkv"]
    grads, exact = (torch.autograd.grad(result, inputs, dout) for result in (out, wanted))
    torch.testing.assert_close(grads, exact, rtol=1e-12, atol=1e-12)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_preferred_kernel_on_long_documents(dtype, products):
    bound = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: ATTENTION[products]}[dtype]
    cu_seqlens = (0, 300, 301, 700)
    x = leaves(1, 700, V=8, dtype=dtype)
    mask = AttentionMask(cu_seqlens, window=30, stride=17)
    out = attend_once(LocalAttention(matmul_mode=products), x["q"], x["k"], x["v"], mask)
    exact = q, k, v = [x[n].detach().double().requires_grad_() for n in "qkv"]
    apart = torch.arange(700)[:, None] - torch.arange(700)
    document = torch.bucketize(torch.arange(700), torch.tensor(cu_seqlens[1:]), right=True)
    seen = (document[:, None] == document) & (apart >= 0) & ((apart < 30) | (apart % 17 == 0))
    wanted = softmax_over(q, k, v, seen, ScoreRules(scale=8**-0.5))
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(out, [x[n] for n in "qkv"], dout)
    references = torch.autograd.grad(wanted, exact, dout.double())
    for got, want in zip((out, *grads), (wanted, *references), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() / want.norm() < bound


def test_work_grows_with_what_is_seen(monkeypatch):
    """Scores that the kernel forms: those of windows and classes in whole tiles, not those of the square."""
    formed, op = [0], cpu_flash._forward

    def counting(q, k, *rest, **options):
        formed[0] += q.shape[2] * k.shape[2]
        return op(q, k, *rest, **options)

    monkeypatch.setattr(cpu_flash, "_forward", counting)
    T, window, stride = 8192, 128, 128
    q = torch.randn(1, T, 1, 4)
    attend_once(LocalAttention("cpu_flash"), q, q, q, AttentionMask((0, T), window=window, stride=stride))
    assert formed[0] < T * T / 10


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
@pytest.mark.parametrize(("window", "stride"), [(1, 3), (3, 5), (5, 3), (2, 1)])
def test_a_cache_continues(window, stride, rich):
    core, x = LocalAttention("blockwise"), leaves(2, 23)
    asked = rules(x, rich=rich)
    with torch.no_grad():
        mask = AttentionMask((0, 23, 46), window=window, stride=stride)
        whole = attend_once(core, x["q"], x["k"], x["v"], mask, **asked)
        cache, parts = KVCache(), []
        for a, b in [(0, 1), (1, 2), (2, 9), (9, 10), (10, 11), (11, 23)]:
            mask = AttentionMask((0, b - a, 2 * (b - a)), window=window, stride=stride)
            parts.append(attend_once(core, *(x[n][:, a:b] for n in "qkv"), mask, cache=cache, **asked))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_cuda_adapters_take_a_strides_slices(name):
    """Of packed documents, and of new queries, with distances where the adapter has them."""
    slopes = torch.tensor([0.5, 0.25, 0.11, 0.0]) if name == "flex" else None
    for pieces in (whole_documents((0, 1, 12, 30)), continuation(7, 30)):
        work = strided_work(pieces, 3, 4)
        assert work is not None
        check(KERNELS[name](), table_slices(work.slices), ScoreRules(scale=0.3, alibi_slopes_H=slopes))


def sparse_decoder(layers: tuple[str, ...] = ("sparse", "full", "sparse"), *, keep: Keep = "all") -> Decoder:
    config = dense_config(num_layers=len(layers), layers=layers, window=3, sparse_stride=4, sinks=True)
    decoder = Decoder(config, {"softmax": LocalAttention("blockwise")}, execution=Execution(keep)).double()
    randomize(decoder)
    return decoder


def test_a_decoder_packs_recomputes_and_generates():
    decoder, batch = sparse_decoder(), packed_batch([[3, 1, 9, 17], [1, 1, 27, 1]])
    whole = hidden_and_gradients(decoder, batch)
    again = hidden_and_gradients(sparse_decoder(keep="attention"), batch)
    assert all(torch.equal(again[name], x) for name, x in whole.items())
    check_documents_are_alone(decoder, batch)
    prompt = list(range(5, 16))
    assert generate(decoder, prompt, 12) == without_cache(decoder, prompt, 12)


def test_a_decoder_uses_its_configs_mask():
    """window = stride = 1 lets a query see all tokens, a stride beyond the documents the window alone."""
    batch = packed_batch([[3, 1, 9, 17]])
    hidden = {}
    for name, changes in {
        "full": {"layers": ("full",)},
        "dense stride": {"layers": ("sparse",), "window": 1, "sparse_stride": 1},
        "window": {"layers": ("window",), "window": 3},
        "no stride": {"layers": ("sparse",), "window": 3, "sparse_stride": 40},
        "sparse": {"layers": ("sparse",), "window": 3, "sparse_stride": 4},
    }.items():
        decoder = Decoder(dense_config(**changes), {"softmax": LocalAttention("blockwise")}).double()
        randomize(decoder)
        hidden[name] = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
    torch.testing.assert_close(hidden["dense stride"], hidden["full"], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(hidden["no stride"], hidden["window"], rtol=0, atol=0)
    assert not torch.allclose(hidden["sparse"], hidden["window"])


def test_masks_that_make_no_sense_are_refused():
    bad: list[tuple[int | None, int]] = [(None, 0), (2, 1)]
    for window, sink_tokens in bad:
        with pytest.raises(ConfigError, match="stride=3 needs a window"):
            AttentionMask((0, 4), window=window, sink_tokens=sink_tokens, stride=3)
    with pytest.raises(ConfigError, match="stride=-1 must be at least 0"):
        AttentionMask((0, 4), window=2, stride=-1)
