"""Exact attention over a sequence that is spread over ranks: a loop of hops around a one-device kernel.

Axes: B batch, t this rank's tokens, H query heads, K key/value heads, D head size. Partial results, and the gradients
on the wire, are float32 (float64 for float64 inputs): rounding does not grow with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.contract import AttentionKernel, Scores, accumulate_dtype, merge_
from longctx.kernels.select import choose_kernel, kernel_request
from longctx.model.cores import AttentionMask, KVCache
from parallel.layout import Ranges, SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule import Hop, Schedule

_KEYS, _GRADS = 1, 2
"""Message tags: rows on their way to a query, gradients on their way home."""


def attend(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKD: Tensor,
    *,
    schedule: Schedule,
    mesh: Mesh,
    kernel: str = "auto",
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries over every key of the sequence that the schedule's mask lets them see.

    Inputs are this rank's share under the schedule's layout: [1, t, …] of it, the same tokens in B rows when the layout
    is over flattened rows, or B stacked sequences of the same documents. Returns [B, t, H, D] in q's dtype. ``scale``
    defaults to D^-½. Every rank of the context group must call it alike.
    """
    if mesh.context != schedule.layout.degree:
        raise ConfigError(f"the schedule is for {schedule.layout.degree} ranks, the mesh has context {mesh.context}.")
    B, t = q_BtHD.shape[:2]
    share = schedule.layout.num_local(mesh.context_rank)
    if t != share and B * t == share:  # rows of a flattened micro-batch
        flat = (x.reshape(1, share, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKD))
        return attend(*flat, schedule=schedule, mesh=mesh, kernel=kernel, scale=scale).view(q_BtHD.shape)
    if t != share or k_BtKD.shape[1] != t:
        raise ConfigError(
            f"rank {mesh.rank} was given {t} queries and {k_BtKD.shape[1]} keys; "
            f"its share of the layout is {share} tokens."
        )
    chosen = choose_kernel(kernel, kernel_request(q_BtHD, k_BtKD))
    scores = Scores(scale=q_BtHD.shape[-1] ** -0.5 if scale is None else scale)
    ring = _Ring(schedule, mesh, chosen, scores)
    return _RingAttention.apply(q_BtHD, k_BtKD, v_BtKD, ring)


@dataclass(frozen=True)
class ContextParallelAttention:
    """The attention core of a layer whose sequence is shared by the mesh's context ranks."""

    mesh: Mesh
    layout: str
    kernel: str = "auto"

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKD: Tensor,
        *,
        mask: AttentionMask,
        layer: int,
        cache: KVCache | None = None,
    ) -> Tensor:
        if cache is not None:
            raise ConfigError("decoding with keys spread over ranks is not built yet; generate in one process.")
        schedule = build_schedule(self.layout, self.mesh.context, mask)
        return attend(q_BtHD, k_BtKD, v_BtKD, schedule=schedule, mesh=self.mesh, kernel=self.kernel)


@lru_cache(maxsize=8)
def build_schedule(kind: str, degree: int, mask: AttentionMask) -> Schedule:
    """The schedule of a mask, built once a batch and shared by all layers."""
    layout = SequenceLayout.build(kind, mask.num_tokens, degree)
    return Schedule.build(layout, mask.cu_seqlens, causal=mask.causal)


