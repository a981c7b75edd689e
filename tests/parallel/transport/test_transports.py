"""Transports: what is sent when, how much of it, and in which order results are merged and added."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.kernel_interface import ScoreRules, merge_
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.attention.attention_work import backward_work, forward_work
from parallel.attention import context_parallel_attention
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule import AttentionShape, Schedule
from parallel.schedule.attention_schedule import Hop
from parallel.transport.ulysses import HeadExchange
from tests.helpers import on_ranks

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 192, 4, 2, 8
DOCUMENTS = [0, 1, 5, 64, 65, 120, 185, TOKENS]
MASKS = {"causal": {}, "sinks": {"window": 20, "sink_tokens": 3}, "sparse": {"window": 10, "stride": 4}}
SCORES = ScoreRules(scale=HEAD_DIM**-0.5)


def inputs() -> list[Tensor]:
    """q, k, v and the output's gradient of the whole sequence."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, TOKENS, heads, HEAD_DIM, generator=g) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def attend_here(schedule: Schedule, mesh: Mesh, transport: str) -> dict[str, Tensor]:
    """This rank's output and gradients."""
    q, k, v, dout = (schedule.layout.split(x, mesh.context_rank, 1) for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*leaves, schedule=schedule, mesh=mesh, kernel="cpu_flash", transport=transport)
    out.backward(dout)
    return {"out": out.detach()} | {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True)}


# --- the order of additions: a ring that is walked in one process -----------------------------------------------------


class Walk:
    """The ring in one process: every rank's hops one after the other, nothing sent."""

    def __init__(self, schedule: Schedule, owners: dict[int, list[int]]) -> None:
        """``kv_ranks`` lists for each rank whose rows it meets, in order."""
        self.schedule, self.owners, self.kernel = schedule, owners, CpuFlashKernel()
        self.degree = schedule.layout.degree
        q, k, v, dout = inputs()
        self.q, self.k, self.v, self.dout = (
            [schedule.layout.split(x, rank, 1) for rank in range(self.degree)] for x in (q, k, v, dout)
        )

    def rows(self, x: list[Tensor], hop: Hop) -> Tensor:
        return torch.cat([x[hop.owner][:, start:stop] for start, stop in hop.rows], 1)

    def hops(self, rank: int) -> list[Hop]:
        hops = [self.schedule.hop(rank, owner) for owner in self.owners[rank]]
        return [hop for hop in hops if hop.work]

    def forward(self, rank: int) -> tuple[Tensor, Tensor]:
        result = None
        for hop in self.hops(rank):
            queries = slice(*hop.queries)
            part = forward_work(
                self.q[rank][:, queries], self.rows(self.k, hop), self.rows(self.v, hop), hop.work, self._forward
            )
            if result is None:
                result = part
            else:
                merge_(result[0][:, queries], result[1][:, queries], *part)
        assert result is not None
        return result

    def backward(self) -> list[dict[str, Tensor]]:
        """Gradients of every rank; an owner adds what hop after hop brings it."""
        found: list[dict[str, Tensor]] = []
        results = [self.forward(rank) for rank in range(self.degree)]
        for rank, (out, lse) in enumerate(results):
            for hop in self.hops(rank):
                queries = slice(*hop.queries)
                mine = (x[:, queries] for x in (self.dout[rank], self.q[rank]))
                grads = backward_work(
                    *mine,
                    self.rows(self.k, hop),
                    self.rows(self.v, hop),
                    out[:, queries],
                    lse[:, queries],
                    hop.work,
                    self._backward,
                )
                if hop.owner == rank:
                    found.append({"out": out, "dq": grads.dq_BtHD, "dk": grads.dk_BsKD, "dv": grads.dv_BsKV})
                else:
                    found[rank]["dq"][:, queries] += grads.dq_BtHD
                    found[rank][f"of {hop.owner}"] = torch.stack((grads.dk_BsKD, grads.dv_BsKV))
        for owner, distance in itertools.product(range(self.degree), range(1, self.degree)):
            receiver = (owner + distance) % self.degree
            grads, at = found[receiver].get(f"of {owner}"), 0
            if grads is not None:
                for start, stop in self.schedule.hop(receiver, owner).rows:
                    for total, part in zip((found[owner]["dk"], found[owner]["dv"]), grads, strict=True):
                        total[:, start:stop] += part[:, at : at + stop - start]
                    at += stop - start
        return found

    def _forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(*args, scores=SCORES)

    def _backward(self, *args: Tensor):
        return self.kernel.backward(*args, scores=SCORES)


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@on_ranks("world_size")
def test_the_ring_merges_and_adds_in_the_order_of_its_hops():
    """Bit for bit: float32 sums tell their order."""
    mesh = Mesh.build(context=dist.get_world_size())
    for kind, mask in itertools.product(KINDS, MASKS.values()):
        schedule = Schedule.build(SequenceLayout.build(kind, TOKENS, mesh.context, DOCUMENTS), DOCUMENTS, **mask)
        owners = {r: [(r - hop) % mesh.context for hop in range(mesh.context)] for r in range(mesh.context)}
        want, got = Walk(schedule, owners).backward()[mesh.rank], attend_here(schedule, mesh, "p2p")
        for name, found in got.items():
            assert torch.equal(found, want[name]), f"{name} on rank {mesh.rank}, {kind}, {mask}"


