"""The chunked loss against whole logits in float64: losses, gradients, every option and every combination of them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from longctx.batch import IGNORED_TARGET
from longctx.errors import ConfigError
from longctx.kernels import cross_entropy as chunked
from longctx.kernels.cross_entropy import loss_sums, token_nll
from longctx.kernels.loss_options import LossOptions
from tests.rounding import UNIT, both_ways, rounded

N, M, V = 23, 8, 31

COMBINATIONS = [
    LossOptions(logit_scale=scale, softcap=cap, z_loss=z, label_smoothing=smoothing)
    for scale, cap, z, smoothing in product((1.0, 0.3), (0.0, 2.5), (0.0, 0.05), (0.0, 0.1))
]
ALL = COMBINATIONS[-1]


def inputs(dtype=torch.float64, *, ignored=(0, 5, 22), tokens=N, width=M, vocab=V):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=g)
    targets[list(ignored)] = IGNORED_TARGET
    return hidden, weight, targets


def whole_logits(hidden, weight, options):
    logits = options.logit_scale * (hidden @ weight.T)
    return options.softcap * torch.tanh(logits / options.softcap) if options.softcap else logits


def whole(hidden, weight, targets, options=chunked.PLAIN, *, factor=1.0):
    """Objective, its gradients times ``factor``, and the NLL: all logits in float64, by PyTorch's definitions."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = whole_logits(hidden, weight, options)
    nll, objective = (
        cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED_TARGET, label_smoothing=smoothing)
        for smoothing in (0.0, options.label_smoothing)
    )
    objective = objective + options.z_loss * (logits.logsumexp(-1)[targets != IGNORED_TARGET] ** 2).sum()
    return (objective.detach(), *torch.autograd.grad(objective * factor, (hidden, weight))), nll.detach()


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())


# Values and gradients.


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, None])
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_equals_the_whole_loss(options, chunk_tokens):
    hidden, weight, targets = inputs()
    objective, nll = loss_sums(hidden, weight, targets, options=options, chunk_tokens=chunk_tokens)
    assert not nll.requires_grad, "it is reported alone"
    grads = torch.autograd.grad(objective * 3.5, (hidden, weight))
    torch.testing.assert_close(
        ((objective.detach(), *grads), nll), whole(hidden, weight, targets, options, factor=3.5), rtol=1e-12, atol=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 50), st.integers(1, 45), st.integers(1, 400), st.data())
