"""Shared by transports: row selection and accumulation, receive buffers, pending exchanges.

An exchange sends to one peer and receives from another; either side may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype, as_dtype
from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.schedule.row_ranges import RowRanges
from parallel.transport.kv_block import KeysAndValues

_BETWEEN_NODES = (Kind.KEYS_BETWEEN_NODES, Kind.GRADIENTS_BETWEEN_NODES)


@dataclass
class PendingGradients:
    """Gradients in flight to the rank that owns the rows."""

    messages: PendingTensors = field(default_factory=PendingTensors)
    rows: RowRanges | None = None
    """The rows' positions on the receiver."""

    def add_to(self, total: KeysAndValues | None) -> None:
        """Wait for the gradients and add them to their rows."""
        gradients = self.messages.wait()
        if gradients:
            assert total is not None
            assert self.rows is not None
            add_rows_(total, gradients, self.rows)


@dataclass(frozen=True)
class RingExchange:
    """Exchanges between a ring's ranks, addressed by ring rank."""

    mesh: Mesh
    communication_dtype: torch.dtype | None
    """Dtype for gradients in flight; None keeps the accumulation dtype."""

    def keys(
        self, send_tensors: KeysAndValues | None, *, to: int, like: KeysAndValues, rows: int, source: int, kind: Kind
    ) -> PendingTensors:
        """Send keys and values; receive ``rows`` rows in the dtype of ``like``. Post no receive if ``rows`` is 0."""
        return self._start(send_tensors, to, empty_rows(like, rows), source, kind)

    def gradients(
        self,
        send_tensors: KeysAndValues | None,
        *,
        to: int,
        like: KeysAndValues,
        rows: RowRanges,
        source: int,
        kind: Kind,
    ) -> PendingGradients:
        """Send gradients; receive those for ``rows``, which belong to the receiver."""
        # Default to the accumulation dtype: rounding each rank's part to bfloat16 is the user's choice.
        dtype = self.communication_dtype or accumulate_dtype(like[0].dtype)
        buffers = empty_rows(like, rows.num_rows, dtype)
        if send_tensors is not None:
            dk, dv = send_tensors
            send_tensors = (self._to_communicate(dk), self._to_communicate(dv))
        return PendingGradients(self._start(send_tensors, to, buffers, source, kind), rows)

    def _to_communicate(self, gradient: Tensor) -> Tensor:
        return gradient.to(self.communication_dtype or accumulate_dtype(gradient.dtype)).contiguous()

    def _start(
        self, send_tensors: KeysAndValues | None, to: int, buffers: KeysAndValues | None, source: int, kind: Kind
    ) -> PendingTensors:
        group, receiver, sender = self.mesh.ring_group, self.mesh.ring_peer(to), self.mesh.ring_peer(source)
        # NCCL has one stream per group: in a shared group, hops inside a node would queue behind slower traffic between
        # nodes.
        if kind in _BETWEEN_NODES and self.mesh.between_nodes_group is not None:
            group = self.mesh.between_nodes_group
        if group is None:
            return PendingTensors()
        # A hop is the distance that keys travel around the ring; gradients travel the same distance back.
        hop, payload = (to - self.mesh.ring_rank) % self.mesh.ring_degree, "keys and values"
        if kind in (Kind.GRADIENTS, Kind.GRADIENTS_BETWEEN_NODES):
            hop, payload = (self.mesh.ring_rank - to) % self.mesh.ring_degree, "gradients"
        sent, received = {}, {}
        if send_tensors is not None:
            sent[receiver] = send_tensors
        if buffers is not None:
            received[sender] = buffers
        operation = f"exchanging {payload} with ranks {receiver} (to) and {sender} (from)"
        return self.mesh.comm.send_recv(sent, received, group, operation=operation, kind=kind, hop=hop)


def widened(gradients: KeysAndValues) -> KeysAndValues:
    """Cast gradients to the dtype in which other ranks' gradients are accumulated."""
    dk, dv = (as_dtype(x, accumulate_dtype(x.dtype)) for x in gradients)
    return dk, dv


def take_rows(tensors: KeysAndValues, rows: RowRanges) -> KeysAndValues | None:
    """Return the given rows, contiguous (without a copy if they already are); None if ``rows`` is empty."""
    if not rows:
        return None
    k, v = tensors
    # A single range, usual for long documents, is a view: the send reads it in place.
    if len(rows) == 1:
        ((start, stop),) = rows
        return k[:, start:stop].contiguous(), v[:, start:stop].contiguous()
    index = rows.index(k.device)
    return k.index_select(1, index), v.index_select(1, index)


def empty_rows(like: KeysAndValues, rows: int, dtype: torch.dtype | None = None) -> KeysAndValues | None:
    """Return buffers for ``rows`` rows; None for 0."""
    if not rows:
        return None
    k, v = (x.new_empty((x.shape[0], rows, x.shape[2], x.shape[3]), dtype=dtype or x.dtype) for x in like)
    return k, v


def add_rows_(total: KeysAndValues, parts: KeysAndValues, rows: RowRanges) -> None:
    """Add packed rows to their positions in ``total``, in place."""
    for whole, part in zip(total, parts, strict=True):
        if len(rows) == 1:
            ((start, stop),) = rows
            whole[:, start:stop] += part
        else:
            # Indices are unique within a call, so the order of additions is the order of calls.
            whole.index_add_(1, rows.index(whole.device), part.to(whole.dtype))
