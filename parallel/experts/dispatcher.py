"""Expert parallelism: tokens are sent to their experts' ranks and results back, in one all-to-all each.

A token is sent once to each rank with any of its experts, together with the ids and gates for that rank, and returns as
one sum: the minimum traffic. Message sizes depend on the routing, so ranks first exchange token counts, once for all
tiles in a layer.

Axes: N tokens on this rank, n in one tile, U tokens in a tile that this rank sends (once per receiving rank, ordered by
rank), S tokens that it receives, R assignments, k experts per token, p ranks that share the experts, t tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.experts.dispatch import DispatchHandle, DispatchSizes, Pending, TokenDispatcher
from longctx.tensor_bytes import rows_as_bytes
from parallel.comm.communicator import PendingTensors as PendingExchange
from parallel.comm.messages.kinds import Kind
from parallel.comm.process_groups import ProcessGroup
from parallel.experts.replicated import ReplicatedTokens
from parallel.mesh import Mesh
from parallel.runtime.activity import ACTIVITY

T = TypeVar("T")

_IDS = torch.int16
"""Dtype for local expert ids in messages."""
_OPERATIONS = {
    Kind.TOKENS: "dispatching tokens to experts",
    Kind.CHOICES: "dispatching expert choices",
    Kind.EXPERT_SUMS: "returning expert outputs",
}
"""Operation named while a rank waits for these messages."""


class ReplicatedExperts(TokenDispatcher):
    """Dispatcher with all experts on this rank, which holds a shard of the sequence."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def gather(self, values_NX: Tensor) -> Tensor:
        """Gather values from all ranks in the sequence, [P, …], by context rank; equally many on each."""
        return _gather_over_context(self.mesh, values_NX)


class AllToAllDispatcher(TokenDispatcher):
    """Dispatcher over the mesh's expert group: each rank holds equally many consecutive experts per layer."""

    is_distributed = True

    def __init__(self, mesh: Mesh, num_experts: int) -> None:
        """Raise ConfigError if the number of ranks does not divide the number of experts."""
        if num_experts % mesh.expert:
            raise ConfigError(
                f"parallel.expert={mesh.expert} does not divide model.num_experts={num_experts}.\n"
                f"Try one of {[n for n in range(1, num_experts + 1) if num_experts % n == 0]}."
            )
        self.mesh, self.experts_per_rank = mesh, num_experts // mesh.expert
        first = mesh.expert_rank * self.experts_per_rank
        self.local_experts = slice(first, first + self.experts_per_rank)

    def plan(self, experts_Nk: Tensor, tiles: Sequence[slice]) -> list[DispatchSizes]:
        """Exchange the amounts to send, with one all-to-all and one device synchronization for all tiles."""
        # Buffers need sizes on the CPU. Reading them tile by tile would synchronize with the device once per tile.
        counts_tp2 = torch.stack([self._counts(experts_Nk[tile]) for tile in tiles])
        send_pt2 = counts_tp2.transpose(0, 1).contiguous()
        recv_pt2 = self.mesh.comm.all_to_all(
            send_pt2, self._group, operation="exchanging expert token counts", kind=Kind.COUNTS
        )
        sizes = self.read_sizes(torch.stack((send_pt2, recv_pt2)).transpose(1, 2), tiles)
        # Backward reuses these sizes without knowing the layer, so store it.
        return [of_tile._replace(layer=ACTIVITY.layer) for of_tile in sizes]

    def read_sizes(self, counts_2tp2: Tensor, tiles: Sequence[slice]) -> list[DispatchSizes]:
        """Return each tile's sizes from [sent or received, tile, rank, tokens or assignments]. Synchronizes with the
        device.
        """
        send, recv = counts_2tp2.tolist()
        return [
            DispatchSizes(
                send_counts=tuple(tokens for tokens, _ in to_ranks),
                recv_counts=tuple(tokens for tokens, _ in from_ranks),
                num_assignments=sum(assignments for _, assignments in from_ranks),
            )
            for to_ranks, from_ranks in zip(send, recv, strict=True)
        ]

    def handle(self, experts_nk: Tensor, sizes: DispatchSizes) -> DispatchHandle:
        """Return one tile's handle: the tokens to send to each rank."""
        is_sent_pn = self._is_sent(experts_nk)
        # nonzero orders by rank, then token. Its size is known, so nonzero_static avoids a device synchronization.
        sent_U = torch.nonzero_static(is_sent_pn.flatten(), size=sum(sizes.send_counts)).squeeze(-1)
        num_tokens = max(1, len(experts_nk))
        return _Handle(self, experts_nk, sizes, rank_U=sent_U // num_tokens, token_U=sent_U % num_tokens)

    def of_replicated(self) -> TokenDispatcher:
        """Return a dispatcher that sends no tokens: each rank computes its own experts' contribution."""
        if self.mesh.expert == 1:
            return self
        return ReplicatedTokens(self.mesh, self.experts_per_rank, self.local_experts)

    def gather(self, values_NX: Tensor) -> Tensor:
        """Gather values from all ranks in the sequence, [P, …], by context rank; equally many on each."""
        return _gather_over_context(self.mesh, values_NX)

    @property
    def _group(self) -> ProcessGroup:
        assert self.mesh.expert_group is not None
        return self.mesh.expert_group

    def _is_sent(self, experts_nk: Tensor) -> Tensor:
        """Return a mask of the tokens to send to each rank, [p, n]: those with at least one expert there."""
        rank_nk = experts_nk.div(self.experts_per_rank, rounding_mode="floor")
        is_sent = rank_nk.new_zeros(self.mesh.expert + 1, len(rank_nk), dtype=torch.bool)
        # Id −1 (no expert) yields rank −1, which the remainder maps to an extra rank that is sliced off.
        return is_sent.scatter_(0, rank_nk.T % (self.mesh.expert + 1), True)[:-1]

    def _counts(self, experts_nk: Tensor) -> Tensor:
        """Count, per rank, the tokens to send and their assignments to its experts, [p, 2]."""
        p = self.mesh.expert
        rank_R = experts_nk.div(self.experts_per_rank, rounding_mode="floor").flatten() % (p + 1)
        assignments = rank_R.new_zeros(p + 1).scatter_add_(0, rank_R, torch.ones_like(rank_R))
        return torch.stack((self._is_sent(experts_nk).sum(1), assignments[:-1]), dim=1)

    def exchange(
        self, tokens_UX: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], kind: Kind, layer: int
    ) -> PendingExchange:
        """Start the all-to-all that sends a layer's tokens to the group's ranks and receives theirs."""
        # As bytes, so that any dtype can be sent.
        return self.mesh.comm.start_all_to_all(
            rows_as_bytes(tokens_UX),
            self._group,
            operation=_OPERATIONS[kind],
            counts=(send_counts, recv_counts),
            kind=kind,
            layer=layer,
        )


