"""Point to point, one or two levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from parallel.mesh import Mesh
from parallel.runtime.communicate import named_collective
from parallel.schedule.rows import Ranges, locate, num_rows
from parallel.schedule.schedule import Schedule
from parallel.transport.visit import Visit

_KEYS, _ACROSS, _GRADS, _HOME = 1, 3, 5, 7
"""Message tags (each with its successor): rows and gradients, within a node and between nodes."""


@dataclass
class _Block:
    """Packed rows of one owner, as a rank holds them to hand them round in its node."""

    owner: int
    rows: Ranges
    tensors: tuple[Tensor, Tensor]


@dataclass
class _Coming:
    """Two tensors in flight; keeps the outgoing ones alive until they are through."""

    tensors: tuple[Tensor, Tensor] | None
    rows: Ranges
    """Where they belong among the receiver's rows."""
    outgoing: tuple[Tensor, ...]
    works: list
    described: str

    def wait(self) -> tuple[Tensor, Tensor] | None:
        """The tensors that arrived; None when nothing was to come. ClusterError when the peer is gone or too late."""
        named_collective(lambda: [work.wait() for work in self.works], self.described)
        self.outgoing = ()
        return self.tensors

    def add_to(self, total: tuple[Tensor, Tensor] | None) -> None:
        """Add what arrived to the rows it belongs to."""
        grads = self.wait()
        if grads is not None:
            assert total is not None
            _add_rows(total, grads, self.rows)


