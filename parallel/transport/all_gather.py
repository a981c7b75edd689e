"""All keys at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.kernels.attention.slices import slice_table
from longctx.model.attention.strided import Strided
from parallel.mesh import Mesh
from parallel.runtime.communicate import named_collective
from parallel.schedule.schedule import Schedule
from parallel.transport.visit import Visit


class AllGather:
    """Every rank gathers all keys and values at once, while it computes with its own.

    One collective and one visit instead of many hops, for memory of degree × a rank's keys and values (and twice their
    float32 gradients in backward). Gradients go home in one all-to-all and are added in the order of the ring.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, communication_dtype: torch.dtype | None) -> None:
        self.schedule, self.mesh, self.communication_dtype = schedule, mesh, communication_dtype

    def run(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[Visit], None]) -> None:
        gathering = [self._gather(x) for x in (k_BnKD, v_BnKV)]
        compute(self._own(k_BnKD, v_BnKV))
        if self.mesh.ring_degree > 1:
            compute(self._others(*(self._gathered(*g) for g in gathering)))

    def run_backward(
        self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[Visit], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        gathering = [self._gather(x) for x in (k_BnKD, v_BnKV)]
        own = compute(self._own(k_BnKD, v_BnKV))
        if self.mesh.ring_degree > 1:
            grads = compute(self._others(*(self._gathered(*g) for g in gathering)))
            for total, grad in zip(own, grads, strict=True):
                self._add_home(total, grad)
        return own

    def _own(self, k: Tensor, v: Tensor) -> Visit:
        hop = self.schedule.hop(self.mesh.ring_rank, self.mesh.ring_rank)
        return Visit(k, v, slice(*hop.queries), hop.slice_table, (hop.strided,) if hop.strided else ())

    def _others(self, keys: Tensor, values: Tensor) -> Visit:
        rows = slice(0, self.schedule.layout.num_ring(self.mesh.ring_rank))
        return Visit(keys, values, rows, self._slices(), self._strided())

    def _slices(self) -> Tensor:
        """The work with all other ranks, key rows counted in the gathered rows."""
        schedule, me = self.schedule, self.mesh.ring_rank
        return schedule.cached(
            ("gathered", me),
            lambda: slice_table(
                part.shifted(keys=first)
                for owner, first in self._first_rows()
                for part in schedule.pairs_in_place(me, owner)
            ),
        )

    def _strided(self) -> tuple[Strided, ...]:
        """What a stride adds to it, owner by owner."""
        schedule, me = self.schedule, self.mesh.ring_rank

        def build() -> tuple[Strided, ...]:
            found = [(schedule.strided_in_place(me, owner), first) for owner, first in self._first_rows()]
            return tuple(part._replace(keys_m=part.keys_m + first) for part, first in found if part is not None)

        return schedule.cached(("gathered, strided", me), build)

    def _first_rows(self) -> list[tuple[int, int]]:
        """(another ring index, where its rows begin among the gathered ones)."""
        others = (owner for owner in range(self.mesh.ring_degree) if owner != self.mesh.ring_rank)
        return [(owner, owner * self.schedule.key_layout.num_ring(owner)) for owner in others]

    def _gather(self, x: Tensor) -> tuple[Tensor, Tensor, list]:
        if self.mesh.ring_degree == 1:
            return x, x, []
        x = x.contiguous()
        got = x.new_empty(self.mesh.ring_degree, *x.shape)
        described = f"rank {self.mesh.rank} gathering keys and values"
        work = named_collective(
            lambda: dist.all_gather_into_tensor(
                got.view(-1, *x.shape[1:]), x, group=self.mesh.ring_group, async_op=True
            ),
            described,
        )
        return got, x, [work]

    def _gathered(self, got: Tensor, _outgoing: Tensor, works: list) -> Tensor:
        """[B, ring · n, …] once it is there."""
        named_collective(lambda: [work.wait() for work in works], f"rank {self.mesh.rank} gathering keys and values")
        return got[:, 0].flatten(0, 1).unsqueeze(0) if got.shape[1] == 1 else got.transpose(0, 1).flatten(1, 2)

    def _add_home(self, total_BnKD: Tensor, grad_BsKD: Tensor) -> None:
        ring, (B, n, *rest) = self.mesh.ring_degree, total_BnKD.shape
        parts = (
            grad_BsKD.view(B, ring, n, *rest)
            .transpose(0, 1)
            .to(self.communication_dtype or grad_BsKD.dtype)
            .contiguous()
        )
        got = torch.empty_like(parts)
        named_collective(
            lambda: dist.all_to_all_single(got, parts, group=self.mesh.ring_group),
            f"rank {self.mesh.rank} returning gradients of gathered keys and values",
        )
        for places in range(1, ring):
            total_BnKD += got[(self.mesh.ring_rank + places) % ring]
