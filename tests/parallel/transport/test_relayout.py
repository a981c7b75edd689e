"""Relayouts over ranks against indexing the complete tensor in one process: values and gradients, bit for bit."""

from __future__ import annotations

import itertools
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.errors import ClusterError, ConfigError
from parallel.comm.messages.ledger import is_balanced
from parallel.comm.world import sum_over_ranks
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.layout.token_placement import TokenPlacement
from parallel.mesh import Mesh
from parallel.transport.relayout import Relayout
from tests.helpers import on_ranks

SIDE = 12
TOKENS = SIDE * SIDE
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def windows(ranks: int, *, window: int = 4, shift: int = 0) -> TokenPlacement:
    """Complete windows of an image on each rank, as evenly as they go; a shifted image wraps around."""
    image = np.roll(np.arange(TOKENS).reshape(SIDE, SIDE), (-shift, -shift), (0, 1))
    grid = image.reshape(SIDE // window, window, SIDE // window, window).swapaxes(1, 2)
    return TokenPlacement.build(np.array_split(grid.reshape(-1, window * window), ranks), TOKENS)


def scattered(ranks: int, seed: int, *, empty: int) -> TokenPlacement:
    """Any tokens in any number on each rank, none on rank ``empty``."""
    draw = np.random.default_rng(seed)
    counts = draw.multinomial(TOKENS, [float(rank != empty) / max(1, ranks - 1) for rank in range(ranks)])
    if ranks == 1:
        counts = np.array([TOKENS])
    return TokenPlacement.build(np.split(draw.permutation(TOKENS), np.cumsum(counts)[:-1]), TOKENS)


def all_placements(ranks: int) -> dict[str, TokenPlacement]:
    layouts = {kind: SequenceLayout.build(kind, TOKENS, ranks, [0, 5, 100, TOKENS]) for kind in KINDS}
    if ranks == 4:
        layouts["ulysses"] = SequenceLayout.build("zigzag", TOKENS, 4, ulysses=2)
    return {
        **{name: TokenPlacement.of_layout(layout) for name, layout in layouts.items()},
        "windows": windows(ranks),
        "windows backwards": TokenPlacement.build([windows(ranks).tokens(r)[::-1] for r in range(ranks)], TOKENS),
        "shifted windows": windows(ranks, shift=2),
        "no token on the first": scattered(ranks, 1, empty=0),
        "no token on the last": scattered(ranks, 2, empty=ranks - 1),
    }


def complete(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of the complete sequence, equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows_of(x: Tensor, placement: TokenPlacement, rank: int, dim: int) -> Tensor:
    """The oracle: what a rank holds of a complete tensor."""
    return x.index_select(dim, torch.from_numpy(placement.tokens(rank).copy()))


def check(relayout: Relayout, shapes: list[tuple[int, ...]], dim: int, dtype: torch.dtype) -> None:
    """Compare values and gradients with the oracle's."""
    source, target, rank = relayout.plan.source, relayout.plan.target, relayout.mesh.context_rank
    inputs = [complete(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    leaves = [rows_of(x, source, rank, dim).requires_grad_() for x in inputs]
    moved = relayout.move_all(leaves, dim=dim)
    for got, x in zip(moved, inputs, strict=True):
        assert torch.equal(got, rows_of(x, target, rank, dim))
        assert got.dtype == dtype
        assert got.is_contiguous()
    douts = [complete(shape, dtype, 10 + seed) for seed, shape in enumerate(shapes)]
    gradients = torch.autograd.grad(moved, leaves, [rows_of(x, target, rank, dim) for x in douts])
    for got, x in zip(gradients, douts, strict=True):
        assert torch.equal(got, rows_of(x, source, rank, dim))


@pytest.mark.few(2)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks("world_size")
def test_rows_and_gradients_are_those_of_the_complete_tensor():
    mesh = Mesh.build(context=dist.get_world_size(), check_rows=True)
    for (a, source), (b, target) in itertools.product(all_placements(mesh.context).items(), repeat=2):
        relayout = Relayout.build(source, target, mesh)
        try:
            check(relayout, [(1, TOKENS, 2, 3)], 1, DTYPES[(len(a) + len(b)) % 3])
        except AssertionError as error:
            raise AssertionError(f"from {a} to {b} on rank {mesh.rank} of {mesh.context}") from error
    if mesh.comm.ledger is not None:
        assert is_balanced(sum_over_ranks(mesh.comm.ledger.balance(torch.device("cpu"))))
        assert mesh.comm.ledger.sent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_shapes_and_several_tensors(dtype: torch.dtype):
    mesh = Mesh.build(context=dist.get_world_size())
    for source, target in itertools.permutations([windows(mesh.context), scattered(mesh.context, 3, empty=1)], 2):
        relayout = Relayout.build(source, target, mesh)
        check(relayout, [(TOKENS,)], 0, dtype)
        check(relayout, [(2, 3, TOKENS)], -1, dtype)
        check(relayout, [(2, TOKENS, 4), (3, TOKENS)], 1, dtype)
        check(relayout, [(1, TOKENS, 4, 8), (1, TOKENS, 2, 8), (1, TOKENS, 2, 5)], 1, dtype)
        check(relayout.inverse, [(1, TOKENS, 7)], 1, dtype)


@on_ranks(3)
def test_other_dtypes_and_gradients_of_some():
    mesh = Mesh.build(context=3)
    source, target = windows(3), scattered(3, 4, empty=2)
    relayout = Relayout.build(source, target, mesh)
    for dtype in (torch.int64, torch.int16, torch.bool, torch.float16):
        x = torch.arange(TOKENS).to(dtype)
        mine = rows_of(x, source, mesh.rank, 0)
        assert torch.equal(relayout.move(mine, dim=0), rows_of(x, target, mesh.rank, 0))
    x, y = (rows_of(complete((TOKENS, 2), torch.float32, seed), source, mesh.rank, 0) for seed in (0, 1))
    y.requires_grad_()
    _, moved_y = relayout.move_all([x, y], dim=0)
    dout = complete((TOKENS, 2), torch.float32, 2)
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        moved_y.backward(rows_of(dout, target, mesh.rank, 0))
    assert torch.equal(y.grad, rows_of(dout, source, mesh.rank, 0))
    (((_, sent, *_), _),) = [exchange.call_args]
    assert sent.shape[1] == 2 * 4, "x needs no gradient, so none is sent"


@on_ranks(2)
def test_gradients_of_gradients():
    mesh = Mesh.build(context=2)
    relayout = Relayout.build(windows(2), scattered(2, 5, empty=-1), mesh)
    x = rows_of(complete((TOKENS, 3), torch.float64, 0), relayout.plan.source, mesh.rank, 0).requires_grad_()
    moved = relayout.move(x, dim=0)
    (dx,) = torch.autograd.grad(moved.pow(3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, 6 * x.detach(), rtol=1e-15, atol=0)


@on_ranks(4)
def test_messages_hold_the_rows_that_change_ranks_and_no_others():
    mesh = Mesh.build(context=4, check_rows=True)
    assert mesh.comm.ledger is not None
    real, seen = dist.all_to_all_single, []

    def counting(received, sent, to_receive, to_send, *group, **options):
        assert to_send[mesh.rank] == to_receive[mesh.rank] == 0, "rows were sent to oneself"
        seen.append((len(sent), len(received), sent.shape[1]))
        return real(received, sent, to_receive, to_send, *group, **options)

    for source, target in itertools.product(all_placements(4).values(), repeat=2):
        relayout = Relayout.build(source, target, mesh)
        q, k = (rows_of(complete((1, TOKENS, n), torch.float32, n), source, mesh.rank, 1) for n in (3, 2))
        seen.clear()
        with patch.object(dist, "all_to_all_single", counting):
            sum(x.sum() for x in relayout.move_all([q.requires_grad_(), k.requires_grad_()], dim=1)).backward()
        here, there = (placement.tokens(mesh.rank).tolist() for placement in (source, target))
        leave, arrive = len(set(here) - set(there)), len(set(there) - set(here))
        width = 4 * (3 + 2)
        if relayout.plan.num_moved:
            assert seen == [(leave, arrive, width), (arrive, leave, width)], "one message forward, one backward"
        else:
            assert not seen
            assert leave == arrive == 0
    assert is_balanced(sum_over_ranks(mesh.comm.ledger.balance(torch.device("cpu"))))


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_no_value_and_no_index_crosses_to_the_host_or_back():
    """On a GPU each would wait for the device; rows are put there by the first call."""
    mesh = Mesh.build(context=2)
    relayout = Relayout.build(windows(2), scattered(2, 10, empty=-1), mesh)
    q, k = (rows_of(complete((1, TOKENS, n), torch.float32, n), relayout.plan.source, mesh.rank, 1) for n in (3, 2))
    relayout.inverse.move(relayout.move(q, dim=1), dim=1)
    with Operators() as seen:
        sum(x.sum() for x in relayout.move_all([q.requires_grad_(), k.requires_grad_()], dim=1)).backward()
    assert {"aten::index_select", "aten::index_copy_", "c10d::alltoall_base_"} <= seen.names
    for waits in ("_local_scalar_dense", "nonzero", "index", "index_put_", "_to_copy", "copy_", "lift_fresh"):
        assert f"aten::{waits}" not in seen.names


@on_ranks(4)
def test_sequences_side_by_side_do_not_mix():
    mesh = Mesh.build(context=2)
    relayout = Relayout.build(windows(2), scattered(2, 6, empty=-1), mesh)
    x = complete((TOKENS, 2), torch.float32, mesh.data_rank)
    mine = rows_of(x, relayout.plan.source, mesh.context_rank, 0)
    moved = relayout.move(mine, dim=0)
    assert torch.equal(moved, rows_of(x, relayout.plan.target, mesh.context_rank, 0))


def test_one_process_permutes():
    relayout = Relayout.build(windows(1), scattered(1, 7, empty=-1), Mesh.build())
    check(relayout, [(2, TOKENS, 3), (2, TOKENS)], 1, torch.bfloat16)
    x = torch.zeros(1, TOKENS)
    assert Relayout.build(windows(1), windows(1), Mesh.build()).move(x, dim=1) is x


# --- what is refused, on every rank -----------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_with_different_plans_all_raise():
    mesh = Mesh.build(context=3)
    target = windows(3)
    if mesh.rank == 1:
        target = windows(3, shift=1)
    with pytest.raises(ClusterError, match=r"(?s)different relayouts:.*context rank 1: from .*the same two placements"):
        Relayout.build(scattered(3, 8, empty=0), target, mesh)
    # And they can go on together.
    relayout = Relayout.build(windows(3), windows(3, shift=1), mesh)
    check(relayout, [(TOKENS,)], 0, torch.float32)


@on_ranks(3)
def test_a_problem_of_one_rank_is_every_ranks():
    mesh = Mesh.build(context=3)
    other = TokenPlacement.build([[0], [1], [2]], 3)
    target = windows(3)
    if mesh.rank == 2:
        target = other
    with pytest.raises(ConfigError, match=r"context rank 2: a relayout .*144 tokens over 3 ranks .* to 3 tokens"):
        Relayout.build(windows(3), target, mesh)
    with pytest.raises(ConfigError, match="the placements have 2 ranks; the mesh has context 3"):
        Relayout.build(windows(2), windows(2), mesh)


@on_ranks(2)
def test_a_rank_that_builds_no_plan_is_waited_for_until_the_timeout():
    mesh = Mesh.build(context=2)
    if mesh.rank == 1:
        return
    assert mesh.control_group is not None
    distributed_c10d._set_pg_timeout(timedelta(seconds=2), mesh.control_group)
    with pytest.raises(ClusterError, match=r"(?s)agreeing on a relayout.*made fewer relayouts than its peers"):
        Relayout.build(windows(2), windows(2, shift=2), mesh)


def test_tensors_that_do_not_fit_are_named():
    relayout = Relayout.build(windows(1), scattered(1, 9, empty=-1), Mesh.build())
    with pytest.raises(ValueError, match=r"dim 1 of shape \(2, 72\) does not match the 144 tokens"):
        relayout.move(torch.zeros(2, 72), dim=1)
    with pytest.raises(ValueError, match=r"torch.float32 and torch.float64"):
        relayout.move_all([torch.zeros(TOKENS), torch.zeros(TOKENS, dtype=torch.float64)], dim=0)
