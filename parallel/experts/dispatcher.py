"""Experts shared out over ranks: tokens travel to them and results back, in one all-to-all each.

A token's row goes once to each rank that has any of its experts, with the ids and gates that this rank is to use, and
comes back as one sum: no less can travel. How many rows travel depends on the routing, so ranks first tell one another,
for all tiles of a layer in one exchange.

Axes: N tokens of this rank, n of one tile, U rows of a tile that this rank sends (token and rank, by rank), S rows that
it receives, k experts a token, p ranks that share the experts, t tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.experts.dispatch import Arrival, LocalDispatcher, Trip
from parallel.mesh import Mesh
from parallel.runtime.communicate import named_collective

_IDS = torch.int16
"""As it is sent: which of a rank's experts."""


class Planned(NamedTuple):
    """How much of one tile travels."""

    rows_to: tuple[int, ...]
    """Rows that this rank sends to each rank that shares the experts, itself among them."""
    rows_from: tuple[int, ...]
    """Rows that each of them sends to it."""
    choices: int
    """Choices of the received rows that have their expert here."""


class OwnExperts(LocalDispatcher):
    """All experts are on this rank, and a part of the sequence."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def gather(self, values_NX: Tensor) -> Tensor:
        """[P, …]: these of every rank of the sequence, by context rank; as many on each."""
        return _gather_over_context(self.mesh, values_NX)


class AllToAllDispatcher:
    """Consecutive shares of a layer's experts on the ranks of the mesh's expert group."""

    travels = True

    def __init__(self, mesh: Mesh, num_experts: int) -> None:
        """ConfigError when the ranks do not divide the experts."""
        if num_experts % mesh.expert:
            raise ConfigError(
                f"parallel.expert={mesh.expert} does not divide model.num_experts={num_experts}.\n"
                f"Try one of {[n for n in range(1, num_experts + 1) if num_experts % n == 0]}."
            )
        self.mesh, self.experts_per_rank = mesh, num_experts // mesh.expert
        first = mesh.expert_rank * self.experts_per_rank
        self.share = slice(first, first + self.experts_per_rank)

    def plan(self, experts_Nk: Tensor, tiles: Sequence[slice]) -> list[Any]:
        """What will travel: one exchange among the ranks, and one wait for the device, for all tiles."""
        p, e = self.mesh.expert, self.experts_per_rank
        counts_tp2 = torch.stack([self._counts(experts_Nk[tile]) for tile in tiles])
        sent_pt2 = counts_tp2.transpose(0, 1).contiguous()
        received_pt2 = torch.empty_like(sent_pt2)
        described = f"{self._who} telling how many tokens it sends to experts"
        named_collective(
            lambda: dist.all_to_all_single(received_pt2, sent_pt2, group=self.mesh.expert_group), described
        )
        assert (p, e) == (len(sent_pt2), len(range(self.share.start, self.share.stop)))
        sent, received = torch.stack((sent_pt2, received_pt2)).transpose(1, 2).tolist()
        return [
            Planned(
                tuple(rows for rows, _ in to), tuple(rows for rows, _ in source), sum(choices for _, choices in source)
            )
            for to, source in zip(sent, received, strict=True)
        ]

    def trip(self, experts_nk: Tensor, planned: Planned) -> Trip:
        """The trip of one tile."""
        is_wanted = self._is_wanted(experts_nk)
        row_U = torch.nonzero_static(is_wanted.flatten(), size=sum(planned.rows_to)).squeeze(-1)
        return _Trip(self, experts_nk, planned, row_U // max(1, len(experts_nk)), row_U % max(1, len(experts_nk)))

    def gather(self, values_NX: Tensor) -> Tensor:
        """[P, …]: these of every rank of the sequence, by context rank; as many on each."""
        return _gather_over_context(self.mesh, values_NX)

    @property
    def _who(self) -> str:
        first = self.mesh.rank - self.mesh.expert_rank
        return f"rank {self.mesh.rank} (experts over ranks {first} to {first + self.mesh.expert - 1})"

    def _is_wanted(self, experts_nk: Tensor) -> Tensor:
        """Whether a rank has any of a token's experts, [p, n]."""
        rank_nk = experts_nk.div(self.experts_per_rank, rounding_mode="floor")  # −1 stays −1
        is_wanted = rank_nk.new_zeros(self.mesh.expert + 1, len(rank_nk), dtype=torch.bool)
        return is_wanted.scatter_(0, rank_nk.T % (self.mesh.expert + 1), True)[:-1]

    def _counts(self, experts_nk: Tensor) -> Tensor:
        """For each rank the rows that it is sent, and the choices that they make there, [p, 2]."""
        p = self.mesh.expert
        rank_R = experts_nk.div(self.experts_per_rank, rounding_mode="floor").flatten() % (p + 1)
        choices = rank_R.new_zeros(p + 1).scatter_add_(0, rank_R, torch.ones_like(rank_R))
        return torch.stack((self._is_wanted(experts_nk).sum(1), choices[:-1]), dim=1)

    def start(self, outgoing_UX: Tensor, sizes_to: Sequence[int], sizes_from: Sequence[int], what: str) -> _Coming:
        """Rows on their way to the ranks of the group and from them: as bytes, so that any dtype travels."""
        packed = outgoing_UX.contiguous().view(torch.uint8)
        arriving = packed.new_empty(sum(sizes_from), *packed.shape[1:])
        described = f"{self._who} {what}"
        work = named_collective(
            lambda: dist.all_to_all_single(
                arriving, packed, list(sizes_from), list(sizes_to), group=self.mesh.expert_group, async_op=True
            ),
            described,
        )
        return _Coming(arriving, packed, outgoing_UX.dtype, work, described)