class _Handle(DispatchHandle):
    """One tile's tokens during dispatch and combine over an expert group."""

    def __init__(
        self, dispatcher: AllToAllDispatcher, experts_nk: Tensor, sizes: DispatchSizes, rank_U: Tensor, token_U: Tensor
    ) -> None:
        super().__init__(experts_nk, sizes.num_assignments)
        self.dispatcher, self.sizes, self.rank_U, self.token_U = dispatcher, sizes, rank_U, token_U

    def dispatch(self, of_tokens_nX: Tensor, communication_dtype: torch.dtype) -> Pending[Tensor]:
        tokens_UX = of_tokens_nX.to(communication_dtype).index_select(0, self.token_U)
        return PendingResult(
            self._send_out(tokens_UX, Kind.TOKENS), lambda received: received.view(communication_dtype)
        )

    def dispatch_routing(self, gates_nk: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        experts_per_rank = self.dispatcher.experts_per_rank
        gates_Uk = gates_nk.index_select(0, self.token_U)
        # Ids relative to the receiver's experts; a token's experts on other ranks become −1.
        ids_Uk = self.experts_nk.index_select(0, self.token_U) - self.rank_U[:, None] * experts_per_rank
        is_local = (ids_Uk >= 0) & (ids_Uk < experts_per_rank)
        ids_Uk = ids_Uk.where(is_local, -1).to(_IDS)
        # Concatenate as bytes: one message instead of two.
        both = torch.cat((rows_as_bytes(gates_Uk), rows_as_bytes(ids_Uk)), dim=1)
        gates_bytes, dtype = both.shape[1] - _IDS.itemsize * ids_Uk.shape[1], gates_nk.dtype
        return PendingResult(
            self._send_out(both, Kind.CHOICES), lambda received: _gates_and_ids(received, gates_bytes, dtype)
        )

    def combine(self, of_tokens_SX: Tensor, communication_dtype: torch.dtype) -> Pending[Tensor]:
        send_counts, recv_counts, layer = self.sizes.send_counts, self.sizes.recv_counts, self.sizes.layer
        exchange = self.dispatcher.exchange(
            of_tokens_SX.to(communication_dtype), recv_counts, send_counts, Kind.EXPERT_SUMS, layer
        )
        token_U, choices = self.token_U, self.experts_nk.shape
        return PendingResult(
            exchange,
            lambda received: sum_expert_results(received.view(communication_dtype), token_U, send_counts, choices),
        )

    def _send_out(self, tokens_UX: Tensor, kind: Kind) -> PendingExchange:
        sizes = self.sizes
        return self.dispatcher.exchange(tokens_UX, sizes.send_counts, sizes.recv_counts, kind, sizes.layer)


@dataclass
class PendingResult(Generic[T]):
    """Messages in flight, and the function that converts them once received."""

    messages: PendingExchange
    finish: Callable[[Tensor], T]

    def wait(self) -> T:
        """Wait for the messages and return the result. Raise ClusterError if a rank died or timed out."""
        (received,) = self.messages.wait()
        return self.finish(received)


def _gates_and_ids(both: Tensor, gates_bytes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split rows that hold both as bytes into gates and local expert ids."""
    gates, ids = both.split((gates_bytes, both.shape[1] - gates_bytes), dim=1)
    # Clone: ``contiguous`` keeps the strides of an empty part unchanged.
    gates, ids = (part.clone(memory_format=torch.contiguous_format) for part in (gates, ids))
    return gates.view(dtype), ids.view(_IDS)


def sum_expert_results(results_UX: Tensor, token_U: Tensor, send_counts: Sequence[int], choices: torch.Size) -> Tensor:
    """Sum each token's results over ranks, one after another, always in rank order.

    ``choices`` is (number of tokens, experts per token).
    """
    num_tokens, experts_per_token = choices
    # A token has results from at most as many ranks as it has experts: loop over the smaller count.
    if experts_per_token < len(send_counts):
        return sum_by_turn(results_UX, token_U, num_tokens, experts_per_token)
    return sum_by_rank(results_UX, token_U, num_tokens, send_counts)


def sum_by_rank(results_UX: Tensor, token_U: Tensor, num_tokens: int, send_counts: Sequence[int]) -> Tensor:
    """Add each token's results rank by rank, [n, X] in the accumulation dtype; one call per rank."""
    sums = results_UX.new_zeros((num_tokens, *results_UX.shape[1:]), dtype=accumulate_dtype(results_UX.dtype))
    for token, results in zip(token_U.split(send_counts), results_UX.split(send_counts), strict=True):
        # A rank returns each token once, so one call adds at most once per token: additions run in rank order.
        sums.index_add_(0, token, results.to(sums.dtype))
    return sums


def sum_by_turn(results_UX: Tensor, token_U: Tensor, num_tokens: int, most: int) -> Tensor:
    """Compute ``sum_by_rank`` bitwise, with one call for all tokens' first results, one for the second, up to ``most``.

    With many ranks, one call per rank would be many calls, most with few tokens.
    """
    num_results = len(token_U)
    # Sorted by token, then rank: a result's turn is its position minus the position of its token's first result.
    token_sorted_U, order_U = torch.sort(token_U, stable=True)
    start_n = torch.searchsorted(token_sorted_U, torch.arange(num_tokens, device=token_U.device))
    position_U = torch.arange(num_results, device=token_U.device)
    turn_U = position_U - start_n[token_sorted_U]
    # A token without a result in a turn reads the zero row after the last result, so no size depends on the routing.
    result_mn = token_U.new_full((most, num_tokens), num_results)
    result_mn[turn_U, token_sorted_U] = order_U
    padded_UX = torch.cat((results_UX, results_UX.new_zeros(1, *results_UX.shape[1:])))
    sums = results_UX.new_zeros((num_tokens, *results_UX.shape[1:]), dtype=accumulate_dtype(results_UX.dtype))
    for result_n in result_mn:
        sums += padded_UX.index_select(0, result_n)
    return sums


def _gather_over_context(mesh: Mesh, values_NX: Tensor) -> Tensor:
    if mesh.context_group is None:
        return values_NX
    gathered = mesh.comm.all_gather(
        values_NX, mesh.context_group, operation="gathering expert choices", kind=Kind.GATHERED_CHOICES
    )
    return gathered.flatten(0, 1)