@dataclass(frozen=True)
class _Ring:
    """What the hops of one attention call have in common."""

    schedule: Schedule
    mesh: Mesh
    kernel: AttentionKernel
    scores: Scores

    def received(self, hop: int) -> Hop:
        """This rank's work in a hop."""
        return self.schedule.hop(self.mesh.context_rank, hop)

    def sent(self, hop: int) -> Hop:
        """The work of the rank that meets this rank's keys in that hop."""
        return self.schedule.hop(self._rank(hop), hop)

    def _rank(self, places: int) -> int:
        return (self.mesh.context_rank + places) % self.mesh.context

    def fetch(self, k: Tensor, v: Tensor, hop: int) -> _Arriving:
        """Start hop ``hop``'s keys and values on their way, and this rank's own to whoever needs them."""
        away, home = self.sent(hop), self.received(hop)
        outgoing = _take_rows(k, v, away.rows) if away.rows else None
        shape = (2, k.shape[0], home.num_rows, *k.shape[2:])
        incoming = k.new_empty(shape) if home.rows else None
        return self._exchange(outgoing, self._rank(hop), incoming, self._rank(-hop), _KEYS)

    def give_back(self, dk: Tensor | None, dv: Tensor | None, like: Tensor, hop: int) -> _Arriving:
        """Start the gradients of hop ``hop``'s rows on their way to the owner, and receive those of this rank's own."""
        away = self.sent(hop)
        outgoing = None if dk is None or dv is None else torch.stack((dk, dv))
        shape = (2, like.shape[0], away.num_rows, *like.shape[2:])
        incoming = like.new_empty(shape, dtype=accumulate_dtype(like.dtype)) if away.rows else None
        return self._exchange(outgoing, self._rank(-hop), incoming, self._rank(hop), _GRADS)

    def _exchange(self, outgoing: Tensor | None, to: int, incoming: Tensor | None, source: int, tag: int) -> _Arriving:
        group, peer = self.mesh.context_group, self.mesh.context_peer
        ops = []
        if outgoing is not None:
            ops.append(dist.P2POp(dist.isend, outgoing, peer(to), group, tag))
        if incoming is not None:
            ops.append(dist.P2POp(dist.irecv, incoming, peer(source), group, tag))
        return _Arriving(incoming, outgoing, dist.batch_isend_irecv(ops) if ops else [])


@dataclass
class _Arriving:
    """Rows in flight; keeps both buffers alive until they are through."""

    incoming: Tensor | None
    outgoing: Tensor | None
    works: list

    def wait(self) -> tuple[Tensor, Tensor] | None:
        """The two tensors that arrived, [B, rows, K, D] each; None when nothing was to come."""
        for work in self.works:
            work.wait()
        self.outgoing = None
        return None if self.incoming is None else (self.incoming[0], self.incoming[1])


def _take_rows(k: Tensor, v: Tensor, rows: Ranges) -> Tensor:
    """The given rows of keys and values in one buffer [2, B, rows, K, D]."""
    parts = [torch.stack((k[:, start:stop], v[:, start:stop])) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class _RingAttention(torch.autograd.Function):
    """Forward and backward over the hops; the next hop's rows travel while this hop computes."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        degree = ring.mesh.context
        arriving = ring.fetch(k, v, 1) if degree > 1 else None
        out, lse = ring.kernel.forward(q, k, v, ring.received(0).pairs, scores=ring.scores)
        for hop in range(1, degree):
            assert arriving is not None
            visiting = arriving.wait()
            arriving = ring.fetch(k, v, hop + 1) if hop + 1 < degree else None
            if visiting is not None:
                work = ring.received(hop)
                rows = slice(*work.queries)
                partial = ring.kernel.forward(q[:, rows], *visiting, work.pairs, scores=ring.scores)
                merge_(out[:, rows], lse[:, rows], *partial)
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        degree = ring.mesh.context
        arriving = ring.fetch(k, v, 1) if degree > 1 else None
        pairs = ring.received(0).pairs
        dq, dk, dv, _ = ring.kernel.backward(dout, q, k, v, out, lse, pairs, scores=ring.scores)
        returning: tuple[int, _Arriving] | None = None
        for hop in range(1, degree):
            assert arriving is not None
            visiting = arriving.wait()
            arriving = ring.fetch(k, v, hop + 1) if hop + 1 < degree else None
            dk_away, dv_away = None, None
            if visiting is not None:
                work = ring.received(hop)
                rows = slice(*work.queries)
                k_near, v_near = visiting
                mine = (dout[:, rows], q[:, rows], k_near, v_near, out[:, rows], lse[:, rows])
                grads = ring.kernel.backward(*mine, work.pairs, scores=ring.scores)
                dq[:, rows] += grads[0]
                dk_away, dv_away = grads[1], grads[2]
            if returning is not None:
                _add_home(dk, dv, ring, *returning)
            returning = (hop, ring.give_back(dk_away, dv_away, k, hop))
        if returning is not None:
            _add_home(dk, dv, ring, *returning)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _add_home(dk: Tensor, dv: Tensor, ring: _Ring, hop: int, arriving: _Arriving) -> None:
    """Add the gradients that came back in hop order, so the sum is the same on every run."""
    grads = arriving.wait()
    if grads is None:
        return
    at = 0
    for start, stop in ring.sent(hop).rows:
        for total, part in zip((dk, dv), grads, strict=True):
            total[:, start:stop] += part[:, at : at + stop - start]
        at += stop - start
