"""ByGroups: values for all tokens and heads, with a separate place per head group.

Chunks are read and written with all their heads, groups with all their tokens. Keys and values may have fewer heads
than there are groups; neighbouring groups then read one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.architecture.layer_specs import groups_of
from longctx.model.chunks.chunk_store import ChunkStore, PendingTensor, Stored
from longctx.model.experts.dispatch import Ready


class ByGroups:
    """Values [B, t, H, …] for all heads, or their gradients."""

    def __init__(self, groups: Sequence[Stored]) -> None:
        """Set the groups in order, each with equally many adjacent heads."""
        self._groups: list[Stored | None] = list(groups)

    @classmethod
    def empty(cls, store: ChunkStore, num_tokens: int, like: Tensor, groups: int) -> ByGroups:
        """Create places for ``num_tokens`` tokens; ``like`` [B, c, H, …] holds a few tokens' values."""
        return cls([store.empty(num_tokens, part) for part in like.chunk(groups_of(like.shape[2], groups), dim=2)])

    def write(self, tokens: slice, x: Tensor) -> None:
        """Write some tokens' values [B, c, H, …]."""
        for group, part in zip(self._groups, x.chunk(len(self._groups), dim=2), strict=True):
            _require_group(group).write(tokens, part)

    def fetch(self, tokens: slice) -> _AllHeads:
        """Start to fetch some tokens' values to the device."""
        return _AllHeads([_require_group(group).fetch(tokens) for group in self._groups])

    def whole(self) -> _AllHeads:
        """Start to fetch all values to the device."""
        return _AllHeads([_require_group(group).whole() for group in self._groups])

    def group(self, number: int, groups: int) -> PendingTensor:
        """Start to fetch the values [B, t, h, …] that group ``number`` of ``groups`` reads."""
        return _require_group(self._groups[self._place(number, groups)]).whole()

    @property
    def num_stored_groups(self) -> int:
        """Number of places, including released ones."""
        return len(self._groups)

    def is_last(self, number: int, groups: int) -> bool:
        """Return whether no group after group ``number`` of ``groups`` reads the same place."""
        return self._place(number, groups) != self._place(number + 1, groups)

    def free(self, number: int, groups: int) -> None:
        """Release the place that group ``number`` of ``groups`` has read, if no later group reads it."""
        if self.is_last(number, groups):
            self._groups[self._place(number, groups)] = None

    def _place(self, number: int, groups: int) -> int:
        return number * len(self._groups) // groups


class _AllHeads:
    """Values in flight, group by group."""

    def __init__(self, groups: Sequence[PendingTensor]) -> None:
        self._groups = groups

    def wait(self) -> Tensor:
        parts = [group.wait() for group in self._groups]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=2)


def groups_in_turn(values: Sequence[ByGroups], *, release_inputs: bool) -> Iterator[list[Tensor]]:
    """Yield each group's values [B, t, h, …] on the device, while the next group's are in flight.

    A place that several groups read is fetched once. With ``release_inputs`` it is released once its values are
    received.
    """
    groups = max(of_all.num_stored_groups for of_all in values)
    pending: list[PendingTensor] = [of_all.group(0, groups) for of_all in values]
    for number in range(groups):
        received = [group.wait() for group in pending]
        # Pending results hold their values too: drop them here.
        pending.clear()
        for of_all in values:
            if release_inputs:
                of_all.free(number, groups)
        if number + 1 < groups:
            pending = [
                of_all.group(number + 1, groups) if of_all.is_last(number, groups) else Ready(tensor)
                for of_all, tensor in zip(values, received, strict=True)
            ]
        yield received


def _require_group(group: Stored | None) -> Stored:
    assert group is not None, "the group's buffer was already released"
    return group
