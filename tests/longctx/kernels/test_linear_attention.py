"""Linear attention on one device against its closed form in float64: values, states and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.errors import ConfigError
from longctx.kernels.linear_attention import StateSegments, linear_attention

DOCUMENTS = [
    (0, 1),
    (0, 64),
    (0, 0, 1, 2, 2, 17, 37, 37),  # empty ones, single tokens, a row count that no chunk divides
    tuple(range(51)),
    (0, 3, 90, 97),
]


def feature_map(x):
    """elu(x) + 1."""
    return torch.where(x > 0, x + 1, x.exp())


def closed_form(q, k, v, cu_seqlens, causal):
    """φ(q_i)·Σ φ(k_j)ᵀ v_j / φ(q_i)·Σ φ(k_j) with every pair of rows written out."""
    groups = q.shape[2] // k.shape[2]
    f, g, v = feature_map(q), feature_map(k).repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    t = q.shape[1]
    document = torch.bucketize(torch.arange(t), torch.tensor(cu_seqlens[1:]), right=True)
    seen = document[:, None] == document
    weights = torch.einsum("bihd,bjhd->bhij", f, g) * (seen.tril() if causal else seen)
    return torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), v)


def inputs(t, H, K, D, V, dtype=torch.float64, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, t, H, D), (batch, t, K, D), (batch, t, K, V), (batch, t, H, V)]
    *leaves, dout = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in leaves], dout


def relative_errors(got, want):
    return [((a.double() - b).norm() / b.norm().clamp(min=1e-300)).item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cu_seqlens", DOCUMENTS, ids=len)
def test_output_and_gradients_are_the_closed_form(cu_seqlens, causal):
    for H, K, D, V in ((4, 2, 5, 3), (3, 3, 4, 4), (4, 1, 1, 6)):  # grouped, each its own, one key head
        leaves, dout = inputs(cu_seqlens[-1], H, K, D, V)
        want = closed_form(*leaves, cu_seqlens, causal)
        wanted = (want, *torch.autograd.grad(want, leaves, dout))
        for chunk in (1, 7, 64):
            out, _ = linear_attention(*leaves, segments=StateSegments(cu_seqlens), causal=causal, chunk=chunk)
            got = (out, *torch.autograd.grad(out, leaves, dout))
            # dq of a row that sees one key is 0 but for rounding
            assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(got, wanted, strict=True))


# fp32: rounding of sums over 1,000 keys. bf16: products are float32 on every processor. Results are rounded once,
# to 1.66e-3; a query's gradient takes its product with the rounded output away, which leaves little: it counts 4 times.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-7), (torch.bfloat16, 5e-3)])
def test_sums_are_in_float32(dtype, bound):
    cu_seqlens = (0, 300, 301, 1000)
    leaves, dout = inputs(1000, 4, 2, 32, 32, dtype, batch=1)
    out, _ = linear_attention(*leaves, segments=StateSegments(cu_seqlens))
    got = (out, *torch.autograd.grad(out, leaves, dout))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = closed_form(*exact, cu_seqlens, True)
    errors = relative_errors(got, (want, *torch.autograd.grad(want, exact, dout.double())))
    assert max(errors) <= bound, errors
    assert all(x.dtype == dtype for x in got)


def test_small_features_keep_their_digits():
    """elu + 1 would be 0 for all of these in float32; the output depends on their ratios alone."""
    leaves, _ = inputs(40, 2, 1, 4, 4, torch.float32, batch=1)
    q, k, v = ((x - 30).detach() if n < 2 else x.detach() for n, x in enumerate(leaves))
    out, _ = linear_attention(q, k, v, segments=StateSegments((0, 40)))
    assert max(relative_errors([out], [closed_form(q.double(), k.double(), v.double(), (0, 40), True)])) <= 5e-7


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck_with_states_in_and_out(causal):
    leaves, _ = inputs(9, 4, 2, 3, 2, batch=1)
    segments = StateSegments((0, 4, 4, 9), received=(0, 2), sent=(1, 2))
    carried = torch.rand(2, 1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def run(*x):
        return linear_attention(*x[:3], segments=segments, causal=causal, initial_states_sBKDW=x[3], chunk=2)

    assert torch.autograd.gradcheck(run, (*leaves, carried))


def test_a_document_in_pieces_is_the_whole():
    (q, k, v), _ = inputs(23, 4, 2, 5, 3)
    whole, state = linear_attention(q, k, v, segments=StateSegments((0, 7, 23), sent=(1,)), chunk=4)
    parts, carried = [], torch.zeros_like(state)
    for start, stop, segments in (
        (0, 9, StateSegments((0, 7, 9), sent=(1,))),
        (9, 10, StateSegments((0, 1), received=(0,), sent=(0,))),
        (10, 23, StateSegments((0, 13), received=(0,), sent=(0,))),
    ):
        rows = [x[:, start:stop] for x in (q, k, v)]
        out, own = linear_attention(
            *rows, segments=segments, initial_states_sBKDW=carried if start > 7 else None, chunk=4
        )
        parts.append(out)
        carried = carried + own
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(carried, state)


def test_no_row_meets_every_row():
    """The largest tensor of forward and backward grows with the rows, not with their square."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(x))
            return out

    largest = []
    for t in (512, 2048):
        leaves, dout = inputs(t, 2, 1, 16, 16, torch.float32, batch=1)
        sizes.clear()
        with Watch():
            linear_attention(*leaves, segments=StateSegments((0, 100, t)))[0].backward(dout)
        largest.append(max(sizes))
    assert largest[1] <= 4 * largest[0]


def test_weights_that_underflow_give_zero():
    q, k, v = (torch.full((1, 3, 1, 2), x, requires_grad=True) for x in (-200.0, 0.5, 1.0))
    out, _ = linear_attention(q, k, v, segments=StateSegments((0, 3)))
    out.sum().backward()
    assert not out.any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_no_rows():
    (q, k, v), dout = inputs(0, 2, 1, 3, 3)
    for cu_seqlens in ((0,), (0, 0)):
        out, _ = linear_attention(q, k, v, segments=StateSegments(cu_seqlens))
        out.backward(dout)
        assert out.shape == dout.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 8, 3, 4)}, "3 key heads do not divide 4"),
        ({"k": (2, 8, 2, 5)}, "got q"),
        ({"v": (2, 7, 2, 4)}, "got q"),
        ({"dtype": torch.int64}, "floating dtype"),
        ({"segments": StateSegments((0, 9))}, "ascend from 0 to the sequence's 8 tokens"),
        ({"segments": StateSegments((0, 8), received=(1,))}, "1 segments"),
        ({"initial_states_sBKDW": torch.zeros(2, 2, 2, 4, 5)}, "carried states"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_bad_input_is_named(change, message):
    shapes = {"q": (2, 8, 4, 4), "k": (2, 8, 2, 4), "v": (2, 8, 2, 4)}
    shapes["v"] = shapes["k"] = change.get("k", shapes["k"])
    shapes |= {name: shape for name, shape in change.items() if name in shapes}
    options = {"segments": StateSegments((0, 8))} | {n: x for n, x in change.items() if n not in (*shapes, "dtype")}
    q, k, v = (torch.zeros(shape, dtype=change.get("dtype", torch.float32)) for shape in shapes.values())
    with pytest.raises(ConfigError, match=message):
        linear_attention(q, k, v, **options)
    with pytest.raises(ConfigError, match="Entry 2 is 3, after 5"):
        StateSegments((0, 5, 3, 8))
