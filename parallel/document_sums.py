"""Sums of hidden states by document over the ranks that share a sequence, with gradient.

Axes: S documents, s documents on several ranks, M model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.batch import Batch
from longctx.objectives.document_labels import ReduceSums
from parallel.mesh import Mesh
from parallel.schedule.document_segments import shared_documents

_SUM, _GRADIENT_SUM = "summing hidden states by document", "summing the gradients of document sums"


def document_sum(mesh: Mesh) -> ReduceSums:
    """Return a function that sums [S, M] over the ranks that share a batch. Collective, forward and backward."""

    def reduce_sums(sums_SM: Tensor, batch: Batch) -> Tensor:
        if mesh.context_group is None:
            return sums_SM
        if batch.placement is None:
            return _OverRanks.apply(sums_SM, mesh)
        # A document on a single rank is complete already.
        shared = torch.from_numpy(shared_documents(batch.placement, batch.documents.bounds))
        shared = shared.to(sums_SM.device, non_blocking=True)
        summed_sM: Tensor = _OverRanks.apply(sums_SM.index_select(0, shared), mesh)  # pyright: ignore[reportAssignmentType]
        return sums_SM.index_copy(0, shared, summed_sM)

    return reduce_sums


class _OverRanks(torch.autograd.Function):
    """Sum over ranks: each rank's part gets the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, sums_SM: Tensor, mesh: Mesh) -> Tensor:
        assert mesh.context_group is not None
        ctx.mesh = mesh
        return mesh.comm.all_reduce(sums_SM.clone(), mesh.context_group, operation=_SUM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_SM: Tensor):  # type: ignore[override]
        mesh: Mesh = ctx.mesh
        assert mesh.context_group is not None
        return mesh.comm.all_reduce(dout_SM.contiguous().clone(), mesh.context_group, operation=_GRADIENT_SUM), None
