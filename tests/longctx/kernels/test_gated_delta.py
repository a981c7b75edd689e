"""The gated delta rule on one device against its plain recurrence in float64: outputs, states and every gradient."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longctx.errors import ConfigError
from longctx.kernels.gated_delta.front import GatedDeltaWeights, ProjectedTokens, weights_of
from longctx.kernels.gated_delta.gated_delta_call import GatedDeltaOptions, InitialStates
from longctx.kernels.gated_delta.gated_delta_rule import gated_delta
from longctx.kernels.linear_attention import StateSegments
from tests.longctx.kernels.delta_oracle import make, plain

DOCUMENTS = [
    (0, 1),
    (0, 64),
    (0, 65),
    (0, 0, 1, 3, 3, 6, 69, 133, 198, 200),  # empty ones, 1, 2, 3, 63, 64, 65 tokens
    tuple(range(21)),
    (0, 3, 150),
]


def close(got, want, bound=1e-10):
    errors = [((a - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in zip(got, want, strict=True)]
    assert max(errors) <= bound, errors


@pytest.mark.few(6)
@pytest.mark.parametrize(("X", "mamba"), [(1, False), (6, False), (1, True)], ids=["by-head", "by-channel", "mamba2"])
@pytest.mark.parametrize("bounds", DOCUMENTS, ids=len)
def test_output_and_gradients_are_those_of_the_recurrence(bounds, X, mamba):
    tokens, weights = make(bounds[-1], X=X, mamba=mamba)
    leaves = (*tokens, *weights)
    want, _ = plain(tokens, weights, bounds, 2.0)
    dout = torch.randn_like(want)
    wanted = (want, *torch.autograd.grad(want, leaves, dout))
    for chunk, block_chunks in ((1, 1), (7, 2), (16, 3), (64, 8)):
        options = GatedDeltaOptions(
            segments=StateSegments(bounds), beta_scale=2.0, chunk=chunk, block_chunks=block_chunks
        )
        out, _ = gated_delta(tokens, weights, options)
        close((out, *torch.autograd.grad(out, leaves, dout)), wanted)


@pytest.mark.parametrize(("K", "G", "X", "reach"), [(1, 1, 4, 3), (3, 1, 1, 1), (1, 3, 1, 0)])
def test_other_heads_and_convolutions(K, G, X, reach):
    bounds = (0, 5, 6, 40)
    tokens, weights = make(40, K=K, G=G, D=4, V=3, X=X, reach=reach)
    want, _ = plain(tokens, weights, bounds)
    dout = torch.randn_like(want)
    leaves = (*tokens, *weights)
    out, _ = gated_delta(tokens, weights, GatedDeltaOptions(segments=StateSegments(bounds), chunk=8, block_chunks=2))
    close((out, *torch.autograd.grad(out, leaves, dout)), (want, *torch.autograd.grad(want, leaves, dout)))


@pytest.mark.parametrize(("X", "mamba"), [(1, False), (2, False), (1, True)], ids=["by-head", "by-channel", "mamba2"])
def test_gradcheck_with_states_in_and_out(X, mamba):
    tokens, weights = make(9, K=1, D=2, V=2, X=X, batch=1, mamba=mamba)
    segments = StateSegments((0, 4, 4, 9), received=(0, 2), sent=(1, 2))
    states = torch.randn(2, 1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    before = torch.randn(2, 1, 3, 1, 8, dtype=torch.float64, requires_grad=True)

    def run(states, before, *leaves):
        options = GatedDeltaOptions(segments=segments, chunk=2, block_chunks=2)
        return gated_delta(ProjectedTokens(*leaves[:5]), weights_of(leaves[5:]), options, InitialStates(states, before))

    assert torch.autograd.gradcheck(run, (states, before, *tokens, *weights))


@pytest.mark.parametrize("cuts", [(0, 9, 10, 23), (0, 1, 2, 3, 23), (0, 20, 23)])
def test_a_document_in_pieces_is_the_whole(cuts):
    tokens, weights = make(23)
    want, state = plain(tokens, weights, (0, 23))
    parts = []
    carried, channels = None, tokens.channels(slice(None))
    for start, stop in pairwise(cuts):
        takes = () if carried is None else (0,)
        options = GatedDeltaOptions(segments=StateSegments((0, stop - start), received=takes, sent=(0,)), chunk=4)
        out, given = gated_delta(tokens.rows(slice(start, stop)), weights, options, carried)
        parts.append(out)
        before = torch.cat((torch.zeros_like(channels[:, :3]), channels[:, :stop]), 1)[:, -3:]
        carried = InitialStates(given, before[None])
    close((torch.cat(parts, 1), carried.states_sBHDV[0]), (want, state))


@pytest.mark.parametrize("X", [1, 16], ids=["by-head", "by-channel"])
def test_strong_decays_neither_overflow_nor_vanish_by_rounding(X):
    """Decays of e^-50 a token and of e^-1e-4 stand side by side in one chunk."""
    tokens, weights = make(130, D=16, X=X, dtype=torch.float32)
    with torch.no_grad():
        tokens.a_BtKGX.mul_(40)
    exact = [x.detach().double().requires_grad_() for x in (*tokens, *weights)]
    want, _ = plain(ProjectedTokens(*exact[:5]), GatedDeltaWeights(*exact[5:]), (0, 130))
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = (want, *torch.autograd.grad(want, exact, dout))
    out, _ = gated_delta(tokens, weights, GatedDeltaOptions(segments=StateSegments((0, 130))))
    got = (out, *torch.autograd.grad(out, (*tokens, *weights), dout.float()))
    assert all(x.isfinite().all() for x in got)
    close([x.double() for x in got], wanted, 3e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_states_are_float32(dtype, bound):
    """Inputs and results are rounded to the dtype; 1,000 steps between them are not."""
    bounds = (0, 300, 301, 1000)
    tokens, weights = make(1000, D=16, V=16, dtype=dtype, batch=1)
    exact = [x.detach().double().requires_grad_() for x in (*tokens, *weights)]
    want, _ = plain(ProjectedTokens(*exact[:5]), GatedDeltaWeights(*exact[5:]), bounds)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    out, _ = gated_delta(tokens, weights, GatedDeltaOptions(segments=StateSegments(bounds)))
    got = (out, *torch.autograd.grad(out, (*tokens, *weights), dout))
    assert all(x.dtype == dtype for x in got)
    close([x.double() for x in got], (want, *torch.autograd.grad(want, exact, dout.double())), bound)


def test_shapes_that_do_not_fit_are_named():
    tokens, weights = make(8)
    options = GatedDeltaOptions(segments=StateSegments((0, 8)))
    with pytest.raises(ConfigError, match="conv has shape"):
        gated_delta(tokens, weights._replace(conv_KCR=weights.conv_KCR[:, 1:]), options)
    with pytest.raises(ConfigError, match="got 8 tokens; the segments have 9"):
        gated_delta(tokens, weights, GatedDeltaOptions(segments=StateSegments((0, 9))))
    wide = make(8, X=5)
    with pytest.raises(ConfigError, match="expected 1, or 6"):
        gated_delta(*wide, options)