@dataclass
class _Coming:
    """Rows in flight; keeps the outgoing ones alive until they are through."""

    arriving: Tensor
    outgoing: Tensor | None
    dtype: torch.dtype
    work: Any
    described: str

    def wait(self) -> Tensor:
        """The rows. ClusterError when a rank is gone or too late."""
        named_collective(self.work.wait, self.described)
        self.outgoing = None
        return self.arriving.view(self.dtype)


@dataclass
class _ChoicesComing:
    """Gates and ids in flight, side by side in bytes."""

    coming: _Coming
    gates_bytes: int
    dtype: torch.dtype

    def wait(self) -> tuple[Tensor, Tensor]:
        """Gates, and ids among the experts here."""
        both = self.coming.wait()
        gates, ids = both.split((self.gates_bytes, both.shape[1] - self.gates_bytes), dim=1)
        # copied, for "contiguous" leaves the strides of an empty part as they are
        gates, ids = (part.clone(memory_format=torch.contiguous_format) for part in (gates, ids))
        return gates.view(self.dtype), ids.view(_IDS)


@dataclass
class _SumsComing:
    """What each rank made of tokens, in flight."""

    coming: _Coming
    token_U: Tensor
    rows_to: tuple[int, ...]
    num_tokens: int

    def wait(self) -> Tensor:
        """Sums over ranks, always in their order: a token's rows are added one rank after another."""
        rows_UX = self.coming.wait()
        sums = rows_UX.new_zeros((self.num_tokens, *rows_UX.shape[1:]), dtype=accumulate_dtype(rows_UX.dtype))
        for token, rows in zip(self.token_U.split(self.rows_to), rows_UX.split(self.rows_to), strict=True):
            sums.index_add_(0, token, rows.to(sums.dtype))  # of one rank every token once
        return sums


@dataclass
class _Trip:
    """A tile's tokens among the ranks of an expert group."""

    by: AllToAllDispatcher
    experts_nk: Tensor
    planned: Planned
    rank_U: Tensor
    token_U: Tensor

    @property
    def num_rows(self) -> int | None:
        return self.planned.choices

    def dispatch(self, of_tokens_nX: Tensor, communication_dtype: torch.dtype) -> Arrival[Tensor]:
        rows_UX = of_tokens_nX.to(communication_dtype).index_select(0, self.token_U)
        return self.by.start(rows_UX, self.planned.rows_to, self.planned.rows_from, "sending tokens to experts")

    def dispatch_choices(self, gates_nk: Tensor) -> Arrival[tuple[Tensor, Tensor]]:
        gates_Uk = gates_nk.index_select(0, self.token_U)
        ids_Uk = self.experts_nk.index_select(0, self.token_U) - self.rank_U[:, None] * self.by.experts_per_rank
        is_there = (ids_Uk >= 0) & (ids_Uk < self.by.experts_per_rank)
        ids_Uk = ids_Uk.where(is_there, -1).to(_IDS)
        both = torch.cat((gates_Uk.view(torch.uint8), ids_Uk.view(torch.uint8)), dim=1)
        coming = self.by.start(both, self.planned.rows_to, self.planned.rows_from, "sending choices to experts")
        return _ChoicesComing(coming, both.shape[1] - _IDS.itemsize * ids_Uk.shape[1], gates_nk.dtype)

    def combine(self, of_tokens_SX: Tensor, communication_dtype: torch.dtype) -> Arrival[Tensor]:
        planned, what = self.planned, "returning what experts made of tokens"
        coming = self.by.start(of_tokens_SX.to(communication_dtype), planned.rows_from, planned.rows_to, what)
        return _SumsComing(coming, self.token_U, planned.rows_to, len(self.experts_nk))

    def bytes_sent(self, bytes_per_token: int) -> int:
        own = self.by.mesh.expert_rank
        return bytes_per_token * sum(rows for rank, rows in enumerate(self.planned.rows_to) if rank != own)


def _gather_over_context(mesh: Mesh, values_NX: Tensor) -> Tensor:
    if mesh.context_group is None:
        return values_NX
    values = values_NX.contiguous()
    everyone = values.new_empty(mesh.context * len(values), *values.shape[1:])
    named_collective(
        lambda: dist.all_gather_into_tensor(everyone, values, group=mesh.context_group),
        f"rank {mesh.rank} gathering choices of experts",
    )
    return everyone
