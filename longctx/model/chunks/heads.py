"""``ByGroups``: values of all tokens and heads, each group of heads in a place of its own.

Chunks are read and written with all their heads, groups with all their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.model.chunks.store import Arriving, ChunkStore, Stored


class ByGroups:
    """Values [B, t, H, …] of all heads, or their gradients."""

    def __init__(self, groups: Sequence[Stored]) -> None:
        """``groups`` are equally many neighbouring heads each, in order."""
        self._groups: list[Stored | None] = list(groups)

    @classmethod
    def empty(cls, store: ChunkStore, num_tokens: int, like: Tensor, groups: int) -> ByGroups:
        """Places for so many tokens; ``like`` [B, c, H, …] are the values of a few."""
        return cls([store.empty(num_tokens, part) for part in like.chunk(groups, dim=2)])

    def write(self, tokens: slice, x: Tensor) -> None:
        """Set the values [B, c, H, …] of some tokens."""
        for group, part in zip(self._groups, x.chunk(len(self._groups), dim=2), strict=True):
            _there(group).write(tokens, part)

    def fetch(self, tokens: slice) -> _AllHeads:
        """Start to bring the values of some tokens to the device."""
        return _AllHeads([_there(group).fetch(tokens) for group in self._groups])

    def whole(self) -> _AllHeads:
        """Start to bring all values to the device."""
        return _AllHeads([_there(group).whole() for group in self._groups])

    def group(self, number: int) -> Arriving:
        """Start to bring the values [B, t, h, …] of one group to the device."""
        return _there(self._groups[number]).whole()

    @property
    def num_groups(self) -> int:
        """Groups that there are, or were."""
        return len(self._groups)

    def free(self, number: int) -> None:
        """Give back the place of one group, which nobody reads any more."""
        self._groups[number] = None


class _AllHeads:
    """Values on their way, group by group."""

    def __init__(self, groups: Sequence[Arriving]) -> None:
        self._groups = groups

    def wait(self) -> Tensor:
        parts = [group.wait() for group in self._groups]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=2)


def groups_in_turn(values: Sequence[ByGroups], *, frees: bool) -> Iterator[list[Tensor]]:
    """The values [B, t, h, …] of each group on the device, while the next group's are on their way.

    ``frees`` gives back the place of a group whose values are here: nobody reads it a second time.
    """
    arriving = [of_all.group(0) for of_all in values]
    for number in range(values[0].num_groups):
        arrived = [group.wait() for group in arriving]
        # What has arrived is held here alone.
        arriving.clear()
        for of_all in values:
            if frees:
                of_all.free(number)
        if number + 1 < values[0].num_groups:
            arriving = [of_all.group(number + 1) for of_all in values]
        yield arrived


def _there(group: Stored | None) -> Stored:
    assert group is not None, "the group's place was given back"
    return group