def test_any_size_chunk_and_block(tokens, width, vocab, chunk_tokens, block, data):
    ignored = data.draw(st.sets(st.integers(0, tokens - 1))) if tokens else ()
    hidden, weight, targets = inputs(tokens=tokens, width=width, vocab=vocab, ignored=ignored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "_BLOCK_ELEMENTS", block)
        objective, nll = loss_sums(hidden, weight, targets, options=ALL, chunk_tokens=chunk_tokens)
        grads = torch.autograd.grad(objective, (hidden, weight))
    wanted = whole(hidden, weight, targets, ALL)
    torch.testing.assert_close(((objective.detach(), *grads), nll), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("vocab", [512, 2048])
def test_rows_of_whole_pages(vocab):
    hidden, weight, targets = inputs(vocab=vocab)
    assert chunked._memory(weight, N, weight.dtype).stride(0) == vocab + 64
    objective, nll = loss_sums(hidden, weight, targets, options=ALL, chunk_tokens=7)
    grads = torch.autograd.grad(objective, (hidden, weight))
    wanted = whole(hidden, weight, targets, ALL)
    torch.testing.assert_close(((objective.detach(), *grads), nll), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rows", [1, 7, V])
def test_a_weight_converted_in_tiles_counts_as_a_whole_one(rows, monkeypatch):
    hidden, weight, targets = inputs(torch.bfloat16)
    results = []
    for elements in (1 << 21, rows * M):
        monkeypatch.setattr(chunked, "TILE_ELEMENTS", elements)
        objective, nll = loss_sums(hidden, weight, targets, options=ALL, matmul_mode="float32", chunk_tokens=7)
        results.append((objective.detach(), nll, *torch.autograd.grad(objective, (hidden, weight))))
    # Sums in another order: a gradient may round to its other neighbour, which is up to 2^-7 of it away.
    torch.testing.assert_close(results[1], results[0], rtol=2 * UNIT, atol=1e-5)
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-6, atol=0)


def test_backward_twice_is_the_same():
    hidden, weight, targets = inputs()
    objective = loss_sums(hidden, weight, targets, options=ALL)[0] * 2
    first = torch.autograd.grad(objective, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(objective, (hidden, weight)), first, rtol=0, atol=0)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_one_side_may_be_frozen(trained):
    hidden, weight, targets = inputs()
    wanted = dict(zip(("hidden", "weight"), whole(hidden, weight, targets)[0][1:], strict=True))[trained]
    frozen = weight if trained == "hidden" else hidden
    frozen.requires_grad_(False)
    leaf = hidden if trained == "hidden" else weight
    torch.testing.assert_close(torch.autograd.grad(loss_sums(hidden, weight, targets)[0], leaf)[0], wanted)


# Precision.


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [chunked.PLAIN, ALL], ids=["plain", "all"])
def test_precision(dtype, products, options):
    """A vocabulary large enough for sums to lose digits."""
    hidden, weight, targets = inputs(dtype, tokens=300, width=64, vocab=5003)
    with torch.no_grad():
        weight.mul_(0.125)  # logits of standard deviation 1
    objective, nll = loss_sums(hidden, weight, targets, options=options, matmul_mode=products, chunk_tokens=128)
    grads = torch.autograd.grad(objective, (hidden, weight))
    (wanted, *wanted_grads), wanted_nll = whole(hidden, weight, targets, options)
    assert objective.dtype == nll.dtype == torch.float32
    assert {g.dtype for g in grads} == {dtype}
    native = dtype == torch.bfloat16 and products == "native"
    # Native logits are rounded. For these 300 targets that averages to 1.1e-6 of the loss (to 5e-7 with all options),
    # whatever adds the products up; one target's logit that rounds to its other neighbour makes another 3e-6.
    loss_bound = 5e-6 if native else 1e-7
    assert relative_error(objective.detach(), wanted) < loss_bound
    assert relative_error(nll, wanted_nll) < loss_bound
    # A tensor that is rounded to bfloat16 once is 1.66e-3 off. Native gradients are so four times, which is 3.3e-3: the
    # logits, the gradient that takes their place, the product of a chunk, the sum over chunks.
    bound = 5e-7 if dtype == torch.float32 else 3.5e-3 if native else 1.8e-3
    for got, want in zip(grads, wanted_grads, strict=True):
        assert relative_error(got, want) < bound


@both_ways
def test_weight_gradients_of_many_chunks_do_not_lose_digits(products):
    """1024 chunks, whose sum in bfloat16 would be off by 5e-2."""
    hidden, weight, targets = inputs(torch.bfloat16, tokens=2048, width=4, vocab=8, ignored=[])
    objective = loss_sums(hidden, weight, targets, matmul_mode=products, chunk_tokens=2)[0]
    got = torch.autograd.grad(objective, weight)[0]
    # The chunks' own errors fall to either side and average out over so many: what is left is one rounding of the sum.
    assert relative_error(got, whole(hidden, weight, targets)[0][2]) < rounded(1)


def test_large_logits_do_not_overflow():
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        weight.mul_(1e4)
    objective = loss_sums(hidden, weight, targets)[0]
    torch.testing.assert_close(objective.detach().double(), whole(hidden, weight, targets)[0][0], rtol=1e-6, atol=0)


# Shares without a target, or without a token.


