"""Experts distributed over ranks that hold the same tokens: each rank computes its own experts' contribution once.

Axes: N tokens, n in one tile, k experts per token, M model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.experts.dispatch import DispatchHandle, DispatchSizes, Pending, Ready, TokenDispatcher
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh


class ReplicatedTokens(TokenDispatcher):
    """Dispatcher for tokens that all ranks have: expert results are gathered and added in rank order."""

    is_distributed = True

    def __init__(self, mesh: Mesh, experts_per_rank: int, local_experts: slice) -> None:
        """Raise ConfigError if ranks that share experts have different sequences."""
        if mesh.context % mesh.expert:
            raise ConfigError(
                f"parallel.expert={mesh.expert} ranks share experts, but only parallel.context={mesh.context} ranks "
                "share a sequence: decoding several sequences with shared experts is not implemented yet.\n"
                f"Try parallel.expert={mesh.context} or a divisor of it."
            )
        self.mesh, self.experts_per_rank, self.local_experts = mesh, experts_per_rank, local_experts

    def handle(self, experts_nk: Tensor, sizes: DispatchSizes) -> DispatchHandle:
        """Return one tile's handle."""
        return _Handle(self, experts_nk)


class _Handle(DispatchHandle):
    """One tile's tokens, which are the same on every rank."""

    def __init__(self, dispatcher: ReplicatedTokens, experts_nk: Tensor) -> None:
        super().__init__(experts_nk)
        self.dispatcher = dispatcher

    def dispatch_routing(self, gates_nk: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Return gates, and ids among this rank's experts; −1 for remote experts."""
        ids_nk = self.experts_nk - self.dispatcher.local_experts.start
        is_local = (ids_nk >= 0) & (ids_nk < self.dispatcher.experts_per_rank)
        return Ready((gates_nk, ids_nk.where(is_local, -1)))

    def combine(self, of_tokens_SX: Tensor, communication_dtype: torch.dtype) -> Pending[Tensor]:
        """Return the sum over ranks, in rank order."""
        mesh = self.dispatcher.mesh
        assert mesh.expert_group is not None
        gathered = mesh.comm.all_gather(
            of_tokens_SX.to(communication_dtype),
            mesh.expert_group,
            operation="gathering expert outputs for replicated tokens",
            kind=Kind.REPLICATED_SUMS,
        )
        # A loop instead of sum(0): bitwise equal on every rank and in every run.
        total = gathered[0].to(accumulate_dtype(gathered.dtype))
        for part in gathered[1:]:
            total = total + part
        return Ready(total)
