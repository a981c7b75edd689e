"""Verification that replicas are bitwise equal across ranks, and that a rank's own state has not changed since it was
written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.model.experts.experts import is_expert_weight
from parallel.comm.communicator import Communicator
from parallel.comm.messages.message_checksum import Sum, bit_sum, mixed, stacked
from parallel.comm.process_groups import world_group
from parallel.comm.world import gather_objects, num_ranks
from parallel.zero.zero_engine import ZeroEngine

BUFFER = "buffer"
"""Role for buffers, which are not parameters."""


class TensorPart(NamedTuple):
    """Tensor, or a range in it, that a rank holds."""

    name: str
    role: str
    """Master, moment, weight of forward or buffer."""
    start: int = 0
    """First value in the full tensor."""

    def describe(self) -> str:
        """Return a short text for messages."""
        return f"{self.name} ({self.role})"


@dataclass(frozen=True, kw_only=True)
class MismatchedTensor:
    """Tensor with unexpected bits on some rank."""

    part: TensorPart
    ranks: tuple[int, ...]
    """Wrong ranks; if not ``decided``, all ranks that disagree."""
    decided: bool
    """True if the other ranks are a majority, or the rank mismatches its own earlier checksum."""
    own: bool = False
    """True if the rank mismatches its own earlier checksum, and no other rank has the tensor."""


class Replicas:
    """Checksums for replicated tensors, compared over ranks, and for a rank's own tensors, compared over time."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine
        self._device: torch.device = engine.partition.engine.device
        self._stored: list[tuple[TensorPart, Sum]] = []

    def store_sums(self) -> None:
        """Store checksums for the masters, moments and buffers that this rank owns. No host sync on a GPU.

        They must not be written to until ``clear_sums``.
        """
        self._stored = self._own()

    def clear_sums(self) -> None:
        """Drop the stored checksums: the next update writes to the tensors."""
        self._stored = []

    @property
    def own_sums(self) -> list[Sum]:
        """Stored checksums, in the order of ``ZeroEngine.owned_pieces``; empty if not stored."""
        return [total for _, total in self._stored]

    def compare(self) -> list[MismatchedTensor]:
        """Return tensors that mismatch between replicas, or since ``store_sums``. Collective.

        The result is equal on every rank, and empty if all tensors match.
        """
        replicated = self._replica_checksum_table()
        own_parts = [part for part, _ in self._stored]
        changed = torch.zeros((), dtype=torch.int64, device=self._device)
        is_changed = torch.zeros(0, dtype=torch.bool)
        if own_parts:
            now = [total for _, total in self._own()]
            # Stay on the device: the host reads the count together with the digests.
            is_changed = self._stacked(now) != self._stacked(self.own_sums)
            changed = is_changed.sum()
        # Experts have fewer replicas than all other weights, so compare them separately.
        shared = {part: total for part, total in replicated.items() if not self._is_expert(part)}
        experts = {part: total for part, total in replicated.items() if self._is_expert(part)}
        mine = torch.stack((self._digest(shared), self._digest(experts), changed))
        seen_r3 = _of_ranks(mine)
        if self._all_match(seen_r3):
            return []
        # Names are exchanged only after a mismatch.
        own = [part for part, one in zip(own_parts, is_changed.tolist(), strict=True) if one]
        odd_own = _odd_own(gather_objects(own))
        # A tensor that mismatches its own earlier checksum needs no majority, and is reported once.
        known: dict[str, set[int]] = {}
        for odd in odd_own:
            known.setdefault(odd.part.name, set()).update(odd.ranks)
        mismatched = self._mismatched_replicas(replicated)
        return odd_own + [odd for odd in mismatched if not _is_known(odd, known.get(odd.part.name, set()))]

    def _all_match(self, seen_r3: Sequence[Sequence[int]]) -> bool:
        """Return True if all replicas have equal checksums, and no rank's own state has changed."""
        degree = self._expert_degree
        for rank, (shared, experts, changed) in enumerate(seen_r3):
            if changed or shared != seen_r3[0][0] or experts != seen_r3[rank % degree][1]:
                return False
        return True

    @property
    def _expert_degree(self) -> int:
        """Number of ranks over which experts are sharded: ranks with equal remainder hold the same ones."""
        experts = self.engine.tensors.experts
        if experts is None:
            return 1
        return experts.ep_size

    def _is_expert(self, part: TensorPart) -> bool:
        return self._expert_degree > 1 and is_expert_weight(part.name)

    def _replica_checksum_table(self) -> dict[TensorPart, Sum]:
        """Return checksums for all tensors that other ranks should hold with equal bits, in model order."""
        partition, decoder = self.engine.partition, self.engine.model.network
        found = {}
        # Buffers first, then parameters: the digest includes positions, so the order must be equal on all ranks.
        for name, buffer in decoder.named_buffers():
            found[TensorPart(name, BUFFER)] = bit_sum([buffer.contiguous()])
        for name, p in decoder.named_parameters():
            for role, values in partition.replicated_tensors(name, p).items():
                found[TensorPart(name, role)] = bit_sum([values.contiguous()])
        return found

    def _own(self) -> list[tuple[TensorPart, Sum]]:
        """Return the parts that this rank owns, with their checksums."""
        return [
            (TensorPart(name, role, start), bit_sum([values.contiguous()]))
            for name, role, start, values in self.engine.owned_ranges()
        ]

    def _stacked(self, sums: Sequence[Sum]) -> Tensor:
        if not sums:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return stacked(sums, self._device)

    def _digest(self, sums: dict[TensorPart, Sum]) -> Tensor:
        """Reduce all checksums, which are in the same order on every rank, to one number."""
        values = self._stacked(list(sums.values()))
        return mixed(values + mixed(torch.arange(1, len(sums) + 1, device=self._device))).sum()

    def _mismatched_replicas(self, checksum_table: dict[TensorPart, Sum]) -> list[MismatchedTensor]:
        """Return, by tensor, the ranks that mismatch the other replicas. Collective."""
        degree, found = self._expert_degree, []
        of_ranks = gather_objects({part: int(total) for part, total in checksum_table.items()})
        for part in of_ranks[0]:
            groups = [range(len(of_ranks))]
            # Neighbours hold different experts: replicas are ``degree`` ranks apart.
            if self._is_expert(part):
                groups = [range(first, len(of_ranks), degree) for first in range(degree)]
            found.extend(
                odd for group in groups for odd in find_odd_ranks(part, {rank: of_ranks[rank][part] for rank in group})
            )
        return found