@on_ranks(4)
def test_two_levels_merge_node_after_node():
    mesh = Mesh.build(context=4, ranks_per_node=2)
    owners = {0: [0, 1, 2, 3], 1: [1, 0, 3, 2], 2: [2, 3, 0, 1], 3: [3, 2, 1, 0]}
    for kind, mask in itertools.product(KINDS, MASKS.values()):
        schedule = Schedule.build(SequenceLayout.build(kind, TOKENS, 4, DOCUMENTS), DOCUMENTS, **mask)
        want, got = Walk(schedule, owners).forward(mesh.rank)[0], attend_here(schedule, mesh, "two_level")["out"]
        assert torch.equal(got, want), f"rank {mesh.rank}, {kind}, {mask}"


# --- what is sent, and when -------------------------------------------------------------------------------------------


class Events:
    """What a rank does with its kernel and its peers, in order, and the bytes it receives."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bytes_received = 0

    def watched(self):
        started, computed = dist.batch_isend_irecv, CpuFlashKernel.forward
        gathered = dist.all_gather_into_tensor

        def exchange(ops):
            described = [f"{'to' if op.op is dist.isend else 'from'} {op.peer}" for op in ops]
            self.log.append("start " + ", ".join(sorted(set(described))))
            self.bytes_received += sum(op.tensor.nbytes for op in ops if op.op is dist.irecv)
            return [_Watched(work, self.log) for work in started(ops)]

        def gather(received, x, *group, **kwargs):
            # Fingerprints of the ranks' agreement are no rows.
            if x.dtype == torch.uint8:
                return gathered(received, x, *group, **kwargs)
            self.log.append("start gathering")
            self.bytes_received += received.nbytes - x.nbytes
            return _Watched(gathered(received, x, *group, **kwargs), self.log)

        def compute(kernel, *args, **kwargs):
            self.log.append("compute")
            return computed(kernel, *args, **kwargs)

        return (
            patch.object(dist, "batch_isend_irecv", exchange),
            patch.object(dist, "all_gather_into_tensor", gather),
            patch.object(CpuFlashKernel, "forward", compute),
        )


class _Watched:
    def __init__(self, work, log: list[str]) -> None:
        self.work, self.log = work, log

    def wait(self) -> None:
        if self.log[-1] != "wait":
            self.log.append("wait")
        self.work.wait()


def watch(schedule: Schedule, mesh: Mesh, transport: str) -> Events:
    """The events of a forward pass."""
    q, k, v, _ = (schedule.layout.split(x, mesh.context_rank, 1) for x in inputs())
    events = Events()
    exchange, gather, compute = events.watched()
    with exchange, gather, compute:
        context_parallel_attention(q, k, v, schedule=schedule, mesh=mesh, kernel="cpu_flash", transport=transport)
    return events


@on_ranks(3)
def test_the_next_hop_is_in_flight_while_one_computes():
    mesh = Mesh.build(context=3)
    schedule = Schedule.build(SequenceLayout.build("striped", TOKENS, 3))  # where every rank needs every other's rows
    before, after = (mesh.rank - 1) % 3, (mesh.rank + 1) % 3
    exchanges = [f"start from {before}, to {after}", f"start from {after}, to {before}"]
    want = [exchanges[0], "compute", "wait", exchanges[1], "compute", "wait", "compute"]
    assert watch(schedule, mesh, "p2p").log == want
    gather = ["start gathering", "start gathering"]  # keys, values
    assert watch(schedule, mesh, "all_gather").log == [*gather, "compute", "wait", "compute"]


@on_ranks(4)
def test_bytes_that_arrive_are_those_the_schedule_tells():
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, bytes_per_value=4)
    for transport, kind, mask in itertools.product(("p2p", "two_level", "all_gather"), KINDS, MASKS.values()):
        mesh = Mesh.build(context=4, ranks_per_node=2)
        schedule = Schedule.build(SequenceLayout.build(kind, TOKENS, 4, DOCUMENTS), DOCUMENTS, **mask)
        told = schedule.bytes_received(mesh.rank, shape, transport, ranks_per_node=2)
        assert watch(schedule, mesh, transport).bytes_received == told, f"{transport}, {kind}, {mask}"


# --- heads that are split unevenly ------------------------------------------------------------------------------------

FEW_TOKENS, HEAD_SIZE = 33, 16


def exchange_of(heads: int, kv_heads: int, ulysses: int, rank: int) -> HeadExchange:
    mesh = Mesh(rank=rank, world_size=ulysses, context=ulysses, ulysses=ulysses)
    return HeadExchange.build(mesh, heads, kv_heads)


def by_index(exchange: HeadExchange, key_of_query: list[int], grad: Tensor) -> Tensor:
    """The same sums by ``index_add_``, which on a CPU adds head after head."""
    dtype = accumulate_dtype(grad.dtype)
    folded = grad.new_zeros(1, FEW_TOKENS, exchange.key_heads.stop - exchange.key_heads.start, HEAD_SIZE, dtype=dtype)
    return folded.index_add_(2, torch.tensor(key_of_query), grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "ulysses"), [(12, 4, 5), (40, 8, 3), (24, 8, 5)])
def test_gradients_of_expanded_heads_are_added_head_after_head(heads, kv_heads, ulysses, dtype):
    num_uneven = 0
    for rank in range(ulysses):
        exchange = exchange_of(heads, kv_heads, ulysses, rank)
        torch.manual_seed(rank)
        grad = torch.randn(1, FEW_TOKENS, exchange.num_kernel_key_heads, HEAD_SIZE).to(dtype)
        folded = exchange.fold(grad)
        key_of_query = exchange.split.key_of_query(rank)
        if key_of_query is None:
            assert folded is grad
            continue
        num_uneven += 1
        assert torch.equal(folded, by_index(exchange, key_of_query, grad))
        # Each of n − 1 additions rounds by eps/2 of a partial sum, which the sum of magnitudes bounds; twice that.
        exact = by_index(exchange, key_of_query, grad.double())
        bound = by_index(exchange, key_of_query, grad.double().abs()) * torch.finfo(folded.dtype).eps * heads / kv_heads
        assert ((folded.double() - exact).abs() <= bound).all()
    assert num_uneven


def test_it_is_the_transpose_of_expanding():
    exchange = exchange_of(40, 8, 3, 1)
    torch.manual_seed(0)
    x = torch.randn(1, FEW_TOKENS, 8, HEAD_SIZE, dtype=torch.float64)[:, :, exchange.key_heads]
    grad = torch.randn(1, FEW_TOKENS, exchange.num_kernel_key_heads, HEAD_SIZE, dtype=torch.float64)
    torch.testing.assert_close((exchange.expand(x) * grad).sum(), (x * exchange.fold(grad)).sum(), rtol=1e-12, atol=0)