class Hops:
    """Point-to-point hops in two levels: rows cross to another node once, and are handed round inside it.

    Ring index = node · places + place. In outer step m the rank at a place holds the rows of its counterpart m nodes
    before, those that its node needs; in inner hop j it meets rows that the rank j places before it holds. With all
    ring indices in one "node" there is no outer step: every rank receives straight from the owner.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, places: int, communication_dtype: torch.dtype | None) -> None:
        self.schedule, self.mesh, self.places, self.communication_dtype = schedule, mesh, places, communication_dtype
        self.me = mesh.ring_rank
        self.node, self.place = divmod(self.me, places)
        self.num_nodes = mesh.ring_degree // places

    def run(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[Visit], None]) -> None:
        for m, block in self._blocks(k_BnKD, v_BnKV):
            for _, visit in self._visits(m, block):
                if visit is not None:
                    compute(visit)

    def run_backward(
        self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[Visit], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        own: tuple[Tensor, Tensor] | None = None
        coming: _Coming | None = None
        for m, block in self._blocks(k_BnKD, v_BnKV):
            held = self._gradients_of(m, block, compute)
            if own is None:
                own = held
                continue
            if coming is not None:
                coming.add_to(own)
            coming = self._send_home(m, held, (k_BnKD, v_BnKV))
        if coming is not None:
            coming.add_to(own)
        assert own is not None
        return own

    def _blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, _Block]]:
        """(outer step, the block that this rank hands round in it); the next one is on its way from another node."""
        block, rows = _Block(self.me, ((0, k.shape[1]),), (k, v)), ()
        coming: _Coming | None = None
        for m in range(self.num_nodes):
            if coming is not None:
                block = _Block(self._owner(m, 0), rows, coming.wait() or (k[:, :0], v[:, :0]))
            if m + 1 < self.num_nodes:
                rows = self.schedule.rows_to_node(self._owner(m + 1, 0), self._node_mates(0))
                coming = self._fetch_across(k, v, m + 1, rows)
            yield m, block

    def _visits(self, m: int, block: _Block) -> Iterator[tuple[int, Visit | None]]:
        """(inner hop, what this rank meets in it or None); the next hop's rows are on their way."""
        arriving = self._hand_round(m, block, 1)
        yield 0, self._visit_held(block)
        for j in range(1, self.places):
            assert arriving is not None
            met, owner = arriving.wait(), self._owner(m, j)
            arriving = self._hand_round(m, block, j + 1)
            yield j, None if met is None else self._visit(owner, met)

    def _gradients_of(
        self, m: int, block: _Block, compute: Callable[[Visit], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor] | None:
        """Gradients of the held block's rows, from all ranks of this node in the order of the hops."""
        held: tuple[Tensor, Tensor] | None = None
        coming: _Coming | None = None
        for j, visit in self._visits(m, block):
            grads = None if visit is None else compute(visit)
            if j == 0:
                held = self._spread(block, grads)
                continue
            if coming is not None:
                coming.add_to(held)
            coming = self._give_back(m, block, grads, j)
        if coming is not None:
            coming.add_to(held)
        return held

    def _owner(self, m: int, j: int) -> int:
        """Whose rows this rank meets in outer step m, inner hop j."""
        return (self.node - m) % self.num_nodes * self.places + (self.place - j) % self.places

    def _node_mates(self, nodes_on: int) -> range:
        """The ring indices of a node."""
        first = (self.node + nodes_on) % self.num_nodes * self.places
        return range(first, first + self.places)

    def _neighbour(self, j: int) -> int:
        """The ring index j places on in this node."""
        return self.node * self.places + (self.place + j) % self.places

    def _counterpart(self, m: int) -> int:
        """The ring index of the same place m nodes on."""
        return (self.node + m) % self.num_nodes * self.places + self.place

    def _visit(self, owner: int, tensors: tuple[Tensor, Tensor]) -> Visit:
        hop = self.schedule.hop(self.me, owner)
        return Visit(*tensors, slice(*hop.queries), hop.slice_table, (hop.strided,) if hop.strided else ())

    def _visit_held(self, block: _Block) -> Visit | None:
        rows = self.schedule.hop(self.me, block.owner).rows
        return self._visit(block.owner, _take(block.tensors, locate(rows, block.rows))) if rows else None

    def _spread(self, block: _Block, grads: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Gradients of the rows that this rank met as gradients of all rows that it holds."""
        rows = self.schedule.hop(self.me, block.owner).rows
        if rows == block.rows:
            return grads
        k, v = block.tensors
        held = tuple(x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype)) for x in (k, v))
        if grads is not None:
            _add_rows(held, grads, locate(rows, block.rows))
        return held[0], held[1]

    def _fetch_across(self, k: Tensor, v: Tensor, m: int, rows: Ranges) -> _Coming:
        """Start the rows of outer step m on their way from their node, and this rank's own to the node m on."""
        away = self.schedule.rows_to_node(self.me, self._node_mates(m))
        outgoing = _take((k, v), away) if away else ()
        incoming = _empty((k, v), num_rows(rows))
        return self._exchange(outgoing, self._counterpart(m), incoming, self._counterpart(-m), _ACROSS)

    def _hand_round(self, m: int, block: _Block, j: int) -> _Coming | None:
        """Start hop j's rows on their way from the neighbour that holds them, and the held ones to who meets them."""
        if j == self.places:
            return None
        to, source = self._neighbour(j), self._neighbour(-j)
        away = self.schedule.rows_needed(to, block.owner)
        outgoing = _take(block.tensors, locate(away, block.rows)) if away else ()
        incoming = _empty(block.tensors, self.schedule.hop(self.me, self._owner(m, j)).num_rows)
        return self._exchange(outgoing, to, incoming, source, _KEYS)

    def _give_back(self, m: int, block: _Block, grads: tuple[Tensor, Tensor] | None, j: int) -> _Coming:
        """Start the gradients of hop j's rows on their way to who holds them, and those of the held rows here."""
        to, source = self._neighbour(-j), self._neighbour(j)
        rows = self.schedule.rows_needed(source, block.owner)
        incoming = self._empty_gradients(block.tensors, num_rows(rows))
        return self._exchange(self._to_wire(grads), to, incoming, source, _GRADS, locate(rows, block.rows))

    def _send_home(self, m: int, held: tuple[Tensor, Tensor] | None, like: tuple[Tensor, Tensor]) -> _Coming:
        """Start the gradients of outer step m's block on their way to its owner, and those of this rank's rows here."""
        rows = self.schedule.rows_to_node(self.me, self._node_mates(m))
        incoming = self._empty_gradients(like, num_rows(rows))
        outgoing = self._to_wire(held if held is not None and held[0].shape[1] else None)
        return self._exchange(outgoing, self._counterpart(-m), incoming, self._counterpart(m), _HOME, rows)

    def _to_wire(self, grads: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        return () if grads is None else tuple(g.to(self.communication_dtype or g.dtype).contiguous() for g in grads)

    def _empty_gradients(self, like: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor] | None:
        return _empty(like, rows, self.communication_dtype or accumulate_dtype(like[0].dtype))

    def _exchange(
        self,
        outgoing: tuple[Tensor, ...],
        to: int,
        incoming: tuple[Tensor, Tensor] | None,
        source: int,
        tag: int,
        rows: Ranges = (),
    ) -> _Coming:
        group, peer = self.mesh.ring_group, self.mesh.ring_peer
        ops = [dist.P2POp(dist.isend, x, peer(to), group, tag + n) for n, x in enumerate(outgoing)]
        ops += [dist.P2POp(dist.irecv, x, peer(source), group, tag + n) for n, x in enumerate(incoming or ())]
        what = "gradients" if tag in (_GRADS, _HOME) else "keys and values"
        described = f"rank {self.mesh.rank} exchanging {what} with ranks {peer(to)} (to) and {peer(source)} (from)"
        return _Coming(incoming, rows, outgoing, _started(ops, described), described)


def _started(ops: list, described: str) -> list:
    return named_collective(lambda: dist.batch_isend_irecv(ops), described) if ops else []


def _take(tensors: tuple[Tensor, Tensor], rows: Ranges) -> tuple[Tensor, Tensor]:
    """The given rows of both, each in one piece of memory; no copy where they lie in one already."""
    if len(rows) == 1:
        k, v = (x[:, rows[0][0] : rows[0][1]].contiguous() for x in tensors)
    else:
        index = _index(rows, tensors[0].device)
        k, v = (x.index_select(1, index) for x in tensors)
    return k, v


def _empty(like: tuple[Tensor, Tensor], rows: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor] | None:
    if not rows:
        return None
    k, v = (x.new_empty((x.shape[0], rows, *x.shape[2:]), dtype=dtype or x.dtype) for x in like)
    return k, v


def _add_rows(total: tuple[Tensor, ...], parts: tuple[Tensor, Tensor], rows: Ranges) -> None:
    """Add packed rows to the places they belong to."""
    for whole, part in zip(total, parts, strict=True):
        if len(rows) == 1:
            whole[:, rows[0][0] : rows[0][1]] += part
        else:  # every row once, so the order of additions is that of the calls
            whole.index_add_(1, _index(rows, whole.device), part.to(whole.dtype))


@lru_cache(maxsize=256)
def _index(rows: Ranges, device: torch.device) -> Tensor:
    """Every row of the ranges, one after another."""
    start, stop = torch.tensor(rows).T
    counts = stop - start
    shift = (start - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return (torch.arange(len(shift)) + shift).to(device)
