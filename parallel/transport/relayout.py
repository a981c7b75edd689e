"""``Relayout``: move per-token tensors from one placement to another, in one all-to-all.

A permutation of rows over the ranks that share a sequence, so backward is the inverse permutation: gradients return to
the rows that they belong to, without a sum. A rank copies the rows that it keeps while the others are in flight.

Axes: s rows on this rank before the relayout, t rows after it, n rows in messages, W values per row of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longctx.tensor_bytes import rows_as_bytes
from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.layout.token_placement import TokenPlacement
from parallel.mesh import Mesh
from parallel.runtime.activity import ACTIVITY
from parallel.schedule.relayout_plan import RelayoutPlan, RowMoves, plan_relayout
from parallel.transport.plan_comparison import PlanTexts, verify_plan

_TEXTS = PlanTexts(
    plan="relayout",
    call="relayout",
    advice=(
        "All must build the same two placements, over all tokens and ranks: from the images' sizes and the batch's "
        "layout, not from a rank's own rows."
    ),
)


@dataclass(frozen=True, eq=False)
class Relayout:
    """Movement of rows between two placements, over a mesh's context ranks."""

    mesh: Mesh
    plan: RelayoutPlan

    @classmethod
    def build(cls, source: TokenPlacement, target: TokenPlacement, mesh: Mesh) -> Relayout:
        """Plan the movement from ``source`` to ``target``, and compare it over the context ranks. Collective.

        Build it once per pair of placements and use it in all layers. Raise ConfigError on every rank if one has
        placements that do not fit each other or the mesh, ClusterError if ranks mismatch or one times out.
        """
        plan = plan_relayout(source, target)
        problem = plan.problem
        if problem is None and source.degree != mesh.context:
            problem = f"the placements have {source.degree} ranks; the mesh has context {mesh.context}."
        verify_plan(plan, mesh, f"context {mesh.context}", problem, _TEXTS)
        return cls(mesh, plan)

    @cached_property
    def inverse(self) -> Relayout:
        """The way back. Ranks with equal plans have equal inverses, so it needs no comparison."""
        return Relayout(self.mesh, self.plan.inverse)

    @cached_property
    def moves(self) -> RowMoves:
        """This rank's part."""
        return self.plan.moves(self.mesh.context_rank)

    def move(self, x: Tensor, *, dim: int) -> Tensor:
        """Return this rank's rows under the target placement, from those under the source placement. Collective.

        ``dim`` is the token dimension; all others must be equal on all ranks, and so must the dtype. Differentiable:
        backward is collective, too. The values are copied, bit by bit. Raise ValueError if ``x`` has another number of
        rows than the source placement.
        """
        (moved,) = self.move_all([x], dim=dim)
        return moved

    def move_all(self, tensors: Sequence[Tensor], *, dim: int) -> tuple[Tensor, ...]:
        """Move several tensors in one message, as ``move`` does: queries, keys and values, for example.

        They may differ in all dimensions except ``dim``, but not in dtype.
        """
        self._check(tensors, dim)
        if self.plan.source == self.plan.target:
            return tuple(tensors)
        # Backward does not mark layers, so the messages keep the layer of forward.
        return _Move.apply(self, dim, ACTIVITY.layer, *tensors)

    def _check(self, tensors: Sequence[Tensor], dim: int) -> None:
        num_rows = self.plan.source.num_local(self.mesh.context_rank)
        for x in tensors:
            if x.shape[dim] != num_rows:
                raise ValueError(
                    f"dim {dim} of shape {tuple(x.shape)} does not match the {num_rows} tokens that context rank "
                    f"{self.mesh.context_rank} has in the source placement; flatten the batch rows first"
                )
            if x.dtype != tensors[0].dtype:
                raise ValueError(f"one message needs one dtype; got {tensors[0].dtype} and {x.dtype}. Move each alone")

    def _move(self, tensors: Sequence[Tensor], dim: int, layer: int) -> tuple[Tensor, ...]:
        """Move the rows without autograd."""
        index = self.moves.index(tensors[0].device)
        if not self.plan.num_moved:
            # One rank, or an order that changes within ranks only: all of them skip the message.
            return tuple(x.index_select(dim, index.kept_from) for x in tensors)
        pending = self._send([x.movedim(dim, 0) for x in tensors], layer)
        moved = []
        for x in tensors:
            shape = list(x.shape)
            shape[dim] = len(index.kept_to) + len(index.received)
            out = x.new_empty(shape)
            # In flight meanwhile: the rows from other ranks.
            out.movedim(dim, 0).index_copy_(0, index.kept_to, x.movedim(dim, 0).index_select(0, index.kept_from))
            moved.append(out)
        self._receive(pending, [x.movedim(dim, 0) for x in moved])
        return tuple(moved)

    def _send(self, tensors_s: Sequence[Tensor], layer: int) -> PendingTensors:
        """Start the all-to-all of tensors [s, …]: each row's values of all tensors side by side."""
        index = self.moves.index(tensors_s[0].device)
        parts = [x.index_select(0, index.sent).reshape(len(index.sent), math.prod(x.shape[1:])) for x in tensors_s]
        sent_nW = parts[0]
        if len(parts) > 1:
            sent_nW = torch.cat(parts, dim=1)
        group = self.mesh.context_group
        assert group is not None
        # As bytes, so that any dtype can be sent.
        return self.mesh.comm.start_all_to_all(
            rows_as_bytes(sent_nW),
            group,
            operation="moving tokens to another placement",
            counts=(self.moves.send_counts, self.moves.receive_counts),
            kind=Kind.MOVED_TOKENS,
            layer=layer,
        )

    def _receive(self, pending: PendingTensors, tensors_t: Sequence[Tensor]) -> None:
        """Wait for the rows from other ranks, and write them to their places in tensors [t, …]."""
        index = self.moves.index(tensors_t[0].device)
        (received,) = pending.wait()
        received_nW = received.view(tensors_t[0].dtype)
        parts = received_nW.split([math.prod(x.shape[1:]) for x in tensors_t], dim=1)
        for x, part in zip(tensors_t, parts, strict=True):
            x.index_copy_(0, index.received, part.reshape(part.shape[:1] + x.shape[1:]))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, relayout: Relayout, dim: int, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.relayout, ctx.dim, ctx.layer = relayout, dim, layer
        return relayout._move(tensors, dim, layer)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        is_needed = ctx.needs_input_grad[3:]
        needed = [x for x, is_one in zip(gradients, is_needed, strict=True) if is_one]
        moved = iter(_Move.apply(ctx.relayout.inverse, ctx.dim, ctx.layer, *needed))
        # The first three inputs are no tensors.
        results: list[Tensor | None] = [None, None, None]
        for is_one in is_needed:
            results.append(next(moved) if is_one else None)
        return tuple(results)
