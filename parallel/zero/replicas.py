"""Checks that ranks with the same weights hold the same bits, and that a rank's own state stays as it was left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.model.experts.experts import is_expert_weight
from parallel.comm.communicator import Communicator
from parallel.comm.groups import world_group
from parallel.comm.messages.sums import Sum, bit_sum, mixed, stacked
from parallel.comm.world import gather_objects, num_ranks
from parallel.zero.engine import ZeroEngine

BUFFER = "buffer"
"""The role of what is no parameter."""


class Part(NamedTuple):
    """Tensor, or a range of it, that a rank holds."""

    name: str
    role: str
    """Master, moment, weight of forward or buffer."""
    start: int = 0
    """The range's first value in the whole tensor."""

    def describe(self) -> str:
        """Return it as text, for a message."""
        return f"{self.name} ({self.role})"


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Tensor of which some rank holds other bits than it should."""

    part: Part
    ranks: tuple[int, ...]
    """Those that are wrong; where it is not ``decided``, all that disagree."""
    decided: bool
    """Whether the others are a majority, or the rank differs from its own past."""
    own: bool = False
    """Whether the rank differs from its own past, and no other rank has the tensor."""


class Replicas:
    """Sums of tensors that ranks share, to compare over ranks; and of a rank's own, to compare with later."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine
        self._device: torch.device = engine.partition.engine.device
        self._remembered: list[tuple[Part, Sum]] = []

    def remember(self) -> None:
        """Note the sums of the masters, moments and buffers that this rank answers for. No host sync on a GPU.

        They must not be written to until ``forget``.
        """
        self._remembered = self._own()

    def forget(self) -> None:
        """Drop the noted sums: the next update writes to the tensors."""
        self._remembered = []

    @property
    def own_sums(self) -> list[Sum]:
        """Noted sums, in the order of ``ZeroEngine.owned_pieces``; empty if there are none."""
        return [total for _, total in self._remembered]

    def compare(self) -> list[Odd]:
        """Return the tensors that differ between ranks that should agree, or since ``remember``. Collective.

        The result is the same on every rank, and empty if all is well.
        """
        alike = self._alike()
        own_parts = [part for part, _ in self._remembered]
        changed = torch.zeros((), dtype=torch.int64, device=self._device)
        is_changed = torch.zeros(0, dtype=torch.bool)
        if own_parts:
            now = [total for _, total in self._own()]
            # On the device: the host reads the number of them with everything else.
            is_changed = self._stacked(now) != self._stacked(self.own_sums)
            changed = is_changed.sum()
        # Experts are compared among fewer ranks than all other weights are.
        shared = {part: total for part, total in alike.items() if not self._is_expert(part)}
        experts = {part: total for part, total in alike.items() if self._is_expert(part)}
        mine = torch.stack((self._digest(shared), self._digest(experts), changed))
        seen_r3 = _of_ranks(mine)
        if self._agree(seen_r3):
            return []
        # Names are sent only once something differs.
        own = [part for part, one in zip(own_parts, is_changed.tolist(), strict=True) if one]
        odd_own = _odd_own(gather_objects(own))
        # A tensor that differs from its own past needs no majority, and is reported once.
        known: dict[str, set[int]] = {}
        for odd in odd_own:
            known.setdefault(odd.part.name, set()).update(odd.ranks)
        odd_alike = self._odd_alike(alike)
        return odd_own + [odd for odd in odd_alike if not _is_known(odd, known.get(odd.part.name, set()))]

    def _agree(self, seen_r3: Sequence[Sequence[int]]) -> bool:
        """Return whether all ranks with the same weights have the same sums, and none has changed by itself."""
        degree = self._expert_degree
        for rank, (shared, experts, changed) in enumerate(seen_r3):
            if changed or shared != seen_r3[0][0] or experts != seen_r3[rank % degree][1]:
                return False
        return True

    @property
    def _expert_degree(self) -> int:
        """Number of ranks over which the experts are spread: every so many ranks hold the same ones."""
        experts = self.engine.tensors.experts
        if experts is None:
            return 1
        return experts.ep_size

    def _is_expert(self, part: Part) -> bool:
        return self._expert_degree > 1 and is_expert_weight(part.name)

    def _alike(self) -> dict[Part, Sum]:
        """Return the sums of all tensors that other ranks should hold with the same bits, in the model's order."""
        partition, decoder = self.engine.partition, self.engine.model.network
        found = {}
        # Buffers first, then parameters: their places are in the sums, so the order is the same on all ranks.
        for name, buffer in decoder.named_buffers():
            found[Part(name, BUFFER)] = bit_sum([buffer.contiguous()])
        for name, p in decoder.named_parameters():
            for role, values in partition.alike(name, p).items():
                found[Part(name, role)] = bit_sum([values.contiguous()])
        return found

    def _own(self) -> list[tuple[Part, Sum]]:
        """Return the parts that this rank answers for, and their sums."""
        return [
            (Part(name, role, start), bit_sum([values.contiguous()]))
            for name, role, start, values in self.engine.owned_ranges()
        ]

    def _stacked(self, sums: Sequence[Sum]) -> Tensor:
        if not sums:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return stacked(sums, self._device)

    def _digest(self, sums: dict[Part, Sum]) -> Tensor:
        """Return one number for all sums, which are in the same order on every rank."""
        values = self._stacked(list(sums.values()))
        return mixed(values + mixed(torch.arange(1, len(sums) + 1, device=self._device))).sum()

    def _odd_alike(self, alike: dict[Part, Sum]) -> list[Odd]:
        """Return by tensor the ranks that differ from the others that hold it. Collective."""
        degree, found = self._expert_degree, []
        of_ranks = gather_objects({part: int(total) for part, total in alike.items()})
        for part in of_ranks[0]:
            groups = [range(len(of_ranks))]
            # Neighbours hold different experts: every so many ranks hold the same.
            if self._is_expert(part):
                groups = [range(first, len(of_ranks), degree) for first in range(degree)]
            found.extend(odd for group in groups for odd in judge(part, {rank: of_ranks[rank][part] for rank in group}))
        return found


def judge(part: Part, sums: dict[int, int]) -> Iterable[Odd]:
    """Yield the ranks that hold other bits of a tensor than the majority; all of them if there is none."""
    counts = Counter(sums.values())
    if len(counts) == 1:
        return
    # More than half, not only the most common: two that are wrong in the same way outnumber one that is right.
    usual, count = counts.most_common(1)[0]
    if 2 * count > len(sums):
        yield Odd(part=part, ranks=tuple(rank for rank, total in sums.items() if total != usual), decided=True)
    else:
        yield Odd(part=part, ranks=tuple(sums), decided=False)


def _is_known(odd: Odd, changed: set[int]) -> bool:
    """Return whether ranks that have ``changed`` by themselves explain it."""
    if odd.decided:
        return set(odd.ranks) <= changed
    return bool(changed)


def _odd_own(of_ranks: Sequence[Sequence[Part]]) -> list[Odd]:
    return [
        Odd(part=part, ranks=(rank,), decided=True, own=True) for rank, parts in enumerate(of_ranks) for part in parts
    ]


def _of_ranks(mine: Tensor) -> list[list[int]]:
    """Return every rank's numbers. Waits for the device."""
    if num_ranks() == 1:
        return [mine.tolist()]
    doing = "comparing weights with the other ranks"
    return Communicator().all_gather(mine, world_group(), doing=doing).tolist()