@both_ways
@pytest.mark.parametrize("options", [chunked.PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_without_a_target_loss_and_gradients_are_zero(options, dtype, products):
    hidden, weight, targets = inputs(dtype, ignored=range(N))
    objective, nll = loss_sums(hidden, weight, targets, options=options, matmul_mode=products, chunk_tokens=7)
    grads = torch.autograd.grad(objective, (hidden, weight))
    assert objective == nll == 0
    assert all(g.count_nonzero() == 0 for g in grads)
    assert token_nll(hidden, weight, targets, matmul_mode=products).count_nonzero() == 0


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_token(dtype, products):
    hidden, weight, targets = inputs(dtype, tokens=0, ignored=())
    objective, nll = loss_sums(hidden, weight, targets, options=ALL, matmul_mode=products)
    assert objective == nll == 0
    dhidden, dweight = torch.autograd.grad(objective, (hidden, weight))
    assert dhidden.shape == hidden.shape
    assert dweight.count_nonzero() == 0
    assert token_nll(hidden, weight, targets, matmul_mode=products).shape == (0,)


@pytest.mark.parametrize("target", [-1, V])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    hidden, weight, targets = inputs()
    targets[3] = target
    with pytest.raises((RuntimeError, IndexError)):
        loss_sums(hidden, weight, targets)[0]


# The plain negative log-likelihood.


@pytest.mark.parametrize("options", [chunked.PLAIN, ALL], ids=["plain", "all"])
def test_no_gradient_work_without_grad(monkeypatch, options):
    hidden, weight, targets = inputs()
    for name in ("scatter_add_", "addmm_"):
        monkeypatch.setattr(torch.Tensor, name, None)
    with torch.no_grad():
        objective, nll = loss_sums(hidden, weight, targets, options=options, chunk_tokens=7)
    monkeypatch.undo()
    (wanted, *_), wanted_nll = whole(hidden, weight, targets, options)
    torch.testing.assert_close((objective, nll), (wanted, wanted_nll))


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_token_nll(options):
    hidden, weight, targets = inputs(torch.float32)
    nll_N = token_nll(hidden, weight, targets, options=options, chunk_tokens=7)
    wanted = cross_entropy(
        whole_logits(hidden, weight, options), targets, reduction="none", ignore_index=IGNORED_TARGET
    )
    torch.testing.assert_close(nll_N, wanted.detach())
    assert nll_N.dtype == torch.float32
    assert not nll_N.requires_grad
    assert nll_N[0] == 0


# Memory, and what is refused.


@pytest.mark.parametrize(("vocab", "width", "tokens"), [(32_768, 512, 512), (128_256, 4096, 1024), (300, 64, 55_872)])
def test_a_chunk_needs_64_mib_or_a_quarter_of_the_weight(vocab, width, tokens):
    assert chunked.tokens_of_chunk(vocab, width, "cpu") == tokens
    assert tokens * vocab <= max(1 << 24, width * vocab // 4)


@pytest.mark.parametrize(("vocab", "tokens"), [(300, 8192), (32_768, 8192), (128_256, 4160), (2_000_000, 1024)])
def test_a_chunk_of_a_gpu_is_large_enough_to_fill_it(vocab, tokens):
    assert chunked.tokens_of_chunk(vocab, 4096, "cuda") == tokens


def test_inputs_are_not_written():
    hidden, weight, targets = inputs(torch.float32)
    kept = [x.clone() for x in (hidden, weight, targets)]
    loss_sums(hidden, weight, targets, options=ALL)[0].backward()
    token_nll(hidden, weight, targets, options=ALL)
    assert all(torch.equal(a, b) for a, b in zip((hidden, weight, targets), kept, strict=True))


@pytest.mark.parametrize(
    "options", [{"softcap": -1.0}, {"z_loss": -1e-4}, {"label_smoothing": 1.5}, {"z_loss": float("nan")}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        LossOptions(**options)