def find_odd_ranks(part: TensorPart, sums: dict[int, int]) -> Iterable[MismatchedTensor]:
    """Yield the ranks whose checksum mismatches the majority; all of them without a majority."""
    counts = Counter(sums.values())
    if len(counts) == 1:
        return
    # A strict majority, not only the most common value: two ranks with the same error would outnumber one correct rank.
    majority, count = counts.most_common(1)[0]
    if 2 * count > len(sums):
        yield MismatchedTensor(
            part=part, ranks=tuple(rank for rank, total in sums.items() if total != majority), decided=True
        )
    else:
        yield MismatchedTensor(part=part, ranks=tuple(sums), decided=False)


def _is_known(odd: MismatchedTensor, changed: set[int]) -> bool:
    """Return True if ranks whose own state has changed explain the mismatch."""
    if odd.decided:
        return set(odd.ranks) <= changed
    return bool(changed)


def _odd_own(of_ranks: Sequence[Sequence[TensorPart]]) -> list[MismatchedTensor]:
    return [
        MismatchedTensor(part=part, ranks=(rank,), decided=True, own=True)
        for rank, parts in enumerate(of_ranks)
        for part in parts
    ]


def _of_ranks(mine: Tensor) -> list[list[int]]:
    """Return every rank's numbers. Synchronizes with the device."""
    if num_ranks() == 1:
        return [mine.tolist()]
    operation = "comparing weights across ranks"
    return Communicator().all_gather(mine, world_group(), operation=operation).tolist()
