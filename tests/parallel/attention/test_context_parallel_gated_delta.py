"""The gated delta rule across ranks against its plain recurrence: values, every gradient, and the bytes that travel."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from longctx.kernels.gated_delta.front import ProjectedTokens, weights_of
from longctx.kernels.gated_delta.gated_delta_call import GatedDeltaOptions
from longctx.kernels.gated_delta.gated_delta_rule import gated_delta
from longctx.kernels.gated_delta.library import gated_delta_by
from parallel.attention.join_segments import JoinSegments
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.states import StatePlan
from tests.helpers import on_ranks
from tests.longctx.kernels.delta_library import plain_rule
from tests.longctx.kernels.delta_oracle import make, plain

T = 240
MAMBA = 0
"""In place of a number of decays: Mamba-2's, of one."""
DOCUMENTS = {
    "one": [0, T],
    "packed": [0, 1, 3, 3, 6, 69, 133, 198, T - 7, T],  # 1, 2, 3, 63, 64, 65 tokens, an empty one
    "short": [*range(0, T, 3), T],
}


@functools.cache
def recurrence(name, X):
    """Tokens and weights, the plain recurrence's output, a gradient of it, and those of tokens and weights."""
    tokens, weights = make(T, X=1 if X == MAMBA else X, batch=1, mamba=X == MAMBA)
    want, _ = plain(tokens, weights, DOCUMENTS[name])
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    return tokens, weights, want.detach(), dout, torch.autograd.grad(want, (*tokens, *weights), dout)


def run_one(layout, name, mesh, X, chunk, rule=gated_delta):
    """This rank's output and gradients of tokens, all ranks' gradients of weights, and the recurrence's."""
    tokens, weights, want, dout, wanted = recurrence(name, X)
    rank = mesh.context_rank
    mine = ProjectedTokens(*(layout.split(x.detach(), rank, 1).requires_grad_() for x in tokens))
    own = weights_of([x.detach().requires_grad_() for x in weights])
    states = StatePlan.build(layout, DOCUMENTS[name])
    exchange = JoinSegments(mesh, states) if mesh.context > 1 else None
    options = GatedDeltaOptions(segments=states.segments(rank), exchange=exchange, chunk=chunk, block_chunks=2)
    out, _ = rule(mine, own, options)
    got = list(torch.autograd.grad(out, (*mine, *own), layout.split(dout, rank, 1)))
    if mesh.context > 1:
        for x in got[5:]:
            dist.all_reduce(x)
    expected = [layout.split(x, rank, 1) for x in (want, *wanted[:5])]
    return [out, *got], [*expected, *wanted[5:]]


@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5, 8))])
@on_ranks("world_size")
def test_every_layout_and_packing_is_the_recurrence():
    mesh = Mesh.build(context=dist.get_world_size())
    for kind in ("contiguous", "zigzag", "balanced"):
        for name, bounds in DOCUMENTS.items():
            layout = SequenceLayout.build(kind, T, mesh.context, bounds)
            for X in (1, 6, MAMBA):
                got, want = run_one(layout, name, mesh, X, 16)
                where = f"{kind}, {name}, {X} decays, rank {mesh.rank}"
                for n, (a, b) in enumerate(zip(got, want, strict=True)):
                    error = ((a - b).norm() / b.norm().clamp(min=1e-6)).item()
                    assert error <= 1e-10, f"{where}, tensor {n}: {error}"


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
@on_ranks("world_size")
def test_by_a_library_as_well():
    """All ranks compute at once: what enters a segment costs a product behind the exchange."""
    mesh = Mesh.build(context=dist.get_world_size())
    for kind, name, X in (("contiguous", "one", 1), ("zigzag", "packed", 6), ("balanced", "packed", 1)):
        layout = SequenceLayout.build(kind, T, mesh.context, DOCUMENTS[name])
        got, want = run_one(layout, name, mesh, X, 64, lambda *call: gated_delta_by(plain_rule, *call))
        for n, (a, b) in enumerate(zip(got, want, strict=True)):
            error = ((a - b).norm() / b.norm().clamp(min=1e-6)).item()
            assert error <= 1e-10, f"{kind}, {name}, rank {mesh.rank}, tensor {n}: {error}"
